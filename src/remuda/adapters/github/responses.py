"""Parsing of GitHub's responses, and translation of its error responses to Remuda's errors.

A response that deviates from GitHub's documentation raises `Unavailable`. A proxy may respond instead of GitHub: with
an HTML page, truncated JSON, or an endless body.
"""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import httpx

from remuda.domain.errors import Conflict, NotFound, RemudaError, Throttled, Unavailable, UserError
from remuda.domain.instance import Credential
from remuda.domain.runner_release import (
    PackageArchitecture,
    RunnerPackage,
    RunnerRelease,
    is_digest,
    is_package_url,
    is_version,
    package_name,
)
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
#: GitHub's documentation: without a retry-after header, wait at least one minute.
DEFAULT_RETRY_AFTER_S = 60.0
#: Upper bound of a plausible wait. GitHub's rate limits reset within an hour.
MAX_RETRY_AFTER_S = 86_400.0


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
    body = _json(response)
    if not isinstance(body, dict):
        raise Unavailable("GitHub's response is not a JSON object")
    return body


def parse_immutable_name(body: Mapping[str, Any]) -> str:
    """From a repository, or from an organization."""
    owner = body.get("owner", body)
    known = isinstance(owner, Mapping) and isinstance(owner.get("login"), str) and isinstance(owner.get("id"), int)
    if not known or ("owner" in body and not (isinstance(body.get("name"), str) and isinstance(body.get("id"), int))):
        raise Unavailable("GitHub's response names no id")
    repository = f"{body['name']}@{body['id']}" if "owner" in body else "*"
    return f"{owner['login']}@{owner['id']}/{repository}"


def _json(response: httpx.Response) -> Any:
    try:
        return parse_json(response)
    except ValueError as error:
        raise Unavailable("GitHub's response is not JSON") from error


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


def parse_runner_groups(body: Mapping[str, Any]) -> dict[str, int]:
    """The ids of runner groups by name."""
    groups = body.get("runner_groups")
    if not isinstance(groups, list):
        raise Unavailable("GitHub's list of runner groups has no runner_groups")
    return {_text(each.get("name")): parse_id(each, "runner group") for each in groups if isinstance(each, dict)}


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


def parse_runner_downloads(response: httpx.Response) -> RunnerRelease:
    """The newest release for Linux, from the list of packages for all systems.

    `temp_download_token` is ignored: a credential must not become part of the launch template. github.com serves its
    packages without it.
    """
    body = _json(response)
    if not isinstance(body, list):
        raise _unusable("is not a list")
    packages: list[RunnerPackage] = []
    versions: set[str] = set()
    for each in body:
        if not isinstance(each, dict) or each.get("os") != "linux":
            continue
        name = each.get("architecture")
        if name not in {item.value for item in PackageArchitecture}:
            continue
        package, version = _package(each, PackageArchitecture(name))
        packages.append(package)
        versions.add(version)
    if not packages or len({item.architecture for item in packages}) < len(packages):
        raise _unusable("has no package for Linux on x64 or arm64, or several for one architecture")
    if len(versions) > 1:
        raise _unusable("has different versions for x64 and arm64")
    return RunnerRelease(version=versions.pop(), packages=tuple(packages))


def _package(body: Mapping[str, Any], architecture: PackageArchitecture) -> tuple[RunnerPackage, str]:
    """The package and its version."""
    filename, url, sha256 = (body.get(key) for key in ("filename", "download_url", "sha256_checksum"))
    prefix, suffix = package_name("|", architecture).split("|")
    version = filename.removeprefix(prefix).removesuffix(suffix) if isinstance(filename, str) else ""
    if not is_version(version) or filename != package_name(version, architecture):
        raise _unusable(f"has no valid filename for {architecture}")
    if not isinstance(url, str) or not url.startswith("https://") or not is_package_url(url):
        raise _unusable(f"has no plain https URL of a .tar.gz file for {architecture}")
    if not isinstance(sha256, str) or not is_digest(sha256.lower()):
        raise _unusable(f"has no valid SHA-256 for {architecture}")
    return RunnerPackage(architecture=architecture, url=url, sha256=sha256.lower()), version


def _unusable(problem: str) -> Unavailable:
    return Unavailable(
        f"GitHub's list of runner packages {problem}",
        fix="set actions-runner-version to a version, with actions-runner-sha256, or to image",
    )


def _text(value: Any) -> str:
    """The text, with lone surrogates replaced: JSON allows them, UTF-8 does not."""
    if not isinstance(value, str):
        raise Unavailable("GitHub's runner has a missing or invalid field")
    return value.encode(errors="replace").decode()


def translate(response: httpx.Response, what: str, now: datetime) -> RemudaError:
    """The error for a response. `now` is used for rate limits that reset at an absolute time."""
    status = response.status_code
    message = _message(response)
    if status in {403, 429} and _is_rate_limit(response, message):
        return Throttled(f"GitHub limits our calls ({what}): {message}", retry_after_s=_retry_after_s(response, now))
    if status in {401, 403}:
        return UserError(
            f"GitHub refuses the credential ({what}): {status} {message}",
            field="github-token",
            fix="set REMUDA_GITHUB_TOKEN to a token with permission to administer runners of this scope",
        )
    if 300 <= status < 400:
        # Not followed: the credential would be sent to the redirect's target. The old name of a renamed scope works
        # only for a while.
        return UserError(
            f"GitHub redirects, the organisation or repository was probably renamed ({what}): {status}",
            field="github-scope",
            fix="set the new name of the organisation or repository, and run remuda refresh",
        )
    if status == 404:
        return NotFound(f"not found on GitHub, or not visible to the credential ({what}): {message}")
    if status == 409:
        return Conflict(f"GitHub: {message} ({what})")
    if status == 422:
        return UserError(f"GitHub rejects the input ({what}): {message}", field="github-scope")
    return Unavailable(f"GitHub returned {status} ({what}): {message}")


def _message(response: httpx.Response) -> str:
    try:
        body = parse_json(response)
    except ValueError:
        return "no explanation"
    message = str(body.get("message", "no explanation")) if isinstance(body, dict) else "no explanation"
    # Redacted before truncation, which could leave part of a credential.
    return _without_credential(message, response.request)[:200]


def _without_credential(message: str, request: httpx.Request) -> str:
    """The text without the request's credential: a proxy may echo the request."""
    credential = request.headers.get("authorization", "").partition(" ")[2].strip()
    if not credential:
        return message
    for form in (credential, quote(credential, safe=""), b64encode(credential.encode()).decode().rstrip("=")):
        message = message.replace(form, "***")
    return message


def _is_rate_limit(response: httpx.Response, message: str) -> bool:
    return (
        response.status_code == 429
        or "retry-after" in response.headers
        or response.headers.get("x-ratelimit-remaining") == "0"
        or "rate limit" in message.lower()
    )


def _retry_after_s(response: httpx.Response, now: datetime) -> float:
    """Seconds to wait: `retry-after`, else the reset time of a used-up rate limit, else a minute."""
    seconds = _number(response.headers.get("retry-after"))
    if seconds is None and response.headers.get("x-ratelimit-remaining") == "0":
        reset = _number(response.headers.get("x-ratelimit-reset"))
        seconds = None if reset is None else reset - now.timestamp()
    return DEFAULT_RETRY_AFTER_S if seconds is None else min(max(0.0, seconds), MAX_RETRY_AFTER_S)


def _number(text: str | None) -> float | None:
    try:
        found = float(text or "")
    except ValueError:
        return None
    return found if math.isfinite(found) else None
