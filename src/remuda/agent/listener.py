"""The listener of actions/runner: start, exit code, running job, stop. It outlives the agent that started it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO, Protocol

from remuda import inotify, procfs
from remuda.agent import processes
from remuda.domain.errors import Unavailable
from remuda.domain.instance import Assignment
from remuda.domain.text import sanitize
from remuda.ports.clock import Clock
from remuda.procfs import Process

#: Seconds from SIGTERM to SIGKILL. The real listener can spend 30 s on deleting a session that no longer exists.
STOP_LIMIT_S = 10.0
#: Seconds between two checks of the listener's log if the kernel does not report its changes.
LOG_POLL_S = 0.05
#: Names of the runner's programs in the process list. Both are executables; the kernel shows up to 15 bytes of a name.
LISTENER, WORKER = "Runner.Listener", "Runner.Worker"
#: Exit code of a listener that was killed.
KILLED = -1
MAX_CHUNK = 1024 * 1024
#: Bytes that are read at once; older ones are skipped.
MAX_BACKLOG = 64 * 1024 * 1024
#: Bytes kept of the log of the listener before.
KEPT_LOG_BYTES = 256 * 1024

#: Message of a listener whose registration does not exist any more (BrokerMessageListener.cs, CreateSessionAsync).
REGISTRATION_DELETED = "The runner registration has been deleted from the server"
#: Bytes at the end of the log in which the last error is searched, and maximum characters of its message.
ERROR_BYTES = 16 * 1024
MAX_ERROR = 300
#: Runner.Listener/Program.cs, MainAsync. Older versions write "occured".
_ERROR = re.compile(r"^An error occurr?ed: (.*)$", re.MULTILINE)

_TIME = r"(?:\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ: )?"
_JOB_STARTED = re.compile(_TIME + r"Running job: ")
_JOB_ENDED = re.compile(_TIME + r"Job .* completed with result: ")
#: Argument for a start after the listener has ended to update itself.
UPDATING = "updating"
#: Seconds until the update of the runner must have finished.
UPDATE_LIMIT_S = 30
# Source: actions/runner 2.336.0, src/Misc/layoutroot/run-helper.sh.template. The update is a separate process, which
# begins when the listener has ended (src/Misc/layoutbin/update.sh.template).
#: Waits in the runner's folder for the end of an update.
WAIT_FOR_UPDATE = (
    f"for _ in $(seq {UPDATE_LIMIT_S}); do [ ! -f update.finished ] || break; sleep 1; done; rm -rf update.finished"
)
#: A process that stays outside the listener's control, so that its exit code can be trusted, also by the next agent.
#: It may join a cgroup first, and gives up the agent's protection against a lack of memory. After the exit codes of a
#: self-update it starts the listener again, with the same input from its beginning.
#: PATH is that of jobs.
_WRAPPER = f"""
read -r process </proc/$$/stat
echo "$process" >"$1/listener.pid.new" && /bin/mv "$1/listener.pid.new" "$1/listener.pid"
[ -z "$2" ] || echo $$ >"$2" || exit 125
echo 0 >/proc/self/oom_score_adj
folder=$1
shift 2
"$@" </proc/self/fd/0
code=$?
while [ $code = 3 ] || [ $code = 4 ]; do
  "$@" {UPDATING} </proc/self/fd/0
  code=$?
