"""Credentials for GitHub's API: a static token, or a GitHub App that creates installation tokens. Never logged."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from remuda.adapters.github import responses
from remuda.domain.errors import NotFound, Unavailable, UserError
from remuda.ports.clock import Clock

#: Validity of a JWT in seconds. GitHub accepts at most ten minutes.
JWT_TTL_S = 540
#: Seconds by which a JWT is backdated, for clocks that differ from GitHub's.
JWT_BACKDATED_S = 60
#: An installation token (valid for one hour) is replaced if it expires within this many seconds.
RENEW_BEFORE_S = 120.0
_LONG_AGO = datetime.min.replace(tzinfo=UTC)
APP_ID_FIELD = "github-app-id"
APP_KEY_FIELD = "github-app-key"
_KEY_FIX = "set REMUDA_GITHUB_APP_KEY to the private key (PEM, RSA): its text, a file, or the ARN of a secret"


class ApiCall(Protocol):
    """Calls GitHub with a JWT, before there is an installation token."""

    async def __call__(self, method: str, path: str, *, bearer: str) -> Any:
        """The JSON object of the response. Raises the errors of `GitHubClient`."""
        ...


class Auth(Protocol):
    @property
    def description(self) -> str:
        """The kind of credential, for people."""
        ...

    async def token(self, scope: str, api: ApiCall) -> str:
        """A valid token for this scope."""
        ...

    def invalidate(self, scope: str, token: str) -> bool:
        """Discard a token that GitHub rejected with 401. Return whether a retry with a new one makes sense."""
        ...


class StaticToken:
    """A token from the configuration, such as a personal access token."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __repr__(self) -> str:
        return "StaticToken(…)"

    @property
    def description(self) -> str:
        return "a token"

    async def token(self, scope: str, api: ApiCall) -> str:  # noqa: ARG002 - the same for all scopes
        return self._token

    def invalidate(self, scope: str, token: str) -> bool:  # noqa: ARG002 - there is no other token
        return False


@dataclass(slots=True)
class _Installation:
    """Cached installation id and token of one scope. The lock prevents concurrent requests for a new token."""

    id: int = 0
    token: str = field(default="", repr=False)
    expires_at: datetime = _LONG_AGO
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class AppAuth:
    """A GitHub App. It looks up its installation for a scope and renews the installation token."""

    def __init__(self, *, app_id: str, key: str, clock: Clock) -> None:
        self._app_id = app_id.strip()
        self._clock = clock
        if not self._app_id:
            raise UserError("the GitHub App id is empty", field=APP_ID_FIELD, fix="set REMUDA_GITHUB_APP_ID")
        self._key = _load_key(key)
        self._installations: dict[str, _Installation] = {}

    def __repr__(self) -> str:
        return f"AppAuth(app_id={self._app_id!r})"

    @property
    def description(self) -> str:
        return f"GitHub App {self._app_id}"

    async def token(self, scope: str, api: ApiCall) -> str:
        cached = self._installations.setdefault(scope.lower(), _Installation())
        async with cached.lock:
            left_s = (cached.expires_at - self._clock.now()).total_seconds()
            if not cached.token or left_s < RENEW_BEFORE_S:
                await self._create_token(cached, scope, api)
            return cached.token

    def invalidate(self, scope: str, token: str) -> bool:
        cached = self._installations.get(scope.lower())
        # Another call may already have replaced the token.
        if cached is not None and cached.token == token:
            cached.token = ""
            # The App may have been reinstalled, which changes the installation id.
            cached.id = 0
        return True

    async def _create_token(self, cached: _Installation, scope: str, api: ApiCall) -> None:
        bearer = self._jwt()
        if not cached.id:
            cached.id = await self._find_installation(scope, api, bearer)
        try:
            answer = await api("POST", f"/app/installations/{cached.id}/access_tokens", bearer=bearer)
        except NotFound:
            cached.id = 0
            raise Unavailable(f"the GitHub App's installation for {scope} was removed") from None
        token = responses.parse_credential(answer, "installation token")
        cached.token, cached.expires_at = token.token, token.expires_at

    async def _find_installation(self, scope: str, api: ApiCall, bearer: str) -> int:
        path = f"/repos/{scope}/installation" if "/" in scope else f"/orgs/{scope}/installation"
        try:
            answer = await api("GET", path, bearer=bearer)
        except NotFound:
            raise UserError(
                f"the GitHub App {self._app_id} is not installed for {scope}",
                field="github-scope",
                fix=f"install the App for {scope}, with permission to administer self-hosted runners",
            ) from None
        except UserError as error:
            raise UserError(
                f"GitHub rejects the App {self._app_id}: {error.message}",
                field=APP_KEY_FIELD,
                fix=f"{_KEY_FIX}; it must belong to REMUDA_GITHUB_APP_ID; check this machine's clock",
            ) from error
        return responses.parse_id(answer, "installation")

    def _jwt(self) -> str:
        import jwt  # noqa: PLC0415 - an optional dependency, for GitHub Apps only

        now = self._clock.now()
        claims = {
            "iat": int((now - timedelta(seconds=JWT_BACKDATED_S)).timestamp()),
            "exp": int((now + timedelta(seconds=JWT_TTL_S - JWT_BACKDATED_S)).timestamp()),
            "iss": self._app_id,
        }
        return jwt.encode(claims, self._key, algorithm="RS256")


def _load_key(text: str) -> Any:
    """The RSA key in a PEM text. Errors never quote the text."""
    try:
        from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey  # noqa: PLC0415 - as above
        from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415
    except ImportError:
        raise UserError(
            "a GitHub App needs the extra 'github-app'", field=APP_KEY_FIELD, fix="run pip install 'remuda[github-app]'"
        ) from None
    # Environment variables often contain a key with \n instead of line breaks.
    pem = text.strip().replace("\\n", "\n").encode()
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError):
        raise UserError("the GitHub App's key cannot be read", field=APP_KEY_FIELD, fix=_KEY_FIX) from None
    if not isinstance(key, RSAPrivateKey):
        raise UserError("the GitHub App's key is not an RSA key", field=APP_KEY_FIELD, fix=_KEY_FIX)
    return key
