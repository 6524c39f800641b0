"""`remuda status --watch`: the fleet as it changes, in place on a terminal, a line a change in a log."""

from __future__ import annotations

import json
import sys
from typing import Any, Self

from remuda.cli.output import Output
from remuda.cli.rendering import status as status_view
from remuda.config.settings import Settings
from remuda.controlplane.read.status import REGISTRATION_CHECK_INTERVAL_S, Status, keep_github_warnings, status
from remuda.domain.errors import RemudaError, UserError
from remuda.ports.event_log import SilentEventLog
from remuda.wiring import open_context

#: How often it looks, unless told otherwise. On AWS each look costs some calls.
EVERY_S = {"local": 1.0, "aws": 5.0}
#: Lines of a screen that instances do not get: titles, pools, runs.
RESERVED_ROWS = 23


class Screen:
    """In place: the terminal's other screen, given back at the end."""

    def __init__(self) -> None:
        from rich.live import Live  # noqa: PLC0415 - only where there is a terminal

        from remuda.cli.terminal import PlainConsole  # noqa: PLC0415 - as above

        self._console = PlainConsole(highlight=False)
        self._live = Live(console=self._console, screen=True, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, found: Status) -> None:
        from rich.console import Group  # noqa: PLC0415 - as above

        rows = max(self._console.height - RESERVED_ROWS - len(found.warnings), 3)
        tables = status_view.status_tables(found, width=self._console.width, rows=rows)
        self._live.update(Group(_plain(status_view.headline(found)), *tables), refresh=True)

    def trouble(self, error: RemudaError) -> None:
        self._live.update(_plain(f"cannot look: {error.message}; trying again"), refresh=True)


class Lines:
    """A line a change, or a document a look."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._before: Status | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, found: Status) -> None:
        if self._output.as_json:
            lines = [json.dumps(status_view.status_document(found), default=str)]
        else:
            lines = status_view.changes(self._before, found)
        self._before = found
        sys.stdout.writelines(f"{line}\n" for line in lines)
        sys.stdout.flush()

    def trouble(self, error: RemudaError) -> None:
        self._output.say(f"cannot look: {error.message}; trying again", style="yellow")


def _plain(text: str) -> Any:
    from rich.text import Text  # noqa: PLC0415 - as above

    return Text(text)


async def watch(settings: Settings, output: Output, *, everything: bool, every_s: float | None, asks: bool) -> int:
    """Until interrupted. `asks`: ghosts are looked for."""
    interval_s = every_s or EVERY_S[settings.backend]
    in_place = sys.stdout.isatty() and not output.as_json
    async with open_context(settings, SilentEventLog(), credentialed=asks, alive=False) as context:
        clock = context.clock
        next_check_at = clock.monotonic()
        with Screen() if in_place else Lines(output) as shown:
            found: Status | None = None
            while True:
                due = clock.monotonic() >= next_check_at
                if due:
                    next_check_at = clock.monotonic() + REGISTRATION_CHECK_INTERVAL_S
                try:
                    fresh = await status(context, include_terminated=everything, check_registrations=due)
                    found = fresh if due else keep_github_warnings(fresh, found)
                    shown.show(found)
                except UserError:
                    raise
                except RemudaError as error:
                    shown.trouble(error)
                await clock.sleep(interval_s)
