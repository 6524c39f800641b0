"""`remuda up` and `remuda down`: the background processes of the local backend.

These are a local GitHub, a sweeper, and the listener if runner sets are configured. `up`, `refresh` and each sweep
start the listener if it is needed and not running, and stop it when the last set is gone.
"""

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
from dataclasses import asdict, dataclass

from remuda import procfs
from remuda.adapters.local.layout import LOCAL_GITHUB, LocalLayout
from remuda.adapters.system.clock import SystemClock
from remuda.cli.advice import command_line
from remuda.cli.output import Output
from remuda.cli.run import EXIT_OK, EXIT_PARTIAL, plural, run_async
from remuda.config.settings import Settings
from remuda.controlplane.operator import InstanceSelector, select_instances, terminate
from remuda.controlplane.refresh import refresh
from remuda.disk import FULL, existing, full_disk
from remuda.domain.errors import RemudaError, Unavailable, UserError
from remuda.fake_github import install_runner, read_endpoint
from remuda.ports.calls import CallCounter
from remuda.ports.compute import MachineState
from remuda.ports.event_log import EventLog
from remuda.wiring import desired, open_context
from remuda.wiring.local import (
    GITHUB_MODULE,
    MAX_NAMED,
    check_local,
    child_environment,
    layout,
    local_compute,
    local_store,
    named_backends,
    running_backends,
    stored_config,
    with_stored_pool,
)

#: Seconds that a background process may take to become ready, and to exit.
READY_TIMEOUT_S = 60.0
EXIT_TIMEOUT_S = 20.0
#: Seconds between two checks for these.
POLL_S = 0.02
#: Seconds between two sweeps.
SWEEP_INTERVAL_S = 5.0
PRIVATE_MODE = 0o700

GITHUB = "github"
SWEEPER = "sweeper"
GIT_IGNORE = ".gitignore"
IGNORE_ALL = "*\n"
LISTENER = "listener"


@dataclass(frozen=True, kw_only=True, slots=True)
class UpResult:
    url: str
    #: Names of the processes that this call started.
    started: tuple[str, ...]
    #: Whether this call applied the pool's first configuration.
    configured: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class DownResult:
    stopped: tuple[str, ...]
    terminated: tuple[str, ...]
    #: Ids of processes that are still running.
    left: tuple[int, ...]


class BackgroundProcess:
    """A background process, identified by pid and start time so that a signal never hits a reused pid."""

    def __init__(self, places: LocalLayout, name: str) -> None:
        self._file = places.root / f"{name}.json"
        self._log = places.logs / f"{name}.log"
        self.name = name

    @property
    def was_started(self) -> bool:
        """Whether it was started and not stopped since. It may have crashed."""
        return self._file.exists()

    def is_running(self) -> bool:
        known = self._known()
        return known is not None and procfs.is_alive(*known)

    def start(self, command: Sequence[str]) -> int:
        with self._log.open("ab") as log, _ignored(signal.SIGHUP):
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=child_environment(os.environ) | {"PYTHONUNBUFFERED": "1"},
            )
        try:
            self._record(process.pid)
        except OSError:
            # The disk is full, for example. Without its record, no one would find and stop it.
            process.kill()
            process.wait()
            raise
        return process.pid

    def _record(self, pid: int) -> None:
        seen = procfs.read_process(pid)
        draft = self._file.with_suffix(".new")
        draft.write_text(json.dumps({"pid": pid, "started": seen.started if seen else 0}))
        draft.replace(self._file)

    def send_signal(self, number: signal.Signals) -> None:
        known = self._known()
        descriptor = procfs.send_signal(*known, number) if known else None
        if descriptor is not None:
            os.close(descriptor)

    async def stop(self, clock: SystemClock) -> bool:
        """Stop the process. Return False if it was not running."""
        known = self._known()
        if known is None or not procfs.is_alive(*known):
            self._file.unlink(missing_ok=True)
            return False
        for number in (signal.SIGTERM, signal.SIGKILL):
            procfs.send_signal(*known, number)
            if await _wait_until(clock, EXIT_TIMEOUT_S, lambda: not _is_running_child(*known)):
                break
        self._file.unlink(missing_ok=True)
        return True

    def last_log_line(self) -> str:
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


