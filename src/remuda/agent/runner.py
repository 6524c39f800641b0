"""actions/runner, driven: configure, listen, remove, stop. The same for the real one and the stand-in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import stat
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from remuda import procfs
from remuda.agent import job_files, processes
from remuda.agent.job_hook import JobHook
from remuda.agent.job_user import JobUser
from remuda.domain.errors import Unavailable
from remuda.domain.instance import Assignment
from remuda.domain.serialization import from_document, to_document
from remuda.domain.signals import CREDENTIAL_REFUSED, FORGE_UNREACHABLE
from remuda.ports.clock import Clock
from remuda.ports.machine import StepResult
from remuda.ports.runner import RemovalStatus, RunnerState
from remuda.procfs import Process

CONFIGURE_LIMIT_S = 120.0
REMOVE_LIMIT_S = 120.0
#: From SIGTERM to SIGKILL. The real listener may take 30 s to delete a session that is gone with its registration.
STOP_LIMIT_S = 10.0
#: How often the log is looked at while there is a listener.
POLL_S = 0.05
#: How often all the rest is.
LOOK_S = 1.0
#: The exit code of a listener whose end nobody of ours saw: it was started by an earlier agent.
UNKNOWN_EXIT = -1

MAX_DETAIL = 500
MAX_DETAIL_LINES = 6
MAX_FILE_BYTES = 1024 * 1024

_INPUT = "ACTIONS_RUNNER_INPUT_"
#: Without it the runner refuses to be run by root.
_AS_ROOT = {"RUNNER_ALLOW_RUNASROOT": "1"}
_SETTINGS = ".runner"
_REGISTRATION = (_SETTINGS, ".credentials", ".credentials_rsaparams")
#: What `config.sh` says when the service does not take the token.
_REFUSED = re.compile(r"response code: (?:NotFound|Unauthorized|Forbidden) from 'POST", re.IGNORECASE)
_UNREACHABLE = re.compile(
    r"failed to connect|connection refused|connection reset|no such host|name or service not known|timed out"
    r"|response code: (?:InternalServerError|BadGateway|ServiceUnavailable|GatewayTimeout)",
    re.IGNORECASE,
)
_BUSY = re.compile(r"running a job", re.IGNORECASE)
#: `config.sh remove` succeeds without having asked the server where a file of the registration is missing.
_ONLY_HERE = re.compile(r"skipping removing runner from the server", re.IGNORECASE)
#: The server says so where the registration is gone there already.
_GONE = re.compile(r"does not exist\. skipping removing runner from the server", re.IGNORECASE)
_TIME = r"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ: )?"
_JOB_STARTED = re.compile(_TIME + r"Running job: ")
_JOB_ENDED = re.compile(_TIME + r"Job .* completed with result: ")


@dataclass(frozen=True, kw_only=True, slots=True)
class _JitConfig:
    runner_name: str
    #: Empty once the listener has it.
    config: str = ""


class ActionsRunner:
    """`environment` is all that jobs get to see (PATH, HOME, TMPDIR, …). Beside `log` two small files are kept: the
    listener's pid and start time, by which a later agent finds it, and a just-in-time configuration until its start.

    Where the agent is root, `user` runs the listener, and `registrar` is a second copy of the runner's software that
    only root can reach: registrations are made and removed from there. So no token is ever in a process that a job may
    look into, nor in the hands of software that a job may have changed. The listener gets a copy of the registration.
    """

    def __init__(
        self,
        *,
        folder: Path,
        work: Path,
        log: Path,
        clock: Clock,
        environment: Mapping[str, str],
        hook: JobHook,
        user: JobUser | None = None,
        registrar: Path | None = None,
        stop_limit_s: float = STOP_LIMIT_S,
    ) -> None:
        self._folder = folder
        self._user = user
        self._registrar = registrar or folder
        self._work = work
        self._hook = hook
        self._log = log
        self._clock = clock
        self._stop_limit_s = stop_limit_s
        self._environment = {"PATH": os.defpath, "LANG": "C.UTF-8", **environment}
        if os.geteuid() == 0 and user is None:
            self._environment |= _AS_ROOT
        self._listener_file = log.with_suffix(".listener.json")
        self._jit_file = log.with_suffix(".jit.json")
        self._jobs = _JobLog(log)
        self._listener = self._find_listener()
        #: The listener is our child: its exit code will be told to us.
        self._is_ours = False
        self._exit_code: int | None = None

    @property
    def _program(self) -> Path:
        return self._folder / "bin" / "Runner.Listener"

    def state(self) -> RunnerState:
        listening = self._is_listening()
        spent = not listening and self._is_spent()
        return RunnerState(
            configured_as=self._configured_as(),
            listening=listening,
            busy=self._is_busy(listening=listening),
            exit_code=self._exit_code,
            spent=spent,
            refused=self.refused() if spent else "",
        )

    async def configure(self, assignment: Assignment) -> StepResult:
        if self._is_listening():
            return StepResult(ok=False, detail="a listener of an earlier assignment is still running")
        self._forget()
        # It refuses to configure over a configuration, a half one of a crash too; the server's is replaced.
        self._drop_registration()
        if assignment.jit_config:
            kept = _JitConfig(runner_name=assignment.runner_name, config=assignment.jit_config)
            _write(self._jit_file, to_document(kept))
            return StepResult(ok=True, detail="configured just in time: the listener brings the configuration with it")
        if assignment.credential is None:
            return StepResult(ok=False, detail="there is no registration token in the assignment")
        flags = ("--unattended", "--no-default-labels", "--disableupdate", "--replace", "--work", str(self._work))
        inputs = {
            "URL": assignment.url,
            "TOKEN": assignment.credential.token,
            "NAME": assignment.runner_name,
            "LABELS": ",".join(assignment.labels),
        }
        code, output = await self._config(flags, inputs, CONFIGURE_LIMIT_S)
        ok = code == 0 and self._configured_as() == assignment.runner_name
        if ok:
            self._give_registration()
        story = _story(code, output)
        if not ok and _REFUSED.search(output):
            story = f"{CREDENTIAL_REFUSED}: {story}"
        elif not ok and _UNREACHABLE.search(output):
            story = f"{FORGE_UNREACHABLE}: {story}"
        return StepResult(ok=ok, detail=story)

    async def start(self, assignment: Assignment) -> None:
        if self._is_listening():
            return
        environment = self._environment | self._hook.put(assignment, runner=self._folder, environment=self._environment)
        jit = self._jit_config()
        if jit is not None and jit.config:
            environment[_INPUT + "JITCONFIG"] = jit.config
            # Out of the job's sight. The name stays: the listener takes a moment to write the registration's files.
            _write(self._jit_file, to_document(_JitConfig(runner_name=jit.runner_name)))
        if self._log.exists():
            # Each listener has a log of its own, so that no line of an earlier one counts.
            self._log.replace(self._log.with_name(f"{self._log.name}.1"))
        self._jobs = _JobLog(self._log)
        self._exit_code = None
        # Before the start: a stale one would hide the new listener from an agent that comes after a crash.
        self._listener_file.unlink(missing_ok=True)
        try:
            with self._log.open("ab") as output:
                process = subprocess.Popen(  # noqa: ASYNC220  # its end is nothing to wait for: it outlives this agent
                    [str(self._program), "run"],
                    cwd=self._folder,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    **processes.user_arguments(self._user),
                )
        except OSError as problem:
            raise Unavailable(f"the listener cannot be started: {problem}") from problem
        if self._user is not None:
            processes.reset_oom_score(process.pid)
        # The kernel is asked for its end, not this object, which would complain about being outlived.
        process.returncode = 0
        self._is_ours = True
        self._listener = _started(process.pid)
        self._note(self._listener)

    def refused(self) -> str:
        return self._hook.refused()

    async def remove(self, assignment: Assignment) -> tuple[RemovalStatus, str]:
        if self._jit_config() is not None and not assignment.runner_id:
            self._drop_registration()
            self._jit_file.unlink(missing_ok=True)
            return RemovalStatus.REMOVED, "it was registered just in time, and GitHub has removed it"
        if not (self._registrar / _SETTINGS).exists():
            return self._nothing_to_remove()
        if assignment.credential is None:
            return RemovalStatus.FAILED, "there is no removal token in the assignment"
        code, output = await self._config(("remove",), {"TOKEN": assignment.credential.token}, REMOVE_LIMIT_S)
        detail = _story(code, output)
        if code == 0 and not (self._registrar / _SETTINGS).exists():
            self._drop_registration()
            only_here = _ONLY_HERE.search(output) and not _GONE.search(output)
            return (
                (RemovalStatus.FAILED, f"removed on this machine only: {detail}")
                if only_here
                else (RemovalStatus.REMOVED, detail)
            )
        if _BUSY.search(output):
            return RemovalStatus.BUSY, detail
        return (RemovalStatus.UNREACHABLE if _UNREACHABLE.search(output) else RemovalStatus.FAILED), detail

    def _nothing_to_remove(self) -> tuple[RemovalStatus, str]:
        """There is no registration of `config.sh`'s. A listener may have made one by itself, just in time."""
        jit = self._jit_config()
        if jit is None:
            return RemovalStatus.REMOVED, "there is no registration on this machine"
        if jit.config:
            return (
                RemovalStatus.FAILED,
                "it was registered just in time and never started: only the service can remove it",
            )
        if (self._folder / _SETTINGS).exists():
            # Made where jobs may write: they may name another service for the token to go to.
            return RemovalStatus.FAILED, "it was registered just in time: only the service can remove it"
        if self._is_listening():
            return RemovalStatus.UNREACHABLE, "the listener has yet to write what it is registered as"
        self._jit_file.unlink(missing_ok=True)
        return RemovalStatus.REMOVED, "it was registered for one job, which is over"

    async def stop(self) -> None:
        listener = self._listener
        if listener is not None and self._is_listening():
            if not await _stopped(listener, signal.SIGTERM, self._stop_limit_s):
                await asyncio.to_thread(processes.kill, [listener, *procfs.descendants(listener.pid)])
            self._is_listening()
        self._forget()

    async def wait_for_change(self, since: RunnerState, timeout_s: float) -> RunnerState:
        limit = self._clock.monotonic() + timeout_s
        while True:
            state = self.state()
            left = limit - self._clock.monotonic()
            if state != since or left <= 0:
                return state
            if state.listening and self._listener is not None:
                await self._watch(self._listener, min(left, LOOK_S))
            else:
                await self._clock.sleep(min(left, LOOK_S) if state.busy else left)

    async def _watch(self, listener: Process, timeout_s: float) -> None:
        """Until the listener has ended or written something."""
        try:
            descriptor = os.pidfd_open(listener.pid)
        except ProcessLookupError:
            return
        limit = self._clock.monotonic() + timeout_s
        try:
            while self._clock.monotonic() < limit and not self._jobs.has_grown():
                if await processes.wait_for_end(descriptor, POLL_S):
                    return
        finally:
            os.close(descriptor)

    # What is there

    def _is_listening(self) -> bool:
        listener = self._listener
        if listener is None:
            return False
        if self._is_ours:
            with contextlib.suppress(ChildProcessError):
                ended, status = os.waitpid(listener.pid, os.WNOHANG)
                if ended:
                    self._ended(os.waitstatus_to_exitcode(status))
                return not ended
        if procfs.is_alive(listener.pid, listener.started):
            return True
        self._ended(UNKNOWN_EXIT)
        return False

    def _ended(self, code: int) -> None:
        self._listener = None
        self._is_ours = False
        self._exit_code = code

    def _find_listener(self) -> Process | None:
        document = _read(self._listener_file)
        if document is not None:
            with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
                return Process(pid=int(document["pid"]), ppid=0, started=int(document["started"]))
        # An agent that was killed right after the start had no time to write it down.
        for process in processes.find_running(self._program, procfs.all_processes().values()):
            if processes.command(process.pid)[-1:] == ("run",):
                self._note(process)
                return process
        return None

    def _note(self, listener: Process) -> None:
        _write(self._listener_file, {"pid": listener.pid, "started": listener.started})

    def _configured_as(self) -> str:
        name = (_read(self._registrar / _SETTINGS) or {}).get("agentName")
        if isinstance(name, str) and name:
            return name
        jit = self._jit_config()
        return "" if jit is None else jit.runner_name

    def _jit_config(self) -> _JitConfig | None:
        document = _read(self._jit_file)
        if document is not None:
            with contextlib.suppress(ValueError):
                return from_document(_JitConfig, document)
        return None

    def _is_spent(self) -> bool:
        """Whether a listener that was registered for one job has ended in order. It takes its files with it; one whose
        exit code nobody saw is known by that.
        """
        jit = self._jit_config()
        if jit is None or jit.config:
            return False
        return self._exit_code == 0 or (self._exit_code == UNKNOWN_EXIT and not (self._folder / _SETTINGS).exists())

    def _is_busy(self, *, listening: bool) -> bool:
        """By the log or by a worker process: each may be late. A dead listener's log says nothing about now."""
        told = self._jobs.is_running()
        worker = self._folder / "bin" / "Runner.Worker"
        if listening and self._listener is not None:
            return told or any(processes.find_running(worker, processes.children(self._listener.pid)))
        return told and any(processes.find_running(worker, procfs.all_processes().values()))

    def _forget(self) -> None:
        self._listener_file.unlink(missing_ok=True)
        self._jit_file.unlink(missing_ok=True)
        self._listener = None
        self._is_ours = False
        self._exit_code = None
        self._jobs.close()

    def _drop_registration(self) -> None:
        """`Unavailable` where a job has put something in its place that is not to be removed by the way."""
        try:
            for path in (self._registrar, self._folder):
                with job_files.opened(path) as folder:
                    for name in _REGISTRATION:
                        job_files.drop(folder, name)
        except OSError as problem:
            raise Unavailable(f"the registration's files cannot be removed: {problem}") from problem

    def _give_registration(self) -> None:
        """Let the listener have what `config.sh` made."""
        if self._registrar == self._folder:
            return
        try:
            with job_files.opened(self._folder) as folder:
                for source in (self._registrar / name for name in _REGISTRATION):
                    if source.exists():
                        job_files.put(folder, source.name, source.read_bytes(), mode=0o600, owner=self._user)
        except OSError as problem:
            raise Unavailable(f"the listener cannot be given its registration: {problem}") from problem

    async def _config(
        self, arguments: Sequence[str], inputs: Mapping[str, str], limit_s: float
    ) -> tuple[int | None, str]:
        """`config.sh`, with its inputs in the environment: a command line is for everyone to read."""
        step = f"config {self._registrar}"
        # One that an earlier agent began would finish later and replace what this one does.
        await asyncio.to_thread(procfs.kill_step, step)
        environment = self._environment | {_INPUT + name: value for name, value in inputs.items()}
        environment[procfs.STEP] = step
        if self._registrar != self._folder:
            environment |= {**_AS_ROOT, "HOME": str(self._registrar), "TMPDIR": str(self._registrar)}
        command = [str(self._registrar / "config.sh"), *arguments]
        code, output = await processes.run(
            command, folder=self._registrar, environment=environment, limit_s=limit_s, scratch=self._log.parent
        )
        return code, output.replace(inputs["TOKEN"] or "***", "***")


