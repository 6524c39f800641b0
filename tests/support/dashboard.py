"""Dashboard process, headless browser and sample store for tests of the dashboard.

Sample records are random but valid, and written directly into a SQLite store without machines.
"""

from __future__ import annotations

import json
import os
import random  # noqa: TID251 - seeded sample data
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, Self

import pytest

from remuda.adapters.sqlite import tables
from remuda.adapters.sqlite.connection import transaction
from remuda.adapters.sqlite.documents import decode, encode
from remuda.adapters.sqlite.schema import connect, create
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.controlplane.context import Context
from remuda.domain.demand import (
    LISTENER_LEASE,
    DemandRecord,
    DemandStatistics,
    JobRecord,
    Lease,
    QueuedJob,
    RepositoryQueue,
)
from remuda.domain.errors import Unavailable
from remuda.domain.instance import Actor, HistoryEntry, Instance, RetireReason, State
from remuda.domain.pool_config import RECORD_VERSION, PoolConfig, runner_name
from remuda.domain.provision import (
    AcquiredRunner,
    Provision,
    ProvisionEnding,
    ProvisionOutcome,
    ProvisionStatus,
    RunnerSource,
)
from remuda.domain.resources import DEFAULT_CLASSES, UsageClass
from remuda.domain.runner_set import RunnerSet
from remuda.domain.signals import Report
from remuda.domain.sweep_record import QueueAudit, SweepRecord
from remuda.domain.thresholds import Lifetimes
from remuda.domain.timestamps import to_milliseconds
from remuda.fake_github import Endpoint, write_endpoint
from remuda.web.dashboard.feed import Feed
from tests.support.local_backend import run_local
from tests.support.records import NOW, entry, instance, run_holder, set_holder

#: Executable names, in order of preference. The headless shell starts fastest.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = Path(next(filter(None, map(shutil.which, BROWSERS)), f"/usr/bin/{BROWSERS[0]}"))
#: Upper limit in seconds of any wait; only reached if something is broken.
LIMIT_S = 60.0
START_MS = 120_000
_COMMAND = str(Path(sys.executable).parent / "remuda")

requires_browser = pytest.mark.skipif(not CHROMIUM.exists(), reason=f"{CHROMIUM.name} is not installed")


@asynccontextmanager
async def _no_store() -> AsyncIterator[Context]:
    raise Unavailable("no store")
    yield


def feed_without_store() -> Feed:
    clock, ids = SystemClock(), SystemIds()
    return Feed(open_context=_no_store, backend="local", interval_s=1.0, since_s=60.0, clock=clock, ids=ids)


def remuda(folder: Path, *arguments: str) -> dict[str, Any]:
    result = run_local(folder, *arguments, environment=environment())
    assert result.code == 0, result
    document: dict[str, Any] = result.document
    return document


def environment(**variables: str) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in ("PATH", "LANG", "HOME") if name in os.environ}
    return {**inherited, "REMUDA_CONFIG": os.devnull, "GITHUB_REPOSITORY": "remuda/demo", **variables}