@contextlib.contextmanager
def _ignored(number: signal.Signals) -> Iterator[None]:
    """Ignore a signal. A process that is started meanwhile ignores it until it sets a handler."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


def _is_running_child(pid: int, started: int) -> bool:
    """Reap the process first if it is a child: a zombie would count as running."""
    with contextlib.suppress(OSError):
        os.waitpid(pid, os.WNOHANG)
    return procfs.is_alive(pid, started)


async def _wait_until(clock: SystemClock, timeout_s: float, condition: Callable[[], bool]) -> bool:
    until = clock.monotonic() + timeout_s
    while not condition():
        if clock.monotonic() >= until:
            return False
        await clock.sleep(POLL_S)
    return True


def background_processes(settings: Settings) -> dict[str, Callable[[], bool]]:
    """The background processes by description, each with a check whether it is running."""
    names = {GITHUB: LOCAL_GITHUB, SWEEPER: "the sweeper", LISTENER: "the listener"}
    processes = {shown: BackgroundProcess(layout(settings), name) for name, shown in names.items()}
    # Only pools with runner sets have a listener.
    return {
        shown: process.is_running
        for shown, process in processes.items()
        if process.name != LISTENER or process.was_started
    }


def stopped_processes(settings: Settings) -> list[str]:
    """The background processes that are not running; none on AWS."""
    if settings.backend != "local":
        return []
    return [shown for shown, is_running in background_processes(settings).items() if not is_running()]


def can_list_registrations(settings: Settings) -> bool:
    """Whether read commands need no credential of the user to list registrations: the local GitHub is running."""
    return settings.backend == "local" and BackgroundProcess(layout(settings), GITHUB).is_running()


def run_up(settings: Settings, output: Output) -> int:
    result = run_async(lambda: start(settings, output.event_log(SystemClock())))
    already = "" if result.started else " (was already running)"
    output.say(f"local backend in {settings.dir}: GitHub at {result.url}{already}")
    if result.configured:
        again = command_line(settings, "refresh")
        output.say(f"the pool is configured with the current settings; {again} applies later changes")
    others = running_backends(settings)
    if others:
        more = f" and {len(others) - MAX_NAMED} more" if len(others) > MAX_NAMED else ""
        output.say(f"also running: the local backend in {', '.join(others[:MAX_NAMED])}{more}")
    output.result(
        {
            "dir": str(settings.dir),
            "github_url": result.url,
            "started": list(result.started),
            "configured": result.configured,
            "others": others,
        }
    )
    return EXIT_OK


async def _configure(settings: Settings, event_log: EventLog) -> bool:
    """Apply the settings as the pool's first configuration. Return False if it has one."""
    if await stored_config(settings) is not None:
        return False
    async with open_context(settings, event_log, needs_github=True) as context:
        await refresh(context, desired(settings, pool=context.pool_name))
    return True


def run_down(settings: Settings, output: Output, *, purge: bool) -> int:
    result = run_async(lambda: stop(settings, output.event_log(SystemClock()), purge=purge))
    pids = f": {', '.join(map(str, result.left))}" if result.left else ""
    terminated, left = plural(len(result.terminated), "instance"), plural(len(result.left), "process")
    output.say(f"down: {terminated} terminated, {left} left{pids}")
    output.result({"dir": str(settings.dir), **asdict(result)})
    return EXIT_PARTIAL if result.left else EXIT_OK


async def start(settings: Settings, event_log: EventLog) -> UpResult:
    check_local(settings)
    clock, places = SystemClock(), layout(settings)
    _make_folders(places)
    with _locked(places):
        return await _start(settings, event_log, clock, places)


