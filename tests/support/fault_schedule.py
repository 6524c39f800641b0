"""Weather on the wire: which requests of a command meet a fault. It is set as `wire.always[ANY]`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from aiohttp import web

from tests.support.wire import FORM, Fault, operation_of, says

Forward = Callable[[], Awaitable[web.Response]]


class Weather:
    """Strikes some requests, and counts them."""

    def __init__(self, fault: Fault, strikes: Callable[[str], bool]) -> None:
        self._fault = fault
        self._strikes = strikes
        self.struck = 0

    async def __call__(self, request: web.Request, forward: Forward) -> web.Response:
        if not self._strikes(operation_of(request, await request.read())):
            return await forward()
        self.struck += 1
        return await self._fault(request, forward)


def storm(operation: str, fault: Fault, *, hits: int, of: int) -> Weather:
    """Of so many requests for this operation the first ones are struck."""
    count = 0

    def strikes(asked: str) -> bool:
        nonlocal count
        count += asked == operation
        return asked == operation and (count - 1) % of < hits

    return Weather(fault, strikes)


def first_of_each(fault: Fault, *, only: str = "") -> Weather:
    """The first request of each operation is struck, or of this one."""
    seen: set[str] = set()

    def strikes(asked: str) -> bool:
        new = asked not in seen and only in {"", asked}
        seen.add(asked)
        return new

    return Weather(fault, strikes)


def refuses(status: int, code: str) -> Fault:
    """An error in the words of the service that is asked: EC2 answers with XML."""
    xml = f"<Response><Errors><Error><Code>{code}</Code><Message>injected</Message></Error></Errors></Response>"
    plain = says(status, code)

    async def fault(request: web.Request, forward: Forward) -> web.Response:
        if request.content_type == FORM:
            return web.Response(status=status, body=xml, content_type="text/xml")
        return await plain(request, forward)

    return fault


def late(seconds: float) -> Fault:
    """Done at once, answered later."""

    async def fault(request: web.Request, forward: Forward) -> web.Response:
        answer = await forward()
        await asyncio.sleep(seconds)
        return answer

    return fault
