"""Running a use case as a command: settings in, one result or one error out, signals in between."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from remuda.cli.output import Output, set_log_format
from remuda.domain.errors import Interrupted, InvariantViolated, RemudaError

if TYPE_CHECKING:
    from remuda.config.settings import Loaded

T = TypeVar("T")

EXIT_OK = 0
EXIT_PARTIAL = 4
EXIT_INTERRUPTED = 130


def load_settings(flags: Mapping[str, Any], config: str | None = None) -> Loaded:
    from remuda.config.settings import load  # noqa: PLC0415 - pydantic is slow to import, and help does not need it

    loaded = load(flags, environ=os.environ, file=Path(config) if config else None)
    set_log_format(loaded.settings.log_format)
    return loaded


def run_async(work: Callable[[], Coroutine[Any, Any, T]], *, farewell: str = "interrupted") -> T:
    """Run to the end. The first SIGINT or SIGTERM cancels, and what is held is given back; the same again ends at once.

    A SIGTERM after a SIGINT is no impatience: GitHub sends both to a cancelled step, and leaves time after each.
    """
    import asyncio  # noqa: PLC0415 - help does without an event loop

    async def main() -> T:
        task = asyncio.ensure_future(work())
        loop = asyncio.get_running_loop()
        interrupted: set[int] = set()

        def interrupt(number: int) -> None:
            if number in interrupted:
                os._exit(EXIT_INTERRUPTED)
            if not interrupted:
                task.cancel()
            interrupted.add(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt, number)
        try:
            return await task
        except asyncio.CancelledError:
            if interrupted:
                raise Interrupted(farewell) from None
            raise

    return asyncio.run(main())


def command(output: Output, work: Callable[[], int]) -> int:
    """One command: its exit code, or one clear sentence and the error's own exit code."""
    try:
        return work()
    except RemudaError as error:
        output.error(error)
        return error.exit_code
    except BrokenPipeError:
        # Whoever read our output has gone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a bug, and people get one sentence
        output.error(bug(error))
        return InvariantViolated.exit_code


def bug(error: Exception) -> InvariantViolated:
    """What a report about it needs, without a page of calls."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    where = f"{Path(frame.f_code.co_filename).name}:{line}"
    bug = InvariantViolated(f"a bug: {type(error).__name__}: {error} ({where})")
    bug.fix = "please report it with this line"
    return bug