async def _start(settings: Settings, event_log: EventLog, clock: SystemClock, places: LocalLayout) -> UpResult:
    install_runner(places.runner)
    store = local_store(settings)
    try:
        await store.prepare()
    finally:
        await store.close()
    started: list[str] = []
    url = await _start_github(places, clock, started)
    configured = await _configure(settings, event_log)
    sweeper = BackgroundProcess(places, SWEEPER)
    if not sweeper.is_running():
        sweeper.start(
            [
                *(sys.executable, "-m", "remuda", "refresh", "--sweep-only", "--every", f"{SWEEP_INTERVAL_S:g}"),
                *("--dir", str(places.root), "--log-format", settings.log_format),
            ]
        )
        started.append(SWEEPER)
    if await _needs_listener(settings) and _start_listener(places, settings.log_format):
        started.append(LISTENER)
    for name in started:
        event_log.record("started", name)
    return UpResult(url=url, started=tuple(started), configured=configured)


async def adjust_listener(settings: Settings, event_log: EventLog, *, wait: bool) -> None:
    """Start or stop the listener, as the stored configuration says, if the backend is up.

    With `wait`, for commands: a running listener reads the configuration at once. Without, for the sweeper: nothing is
    done while `up` or `down` runs, because `down` waits for the sweeper.
    """
    clock, places = SystemClock(), layout(settings)
    if not BackgroundProcess(places, GITHUB).was_started:
        return
    with contextlib.suppress(BlockingIOError), _locked(places, wait=wait):
        if not BackgroundProcess(places, GITHUB).was_started:
            return  # `down` was faster
        if await _needs_listener(settings):
            if _start_listener(places, settings.log_format):
                event_log.record("started", LISTENER)
            elif wait:
                # It reads the configuration once a minute by itself.
                BackgroundProcess(places, LISTENER).send_signal(signal.SIGHUP)
        elif await BackgroundProcess(places, LISTENER).stop(clock):
            event_log.record("stopped", LISTENER)


async def _needs_listener(settings: Settings) -> bool:
    """Whether sets are configured, or were: the listener removes them from GitHub."""
    store = local_store(settings)
    try:
        config = await store.get_config()
        return bool(config and (config.runner_sets or await store.get_demand()))
    finally:
        await store.close()


def _start_listener(places: LocalLayout, log_format: str) -> bool:
    """Start the listener. Return False if it is running."""
    listener = BackgroundProcess(places, LISTENER)
    if listener.is_running():
        return False
    listener.start(
        [*(sys.executable, "-m", "remuda", "listen"), *("--dir", str(places.root), "--log-format", log_format)]
    )
    return True


