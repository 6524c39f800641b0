"""The server process: socket, store, signals, readiness."""

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

from remuda.fake_github import Endpoint, admin, apps, read_endpoint, rest, runner_api, write_endpoint
from remuda.fake_github.app_state import AppState, error
from remuda.fake_github.clock import TokenClock
from remuda.fake_github.core import GitHubCore
from remuda.fake_github.registry import ACCESS_PREFIX
from remuda.fake_github.store import DocumentStore

DATABASE = "github.db"
BACKLOG = 2048
#: What is still open this long after the end was asked for is cut off.
GRACE_S = 1
#: Longer than clients keep an idle connection: one that is closed as it is asked would lose the question.
KEEP_ALIVE_S = 75


def build_app(hub: AppState) -> Starlette:
    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        timer = asyncio.create_task(hub.keep_time())
        yield
        timer.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await timer

    async def not_found(_request: Request, _problem: Exception) -> Response:
        return error(404, "Not Found")

    return Starlette(
        routes=[*rest.routes(hub), *apps.routes(hub), *runner_api.routes(hub), *admin.routes(hub)],
        lifespan=lifespan,
        # GitHub answers 404 to a method that a path does not have, too.
        exception_handlers={404: not_found, 405: not_found},
    )


def open_hub(folder: pathlib.Path, *, clock: TokenClock) -> AppState:
    """Take up the state that an earlier life left in the folder."""
    core = GitHubCore(clock=clock)
    store = DocumentStore(folder / DATABASE)
    core.state.load(store.read())
    core.queue.restore()
    return AppState(core=core, store=store)


async def serve(folder: pathlib.Path, *, host: str, port: int, clock: TokenClock, lease_s: float | None = None) -> None:
    """Serve until SIGTERM or SIGINT. The endpoint file appears when requests are answered."""
    earlier = read_endpoint(folder)
    hub = open_hub(folder, clock=clock)
    if lease_s is not None:
        settings = dataclasses.replace(hub.core.state.settings, lease_s=lease_s)
        hub.core.state.change_settings(settings)
    token = clock.token(ACCESS_PREFIX) if earlier is None else earlier.token
    hub.core.registry.keep_access(token)
    hub.settle()
    listener = _listen(host, port, earlier)
    url = f"http://{host}:{listener.getsockname()[1]}"
    server = _Server(
        build_app(hub), on_ready=lambda: _announce(folder, Endpoint(url=url, pid=os.getpid(), token=token))
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop, hub)
    try:
        await server.serve(sockets=[listener])
    finally:
        hub.store.close()


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
        """Leave the signals to `serve`: uvicorn would raise them again at the end and spoil the exit code."""
        yield

    def stop(self, hub: AppState) -> None:
        hub.close()
        self.should_exit = True


def _announce(folder: pathlib.Path, endpoint: Endpoint) -> None:
    """In the file, and as a line on stdout: who started the server can wait for that."""
    write_endpoint(folder, endpoint)
    with contextlib.suppress(OSError):
        sys.stdout.write(f"{endpoint.url}\n")
        sys.stdout.flush()


def _listen(host: str, port: int, earlier: Endpoint | None) -> socket.socket:
    """On the port asked for, else on that of the earlier life if it is free, else on any."""
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
    raise AssertionError("one of the ports was bound, or the last failure was raised")
