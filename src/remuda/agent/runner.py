"""Control of actions/runner on a machine: register, start, remove, stop. Works with the real and the fake runner."""

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
from urllib.parse import urlsplit

from remuda import procfs
from remuda.agent import job_files, processes
from remuda.agent.job_hook import JobHook
from remuda.agent.job_user import JobUser
from remuda.domain.errors import Unavailable
from remuda.domain.instance import Assignment
from remuda.domain.serialization import from_document, to_document
from remuda.domain.signals import FailureKind
from remuda.ports.clock import Clock
from remuda.ports.machine import RemovalStatus, RunnerState, StepResult
from remuda.procfs import Process

CONFIGURE_LIMIT_S = 120.0
REMOVE_LIMIT_S = 120.0
#: Seconds from SIGTERM to SIGKILL. The real listener can spend 30 s on deleting a session that no longer exists.
STOP_LIMIT_S = 10.0
#: Seconds between two checks of the listener's log.
LOG_POLL_S = 0.05
#: Seconds between two checks of the complete state.
STATE_POLL_S = 1.0
#: Exit code of a listener that an earlier agent started: only its parent can read the real one.
UNKNOWN_EXIT = -1

MAX_DETAIL = 500
MAX_DETAIL_LINES = 6
MAX_FILE_BYTES = 1024 * 1024

_INPUT = "ACTIONS_RUNNER_INPUT_"
#: The runner refuses to run as root without this variable.
_AS_ROOT = {"RUNNER_ALLOW_RUNASROOT": "1"}
_SETTINGS = ".runner"
_REGISTRATION = (_SETTINGS, ".credentials", ".credentials_rsaparams")
#: Output of `config.sh` if GitHub rejects the token.
_REFUSED = re.compile(r"response code: (?:NotFound|Unauthorized|Forbidden) from 'POST", re.IGNORECASE)
_UNREACHABLE = re.compile(
    r"failed to connect|connection refused|connection reset|no such host|name or service not known|timed out"
    r"|response code: (?:InternalServerError|BadGateway|ServiceUnavailable|GatewayTimeout)",
    re.IGNORECASE,
)
_BUSY = re.compile(r"running a job", re.IGNORECASE)
#: `config.sh remove` exits with 0 without calling the server if a file of the registration is missing.
_LOCAL_ONLY = re.compile(r"skipping removing runner from the server", re.IGNORECASE)
#: Output if the server has no such registration any more.
_ALREADY_REMOVED = re.compile(r"does not exist\. skipping removing runner from the server", re.IGNORECASE)
_TIME = r"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ: )?"
_JOB_STARTED = re.compile(_TIME + r"Running job: ")
_JOB_ENDED = re.compile(_TIME + r"Job .* completed with result: ")


@dataclass(frozen=True, kw_only=True, slots=True)
class _JitConfig:
    runner_name: str
    #: Empty after the listener has been started with it.
    config: str = ""


