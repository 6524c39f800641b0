"""An idle agent: reads and writes per minute, and reaction time to a claim.

The real agent runs against a real server in a process whose clock and event loop timers are accelerated.
"""

from __future__ import annotations

import asyncio
import selectors
import sys
import time
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from benchmarks.agents import BenchmarkMachine, agent, agent_store
from benchmarks.environment import SCOPE, BenchmarkEnvironment, BenchmarkPool, fresh_report, idle, watch_requests
from benchmarks.figures import Figure, Results, percentile, timed
from benchmarks.floor import Floor
from benchmarks.json_lines import json_process, respond
from remuda.adapters.aws.calls import DYNAMODB
from remuda.adapters.aws.clients import AwsClients, config
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.domain.instance import Assignment, Credential, Instance
from remuda.domain.transitions import Actor, Change, Claim, advance
from remuda.ports.poll_intervals import CONTROL, WARM_FOR_S
from tests.support.records import run_holder

#: Limits per minute, for the first ten minutes in the pool and later.
READS_LIMIT = 250
LATER_READS_LIMIT = 130
WRITES_LIMIT = 12
REACTION_LIMIT_S = 0.3

#: Acceleration of the clock.
SPEED = 20.0
MINUTE_S = 60.0
#: Agents measured at the same time, and their maximum wait in seconds for a claim.
GROUP = 10
WAIT_S = 0.6
READS = frozenset({"GetItem", "BatchGetItem"})
WRITES = frozenset({"UpdateItem", "PutItem"})


async def run(environment: BenchmarkEnvironment, floor: Floor) -> Results:
    return Results(figures=(*await minutes(environment), await reactions(environment, floor)))


# Calls per minute -------------------------------------------------------------------------------------------------


async def minutes(environment: BenchmarkEnvironment) -> list[Figure]:
    await environment.clear()
    pool = await environment.pool()
    record = idle(1)
    await pool.write([record], [fresh_report(record)])
    counted = await _count_calls(pool, record.instance_id, environment.size.idle_min)
    boundary = WARM_FOR_S / MINUTE_S
    # The minute at the boundary belongs to neither.
    first = [each for minute, each in enumerate(counted) if minute < boundary]
    later = [each for minute, each in enumerate(counted) if minute > boundary]
    figures = [
        _figure("reads per minute, first ten minutes", "86", READS_LIMIT, [each["reads"] for each in first]),
        _figure("writes per minute", "10", WRITES_LIMIT, [each["writes"] for each in counted]),
    ]
    if later:
        figures.append(_figure("reads per minute, later", "86", LATER_READS_LIMIT, [each["reads"] for each in later]))
    return figures


def _figure(label: str, predecessor: str, limit: float, counts: list[int]) -> Figure:
    return Figure(
        f"idle agent: {label}", "calls", max(counts), limit=limit, predecessor=predecessor, samples=len(counts)
    )


async def _count_calls(pool: BenchmarkPool, instance_id: str, minutes: float) -> list[dict[str, int]]:
    arguments = (pool.name, pool.prefix, instance_id, f"{minutes:g}")
    async with json_process("benchmarks.idle_agent", *arguments) as process:
        found: list[dict[str, int]] = process.ready["minutes"]
    return found


class FastSelector(selectors.DefaultSelector):
    """Selector with shortened timeouts."""

    def select(self, timeout: float | None = None) -> Any:
        return super().select(None if timeout is None else timeout / SPEED)


class FastLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__(FastSelector())

    def time(self) -> float:
        return super().time() * SPEED


class FastClock(SystemClock):
    def __init__(self) -> None:
        self._began, self._began_at = time.monotonic(), datetime.now(UTC)  # noqa: TID251 - implements a clock

    def now(self) -> datetime:
        return self._began_at + timedelta(seconds=(time.monotonic() - self._began) * SPEED)

    def monotonic(self) -> float:
        return time.monotonic() * SPEED


async def count_calls(pool: str, prefix: str, instance_id: str, minutes: float) -> list[dict[str, int]]:
    """Run an agent and count its reads and writes, minute by minute."""
    clock, seen = FastClock(), Counter[tuple[int, str]]()
    settings = replace(config(read_timeout_s=30 * SPEED), connect_timeout_s=10 * SPEED)
    async with AwsClients() as clients:
        client = await clients.service("dynamodb", DYNAMODB, settings)
        store = agent_store(client, pool, prefix, clock)
        accelerated = agent(store, BenchmarkMachine(instance_id, pool), clock=clock)
        began = clock.monotonic()

        def count(_service: str, operation: str) -> None:
            minute = int((clock.monotonic() - began) // MINUTE_S)
            if operation in READS | WRITES:
                seen[minute, "reads" if operation in READS else "writes"] += 1

        watch_requests(client, count)
        running = asyncio.create_task(accelerated.run())
        await asyncio.sleep(minutes * MINUTE_S)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await store.close()
    whole = max(1, int(minutes))
    return [{kind: seen[minute, kind] for kind in ("reads", "writes")} for minute in range(whole)]


# Reactions --------------------------------------------------------------------------------------------------------


async def reactions(environment: BenchmarkEnvironment, floor: Floor) -> Figure:
    """Measure the time from a written claim until its agent starts the registration."""
    await environment.clear()
    floor_s = await floor.seconds({"get": 1})
    pool = await environment.pool()
    samples: list[float] = []
    while len(samples) < environment.size.reactions:
        samples += await _group(environment, pool, len(samples))
    return timed(
        *("idle agent: reaction to a claim, p95", percentile(samples, 0.95)),
        limit=REACTION_LIMIT_S,
        predecessor="~1 s",
        floor=floor_s,
        wait_s=CONTROL.first_s,
        samples=len(samples),
    )


async def _group(environment: BenchmarkEnvironment, pool: BenchmarkPool, first: int) -> list[float]:
    records = [idle(first + number) for number in range(min(GROUP, environment.size.reactions))]
    await pool.write(records, [fresh_report(record) for record in records])
    await pool.start_agents([record.instance_id for record in records])
    clock, ids, written = SystemClock(), SystemIds(), {}
    async with pool.context() as context:
        await clock.sleep(WAIT_S)

        async def claim(number: int) -> None:
            await clock.sleep(WAIT_S * ids.jitter())
            claimed = await context.store.apply(_claim(records[number]))
            assert claimed.assignment is not None  # noqa: S101 - set by the claim
            written[claimed.assignment.runner_name] = clock.monotonic()

        await asyncio.gather(*(claim(number) for number in range(len(records))))
        await clock.sleep(WAIT_S)
    began = (await environment.agents.times())["registered"]
    await environment.clear()
    # An agent may read the claim before the response arrives here.
    return [max(0.0, began[name] - written[name]) for name in written if name in began]


def _claim(record: Instance) -> Change:
    now = SystemClock().now()
    credential = Credential(token="none", expires_at=now + timedelta(hours=1))  # noqa: S106 - never used
    event = Claim(
        holder=run_holder("1"),
        claim="p-1/w-1",
        scope=SCOPE,
        tier=record.tier,
        threshold=now + timedelta(minutes=5),
        assignment=Assignment(url="", runner_name=record.instance_id, labels=(), credential=credential),
        margin_s=1.0,
    )
    return advance(record, event, by=Actor.PROVISION, now=now, why="benchmark")


if __name__ == "__main__":
    name, key_prefix, instance_id, minutes_text = sys.argv[1:]
    with asyncio.Runner(loop_factory=FastLoop) as runner:
        counted = runner.run(count_calls(name, key_prefix, instance_id, float(minutes_text)))
    respond({"minutes": counted})
