"""An agent in the pool that nobody asks for anything: what it reads and writes in a minute, and how soon it notices.

The counts are of the real agent at a real server, in a process whose time runs faster: all timers of its event loop do,
and its clock with them.
"""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import sys
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

from benchmarks.agents import IdleMachine, TimedRunner
from benchmarks.figures import Figure, Kind, Results, percentile
from benchmarks.floor import Floor
from benchmarks.world import SCOPE, Pool, World, beating, idle
from remuda.adapters.aws.clients import AwsClients, config
from remuda.adapters.aws.dynamodb.polling import CONTROL, WARM_FOR_S
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.aws.errors import DYNAMODB
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.agent.loop import Agent
from remuda.domain.instance import Assignment, Credential, Instance
from remuda.domain.transitions import Actor, Change, Claim, advance
from remuda.ports.calls import CallCounter
from remuda.ports.event_log import SilentEventLog

#: In a minute, while it is fresh in the pool and later.
READS_MOST = 250
LATE_READS_MOST = 130
WRITES_MOST = 12
REACTION_MOST_S = 0.3

#: How much faster than the real time it lives.
SPEED = 20.0
MINUTE_S = 60.0
#: Agents that are watched at the same time for their reactions, and how long they wait at most for a claim.
GROUP = 10
WAIT_S = 0.6
READS = frozenset({"GetItem", "BatchGetItem"})
WRITES = frozenset({"UpdateItem", "PutItem"})


async def run(world: World, floor: Floor) -> Results:
    return await minutes(world) + await reactions(world, floor)


# A life in minutes ------------------------------------------------------------------------------------------------


async def minutes(world: World) -> Results:
    await world.clear()
    pool = await world.pool()
    record = idle(1)
    await pool.write([record], [beating(record)])
    counted = await _fast_life(pool, record.instance_id, world.size.idle_min)
    fresh_for = WARM_FOR_S / MINUTE_S
    # The first minute after ten is still partly fresh.
    fresh = [each for minute, each in enumerate(counted) if minute < fresh_for]
    late = [each for minute, each in enumerate(counted) if minute > fresh_for]
    figures = [
        _figure("reads in a minute, first ten minutes", "86", READS_MOST, [each["reads"] for each in fresh]),
        _figure("writes in a minute", "10", WRITES_MOST, [each["writes"] for each in counted]),
    ]
    if late:
        figures.append(_figure("reads in a minute, later", "86", LATE_READS_MOST, [each["reads"] for each in late]))
    return Results(figures=tuple(figures))


def _figure(what: str, before: str, most: float, counts: list[int]) -> Figure:
    return Figure(
        name=f"idle agent: {what}",
        unit="calls",
        before=before,
        most=most,
        ours=max(counts),
        kind=Kind.COUNT,
        samples=len(counts),
    )


