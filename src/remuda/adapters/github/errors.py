"""Translation of GitHub's error responses to Remuda's errors."""

from __future__ import annotations

import math
from base64 import b64encode
from datetime import datetime
from urllib.parse import quote

import httpx

from remuda.adapters.github.responses import parse_json
from remuda.domain.errors import Conflict, NotFound, RemudaError, Throttled, Unavailable, UserError

#: GitHub's documentation: without a retry-after header, wait at least one minute.
DEFAULT_RETRY_AFTER_S = 60.0
#: Upper bound of a plausible wait. GitHub's rate limits reset within an hour.
MAX_RETRY_AFTER_S = 86_400.0


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
