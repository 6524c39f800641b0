"""Eight real processes on one file: no claim is won twice, and a writer killed at any time leaves a sound store.

Started as a script, this file is such a process; it is told what to do by its arguments and by a line on stdin.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from remuda.adapters.sqlite.store import SqliteInstanceStore
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.domain.errors import Conflict
from remuda.domain.instance import Instance, State
from remuda.ports.calls import CallCounter
from tests.support.records import LONG_S, birth, change, claim, instance, instance_id

PROCESSES = 8
CLAIMS = 200


def open_store(path: Path) -> SqliteInstanceStore:
    # One who holds the lock may stand still for a while.
    return SqliteInstanceStore(
        path=path, clock=SystemClock(), ids=SystemIds(), calls=CallCounter(), busy_timeout_s=LONG_S
    )


async def start(path: Path, role: str, name: str) -> Process:
    root = Path(__file__).parents[2]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        __file__,
        str(path),
        role,
        name,
        stdin=PIPE,
        stdout=PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
        limit=2**24,
    )
    await heard(process)
    return process


async def heard(process: Process) -> Any:
    assert process.stdout is not None
    line = await process.stdout.readline()
    assert line, "the process ended without a word; its stderr says why"
    return json.loads(line)


async def tell_all(processes: Sequence[Process]) -> None:
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"go\n")


async def test_eight_processes_race_for_two_hundred_claims(tmp_path: Path) -> None:
    path = tmp_path / "remuda.db"
    store = open_store(path)
    await store.prepare()
    for number in range(CLAIMS):
        await store.apply(birth(instance(number)))

    async with asyncio.timeout(3 * LONG_S):
        racers = await asyncio.gather(*(start(path, "race", f"p-{number}") for number in range(PROCESSES)))
        await tell_all(racers)
        outcomes = await asyncio.gather(*(heard(racer) for racer in racers))
        assert [await racer.wait() for racer in racers] == [0] * PROCESSES

    records = await store.get_many([instance_id(number) for number in range(CLAIMS)])
    owners = {key: record.owner for key, record in records.items()}
    assert len(owners) == CLAIMS
    assert all((record.state, record.epoch) == (State.CLAIMED, 2) for record in records.values())
    # One winner each, and every loser was shown the winner's record.
    wins = [(won, outcome["owner"]) for outcome in outcomes for won in outcome["won"]]
    assert sorted(wins) == sorted(owners.items())
    for outcome in outcomes:
        expected = {key: owner for key, owner in owners.items() if owner != outcome["owner"]}
        assert outcome["lost_to"] == expected
    for key in owners:
        assert [each.transition for each in await store.history(key)] == ["birth", "claim"]
    await store.close()


async def test_a_killed_writer_leaves_a_sound_store(tmp_path: Path) -> None:
    path = tmp_path / "remuda.db"
    store = open_store(path)
    await store.prepare()
    async with asyncio.timeout(3 * LONG_S):
        for number in range(3):
            record = await store.apply(birth(instance(number)))
            writer = await start(path, "load", record.instance_id)
            await tell_all([writer])
            # Each line acknowledges a write; the kill comes in the midst of the following ones.
            acknowledged = [await heard(writer) for _ in range(40)][-1]
            writer.kill()
            await writer.wait()
            after = await store.get(record.instance_id)
            assert after is not None
            assert after.uses >= acknowledged
            history = await store.history(record.instance_id)
            assert len(history) == after.uses + 1, "a record and its history are one write"
            assert (await store.apply(change(after, uses=0))).uses == 0
    await store.close()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


# What the processes do --------------------------------------------------------------------------------------------


def say(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def race(store: SqliteInstanceStore, provision_id: str) -> None:
    """Claim them all, in the same order as everybody else."""
    owner = f"{provision_id}/w"
    won: list[str] = []
    lost_to: dict[str, str] = {}
    for number in range(CLAIMS):
        try:
            record = await store.apply(claim(instance(number), owner))
        except Conflict as conflict:
            winner: Instance = conflict.current
            lost_to[winner.instance_id] = winner.owner
        else:
            won.append(record.instance_id)
    say({"owner": owner, "won": won, "lost_to": lost_to})


async def load(store: SqliteInstanceStore, which: str) -> None:
    """Write until killed; few enough for the history to keep them all."""
    record = await store.get(which)
    assert record is not None
    for uses in range(1, 199):
        record = await store.apply(change(record, uses=uses))
        say(uses)
    sys.stdin.readline()


async def main(path: str, role: str, name: str) -> None:
    store = open_store(Path(path))
    await store.count_live()
    say("ready")
    sys.stdin.readline()
    await {"race": race, "load": load}[role](store, name)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
