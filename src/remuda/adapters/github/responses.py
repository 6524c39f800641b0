"""Parsing of GitHub's responses. A response that deviates from GitHub's documentation raises `Unavailable`.

A proxy may respond instead of GitHub: with an HTML page, truncated JSON, or an endless body.
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

#: Maximum size of a body in bytes. A page of 100 runners with all labels is far smaller.
MAX_BODY = 10_000_000
#: Characters of a credential: it must be valid in a header and in an environment variable.
_CREDENTIAL = re.compile(r"[!-~]{1,100000}")
_MAX_ID = 2**63
#: Headers about the encoded body, dropped because the body is decoded here.
_ENCODING_HEADERS = frozenset({"content-encoding", "content-length", "transfer-encoding"})


async def read_body(response: httpx.Response) -> httpx.Response:
    """A streamed response with its whole body. Raises `Unavailable` if it is longer than `MAX_BODY`."""
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MAX_BODY:
            raise Unavailable(f"GitHub's response is longer than {MAX_BODY} bytes")
    headers = [(name, value) for name, value in response.headers.multi_items() if name.lower() not in _ENCODING_HEADERS]
    return httpx.Response(response.status_code, headers=headers, content=bytes(body), request=response.request)


def parse_json(response: httpx.Response) -> Any:
    """The JSON document of a response. Raises `ValueError`."""
    try:
        return response.json()
    except (LookupError, RecursionError) as error:
        raise ValueError(f"invalid JSON: {type(error).__name__}") from None


def json_object(response: httpx.Response) -> dict[str, Any]:
    try:
        body = parse_json(response)
    except ValueError as error:
        raise Unavailable("GitHub's response is not JSON") from error
    if not isinstance(body, dict):
        raise Unavailable("GitHub's response is not a JSON object")
    return body


def parse_credential(body: Mapping[str, Any], kind: str) -> Credential:
    token = body.get("token")
    try:
        expires_at = datetime.fromisoformat(str(body.get("expires_at")))
        expires_at = (expires_at if expires_at.tzinfo else expires_at.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        expires_at = datetime.min.replace(tzinfo=UTC)
    if not isinstance(token, str) or not _CREDENTIAL.fullmatch(token) or not EARLIEST <= expires_at <= LATEST:
        raise Unavailable(f"GitHub's {kind} has no valid token or expiry")
    return Credential(token=token, expires_at=to_milliseconds(expires_at))


def parse_id(body: Any, what: str) -> int:
    found = body.get("id") if isinstance(body, dict) else None
    if type(found) is not int or not 0 < found < _MAX_ID:
        raise Unavailable(f"GitHub's {what} has no valid id")
    return found


def parse_jit_runner(body: Mapping[str, Any]) -> JitRunner:
    config = body.get("encoded_jit_config")
    if not isinstance(config, str) or not _CREDENTIAL.fullmatch(config):
        raise Unavailable("GitHub's JIT configuration has no valid encoded_jit_config")
    return JitRunner(runner_id=parse_id(body.get("runner"), "JIT configuration's runner"), config=config)


def parse_runner(body: Any) -> GitHubRunner:
    runner_id = parse_id(body, "runner")
    name, status, busy, labels = (body.get(key) for key in ("name", "status", "busy", "labels"))
    if not isinstance(status, str) or not isinstance(busy, bool) or not isinstance(labels, list | None):
        raise Unavailable("GitHub's runner has a missing or invalid field")
    return GitHubRunner(
        runner_id=runner_id,
        name=_text(name),
        online=status == "online",
        busy=busy,
        labels=tuple(_text(label.get("name") if isinstance(label, dict) else None) for label in labels or ()),
    )


def parse_runner_page(body: Mapping[str, Any]) -> tuple[list[GitHubRunner], int]:
    """The runners on one page of the list, and the total number of runners."""
    found, total = body.get("runners"), body.get("total_count")
    if not isinstance(found, list) or type(total) is not int:
        raise Unavailable("GitHub's list of runners has no valid runners or total_count")
    return [parse_runner(each) for each in found], total


def _text(value: Any) -> str:
    """The text, with lone surrogates replaced: JSON allows them, UTF-8 does not."""
    if not isinstance(value, str):
        raise Unavailable("GitHub's runner has a missing or invalid field")
    return value.encode(errors="replace").decode()
