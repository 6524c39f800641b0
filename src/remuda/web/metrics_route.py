"""`/metrics` on a web server that has looked: whoever serves says how fresh it is to be, and who may ask."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from remuda.ports.calls import CallCounter
from remuda.web.metrics import Meters

PATH = "/metrics"


def metrics_route(meters: Meters, calls: CallCounter, *, freshen: Callable[[], Awaitable[None]]) -> Route:
    """`freshen` waits, not for long, until `meters` has seen a recent look. `calls` counts for the whole process: one
    that began anew with each connection would fall.
    """

    async def answer(request: Request) -> Response:
        await freshen()
        text, content_type = meters.text(calls, accept=request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type, "cache-control": "no-store"})

    return Route(PATH, answer, methods=["GET"])
