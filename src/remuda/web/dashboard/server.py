"""Dashboard server and its command `remuda dashboard`: listening address, token and the server's lifetime."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.adapters.system.prices import chosen_prices
from remuda.cli.local_backend import can_list_registrations
from remuda.cli.output import Output
from remuda.cli.run import EXIT_OK, run_async
from remuda.config.settings import Settings
from remuda.domain.errors import UserError
from remuda.ports.calls import CallCounter
from remuda.ports.event_log import EventLog, SilentEventLog
from remuda.wiring import open_context

if TYPE_CHECKING:
    from remuda.web.dashboard.auth import AccessToken

TOKEN_VARIABLE = "REMUDA_DASHBOARD_TOKEN"  # noqa: S105 - the variable's name
MIN_TOKEN_LENGTH = 16
MAX_TOKEN_LENGTH = 1_024
#: Seconds between polls while a page is open. On AWS each poll costs several API calls.
POLL_INTERVAL_S = {"local": 0.25, "aws": 5.0}
#: Maximum age in seconds of the status in a scrape, and seconds to wait for it. Prometheus gives up after ten seconds.
SCRAPE_MAX_AGE_S = {"local": 5.0, "aws": 15.0}
SCRAPE_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ListenAddress:
    """A validated address to listen on, and the token that protects it."""

    host: str
    port: int
    token: AccessToken | None

    @property
    def is_loopback(self) -> bool:
        from remuda.web.dashboard.auth import is_loopback  # noqa: PLC0415 - imports starlette

        return is_loopback(self.host)


def parse_listen_address(host: str, port: int, token_file: str | None, environ: Mapping[str, str]) -> ListenAddress:
    """Validate `--host`, `--port` and the token. Addresses other than loopback require a token."""
    with web_libraries():
        from remuda.web.dashboard.auth import AccessToken, is_loopback  # noqa: PLC0415 - slow to import
    try:
        loopback = is_loopback(host)
    except ValueError:
        raise UserError(
            f"--host is {host[:80]!r}", field="--host", fix="give an address such as 127.0.0.1, ::1 or 0.0.0.0"
        ) from None
    text = _token_text(token_file, environ)
    if text is None and not loopback:
        raise UserError(
            f"--host {host} can be reached from other machines and requires a token",
            field="--host",
            fix=f"pass --token-file, set {TOKEN_VARIABLE}, or use 127.0.0.1",
        )
    return ListenAddress(host=host, port=port, token=AccessToken(text) if text is not None else None)


def _token_text(token_file: str | None, environ: Mapping[str, str]) -> str | None:
    if token_file is not None:
        text, field = _read_token(token_file), "--token-file"
    elif TOKEN_VARIABLE in environ:
        text, field = environ[TOKEN_VARIABLE].strip(), TOKEN_VARIABLE
    else:
        return None
    if (
        not MIN_TOKEN_LENGTH <= len(text) <= MAX_TOKEN_LENGTH
        or not (text.isascii() and text.isprintable())
        or " " in text
    ):
        raise UserError(
            f"{field} does not contain a valid token",
            field=field,
            fix=f"use one line of {MIN_TOKEN_LENGTH} to {MAX_TOKEN_LENGTH} printable ASCII characters without spaces,"
            " e.g. the output of 'openssl rand -hex 32'",
        )
    return text


def _read_token(name: str) -> str:
    try:
        path = Path(name)
        if stat.S_IMODE(path.stat().st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
            raise UserError(
                f"--token-file {name[:80]!r} can be read by other users",
                field="--token-file",
                fix="run chmod 600 on it",
            )
        with path.open(encoding="utf-8") as file:
            return file.read(MAX_TOKEN_LENGTH + 2).strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UserError(
            f"--token-file {name[:80]!r} cannot be read: {reason}",
            field="--token-file",
            fix="name a readable file that contains only the token",
        ) from None


@contextlib.contextmanager
def web_libraries() -> Iterator[None]:
    """Turn a failed import of a web library into a `UserError`."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"the dashboard needs a library that is not installed: {error.name}",
            field="dashboard",
            fix="install starlette and uvicorn",
        ) from None


def listen(address: ListenAddress) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        in_use = error.errno == errno.EADDRINUSE
        raise UserError(
            f"--port {address.port} of {address.host} cannot be used: {os.strerror(error.errno or 0).lower()}",
            field="--port" if in_use or error.errno == errno.EACCES else "--host",
            fix="use --port 0 for a free port" if in_use else "use an address of this machine and a port above 1023",
        ) from None
    return listener


def page_url(address: ListenAddress, listener: socket.socket) -> str:
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"http://{host}:{listener.getsockname()[1]}/"


@asynccontextmanager
async def serving(
    settings: Settings,
    address: ListenAddress,
    listener: socket.socket,
    *,
    interval_s: float | None,
    since_s: float,
    list_registrations: bool,
    event_log: EventLog | None = None,
) -> AsyncIterator[asyncio.Task[None]]:
    """Serve while the block runs. Yields the server's task. All streams are closed at the end of the block."""
    with web_libraries():
        from remuda.web.dashboard.app import build_app  # noqa: PLC0415 - imports starlette
        from remuda.web.dashboard.connections import make_server  # noqa: PLC0415 - imports uvicorn
        from remuda.web.dashboard.feed import Feed  # noqa: PLC0415 - imports starlette
        from remuda.web.metrics import FleetMetrics, metrics_route  # noqa: PLC0415 - imports starlette
    clock = SystemClock()
    # Shared by all contexts: ports are opened again after a failure, and a counter must not decrease.
    calls = CallCounter()
    metrics = FleetMetrics(started_at=clock.now())
    feed = Feed(
        open_context=lambda: open_context(
            settings, SilentEventLog(), needs_github=list_registrations, require_local_github=False, calls=calls
        ),
        backend=settings.backend,
        interval_s=interval_s or POLL_INTERVAL_S[settings.backend],
        since_s=since_s,
        clock=clock,
        ids=SystemIds(),
        prices=chosen_prices(settings.prices),
        observers=[metrics],
        event_log=event_log,
    )
    metrics_page = metrics_route(
        metrics,
        calls,
        refresh=lambda: feed.recent_status(max_age_s=SCRAPE_MAX_AGE_S[settings.backend], timeout_s=SCRAPE_TIMEOUT_S),
    )
    server = make_server(
        build_app(feed, token=address.token, loopback=address.is_loopback, extra_routes=[lambda _: [metrics_page]])
    )
    polling = asyncio.create_task(feed.run())
    serve = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield serve
    finally:
        feed.close()
        server.should_exit = True
        polling.cancel()
        await asyncio.gather(serve, polling, return_exceptions=True)


def run_dashboard(
    settings: Settings,
    output: Output,
    *,
    host: str,
    port: int,
    token_file: str | None,
    since_s: float,
    every: float | None,
) -> int:
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
