"""Races between real processes on one store: each instance has one winner, and losers see the winner's record.

Run as a script, this file is one of the processes. It prints "ready" and starts when it reads a line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
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
from remuda.domain.scale_down.idle_config import IdleWindow, parse_cron
from remuda.domain.scale_down.policy import ScaleDownPolicy
from remuda.domain.transitions import Actor, Claim, advance
from remuda.ports.calls import CallCounter
from remuda.ports.event_log import SilentEventLog
from remuda.ports.store import InstanceStore
from simulation.memory.compute import MemoryCloud, MemoryCompute, MemoryFleet, MemoryMachines
from simulation.memory.pool import MemoryQueues, MemoryResourcePool
from tests.support.records import (
    LONG_S,
    assignment,
    birth,
    change,
    claim_change,
    instance,
    instance_id,
    pool_config,
    run_holder,
)
from tests.support.scripted_fleet import ScriptedGitHub

ROOT = Path(__file__).parents[2]
#: Instances for which claims and renewals race.
RENEWED = 120
#: Acknowledged writes after which a writer is killed.
WRITES_BEFORE_KILL = 40
POOL = "test"


@dataclass(frozen=True, kw_only=True)
class ClaimRace:
    processes: int
    clients_per_process: int
    items: int
    #: Clients that compete for the same items, in the same order, spread over all processes.
    rivals: int

    def items_of(self, client: int) -> range:
        clients = self.processes * self.clients_per_process
        return range(client // self.rivals, self.items, clients // self.rivals)


CLAIM_RACES = {
    "sqlite": ClaimRace(processes=8, clients_per_process=1, items=200, rivals=8),
    "dynamodb": ClaimRace(processes=2, clients_per_process=32, items=200, rivals=4),
}


@pytest.fixture(params=["sqlite", "dynamodb"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The kind of store, and its file or table."""
    if request.param == "sqlite":
        return f"sqlite:{tmp_path / 'remuda.db'}"
    request.getfixturevalue("server")
    return f"dynamodb:{request.getfixturevalue('table_name')}"


@asynccontextmanager
async def open_stores(location: str, count: int = 1) -> AsyncIterator[list[InstanceStore]]:
    kind, _, name = location.partition(":")
    clock, ids, calls = SystemClock(), SystemIds(), CallCounter()
    stores: list[InstanceStore] = []
    async with AsyncExitStack() as stack:
        for _ in range(count):
            # Long timeouts, because a busy computer may suspend the holder of a lock or the server.
            if kind == "sqlite":
                path = Path(name)
                stores.append(SqliteInstanceStore(path=path, clock=clock, ids=ids, calls=calls, busy_timeout_s=LONG_S))
            else:
                clients = await stack.enter_async_context(AwsClients())
                client = await clients.service("dynamodb", "DynamoDB", config(read_timeout_s=LONG_S))
                stores.append(DynamoInstanceStore(client=client, table=name, clock=clock, ids=ids, calls=calls))
            stack.push_async_callback(stores[-1].close)
        yield stores


# Processes, as the tests see them -------------------------------------------------------------------------------------


async def start(*arguments: str) -> Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, *arguments),
        stdin=PIPE,
        stdout=PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        limit=2**24,
    )
    assert await read_line(process) == "ready"
    return process


async def read_line(process: Process) -> Any:
    assert process.stdout is not None
    line = await process.stdout.readline()
    assert line, "the process ended early; see its stderr"
    return json.loads(line)


def release_all(processes: Sequence[Process]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"go\n")


async def results_of(processes: Sequence[Process]) -> list[Any]:
    release_all(processes)
    results = [await read_line(process) for process in processes]
    assert [await process.wait() for process in processes] == [0] * len(processes)
    return results


# Tests ----------------------------------------------------------------------------------------------------------------


async def test_each_claim_has_one_winner(location: str) -> None:
    race = CLAIM_RACES[location.partition(":")[0]]
    names = [instance_id(number) for number in range(race.items)]
    async with open_stores(location) as (store,):
        await store.prepare()
        created = await map_concurrently(range(race.items), lambda number: store.apply(birth(instance(number))))
        assert all(isinstance(record, Instance) for record in created)

        async with asyncio.timeout(4 * LONG_S):
            racers = await asyncio.gather(*(start("claim", location, str(n)) for n in range(race.processes)))
            results = [result for process in await results_of(racers) for result in process]

        records = await store.get_many(names)
        owners = {key: record.claim for key, record in records.items()}
        assert len(owners) == race.items
        assert all((record.state, record.epoch) == (State.CLAIMED, 2) for record in records.values())
        wins = [(won, result["owner"]) for result in results for won in result["won"]]
        assert sorted(wins) == sorted(owners.items()), "one winner per instance"
        losses = [(lost, winner) for result in results for lost, winner in result["lost_to"].items()]
        assert len(losses) == race.items * (race.rivals - 1)
        assert all(owners[lost] == winner for lost, winner in losses), "every loser got the winner's record"
        for entries in (await store.histories(names)).values():
            assert [entry.transition for entry in entries] == ["birth", "claim"]


