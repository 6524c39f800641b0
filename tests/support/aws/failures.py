"""Tables of failures: each operation of an adapter with each class of errors of its service.

An entry says which error the caller gets and how often the request was sent. The answers come from below `remuda.http`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from remuda.adapters.aws import service as service_client
from remuda.adapters.aws.clients import MAX_ATTEMPTS
from remuda.domain.errors import RemudaError, TimedOut, Unavailable, UserError
from remuda.http import ClientResponse, ConnectError, ConnectionLost, ConnectTimeout, InvalidRequest, ReadTimeout
from tests.support.aws.scripted_http import Outcome, Scripted, ScriptedHttp


class Expected(NamedTuple):
    #: The exact class of the error. None: the operation copes with it.
    error: type[RemudaError] | None
    #: How often the same request was sent.
    sends: int


class Failing(NamedTuple):
    """One operation of an adapter, and the call of AWS in it that fails."""

    name: str
    operation: str
    call: Callable[[Any], Awaitable[Any]]
    #: Outcomes of other calls of AWS, or of this one before it fails.
    before: Scripted = MappingProxyType({})
    #: Deviations from what is expected for all operations of the service; None: AWS does not answer so.
    but: Mapping[str, Expected | None] = MappingProxyType({})

    def __str__(self) -> str:
        return f"{self.name}-{self.operation}"


async def deviations(
    service: str,
    failing: Failing,
    outcomes: Mapping[str, Outcome],
    expected: Mapping[str, Expected],
    use: Callable[[ScriptedHttp, Failing], Awaitable[None]],
) -> dict[str, tuple[Expected, Expected]]:
    """What was found and what was expected, by the kind of failure. Empty if all is as the tables say."""
    assert set(failing.but) <= set(expected), "a deviation from nothing"
    found: dict[str, tuple[Expected, Expected]] = {}
    for kind, outcome in outcomes.items():
        wanted = failing.but.get(kind, expected[kind])
        if wanted is None:
            continue
        http = ScriptedHttp(service, {**failing.before, failing.operation: [outcome]})
        error: type[RemudaError] | None = None
        try:
            with pytest.MonkeyPatch.context() as patched:
                # No pauses between attempts.
                patched.setattr(service_client, "random", lambda: 0.0)
                await use(http, failing)
        except RemudaError as raised:
            error = type(raised)
        if (was := Expected(error, http.sends_of(failing.operation))) != wanted:
            found[kind] = (was, wanted)
    return found


def connection_failures() -> dict[str, Outcome]:
    return {
        "unreachable": ConnectError("refused"),
        "unreachable in time": ConnectTimeout("slow"),
        "lost": ConnectionLost("closed"),
        "timeout": ReadTimeout("slow"),
        "unsendable": InvalidRequest("a header has a character that is not allowed"),
        "gateway": ClientResponse(503, {}, b"<html>"),
        "unreadable": ClientResponse(200, {}, b"<html"),
    }


#: Of Remuda's client, which repeats each call: conditional writes are safe to repeat, and the rest changes nothing.
CONNECTION = {
    "unreachable": Expected(Unavailable, MAX_ATTEMPTS),
    "unreachable in time": Expected(TimedOut, MAX_ATTEMPTS),
    "lost": Expected(Unavailable, MAX_ATTEMPTS),
    "timeout": Expected(TimedOut, MAX_ATTEMPTS),
    # No server has seen it: a credential with a line break, for example.
    "unsendable": Expected(UserError, 1),
    "gateway": Expected(Unavailable, MAX_ATTEMPTS),
    # It may have been carried out, and another answer would not say so.
    "unreadable": Expected(Unavailable, 1),
}
