"""Execution of a command: settings, signals, exit codes and errors."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from remuda.cli.output import Output, set_log_format
from remuda.domain.errors import Interrupted, InvariantViolated, RemudaError

if TYPE_CHECKING:
    from remuda.config.settings import Settings

T = TypeVar("T")

EXIT_OK = 0
EXIT_PARTIAL = 4
EXIT_INTERRUPTED = 130


def load_settings(flags: Mapping[str, Any], config: str | None = None) -> Settings:
    from remuda.config.sources import load  # noqa: PLC0415 - help needs no values

    settings = load(flags, environ=os.environ, file=Path(config) if config else None)
    set_log_format(settings.log_format)
    return settings


def mistyped_variables() -> list[str]:
    """One sentence per environment variable that looks like a setting but is not."""
    from remuda.config.sources import mistyped_variables as find  # noqa: PLC0415 - as above

    return find(os.environ)


def run_async(work: Callable[[], Coroutine[Any, Any, T]], *, on_interrupt_message: str = "interrupted") -> T:
    """Run to completion. The first SIGINT or SIGTERM cancels the work, which cleans up; a repeated one exits at once.

    A SIGTERM after a SIGINT does not count as repeated: GitHub sends both to a cancelled step, with time after each.
    """
    import asyncio  # noqa: PLC0415 - help needs no event loop

    async def main() -> T:
        task = asyncio.ensure_future(work())
        loop = asyncio.get_running_loop()
        received: set[int] = set()

        def interrupt(number: int) -> None:
            if number in received:
                os._exit(EXIT_INTERRUPTED)
            if not received:
                task.cancel()
            received.add(number)

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, interrupt, number)
        try:
            return await task
        except asyncio.CancelledError:
            if received:
                raise Interrupted(on_interrupt_message) from None
            raise

    return asyncio.run(main())


def run_command(output: Output, work: Callable[[], int]) -> int:
    """Run a command and return its exit code. An error is reported in one line and determines the code."""
    try:
        return work()
    except RemudaError as error:
        output.error(error)
        return error.exit_code
    except BrokenPipeError:
        # The reader of stdout has exited.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - any other exception is a bug and gets one line, too
        output.error(bug_error(error))
        return InvariantViolated.exit_code


def exit_process(code: int) -> NoReturn:
    """Exit without the finalization of the interpreter, which only frees memory. All resources are closed by now."""
    for stream in (sys.stdout, sys.stderr):
        # The reader may have exited, or the stream may be closed.
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def bug_error(error: Exception) -> InvariantViolated:
    """The exception and its place in one line, for a bug report."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    place = f"{Path(frame.f_code.co_filename).name}:{line}"
    bug = InvariantViolated(f"a bug: {type(error).__name__}: {error} ({place})")
    bug.fix = "please report it with this line"
    return bug


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"