class ActionsRunner:
    """The runner software in `folder`.

    Jobs see no other variables than `environment` (PATH, HOME, TMPDIR, …). Two small files next to `log` hold the
    listener's pid and start time, so that a restarted agent finds it, and a just-in-time configuration until the start.

    If the agent is root, the listener runs as `user`, and `registrar` is a second copy of the runner software that only
    root can access. Registrations are made and removed there, so that a job can neither read a token from a process
    nor receive one through runner software that it changed. The listener gets a copy of the registration.
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
        #: Whether the listener is a child of this process, so that its exit code can be read.
        self._is_child = False
        self._exit_code: int | None = None

    @property
    def _program(self) -> Path:
        return self._folder / "bin" / "Runner.Listener"

    def state(self) -> RunnerState:
        listening = self._is_listening()
        spent = not listening and self._is_spent()
        return RunnerState(
            registered_as=self._registered_as(),
            listening=listening,
            busy=self._is_busy(listening=listening),
            exit_code=self._exit_code,
            spent=spent,
            refused=self.refused() if spent else "",
        )

    async def register(self, assignment: Assignment) -> StepResult:
        if self._is_listening():
            return StepResult(ok=False, detail="a listener of an earlier assignment is still running")
        self._forget()
        # `config.sh` refuses to run if configuration files exist, even incomplete ones left by a crash.
        self._drop_registration()
        if assignment.jit_config:
            kept = _JitConfig(runner_name=assignment.runner_name, config=assignment.jit_config)
            _write(self._jit_file, to_document(kept))
            return StepResult(ok=True, detail="configured just in time: the listener starts with the configuration")
        if assignment.credential is None:
            return StepResult(ok=False, detail="the assignment has no registration token")
        updates = _update_flags(assignment.url)
        flags = ("--unattended", "--no-default-labels", *updates, "--replace", "--work", str(self._work))
        inputs = {
            "URL": assignment.url,
            "TOKEN": assignment.credential.token,
            "NAME": assignment.runner_name,
            "LABELS": ",".join(assignment.labels),
        }
        if assignment.runner_group:
            inputs["RUNNERGROUP"] = assignment.runner_group
        code, output = await self._config(flags, inputs, CONFIGURE_LIMIT_S)
        ok = code == 0 and self._registered_as() == assignment.runner_name
        if ok:
            self._copy_registration()
        failure: FailureKind | None = None
        if not ok and _REFUSED.search(output):
            failure = FailureKind.CREDENTIAL_REFUSED
        elif not ok and _UNREACHABLE.search(output):
            failure = FailureKind.GITHUB_UNREACHABLE
        return StepResult(ok=ok, detail=_describe_result(code, output), failure=failure)

    async def start(self, assignment: Assignment) -> None:
        if self._is_listening():
            return
        environment = self._environment | self._hook.put(assignment, runner=self._folder, environment=self._environment)
        jit = self._jit_config()
        if jit is not None and jit.config:
            environment[_INPUT + "JITCONFIG"] = jit.config
            # Drop the configuration before any job runs. Keep the name until the listener writes the registration.
            _write(self._jit_file, to_document(_JitConfig(runner_name=jit.runner_name)))
        if self._log.exists():
            # One log per listener, so that lines of an earlier listener do not count.
            self._log.replace(self._log.with_name(f"{self._log.name}.1"))
        self._jobs = _JobLog(self._log)
        self._exit_code = None
        # Remove the file before the start: after a crash, a stale file would hide the new listener.
        self._listener_file.unlink(missing_ok=True)
        try:
            with self._log.open("ab") as output:
                process = subprocess.Popen(  # noqa: ASYNC220  # not awaited: the listener outlives this agent
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
            raise Unavailable(f"cannot start the listener: {problem}") from problem
        if self._user is not None:
            processes.reset_oom_score(process.pid)
        # We call waitpid ourselves; an unfinished Popen object would emit a ResourceWarning.
        process.returncode = 0
        self._is_child = True
        self._listener = _started(process.pid)
        self._save_listener(self._listener)

    def refused(self) -> str:
        return self._hook.refused()

    async def remove(self, assignment: Assignment) -> tuple[RemovalStatus, str]:
        if self._jit_config() is not None and not assignment.runner_id:
            self._drop_registration()
            self._jit_file.unlink(missing_ok=True)
            return RemovalStatus.REMOVED, "registered just in time; already removed from GitHub"
        if not (self._registrar / _SETTINGS).exists():
            return self._nothing_to_remove()
        if assignment.credential is None:
            return RemovalStatus.FAILED, "the assignment has no removal token"
        code, output = await self._config(("remove",), {"TOKEN": assignment.credential.token}, REMOVE_LIMIT_S)
        detail = _describe_result(code, output)
        if code == 0 and not (self._registrar / _SETTINGS).exists():
            self._drop_registration()
            local_only = _LOCAL_ONLY.search(output) and not _ALREADY_REMOVED.search(output)
            if local_only:
                return RemovalStatus.FAILED, f"removed on this machine only: {detail}"
            return RemovalStatus.REMOVED, detail
        if _BUSY.search(output):
            return RemovalStatus.BUSY, detail
        return (RemovalStatus.UNREACHABLE if _UNREACHABLE.search(output) else RemovalStatus.FAILED), detail

    def _nothing_to_remove(self) -> tuple[RemovalStatus, str]:
        """Result if `config.sh` made no registration. The listener may have a just-in-time registration."""
        jit = self._jit_config()
        if jit is None:
            return RemovalStatus.REMOVED, "no registration on this machine"
        if jit.config:
            return (
                RemovalStatus.FAILED,
                "registered just in time but never started; it must be removed through the API",
            )
        if (self._folder / _SETTINGS).exists():
            # Jobs can write to this file and could direct the token to another server.
            return RemovalStatus.FAILED, "registered just in time; it must be removed through the API"
        if self._is_listening():
            return RemovalStatus.UNREACHABLE, "the listener has not written its registration yet"
        self._jit_file.unlink(missing_ok=True)
        return RemovalStatus.REMOVED, "registered for one job, which has ended"

    async def stop(self) -> None:
        listener = self._listener
        if listener is not None and self._is_listening():
            if not await _signal_and_wait(listener, signal.SIGTERM, self._stop_limit_s):
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
                await self._wait_for_listener(self._listener, min(left, STATE_POLL_S))
            else:
                await self._clock.sleep(min(left, STATE_POLL_S) if state.busy else left)

    async def _wait_for_listener(self, listener: Process, timeout_s: float) -> None:
        """Wait until the listener ends or writes to its log."""
        try:
            descriptor = os.pidfd_open(listener.pid)
        except ProcessLookupError:
            return
        limit = self._clock.monotonic() + timeout_s
        try:
            while self._clock.monotonic() < limit and not self._jobs.has_grown():
                if await processes.wait_for_end(descriptor, LOG_POLL_S):
                    return
        finally:
            os.close(descriptor)

    # State on disk and of processes

    def _is_listening(self) -> bool:
        listener = self._listener
        if listener is None:
            return False
        if self._is_child:
            with contextlib.suppress(ChildProcessError):
                ended, status = os.waitpid(listener.pid, os.WNOHANG)
                if ended:
                    self._forget_listener(os.waitstatus_to_exitcode(status))
                return not ended
        if procfs.is_alive(listener.pid, listener.started):
            return True
        self._forget_listener(UNKNOWN_EXIT)
        return False

    def _forget_listener(self, code: int | None) -> None:
        self._listener = None
        self._is_child = False
        self._exit_code = code

    def _find_listener(self) -> Process | None:
        document = _read(self._listener_file)
        if document is not None:
            with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError):
                return Process(pid=int(document["pid"]), ppid=0, started=int(document["started"]))
        # An agent that is killed right after the start leaves no file.
        for process in processes.find_running(self._program, procfs.all_processes().values()):
            if processes.command(process.pid)[-1:] == ("run",):
                self._save_listener(process)
                return process
        return None

    def _save_listener(self, listener: Process) -> None:
        _write(self._listener_file, {"pid": listener.pid, "started": listener.started})

    def _registered_as(self) -> str:
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
        """Whether a listener that was registered for one job has ended regularly. It deletes its files then, which
        shows its regular end if the exit code is unknown.
        """
        jit = self._jit_config()
        if jit is None or jit.config:
            return False
        return self._exit_code == 0 or (self._exit_code == UNKNOWN_EXIT and not (self._folder / _SETTINGS).exists())

    def _is_busy(self, *, listening: bool) -> bool:
        """Whether a job is running, by the log or by a worker process, because each can lag behind the other. After
        the listener has ended, its log alone proves nothing.
        """
        running_by_log = self._jobs.is_running()
        worker = self._folder / "bin" / "Runner.Worker"
        if listening and self._listener is not None:
            return running_by_log or any(processes.find_running(worker, processes.children(self._listener.pid)))
        return running_by_log and any(processes.find_running(worker, procfs.all_processes().values()))

    def _forget(self) -> None:
        self._listener_file.unlink(missing_ok=True)
        self._jit_file.unlink(missing_ok=True)
        self._forget_listener(None)
        self._jobs.close()

    def _drop_registration(self) -> None:
        """Remove the registration's files. Raises `Unavailable` if a job has put a folder in place of a file."""
        try:
            for path in (self._registrar, self._folder):
                with job_files.opened(path) as folder:
                    for name in _REGISTRATION:
                        job_files.drop(folder, name)
        except OSError as problem:
            raise Unavailable(f"cannot remove the registration's files: {problem}") from problem

    def _copy_registration(self) -> None:
        """Copy the files that `config.sh` made to the listener's folder."""
        if self._registrar == self._folder:
            return
        try:
            with job_files.opened(self._folder) as folder:
                for source in (self._registrar / name for name in _REGISTRATION):
                    if source.exists():
                        job_files.put(folder, source.name, source.read_bytes(), mode=0o600, owner=self._user)
        except OSError as problem:
            raise Unavailable(f"cannot copy the registration to the listener: {problem}") from problem

    async def _config(
        self, arguments: Sequence[str], inputs: Mapping[str, str], limit_s: float
    ) -> tuple[int | None, str]:
        """Run `config.sh`. Its inputs are in the environment because every user can read command lines."""
        step = f"config {self._registrar}"
        # A `config.sh` that an earlier agent started could finish later and overwrite the result of this one.
        await asyncio.to_thread(procfs.kill_step, step)
        environment = self._environment | {_INPUT + name: value for name, value in inputs.items()}
        environment[procfs.STEP] = step
        if self._registrar != self._folder:
            environment |= {**_AS_ROOT, "HOME": str(self._registrar), "TMPDIR": str(self._registrar)}
        command = [str(self._registrar / "config.sh"), *arguments]
        code, output = await processes.run(
            command, cwd=self._registrar, environment=environment, timeout_s=limit_s, temp_dir=self._log.parent
        )
        return code, output.replace(inputs["TOKEN"] or "***", "***")