@contextlib.contextmanager
def _locked(places: LocalLayout, *, wait: bool = True) -> Iterator[None]:
    """Serialize changes of the background processes. Others wait, or raise `BlockingIOError`."""
    with (places.root / "up.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


def _make_folders(places: LocalLayout) -> None:
    is_new = not places.root.exists()
    try:
        for folder in (places.root, places.logs, places.github, places.instances):
            folder.mkdir(mode=PRIVATE_MODE, parents=True, exist_ok=True)
        if is_new:
            # Users start it in their repositories, and the folder contains credentials.
            (places.root / GIT_IGNORE).write_text(IGNORE_ALL, encoding="utf-8")
    except OSError as error:
        if error.errno in FULL:
            raise full_disk(existing(places.root)) from None
        raise UserError(
            f"--dir {places.root} cannot be used: {error.strerror}",
            field="--dir",
            fix="name a directory that you can write to",
        ) from None


async def _start_github(places: LocalLayout, clock: SystemClock, started: list[str]) -> str:
    github = BackgroundProcess(places, GITHUB)
    endpoint = read_endpoint(places.github)
    if github.is_running() and endpoint is not None:
        return endpoint.url
    pid = github.start([sys.executable, "-m", GITHUB_MODULE, "--dir", str(places.github)])
    started.append(GITHUB)

    def ready() -> bool:
        known = read_endpoint(places.github)
        return not github.is_running() or (known is not None and known.pid == pid)

    await _wait_until(clock, READY_TIMEOUT_S, ready)
    endpoint = read_endpoint(places.github)
    if not github.is_running() or endpoint is None or endpoint.pid != pid:
        raise Unavailable(f"the local GitHub did not start: {github.last_log_line()}")
    return endpoint.url


async def stop(settings: Settings, event_log: EventLog, *, purge: bool) -> DownResult:
    """Stop sweeper and listener, terminate the instances, sweep to update records and registrations, stop GitHub."""
    check_local(settings)
    clock, places = SystemClock(), layout(settings)
    if not places.database.exists():
        others = named_backends(settings)
        raise UserError(
            f"{settings.shown('dir')} is {str(settings.dir)!r}, where there is no local backend",
            field=settings.shown("dir"),
            fix=f"use {others}" if others else "name the directory of remuda up with --dir",
        )
    with _locked(places):
        return await _stop(settings, event_log, clock, places, purge=purge)


async def _stop(
    settings: Settings, event_log: EventLog, clock: SystemClock, places: LocalLayout, *, purge: bool
) -> DownResult:
    stopped: list[str] = []
    # The sweeper first: it would start the listener again. The listener while GitHub runs: it ends its sessions.
    stopped += [name for name in (SWEEPER, LISTENER) if await BackgroundProcess(places, name).stop(clock)]
    terminated = await _terminate_instances(await _with_stored_pool(settings), event_log)
    github = BackgroundProcess(places, GITHUB)
    if github.is_running():
        await _last_sweep(settings, event_log)
    if await github.stop(clock):
        stopped.append(GITHUB)
    left = _remaining_processes(places)
    for name in stopped:
        event_log.record("stopped", name)
    if purge and not left:
        _purge(places)
    return DownResult(stopped=tuple(stopped), terminated=terminated, left=left)


def _purge(places: LocalLayout) -> None:
    """Remove what `up` created; the directory may contain other files, too."""
    for folder in (places.github, places.runner, places.instances, places.logs, places.changes):
        shutil.rmtree(folder, ignore_errors=True)
    for file in (*places.root.glob(f"{places.database.name}*"), places.root / "up.lock"):
        file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        if (places.root / GIT_IGNORE).read_text(encoding="utf-8") == IGNORE_ALL:
            (places.root / GIT_IGNORE).unlink()
    with contextlib.suppress(OSError):
        places.root.rmdir()


async def _with_stored_pool(settings: Settings) -> Settings:
    with contextlib.suppress(Unavailable):
        return with_stored_pool(settings, await stored_config(settings))
    return settings


async def _terminate_instances(settings: Settings, event_log: EventLog) -> tuple[str, ...]:
    compute = local_compute(settings, CallCounter())
    try:
        live = [view.instance_id for view in await compute.list_pool() if view.state is not MachineState.TERMINATED]
        if live:
            await _record_termination(settings, event_log)
            await compute.terminate(live)
    finally:
        await compute.close()
    return tuple(live)


async def _record_termination(settings: Settings, event_log: EventLog) -> None:
    """Record the reason of the termination. If that fails, the last sweep finds the instances gone."""
    try:
        async with open_context(settings, event_log, needs_github=False, require_local_github=False) as context:
            held = await select_instances(context, InstanceSelector(everything=True))
            await terminate(context, held, reason="remuda down", dry_run=False)
    except RemudaError as error:
        event_log.record("termination-unrecorded", error.message)


async def _last_sweep(settings: Settings, event_log: EventLog) -> None:
    try:
        async with open_context(settings, event_log, needs_github=True, require_local_github=False) as context:
            await refresh(context, None)
    except RemudaError as error:
        event_log.record("sweep-failed", error.message)


def _remaining_processes(places: LocalLayout) -> tuple[int, ...]:
    """Processes that run in the state directory or on its behalf."""
    found: set[int] = set()
    for folder in places.instances.glob("i-*"):
        found |= {process.pid for process in procfs.machine_processes(folder.name, str(folder), 0)}
    here = {str(places.root), str(places.github)}
    for pid in procfs.all_processes():
        words = procfs.command(pid)
        if pid != os.getpid() and "-m" in words and here & set(words) and {"remuda", GITHUB_MODULE} & set(words):
            found.add(pid)
    return tuple(sorted(found))