class _JobLog:
    """What the listener's output tells about jobs, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._partial = b""
        self._running = False

    def has_grown(self) -> bool:
        with contextlib.suppress(OSError):
            return self._path.stat().st_size != self._offset
        return False

    def is_running(self) -> bool:
        """The last of the lines about jobs says that one began."""
        if not self.has_grown():
            return self._running
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while chunk := file.read(MAX_FILE_BYTES):
                self._offset += len(chunk)
                *lines, self._partial = (self._partial[-MAX_FILE_BYTES:] + chunk).split(b"\n")
                for line in lines:
                    self._take(line.decode(errors="replace"))
        return self._running

    def close(self) -> None:
        """The listener was stopped: what it last said is over."""
        self._running = False

    def _take(self, line: str) -> None:
        # In this order: a job's name may look like anything.
        if _JOB_STARTED.match(line):
            self._running = True
        elif _JOB_ENDED.match(line):
            self._running = False


def _started(pid: int) -> Process:
    """Of a child that is not reaped yet: its number is its own, even where it has ended already."""
    return procfs.read_process(pid) or Process(pid=pid, ppid=os.getpid(), started=0)


async def _stopped(process: Process, number: signal.Signals, timeout_s: float) -> bool:
    descriptor = processes.send_signal(process, number)
    if descriptor is None:
        return True
    try:
        return await processes.wait_for_end(descriptor, timeout_s)
    finally:
        os.close(descriptor)


def _story(code: int | None, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()][-MAX_DETAIL_LINES:]
    ending = "no end in time" if code is None else f"exit code {code}"
    return f"{ending}: {' | '.join(lines)[-MAX_DETAIL:]}"


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None. Jobs can put anything in its place: neither a pipe nor a giant may hold us up."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:  # noqa: PTH123  # a descriptor
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            # The real runner begins its files with a byte order mark.
            document = json.loads(file.read(MAX_FILE_BYTES).decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _write(path: Path, document: Mapping[str, Any]) -> None:
    draft = path.with_name(f".{path.name}.new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123  # a descriptor
        json.dump(document, file)
    draft.replace(path)
