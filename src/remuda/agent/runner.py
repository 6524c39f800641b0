"""Registration and control of actions/runner on a machine. Works with the real and the fake runner."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from remuda import procfs
from remuda.agent import processes
from remuda.agent.job_hook import JobHook
from remuda.agent.listener import JobHost, Listener
from remuda.domain.errors import Unavailable
from remuda.domain.instance import Assignment
from remuda.domain.runner_release import disables_updates
from remuda.domain.serialization import from_document, to_document
from remuda.domain.signals import FailureKind
from remuda.ports.clock import Clock
from remuda.ports.machine import RemovalStatus, RunnerState, StepResult

CONFIGURE_LIMIT_S = 120.0
REMOVE_LIMIT_S = 120.0
#: Seconds between two checks of the complete state.
STATE_POLL_S = 1.0

MAX_DETAIL = 500
MAX_DETAIL_LINES = 6
MAX_FILE_BYTES = 1024 * 1024

_INPUT = "ACTIONS_RUNNER_INPUT_"
#: Makes the listener exit with 7 instead of 1 if GitHub refuses its version (Runner.Listener/Program.cs).
_DEPRECATED_EXIT = "ACTIONS_RUNNER_RETURN_VERSION_DEPRECATED_EXIT_CODE"
_SETTINGS = ".runner"
_WORK_FOLDER = "workFolder"
#: In the order of their removal. The settings last, as config.sh does: they show that there are credentials.
_REGISTRATION = (".credentials_rsaparams", ".credentials", _SETTINGS)
#: Output of `config.sh` if GitHub rejects the token.
_REFUSED = re.compile(r"response code: (?:NotFound|Unauthorized|Forbidden) from 'POST", re.IGNORECASE)
#: Output of `config.sh` if GitHub refuses the version, after the line above (cert-manager/aws-privateca-issuer#478).
_TOO_OLD = re.compile(r"minimum runner version required to register with GitHub Actions is now ([0-9.]{1,20}[0-9])")
_UNREACHABLE = re.compile(
    r"failed to connect|connection refused|connection reset|no such host|name or service not known|timed out"
    r"|response code: (?:InternalServerError|BadGateway|ServiceUnavailable|GatewayTimeout)",
    re.IGNORECASE,
)
_BUSY = re.compile(r"running a job", re.IGNORECASE)
# Output of `config.sh remove`. Source: actions/runner 2.336.0, Runner.Listener/Configuration/ConfigurationManager.cs
# (UnconfigureAsync) and Runner.Common/RunnerDotcomServer.cs (RetryRequest).
#: A file of the registration is missing: exit code 0 without a call of the server.
_LOCAL_ONLY = re.compile(r"skipping removing runner from the server", re.IGNORECASE)
#: The server has no such registration any more. The legacy flow exits with 0; the newer one, with `useRunnerAdminFlow`
#: in `.runner`, calls `DELETE …/actions/runners/ID`, exits with 1 and keeps its files.
_ALREADY_REMOVED = re.compile(r"does not exist\. skipping removing runner from the server", re.IGNORECASE)
_DELETE_NOT_FOUND = re.compile(r"response code: NotFound from 'DELETE ", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class _JitConfig:
    runner_name: str
    #: Empty after the listener has been started with it.
    config: str = ""


class ActionsRunner:
    """The runner software, registered in one folder and listening in another.

    `config_folder` is a copy of the software in which `config.sh` makes and removes registrations. On EC2 no job can
    access it, so a job can neither read a token from a process nor receive one through software that it changed; the
    listener in `host` gets a copy of the registration. On a local machine both are the same folder.

    `state_folder` holds small files that let a restarted agent continue. Jobs see no other variables than
    `environment`. `work` is the folder for their files, as they see it. Every registration gets it here, because only
    the agent knows the folders of its instance: `config.sh` as an argument, a just-in-time configuration as a setting.
    """

    def __init__(
        self,
        *,
        host: JobHost,
        config_folder: Path,
        state_folder: Path,
        log: Path,
        work: PurePath,
        clock: Clock,
        environment: Mapping[str, str],
        hook: JobHook,
    ) -> None:
        self._host = host
        self._config_folder = config_folder
        self._has_own_copy = config_folder != host.runner_folder
        self._runner_folder = host.runner_folder
        self._state_folder = state_folder
        self._work = work
        self._hook = hook
        self._clock = clock
        self._environment = {"PATH": os.defpath, "LANG": "C.UTF-8", **environment}
        self._jit_file = state_folder / "jit.json"
        # An agent that was killed while it wrote leaves a draft with a configuration in it.
        _draft(self._jit_file).unlink(missing_ok=True)
        self._listener = Listener(host=host, folder=state_folder, log=log, clock=clock)

    def state(self) -> RunnerState:
        listening = self._listener.is_running()
        exit_code = self._listener.exit_code()
        jit = self._jit_config()
        has_started = jit is not None and not jit.config
        had_job = has_started and self._listener.had_job()
        spent = has_started and exit_code == 0
        return RunnerState(
            registered_as=self._registered_as(),
            listening=listening,
            busy=self._listener.is_busy(),
            exit_code=exit_code,
            exit_detail=self._listener.last_error() if exit_code else "",
            had_job=had_job,
            saw_job=has_started and self._listener.saw_job(),
            spent=spent,
            unused=has_started and not had_job and self._listener.lost_registration(),
            refused=self.refused() if spent else "",
        )

    async def register(self, assignment: Assignment) -> StepResult:
        result = await self._register(assignment)
        if result.ok:
            # A run must not count on a runner that cannot start.
            try:
                await self._host.ready()
            except Unavailable as problem:
                return StepResult(ok=False, detail=problem.message)
        return result

    async def _register(self, assignment: Assignment) -> StepResult:
        if self._listener.is_running():
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
        updates = ("--disableupdate",) if disables_updates(assignment.url) else ()
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
        failure: FailureKind | None = None
        if not ok and (too_old := _TOO_OLD.search(output)):
            detail = f"its version is too old, GitHub registers runners from {too_old[1]} on"
            return StepResult(ok=False, detail=detail, failure=FailureKind.VERSION_REFUSED)
        if not ok and _REFUSED.search(output):
            failure = FailureKind.CREDENTIAL_REFUSED
        elif not ok and _UNREACHABLE.search(output):
            failure = FailureKind.GITHUB_UNREACHABLE
        return StepResult(ok=ok, detail=_describe_result(code, output), failure=failure)

    async def start(self, assignment: Assignment) -> None:
        if self._listener.is_running():
            return
        files, variables = self._hook.files(assignment, runner=self._runner_folder, environment=self._environment)
        files |= self._registration_files()
        environment = self._environment | variables | {_DEPRECATED_EXIT: "1"}
        jit = self._jit_config()
        if jit is not None and not self._listener.was_started:
            # From the assignment if an earlier attempt to start has dropped it. The listener keeps it for its restarts.
            environment[_INPUT + "JITCONFIG"] = _with_work_folder(jit.config or assignment.jit_config, self._work)
            # Drop the configuration before any job runs. Keep the name: it shows that the listener registers itself.
            _write(self._jit_file, to_document(_JitConfig(runner_name=jit.runner_name)))
        await self._listener.start(assignment, files, environment)

    def refused(self) -> str:
        return self._hook.refused()

    async def remove(self, assignment: Assignment) -> tuple[RemovalStatus, str]:
        if self._jit_config() is not None and not assignment.runner_id:
            self._drop_registration()
            self._jit_file.unlink(missing_ok=True)
            return RemovalStatus.REMOVED, "registered just in time; already removed from GitHub"
        # On a local machine, `.runner` may be that of a just-in-time registration. `config.sh remove` needs the address
        # on GitHub, which such a file lacks (actions/runner, Runner.Common/ConfigurationStore.cs, IsHostedServer).
        if self._jit_config() is not None or not (self._config_folder / _SETTINGS).exists():
            return self._nothing_to_remove()
        if assignment.credential is None:
            return RemovalStatus.FAILED, "the assignment has no removal token"
        code, output = await self._config(("remove",), {"TOKEN": assignment.credential.token}, REMOVE_LIMIT_S)
        detail = _describe_result(code, output)
        if code == 0 and not (self._config_folder / _SETTINGS).exists():
            local_only = _LOCAL_ONLY.search(output) and not _ALREADY_REMOVED.search(output)
            if local_only:
                return RemovalStatus.FAILED, f"removed on this machine only: {detail}"
        elif not _DELETE_NOT_FOUND.search(output):
            if _BUSY.search(output):
                return RemovalStatus.BUSY, detail
            return (RemovalStatus.UNREACHABLE if _UNREACHABLE.search(output) else RemovalStatus.FAILED), detail
        self._drop_registration()
        return RemovalStatus.REMOVED, detail

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
        if self._listener.exit_code() != 0:
            return RemovalStatus.FAILED, "registered just in time; it must be removed through the API"
        # A runner that GitHub has refused leaves its files, and the next registration would take them for its own.
        self._drop_registration()
        self._jit_file.unlink(missing_ok=True)
        return RemovalStatus.REMOVED, "registered for one job, and its runner has exited"

    async def stop(self) -> None:
        await self._listener.stop()
        self._jit_file.unlink(missing_ok=True)

    async def wait_for_change(self, since: RunnerState, timeout_s: float) -> RunnerState:
        limit = self._clock.monotonic() + timeout_s
        while True:
            state = self.state()
            left = limit - self._clock.monotonic()
            if state != since or left <= 0:
                return state
            if state.listening:
                await self._listener.wait(min(left, STATE_POLL_S))
            else:
                await self._clock.sleep(min(left, STATE_POLL_S) if state.busy else left)

    def _registered_as(self) -> str:
        settings = _read(self._config_folder / _SETTINGS) or {}
        # `config.sh` writes the first; a just-in-time configuration of GitHub has the second.
        for key in ("agentName", "AgentName"):
            if isinstance(name := settings.get(key), str) and name:
                return name
        jit = self._jit_config()
        return "" if jit is None else jit.runner_name

    def _jit_config(self) -> _JitConfig | None:
        document = _read(self._jit_file)
        if document is not None:
            with contextlib.suppress(ValueError):
                return from_document(_JitConfig, document)
        return None

    def _forget(self) -> None:
        self._jit_file.unlink(missing_ok=True)
        self._listener.forget()

    def _drop_registration(self) -> None:
        """Remove the registration's files. Raises `Unavailable` if a job has put a folder in place of a file."""
        try:
            for name in _REGISTRATION:
                (self._config_folder / name).unlink(missing_ok=True)
        except OSError as problem:
            raise Unavailable(f"cannot remove the registration's files: {problem}") from problem

    def _registration_files(self) -> dict[PurePath, tuple[bytes, int]]:
        """The files that `config.sh` made, for the listener's folder."""
        if not self._has_own_copy:
            return {}
        try:
            sources = [self._config_folder / name for name in _REGISTRATION if (self._config_folder / name).exists()]
            return {self._runner_folder / source.name: (source.read_bytes(), 0o600) for source in sources}
        except OSError as problem:
            raise Unavailable(f"cannot read the registration: {problem}") from problem

    async def _config(
        self, arguments: Sequence[str], inputs: Mapping[str, str], limit_s: float
    ) -> tuple[int | None, str]:
        """Run `config.sh`. Its inputs are in the environment because every user can read command lines."""
        step = f"config {self._config_folder}"
        # A `config.sh` that an earlier agent started could finish later and overwrite the result of this one.
        await asyncio.to_thread(procfs.kill_step, step)
        environment = self._environment | {_INPUT + name: value for name, value in inputs.items()}
        environment[procfs.STEP] = step
        if self._has_own_copy:
            environment |= {"HOME": str(self._config_folder), "TMPDIR": str(self._config_folder)}
        if os.geteuid() == 0:
            # The runner refuses to run as root without this variable.
            environment["RUNNER_ALLOW_RUNASROOT"] = "1"
        command = [str(self._config_folder / "config.sh"), *arguments]
        code, output = await processes.run(
            command, cwd=self._config_folder, environment=environment, timeout_s=limit_s, temp_dir=self._state_folder
        )
        return code, output.replace(inputs["TOKEN"] or "***", "***")


def _with_work_folder(config: str, work: PurePath) -> str:
    """Return a just-in-time configuration with another work folder than the one that GitHub wrote into it.

    GitHub's API documents a path relative to the runner's folder. The listener takes an absolute one as well
    (Runner.Common/HostContext.cs, GetDirectory), and reads the names of its settings without regard to case. A
    configuration of an unknown form is returned as it is: the listener says what is wrong with it.
    """
    try:
        # Runner.Listener/Runner.cs, ExecuteCommand: the files by name, as base64 in base64.
        files = json.loads(base64.b64decode(config, validate=True))
        settings = json.loads(base64.b64decode(files[_SETTINGS], validate=True).decode("utf-8-sig"))
        others = {name: value for name, value in settings.items() if name.lower() != _WORK_FOLDER.lower()}
        files[_SETTINGS] = _encode({**others, _WORK_FOLDER: str(work)})
        return _encode(files)
    except (ValueError, LookupError, TypeError, AttributeError):
        return config


def _encode(document: object) -> str:
    return base64.b64encode(json.dumps(document).encode()).decode()


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


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _write(path: Path, document: Mapping[str, Any]) -> None:
    draft = _draft(path)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123  # a descriptor
        json.dump(document, file)
    draft.replace(path)
