"""The local backend's background processes: a local GitHub and the sweeps. `up` starts them, `down` leaves none."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from remuda import procfs
from remuda.adapters.local.layout import LocalLayout
from remuda.adapters.sqlite.store import SqliteInstanceStore
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.agent.processes import command
from remuda.config.settings import Settings
from remuda.controlplane.operator import InstanceSelector, select_instances, terminate
from remuda.controlplane.refresh import refresh
from remuda.domain.errors import RemudaError, Unavailable, UserError
from remuda.fake_github import read_endpoint
from remuda.fake_github.package import install
from remuda.ports.calls import CallCounter
from remuda.ports.compute import MachineState
from remuda.ports.event_log import EventLog
from remuda.wiring import check_local, layout, local_compute, open_context, passed_on, with_pool

#: How long a background process may take to be ready, and to end.
READY_S = 60.0
END_S = 20.0
PAUSE_S = 0.02
SWEEP_EVERY_S = 5.0
PRIVATE = 0o700

GITHUB = "github"
SWEEPER = "sweeper"


@dataclass(frozen=True, kw_only=True, slots=True)
class UpResult:
    url: str
    #: Names of the processes that had to be started.
    started: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DownResult:
    stopped: tuple[str, ...]
    terminated: tuple[str, ...]
    #: Processes that could not be ended.
    left: tuple[int, ...]


class Background:
    """One background process, known by pid and start time so that a reused pid is never hit."""

    def __init__(self, places: LocalLayout, name: str) -> None:
        self._file = places.root / f"{name}.json"
        self._log = places.logs / f"{name}.log"
        self.name = name

    def alive(self) -> int | None:
        """Its pid, where it runs."""
        known = self._known()
        return known[0] if known and procfs.is_alive(*known) else None

    def runs(self) -> bool:
        return self.alive() is not None

    def start(self, command: Sequence[str]) -> int:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=passed_on(os.environ) | {"PYTHONUNBUFFERED": "1"},
            )
        seen = procfs.read_process(process.pid)
        draft = self._file.with_suffix(".new")
        draft.write_text(json.dumps({"pid": process.pid, "started": seen.started if seen else 0}))
        draft.replace(self._file)
        return process.pid

    async def stop(self, clock: SystemClock) -> bool:
        """Whether there was one to stop."""
        known = self._known()
        if known is None or not procfs.is_alive(*known):
            self._file.unlink(missing_ok=True)
            return False
        for number in (signal.SIGTERM, signal.SIGKILL):
            procfs.send_signal(*known, number)
            if await _wait_until(clock, END_S, lambda: not _runs(*known)):
                break
        self._file.unlink(missing_ok=True)
        return True

    def last_words(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1][:200] if lines else ""

    def _known(self) -> tuple[int, int] | None:
        try:
            document = json.loads(self._file.read_text())
            return int(document["pid"]), int(document["started"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _runs(pid: int, started: int) -> bool:
    """A child of ours that has ended stays in the table until it is reaped."""
    with contextlib.suppress(OSError):
        os.waitpid(pid, os.WNOHANG)
    return procfs.is_alive(pid, started)


async def _wait_until(clock: SystemClock, limit_s: float, holds: Callable[[], bool]) -> bool:
    until = clock.monotonic() + limit_s
    while not holds():
        if clock.monotonic() >= until:
            return False
        await clock.sleep(PAUSE_S)
    return True


def running(settings: Settings) -> dict[str, Callable[[], bool]]:
    """The background processes in people's words, and whether each runs."""
    names = {GITHUB: "the local GitHub", SWEEPER: "the sweeps' process"}
    return {told: Background(layout(settings), name).runs for name, told in names.items()}


def missing(settings: Settings) -> list[str]:
    """Which of the background processes do not run."""
    return [told for told, runs in running(settings).items() if not runs()]


async def start(settings: Settings, event_log: EventLog) -> UpResult:
    check_local(settings)
    clock, places = SystemClock(), layout(settings)
    _make_folders(places)
    with _alone(places):
        return await _start(event_log, clock, places, settings.log_format)


async def _start(event_log: EventLog, clock: SystemClock, places: LocalLayout, log_format: str) -> UpResult:
    install(places.runner)
    store = SqliteInstanceStore(path=places.database, clock=clock, ids=SystemIds(), calls=CallCounter())
    try:
        await store.prepare()
    finally:
        await store.close()
    started: list[str] = []
    url = await _start_github(places, clock, started)
    sweeper = Background(places, SWEEPER)
    if sweeper.alive() is None:
        sweeper.start(
            [
                *(sys.executable, "-m", "remuda", "refresh", "--sweep-only", "--every", f"{SWEEP_EVERY_S:g}"),
                *("--dir", str(places.root), "--log-format", log_format),
            ]
        )
        started.append(SWEEPER)
    for name in started:
        event_log.record("started", name)
    return UpResult(url=url, started=tuple(started))