class Dashboard:
    def __init__(self, folder: Path, *flags: str, port: int = 0, **variables: str) -> None:
        self._process = subprocess.Popen(
            [_COMMAND, "dashboard", "--dir", str(folder), "--port", str(port), "--json", "--quiet", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(**variables),
        )
        try:
            self.url = str(self._document()["url"])
        except BaseException:
            self.kill()
            raise
        self.port = int(self.url.rstrip("/").rpartition(":")[2])

    def _document(self) -> dict[str, Any]:
        """Read the JSON document that the process prints once it listens."""
        assert self._process.stdout is not None
        text = ""
        while line := self._process.stdout.readline():
            text += line
            if line == "}\n":
                document: dict[str, Any] = json.loads(text)
                return document
        raise AssertionError(f"the dashboard exited: {text} {self._process.communicate()[1]}")

    def cpu_s(self) -> float:
        """Return the CPU seconds used so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def interrupt(self) -> tuple[int, str]:
        """Send SIGINT. Return the exit code and standard error."""
        self._process.send_signal(signal.SIGINT)
        _, stderr = self._process.communicate(timeout=LIMIT_S)
        return self._process.returncode, stderr

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class SampleStore:
    """A SQLite store with sample records that a test changes like the commands do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = prepare_store(folder)

    def write(self, *samples: SampleInstance) -> None:
        write_samples(self.file, samples, now=SystemClock().now())

    def fleet(self, count: int, transitions: int) -> list[SampleInstance]:
        samples = list(sample_fleet(count, transitions, now=SystemClock().now()))
        self.write(*samples)
        return samples

    def read(self, instance_id: str) -> Instance:
        found: list[str | None] = []
        with_store(
            self.file, lambda connection: found.append(tables.one(connection, tables.RecordKind.CONTROL, instance_id))
        )
        assert found[0] is not None
        return decode(Instance, found[0])

    def advance(self, instance_id: str) -> Instance:
        """Apply the instance's next transition."""
        record, entries = next_transition(self.read(instance_id), now=SystemClock().now())
        self.write((record, entries))
        return record


def with_quarantine(samples: Iterable[SampleInstance], *, now: datetime) -> list[SampleInstance]:
    """Put the newest idle and the newest terminated instance in quarantine."""
    changed = list(samples)
    for state in (State.IDLE, State.TERMINATED):
        newest = max((record.created_at, place) for place, (record, _) in enumerate(changed) if record.state is state)
        place = newest[1]
        record, entries = changed[place]
        held = replace(
            record,
            quarantined_until=to_milliseconds(now + timedelta(minutes=45)),
            retire_reason=record.retire_reason or RetireReason.QUARANTINED,
            retire_detail="the job left processes behind",
        )
        changed[place] = (held, entries)
    return changed


def live_instances(samples: list[SampleInstance], state: State | None = None) -> list[Instance]:
    return [
        record
        for record, _ in samples
        if record.state is not State.TERMINATED and (state is None or record.state is state)
    ]


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - only if there is a browser

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), timeout=START_MS)
        try:
            yield browser
        finally:
            browser.close()


# Sample records -------------------------------------------------------------------------------------------------------

#: An instance and its history.
SampleInstance = tuple[Instance, list[HistoryEntry]]

_TYPES = {"medium": "c6i.large", "large": "c6i.xlarge", "xlarge": "m6i.2xlarge"}
#: Run ids have eleven digits, as on github.com.
FIRST_RUN = 17_534_000_000
#: Reasons of terminations.
_ENDS = (RetireReason.EXPIRED, RetireReason.TOO_OLD, RetireReason.FAILED, RetireReason.SPOT_NOTICE)
#: By state: next transition, its target state, actor and reason.
_NEXT = {
    State.CREATED: ("commit", State.RUNNING, Actor.PROVISION, "all instances of the run registered"),
    State.CLAIMED: ("commit", State.RUNNING, Actor.PROVISION, "all instances of the run registered"),
    State.RUNNING: ("release", State.RELEASING, Actor.RELEASE, "the run is over"),
    State.RELEASING: ("pool", State.IDLE, Actor.RELEASE, "deregistered and reset"),
    State.IDLE: ("claim", State.CLAIMED, Actor.PROVISION, "fits"),
}
#: Minimum and maximum seconds in each state.
_DURATION_S = {
    State.CREATED: (35, 70),
    State.CLAIMED: (0.4, 2.5),
    State.RUNNING: (60, 420),
    State.RELEASING: (2, 12),
    State.IDLE: (5, 200),
}
#: States that last too short to be seen often.
_SHORT = frozenset({State.CLAIMED, State.RELEASING})


def prepare_store(folder: Path, *, pool: str = "default", **configured: Any) -> Path:
    """Create a state folder like `remuda up` and `refresh`, but without processes. Return the store's file."""
    (folder / "github").mkdir(parents=True)
    write_endpoint(folder / "github", Endpoint(url="http://127.0.0.1:9", pid=os.getpid(), token="none"))
    file = folder / "remuda.db"
    create(file, folder / ".new.db")
    values: dict[str, Any] = {
        "classes": DEFAULT_CLASSES,
        "lifetimes": Lifetimes(),
        "max_instances": 5_000,
        "github_url": "https://github.com",
        "applied_at": NOW,
        "record_version": RECORD_VERSION,
    }
    config = PoolConfig(pool=pool, **{**values, **configured})
    with_store(file, lambda connection: tables.write_single(connection, "config", encode(config)))
    return file


def with_store(file: Path, work: Callable[[sqlite3.Connection], object]) -> None:
    connection = connect(file, busy_timeout_s=10.0)
    try:
        with transaction(connection):
            work(connection)
    finally:
        connection.close()


