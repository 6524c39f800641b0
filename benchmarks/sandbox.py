"""Sandboxes on this computer's kernel: preparation, start of the listener, and reset, with software of real size.

The real agent runs in its own namespaces, with an instance store in memory. Registrations take no time.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any

from benchmarks.environment import BenchmarkEnvironment
from benchmarks.figures import Figure, Results, median, timed
from benchmarks.floor import Floor
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.agent import sandbox_root
from remuda.agent.job_hook import REFUSED, JobHook
from remuda.agent.loop import Agent
from remuda.agent.runner import ActionsRunner
from remuda.agent.sandbox import Sandboxes, SandboxOptions
from remuda.domain.instance import Assignment, Credential, Instance, State
from remuda.domain.signals import FailureKind, Report, Signal
from remuda.domain.transitions import Actor, Claim, Commit, Event, Release, ReturnToPool, advance, create
from remuda.ports.calls import CallCounter
from remuda.ports.event_log import SilentEventLog
from remuda.ports.machine import RemovalStatus, StepResult
from simulation.memory.store import MemoryDatabase, MemoryInstanceStore
from tests.support.agents import ID, MARGIN_S, RecordingMachine
from tests.support.records import assignment, instance, run_holder
from tests.support.sandbox_host import SandboxHost, missing
from tests.support.virtual_time import until

RESET_LIMIT_S = 0.5
#: Of the time that a digest of all files takes.
MAX_SHARE = 0.1
RELEASE_LIMIT_S = 0.5
START_LIMIT_S = 0.15
PREPARATION_LIMIT_S = 5.0
SOFTWARE = PurePosixPath("/opt/remuda")
#: Files that a job changes in the runner's folder.
CHANGED_FILES = 50
#: Says when it began, does the work of a job, and then waits as an idle listener.
LISTENER = f"""#!/bin/sh
date +%s.%N
for i in $(seq {CHANGED_FILES}); do echo changed >>files/$i; done
sudo touch /etc/changed
echo changed
trap 'exit 0' TERM
while :; do sleep 0.05; done
"""
CHUNK = 1024 * 1024


async def run(environment: BenchmarkEnvironment, _floor: Floor) -> Results:
    reason = missing()
    if reason:
        sys.stderr.write(f"sandbox: skipped: {reason}\n")
        return Results()
    size = environment.size
    # Not in memory, as /tmp is on some systems.
    with tempfile.TemporaryDirectory(prefix="remuda-bench-", dir="/var/tmp") as folder, SandboxHost("bench") as host:
        process = host.start_module(
            "benchmarks.sandbox",
            folder=folder,
            files=size.runner_files,
            megabytes=size.runner_mb,
            samples=size.samples,
        )
        output, _ = await asyncio.to_thread(process.communicate)
        if process.returncode:
            raise RuntimeError("the measurement of sandboxes has failed")
    measured = json.loads(output)
    return Results(figures=_figures(measured, f"{size.runner_mb:,} MB in {size.runner_files:,} files"))


def _figures(measured: dict[str, list[float]], software: str) -> tuple[Figure, ...]:
    return (
        timed(
            *(f"sandbox: reset, runner software of {software}", measured["reset"]),
            limit=RESET_LIMIT_S,
            floor=median(measured["digest"]),
            max_floors=MAX_SHARE,
            note="the floor is a digest of each file, by which a reset without sandboxes would find changes",
        ),
        timed("sandbox: releasing read → OK signal", measured["release"], limit=RELEASE_LIMIT_S, floor=None),
        timed("sandbox: running read → listener started", measured["start"], limit=START_LIMIT_S, floor=None),
        timed(
            *("sandbox: preparation", measured["preparation"]),
            limit=PREPARATION_LIMIT_S,
            floor=None,
            note=f"not part of a claim; {median(measured['docker']):.2f} s of it for docker and containerd"
            if measured["docker"]
            else "not part of a claim; docker is not installed",
        ),
    )


# In the namespaces ------------------------------------------------------------------------------------------------


class AgentTimes:
    """Seconds of each sample."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {
            name: [] for name in ("reset", "digest", "release", "start", "preparation", "docker")
        }
        #: When the agent first read each state, in seconds since 1970.
        self.read_at: dict[State, float] = {}

    def record(self, action: str, why: str = "", **facts: Any) -> None:
        """Take an event of the sandboxes."""
        if action == "sandbox-ready":
            self.samples["preparation"].append(facts["seconds"])
        else:
            sys.stderr.write(f"{action}: {why}\n")