done
echo $code >"$folder/exit-code.new" && /bin/mv "$folder/exit-code.new" "$folder/exit-code"
"""

#: Files by their paths: content and mode.
Files = Mapping[PurePath, tuple[bytes, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class StartCommand:
    """Command with which the agent starts the listener."""

    #: With `UPDATING` as an additional argument, the program must wait for the end of the runner's update first.
    arguments: tuple[str, ...]
    stdin: IO[bytes] | None = None
    #: The file of the cgroup that the processes must join.
    cgroup: Path | None = None


class JobHost(Protocol):
    """Environment of the listener and its jobs: a sandbox, or a folder of this machine."""

    @property
    def runner_folder(self) -> PurePath:
        """The runner software as the listener sees it."""

    async def ready(self) -> None:
        """Wait until a listener can be started. Raises `Unavailable` if it never can."""

    async def prepare_start(self, assignment: Assignment, files: Files) -> StartCommand:
        """Write the files where the listener finds them, and remove `.env` and `.path` if they are not among them."""

    def processes(self) -> list[Process]:
        """Return the processes of the listener and its jobs, as far as the host knows them. Never waits for one."""


class Listener:
    """`folder` holds the process' identity and the exit code; jobs should not be able to write there."""

    def __init__(
        self, *, host: JobHost, folder: Path, log: Path, clock: Clock, stop_limit_s: float = STOP_LIMIT_S
    ) -> None:
        self._host = host
        self._folder = folder
        self._log = log
        self._clock = clock
        self._stop_limit_s = stop_limit_s
        self._jobs = _JobLog(log)
        self._wrapper = self._find_wrapper()
        #: Whether this process has watched the listener since its start.
        self._watched = False

    async def start(self, assignment: Assignment, files: Files, environment: Mapping[str, str]) -> None:
        command = await self._host.prepare_start(assignment, files)
        self.forget()
        self._keep_log()
        self._jobs = _JobLog(self._log)
        cgroup = "" if command.cgroup is None else str(command.cgroup)
        arguments = ("/bin/sh", "-c", _WRAPPER, "sh", str(self._folder), cgroup, *command.arguments)
        try:
            with self._log.open("ab") as output:
                process = subprocess.Popen(  # noqa: ASYNC220  # not awaited: the listener outlives this agent
                    arguments,
                    env=environment,
                    stdin=subprocess.DEVNULL if command.stdin is None else command.stdin,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
        except OSError as problem:
            raise Unavailable(f"cannot start the listener: {problem}") from problem
        finally:
            if command.stdin is not None:
                command.stdin.close()
        # An unfinished Popen object would emit a ResourceWarning; `is_running` reaps the process.
        process.returncode = 0
        self._wrapper = procfs.read_process(process.pid)
        self._watched = True

    @property
    def was_started(self) -> bool:
        return self._pid_file.exists()

    def is_running(self) -> bool:
        wrapper = self._wrapper
        if wrapper is None:
            return False
        if procfs.is_alive(wrapper.pid, wrapper.started):
            return True
        with contextlib.suppress(ChildProcessError):
            os.waitpid(wrapper.pid, os.WNOHANG)
        return False

    def exit_code(self) -> int | None:
        """The exit code of the last listener, or None if there was none or it is running."""
        if not self._pid_file.exists() or self.is_running():
            return None
        try:
            return int(self._exit_code_file.read_text())
        except (OSError, ValueError):
            return KILLED

    def last_error(self) -> str:
        """The last error message in the log, or an empty text."""
        found = _ERROR.findall(self._end_of_log())
        return sanitize(found[-1].strip())[:MAX_ERROR] if found else ""

    def lost_registration(self) -> bool:
        """Whether the listener has ended because GitHub sent it away. A job can forge this."""
        code = self.exit_code()
        # Runner.Listener/Runner.cs, RunAsync, of actions/runner 2.336.0 returns 0 without a job in three cases: its
        # access token was revoked while it listened; its registration was removed while it listened (commit 67cbf96ce);
        # it was registered for one job, and that job did not exist any more at its acknowledgement (commit 802fd9c0b).
        return code == 0 or (code is not None and REGISTRATION_DELETED in self._end_of_log())

    def _end_of_log(self) -> str:
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - ERROR_BYTES))
                return file.read(ERROR_BYTES).decode(errors="replace")
        except OSError:
            return ""

    def had_job(self) -> bool:
        """Whether the last listener may have begun a job.

        A listener that ended without an error and that this process has not watched from its start may have run one
        that no one noticed.
        """
        return self.saw_job() or (not self._watched and self.exit_code() == 0)

    def saw_job(self) -> bool:
        """Whether a job of the last listener was seen. Its first sight is noted on disk: a job can truncate the log."""
        if self._job_file.exists():
            return True
        busy = self.is_busy()
        if busy or self._jobs.seen:
            # On a full disk, this process remembers it, and tries again with the next call.
            with contextlib.suppress(OSError):
                self._job_file.touch()
            return True
        return False

    def is_busy(self) -> bool:
        """Whether a job is running, by the log or by a worker process, because each can lag behind the other. After
        the listener has ended, its log alone proves nothing.
        """
        running_by_log = self._jobs.is_running()
        if self.is_running() and self._wrapper is not None:
            return running_by_log or self._has_worker()
        return running_by_log and self._has_worker()

    def _has_worker(self) -> bool:
        return any(process.name == WORKER for process in self._host.processes())

    async def stop(self) -> None:
        """Stop the listener, if necessary by force."""
        wrapper = self._wrapper
        if wrapper is not None and self.is_running():
            found = [process for process in self._host.processes() if process.name == LISTENER]
            for process in found:
                descriptor = processes.send_signal(process, signal.SIGTERM)
                if descriptor is not None:
                    os.close(descriptor)
            # One that is not found has not begun yet or is another program by now: there is nothing to wait for.
            if not found or not await self.wait(self._stop_limit_s, for_log=False):
                await asyncio.to_thread(_kill_tree, wrapper)
            self.is_running()
        self.forget()

    async def wait(self, timeout_s: float, *, for_log: bool = True) -> bool:
        """Wait until the listener ends or, with `for_log`, writes to its log. Return whether it has ended."""
        if self._wrapper is None:
            return True
        try:
            descriptor = os.pidfd_open(self._wrapper.pid)
        except ProcessLookupError:
            return True
        limit = self._clock.monotonic() + timeout_s
        log_changed = asyncio.Event()
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            polls = for_log and not stack.enter_context(inotify.watch(self._log, log_changed.set))
            while (left := limit - self._clock.monotonic()) > 0 and not (for_log and self._jobs.has_grown()):
                log_changed.clear()
                if await processes.wait_for_end(descriptor, min(left, LOG_POLL_S) if polls else left, log_changed):
                    return True
        return False

    def forget(self) -> None:
        """Forget the last listener and its job."""
        self._pid_file.unlink(missing_ok=True)
        self._exit_code_file.unlink(missing_ok=True)
        self._job_file.unlink(missing_ok=True)
        self._wrapper = None
        self._jobs.close()

    @property
    def _job_file(self) -> Path:
        return self._folder / "job-seen"

    @property
    def _pid_file(self) -> Path:
        return self._folder / "listener.pid"

    @property
    def _exit_code_file(self) -> Path:
        return self._folder / "exit-code"

    def _find_wrapper(self) -> Process | None:
        """Find the process that an earlier agent started. Another process may have its pid by now."""
        try:
            wrapper = procfs.parse_stat(self._pid_file.read_bytes())
        except (OSError, ValueError):
            return None
        return wrapper if wrapper is not None and procfs.is_alive(wrapper.pid, wrapper.started) else None

    def _keep_log(self) -> None:
        """Begin a new log, so that lines of an earlier listener do not count. Keep the end of the old one."""
        # There may be no log, and no space for a copy.
        with contextlib.suppress(OSError):
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - KEPT_LOG_BYTES))
                end = file.read(KEPT_LOG_BYTES)
            # Removed first: it may fill its disk.
            self._log.unlink()
            self._log.with_name(f"{self._log.name}.1").write_bytes(end)


