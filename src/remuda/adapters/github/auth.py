"""Credentials for GitHub's API: a token as it is, or an App that mints its own. Neither is ever shown."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from remuda.adapters.github import answers
from remuda.domain.errors import NotFound, Unavailable, UserError
from remuda.ports.clock import Clock

#: GitHub takes a JWT for at most ten minutes, by its own clock: ours may be behind or ahead.
JWT_LIFE_S = 540
JWT_BACKDATED_S = 60
#: A token is replaced when less than this is left of its hour.
TOKEN_LEFT_S = 120.0
_LONG_AGO = datetime.min.replace(tzinfo=UTC)
APP_ID_FIELD = "github-app-id"
APP_KEY_FIELD = "github-app-key"
_KEY_FIX = "give the private key (PEM, RSA) as REMUDA_GITHUB_APP_KEY: its text, a file, or the ARN of a secret"


class Api(Protocol):
    """Calls with a JWT, for those who have no token yet."""

    async def __call__(self, method: str, path: str, *, bearer: str) -> Any:
        """The answer's document. Errors as GitHub's client translates them."""
        ...


class Auth(Protocol):
    @property
    def kind(self) -> str:
        """What it is, for people."""
        ...

    async def token(self, scope: str, api: Api) -> str:
        """One that is valid now, for this scope."""
        ...

    def refused(self, scope: str, token: str) -> bool:
        """GitHub said 401 to it. Whether there may be a better one."""
        ...


class StaticToken:
    """A personal access token, or whatever else came from outside."""

    def __init__(self, token: str) -> None:
        self._token = token

    def __repr__(self) -> str:
        return "StaticToken(…)"

    @property
    def kind(self) -> str:
        return "a token"

    async def token(self, scope: str, api: Api) -> str:  # noqa: ARG002 - one for all scopes
        return self._token

    def refused(self, scope: str, token: str) -> bool:  # noqa: ARG002 - there is no other
        return False


@dataclass(slots=True)
class _Installation:
    """What is known of one installation. The lock lets one call at a time ask for more."""

    id: int = 0
    token: str = field(default="", repr=False)
    expires_at: datetime = _LONG_AGO
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class AppAuth:
    """A GitHub App: it finds its installation for a scope by itself and keeps that one's token fresh."""

    def __init__(self, *, app_id: str, key: str, clock: Clock) -> None:
        self._app_id = app_id.strip()
        self._clock = clock
        if not self._app_id:
            raise UserError("the GitHub App has no id", field=APP_ID_FIELD, fix="set REMUDA_GITHUB_APP_ID")
        self._key = _load_key(key)
        self._installations: dict[str, _Installation] = {}

    def __repr__(self) -> str:
        return f"AppAuth(app_id={self._app_id!r})"

    @property
    def kind(self) -> str:
        return f"GitHub App {self._app_id}"

    async def token(self, scope: str, api: Api) -> str:
        known = self._installations.setdefault(scope.lower(), _Installation())
        async with known.lock:
            left_s = (known.expires_at - self._clock.now()).total_seconds()
            if not known.token or left_s < TOKEN_LEFT_S:
                await self._mint(known, scope, api)
            return known.token

    def refused(self, scope: str, token: str) -> bool:
        known = self._installations.get(scope.lower())
        # Where another call has a new one already, that is the better one.
        if known is not None and known.token == token:
            known.token = ""
            # It may have been installed anew since.
            known.id = 0
        return True

    async def _mint(self, known: _Installation, scope: str, api: Api) -> None:
        bearer = self._jwt()
        if not known.id:
            known.id = await self._find(scope, api, bearer)
        try:
            answer = await api("POST", f"/app/installations/{known.id}/access_tokens", bearer=bearer)
        except NotFound:
            known.id = 0
            raise Unavailable(f"the GitHub App's installation for {scope} has just gone") from None
        minted = answers.credential(answer, "installation token")
        known.token, known.expires_at = minted.token, minted.expires_at

    async def _find(self, scope: str, api: Api, bearer: str) -> int:
        path = f"/repos/{scope}/installation" if "/" in scope else f"/orgs/{scope}/installation"
        try:
            answer = await api("GET", path, bearer=bearer)
        except NotFound:
            raise UserError(
                f"the GitHub App {self._app_id} is not installed for {scope}",
                field="github-scope",
                fix=f"install the App for {scope}, with the right to administer its self-hosted runners",
            ) from None
        except UserError as error:
            raise UserError(
                f"GitHub refuses the App {self._app_id}: {error.message}",
                field=APP_KEY_FIELD,
                fix=f"{_KEY_FIX}; it must belong to REMUDA_GITHUB_APP_ID; check this machine's clock",
            ) from error
        return answers.identifier(answer, "installation")

    def _jwt(self) -> str:
        import jwt  # noqa: PLC0415 - an extra: only an App needs it

        now = self._clock.now()
        claims = {
            "iat": int((now - timedelta(seconds=JWT_BACKDATED_S)).timestamp()),
            "exp": int((now + timedelta(seconds=JWT_LIFE_S - JWT_BACKDATED_S)).timestamp()),
            "iss": self._app_id,
        }
        return jwt.encode(claims, self._key, algorithm="RS256")


def _load_key(text: str) -> Any:
    """Read once, and checked before any call. What is wrong with a key is never quoted."""
    try:
        from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey  # noqa: PLC0415 - as above
        from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415
    except ImportError:
        raise UserError(
            "a GitHub App needs the extra 'github-app'", field=APP_KEY_FIELD, fix="pip install 'remuda[github-app]'"
        ) from None
    # Environments often carry the line breaks of a key as \n.
    pem = text.strip().replace("\\n", "\n").encode()
    try:
        key = load_pem_private_key(pem, password=None)
    except (ValueError, TypeError):
        raise UserError("the GitHub App's key cannot be read", field=APP_KEY_FIELD, fix=_KEY_FIX) from None
    if not isinstance(key, RSAPrivateKey):
        raise UserError("the GitHub App's key is no RSA key", field=APP_KEY_FIELD, fix=_KEY_FIX)
    return key
