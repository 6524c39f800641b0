"""The machine port for local machines: files in the machine's folder, its record, and a pipe to its supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from remuda import procfs, scripts
from remuda.adapters.local import folder as files
from remuda.adapters.local.supervisor import FD_VARIABLE, FOLDER_VARIABLE
from remuda.domain.errors import Unavailable, UserError
from remuda.domain.resources import is_instance_id
from remuda.domain.serialization import from_document, to_document
from remuda.domain.thresholds import MAX_LIFETIME
from remuda.ports.clock import Clock
from remuda.ports.machine import AgentState, Identity, StepResult

MAX_DETAIL = 500
MAX_NOTICE = 500


class LocalMachine:
    def __init__(self, *, folder: Path, clock: Clock, reset: Callable[[], Awaitable[StepResult]]) -> None:
        self._folder = folder
        self._clock = clock
        self._reset = reset
        self._pipe = _pipe_to_supervisor()

    async def identity(self) -> Identity:
        record = read_record(self._folder)
        if record is None:
            raise Unavailable(f"cannot read the machine's record in {self._folder}")
        return Identity(instance_id=record.instance_id, pool=record.pool, margin_s=record.margin_s)

    def load(self) -> AgentState:
        document = files.read(str(self._folder / files.AGENT_STATE))
        if document is not None:
            with contextlib.suppress(ValueError):
                return from_document(AgentState, document)
        return AgentState()

    def save(self, state: AgentState) -> None:
        files.write(str(self._folder / files.AGENT_STATE), files.encode(to_document(state)), durable=True)

    def set_dead_man_timer(self, at: datetime) -> None:
        self._send(f"dead-man-timer {at.timestamp():.3f}")

    async def spot_notice(self) -> str:
        """Read the notice from a file in the folder. Tests and the demo write it to simulate a spot interruption."""
        try:
            with (self._folder / files.NOTICE).open(encoding="utf-8", errors="replace") as file:
                return " ".join(file.read(MAX_NOTICE).split())
        except OSError:
            return ""

    async def run_script(self, timeout_s: float) -> StepResult:
        script = self._folder / files.SCRIPT
        if not script.exists():
            return StepResult(ok=True, detail="no pre-runner script")
        step = f"script {self._folder}"
        # A script that an earlier agent started must not run concurrently.
        await asyncio.to_thread(procfs.kill_step, step)
        ended = await scripts.run(
            script,
            log=self._folder / files.LOGS / "pre-runner.log",
            folder=self._folder / files.WORK,
            environment={**job_environment(self._folder), procfs.STEP: step},
            timeout_s=timeout_s,
        )
        return StepResult(ok=ended.ok, detail=ended.detail)

    async def reset(self) -> StepResult:
        return await self._reset()

    async def end(self, reason: str) -> None:
        self._send(f"end {' '.join(reason.split())[:MAX_DETAIL]}")

    def _send(self, line: str) -> None:
        try:
            # Shorter than PIPE_BUF, so the write is atomic.
            os.write(self._pipe, f"{line}\n".encode())
        except OSError as problem:
            raise Unavailable(f"cannot write to the machine's supervisor: {problem}") from problem


def machine_folder(environment: Mapping[str, str]) -> Path:
    """Return the machine's folder from the agent's environment."""
    text = environment.get(FOLDER_VARIABLE, "")
    if not text:
        raise _not_a_machine(FOLDER_VARIABLE)
    return Path(text)


def supervisor_pid(folder: Path) -> int:
    """Return the pid of the supervisor, which adopts all orphaned processes of the machine."""
    known = files.supervisor(str(folder))
    if known is None:
        raise _not_a_machine(FOLDER_VARIABLE)
    return known[0]


def pristine_runner(folder: Path) -> Path:
    """Return the folder of the unmodified runner software."""
    record = read_record(folder)
    if record is None:
        raise Unavailable(f"cannot read the machine's record in {folder}")
    return Path(record.runner_source)


def job_environment(folder: Path) -> dict[str, str]:
    """Return the complete environment of scripts and jobs. Of the agent's environment it contains PATH only."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "LANG": "C.UTF-8",
        "HOME": str(folder / files.HOME),
        "TMPDIR": str(folder / files.TMP),
        procfs.MARKER: folder.name,
    }


def _pipe_to_supervisor() -> int:
    try:
        descriptor = int(os.environ.get(FD_VARIABLE, ""))
        # Jobs must not inherit the pipe, and the agent must not block on it.
        os.set_inheritable(descriptor, False)  # noqa: FBT003  # os.set_inheritable takes no keyword
        os.set_blocking(descriptor, False)
    except (ValueError, OSError) as problem:
        raise _not_a_machine(FD_VARIABLE) from problem
    return descriptor


def _not_a_machine(variable: str) -> UserError:
    return UserError(
        f"not on a local machine: {variable} is missing or invalid",
        field=variable,
        fix="do not start the agent by hand; 'remuda provision --run-id 1' launches machines, which start their agents",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineRecord:
    """The file instance.json of a local machine. Launcher, compute and agent read it; the supervisor adds the end."""

    instance_id: str
    pool: str
    instance_type: str
    cpu: int
    memory_mib: int
    tags: Mapping[str, str]
    launched_at: datetime
    #: The launch options of the request.
    launch: Mapping[str, str] = field(default_factory=dict)
    first_life_s: float
    margin_s: float
    #: Folder of the unmodified runner software.
    runner_source: str
    booted_at: datetime | None = None
    ending_at: datetime | None = None
    ended_at: datetime | None = None
    #: Reason of the end.
    reason: str = ""
    #: No process is left, and of the folder only the record and the logs.
    finished: bool = False

    def check(self) -> None:
        if not 0 <= self.margin_s <= MAX_LIFETIME or not 0 <= self.first_life_s <= MAX_LIFETIME:
            raise ValueError("margin or first lifetime out of range")


def read_record(folder: Path) -> MachineRecord | None:
    """Read the record. Return None if it is missing, malformed or of another machine: jobs can write to it."""
    document = files.read(str(folder / files.RECORD))
    if document is None:
        return None
    try:
        record = from_document(MachineRecord, document)
    except ValueError:
        return None
    return record if record.instance_id == folder.name and is_instance_id(record.instance_id) else None
