"""A pool's records without its machines: lives of many instances, written straight into a store, for pages to show."""

from __future__ import annotations

import os
import random  # noqa: TID251 - with seeds, for lives that are nobody's
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path

from remuda.adapters.sqlite import tables
from remuda.adapters.sqlite.connection import transaction
from remuda.adapters.sqlite.documents import encode
from remuda.adapters.sqlite.schema import connect, create
from remuda.domain.instance import HistoryEntry, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision, ProvisionStatus
from remuda.domain.provision_outcome import AcquiredRunner, ProvisionOutcome, Source
from remuda.domain.resources import DEFAULT_CLASSES, UsageClass
from remuda.domain.signals import Report
from remuda.domain.thresholds import Lifetimes
from remuda.domain.timestamps import to_milliseconds
from remuda.fake_github import Endpoint, write_endpoint
from tests.support.records import NOW

Life = tuple[Instance, list[HistoryEntry]]

_TYPES = {"medium": "c6i.large", "large": "c6i.xlarge", "xlarge": "m6i.2xlarge"}
_ENDS = (
    ("end-idle", "its time as idle is up", "refresh"),
    ("end-idle", "beyond the idle quota of 40", "scale-down"),
    ("end-releasing", "no heartbeat for 95 s: its agent or its machine is dead", "refresh"),
    ("end-running", "spot notice: terminate", "refresh"),
)
#: What follows a state; as the lifecycle has it.
_STEPS = {
    State.CREATED: ("commit", State.RUNNING, "provision", "all of the run are registered"),
    State.CLAIMED: ("commit", State.RUNNING, "provision", "all of the run are registered"),
    State.RUNNING: ("release", State.RELEASING, "release", "the run is over"),
    State.RELEASING: ("pool", State.IDLE, "release", "deregistered and reset"),
    State.IDLE: ("claim", State.CLAIMED, "provision", "fits"),
}
#: Seconds.
_LASTS = {
    State.CREATED: (35, 70),
    State.CLAIMED: (0.4, 2.5),
    State.RUNNING: (60, 420),
    State.RELEASING: (2, 12),
    State.IDLE: (5, 200),
}
_SHORT = frozenset({State.CLAIMED, State.RELEASING})


def prepare(folder: Path, *, pool: str = "default", lifetimes: Lifetimes | None = None) -> Path:
    """A state folder as `remuda up` and `refresh` leave it, with nothing behind it. Returns the store's file."""
    (folder / "github").mkdir(parents=True)
    write_endpoint(folder / "github", Endpoint(url="http://127.0.0.1:9", pid=os.getpid(), token="none"))
    file = folder / "remuda.db"
    create(file, folder / ".new.db")
    config = PoolConfig(
        pool=pool,
        classes=DEFAULT_CLASSES,
        lifetimes=lifetimes or Lifetimes(),
        max_instances=5_000,
        github_url="http://127.0.0.1:9",
        applied_at=NOW,
    )
    with_store(file, lambda connection: tables.write_single(connection, "config", encode(config)))
    return file


def with_store(file: Path, work: Callable[[sqlite3.Connection], object]) -> None:
    connection = connect(file, busy_timeout_s=10.0)
    try:
        with transaction(connection):
            work(connection)
    finally:
        connection.close()


def write(file: Path, lives: Iterable[Life], provisions: Iterable[Provision] = (), *, now: datetime) -> None:
    def work(connection: sqlite3.Connection) -> None:
        for record, entries in lives:
            *before, last = entries
            for number, entry in enumerate(before):
                connection.execute(
                    "INSERT OR REPLACE INTO history VALUES (?, ?, ?)", (record.instance_id, number + 1, encode(entry))
                )
            tables.write_instance(connection, record, last)
            beat = Report(instance_id=record.instance_id).beaten(
                at=to_milliseconds(now), busy=record.state is State.RUNNING, listening=True, notice="", version="1"
            )
            tables.write_report(connection, beat)
        for provision in provisions:
            tables.write_provision(connection, provision)

    with_store(file, work)


def fleet(count: int, transitions: int, *, now: datetime, seed: int = 1, ended: float = 0.25) -> Iterator[Life]:
    """So many lives with so many transitions in all, each as the lifecycle allows it."""
    chance = random.Random(seed)  # noqa: S311 - lives, not secrets
    left = transitions
    for number in range(count):
        mean = left / (count - number)
        steps = left if number == count - 1 else max(min(round(mean * chance.uniform(0.6, 1.4)), left), 4)
        life = _life(steps, now=now, chance=chance, ends=chance.random() < ended)
        left -= len(life[1])
        yield life


