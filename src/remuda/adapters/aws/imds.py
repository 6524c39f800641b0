"""The EC2 machine of an agent: instance metadata, state files, dead-man timers, pre-runner script."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from remuda import procfs, scripts
from remuda.adapters.aws.user_data import MARGIN_TAG, MachineLayout
from remuda.domain.errors import NotFound, RemudaError, Unavailable, UserError
from remuda.domain.resources import is_instance_id
from remuda.domain.serialization import from_document, to_document
from remuda.domain.signals import REBALANCE_NOTICE
from remuda.domain.text import truncate
from remuda.http import ClientResponse, HttpConnections, HttpError, ResponseTooLong
from remuda.ports.clock import Clock
from remuda.ports.compute import POOL_TAG
from remuda.ports.machine import AgentState, Identity, ScriptStatus, StepResult

ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
DEFAULT_ENDPOINT = "http://169.254.169.254"
#: Timeout in seconds of connecting. The service runs on the same host.
TIMEOUT_S = 2.0
CONNECTIONS = 4
#: Timeout in seconds of a whole response.
RESPONSE_TIMEOUT_S = 2 * TIMEOUT_S
MAX_RESPONSE_BYTES = 64 * 1024
TOKEN_TTL_S = 21_600
#: A token is renewed if it expires within this many seconds.
RENEW_BEFORE_S = 60.0
COMMAND_TIMEOUT_S = 15.0
MAX_NOTICE = 500
#: EC2's limit for a tag value.
MAX_TAG = 256
MAX_STATE_BYTES = 1024 * 1024

STATE_FILE = "state.json"
SCRIPT = "pre-runner.sh"
SCRIPT_LOG = "pre-runner.log"
#: File with the names of the timers that are set, one per line. The bootstrap writes the first.
TIMERS = "dead-man"
TIMER_PREFIX = "remuda-dead-man-"
#: Starts at every boot, for machines that a job reboots.
REBOOT_TIMER = f"{TIMER_PREFIX}reboot"
#: Exit code of `systemctl stop` for a unit that does not exist.
NOT_LOADED = 5
POWER_OFF = ("systemctl", "poweroff", "--force")
#: Properties of the service that the timer starts: if systemctl cannot start or does not end, for lack of memory,
#: systemd itself cuts the power.
AT_ONCE = ("--service-type=oneshot", "--property=TimeoutStartSec=60", "--property=FailureAction=poweroff-immediate")

#: A token that is valid as a header value.
_TOKEN = re.compile(r"[!-~]{1,2000}")
#: Upper bound in seconds of a plausible clock margin; the tag may have been edited by hand.
MAX_MARGIN_S = 86_400.0

RunCommand = Callable[[Sequence[str]], int]


def imds_endpoint(environment: Mapping[str, str]) -> str:
    return environment.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT


def run_command(command: Sequence[str]) -> int:
    """The exit code, or -1 if the command could not be started or timed out."""
    try:
        return subprocess.run(
            list(command), stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        return -1


class Imds:
    """The instance metadata service, version 2."""

    def __init__(self, *, endpoint: str, clock: Clock) -> None:
        self._clock = clock
        try:
            self._http = HttpConnections(
                endpoint,
                connect_timeout_s=TIMEOUT_S,
                timeout_s=RESPONSE_TIMEOUT_S,
                connections=CONNECTIONS,
                max_body=MAX_RESPONSE_BYTES,
                use_proxy=False,
            )
        except ValueError as error:
            raise UserError(str(error), field=ENDPOINT_VARIABLE, fix=f"set {DEFAULT_ENDPOINT}, or no value") from None
        self._base = self._http.path.rstrip("/")
        self._token = ""
        self._token_until = -math.inf

    async def close(self) -> None:
        await self._http.close()

    async def get(self, path: str) -> str:
        """The value at a metadata path. Raises `NotFound` if it does not exist."""
        response = await self._get(path)
        if response.status == 401:
            # The token was rejected; retry once with a new one.
            self._token_until = -math.inf
            response = await self._get(path)
        if response.status == 404:
            raise NotFound(f"the instance metadata has no {path}")
        if not response.is_success:
            raise Unavailable(f"the instance metadata service returned {response.status} for {path}")
        return _text(response)

    async def _get(self, path: str) -> ClientResponse:
        headers = {"X-aws-ec2-metadata-token": await self._fresh_token()}
        return await self._request("GET", f"/latest/meta-data/{path}", headers)

    async def _fresh_token(self) -> str:
        if self._clock.monotonic() >= self._token_until:
            requested_at = self._clock.monotonic()
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL_S)}
            response = await self._request("PUT", "/latest/api/token", headers)
            if not response.is_success:
                raise Unavailable(f"the instance metadata service returned {response.status} instead of a token")
            token = _text(response)
            if not _TOKEN.fullmatch(token):
                raise Unavailable("the instance metadata service returned an invalid token")
            self._token = token
            self._token_until = requested_at + TOKEN_TTL_S - RENEW_BEFORE_S
        return self._token

    async def _request(self, method: str, path: str, headers: Mapping[str, str]) -> ClientResponse:
        try:
            return await self._http.request(method, f"{self._base}{path}", headers=headers)
        except ResponseTooLong:
            raise Unavailable(f"the instance metadata service returned more than {MAX_RESPONSE_BYTES} bytes") from None
        except HttpError as error:
            raise Unavailable(f"the instance metadata service cannot be reached: {type(error).__name__}") from error


def _text(response: ClientResponse) -> str:
    return response.body.decode(errors="replace").strip()


class Ec2Machine:
    def __init__(
        self,
        *,
        imds: Imds,
        clock: Clock,
        reset: Callable[[], Awaitable[StepResult]],
        prepare_jobs: Callable[[], None] = lambda: None,
        layout: MachineLayout | None = None,
        run: RunCommand = run_command,
        terminate: Callable[[str], Awaitable[None]] | None = None,
        script_environment: Mapping[str, str] | None = None,
    ) -> None:
        """`prepare_jobs` is called when it is saved that the pre-runner script has ended.

        `terminate` calls EC2 to terminate this instance. Without it, or if it fails, the machine powers off, which also
        terminates the instance and needs no permission.
        """
        self._imds = imds
        self._clock = clock
        self._reset = reset
        self._prepare_jobs = prepare_jobs
        self._run = run
        self._terminate = terminate
        self._state = Path((layout or MachineLayout()).state)
        self._script_environment = {"PATH": scripts.SYSTEM_PATH, "LANG": "C.UTF-8", "HOME": "/root"} | dict(
            script_environment or {}
        )
        self._is_spot: bool | None = None
        self._notice = ""

    async def close(self) -> None:
        await self._imds.close()

    async def identity(self) -> Identity:
        instance_id = await self._imds.get("instance-id")
        if not is_instance_id(instance_id):
            raise Unavailable("the instance metadata has no valid instance id")
        margin = await self._tag(MARGIN_TAG)
        try:
            margin_s = float(margin)
        except ValueError:
            margin_s = math.nan
        if not 0 <= margin_s <= MAX_MARGIN_S:
            raise UserError(
                f"the instance tag {MARGIN_TAG} is not a number of seconds: {margin[:40]!r}",
                field=MARGIN_TAG,
                fix=_TAG_FIX,
            )
        return Identity(instance_id=instance_id, pool=truncate(await self._tag(POOL_TAG), MAX_TAG), margin_s=margin_s)

    def load(self) -> AgentState:
        try:
            with (self._state / STATE_FILE).open("rb") as file:
                return from_document(AgentState, json.loads(file.read(MAX_STATE_BYTES)))
        except (OSError, ValueError, RecursionError):
            return AgentState()

    def save(self, state: AgentState) -> None:
        had_ended = self.load().script is ScriptStatus.OK
        self._write(STATE_FILE, json.dumps(to_document(state)).encode())
        if state.script is ScriptStatus.OK and not had_ended:
            # Not before: until then the script may run again, and no sandbox may exist while it does.
            self._prepare_jobs()

    def set_dead_man_timer(self, at: datetime) -> None:
        """Set the new timer before stopping the old ones, so that there is always one. Fails if an old one remains.

        The name is written to disk before the timer is set, so that a restarted agent can stop every timer.
        """
        now = self._clock.now()
        left_s = max(1, math.ceil((at - now).total_seconds()))
        old = self._timers()
        new = f"{TIMER_PREFIX}{int(now.timestamp() * 1000)}"
        while new in old:
            new += "x"
        self._write(TIMERS, _lines([*old, new]))
        old = [*(name for name in old if name != REBOOT_TIMER), REBOOT_TIMER]
        timer = ("systemd-run", "--quiet", f"--unit={new}", f"--on-active={left_s}", "--timer-property=AccuracySec=1s")
        code = self._run([*timer, *AT_ONCE, *POWER_OFF])
        if code != 0:
            raise Unavailable(f"the dead-man timer cannot be set: systemd-run exited with {code}")
        stuck = [name for name in old if self._run(["systemctl", "stop", f"{name}.timer"]) not in {0, NOT_LOADED}]
        self._write(TIMERS, _lines([*stuck, new]))
        if stuck:
            # An earlier time would end a job. The caller tries again.
            raise Unavailable(f"{len(stuck)} former dead-man timers cannot be stopped")

    async def spot_notice(self) -> str:
        """The spot notice, kept once seen. Never raises: a heartbeat must not fail because of the metadata service."""
        with contextlib.suppress(RemudaError):
            self._notice = await self._read_notice() or self._notice
        return self._notice

    async def run_script(self, timeout_s: float) -> StepResult:
        script = self._state / SCRIPT
        if not script.exists():
            return StepResult(ok=True, detail="no pre-runner script")
        step = f"script {self._state}"
        # A script started by an earlier agent process must not run at the same time.
        await asyncio.to_thread(procfs.kill_step, step)
        ended = await scripts.run(
            script,
            log=self._state / SCRIPT_LOG,
            folder=self._state,
            environment={**self._script_environment, procfs.STEP: step},
            timeout_s=timeout_s,
        )
        return StepResult(ok=ended.ok, detail=ended.detail)

    async def reset(self) -> StepResult:
        return await self._reset()

    async def end(self, reason: str) -> None:  # noqa: ARG002 - the agent's event_log has it; EC2 takes none
        if self._terminate is not None:
            with contextlib.suppress(RemudaError):
                await self._terminate(await self._imds.get("instance-id"))
                return
        code = self._run(POWER_OFF)
        if code != 0:
            raise Unavailable(f"the machine does not power off: systemctl exited with {code}")

    async def _tag(self, key: str) -> str:
        try:
            return await self._imds.get(f"tags/instance/{key}")
        except NotFound:
            raise UserError(f"the instance metadata has no tag {key}", field=key, fix=_TAG_FIX) from None

    async def _read_notice(self) -> str:
        if self._is_spot is None:
            self._is_spot = await self._imds.get("instance-life-cycle") == "spot"
        if not self._is_spot:
            return ""
        action = await self._document("spot/instance-action")
        if action is not None:
            return _one_line(f"spot: {action.get('action', 'end')} at {action.get('time', 'an unknown time')}")
        advice = await self._document("events/recommendations/rebalance")
        if advice is not None:
            return _one_line(f"{REBALANCE_NOTICE} at {advice.get('noticeTime', 'an unknown time')}")
        return ""

    async def _document(self, path: str) -> dict[str, Any] | None:
        try:
            document = json.loads(await self._imds.get(path))
        except NotFound:
            return None
        except (ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}

    def _timers(self) -> list[str]:
        try:
            text = (self._state / TIMERS).read_text(encoding="utf-8")
        except (OSError, ValueError):
            return []
        # Other units must not be stopped, whatever the file contains.
        return [line for line in text.split() if line.startswith(TIMER_PREFIX)]

    def _write(self, name: str, data: bytes) -> None:
        """Write a file atomically, readable by root only."""
        draft = self._state / f".{name}.new"
        try:
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:  # noqa: PTH123  # a descriptor
                os.fchmod(descriptor, 0o600)
                file.write(data)
                file.flush()
                os.fsync(descriptor)
            draft.replace(self._state / name)
            folder = os.open(self._state, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as problem:
            raise Unavailable(f"the agent's directory {self._state} is not usable: {problem}") from problem


_TAG_FIX = "launch instances with Remuda: its launch template enables tags in the instance metadata"


def _lines(names: Sequence[str]) -> bytes:
    return "".join(f"{name}\n" for name in names).encode()


def _one_line(text: str) -> str:
    return truncate(" ".join(text.split()), MAX_NOTICE)
