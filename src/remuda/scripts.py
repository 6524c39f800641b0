"""A script of the operator's, run to its end: the pre-runner script, on whatever machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

#: What the system's own login would set; those who set machines up need the commands of root as well.
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

MAX_STORY = 500
MAX_TAIL_BYTES = 4096
#: What a shell says of a command that cannot be started.
CANNOT_START = 127


class Ended(NamedTuple):
    ok: bool
    #: How it ended and what it said last.
    story: str


async def run(script: Path, *, log: Path, folder: Path, environment: Mapping[str, str], timeout_s: float) -> Ended:
    code = await _run(_command(script), log=log, folder=folder, environment=environment, timeout_s=timeout_s)
    story = f"no end after {timeout_s:g} s" if code is None else f"exit code {code}"
    return Ended(code == 0, f"{story}: {_tail(log)}"[:MAX_STORY])


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
            return CANNOT_START
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
    return " | ".join(line for line in text.splitlines() if line.strip())[-MAX_STORY // 2 :]
