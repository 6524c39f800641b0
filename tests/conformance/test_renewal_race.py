"""A claim and a renewal race for the same instances, in real processes: one of them loses cleanly, every time.

Started as a script, this file is one of the processes; it is told to begin by a line on stdin.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from remuda.adapters.aws.clients import AwsClients, config
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.sqlite.store import SqliteInstanceStore
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.controlplane.context import Context, map_concurrently
from remuda.controlplane.scale_down import FleetContext, scale_down
from remuda.domain.errors import Conflict
from remuda.domain.instance import Instance, State
from remuda.domain.scale_down.cron import parse_cron
from remuda.domain.scale_down.decisions import ScaleDownPolicy
from remuda.domain.scale_down.idle_config import IdleWindow
from remuda.domain.transitions import Actor, Claim, advance
from remuda.ports.calls import CallCounter
from remuda.ports.event_log import SilentEventLog
from remuda.ports.store import InstanceStore
from simulation.memory.compute import MemoryCloud, MemoryCompute
from simulation.memory.fleet import MemoryFleet, MemoryMachines
from simulation.memory.pool import MemoryQueues, MemoryResourcePool
from tests.support.fleets import Hub
from tests.support.records import LONG_S, assignment, birth, instance, instance_id, pool_config

ITEMS = 120
POOL = "test"


@asynccontextmanager
async def open_store(where: str) -> AsyncIterator[InstanceStore]:
    kind, _, place = where.partition(":")
    async with AsyncExitStack() as stack:
        clock, ids, calls = SystemClock(), SystemIds(), CallCounter()
        store: InstanceStore
        if kind == "sqlite":
            # One who holds the lock may stand still for a while.
            store = SqliteInstanceStore(path=Path(place), clock=clock, ids=ids, calls=calls, busy_timeout_s=LONG_S)
        else:
            clients = await stack.enter_async_context(AwsClients())
            # The server, too, may stand still for a while: that is no answer that was lost.
            client = await clients.client("dynamodb", "DynamoDB", config(read_timeout_s=LONG_S))
            store = DynamoInstanceStore(client=client, table=place, clock=clock, ids=ids, calls=calls)
        stack.push_async_callback(store.close)
        yield store


@pytest.fixture(params=["sqlite", "dynamodb"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'remuda.db'}"
    request.getfixturevalue("server")
    return f"dynamodb:{request.getfixturevalue('table_name')}"


def idle_record(number: int) -> Instance:
    now = datetime.now(UTC).replace(microsecond=0)  # noqa: TID251 - the processes have the real clock
    return instance(number, threshold=now + timedelta(minutes=3), created_at=now - timedelta(minutes=number))


async def start(where: str, role: str) -> Process:
    root = Path(__file__).parents[2]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, where, role),
        stdin=PIPE,
        stdout=PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
        limit=2**24,
    )
    assert await heard(process) == "ready"
    return process


async def heard(process: Process) -> Any:
    assert process.stdout is not None
    line = await process.stdout.readline()
    assert line, "the process ended without a word; its stderr says why"
    return json.loads(line)


async def test_one_of_them_loses_cleanly(place: str) -> None:
    async with open_store(place) as store:
        await store.prepare()
        await store.put_config(pool_config())
        born = await map_concurrently(range(ITEMS), lambda number: store.apply(birth(idle_record(number))))
        before = {record.instance_id: record for record in born if isinstance(record, Instance)}
        assert len(before) == ITEMS
        async with asyncio.timeout(4 * LONG_S):
            racers = await asyncio.gather(start(place, "claim"), start(place, "renew"), start(place, "renew"))
            for racer in racers:
                assert racer.stdin is not None
                racer.stdin.write(b"go\n")
            claimed, *renewed = [await heard(racer) for racer in racers]
            assert [await racer.wait() for racer in racers] == [0] * len(racers)

        records = await store.get_many(list(before))
        # Every claim was won: a renewal takes nothing from it.
        assert claimed == sorted(before)
        for name, record in records.items():
            assert (record.state, record.epoch, record.owner) == (State.CLAIMED, 2, "p-1/w")
            assert record.threshold == before[name].threshold + timedelta(minutes=9)
            story = [entry.transition for entry in await store.history(name)]
            assert story[0] == "birth"
            assert story[-1] == "claim", "no renewal came after the claim"
            assert set(story[1:-1]) <= {"renew"}
        for told in renewed:
            assert not told["errors"]
            assert set(told["reasons"].values()) <= {"kept", "moved on"}


# What the processes do --------------------------------------------------------------------------------------------


def say(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def claim_all(store: InstanceStore) -> Any:
    won = []
    clock = SystemClock()
    for number in reversed(range(ITEMS)):
        record = await store.get(instance_id(number))
        assert record is not None
        # As a provision does it: the message's epoch is all that it knows.
        threshold = record.created_at + timedelta(minutes=number + 12)
        event = Claim(
            run_id="1",
            owner="p-1/w",
            provision_id="p-1",
            scope="octo/repo",
            tier=record.tier,
            threshold=threshold,
            assignment=assignment(2),
            margin_s=1.0,
        )
        change = advance(record, event, by=Actor.PROVISION, now=clock.now(), why="picked from the pool")
        try:
            won.append((await store.apply(change)).instance_id)
        except Conflict:
            continue
    return sorted(won)


async def renew_all(store: InstanceStore) -> Any:
    clock, ids, calls = SystemClock(), SystemIds(), CallCounter()
    pool = Context(
        pool_name=POOL,
        store=store,
        pool=MemoryResourcePool(clock=clock, ids=ids, calls=calls, queues=MemoryQueues(clock=clock)),
        compute=MemoryCompute(cloud=MemoryCloud(clock=clock), pool=POOL, calls=calls),
        github=None,
        clock=clock,
        ids=ids,
        event_log=SilentEventLog(),
        calls=calls,
    )

    @asynccontextmanager
    async def open_pool() -> AsyncIterator[Context]:
        yield pool

    fleet = FleetContext(
        environment=POOL,
        fleet=MemoryFleet(machines=MemoryMachines(), environment=POOL, calls=calls),
        github=Hub(),
        clock=clock,
        event_log=SilentEventLog(),
        calls=calls,
        open_pool=open_pool,
        has_pool=True,
    )
    always = IdleWindow(cron=parse_cron("* * * * * *"), zone=UTC, zone_name="UTC", idle_count=ITEMS)
    result = await scale_down(fleet, ScaleDownPolicy(windows=(always,)))
    reasons = {
        item.decision.instance_id: "kept" if "kept as idle" in item.decision.reason else "moved on"
        for item in result.outcomes
    }
    return {"reasons": reasons, "errors": list(result.errors)}


async def main(where: str, role: str) -> None:
    async with open_store(where) as store:
        await store.get(instance_id(0))
        say("ready")
        sys.stdin.readline()
        say(await {"claim": claim_all, "renew": renew_all}[role](store))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