def write_samples(
    file: Path, samples: Iterable[SampleInstance], provisions: Iterable[Provision] = (), *, now: datetime
) -> None:
    def work(connection: sqlite3.Connection) -> None:
        for record, entries in samples:
            *before, last = entries
            connection.executemany(
                "INSERT OR REPLACE INTO history VALUES (?, ?, ?)",
                [(record.instance_id, number, encode(each)) for number, each in enumerate(before, start=1)],
            )
            tables.write_instance(connection, record, last)
            tables.write_report(connection, sample_report(record, now=now))
        for provision in provisions:
            tables.write_provision(connection, provision)

    with_store(file, work)


def sample_report(record: Instance, *, now: datetime, notice: str = "") -> Report:
    return Report(instance_id=record.instance_id).with_heartbeat(
        at=to_milliseconds(now), busy=record.state is State.RUNNING, listening=True, notice=notice, version="1"
    )


def write_reports(file: Path, samples: Iterable[SampleInstance], *, now: datetime) -> None:
    """Write the heartbeats of all machines but one, whose agent has died, and one interruption."""
    running = [record for record in live_instances(list(samples)) if record.state is State.RUNNING]
    dead, interrupted = running[0].instance_id, running[1].instance_id

    def work(connection: sqlite3.Connection) -> None:
        for record, _ in samples:
            at = now - timedelta(minutes=4) if record.instance_id == dead else now
            notice = f"terminate at {now + timedelta(minutes=2):%H:%M:%S}" if record.instance_id == interrupted else ""
            tables.write_report(connection, sample_report(record, now=at, notice=notice))

    with_store(file, work)


def write_sweep(file: Path, *, now: datetime) -> None:
    """Write what sweeps remember: the next one is due in an hour, and a job waits for a label that no runner has."""
    job = QueuedJob(
        job_id="48213377001",
        run_id=str(FIRST_RUN + 117),
        repository=SAMPLE_REPOSITORIES[0],
        name="train",
        labels=("self-hosted", "remuda", "gpu"),
        queued_at=now - timedelta(minutes=9),
    )
    read_at = now - timedelta(minutes=2)
    queue = RepositoryQueue(repository=job.repository.lower(), read_at=read_at, jobs=(job,))
    sweep = SweepRecord(next_due_at=now + timedelta(hours=1), audit=QueueAudit(at=read_at, queues=(queue,)))
    with_store(file, lambda connection: tables.write_single(connection, "sweep", encode(sweep)))


#: Repositories of runs and jobs, with names as long as real ones.
SAMPLE_REPOSITORIES = (
    "acme-industries/payments-service",
    "acme-industries/web",
    "acme-labs/data-platform-infrastructure",
)

#: A set that has free capacity, and one that is full.
SAMPLE_SETS = (
    RunnerSet(
        name="large",
        labels=("self-hosted", "remuda", "large"),
        resource_class="large",
        scope="acme-industries",
        max=40,
    ),
    RunnerSet(
        name="medium-forks",
        labels=("self-hosted", "remuda", "forks"),
        resource_class="medium",
        scope="acme-industries",
        max=1,
    ),
)


def in_sets(
    samples: Iterable[SampleInstance], *, pool: str, now: datetime
) -> tuple[list[SampleInstance], list[JobRecord]]:
    """Let some of the running instances serve jobs of the sample sets. Return the instances and all jobs."""
    names = cycle(("test (3.11)", "test (3.12)", "build", "lint", "integration: a long name of a job", "package"))
    changed: list[SampleInstance] = []
    jobs: list[JobRecord] = []
    for record, entries in samples:
        runner_set = next((item for item in SAMPLE_SETS if item.resource_class == record.resource_class), None)
        is_full = runner_set is SAMPLE_SETS[1] and any(job.runner_set == runner_set.name for job in jobs)
        if record.state is not State.RUNNING or runner_set is None or is_full:
            changed.append((record, entries))
            continue
        began = entries[-1].at
        jobs.append(
            _job(next(names), runner_set, record, now, queued=began - timedelta(seconds=2), started=began, pool=pool)
        )
        changed.append((replace(record, holder=set_holder(runner_set.name, record.run_id)), entries))
    for number, runner_set in enumerate((SAMPLE_SETS[0], *[SAMPLE_SETS[1]] * 4)):
        jobs.append(
            _job(next(names), runner_set, None, now, queued=now - timedelta(seconds=12 + 40 * number), pool=pool)
        )
    for number in range(14):
        began = now - timedelta(seconds=60 + 45 * number)
        done = _job(
            next(names),
            SAMPLE_SETS[0],
            None,
            now,
            queued=began,
            started=began + timedelta(seconds=1 + number),
            pool=pool,
        )
        result = "failed" if number == 3 else "succeeded"
        jobs.append(replace(done, completed_at=to_milliseconds(began + timedelta(seconds=40)), result=result))
    numbered = [replace(job, job_id=f"{number:08d}-5b1c-4f60-9d7e-2f6c0c8b7a11") for number, job in enumerate(jobs)]
    return changed, numbered


