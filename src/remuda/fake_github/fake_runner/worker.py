"""The program `bin/Runner.Worker`, which runs one job.

It reads the job from stdin, preceded by its length. A later `cancel` or the end of stdin (the listener has ended)
cancels the job. Output and result are written to stdout as lines of JSON.
"""

import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from . import LENGTH_DIGITS
from .home import RunnerHome

#: Signals sent to a cancelled step, and the seconds to wait after each. The real runner waits 7.5 and 2.5 s.
CANCEL_SIGNALS = ((signal.SIGINT, 0.5), (signal.SIGTERM, 0.5), (signal.SIGKILL, 5.0))
#: Seconds that a hook may run after a job was cancelled.
HOOK_LIMIT_S = 300.0
CHUNK = 64 * 1024
ALWAYS = "always()"
HOOK_STARTED = "ACTIONS_RUNNER_HOOK_JOB_STARTED"
HOOK_COMPLETED = "ACTIONS_RUNNER_HOOK_JOB_COMPLETED"


class Worker:
    def __init__(self, home: RunnerHome, job: Mapping[str, Any]) -> None:
        self._home = home
        self._job = job
        self._cancelled = False
        #: After SIGTERM: skip even the steps with `if: always()`.
        self._shut_down = False
        repo = str(job["repo"]).partition("/")[2]
        work = home.root / str(job["work"])
        self._temp = work / "_temp"
        self._workspace = work / repo / repo
        self._tracking = f"github_{job['tracking']}"
        own = self._own_variables(work)
        #: Hooks do not get the variables of the workflow.
        self._hook_environment = {**os.environ, **own}
        self._step_environment = {**os.environ, **{str(name): str(value) for name, value in job["env"].items()}, **own}
        self._wake, wake_end = os.pipe()
        for end in (self._wake, wake_end):
            os.set_blocking(end, False)
        # Empty handlers instead of SIG_IGN, which the steps would inherit. The listener decides about the end.
        for number in (signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTERM, self._stop)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)

    def run(self) -> str:
        shutil.rmtree(self._temp, ignore_errors=True)
        for folder in (self._temp, self._workspace, self._workspace.parent.parent / "_tool"):
            folder.mkdir(parents=True, exist_ok=True)
        self._home.diagnose("Worker", f"Job {self._job['name']} of run {self._job['run_id']}")
        failed = not self._run_hook(HOOK_STARTED)
        outcomes = []
        for number, step in enumerate(self._job["steps"], start=1):
            outcome = self._run_step(number, step) if self._is_due(step, failed=failed) else "skipped"
            outcomes.append({"conclusion": outcome})
            failed = failed or outcome == "failure"
        if not self._shut_down and not self._run_hook(HOOK_COMPLETED):
            failed = True
        self._kill_orphans()
        shutil.rmtree(self._temp, ignore_errors=True)
        result = "cancelled" if self._cancelled else "failure" if failed else "success"
        _send({"result": result, "steps": outcomes})
        return result

    def _is_due(self, step: Mapping[str, Any], *, failed: bool) -> bool:
        if self._shut_down:
            return False
        return step.get("if") == ALWAYS or not (failed or self._cancelled)

    def _stop(self, *_: object) -> None:
        self._cancelled = self._shut_down = True

    def _run_step(self, number: int, step: Mapping[str, Any]) -> str:
        script = self._temp / f"step-{number}.sh"
        script.write_text(step["run"] + "\n")
        _send({"output": f"##[group]Run {step.get('name') or step['run'].partition(chr(10))[0]}\n##[endgroup]\n"})
        code = self._execute(script, {**self._step_environment, **(step.get("env") or {})})
        if self._cancelled and (self._shut_down or step.get("if") != ALWAYS):
            _send({"output": "##[error]The operation was canceled.\n"})
            return "cancelled"
        if code != 0:
            _send({"output": f"##[error]Process completed with exit code {code}.\n"})
            return "failure"
        return "success"

    def _run_hook(self, variable: str) -> bool:
        """Run the hook, if there is one. Return whether it succeeded."""
        path = os.environ.get(variable)
        if not path:
            return True
        hook = pathlib.Path(path)
        if not hook.is_absolute() or not hook.is_file() or hook.suffix != ".sh":
            _send({"output": f"##[error]{variable}: {path} is not the absolute path of a .sh file.\n"})
            return False
        _send({"output": f"A job hook has been configured: {path}\n"})
        code = self._execute(hook, self._hook_environment)
        if code != 0:
            _send({"output": f"##[error]{variable} ended with exit code {code}.\n"})
        return code == 0

    def _execute(self, script: pathlib.Path, environment: Mapping[str, str]) -> int:
        """Run the script in its own process group. Does not wait for children that keep the pipe open."""
        # Read before the start, because the script itself may cause the shutdown.
        shutdown_handled = self._shut_down
        child = subprocess.Popen(
            ["bash", "-e", str(script)],
            cwd=self._workspace,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert child.stdout is not None  # noqa: S101  # PIPE above
        pipe = child.stdout.fileno()
        os.set_blocking(pipe, False)
        sources = {pipe, 0, self._wake}
        signals = iter(CANCEL_SIGNALS)
        signal_at = time.monotonic() + HOOK_LIMIT_S if self._cancelled else None
        while child.poll() is None:
            left = None if signal_at is None else max(0.0, signal_at - time.monotonic())
            ready, _, _ = select.select(list(sources - ({0} if self._cancelled else set())), [], [], left)
            if self._wake in ready:
                _read(self._wake)
            if pipe in ready and _copy(pipe) == 0:
                sources.discard(pipe)
            if 0 in ready:
                os.read(0, CHUNK)  # `cancel` or end of file
                self._cancelled, signal_at = True, time.monotonic()
            if self._shut_down and not shutdown_handled:
                shutdown_handled, signal_at = True, time.monotonic()
            if signal_at is not None and time.monotonic() >= signal_at:
                number, pause_s = next(signals, CANCEL_SIGNALS[-1])
                _signal_group(child.pid, number)
                signal_at = time.monotonic() + pause_s
        while pipe in sources and (_copy(pipe) or 0) > 0:
            pass
        child.stdout.close()
        return child.returncode

    def _kill_orphans(self) -> None:
        """Kill processes that the steps left running. As with the real runner, those without the variable survive."""
        marker = f"RUNNER_TRACKING_ID={self._tracking}".encode()
        for process in pathlib.Path("/proc").iterdir():
            if not process.name.isdecimal() or int(process.name) == os.getpid():
                continue
            try:
                if marker in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)
                    _send({"output": f"Terminate orphan process: pid ({process.name})\n"})
            except OSError:
                continue

    def _own_variables(self, work: pathlib.Path) -> dict[str, str]:
        job = self._job
        return {
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            "GITHUB_API_URL": job["server"],
            "GITHUB_JOB": job["name"],
            "GITHUB_REPOSITORY": job["repo"],
            "GITHUB_RUN_ATTEMPT": str(job["run_attempt"]),
            "GITHUB_RUN_ID": str(job["run_id"]),
            "GITHUB_SERVER_URL": job["server"],
            "GITHUB_WORKSPACE": str(self._workspace),
            "RUNNER_ARCH": "X64",
            "RUNNER_NAME": job["runner"],
            "RUNNER_OS": "Linux",
            "RUNNER_TEMP": str(self._temp),
            "RUNNER_TOOL_CACHE": str(work / "_tool"),
            "RUNNER_TRACKING_ID": self._tracking,
            "RUNNER_WORKSPACE": str(self._workspace.parent),
        }