class _JobLog:
    """Reads from the listener's growing output whether a job is running."""

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
        """Whether the last line about a job is a start."""
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
        """Forget a running job, because the listener was stopped."""
        self._running = False

    def _take(self, line: str) -> None:
        # Check for a start first: a job's name may look like an end.
        if _JOB_STARTED.match(line):
            self._running = True
        elif _JOB_ENDED.match(line):
            self._running = False


def _update_flags(url: str) -> tuple[str, ...]:
    """Older GitHub Enterprise Servers refuse runners without updates (actions/runner, ConfigurationManager.cs)."""
    host = urlsplit(url).hostname or ""
    return ("--disableupdate",) if host == "github.com" or host.endswith(".ghe.com") else ()


def _started(pid: int) -> Process:
    """Return the child process. Its pid is valid until it is reaped, even if it has ended already."""
    return procfs.read_process(pid) or Process(pid=pid, ppid=os.getpid(), started=0)


async def _signal_and_wait(process: Process, number: signal.Signals, timeout_s: float) -> bool:
    """Signal the process and wait for its end. Return whether it has ended."""
    descriptor = processes.send_signal(process, number)
    if descriptor is None:
        return True
    try:
        return await processes.wait_for_end(descriptor, timeout_s)
    finally:
        os.close(descriptor)


def _describe_result(code: int | None, output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()][-MAX_DETAIL_LINES:]
    end = "killed at the time limit" if code is None else f"exit code {code}"
    return f"{end}: {' | '.join(lines)[-MAX_DETAIL:]}"


def _read(path: Path) -> dict[str, Any] | None:
    """Read a JSON object, or return None. A job may have replaced the file by a pipe or a huge file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:  # noqa: PTH123  # a descriptor
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            # The real runner writes a byte order mark.
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
