"""Sixty-four clients in several processes, five hundred items: no claim is won twice.

Started as a script, this file is one of the processes; it is told to begin by a line on stdin.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from remuda.adapters.aws.clients import AwsClients, config, open_session
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.controlplane.context import map_concurrently
from remuda.domain.errors import Conflict
from remuda.domain.instance import Instance, State
from remuda.ports.calls import CallCounter
from tests.support.records import LONG_S, birth, claim, instance, instance_id

PROCESSES = 2
CLIENTS_EACH = 32
CLIENTS = PROCESSES * CLIENTS_EACH
ITEMS = 500
#: So many clients go for the same item at the same time, from all processes.
RIVALS = 4


def wanted_by(client: int) -> list[int]:
    """Neighbours in different processes want the same items, in the same order."""
    group = client // RIVALS
    return list(range(group, ITEMS, CLIENTS // RIVALS))


def open_store(client: Any, table: str) -> DynamoInstanceStore:
    return DynamoInstanceStore(client=client, table=table, clock=SystemClock(), ids=SystemIds(), calls=CallCounter())


async def start(table: str, number: int) -> Process:
    root = Path(__file__).parents[2]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        table,
        str(number),
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


async def test_sixty_four_clients_race_for_five_hundred_items(clients: AwsClients, table_name: str) -> None:
    store = open_store(await clients.dynamodb(), table_name)
    await store.prepare()
    born = await map_concurrently(range(ITEMS), lambda number: store.apply(birth(instance(number))))
    assert all(isinstance(record, Instance) for record in born)

    async with asyncio.timeout(4 * LONG_S):
        racers = await asyncio.gather(*(start(table_name, number) for number in range(PROCESSES)))
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write(b"go\n")
        outcomes = [outcome for racer in racers for outcome in await heard(racer)]
        assert [await racer.wait() for racer in racers] == [0] * PROCESSES

    records = await store.get_many([instance_id(number) for number in range(ITEMS)])
    owners = {key: record.owner for key, record in records.items()}
    assert len(owners) == ITEMS
    assert all((record.state, record.epoch) == (State.CLAIMED, 2) for record in records.values())
    wins = [(won, outcome["owner"]) for outcome in outcomes for won in outcome["won"]]
    assert sorted(wins) == sorted(owners.items()), "one winner each"
    losses = [(lost, shown) for outcome in outcomes for lost, shown in outcome["lost_to"].items()]
    assert len(losses) == ITEMS * (RIVALS - 1)
    assert all(owners[lost] == shown for lost, shown in losses), "every loser was shown the winner's record"
    await store.close()


# What the processes do --------------------------------------------------------------------------------------------


def say(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def race(store: DynamoInstanceStore, client: int) -> Any:
    owner = f"p-{client}/w"
    won: list[str] = []
    lost_to: dict[str, str] = {}
    for number in wanted_by(client):
        try:
            record = await store.apply(claim(instance(number), owner))
        except Conflict as conflict:
            winner: Instance = conflict.current
            lost_to[winner.instance_id] = winner.owner
        else:
            won.append(record.instance_id)
    return {"owner": owner, "won": won, "lost_to": lost_to}


async def main(table: str, number: str) -> None:
    session = open_session()
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(AwsClients(session=session)) for _ in range(CLIENTS_EACH)]
        # The server may stand still for a while: that is no answer that was lost.
        patient = config(read_timeout_s=LONG_S)
        stores = [open_store(await clients.client("dynamodb", "DynamoDB", patient), table) for clients in opened]
        await asyncio.gather(*(store.get(instance_id(0)) for store in stores))
        say("ready")
        sys.stdin.readline()
        racing = [race(store, PROCESSES * index + int(number)) for index, store in enumerate(stores)]
        say(await asyncio.gather(*racing))
        await asyncio.gather(*(store.close() for store in stores))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