@contextlib.contextmanager
def _alone(places: LocalLayout) -> Iterator[None]:
    """One `up` or `down` at a time: the others wait."""
    with (places.root / "up.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_folders(places: LocalLayout) -> None:
    try:
        for folder in (places.root, places.logs, places.github, places.instances):
            folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--dir {places.root} cannot be used: {error.strerror}",
            field="--dir",
            fix="name a folder that you may write",
        ) from None


async def _start_github(places: LocalLayout, clock: SystemClock, started: list[str]) -> str:
    github = Background(places, GITHUB)
    endpoint = read_endpoint(places.github)
    if github.alive() is not None and endpoint is not None:
        return endpoint.url
    pid = github.start([sys.executable, "-m", "remuda.fake_github", "--dir", str(places.github)])
    started.append(GITHUB)

    def ready() -> bool:
        known = read_endpoint(places.github)
        return github.alive() is None or (known is not None and known.pid == pid)

    await _wait_until(clock, READY_S, ready)
    endpoint = read_endpoint(places.github)
    if github.alive() is None or endpoint is None or endpoint.pid != pid:
        raise Unavailable(f"the local GitHub did not start: {github.last_words()}")
    return endpoint.url


async def stop(settings: Settings, event_log: EventLog, *, purge: bool) -> DownResult:
    """Sweeps first, then the machines, then a last sweep so that records and registrations agree, then GitHub."""
    check_local(settings)
    clock, places = SystemClock(), layout(settings)
    if not places.database.exists():
        return DownResult(stopped=(), terminated=(), left=())
    with _alone(places):
        return await _stop(settings, event_log, clock, places, purge=purge)


async def _stop(
    settings: Settings, event_log: EventLog, clock: SystemClock, places: LocalLayout, *, purge: bool
) -> DownResult:
    stopped: list[str] = []
    if await Background(places, SWEEPER).stop(clock):
        stopped.append(SWEEPER)
    terminated = await _end_machines(await _with_stored_pool(settings), event_log)
    github = Background(places, GITHUB)
    if github.alive() is not None:
        await _last_sweep(settings, event_log)
    if await github.stop(clock):
        stopped.append(GITHUB)
    left = _left(places)
    for name in stopped:
        event_log.record("stopped", name)
    if purge and not left:
        _purge(places)
    return DownResult(stopped=tuple(stopped), terminated=terminated, left=left)


def _purge(places: LocalLayout) -> None:
    """Only what `up` made: the folder may hold other things too."""
    for folder in (places.github, places.runner, places.instances, places.logs):
        shutil.rmtree(folder, ignore_errors=True)
    for file in (*places.root.glob(f"{places.database.name}*"), places.root / "up.lock"):
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        places.root.rmdir()


async def _with_stored_pool(settings: Settings) -> Settings:
    store = SqliteInstanceStore(
        path=layout(settings).database, clock=SystemClock(), ids=SystemIds(), calls=CallCounter()
    )
    try:
        return with_pool(settings, await store.get_config())
    except Unavailable:
        return settings
    finally:
        await store.close()


async def _end_machines(settings: Settings, event_log: EventLog) -> tuple[str, ...]:
    compute = local_compute(settings, CallCounter())
    try:
        live = [view.instance_id for view in await compute.list_pool() if view.state is not MachineState.TERMINATED]
        if live:
            await _record_their_end(settings, event_log)
            await compute.terminate(live)
    finally:
        await compute.close()
    return tuple(live)


async def _record_their_end(settings: Settings, event_log: EventLog) -> None:
    """So that the records say who ended them. Without it they end as well: the sweeps find them gone."""
    try:
        async with open_context(settings, event_log, credentialed=False, alive=False) as context:
            held = await select_instances(context, InstanceSelector(everything=True))
            await terminate(context, held, reason="remuda down", dry_run=False)
    except RemudaError as error:
        event_log.record("end-unrecorded", error.message)


async def _last_sweep(settings: Settings, event_log: EventLog) -> None:
    try:
        async with open_context(settings, event_log, credentialed=True, alive=False) as context:
            await refresh(context, None)
    except RemudaError as error:
        event_log.record("sweep-failed", error.message)


def _left(places: LocalLayout) -> tuple[int, ...]:
    """Whatever still runs in, or on behalf of, the state folder."""
    found: set[int] = set()
    for folder in places.instances.glob("i-*"):
        found |= {process.pid for process in procfs.machine_processes(folder.name, str(folder), 0)}
    here = {str(places.root), str(places.github)}
    for pid in procfs.all_processes():
        words = command(pid)
        if pid != os.getpid() and "-m" in words and here & set(words) and {"remuda", "remuda.fake_github"} & set(words):
            found.add(pid)
    return tuple(sorted(found))
