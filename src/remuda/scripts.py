"""Commands with a time limit, and the pre-runner script."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

#: PATH of a root login. The pre-runner script may need administrative commands.
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

MAX_DETAIL = 500
MAX_TAIL_BYTES = 4096
#: Exit code of a shell for a command that cannot be started.
CANNOT_START = 127


class ScriptResult(NamedTuple):
    ok: bool
    #: How it ended, and its last output.
    detail: str


async def run(
    script: Path, *, log: Path, folder: Path, environment: Mapping[str, str], timeout_s: float
) -> ScriptResult:
    with log.open("wb") as output:
        try:
            code = await run_command(
                _command(script), output=output, folder=folder, environment=environment, timeout_s=timeout_s
            )
        except OSError as problem:
            output.write(f"{problem}\n".encode())
            code = CANNOT_START
    end = f"killed after {timeout_s:g} s" if code is None else f"exit code {code}"
    return ScriptResult(code == 0, f"{end}: {_tail(log)}"[:MAX_DETAIL])


async def run_command(
    command: Sequence[str], *, output: IO[bytes], folder: Path, environment: Mapping[str, str], timeout_s: float
) -> int | None:
    """Run a command. Return its exit code, or None if it was killed at the time limit. Raises `OSError`.

    The output goes to a file because background processes of the command would keep a pipe open.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )
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


def _command(script: Path) -> list[str]:
    with script.open("rb") as file:
        return [str(script)] if file.read(2) == b"#!" else ["/bin/sh", str(script)]


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - MAX_TAIL_BYTES))
        text = file.read(MAX_TAIL_BYTES).decode(errors="replace")
    return " | ".join(line for line in text.splitlines() if line.strip())[-MAX_DETAIL // 2 :]
