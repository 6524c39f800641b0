"""`bin/Runner.Worker`: runs one job in its own process.

The job comes on stdin, led by its length; a `cancel` after it, or the end of stdin (the listener is gone), ends it
early. Output and the outcome go to stdout as lines of JSON.
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

from .home import Home
from .worker_protocol import LENGTH_DIGITS

#: What a step that is cancelled gets, one after the other. The real runner waits 7.5 and 2.5 s between them.
CANCEL_SIGNALS = ((signal.SIGINT, 0.5), (signal.SIGTERM, 0.5), (signal.SIGKILL, 5.0))
#: A hook may tidy up after a cancelled job for this long.
HOOK_LIMIT_S = 300.0
CHUNK = 64 * 1024
ALWAYS = "always()"
HOOK_STARTED = "ACTIONS_RUNNER_HOOK_JOB_STARTED"
HOOK_COMPLETED = "ACTIONS_RUNNER_HOOK_JOB_COMPLETED"


class Worker:
    def __init__(self, home: Home, job: Mapping[str, Any]) -> None:
        self._home = home
        self._job = job
        self._cancelled = False
        #: Told to end at once: then not even steps that always run do.
        self._shut_down = False
        repo = str(job["repo"]).partition("/")[2]
        work = home.root / str(job["work"])
        self._temp = work / "_temp"
        self._workspace = work / repo / repo
        self._tracking = f"github_{job['tracking']}"
        own = self._own_variables(work)
        #: Hooks see nothing of what the workflow sets.
        self._hook_environment = {**os.environ, **own}
        self._step_environment = {
            **os.environ,
            **{str(name): str(value) for name, value in job["env"].items()},
            **own,
        }
        self._wake, wake_end = os.pipe()
        for end in (self._wake, wake_end):
            os.set_blocking(end, False)
        # Not ignored: what is ignored would stay so in the steps. The listener decides when the job ends.
        for number in (signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGTERM, self._stop)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)

    def run(self) -> str:
        shutil.rmtree(self._temp, ignore_errors=True)
        for folder in (self._temp, self._workspace, self._workspace.parent.parent / "_tool"):
            folder.mkdir(parents=True, exist_ok=True)
        self._home.diagnose("Worker", f"Job {self._job['name']} of run {self._job['run_id']}")
        failed = not self._hook(HOOK_STARTED)
        outcomes = []
        for number, step in enumerate(self._job["steps"], start=1):
            outcome = self._step(number, step) if self._runs(step, failed=failed) else "skipped"
            outcomes.append({"conclusion": outcome})
            failed = failed or outcome == "failure"
        if not self._shut_down and not self._hook(HOOK_COMPLETED):
            failed = True
        self._end_orphans()
        shutil.rmtree(self._temp, ignore_errors=True)
        result = "cancelled" if self._cancelled else "failure" if failed else "success"
        _tell({"result": result, "steps": outcomes})
        return result

    def _runs(self, step: Mapping[str, Any], *, failed: bool) -> bool:
        if self._shut_down:
            return False
        return step.get("if") == ALWAYS or not (failed or self._cancelled)

    def _stop(self, *_: object) -> None:
        self._cancelled = self._shut_down = True

    def _step(self, number: int, step: Mapping[str, Any]) -> str:
        script = self._temp / f"step-{number}.sh"
        script.write_text(step["run"] + "\n")
        _tell({"output": f"##[group]Run {step.get('name') or step['run'].partition(chr(10))[0]}\n##[endgroup]\n"})
        code = self._execute(script, {**self._step_environment, **(step.get("env") or {})})
        if self._cancelled and (self._shut_down or step.get("if") != ALWAYS):
            _tell({"output": "##[error]The operation was canceled.\n"})
            return "cancelled"
        if code != 0:
            _tell({"output": f"##[error]Process completed with exit code {code}.\n"})
            return "failure"
        return "success"

    def _hook(self, variable: str) -> bool:
        """Whether the job may count as good: there is no hook, or it ended well."""
        path = os.environ.get(variable)
        if not path:
            return True
        hook = pathlib.Path(path)
        if not hook.is_absolute() or not hook.is_file() or hook.suffix != ".sh":
            _tell({"output": f"##[error]{variable}: {path} is not the absolute path of a .sh file.\n"})
            return False
        _tell({"output": f"A job hook has been configured: {path}\n"})
        code = self._execute(hook, self._hook_environment)
        if code != 0:
            _tell({"output": f"##[error]{variable} ended with exit code {code}.\n"})
        return code == 0

    def _execute(self, script: pathlib.Path, environment: Mapping[str, str]) -> int:
        """Run the script in its own process group. A child that keeps the pipe open does not hold us up."""
        # Before its start: it may be the script that has us shut down.
        told = self._shut_down
        child = subprocess.Popen(
            ["bash", "-e", str(script)],
            cwd=self._workspace,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert child.stdout is not None  # noqa: S101  # said with PIPE above
        pipe = child.stdout.fileno()
        os.set_blocking(pipe, False)
        sources = {pipe, 0, self._wake}
        signals = iter(CANCEL_SIGNALS)
        strike_at = time.monotonic() + HOOK_LIMIT_S if self._cancelled else None
        while child.poll() is None:
            left = None if strike_at is None else max(0.0, strike_at - time.monotonic())
            ready, _, _ = select.select(list(sources - ({0} if self._cancelled else set())), [], [], left)
            if self._wake in ready:
                _read(self._wake)
            if pipe in ready and _copy(pipe) == 0:
                sources.discard(pipe)
            if 0 in ready:
                os.read(0, CHUNK)  # `cancel`, or the end: the same thing
                self._cancelled, strike_at = True, time.monotonic()
            if self._shut_down and not told:
                told, strike_at = True, time.monotonic()
            if strike_at is not None and time.monotonic() >= strike_at:
                number, pause_s = next(signals, CANCEL_SIGNALS[-1])
                _signal_group(child.pid, number)
                strike_at = time.monotonic() + pause_s
        while pipe in sources and (_copy(pipe) or 0) > 0:
            pass
        child.stdout.close()
        return child.returncode

    def _end_orphans(self) -> None:
        """End what the steps left running, known by a variable: who sheds it survives, as in the real one."""
        mark = f"RUNNER_TRACKING_ID={self._tracking}".encode()
        for process in pathlib.Path("/proc").iterdir():
            if not process.name.isdecimal() or int(process.name) == os.getpid():
                continue
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)
                    _tell({"output": f"Terminate orphan process: pid ({process.name})\n"})
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
    # Unbuffered and no more than its length: a `cancel` that follows must stay in the pipe for select to see.
    length = _exactly(LENGTH_DIGITS)
    message = _exactly(int(length)) if length else b""
    if not message:
        return 1
    Worker(Home(root), json.loads(message)).run()
    return 0


def _exactly(size: int) -> bytes:
    """That many bytes of stdin, or none if it ends before."""
    taken = bytearray()
    while len(taken) < size:
        chunk = os.read(0, size - len(taken))
        if not chunk:
            return b""
        taken += chunk
    return bytes(taken)


def _tell(document: Mapping[str, Any]) -> None:
    """To the listener. If it is gone there is nobody to tell, and the job is ended by that anyway."""
    data = json.dumps(document).encode() + b"\n"
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:
        return


def _copy(pipe: int) -> int | None:
    chunk = _read(pipe)
    if chunk:
        _tell({"output": chunk.decode(errors="replace")})
    return None if chunk is None else len(chunk)


def _read(descriptor: int) -> bytes | None:
    """What is there; nothing at the end, None if there is nothing yet."""
    try:
        return os.read(descriptor, CHUNK)
    except BlockingIOError:
        return None


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return
