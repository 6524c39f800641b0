"""The dashboard's process: where it listens, who may come in, and its end."""

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
from remuda.config.settings import Settings
from remuda.domain.errors import UserError
from remuda.ports.calls import CallCounter
from remuda.ports.event_log import EventLog, SilentEventLog
from remuda.wiring import open_context

if TYPE_CHECKING:
    from remuda.web.dashboard.auth import Token

VARIABLE = "REMUDA_DASHBOARD_TOKEN"
PORT = 8421
LEAST_TOKEN = 16
MOST_TOKEN = 1_024
#: Between looks while somebody watches. On AWS each look costs some calls.
EVERY_S = {"local": 0.25, "aws": 5.0}
#: A scrape shows a look that is not older, and waits for it no longer: scrapers give up after ten seconds.
SCRAPE_AGE_S = {"local": 5.0, "aws": 15.0}
SCRAPE_WAIT_S = 5.0
#: Of all kinds, those that ask for nothing included; more are refused. Pages are fewer (`MAX_STREAMS`).
MAX_CONNECTIONS = 400
#: Streams end when they are told to; nothing else lasts.
GRACE_S = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where it listens, checked."""

    host: str
    port: int
    token: Token | None

    @property
    def is_loopback(self) -> bool:
        from remuda.web.dashboard.auth import is_loopback  # noqa: PLC0415 - as below

        return is_loopback(self.host)


def find_place(host: str, port: int, token_file: str | None, environ: Mapping[str, str]) -> Place:
    """Before anything is opened: on another address than this machine's own, only with a token."""
    with web_libraries():
        from remuda.web.dashboard.auth import Token, is_loopback  # noqa: PLC0415 - only where it is served
    try:
        loopback = is_loopback(host)
    except ValueError:
        raise UserError(
            f"--host is {host[:80]!r}", field="--host", fix="give an address such as 127.0.0.1, ::1 or 0.0.0.0"
        ) from None
    text = _token_text(token_file, environ)
    if text is None and not loopback:
        raise UserError(
            f"--host {host} is open to others, and there is no token",
            field="--host",
            fix=f"give --token-file or set {VARIABLE}, or stay on 127.0.0.1",
        )
    return Place(host=host, port=port, token=Token(text) if text is not None else None)


def _token_text(token_file: str | None, environ: Mapping[str, str]) -> str | None:
    if token_file is not None:
        text, field = _read_token(token_file), "--token-file"
    elif VARIABLE in environ:
        text, field = environ[VARIABLE].strip(), VARIABLE
    else:
        return None
    if not LEAST_TOKEN <= len(text) <= MOST_TOKEN or not (text.isascii() and text.isprintable()) or " " in text:
        raise UserError(
            f"{field} holds no token that will do",
            field=field,
            fix=f"give one line of {LEAST_TOKEN} to {MOST_TOKEN} letters, digits and signs: openssl rand -hex 32",
        )
    return text


def _read_token(name: str) -> str:
    try:
        path = Path(name)
        if stat.S_IMODE(path.stat().st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
            raise UserError(
                f"--token-file {name[:80]!r} can be read by others", field="--token-file", fix="chmod 600 it"
            )
        with path.open(encoding="utf-8") as file:
            return file.read(MOST_TOKEN + 2).strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(
            f"--token-file {name[:80]!r} cannot be read: {reason}",
            field="--token-file",
            fix="name a file of yours that holds the token alone",
        ) from None


@contextlib.contextmanager
def web_libraries() -> Iterator[None]:
    """Around their import."""
    try:
        yield
    except ImportError as error:
        raise UserError(
            f"the dashboard needs a library that is not installed: {error.name}",
            field="dashboard",
            fix="install starlette and uvicorn",
        ) from None


def listen(place: Place) -> socket.socket:
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((place.host, place.port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EADDRINUSE
        raise UserError(
            f"--port {place.port} of {place.host} cannot be used: {os.strerror(error.errno or 0).lower()}",
            field="--port" if taken or error.errno == errno.EACCES else "--host",
            fix="--port 0 takes a free one" if taken else "give an address of this machine and a port above 1023",
        ) from None
    return listener


def address(place: Place, listener: socket.socket) -> str:
    host = f"[{place.host}]" if ":" in place.host else place.host
    return f"http://{host}:{listener.getsockname()[1]}/"


@asynccontextmanager
async def serving(
    settings: Settings,
    place: Place,
    listener: socket.socket,
    *,
    every_s: float | None,
    since_s: float,
    asks: bool,
    event_log: EventLog | None = None,
) -> AsyncIterator[asyncio.Task[None]]:
    """Serves from here on; gives the task that ends when the server does. At the end every stream is closed at once."""
    with web_libraries():
        import uvicorn  # noqa: PLC0415 - only where it is served

        from remuda.web.dashboard.app import build_app  # noqa: PLC0415 - as above
        from remuda.web.dashboard.feed import Feed  # noqa: PLC0415 - as above
        from remuda.web.metrics import Meters  # noqa: PLC0415 - as above
        from remuda.web.metrics_route import metrics_route  # noqa: PLC0415 - as above
    clock = SystemClock()
    # One for the process: ports are opened anew after a failure, and a counter must not fall.
    calls = CallCounter()
    meters = Meters(began=clock.now())
    feed = Feed(
        open_context=lambda: open_context(settings, SilentEventLog(), credentialed=asks, alive=False, calls=calls),
        backend=settings.backend,
        every_s=every_s or EVERY_S[settings.backend],
        since_s=since_s,
        clock=clock,
        ids=SystemIds(),
        prices=chosen_prices(settings.prices),
        observers=[meters],
        event_log=event_log,
    )
    scraped = metrics_route(
        meters, calls, freshen=lambda: feed.recent(age_s=SCRAPE_AGE_S[settings.backend], timeout_s=SCRAPE_WAIT_S)
    )
    config = uvicorn.Config(
        build_app(feed, token=place.token, loopback=place.is_loopback, more=[lambda _: [scraped]]),
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        limit_concurrency=MAX_CONNECTIONS,
        ws="none",
        timeout_graceful_shutdown=GRACE_S,
    )
    server = uvicorn.Server(config)
    # The command has its own way with signals.
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
    looking = asyncio.create_task(feed.run())
    serve = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield serve
    finally:
        feed.close()
        server.should_exit = True
        looking.cancel()
        await asyncio.gather(serve, looking, return_exceptions=True)