def _job(
    name: str,
    runner_set: RunnerSet,
    machine: Instance | None,
    now: datetime,
    *,
    queued: datetime,
    started: datetime | None = None,
    pool: str,
) -> JobRecord:
    repository = SAMPLE_REPOSITORIES[len(name) % len(SAMPLE_REPOSITORIES)]
    return JobRecord(
        job_id="0",
        runner_set=runner_set.name,
        run_id=machine.run_id if machine else str(FIRST_RUN + 119),
        repository=repository,
        workflow=f"{repository}/.github/workflows/ci.yml@refs/heads/main",
        display_name=name,
        event="push",
        labels=runner_set.labels,
        queued_at=to_milliseconds(queued),
        assigned_at=to_milliseconds(queued + timedelta(milliseconds=50)),
        started_at=to_milliseconds(started) if started else None,
        runner_name=runner_name(pool, machine.epoch, machine.instance_id) if machine else "",
        instance_id=machine.instance_id if machine else "",
        seen_at=to_milliseconds(min(queued + timedelta(seconds=1), now)),
    )


def write_demand(file: Path, jobs: Sequence[JobRecord], *, now: datetime) -> None:
    """Write the jobs and what a live listener writes about the sample sets."""

    def work(connection: sqlite3.Connection) -> None:
        tables.write_single(
            connection,
            f"lease/{LISTENER_LEASE}",
            encode(Lease(owner="listener-1", beat=17, beat_at=to_milliseconds(now))),
        )
        tables.write_jobs(connection, jobs)
        for runner_set in SAMPLE_SETS:
            own = [job for job in jobs if job.runner_set == runner_set.name and job.completed_at is None]
            running = sum(job.started_at is not None for job in own)
            record = DemandRecord(
                runner_set=runner_set.name,
                scope=runner_set.scope,
                scale_set_id=1,
                session_id="session",
                owner="listener-1",
                statistics=DemandStatistics(assigned=len(own), running=running, registered=running, busy=running),
                counted_at=to_milliseconds(now),
                capacity=runner_set.max,
                updated_at=to_milliseconds(now),
            )
            tables.write_single(connection, f"demand/{runner_set.name}", encode(record))

    with_store(file, work)


def sample_fleet(
    count: int, transitions: int, *, now: datetime, seed: int = 1, ended: float = 0.25
) -> Iterator[SampleInstance]:
    """Generate `count` instances with `transitions` valid transitions in total; the share `ended` is terminated."""
    rng = random.Random(seed)  # noqa: S311 - not a secret
    left = transitions
    for number in range(count):
        mean = left / (count - number)
        steps = left if number == count - 1 else max(min(round(mean * rng.uniform(0.6, 1.4)), left), 4)
        sample = _instance(steps, now=now, rng=rng, ends=rng.random() < ended)
        left -= len(sample[1])
        yield sample


def _instance(steps: int, *, now: datetime, rng: random.Random, ends: bool) -> SampleInstance:
    instance_id = f"i-{rng.getrandbits(68):017x}"
    resource_class = rng.choices(tuple(_TYPES), (5, 3, 1))[0]
    usage = rng.choices((UsageClass.ON_DEMAND, UsageClass.SPOT), (3, 2))[0]
    states, waits = [State.CREATED], []
    for _ in range(steps - 1 - (2 if ends else 0)):
        waits.append(rng.uniform(*_DURATION_S[states[-1]]))
        states.append(_NEXT[states[-1]][1])
    if states[-1] in _SHORT and len(states) > 2 and rng.random() < 0.9:
        # Short states rarely are the current one.
        states.pop()
        waits.pop()
    last_s = rng.uniform(0, _DURATION_S[states[-1]][0])
    age_s = sum(waits) + last_s + (rng.uniform(0, 3_600) if ends else 0)
    at = created_at = to_milliseconds(now - timedelta(seconds=age_s))
    epoch, run = 1, str(FIRST_RUN + rng.randrange(120))
    entries = [_entry(at, "create", None, State.CREATED, epoch, run, Actor.PROVISION, "the pool had none that fits")]
    for wait, (state, after) in zip(waits, pairwise(states), strict=True):
        at = to_milliseconds(at + timedelta(seconds=wait))
        transition, _, by, why = _NEXT[state]
        if transition == "claim":
            epoch, run = epoch + 1, str(FIRST_RUN + rng.randrange(120))
        entries.append(_entry(at, transition, state, after, epoch, run, by, why))
    state = states[-1]
    reason = rng.choice(_ENDS) if ends else None
    if ends:
        at = to_milliseconds(at + timedelta(seconds=last_s))
        ended = _entry(at, f"end-{state}", state, State.TERMINATING, epoch, run, Actor.REFRESH, "no longer needed")
        entries.append(replace(ended, retire_reason=reason))
        gone_at, terminated = at + timedelta(seconds=20), (State.TERMINATING, State.TERMINATED)
        entries.append(_entry(gone_at, "confirm", *terminated, epoch, run, Actor.REFRESH, "gone"))
        state = State.TERMINATED
    record = instance(
        instance_id=instance_id,
        state=state,
        epoch=epoch,
        threshold=to_milliseconds(at if ends else now + timedelta(seconds=rng.uniform(60, 3_600))),
        resource_class=resource_class,
        instance_type=_TYPES[resource_class],
        usage_class=usage,
        created_at=created_at,
        run_id=run,
        uses=epoch - 1,
        retire_reason=reason,
        forget_at=now + timedelta(days=7) if ends else None,
    )
    return record, entries


