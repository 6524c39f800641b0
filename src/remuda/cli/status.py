"""`remuda status`, with --watch, and `remuda explain`."""

from __future__ import annotations

import json
import sys
from typing import Any, Self

from remuda.adapters.system.clock import SystemClock
from remuda.cli.local_backend import can_list_registrations, stopped_processes
from remuda.cli.output import Output
from remuda.cli.rendering import explanation
from remuda.cli.rendering import status as status_view
from remuda.cli.run import EXIT_OK, run_async
from remuda.config.settings import Settings
from remuda.controlplane.read.explain import check_subject, explain
from remuda.controlplane.read.status import REGISTRATION_CHECK_INTERVAL_S, Status, keep_github_warnings, status
from remuda.domain.errors import RemudaError, UserError
from remuda.domain.reporting.explanation import Explanation
from remuda.ports.event_log import SilentEventLog
from remuda.wiring import open_context

#: Default seconds between two updates of --watch, by backend. On AWS each update costs API calls.
WATCH_INTERVAL_S = {"local": 1.0, "aws": 5.0}
#: Rows of the screen that are not for instances: titles, pools, runs.
RESERVED_ROWS = 23


def run_status(settings: Settings, output: Output, *, everything: bool, watch: bool, every: float | None) -> int:
    if every is not None and not watch:
        raise UserError("--every requires --watch", field="--every", fix="add --watch, or omit --every")
    if watch:
        return run_async(lambda: watch_status(settings, output, everything=everything, interval_s=every))

    async def work() -> Status:
        async with open_context(
            settings,
            output.event_log(SystemClock()),
            needs_github=can_list_registrations(settings),
            require_local_github=False,
        ) as context:
            return await status(output.guarded(context), include_terminated=everything)

    result = run_async(work)
    for name in stopped_processes(settings):
        output.say(f"{name} is not running; run 'remuda up' to start it", style="bold yellow")
    output.say_errors(result.unreadable)
    if not output.as_json:
        output.answer(*status_view.status_tables(result, width=output.width))
    output.result(status_view.status_document(result))
    return EXIT_OK


def run_explain(settings: Settings, output: Output, *, subject: str) -> int:
    check_subject(subject)

    async def work() -> Explanation:
        event_log = output.event_log(SystemClock())
        async with open_context(settings, event_log, needs_github=False, require_local_github=False) as context:
            return await explain(output.guarded(context), subject)

    found = run_async(work)
    if not output.as_json:
        output.answer(*explanation.explanation_lines(found), soft_wrap=True)
    output.result(explanation.explanation_document(found))
    return EXIT_OK


class StatusScreen:
    """The status in place, on the terminal's alternate screen."""

    def __init__(self) -> None:
        from rich.live import Live  # noqa: PLC0415 - rich is slow to import

        from remuda.cli.terminal import PlainConsole  # noqa: PLC0415 - as above

        self._console = PlainConsole(highlight=False)
        self._live = Live(console=self._console, screen=True, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, current: Status) -> None:
        from rich.console import Group  # noqa: PLC0415 - as above

        rows = max(self._console.height - RESERVED_ROWS - len(current.warnings), 3)
        tables = status_view.status_tables(current, width=self._console.width, rows=rows)
        self._live.update(Group(_plain(status_view.headline(current)), *tables), refresh=True)

    def show_error(self, error: RemudaError) -> None:
        self._live.update(_plain(_retry_message(error)), refresh=True)


class StatusLines:
    """One line per change, or one JSON document per update."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._previous: Status | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, current: Status) -> None:
        if self._output.as_json:
            lines = [json.dumps(status_view.status_document(current), default=str)]
        else:
            lines = status_view.changes(self._previous, current)
        self._previous = current
        sys.stdout.writelines(f"{line}\n" for line in lines)
        sys.stdout.flush()

    def show_error(self, error: RemudaError) -> None:
        self._output.say(_retry_message(error), style="yellow")


def _plain(text: str) -> Any:
    from rich.text import Text  # noqa: PLC0415 - as above

    return Text(text)


def _retry_message(error: RemudaError) -> str:
    return f"cannot read the status: {error.message}; retrying"


async def watch_status(settings: Settings, output: Output, *, everything: bool, interval_s: float | None) -> int:
    """Show the status until interrupted."""
    interval_s = interval_s or WATCH_INTERVAL_S[settings.backend]
    in_place = sys.stdout.isatty() and not output.as_json
    needs_github = can_list_registrations(settings)
    async with open_context(
        settings, SilentEventLog(), needs_github=needs_github, require_local_github=False
    ) as context:
        clock = context.clock
        registrations_due_at = clock.monotonic()
        with StatusScreen() if in_place else StatusLines(output) as view:
            current: Status | None = None
            while True:
                # Listing registrations on GitHub is slow and rate-limited, so it happens less often.
                due = clock.monotonic() >= registrations_due_at
                if due:
                    registrations_due_at = clock.monotonic() + REGISTRATION_CHECK_INTERVAL_S
                try:
                    fresh = await status(context, include_terminated=everything, check_registrations=due)
                    current = fresh if due else keep_github_warnings(fresh, current)
                    view.show(current)
                except UserError:
                    raise
                except RemudaError as error:
                    view.show_error(error)
                await clock.sleep(interval_s)