def _life(steps: int, *, now: datetime, chance: random.Random, ends: bool) -> Life:
    name = f"i-{chance.getrandbits(68):017x}"
    kind = chance.choices(tuple(_TYPES), (5, 3, 1))[0]
    usage = chance.choices((UsageClass.ON_DEMAND, UsageClass.SPOT), (3, 2))[0]
    states, waits = [State.CREATED], []
    for _ in range(steps - 1 - (2 if ends else 0)):
        waits.append(chance.uniform(*_LASTS[states[-1]]))
        states.append(_STEPS[states[-1]][1])
    if states[-1] in _SHORT and len(states) > 2 and chance.random() < 0.9:
        # Seldom seen, for they do not last.
        states.pop()
        waits.pop()
    tail = chance.uniform(0, _LASTS[states[-1]][0])
    over = sum(waits) + tail + (chance.uniform(0, 1_800) if ends else 0)
    at = born = to_milliseconds(now - timedelta(seconds=over))
    epoch, run = 1, str(chance.randrange(4_000_000, 4_009_999))
    entries = [_entry(at, "create", "", State.CREATED, epoch, run, "provision", "the pool had none that fits")]
    for wait, (state, after) in zip(waits, pairwise(states), strict=True):
        at = to_milliseconds(at + timedelta(seconds=wait))
        transition, _, by, why = _STEPS[state]
        if transition == "claim":
            epoch, run = epoch + 1, str(chance.randrange(4_000_000, 4_009_999))
        entries.append(_entry(at, transition, state.value, after, epoch, run, by, why))
    state, retire = states[-1], ""
    if ends:
        at = to_milliseconds(at + timedelta(seconds=tail))
        _, retire, by = chance.choice(_ENDS)
        entries.append(_entry(at, f"end-{state}", state.value, State.TERMINATING, epoch, run, by, retire))
        entries.append(
            _entry(
                at + timedelta(seconds=20), "confirm", "terminating", State.TERMINATED, epoch, run, "refresh", "gone"
            )
        )
        state = State.TERMINATED
    assigned = state in {State.CREATED, State.CLAIMED, State.RUNNING}
    record = Instance(
        instance_id=name,
        state=state,
        epoch=epoch,
        threshold=to_milliseconds(at if ends else now + timedelta(seconds=chance.uniform(60, 3_600))),
        resource_class=kind,
        instance_type=_TYPES[kind],
        usage_class=usage,
        cpu=2,
        mmem=4_096,
        created_at=born,
        run_id=run if assigned else "",
        last_run_id="" if assigned else run,
        uses=epoch - 1,
        retire=retire,
        forget_at=now + timedelta(days=7) if ends else None,
    )
    return record, entries


def _entry(
    at: datetime, name: str, source: str, target: State, epoch: int, run: str, by: str, why: str
) -> HistoryEntry:
    return HistoryEntry(
        at=to_milliseconds(at),
        transition=name,
        source=source,
        target=target.value,
        epoch=epoch,
        run_id=run,
        by=by,
        why=why,
    )


def provisions(count: int, *, now: datetime, span_s: float, seed: int = 2) -> Iterator[Provision]:
    chance = random.Random(seed)  # noqa: S311 - lives, not secrets
    for number in range(count):
        began = to_milliseconds(now - timedelta(seconds=span_s * (1 - number / count)))
        wanted = chance.choice((1, 2, 3, 4, 8))
        created = 0 if chance.random() < 0.1 + 0.75 * number / count else chance.randint(1, wanted)
        seconds = chance.uniform(32, 75) if created else chance.uniform(0.6, 3.5)
        failed = chance.random() < 0.02
        course = ProvisionOutcome(
            ended_at=began + timedelta(seconds=seconds),
            seconds=seconds,
            reused=wanted - created,
            created=created,
            taken=tuple(_taken(place, created=place < created, seconds=seconds) for place in range(wanted)),
            error="no capacity for c6i.large in any zone" if failed else "",
        )
        yield Provision(
            provision_id=f"p-{number:06d}",
            run_id=str(4_000_000 + number),
            attempt=1,
            resource_class=chance.choices(tuple(_TYPES), (5, 3, 1))[0],
            count=wanted,
            created_at=began,
            deadline=began + timedelta(seconds=3_600),
            status=ProvisionStatus.RELEASED if failed or number < count - 12 else ProvisionStatus.COMMITTED,
            why="gave up" if failed else "all instances are running",
            course=course,
            released_at=began + timedelta(seconds=600) if number < count - 12 else None,
            settled=number < count - 12,
        )


def _taken(place: int, *, created: bool, seconds: float) -> AcquiredRunner:
    source = Source.CREATED if created else Source.POOL
    return AcquiredRunner(
        instance_id=f"i-{place:017x}", source=source, seconds=seconds if created else min(seconds, 2.0)
    )


def moved(record: Instance, *, now: datetime) -> Life:
    """Its next step, as the lifecycle has it: the record, and the one entry of it."""
    transition, after, by, why = _STEPS[record.state]
    epoch = record.epoch + (transition == "claim")
    run = str(5_000_000 + epoch) if transition == "claim" else record.run_id or record.last_run_id
    assigned = after in {State.CLAIMED, State.RUNNING}
    entry = _entry(now, transition, record.state.value, after, epoch, run, by, why)
    changed = replace(
        record,
        state=after,
        epoch=epoch,
        run_id=run if assigned else "",
        last_run_id=record.last_run_id if assigned else run,
        uses=record.uses + (transition == "pool"),
        threshold=to_milliseconds(now + timedelta(seconds=600)),
    )
    return changed, [entry]
