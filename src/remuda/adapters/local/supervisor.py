"""The supervisor process of a local machine: `python -m remuda.adapters.local.supervisor FOLDER POWER-FD`.

It starts the agent, restarts it when it exits, and reaps orphaned processes. It ends the machine on SIGTERM, on the
line `end REASON` from the agent, or when the dead-man timer expires. The agent sets that timer with the line
`dead-man-timer UNIX-TIME`. The agent writes these lines to the pipe whose descriptor is in REMUDA_MACHINE_FD.

It imports few modules of the standard library only, because each machine has one and each launch waits for its start.
"""

# pathlib would slow down the start
# ruff: noqa: PTH118

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import signal
import sys
import time
from typing import Any

from remuda import procfs
from remuda.adapters.local import folder as files

FOLDER_VARIABLE = "REMUDA_MACHINE_FOLDER"
FD_VARIABLE = "REMUDA_MACHINE_FD"

#: First and longest pause in seconds before the agent is restarted.
FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 5.0
#: Seconds after which an agent counts as started. Its next restart begins with the first pause again.
HEALTHY_S = 10.0
#: Seconds that processes have to end by themselves. A runner needs them to report its job as cancelled.
STOP_LIMIT_S = 2.0
#: Seconds until the supervisor gives up killing. `LocalCompute` kills the remaining processes later.
KILL_LIMIT_S = 5.0
KILL_PAUSE_S = 0.05
#: Longest wait in seconds. While the computer is suspended, timers of waits stop, but deadlines do not.
LONGEST_WAIT_S = 30.0
MAX_LINE = 4096

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _now() -> float:
    """Monotonic seconds that include the time of suspension."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _unix_time() -> float:
    # Read directly: this process does not use the clock port, and the agent sends deadlines as wall-clock times.
    return time.clock_gettime(time.CLOCK_REALTIME)


def _timestamp() -> str:
    seconds, fraction = divmod(round(_unix_time() * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{fraction:03d}Z"


def _log(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{_timestamp()} {text}\n".encode())


class MachineSupervisor:
    def __init__(self, folder: str, boot: dict[str, Any], record: dict[str, Any]) -> None:
        self._folder = folder
        self._command: list[str] = boot["command"]
        self._environment: dict[str, str] = boot["environment"]
        self._never_boots: bool = boot["neverBoots"]
        self._dies_after_s: float | None = boot["diesAfterS"]
        self._record = record
        self._reason = ""
        self._agent = 0
        self._agent_since = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._pipe = -1
        self._partial = b""
        now = _now()
        self._deadline: float = now + boot["firstLifeS"]
        self._boot_at: float | None = now + boot["bootDelayS"]
        self._start_at: float | None = None
        self._power_loss_at = math.inf
        self._wake, wake_end = os.pipe()
        for end in (self._wake, wake_end):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Interrupting the launching process or closing its terminal must not end the machine.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def run(self) -> None:
        while not self._reason:
            self._wait(self._time_left())
            self._reap()
            self._read_pipe()
            self._run_timers()
        self._end()

    def _on_sigterm(self, *_: object) -> None:
        self._reason = self._reason or "received SIGTERM"

    def _time_left(self) -> float:
        moments = [self._deadline, self._power_loss_at]
        moments += [moment for moment in (self._boot_at, self._start_at) if moment is not None]
        return min(LONGEST_WAIT_S, max(0.0, min(moments) - _now()))

    def _wait(self, timeout_s: float) -> None:
        """Wait for a signal, a line from the agent, or the timeout."""
        poll = select.poll()
        for source in (self._wake, self._pipe):
            if source >= 0:
                poll.register(source, select.POLLIN)
        # Rounded up, because a wait that ends too early would have to be repeated.
        poll.poll(math.ceil(timeout_s * 1000))
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 1024)

    def _run_timers(self) -> None:
        now = _now()
        if now >= self._deadline:
            self._reason = self._reason or "the dead-man timer expired"
        elif now >= self._power_loss_at:
            self._lose_power()
        elif self._boot_at is not None and now >= self._boot_at:
            self._boot()
        elif self._start_at is not None and now >= self._start_at:
            self._start_agent()

    def _boot(self) -> None:
        self._boot_at = None
        self._change(bootedAt=_timestamp())
        _log("booted")
        if self._dies_after_s is not None:
            self._power_loss_at = _now() + self._dies_after_s
        if not self._never_boots:
            self._start_agent()

    def _lose_power(self) -> None:
        """Simulate a power loss: all processes end at once and nothing is recorded."""
        self._kill_all()
        os.kill(os.getpid(), signal.SIGKILL)

    # The agent

    def _start_agent(self) -> None:
        self._start_at = None
        self._close_pipe()
        self._pipe, agent_end = os.pipe()
        os.set_blocking(self._pipe, False)
        self._agent_since = _now()
        parent = os.getpid()
        self._agent = os.fork()
        if self._agent == 0:
            try:
                self._become_agent(parent, agent_end)
            except OSError as problem:
                _log(f"cannot start the agent: {problem}")
            finally:
                os._exit(127)
        os.close(agent_end)
        _log(f"agent {self._agent} started")

    def _become_agent(self, parent: int, pipe: int) -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return  # the supervisor ended before prctl took effect
        os.setsid()
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        output = os.open(
            os.path.join(self._folder, files.LOGS, "agent.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.set_inheritable(pipe, True)  # noqa: FBT003  # os.set_inheritable takes no keyword
        environment = self._environment | {
            procfs.MARKER: self._record["instanceId"],
            FOLDER_VARIABLE: self._folder,
            FD_VARIABLE: str(pipe),
            "HOME": os.path.join(self._folder, files.HOME),
            "TMPDIR": os.path.join(self._folder, files.TMP),
        }
        os.execvpe(self._command[0], self._command, environment)  # noqa: S606  # no shell needed

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if ended[0] == self._agent:
                    self._agent_ended(os.waitstatus_to_exitcode(ended[1]))

    def _agent_ended(self, code: int) -> None:
        # Read the lines that the agent wrote before it ended.
        self._read_pipe()
        self._close_pipe()
        self._agent = 0
        if _now() - self._agent_since >= HEALTHY_S:
            self._pause_s = FIRST_PAUSE_S
        _log(f"the agent exited with {code}; restart in {self._pause_s:g} s")
        self._start_at = _now() + self._pause_s
        self._pause_s = min(LAST_PAUSE_S, self._pause_s * 2)

    def _read_pipe(self) -> None:
        while self._pipe >= 0:
            try:
                chunk = os.read(self._pipe, MAX_LINE)
            except BlockingIOError:
                return
            if not chunk:
                self._close_pipe()
                return
            *lines, self._partial = (self._partial + chunk).split(b"\n")
            self._partial = self._partial[-MAX_LINE:]
            for line in lines:
                self._execute(line.decode(errors="replace"))

    def _execute(self, line: str) -> None:
        command, _, argument = line.partition(" ")
        if command == "end":
            self._reason = self._reason or argument or "ended by the agent"
        elif command == "dead-man-timer":
            self._set_dead_man_timer(argument)
        else:
            _log(f"unknown line from the agent: {line!r}")

    def _set_dead_man_timer(self, text: str) -> None:
        try:
            at = float(text)
        except ValueError:
            at = math.nan
        if not math.isfinite(at):
            _log(f"invalid dead-man timer from the agent: {text!r}")
            return
        self._deadline = _now() + at - _unix_time()

    def _close_pipe(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
        self._pipe = -1
        self._partial = b""

    # The end

    def _end(self) -> None:
        _log(f"ending: {self._reason}")
        self._change(endingAt=_timestamp(), reason=self._reason)
        _stop_all()
        if not self._kill_all():
            _log("some processes could not be killed")
            return
        with contextlib.suppress(OSError):
            files.strip(self._folder)
        self._change(endedAt=_timestamp(), finished=True)
        _log("ended")

    def _kill_all(self) -> bool:
        """Kill all descendants. Return whether none is left.

        This process is a subreaper, so every process of the machine descends from it. Two consecutive empty scans are
        required, because one scan can miss a process whose parent ends during it.
        """
        limit = _now() + KILL_LIMIT_S
        empty = 0
        while empty < 2:
            _reap_all()
            # Of all processes: the kernel's lists of children are incomplete while some of them end.
            found = procfs.descendants(os.getpid(), procfs.all_processes())
            empty = 0 if found else empty + 1
            if found and _now() >= limit:
                return False
            procfs.kill(found, KILL_PAUSE_S)
        _reap_all()
        return True

    def _change(self, **values: Any) -> None:
        try:
            files.change(self._folder, values, self._record)
        except OSError as problem:
            _log(f"cannot write the record: {problem}")


def _stop_all() -> None:
    """Ask all processes to end, as the shutdown of a computer does, and wait for them up to the limit."""
    limit = _now() + STOP_LIMIT_S
    found = procfs.descendants(os.getpid())
    for descriptor in [procfs.send_signal(process.pid, process.started, signal.SIGTERM) for process in found]:
        if descriptor is not None:
            procfs.wait_for(descriptor, limit - _now())
            os.close(descriptor)


def _reap_all() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass


def main() -> None:
    folder, power = sys.argv[1], int(sys.argv[2])
    # Child processes must not hold the power lock.
    os.set_inheritable(power, False)  # noqa: FBT003  # os.set_inheritable takes no keyword
    this_process = procfs.read_process(os.getpid())
    if this_process is not None:
        files.write_supervisor(power, this_process.pid, this_process.started)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    os.umask(0o022)
    boot = files.read(os.path.join(folder, files.BOOT))
    record = files.read(os.path.join(folder, files.RECORD))
    if boot is None or record is None:
        _log(f"cannot read {files.BOOT} or {files.RECORD}")
        sys.exit(1)
    MachineSupervisor(folder, boot, record).run()


if __name__ == "__main__":
    main()
