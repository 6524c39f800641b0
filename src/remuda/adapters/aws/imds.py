"""The EC2 machine as its agent sees it: its metadata, its files, its timers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import ssl
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from remuda import procfs, scripts
from remuda.adapters.aws.tags import MARGIN_TAG
from remuda.adapters.aws.user_data import Layout
from remuda.domain.errors import NotFound, RemudaError, Unavailable, UserError
from remuda.domain.resources import is_instance_id
from remuda.domain.serialization import from_document, to_document
from remuda.domain.text import truncate
from remuda.ports.clock import Clock
from remuda.ports.compute import POOL_TAG
from remuda.ports.machine import AgentState, Identity, StepResult

ENDPOINT_VARIABLE = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
DEFAULT_ENDPOINT = "http://169.254.169.254"
#: It is on this very machine: what takes longer does not answer.
TIMEOUT_S = 2.0
#: For a whole answer, byte by byte.
ANSWER_S = 2 * TIMEOUT_S
MAX_ANSWER_BYTES = 64 * 1024
TOKEN_LIFE_S = 21_600
#: A token is renewed when less than this is left of it.
TOKEN_LEFT_S = 60.0
COMMAND_LIMIT_S = 15.0
MAX_NOTICE = 500
#: What EC2 allows.
MAX_TAG = 256
MAX_MEMORY_BYTES = 1024 * 1024

MEMORY = "memory.json"
SCRIPT = "pre-runner.sh"
SCRIPT_LOG = "pre-runner.log"
#: The timers that are set, one name a line: the bootstrap writes the first.
TIMERS = "dead-man"
TIMER_PREFIX = "remuda-dead-man-"
#: Starts with every boot, for machines that a job restarts.
REBOOT_TIMER = f"{TIMER_PREFIX}reboot"
#: What `systemctl stop` says of a unit that there is not (any more).
NOT_LOADED = 5
POWER_OFF = ("systemctl", "poweroff", "--force")

#: It goes into a header.
_TOKEN = re.compile(r"[!-~]{1,2000}")
#: A tag may be written by hand; more than a day is no difference of clocks.
MAX_MARGIN_S = 86_400.0

RunCommand = Callable[[Sequence[str]], int]


def imds_endpoint(environment: Mapping[str, str]) -> str:
    return environment.get(ENDPOINT_VARIABLE) or DEFAULT_ENDPOINT


def run_command(command: Sequence[str]) -> int:
    """Its exit code; -1 where it could not be run to its end."""
    try:
        return subprocess.run(
            list(command), stdin=subprocess.DEVNULL, capture_output=True, timeout=COMMAND_LIMIT_S, check=False
        ).returncode
    except (OSError, subprocess.TimeoutExpired):
        return -1


class Imds:
    """The instance metadata service, version 2."""

    def __init__(self, *, endpoint: str, clock: Clock) -> None:
        self._clock = clock
        self._client = httpx.AsyncClient(
            base_url=endpoint.rstrip("/"),
            timeout=TIMEOUT_S,
            # It is reached without any proxy, and without TLS: no authority has to be read.
            trust_env=False,
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        )
        self._token = ""
        self._token_until = -math.inf

    async def close(self) -> None:
        await self._client.aclose()

    async def get(self, path: str) -> str:
        """`NotFound` where there is no such thing."""
        response = await self._get(path)
        if response.status_code == 401:
            # The token was not taken: once more with a new one.
            self._token_until = -math.inf
            response = await self._get(path)
        if response.status_code == 404:
            raise NotFound(f"the machine's metadata has no {path}")
        if not response.is_success:
            raise Unavailable(f"the machine's metadata service answers {response.status_code} for {path}")
        return response.text.strip()

    async def _get(self, path: str) -> httpx.Response:
        headers = {"X-aws-ec2-metadata-token": await self._fresh_token()}
        return await self._request("GET", f"/latest/meta-data/{path}", headers)

    async def _fresh_token(self) -> str:
        if self._clock.monotonic() >= self._token_until:
            asked_at = self._clock.monotonic()
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_LIFE_S)}
            response = await self._request("PUT", "/latest/api/token", headers)
            if not response.is_success:
                raise Unavailable(f"the machine's metadata service gives no token: {response.status_code}")
            token = response.text.strip()
            if not _TOKEN.fullmatch(token):
                raise Unavailable("the machine's metadata service gives no token that can be one")
            self._token = token
            self._token_until = asked_at + TOKEN_LIFE_S - TOKEN_LEFT_S
        return self._token

    async def _request(self, method: str, path: str, headers: Mapping[str, str]) -> httpx.Response:
        try:
            async with asyncio.timeout(ANSWER_S), self._client.stream(method, path, headers=headers) as response:
                body = bytearray()
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > MAX_ANSWER_BYTES:
                        raise Unavailable(f"the machine's metadata service answers more than {MAX_ANSWER_BYTES} bytes")
                return httpx.Response(response.status_code, content=bytes(body))
        except (httpx.HTTPError, TimeoutError) as error:
            raise Unavailable(f"the machine's metadata service cannot be reached: {type(error).__name__}") from error


class Ec2Machine:
    def __init__(
        self,
        *,
        imds: Imds,
        clock: Clock,
        reset: Callable[[], Awaitable[StepResult]],
        layout: Layout | None = None,
        run: RunCommand = run_command,
        terminate: Callable[[str], Awaitable[None]] | None = None,
        script_environment: Mapping[str, str] | None = None,
    ) -> None:
        """`terminate` asks EC2 for this machine's end; without it, or where it fails, the machine powers off: that ends
        it too, and needs no right.
        """
        self._imds = imds
        self._clock = clock
        self._reset = reset
        self._run = run
        self._terminate = terminate
        self._state = Path((layout or Layout()).state)
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
            raise Unavailable("the machine's metadata has no usable instance id")
        margin = await self._tag(MARGIN_TAG)
        try:
            margin_s = float(margin)
        except ValueError:
            margin_s = math.nan
        if not 0 <= margin_s <= MAX_MARGIN_S:
            raise UserError(f"the machine's tag {MARGIN_TAG} is {margin[:40]!r}", field=MARGIN_TAG, fix=_TAG_FIX)
        return Identity(instance_id=instance_id, pool=truncate(await self._tag(POOL_TAG), MAX_TAG), margin_s=margin_s)

    def load(self) -> AgentState:
        try:
            with (self._state / MEMORY).open("rb") as file:
                return from_document(AgentState, json.loads(file.read(MAX_MEMORY_BYTES)))
        except (OSError, ValueError, RecursionError):
            return AgentState()

    def save(self, state: AgentState) -> None:
        self._write(MEMORY, json.dumps(to_document(state)).encode())

    def set_dead_man_timer(self, at: datetime) -> None:
        """The new timer first, then the old ones' end: at no moment there is none. Names are on disk before a timer is
        set, so that no agent ever leaves one that nobody stops.
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
        code = self._run([*timer, *POWER_OFF])
        if code != 0:
            raise Unavailable(f"the dead-man timer cannot be set: systemd-run ended with {code}")
        stuck = [name for name in old if self._run(["systemctl", "stop", f"{name}.timer"]) not in {0, NOT_LOADED}]
        self._write(TIMERS, _lines([*stuck, new]))

    async def spot_notice(self) -> str:
        """Never fails: a beat must not be lost because the metadata does not answer. What was said once stays said."""
        with contextlib.suppress(RemudaError):
            self._notice = await self._look_for_notice() or self._notice
        return self._notice

    async def run_script(self, timeout_s: float) -> StepResult:
        script = self._state / SCRIPT
        if not script.exists():
            return StepResult(ok=True, detail="there is no pre-runner script")
        step = f"script {self._state}"
        # One that an earlier agent began would run beside this one.
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
            raise Unavailable(f"the machine does not power off: systemctl ended with {code}")

    async def _tag(self, key: str) -> str:
        try:
            return await self._imds.get(f"tags/instance/{key}")
        except NotFound:
            raise UserError(f"the machine cannot read its tag {key}", field=key, fix=_TAG_FIX) from None

    async def _look_for_notice(self) -> str:
        if self._is_spot is None:
            self._is_spot = await self._imds.get("instance-life-cycle") == "spot"
        if not self._is_spot:
            return ""
        action = await self._document("spot/instance-action")
        if action is not None:
            return _words(f"spot: {action.get('action', 'end')} at {action.get('time', 'an unknown time')}")
        advice = await self._document("events/recommendations/rebalance")
        if advice is not None:
            return _words(f"spot: rebalance recommended at {advice.get('noticeTime', 'an unknown time')}")
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
        # Nothing else may be stopped, whatever the file says.
        return [line for line in text.split() if line.startswith(TIMER_PREFIX)]

    def _write(self, name: str, data: bytes) -> None:
        """For root's eyes only; a crash leaves the old content or the new one."""
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
            raise Unavailable(f"the agent's folder {self._state} does not work: {problem}") from problem


_TAG_FIX = "let Remuda launch machines: its template lets them read the tags that they need"


def _lines(names: Sequence[str]) -> bytes:
    return "".join(f"{name}\n" for name in names).encode()


def _words(text: str) -> str:
    return truncate(" ".join(text.split()), MAX_NOTICE)
