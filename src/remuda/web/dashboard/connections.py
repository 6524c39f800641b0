"""Connections of the dashboard's server: limits that keep clients from locking out one another."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp

#: Maximum number of connections of all kinds; `MAX_STREAMS` limits the event streams.
MAX_CONNECTIONS = 400
#: Maximum number of connections without a complete request. With one more, the oldest of them is closed.
MAX_WAITING = 200
#: Seconds in which a client must have sent a complete request.
REQUEST_TIMEOUT_S = 10.0
#: Seconds that open requests get at shutdown. Streams end at once, so nothing takes longer.
SHUTDOWN_GRACE_S = 1


class RequestTimeoutProtocol(H11Protocol):
    """HTTP over one connection, which is closed if the client does not complete a request in time.

    Silent connections count for the server's limit, and uvicorn does not limit the time for a request.
    """

    _timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()
        waiting = [each for each in self.connections if isinstance(each, RequestTimeoutProtocol) and each._timeout]  # noqa: SLF001
        if len(waiting) > MAX_WAITING:
            min(waiting, key=lambda each: each._timeout.when() if each._timeout else 0.0)._abort()  # noqa: SLF001

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        is_waiting = self.cycle is None or self.cycle.response_complete or self.cycle.more_body
        if not is_waiting or self.transport.is_closing():
            self._stop_watch()
        elif self._timeout is None:
            self._timeout = self.loop.call_later(REQUEST_TIMEOUT_S, self._abort)

    def _stop_watch(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None

    def _abort(self) -> None:
        self._stop_watch()
        self.transport.abort()


def make_server(app: ASGIApp) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        http=RequestTimeoutProtocol,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        limit_concurrency=MAX_CONNECTIONS,
        ws="none",
        timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
    )
    server = uvicorn.Server(config)
    # `run_async` handles the signals.
    capture_signals: Any = nullcontext
    server.capture_signals = capture_signals  # type: ignore[method-assign]
    return server
