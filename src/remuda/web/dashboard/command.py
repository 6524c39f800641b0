"""`remuda dashboard`: flags in, an address out, and a page until Ctrl-C."""

from __future__ import annotations

import os

from remuda.adapters.system.clock import SystemClock
from remuda.cli.output import Output
from remuda.cli.rendering.durations import parse_duration
from remuda.cli.run import EXIT_OK, run_async
from remuda.config.settings import Settings
from remuda.domain.errors import UserError
from remuda.ports.event_log import SilentEventLog
from remuda.web.dashboard.server import address, find_place, listen, serving
from remuda.wiring import open_context

MOST_SINCE_S = 30 * 86_400.0


def parse_window(text: str) -> float:
    """How far back the page goes, in seconds."""
    seconds = parse_duration(text)
    if seconds is None or not 0 < seconds <= MOST_SINCE_S:
        raise UserError(f"--since is {text[:40]!r}", field="--since", fix="give 90m, 12h, 7d, at most 30d")
    return seconds


def run_dashboard(
    settings: Settings,
    output: Output,
    *,
    host: str,
    port: int,
    token_file: str | None,
    since: str,
    every: float | None,
    asks: bool,
) -> int:
    since_s = parse_window(since)
    place = find_place(host, port, token_file, os.environ)

    async def work() -> int:
        # Told now where there is nothing to look at; later it is the page that tells.
        async with open_context(settings, SilentEventLog(), credentialed=False, alive=False):
            pass
        listener = listen(place)
        url = address(place, listener)
        async with serving(
            settings,
            place,
            listener,
            every_s=every,
            since_s=since_s,
            asks=asks,
            event_log=output.event_log(SystemClock()),
        ) as server:
            output.say(f"dashboard: {url} (Ctrl-C ends it)", style="bold")
            output.result({"url": url})
            await server
        return EXIT_OK

    return run_async(work, farewell="the dashboard is closed")
