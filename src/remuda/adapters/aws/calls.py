"""Helpers for calls to AWS: uniform errors for responses that cannot be parsed, request counts, concurrent calls."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError

from remuda.adapters.aws.errors import CONDITION_FAILED, FAILURES, TRANSACTION_CANCELLED, code_of
from remuda.ports.calls import CallCounter

T = TypeVar("T")

_PARSERS = frozenset({"botocore.parsers", "aiobotocore.parsers"})
#: Prefixes of modules that use a parsed response and fail if it has an unexpected shape. The prefix `retr` matches
#: `retries` and `retryhandler`.
_PARSER_USERS = tuple(
    f"{prefix}botocore.{module}"
    for prefix in ("", "aio")
    for module in ("endpoint", "client", "errorfactory", "model", "retr")
)
#: Codes of conditional writes that were not applied. They are regular answers, not failed calls.
_EXPECTED_CODES = TRANSACTION_CANCELLED | {CONDITION_FAILED}


async def await_response(call: Awaitable[T]) -> T:
    """Await one call. A response that botocore cannot parse raises `ResponseParserError`, whatever botocore raised."""
    try:
        return await call
    except Exception as error:
        if isinstance(error, FAILURES) or not _is_parser_failure(error):
            raise
        raise ResponseParserError(f"the response cannot be parsed: {type(error).__name__}") from error


def _is_parser_failure(error: Exception) -> bool:
    """Whether a user of a parsed response raised the error, or a parser took part."""
    # Outermost frame first: the last module raised the error.
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return modules[-1].startswith(_PARSER_USERS) or not _PARSERS.isdisjoint(modules)


async def await_and_count(call: Awaitable[T], calls: CallCounter, service: str, operation: str) -> T:
    """Await one call and count its HTTP requests, including botocore's retries."""
    # Values if the call is cancelled or raises an unexpected error.
    requests, failed = 1, 0
    try:
        answer = await await_response(call)
    except FAILURES as error:
        requests = failed = requests_of(error.response) if isinstance(error, ClientError) else 1
        if isinstance(error, ClientError) and code_of(error) in _EXPECTED_CODES:
            # The last request was answered; only those before it failed.
            failed -= 1
        raise
    else:
        requests = requests_of(answer)
        failed = requests - 1
        return answer
    finally:
        calls.add(service, operation, requests)
        calls.fail(service, operation, failed)


def requests_of(response: Any) -> int:
    """Number of HTTP requests that botocore sent for one response."""
    return 1 + int(response.get("ResponseMetadata", {}).get("RetryAttempts", 0))


async def gather(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Await calls concurrently and return their results in order.

    Unlike `asyncio.gather`, it raises the first error only after every call has finished.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