async def test_claim_and_renewal_do_not_overwrite_each_other(location: str) -> None:
    async with open_stores(location) as (store,):
        await store.prepare()
        await store.put_config(pool_config())
        created = await map_concurrently(range(RENEWED), lambda number: store.apply(birth(idle_record(number))))
        before = {record.instance_id: record for record in created if isinstance(record, Instance)}
        assert len(before) == RENEWED
        async with asyncio.timeout(4 * LONG_S):
            roles = ("claim-idle", "renew", "renew")
            racers = await asyncio.gather(*(start(role, location, "0") for role in roles))
            claimed, *renewal_errors = await results_of(racers)

        assert claimed == sorted(before), "a renewal never makes a claim fail"
        for name, record in (await store.get_many(list(before))).items():
            assert (record.state, record.epoch, record.claim) == (State.CLAIMED, 2, "p-1/w")
            assert record.threshold == before[name].threshold + timedelta(minutes=9)
            transitions = [entry.transition for entry in await store.history(name)]
            assert transitions[0] == "birth"
            assert transitions[-1] == "claim", "no renewal after the claim"
            assert set(transitions[1:-1]) <= {"renew"}
        assert renewal_errors == [[], []]


async def test_killed_writer_leaves_a_consistent_store(tmp_path: Path) -> None:
    path = tmp_path / "remuda.db"
    async with open_stores(f"sqlite:{path}") as (store,), asyncio.timeout(3 * LONG_S):
        await store.prepare()
        for number in range(3):
            record = await store.apply(birth(instance(number)))
            writer = await start("write", f"sqlite:{path}", str(number))
            release_all([writer])
            # Each line acknowledges a write. The kill interrupts one of the following writes.
            acknowledged = [await read_line(writer) for _ in range(WRITES_BEFORE_KILL)][-1]
            writer.kill()
            await writer.wait()
            after = await store.get(record.instance_id)
            assert after is not None
            assert after.uses >= acknowledged
            history = await store.history(record.instance_id)
            assert len(history) == after.uses + 1, "a record and its history are one write"
            assert (await store.apply(change(after, uses=0))).uses == 0
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


def idle_record(number: int) -> Instance:
    now = datetime.now(UTC).replace(microsecond=0)  # noqa: TID251 - the processes use the real clock
    return instance(number, threshold=now + timedelta(minutes=3), created_at=now - timedelta(minutes=number))


# The processes --------------------------------------------------------------------------------------------------------


def write_line(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def claim_items(store: InstanceStore, client: int, items: range) -> Any:
    owner = f"p-{client}/w"
    won: list[str] = []
    lost_to: dict[str, str] = {}
    for number in items:
        try:
            record = await store.apply(claim_change(instance(number), owner))
        except Conflict as conflict:
            winner: Instance = conflict.current
            lost_to[winner.instance_id] = winner.claim
        else:
            won.append(record.instance_id)
    return {"owner": owner, "won": won, "lost_to": lost_to}


async def claim_idle_instances(store: InstanceStore) -> list[str]:
    won = []
    for number in reversed(range(RENEWED)):
        record = await store.get(instance_id(number))
        assert record is not None
        event = Claim(
            holder=run_holder("1"),
            claim="p-1/w",
            scope="octo/repo",
            tier=record.tier,
            threshold=record.created_at + timedelta(minutes=number + 12),
            assignment=assignment(2),
            margin_s=1.0,
        )
        now = SystemClock().now()
        try:
            applied = await store.apply(advance(record, event, by=Actor.PROVISION, now=now, why="a test"))
        except Conflict:
            continue
        won.append(applied.instance_id)
    return sorted(won)


async def renew_idle_instances(store: InstanceStore) -> list[str]:
    """Keep all idle instances by a scale-down. Return its errors."""
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
        github=ScriptedGitHub(),
        clock=clock,
        event_log=SilentEventLog(),
        calls=calls,
        open_pool=open_pool,
        has_pool=True,
    )
    always = IdleWindow(cron=parse_cron("* * * * * *"), zone=UTC, zone_name="UTC", idle_count=RENEWED)
    return list((await scale_down(fleet, ScaleDownPolicy(windows=(always,)))).errors)


async def write_until_killed(store: InstanceStore, instance_id: str) -> None:
    record = await store.get(instance_id)
    assert record is not None
    # Fewer writes than entries that a history keeps.
    for uses in range(1, 199):
        record = await store.apply(change(record, uses=uses))
        write_line(uses)
    sys.stdin.readline()


async def main(role: str, location: str, number: str) -> None:
    race = CLAIM_RACES[location.partition(":")[0]]
    async with open_stores(location, race.clients_per_process if role == "claim" else 1) as stores:
        # Opens the connections before the race.
        await asyncio.gather(*(store.get(instance_id(0)) for store in stores))
        write_line("ready")
        sys.stdin.readline()
        if role == "claim":
            # Rivals have consecutive numbers, and so are in different processes.
            clients = [race.processes * index + int(number) for index in range(len(stores))]
            claims = [
                claim_items(store, client, race.items_of(client)) for store, client in zip(stores, clients, strict=True)
            ]
            write_line(await asyncio.gather(*claims))
        elif role == "claim-idle":
            write_line(await claim_idle_instances(stores[0]))
        elif role == "renew":
            write_line(await renew_idle_instances(stores[0]))
        else:
            await write_until_killed(stores[0], instance_id(int(number)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
