"""The local machine as its agent sees it: its folder, and the pipe to its supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime
from pathlib import Path

from remuda import procfs
from remuda.adapters.local import folder as files
from remuda.adapters.local.record import read_record
from remuda.adapters.local.supervisor import FD_VARIABLE, FOLDER_VARIABLE
from remuda.domain.documents import from_document, to_document
from remuda.domain.errors import Unavailable, UserError
from remuda.ports.clock import Clock
from remuda.ports.machine import Identity, Memory, Outcome

MAX_DETAIL = 500
MAX_TAIL_BYTES = 4096
MAX_NOTICE = 500


class LocalMachine:
    def __init__(self, *, folder: Path, clock: Clock, reset: Callable[[], Awaitable[Outcome]]) -> None:
        self._folder = folder
        self._clock = clock
        self._reset = reset
        self._pipe = _pipe_to_supervisor()

    async def identity(self) -> Identity:
        record = read_record(self._folder)
        if record is None:
            raise Unavailable(f"the machine's record in {self._folder} cannot be read")
        return Identity(instance_id=record.instance_id, pool=record.pool, margin_s=record.margin_s)

    def recall(self) -> Memory:
        document = files.read(str(self._folder / files.MEMORY))
        if document is not None:
            with contextlib.suppress(ValueError):
                return from_document(Memory, document)
        return Memory()

    def remember(self, memory: Memory) -> None:
        files.write(str(self._folder / files.MEMORY), files.encode(to_document(memory)), durable=True)

    def arm(self, at: datetime) -> None:
        self._tell(f"arm {at.timestamp():.3f}")

    async def spot_notice(self) -> str:
        """Nobody takes local machines away: a file in the folder plays the cloud's notice."""
        try:
            with (self._folder / files.NOTICE).open(encoding="utf-8", errors="replace") as file:
                return " ".join(file.read(MAX_NOTICE).split())
        except OSError:
            return ""

    async def run_script(self, timeout_s: float) -> Outcome:
        script = self._folder / files.SCRIPT
        if not script.exists():
            return Outcome(ok=True, detail="there is no pre-runner script")
        log = self._folder / files.LOGS / "pre-runner.log"
        step = f"script {self._folder}"
        # One that an earlier agent began would run beside this one.
        await asyncio.to_thread(procfs.end_step, step)
        code = await _run(
            _command(script),
            log=log,
            folder=self._folder / files.WORK,
            environment={**job_environment(self._folder), procfs.STEP: step},
            timeout_s=timeout_s,
        )
        story = f"no end after {timeout_s:g} s" if code is None else f"exit code {code}"
        return Outcome(ok=code == 0, detail=f"{story}: {_tail(log)}"[:MAX_DETAIL])

    async def reset(self) -> Outcome:
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


def _command(script: Path) -> list[str]:
    with script.open("rb") as file:
        return [str(script)] if file.read(2) == b"#!" else ["/bin/sh", str(script)]


async def _run(
    command: list[str], *, log: Path, folder: Path, environment: Mapping[str, str], timeout_s: float
) -> int | None:
    """The exit code, or None where it had to be killed. Output goes to a file: a pipe would be held open by what the
    script leaves in the background.
    """
    with log.open("wb") as output:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                cwd=folder,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except OSError as problem:
            output.write(f"{problem}\n".encode())
            return 127
    try:
        async with asyncio.timeout(timeout_s):
            return await process.wait()
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - MAX_TAIL_BYTES))
        text = file.read(MAX_TAIL_BYTES).decode(errors="replace")
    return " | ".join(line for line in text.splitlines() if line.strip())[-MAX_DETAIL // 2 :]
