"""The `remuda dashboard` command."""

from __future__ import annotations

import os

from remuda.adapters.system.clock import SystemClock
from remuda.cli.local_backend import can_list_registrations
from remuda.cli.output import Output
from remuda.cli.rendering.formatting import parse_duration
from remuda.cli.run import EXIT_OK, run_async
from remuda.config.settings import Settings
from remuda.domain.errors import UserError
from remuda.ports.event_log import SilentEventLog
from remuda.web.dashboard.server import listen, page_url, parse_listen_address, serving
from remuda.wiring import open_context

MAX_SINCE_S = 30 * 86_400.0


def parse_window(text: str) -> float:
    """Parse `--since` into seconds."""
    seconds = parse_duration(text)
    if seconds is None or not 0 < seconds <= MAX_SINCE_S:
        raise UserError(
            f"--since is {text[:40]!r}", field="--since", fix="give a duration of at most 30d, e.g. 90m, 12h or 7d"
        )
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
) -> int:
    since_s = parse_window(since)
    address = parse_listen_address(host, port, token_file, os.environ)

    async def work() -> int:
        # Fails now if the backend cannot be opened. Later errors are shown on the page.
        async with open_context(settings, SilentEventLog(), needs_github=False, require_local_github=False):
            pass
        listener = listen(address)
        url = page_url(address, listener)
        async with serving(
            settings,
            address,
            listener,
            interval_s=every,
            since_s=since_s,
            list_registrations=can_list_registrations(settings),
            event_log=output.event_log(SystemClock()),
        ) as server:
            output.say(f"dashboard: {url} (press Ctrl-C to stop)", style="bold")
            output.result({"url": url})
            await server
        return EXIT_OK

    return run_async(work, on_interrupt_message="dashboard stopped")
