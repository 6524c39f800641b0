"""Failures of AWS for the tables of `tests/support/failure_tables.py`. The answers come from below `remuda.http`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import pytest

from remuda.adapters.aws import service as service_client
from remuda.adapters.aws.clients import MAX_ATTEMPTS
from remuda.domain.errors import TimedOut, Unavailable, UserError
from remuda.http import ClientResponse, ConnectError, ConnectionLost, ConnectTimeout, InvalidRequest, ReadTimeout
from tests.support import failure_tables
from tests.support.aws.scripted_http import AwsScript
from tests.support.failure_tables import Expected, Failing, Outcome


async def deviations(
    service: str,
    failing: Failing,
    outcomes: Mapping[str, Outcome],
    expected: Mapping[str, Expected],
    use: Callable[[AwsScript, Failing], Awaitable[None]],
) -> dict[str, tuple[Expected, Expected]]:
    """Those of an operation of a service, without pauses between attempts."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(service_client, "random", lambda: 0.0)
        return await failure_tables.deviations(partial(AwsScript, service), failing, outcomes, expected, use)


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