def _kill_tree(root: Process) -> None:
    """Kill a process and its descendants. Blocks."""
    # Of all processes: the kernel's lists of children are incomplete while some of them end.
    processes.kill([*procfs.descendants(root.pid, procfs.all_processes()), root])


class _JobLog:
    """Reads from the listener's growing output whether a job is running."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._partial = b""
        self._running = False
        #: Whether a job has started, or the log was truncated, which only a job does.
        self.seen = False

    def has_grown(self) -> bool:
        with contextlib.suppress(OSError):
            return self._path.stat().st_size != self._offset
        return False

    def is_running(self) -> bool:
        """Whether the last line about a job is a start."""
        if not self.has_grown():
            return self._running
        with self._path.open("rb") as file:
            # Whoever has the log open can truncate it or make it endless.
            size = file.seek(0, os.SEEK_END)
            self.seen |= size < self._offset
            self._offset = min(size, max(self._offset, size - MAX_BACKLOG))
            file.seek(self._offset)
            while chunk := file.read(MAX_CHUNK):
                self._offset += len(chunk)
                *lines, self._partial = (self._partial[-MAX_CHUNK:] + chunk).split(b"\n")
                for line in lines:
                    self._take(line.decode(errors="replace"))
        return self._running

    def close(self) -> None:
        """Forget a running job, because the listener was stopped."""
        self._running = self.seen = False

    def _take(self, line: str) -> None:
        # Check for a start first: a job's name may look like an end.
        if _JOB_STARTED.match(line):
            self._running = self.seen = True
        elif _JOB_ENDED.match(line):
            self._running = False
            self.seen = True
