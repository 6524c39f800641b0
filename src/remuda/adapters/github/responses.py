"""Parsing of GitHub's responses, and translation of its error responses to Remuda's errors.

A response that deviates from GitHub's documentation raises `Unavailable`. A proxy may respond instead of GitHub: with
an HTML page, truncated JSON, or an endless body.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from base64 import b64encode, urlsafe_b64decode
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, urlsplit

from remuda.domain.errors import Conflict, NotFound, RemudaError, Throttled, Unavailable, UserError
from remuda.domain.instance import Credential
from remuda.domain.resources import is_repository
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
from remuda.http import ClientResponse
from remuda.ports.github import GitHubRun, GitHubRunner, JitRunner, JobList, ListedJob, RunList

#: Maximum size of a body in bytes. A page of 100 runners with all labels is far smaller.
MAX_BODY = 10_000_000
#: Characters of a credential: it must be valid in a header and in an environment variable.
_CREDENTIAL = re.compile(r"[!-~]{1,100000}")
_MAX_ID = 2**63
#: RFC 9110, section 8.8.3, with a limit of its length.
_ETAG = re.compile(r'(?:W/)?"[!#-~]{1,200}"')
#: GitHub's documentation: without a retry-after header, wait at least one minute.
DEFAULT_RETRY_AFTER_S = 60.0
#: Upper bound of a plausible wait. GitHub's rate limits reset within an hour.
MAX_RETRY_AFTER_S = 86_400.0
MAX_URL = 2_000
#: Upper bound of a plausible lifetime of a token. GitHub's admin tokens are valid for about an hour.
MAX_TOKEN_LIFE = timedelta(days=1)


def decompress(response: ClientResponse) -> ClientResponse:
    """The response without its content coding. Raises `Unavailable` if the body is longer than `MAX_BODY`."""
    coding = response.headers.get("content-encoding", "identity").lower()
    if coding == "identity" or not response.body:
        return response
    if coding != "gzip":
        raise Unavailable("GitHub's response has a content coding that was not requested")
    decoder = zlib.decompressobj(wbits=31)  # 31: gzip
    try:
        body = decoder.decompress(response.body, MAX_BODY + 1)
    except zlib.error:
        raise Unavailable("GitHub's response cannot be decompressed") from None
    if len(body) > MAX_BODY:
        raise too_long()
    if not decoder.eof:
        raise Unavailable("GitHub's response cannot be decompressed")
    return response._replace(body=body)


def too_long() -> Unavailable:
    return Unavailable(f"GitHub's response is longer than {MAX_BODY} bytes")


def parse_json(response: ClientResponse) -> Any:
    """The JSON document of a response. Raises `ValueError`."""
    try:
        return json.loads(response.body)
    except RecursionError as error:
        raise ValueError(f"invalid JSON: {type(error).__name__}") from None


def json_object(response: ClientResponse) -> dict[str, Any]:
    body = _json(response)
    if not isinstance(body, dict):
        raise Unavailable("GitHub's response is not a JSON object")
    return body


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceAccess:
    """Address and token of the Actions service for one scope."""

    url: str
    credential: Credential = field(repr=False)


def parse_service_access(body: Mapping[str, Any], *, now: datetime, is_local: bool) -> ServiceAccess:
    token = parse_token(body.get("token"), "token of the Actions service")
    expires_at = min(_expiry(token), now + MAX_TOKEN_LIFE)
    return ServiceAccess(
        url=parse_service_url(body.get("url"), is_local=is_local),
        credential=Credential(token=token, expires_at=to_milliseconds(expires_at)),
    )


def _expiry(token: str) -> datetime:
    """The expiry in a JSON web token, which is not verified: GitHub does that."""
    try:
        payload = token.split(".")[1]
        claims = json.loads(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        expires_at = datetime.fromtimestamp(claims["exp"], tz=UTC)
    except (IndexError, ValueError, KeyError, TypeError, OverflowError, OSError, RecursionError):
        raise Unavailable("GitHub's token of the Actions service has no valid expiry") from None
    if not EARLIEST <= expires_at <= LATEST:
        raise Unavailable("GitHub's token of the Actions service has no valid expiry")
    return expires_at


def parse_token(value: Any, what: str) -> str:
    if not isinstance(value, str) or not _CREDENTIAL.fullmatch(value):
        raise Unavailable(f"GitHub's {what} is missing or invalid")
    return value


def parse_service_url(value: Any, *, is_local: bool) -> str:
    """An address that GitHub names. Tokens are sent to it, so it must be encrypted unless the API is local."""
    try:
        parts = urlsplit(value if isinstance(value, str) and len(value) <= MAX_URL else "")
        valid = parts.hostname is not None and parts.username is None and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.scheme not in ({"https", "http"} if is_local else {"https"}):
        raise Unavailable("GitHub's address of the Actions service is missing or invalid")
    return str(value)


def parse_immutable_name(body: Mapping[str, Any]) -> str:
    """From a repository, or from an organization."""
    owner = body.get("owner", body)
    known = isinstance(owner, Mapping) and isinstance(owner.get("login"), str) and isinstance(owner.get("id"), int)
    if not known or ("owner" in body and not (isinstance(body.get("name"), str) and isinstance(body.get("id"), int))):
        raise Unavailable("GitHub's response names no id")
    repository = f"{body['name']}@{body['id']}" if "owner" in body else "*"
    return f"{owner['login']}@{owner['id']}/{repository}"


def _json(response: ClientResponse) -> Any:
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


def parse_run(response: ClientResponse) -> GitHubRun:
    body = json_object(response)
    status, conclusion, head = (body.get(key) for key in ("status", "conclusion", "head_repository"))
    attempt = body.get("run_attempt")
    # GitHub sends null for the repository of a deleted fork.
    name = head.get("full_name") if isinstance(head, dict) else ""
    return GitHubRun(
        run_id=parse_id(body, "workflow run"),
        status=_text(status),
        conclusion=_text(conclusion or ""),
        head_repository=name if isinstance(name, str) and is_repository(name) else "",
        attempt=attempt if type(attempt) is int and attempt > 0 else 0,
        etag=_etag(response),
    )


def parse_runner_page(body: Mapping[str, Any]) -> tuple[list[GitHubRunner], int]:
    """The runners on one page of the list, and the total number of runners."""
    found, total = body.get("runners"), body.get("total_count")
    if not isinstance(found, list) or type(total) is not int:
        raise Unavailable("GitHub's list of runners has no valid runners or total_count")
    return [parse_runner(each) for each in found], total


def parse_runs(response: ClientResponse) -> RunList:
    found = json_object(response).get("workflow_runs")
    if not isinstance(found, list):
        raise Unavailable("GitHub's list of workflow runs has no workflow_runs")
    return RunList(run_ids=tuple(parse_id(each, "workflow run") for each in found), etag=_etag(response))


def parse_jobs(response: ClientResponse) -> JobList:
    found = json_object(response).get("jobs")
    if not isinstance(found, list):
        raise Unavailable("GitHub's list of jobs has no jobs")
    return JobList(jobs=tuple(_parse_job(each) for each in found), etag=_etag(response))


def _etag(response: ClientResponse) -> str:
    etag = response.headers.get("etag", "")
    return etag if _ETAG.fullmatch(etag) else ""


def _parse_job(body: Any) -> ListedJob:
    job_id = parse_id(body, "job")
    labels = body.get("labels")
    try:
        created_at = datetime.fromisoformat(str(body.get("created_at"))).astimezone(UTC)
    except (ValueError, OverflowError):
        created_at = datetime.min.replace(tzinfo=UTC)
    if not isinstance(labels, list) or not EARLIEST <= created_at <= LATEST:
        raise Unavailable("GitHub's job has no valid labels or created_at")
    return ListedJob(
        job_id=job_id,
        run_id=parse_id({"id": body.get("run_id")}, "job's run"),
        name=_text(body.get("name")),
        status=_text(body.get("status")),
        labels=tuple(_text(label) for label in labels),
        created_at=to_milliseconds(created_at),
    )


def parse_runner_downloads(response: ClientResponse) -> RunnerRelease:
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


#: GitHub's words: "Although you appear to have the correct authorization credentials, the `acme` organization has an IP
#: allow list enabled, and your IP address is not permitted to access this resource." (SalesforceFoundation/NPSP#7247)
_ALLOW_LIST = "IP allow list enabled"


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


def translate(response: ClientResponse, what: str, now: datetime, *, credential: str = "") -> RemudaError:
    """The error for a response. `now` is used for rate limits that reset at an absolute time.

    `credential` is that of the request, which the message must not contain.
    """
    status = response.status
    message = _message(response, credential)
    if status in {403, 429} and _is_rate_limit(response, message):
        return Throttled(f"GitHub limits our calls ({what}): {message}", retry_after_s=_retry_after_s(response, now))
    if status == 403 and _ALLOW_LIST in message:
        return UserError(
            f"GitHub refuses the address of this computer or function ({what}): {message}",
            field="github-scope",
            fix="add its address to the IP allow list of the organization; functions and instances have fixed ones "
            "behind a NAT (docs/howto/network.md#ip-allow-lists-of-github)",
        )
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


def _message(response: ClientResponse, credential: str) -> str:
    try:
        body = parse_json(response)
    except ValueError:
        return "no explanation"
    message = str(body.get("message", "no explanation")) if isinstance(body, dict) else "no explanation"
    # Redacted before truncation, which could leave part of a credential.
    return without_credential(message, credential)[:200]


def without_credential(message: str, credential: str) -> str:
    """The text without the request's credential: a proxy may echo the request."""
    if not credential:
        return message
    for form in (credential, quote(credential, safe=""), b64encode(credential.encode()).decode().rstrip("=")):
        message = message.replace(form, "***")
    return message


def _is_rate_limit(response: ClientResponse, message: str) -> bool:
    return (
        response.status == 429
        or "retry-after" in response.headers
        or response.headers.get("x-ratelimit-remaining") == "0"
        or "rate limit" in message.lower()
    )


def _retry_after_s(response: ClientResponse, now: datetime) -> float:
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
