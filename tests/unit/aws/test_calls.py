"""Errors of calls through botocore's clients."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import ClientPayloadError
from botocore.exceptions import ClientError
from botocore.model import Shape
from botocore.parsers import QueryParser

from remuda.adapters.aws.calls import await_response
from remuda.adapters.aws.protocols import UnreadableResponse


async def answer(document: Any) -> Any:
    return document


async def fail(error: Exception) -> None:
    raise error


async def parse(body: bytes) -> Any:
    shape = Shape("Response", {"type": "structure"})
    return QueryParser().parse({"status_code": 400, "headers": {}, "body": body}, shape)


async def test_response_of_a_call_is_returned() -> None:
    assert await await_response(answer({"Account": "1"})) == {"Account": "1"}


async def test_response_that_botocore_cannot_parse_is_unreadable() -> None:
    with pytest.raises(UnreadableResponse):
        await await_response(parse(b"no XML"))


async def test_failure_of_the_connection_is_unreadable() -> None:
    with pytest.raises(UnreadableResponse):
        await await_response(fail(ClientPayloadError("closed")))


@pytest.mark.parametrize("error", [ClientError({"Error": {"Code": "Throttling"}}, "GetRole"), KeyError("a bug")])
async def test_other_errors_are_raised_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as raised:
        await await_response(fail(error))
    assert raised.value is error
