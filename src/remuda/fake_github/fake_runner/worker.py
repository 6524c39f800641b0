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
from collections.abc import Mapping, Sequence
from typing import Any

from . import LENGTH_DIGITS
from .expressions import ExpressionError, Scope, evaluate, is_true, parse_template, render, to_number
from .home import RunnerHome
from .job_context import FileCommandError, JobContext, StepCommandFiles

#: Seconds to wait after SIGINT and after SIGTERM to a cancelled step. The real runner waits 7.5 and 2.5 s.
CANCEL_GRACE_S = (0.5, 0.5)
KILL_GRACE_S = 5.0
#: Seconds that a hook may run after a job was cancelled.
HOOK_LIMIT_S = 300.0
CHUNK = 64 * 1024
#: Maximum characters of the end of a step's output in the result of the job.
MAX_TAIL = 8 * 1024
HOOK_STARTED = "ACTIONS_RUNNER_HOOK_JOB_STARTED"
HOOK_COMPLETED = "ACTIONS_RUNNER_HOOK_JOB_COMPLETED"
#: https://docs.github.com/actions/reference/workflows-and-actions/workflow-syntax#jobsjob_idstepsshell
SHELLS = {
    "": ("bash", "-e"),
    "bash": ("bash", "--noprofile", "--norc", "-eo", "pipefail"),
    "sh": ("sh", "-e"),
    "python": ("python",),
}
#: The action actions/checkout. It gets the repository from a snapshot instead of a server.
CHECKOUT = """\
mkdir -p "$CHECKOUT_TARGET"
find "$CHECKOUT_TARGET" -mindepth 1 -delete
if [ "$CHECKOUT_KIND" = git ]; then
  depth=(--depth 1)
  [ "$CHECKOUT_DEPTH" != 0 ] || depth=()
  git clone --quiet "${depth[@]}" "file://$CHECKOUT_SOURCE" "$CHECKOUT_TARGET"
  git -C "$CHECKOUT_TARGET" log -1 --format='HEAD is now at %h %s'
else
  cp -a "$CHECKOUT_SOURCE/." "$CHECKOUT_TARGET/"
fi
"""