def main() -> int:
    root = pathlib.Path(sys.argv[0]).resolve().parent.parent
    # Read exactly the message: a following `cancel` must stay in the pipe for `select`.
    length = _read_exactly(LENGTH_DIGITS)
    message = _read_exactly(int(length)) if length else b""
    if not message:
        return 1
    Worker(RunnerHome(root), json.loads(message)).run()
    return 0


def _read_exactly(size: int) -> bytes:
    """Read that many bytes from stdin. Return no bytes if it ends before."""
    data = bytearray()
    while len(data) < size:
        chunk = os.read(0, size - len(data))
        if not chunk:
            return b""
        data += chunk
    return bytes(data)


def _send(document: Mapping[str, Any]) -> None:
    """Send a message to the listener. Errors are ignored: if the listener has ended, the job is cancelled anyway."""
    data = json.dumps(document).encode() + b"\n"
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        return


def _copy(pipe: int) -> int | None:
    chunk = _read(pipe)
    if chunk:
        _send({"output": chunk.decode(errors="replace")})
    return None if chunk is None else len(chunk)


def _read(descriptor: int) -> bytes | None:
    """Read available data. Return no bytes at the end of file, and None if no data is available."""
    try:
        return os.read(descriptor, CHUNK)
    except BlockingIOError:
        return None


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