class TimedStore(MemoryInstanceStore):
    """The agent's store, which notes when the agent reads a state and when it signals the end of a release."""

    measurement: AgentTimes

    async def wait_for_control(
        self, instance_id: str, since: Instance | None, timeout_s: float, *, urgent: bool = True
    ) -> Instance | None:
        return self._read(await super().wait_for_control(instance_id, since, timeout_s, urgent=urgent))

    async def get(self, instance_id: str) -> Instance | None:
        return self._read(await super().get(instance_id))

    async def write_signal(
        self,
        instance_id: str,
        *,
        epoch: int,
        signal: Signal,
        detail: str = "",
        duration_s: float | None = None,
        failure: FailureKind | None = None,
    ) -> None:
        await super().write_signal(
            instance_id, epoch=epoch, signal=signal, detail=detail, duration_s=duration_s, failure=failure
        )
        if signal is Signal.UD_REMOVE_REG_REMOVE_RUN_OK:
            self.measurement.samples["release"].append(_now() - self.measurement.read_at[State.RELEASING])

    def _read(self, record: Instance | None) -> Instance | None:
        if record is not None:
            self.measurement.read_at.setdefault(record.state, _now())
        return record


class InstantRunner(ActionsRunner):
    """Registers without a server."""

    async def _register(self, assignment: Assignment) -> StepResult:
        (self._config_folder / ".runner").write_text(json.dumps({"agentName": assignment.runner_name}))
        return StepResult(ok=True)

    async def remove(self, assignment: Assignment) -> tuple[RemovalStatus, str]:  # noqa: ARG002  # the port's
        (self._config_folder / ".runner").unlink(missing_ok=True)
        return RemovalStatus.REMOVED, ""


class SandboxMachine(RecordingMachine):
    def __init__(self, reset: Callable[[], Awaitable[StepResult]], measurement: AgentTimes) -> None:
        super().__init__([])
        self._reset = reset
        self._measurement = measurement

    async def reset(self) -> StepResult:
        clock = SystemClock()
        started = clock.monotonic()
        result = await self._reset()
        self._measurement.samples["reset"].append(clock.monotonic() - started)
        return result


async def measure(folder: Path, *, files: int, megabytes: int, samples: int) -> dict[str, list[float]]:
    measurement, clock = AgentTimes(), SystemClock()
    software = folder / "runner"
    make_software(software, files, megabytes)
    sandboxes = Sandboxes(
        SandboxOptions(storage=folder / "sandboxes", runner=software, software=SOFTWARE, hidden=(str(folder),)),
        record=measurement.record,
    )
    await sandboxes.open()
    (folder / "registration").mkdir()
    database = MemoryDatabase()
    store = TimedStore(clock=clock, calls=CallCounter(), database=database)
    store.measurement = measurement
    log = sandboxes.log_folder / "runner.log"
    agent = Agent(
        store=store,
        machine=SandboxMachine(sandboxes.reset, measurement),
        runner=InstantRunner(
            host=sandboxes,
            config_folder=folder / "registration",
            state_folder=folder,
            log=log,
            work=sandbox_root.WORK,
            clock=clock,
            environment=sandbox_root.ENVIRONMENT,
            hook=JobHook(
                folder=SOFTWARE / "hook",
                pristine=software,
                refused_file=sandbox_root.OUTBOX / REFUSED,
                refused_file_outside=sandboxes.outbox / REFUSED,
            ),
        ),
        clock=clock,
        ids=SystemIds(),
        event_log=SilentEventLog(),
        version="1",
    )
    task = asyncio.create_task(agent.run())
    pool = ControlPlane(database, clock)
    for number in range(samples):
        if number:
            # A claim of an idle machine finds a prepared sandbox.
            await until(lambda: len(measurement.samples["preparation"]) > number)  # noqa: B023  # awaited here
        measurement.read_at.clear()
        await pool.assign()
        await until(lambda: has_begun(log, measurement), every_s=0.05)
        measurement.samples["start"].append(float(log.read_text().split()[0]) - measurement.read_at[State.RUNNING])
        measurement.samples["docker"] += docker_seconds(sandboxes)
        measurement.samples["digest"].append(digest_seconds(software))
        await pool.release()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await sandboxes.close()
    return measurement.samples