async def _fast_life(pool: Pool, instance_id: str, minutes: float) -> list[dict[str, int]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.idle_agent", pool.name, pool.prefix, instance_id, f"{minutes:g}"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env=dict(os.environ),
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError("the agent whose time runs faster has failed")
    found: list[dict[str, int]] = json.loads(said)
    return found


class FastSelector(selectors.DefaultSelector):
    """Waits a part of the time."""

    def select(self, timeout: float | None = None) -> Any:
        return super().select(None if timeout is None else timeout / SPEED)


class FastLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__(FastSelector())

    def time(self) -> float:
        return super().time() * SPEED


class FastClock(SystemClock):
    def __init__(self) -> None:
        self._began, self._began_at = time.monotonic(), datetime.now(UTC)  # noqa: TID251 - the clock's own

    def now(self) -> datetime:
        return self._began_at + timedelta(seconds=(time.monotonic() - self._began) * SPEED)

    def monotonic(self) -> float:
        return time.monotonic() * SPEED


async def live(pool: str, prefix: str, instance_id: str, minutes: float) -> list[dict[str, int]]:
    """Reads and writes, minute by minute."""
    clock, seen = FastClock(), Counter[tuple[int, str]]()
    settings = config(read_timeout_s=30 * SPEED)
    settings.connect_timeout = 10 * SPEED  # type: ignore[attr-defined]  # botocore makes it from its options
    async with AwsClients() as clients:
        client = await clients.client("dynamodb", DYNAMODB, settings)
        store = DynamoInstanceStore(
            client=client,
            table=f"remuda-{pool}",
            clock=clock,
            ids=SystemIds(),
            calls=CallCounter(),
            key_prefix=prefix,
        )
        agent = Agent(
            store=store,
            machine=IdleMachine(instance_id, pool),
            runner=TimedRunner(0.0, {}),
            clock=clock,
            ids=SystemIds(),
            event_log=SilentEventLog(),
            version="1",
        )
        began = clock.monotonic()

        def sent(event_name: str, **_: Any) -> None:
            operation = event_name.rpartition(".")[2]
            minute = int((clock.monotonic() - began) // MINUTE_S)
            if operation in READS | WRITES:
                seen[minute, "reads" if operation in READS else "writes"] += 1

        client.meta.events.register("before-send", sent)
        living = asyncio.create_task(agent.run())
        await asyncio.sleep(minutes * MINUTE_S)
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
        await store.close()
    whole = max(1, int(minutes))
    return [{kind: seen[minute, kind] for kind in ("reads", "writes")} for minute in range(whole)]


# Reactions --------------------------------------------------------------------------------------------------------


async def reactions(world: World, floor: Floor) -> Results:
    """From a claim that is written to an agent that begins with it."""
    await world.clear()
    least = await floor.seconds({"get": 1})
    pool = await world.pool()
    samples: list[float] = []
    while len(samples) < world.size.reactions:
        samples += await _group(world, pool, len(samples))
    return Results(
        figures=(
            Figure(
                name="idle agent: reaction to a claim, p95",
                unit="s",
                before="~1 s",
                most=REACTION_MOST_S,
                ours=round(percentile(samples, 0.95), 4),
                kind=Kind.TIME,
                floor=least,
                floor_with_waits=least + CONTROL.first_s,
                samples=len(samples),
            ),
        )
    )


async def _group(world: World, pool: Pool, first: int) -> list[float]:
    herd = [idle(first + number) for number in range(min(GROUP, world.size.reactions))]
    await pool.write(herd, [beating(record) for record in herd])
    await pool.follow([record.instance_id for record in herd])
    clock, ids, written = SystemClock(), SystemIds(), {}
    async with pool.context() as context:
        await clock.sleep(WAIT_S)

        async def take(number: int) -> None:
            await clock.sleep(WAIT_S * ids.jitter())
            claimed = await context.store.apply(_claim(herd[number]))
            assert claimed.assignment is not None  # noqa: S101 - it was given one
            written[claimed.assignment.runner_name] = clock.monotonic()

        await asyncio.gather(*(take(number) for number in range(len(herd))))
        await clock.sleep(WAIT_S)
    asked = await world.agents.asked()
    await world.clear()
    # An agent may have read it before the answer was here.
    return [max(0.0, asked[name] - written[name]) for name in written if name in asked]


def _claim(record: Instance) -> Change:
    now = SystemClock().now()
    credential = Credential(token="none", expires_at=now + timedelta(hours=1))  # noqa: S106 - nobody asks for it
    event = Claim(
        run_id="1",
        owner="p-1/w-1",
        provision_id="p-1",
        scope=SCOPE,
        tier=record.tier,
        threshold=now + timedelta(minutes=5),
        assignment=Assignment(url="", runner_name=record.instance_id, labels=(), credential=credential),
        margin_s=1.0,
    )
    return advance(record, event, by=Actor.PROVISION, now=now, why="a benchmark")


if __name__ == "__main__":
    name, key_prefix, machine, lived = sys.argv[1:]
    with asyncio.Runner(loop_factory=FastLoop) as runner:
        counted = runner.run(live(name, key_prefix, machine, float(lived)))
    sys.stdout.write(json.dumps(counted))
