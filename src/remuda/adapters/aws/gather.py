"""Calls that go out together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def gathered(calls: Iterable[Awaitable[T]]) -> list[T]:
    """All answers in order. Every call is over before the first error, if there was one, is raised."""
    answers = await asyncio.gather(*calls, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return [answer for answer in answers if not isinstance(answer, BaseException)]


def chunks(things: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(things), size):
        yield things[start : start + size]