def _entry(
    at: datetime, name: str, source: State | None, target: State, epoch: int, run: str, by: Actor, why: str
) -> HistoryEntry:
    return entry(name, at=to_milliseconds(at), source=source, target=target, epoch=epoch, run_id=run, by=by, why=why)


def sample_provisions(count: int, *, now: datetime, span_s: float, seed: int = 2) -> Iterator[Provision]:
    rng = random.Random(seed)  # noqa: S311 - not a secret
    for number in range(count):
        began = to_milliseconds(now - timedelta(seconds=span_s * (1 - number / count)))
        count_wanted = rng.choice((1, 2, 3, 4, 8))
        created = 0 if rng.random() < 0.1 + 0.75 * number / count else rng.randint(1, count_wanted)
        seconds = rng.uniform(32, 75) if created else rng.uniform(0.6, 3.5)
        failed = rng.random() < 0.02
        is_over = failed or number < count - 12
        outcome = ProvisionOutcome(
            ended_at=began + timedelta(seconds=seconds),
            seconds=seconds,
            reused=count_wanted - created,
            created=created,
            acquired=tuple(
                _acquired(number, created=number < created, seconds=seconds) for number in range(count_wanted)
            ),
            error="no capacity for c6i.large in any zone" if failed else "",
        )
        yield Provision(
            holder=run_holder(str(FIRST_RUN + number), f"p-{number:06d}"),
            repository=SAMPLE_REPOSITORIES[number % len(SAMPLE_REPOSITORIES)],
            resource_class=rng.choices(tuple(_TYPES), (5, 3, 1))[0],
            count=count_wanted,
            created_at=began,
            deadline=began + timedelta(seconds=3_600),
            status=ProvisionStatus.RELEASED if is_over else ProvisionStatus.COMMITTED,
            why="gave up" if failed else "all instances started",
            outcome=outcome,
            released_at=(outcome.ended_at if failed else began + timedelta(seconds=600)) if is_over else None,
            ending=(ProvisionEnding.FAILED if failed else ProvisionEnding.RELEASED) if is_over else None,
            settled=is_over,
        )


def _acquired(number: int, *, created: bool, seconds: float) -> AcquiredRunner:
    source = RunnerSource.CREATED if created else RunnerSource.POOL
    return AcquiredRunner(
        instance_id=f"i-{number:017x}", source=source, seconds=seconds if created else min(seconds, 2.0)
    )


def next_transition(record: Instance, *, now: datetime) -> SampleInstance:
    """Apply the next transition. Return the changed record and the new history entry."""
    transition, target, by, why = _NEXT[record.state]
    epoch = record.epoch + (transition == "claim")
    last = record.latest_holder.run_id if record.latest_holder is not None else ""
    run = str(FIRST_RUN + 10_000 + epoch) if transition == "claim" else last
    is_held = target in {State.CLAIMED, State.RUNNING}
    made = _entry(now, transition, record.state, target, epoch, run, by, why)
    changed = replace(
        record,
        state=target,
        epoch=epoch,
        holder=run_holder(run) if is_held else None,
        last_holder=None if is_held else run_holder(run),
        uses=record.uses + (transition == "pool"),
        threshold=to_milliseconds(now + timedelta(seconds=600)),
    )
    return changed, [made]
