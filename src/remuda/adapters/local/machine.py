"""The local machine as its agent sees it: its folder, and the pipe to its supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from pathlib import Path

from remuda import procfs, scripts
from remuda.adapters.local import folder as files
from remuda.adapters.local.record import read_record
from remuda.adapters.local.supervisor import FD_VARIABLE, FOLDER_VARIABLE
from remuda.domain.errors import Unavailable, UserError
from remuda.domain.serialization import from_document, to_document
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
            raise Unavailable(f"the machine's record in {self._folder} cannot be read")
        return Identity(instance_id=record.instance_id, pool=record.pool, margin_s=record.margin_s)

    def load(self) -> AgentState:
        document = files.read(str(self._folder / files.MEMORY))
        if document is not None:
            with contextlib.suppress(ValueError):
                return from_document(AgentState, document)
        return AgentState()

    def save(self, state: AgentState) -> None:
        files.write(str(self._folder / files.MEMORY), files.encode(to_document(state)), durable=True)

    def set_dead_man_timer(self, at: datetime) -> None:
        self._tell(f"arm {at.timestamp():.3f}")

    async def spot_notice(self) -> str:
        """Nobody takes local machines away: a file in the folder plays the cloud's notice."""
        try:
            with (self._folder / files.NOTICE).open(encoding="utf-8", errors="replace") as file:
                return " ".join(file.read(MAX_NOTICE).split())
        except OSError:
            return ""

    async def run_script(self, timeout_s: float) -> StepResult:
        script = self._folder / files.SCRIPT
        if not script.exists():
            return StepResult(ok=True, detail="there is no pre-runner script")
        step = f"script {self._folder}"
        # One that an earlier agent began would run beside this one.
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
        self._tell(f"end {' '.join(reason.split())[:MAX_DETAIL]}")

    def _tell(self, line: str) -> None:
        try:
            # Below PIPE_BUF: whole or not at all.
            os.write(self._pipe, f"{line}\n".encode())
        except OSError as problem:
            raise Unavailable(f"the machine's supervisor does not listen: {problem}") from problem


def machine_folder(environment: Mapping[str, str]) -> Path:
    """Where this machine is, as its supervisor told the agent."""
    text = environment.get(FOLDER_VARIABLE, "")
    if not text:
        raise _not_a_machine(FOLDER_VARIABLE)
    return Path(text)


def supervisor_pid(folder: Path) -> int:
    """Who adopts all orphans of this machine."""
    known = files.supervisor(str(folder))
    if known is None:
        raise _not_a_machine(FOLDER_VARIABLE)
    return known[0]


def pristine_runner(folder: Path) -> Path:
    """The runner's folder as it was before any job."""
    record = read_record(folder)
    if record is None:
        raise Unavailable(f"the machine's record in {folder} cannot be read")
    return Path(record.runner_source)


def job_environment(folder: Path) -> dict[str, str]:
    """All that scripts and jobs get to see: nothing of the agent's own but the path of commands."""
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
        # No job may speak for the machine, and no agent may hang on its supervisor.
        os.set_inheritable(descriptor, False)  # noqa: FBT003  # os.set_inheritable takes no keyword
        os.set_blocking(descriptor, False)
    except (ValueError, OSError) as problem:
        raise _not_a_machine(FD_VARIABLE) from problem
    return descriptor


def _not_a_machine(variable: str) -> UserError:
    return UserError(
        f"this is no local machine: {variable} does not say where its supervisor is",
        field=variable,
        fix="let `remuda provision` launch machines; they start their agents themselves",
    )
