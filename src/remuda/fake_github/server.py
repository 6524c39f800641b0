"""The server process: socket, state, signals, endpoint file."""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response

from remuda.fake_github import (
    Endpoint,
    admin,
    read_endpoint,
    rest,
    runner_api,
    scale_set_api,
    workflow_runs,
    write_endpoint,
)
from remuda.fake_github.app_state import AppState, error_response
from remuda.fake_github.oidc import OidcIssuer
from remuda.fake_github.registry import ACCESS_PREFIX, GitHubCore
from remuda.fake_github.state import DocumentStore, TokenClock

DATABASE = "github.db"
BACKLOG = 2048
#: Seconds until open connections are closed at shutdown.
GRACE_S = 1
#: Longer than clients keep idle connections, so that the server never closes one during a request.
KEEP_ALIVE_S = 75


def build_app(app: AppState) -> Starlette:
    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        timer = asyncio.create_task(app.run_timers())
        yield
        timer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await timer

    async def not_found(_request: Request, _problem: Exception) -> Response:
        return error_response(404, "Not Found")

    issuer = OidcIssuer(app)
    return Starlette(
        routes=[
            *rest.routes(app),
            *rest.app_routes(app),
            *runner_api.routes(app),
            *scale_set_api.routes(app),
            *workflow_runs.routes(app),
            *issuer.routes(),
            *admin.routes(app, issuer),
        ],
        lifespan=lifespan,
        # GitHub responds with 404 also to an unknown method of a path.
        exception_handlers={404: not_found, 405: not_found},
    )


def open_app_state(folder: pathlib.Path, *, clock: TokenClock) -> AppState:
    """Load the state of an earlier run from the folder."""
    core = GitHubCore(clock=clock)
    store = DocumentStore(folder / DATABASE)
    core.state.load(store.read())
    core.restore()
    return AppState(core=core, store=store)


async def serve(folder: pathlib.Path, *, host: str, port: int, clock: TokenClock, lease_s: float | None = None) -> None:
    """Serve until SIGTERM or SIGINT. The endpoint file is written as soon as the server accepts requests."""
    earlier = read_endpoint(folder)
    app = open_app_state(folder, clock=clock)
    if lease_s is not None:
        settings = dataclasses.replace(app.core.state.settings, lease_s=lease_s)
        app.core.state.change_settings(settings)
    token = clock.token(ACCESS_PREFIX) if earlier is None else earlier.token
    app.core.registry.keep_access(token)
    app.commit_changes()
    listener = _listen(host, port, earlier)
    url = f"http://{host}:{listener.getsockname()[1]}"
    server = _Server(
        build_app(app), on_ready=lambda: _write_ready(folder, Endpoint(url=url, pid=os.getpid(), token=token))
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop, app)
    try:
        await server.serve(sockets=[listener])
    finally:
        app.store.close()


class _Server(uvicorn.Server):
    def __init__(self, app: Starlette, *, on_ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            log_level="critical",
            access_log=False,
            lifespan="on",
            ws="none",
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `serve`: uvicorn would raise them again at the end and change the exit code."""
        yield

    def stop(self, app: AppState) -> None:
        app.close()
        self.should_exit = True


def _write_ready(folder: pathlib.Path, endpoint: Endpoint) -> None:
    """Write the endpoint file, and the URL to stdout, for which the parent process can wait."""
    write_endpoint(folder, endpoint)
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{endpoint.url}\n")
        sys.stdout.flush()


def _listen(host: str, port: int, earlier: Endpoint | None) -> socket.socket:
    """Listen on the given port. If it is 0, use the port of the earlier run if it is free, else any port."""
    wanted = [port]
    if port == 0 and earlier is not None:
        wanted.insert(0, urlsplit(earlier.url).port or 0)
    for candidate in wanted:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
        except OSError:
            listener.close()
            if candidate == wanted[-1]:
                raise
        else:
            listener.listen(BACKLOG)
            return listener
    raise AssertionError("unreachable: the loop returns or raises")
