"""GitHub's answers as our errors: one place for all of them."""

from __future__ import annotations

import math
from base64 import b64encode
from datetime import datetime
from urllib.parse import quote

import httpx

from remuda.adapters.github.answers import document
from remuda.domain.errors import Conflict, NotFound, RemudaError, Throttled, Unavailable, UserError

#: GitHub's word for it: without a retry-after, wait a minute at least.
DEFAULT_RETRY_AFTER_S = 60.0
#: No limit of GitHub's lasts longer than an hour: what names more than a day is no time.
MAX_RETRY_AFTER_S = 86_400.0


def translate(response: httpx.Response, what: str, now: datetime) -> RemudaError:
    """`now` is for limits that end at a time by the clock."""
    status = response.status_code
    said = _message(response)
    if status in {403, 429} and _is_rate_limit(response, said):
        return Throttled(f"GitHub limits our calls ({what}): {said}", retry_after_s=_retry_after_s(response, now))
    if status in {401, 403}:
        return UserError(
            f"GitHub refuses the credential ({what}): {status} {said}",
            field="github-token",
            fix="set REMUDA_GITHUB_TOKEN to a token that may administer runners of this scope",
        )
    if 300 <= status < 400:
        # Followed, the credential would go where a redirect says. A renamed scope keeps its old name only so long.
        return UserError(
            f"GitHub has it under another name ({what}): {status}",
            field="github-scope",
            fix="give the present name of the organisation or repository, and run remuda refresh",
        )
    if status == 404:
        return NotFound(f"GitHub does not know it, or the credential may not see it ({what}): {said}")
    if status == 409:
        return Conflict(f"GitHub: {said} ({what})")
    if status == 422:
        return UserError(f"GitHub cannot use the input ({what}): {said}", field="github-scope")
    return Unavailable(f"GitHub answered {status} ({what}): {said}")


def _message(response: httpx.Response) -> str:
    try:
        body = document(response)
    except ValueError:
        return "no explanation"
    said = str(body.get("message", "no explanation")) if isinstance(body, dict) else "no explanation"
    # Before it is cut: half a credential is too much as well.
    return _without_credential(said, response.request)[:200]


def _without_credential(said: str, request: httpx.Request) -> str:
    """Something between GitHub and us may send back what it was sent."""
    credential = request.headers.get("authorization", "").partition(" ")[2].strip()
    if not credential:
        return said
    for form in (credential, quote(credential, safe=""), b64encode(credential.encode()).decode().rstrip("=")):
        said = said.replace(form, "***")
    return said


def _is_rate_limit(response: httpx.Response, said: str) -> bool:
    return (
        response.status_code == 429
        or "retry-after" in response.headers
        or response.headers.get("x-ratelimit-remaining") == "0"
        or "rate limit" in said.lower()
    )


def _retry_after_s(response: httpx.Response, now: datetime) -> float:
    """As GitHub asks: `retry-after` first, then the reset of a limit that is used up, else a minute."""
    asked = _number(response.headers.get("retry-after"))
    if asked is None and response.headers.get("x-ratelimit-remaining") == "0":
        reset = _number(response.headers.get("x-ratelimit-reset"))
        asked = None if reset is None else reset - now.timestamp()
    return DEFAULT_RETRY_AFTER_S if asked is None else min(max(0.0, asked), MAX_RETRY_AFTER_S)


def _number(text: str | None) -> float | None:
    try:
        found = float(text or "")
    except ValueError:
        return None
    return found if math.isfinite(found) else None
