"""GitHub's answers, taken apart. What is not as its documentation says is `Unavailable`: nothing is guessed.

A proxy may answer in GitHub's place: with a page, with half a document, or without end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import httpx

from remuda.domain.errors import Unavailable
from remuda.domain.instance import Credential
from remuda.domain.serialization import EARLIEST, LATEST
from remuda.domain.timestamps import to_milliseconds
from remuda.ports.github import GitHubRunner, JitRunner

#: A hundred runners with all their labels are far below that.
MAX_BODY = 10_000_000
#: What a credential is made of: it goes into headers, and into the environment of a program.
_CREDENTIAL = re.compile(r"[!-~]{1,100000}")
_MAX_ID = 2**63
#: They tell of a body as it was sent; it is here as it was meant.
_OF_THE_WIRE = frozenset({"content-encoding", "content-length", "transfer-encoding"})


async def whole(response: httpx.Response) -> httpx.Response:
    """An answer that is still coming in, read to its end if that is near."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MAX_BODY:
            raise Unavailable(f"GitHub's answer is longer than {MAX_BODY} bytes")
    headers = [(name, value) for name, value in response.headers.multi_items() if name.lower() not in _OF_THE_WIRE]
    return httpx.Response(response.status_code, headers=headers, content=bytes(body), request=response.request)


def document(response: httpx.Response) -> Any:
    """`ValueError` where there is none."""
    try:
        return response.json()
    except (LookupError, RecursionError) as error:
        raise ValueError(f"no JSON: {type(error).__name__}") from None


def fields(response: httpx.Response) -> dict[str, Any]:
    try:
        body = document(response)
    except ValueError as error:
        raise Unavailable("GitHub's answer is not JSON") from error
    if not isinstance(body, dict):
        raise Unavailable("GitHub's answer is not an object")
    return body


def credential(body: Mapping[str, Any], kind: str) -> Credential:
    token = body.get("token")
    try:
        expires_at = datetime.fromisoformat(str(body.get("expires_at")))
        expires_at = (expires_at if expires_at.tzinfo else expires_at.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        expires_at = datetime.min.replace(tzinfo=UTC)
    if not isinstance(token, str) or not _CREDENTIAL.fullmatch(token) or not EARLIEST <= expires_at <= LATEST:
        raise Unavailable(f"GitHub's {kind} has no usable token or expiry")
    return Credential(token=token, expires_at=to_milliseconds(expires_at))


def identifier(body: Any, what: str) -> int:
    found = body.get("id") if isinstance(body, dict) else None
    if type(found) is not int or not 0 < found < _MAX_ID:
        raise Unavailable(f"GitHub's {what} has no usable id")
    return found


def jit_runner(body: Mapping[str, Any]) -> JitRunner:
    config = body.get("encoded_jit_config")
    if not isinstance(config, str) or not _CREDENTIAL.fullmatch(config):
        raise Unavailable("GitHub's JIT configuration lacks its configuration")
    return JitRunner(runner_id=identifier(body.get("runner"), "JIT configuration's runner"), config=config)


def runner(body: Any) -> GitHubRunner:
    runner_id = identifier(body, "runner")
    name, status, busy, labels = (body.get(key) for key in ("name", "status", "busy", "labels"))
    if not isinstance(status, str) or not isinstance(busy, bool) or not isinstance(labels, list | None):
        raise Unavailable("GitHub's runner lacks a field")
    return GitHubRunner(
        runner_id=runner_id,
        name=_text(name),
        online=status == "online",
        busy=busy,
        labels=tuple(_text(label.get("name") if isinstance(label, dict) else None) for label in labels or ()),
    )


def page(body: Mapping[str, Any]) -> tuple[list[GitHubRunner], int]:
    """Of a list of runners: those on it, and how many there are in all."""
    found, total = body.get("runners"), body.get("total_count")
    if not isinstance(found, list) or type(total) is not int:
        raise Unavailable("GitHub's list of runners is not a list with its length")
    return [runner(each) for each in found], total


def _text(value: Any) -> str:
    """Half a surrogate pair can be spelt in JSON, and written nowhere."""
    if not isinstance(value, str):
        raise Unavailable("GitHub's runner lacks a field")
    return value.encode(errors="replace").decode()