class Worker:
    def __init__(self, home: RunnerHome, job: Mapping[str, Any]) -> None:
        self._home = home
        self._job = job
        #: After SIGTERM: skip even the steps with `if: always()`.
        self._shut_down = False
        repo = str(job["repo"]).partition("/")[2]
        work = home.root / str(job["work"])
        self._temp = work / "_temp"
        self._tools = work / "_tool"
        self._workspace = work / repo / repo
        #: Empty if processes of the job may outlive it.
        self._tracking = f"github_{job['tracking']}" if job["tracking"] else ""
        self._context = JobContext(job, github=self._github_context(), runner=self._runner_context())
        self._own = self._own_variables()
        #: The end of the current step's output.
        self._tail = ""
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
        for folder in (self._temp, self._workspace, self._tools):
            folder.mkdir(parents=True, exist_ok=True)
        self._home.diagnose("Worker", f"Job {self._job['name']} of run {self._job['run_id']}")
        context = self._context
        context.failed = not self._run_hook(HOOK_STARTED)
        steps = [self._run_step(number, step) for number, step in enumerate(self._job["steps"], start=1)]
        outputs = self._outputs()
        if not self._shut_down and not self._run_hook(HOOK_COMPLETED):
            context.failed = True
        self._kill_orphans()
        shutil.rmtree(self._temp, ignore_errors=True)
        _send({"result": context.status, "steps": steps, "outputs": outputs, "summary": context.summary})
        return context.status

    def _stop(self, *_: object) -> None:
        self._context.cancelled = self._shut_down = True

    def _outputs(self) -> dict[str, str]:
        try:
            return self._context.job_outputs(self._job.get("outputs") or {})
        except ExpressionError as error:
            self._context.failed = True
            self._print(f"##[error]The outputs of the job cannot be evaluated: {error}.\n")
            return {}

    # Steps

    def _run_step(self, number: int, step: Mapping[str, Any]) -> dict[str, Any]:
        """Run the step if its condition is met. Return its result."""
        began, self._tail = time.monotonic(), ""
        files = StepCommandFiles(self._temp / "_runner_file_commands", number)
        name, continues = _default_name(step), False
        try:
            env = self._context.step_env(step)
            scope = self._context.scope(env)
            name = render(str(step.get("name") or ""), scope) or name
            if self._shut_down or not self._context.is_due(step, env):
                outcome = "skipped"
            else:
                _send({"output": f"##[group]Run {name}\n##[endgroup]\n"})
                continues = is_true(_value(step.get("continue-on-error"), scope))
                outcome = self._run_due(number, step, scope, {**env, **files.variables})
                files.apply(self._context)
        except (ExpressionError, FileCommandError, OSError) as error:
            self._print(f"##[error]{error}\n")
            outcome = "failure"
        conclusion = "success" if continues and outcome == "failure" else outcome
        self._context.record_step(step, outcome=outcome, conclusion=conclusion, outputs=files.outputs)
        seconds = round(time.monotonic() - began, 3)
        return {"name": name, "outcome": outcome, "conclusion": conclusion, "seconds": seconds, "tail": self._tail}

    def _run_due(self, number: int, step: Mapping[str, Any], scope: Scope, env: Mapping[str, str]) -> str:
        minutes = to_number(_value(step.get("timeout-minutes"), scope))
        if step.get("uses"):
            shell, text = "bash", CHECKOUT
            folder = self._workspace
            env = {**env, **self._checkout_variables(step.get("with") or {}, scope)}
        else:
            shell = render(str(step.get("shell") or ""), scope)
            text = render(step["run"], scope)
            folder = self._workspace / render(str(step.get("working-directory") or ""), scope)
        if shell not in SHELLS:
            raise ExpressionError(f"The shell {shell!r} is not supported.")
        script = self._temp / f"step-{number}.{'py' if shell == 'python' else 'sh'}"
        script.write_text(text + "\n", errors="replace")
        variables = self._variables(env)
        command = list(SHELLS[shell])
        if shell == "python" and shutil.which("python", path=variables.get("PATH")) is None:
            command = ["python3"]
        code, timed_out = self._execute([*command, str(script)], variables, folder=folder, limit_s=minutes * 60)
        if self._context.cancelled and (self._shut_down or not self._context.is_due(step, env)):
            self._print("##[error]The operation was canceled.\n")
            return "cancelled"
        if timed_out:
            self._print(f"##[error]The step has timed out after {minutes:g} minutes.\n")
        elif code != 0:
            self._print(f"##[error]Process completed with exit code {code}.\n")
        return "failure" if timed_out or code != 0 else "success"

    def _checkout_variables(self, inputs: Mapping[str, Any], scope: Scope) -> dict[str, str]:
        source = self._job.get("checkout")
        if not source:
            raise ExpressionError("There is no repository to check out.")
        if not pathlib.Path(source["path"]).exists():
            raise ExpressionError("The snapshot of the repository was deleted when its run ended.")
        target = (self._workspace / render(str(inputs.get("path") or ""), scope)).resolve()
        if not target.is_relative_to(self._workspace.resolve()):
            raise ExpressionError(f"Repository path '{target}' is not under '{self._workspace}'.")
        return {
            "CHECKOUT_KIND": source["kind"],
            "CHECKOUT_SOURCE": source["path"],
            "CHECKOUT_TARGET": str(target),
            "CHECKOUT_DEPTH": render(str(inputs.get("fetch-depth", "1")), scope),
        }

    def _variables(self, env: Mapping[str, str]) -> dict[str, str]:
        """The environment of a step. Steps cannot change the runner's own variables."""
        variables = {**os.environ, **env, **self._own}
        variables["PATH"] = os.pathsep.join([*self._context.paths, variables.get("PATH", os.defpath)])
        return variables

    def _run_hook(self, variable: str) -> bool:
        """Run the hook, if there is one. Return whether it succeeded."""
        path = os.environ.get(variable)
        if not path:
            return True
        hook = pathlib.Path(path)
        if not hook.is_absolute() or not hook.is_file() or hook.suffix != ".sh":
            self._print(f"##[error]{variable}: {path} is not the absolute path of a .sh file.\n")
            return False
        self._print(f"A job hook has been configured: {path}\n")
        # Hooks do not get the variables of the workflow.
        code, _ = self._execute(["bash", "-e", str(hook)], {**os.environ, **self._own}, folder=self._workspace)
        if code != 0:
            self._print(f"##[error]{variable} ended with exit code {code}.\n")
        return code == 0

    def _execute(
        self, command: Sequence[str], environment: Mapping[str, str], *, folder: pathlib.Path, limit_s: float = 0.0
    ) -> tuple[int, bool]:
        """Run a command in its own process group. Return its exit code, and whether it reached the time limit.

        Does not wait for children that keep the pipe open.
        """
        # Read before the start, because the script itself may cause the shutdown.
        shutdown_handled, context = self._shut_down, self._context
        child = subprocess.Popen(
            command,
            cwd=folder,
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
        grace_s = self._job.get("cancel_grace_s") or CANCEL_GRACE_S
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
        signals = iter(zip(numbers, (*grace_s, KILL_GRACE_S), strict=True))
        ends_at = time.monotonic() + limit_s if limit_s > 0 else None
        signal_at = time.monotonic() + HOOK_LIMIT_S if context.cancelled else ends_at
        timed_out = False
        while child.poll() is None:
            left = None if signal_at is None else max(0.0, signal_at - time.monotonic())
            ready, _, _ = select.select(list(sources - ({0} if context.cancelled else set())), [], [], left)
            if self._wake in ready:
                _read(self._wake)
            if pipe in ready and self._copy(pipe) == 0:
                sources.discard(pipe)
            if 0 in ready:
                os.read(0, CHUNK)  # `cancel` or end of file
                context.cancelled, signal_at = True, time.monotonic()
            if self._shut_down and not shutdown_handled:
                shutdown_handled, signal_at = True, time.monotonic()
            if signal_at is not None and time.monotonic() >= signal_at:
                timed_out = timed_out or (ends_at is not None and not context.cancelled)
                number, pause_s = next(signals, (signal.SIGKILL, KILL_GRACE_S))
                _signal_group(child.pid, number)
                signal_at = time.monotonic() + pause_s
        while pipe in sources and (self._copy(pipe) or 0) > 0:
            pass
        child.stdout.close()
        return child.returncode, timed_out

    def _print(self, text: str) -> None:
        self._tail = (self._tail + text)[-MAX_TAIL:]
        _send({"output": text})

    def _copy(self, pipe: int) -> int | None:
        chunk = _read(pipe)
        if chunk:
            self._print(chunk.decode(errors="replace"))
        return None if chunk is None else len(chunk)

    def _kill_orphans(self) -> None:
        """Kill processes that the steps left running. As with the real runner, those without the variable survive."""
        if not self._tracking:
            return
        marker = f"RUNNER_TRACKING_ID={self._tracking}".encode()
        for process in pathlib.Path("/proc").iterdir():
            if not process.name.isdecimal() or int(process.name) == os.getpid():
                continue
            try:
                if marker in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)
                    self._print(f"Terminate orphan process: pid ({process.name})\n")
            except OSError:
                continue

    def _github_context(self) -> dict[str, Any]:
        job = self._job
        return {
            "api_url": job["server"],
            "event_name": str(job.get("event", "")),
            "job": job["name"],
            "repository": job["repo"],
            "repository_owner": str(job["repo"]).partition("/")[0],
            "run_attempt": str(job["run_attempt"]),
            "run_id": str(job["run_id"]),
            "server_url": job["server"],
            "workspace": str(self._workspace),
        }

    def _runner_context(self) -> dict[str, Any]:
        return {
            "arch": "X64",
            "environment": "self-hosted" if self._tracking else "github-hosted",
            "name": self._job["runner"],
            "os": "Linux",
            "temp": str(self._temp),
            "tool_cache": str(self._tools),
        }

    def _own_variables(self) -> dict[str, str]:
        return {
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            **_named("GITHUB", self._context.github),
            **_named("RUNNER", self._runner_context()),
            "RUNNER_WORKSPACE": str(self._workspace.parent),
            **({"RUNNER_TRACKING_ID": self._tracking} if self._tracking else {}),
            # Such as those for OIDC tokens, which are not part of the env context.
            **self._job.get("variables", {}),
        }


def _named(prefix: str, values: Mapping[str, Any]) -> dict[str, str]:
    """The variables of a context, such as GITHUB_RUN_ID."""
    return {f"{prefix}_{name.upper()}": value for name, value in values.items() if isinstance(value, str)}


def _default_name(step: Mapping[str, Any]) -> str:
    return str(step.get("uses") or step["run"].strip().partition("\n")[0])


def _value(text: object, scope: Scope) -> Any:
    """The value of a text that may be one expression, such as a number or a boolean."""
    parts = parse_template("" if text is None else str(text))
    match parts:
        case ["", expression, ""] if not isinstance(expression, str):
            return evaluate(expression, scope)
    rendered = render(str(text or ""), scope)
    return rendered == "true" if rendered in {"true", "false"} else rendered


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