def has_begun(log: Path, measurement: AgentTimes) -> bool:
    """Whether the listener of the present run has done its work. The log may still be that of the last one."""
    words = log.read_text().split() if log.exists() else []
    read_at = measurement.read_at.get(State.RUNNING)
    return words[1:] == ["changed"] and read_at is not None and float(words[0]) > read_at


class ControlPlane:
    """Assigns the machine to one run after the other."""

    def __init__(self, database: MemoryDatabase, clock: SystemClock) -> None:
        self._database = database
        self._clock = clock
        self._store = MemoryInstanceStore(clock=clock, calls=CallCounter(), database=database)

    @property
    def _record(self) -> Instance:
        return self._database.instances[ID]

    async def _apply(self, event: Event, by: Actor) -> None:
        await self._store.apply(advance(self._record, event, by=by, now=self._clock.now(), why="benchmark"))

    async def assign(self) -> None:
        """Give the machine to a new run, and let it accept jobs."""
        threshold = self._clock.now() + timedelta(hours=1)
        if not self._database.instances:
            record = instance(
                state=State.CREATED,
                holder=run_holder("1"),
                claim="p-1/a",
                threshold=threshold,
                assignment=assignment(1),
            )
            await self._store.apply(create(record, by=Actor.PROVISION, why="benchmark"))
        else:
            claim = Claim(
                holder=run_holder("1"),
                claim="p-1/a",
                scope="octo/repo",
                tier=self._record.tier,
                threshold=threshold,
                assignment=assignment(self._record.epoch + 1),
                margin_s=MARGIN_S,
            )
            await self._apply(claim, Actor.PROVISION)
        report = await self._signal(Signal.UD_REG_OK)
        await self._apply(Commit(claim=self._record.claim, report=report, max_runtime_s=3_600.0), Actor.PROVISION)

    async def release(self) -> None:
        credential = Credential(token="none", expires_at=self._clock.now() + timedelta(hours=1))  # noqa: S106  # unused
        await self._apply(Release(release_time_s=300.0, credential=credential), Actor.RELEASE)
        report = await self._signal(Signal.UD_REMOVE_REG_REMOVE_RUN_OK)
        await self._apply(ReturnToPool(report=report, idle_time_s=3_000.0), Actor.RELEASE)

    async def _signal(self, signal: Signal) -> Report:
        def found() -> bool:
            report = self._database.reports.get(ID)
            return report is not None and (report.epoch, report.signal) == (self._record.epoch, signal)

        await until(found)
        return self._database.reports[ID]


def make_software(folder: Path, files: int, megabytes: int) -> None:
    """Make a runner folder of random files, and the listener."""
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "Runner.Listener"
    program.write_text(LISTENER, encoding="utf-8")
    program.chmod(0o755)
    content = os.urandom(max(1, megabytes * 10**6 // files))
    (folder / "files").mkdir()
    for number in range(files):
        path = folder / "files" / (str(number) if number <= CHANGED_FILES else f"folder-{number % 100}/{number}")
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(number.to_bytes(8, "big") + content)
        path.chmod(0o666)
    for path in (folder / "files", *(folder / "files").iterdir()):
        if path.is_dir():
            path.chmod(0o777)


def digest_seconds(folder: Path) -> float:
    """Compute a digest of each file in a folder."""
    clock = SystemClock()
    started = clock.monotonic()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                hashlib.file_digest(file, "sha256")
    return clock.monotonic() - started


def docker_seconds(sandboxes: Sandboxes) -> list[float]:
    """Seconds from the start of containerd until docker was ready, in the boot of the running sandbox."""
    if shutil.which("dockerd") is None or sandboxes._current is None:  # noqa: SLF001  # no other way in
        return []
    show = (
        "systemctl",
        "show",
        "containerd",
        "docker",
        "--property=InactiveExitTimestampMonotonic,ActiveEnterTimestampMonotonic",
    )
    leader = sandboxes._current.leader  # noqa: SLF001  # see above
    done = subprocess.run(
        ["nsenter", f"--target={leader}", "--all", "--", *show], capture_output=True, text=True, check=True
    )
    times = [int(value) for line in done.stdout.split() if (value := line.partition("=")[2]) not in {"", "0"}]
    return [(max(times) - min(times)) / 1e6] if times else []


def _now() -> float:
    return SystemClock().now().timestamp()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    result = asyncio.run(measure(Path(given.pop("folder")), **given))
    sys.stdout.write(json.dumps(result))
