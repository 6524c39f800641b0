"""Verification of the OIDC tokens that GitHub issues to workflows.

Only RS256 is accepted, which is what GitHub uses, with keys that the issuer publishes at `/.well-known/jwks` (GitHub
and GitHub Enterprise Server: docs.github.com/actions/reference/security/oidc). Keys and URLs in a token's header
(`jwk`, `jku`, `x5c`, `x5u`) are ignored. PyJWT is not used because its import takes 0.15 s of a cold start; the tests
compare with it. Tokens are never logged and never part of an error.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.padding import PKCS1v15
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey, RSAPublicNumbers
from cryptography.hazmat.primitives.hashes import SHA256

from remuda.domain.errors import Unavailable
from remuda.domain.text import quote
from remuda.domain.workflow_identity import MAX_CLAIM_SHOWN, TokenRejected
from remuda.ports.clock import Clock
from remuda.tls import client_context

ALGORITHM = "RS256"
#: Characters of a token. GitHub's have one to three thousand.
MAX_TOKEN = 16_384
#: Seconds by which the clocks of GitHub and of this machine may differ.
LEEWAY_S = 30.0
#: Seconds that the issuer's keys are used before they are fetched again.
KEYS_LIFETIME_S = 3_600.0
#: Seconds that they are used if the issuer cannot be reached.
KEYS_MAX_AGE_S = 86_400.0
#: Seconds between two fetches because of an unknown key, or after a failed one.
REFETCH_AFTER_S = 60.0
FETCH_TIMEOUT_S = 5.0
MAX_JWKS_BYTES = 262_144
MAX_KEYS = 100
#: Bits of a key's modulus. Larger ones would cost much CPU time.
MIN_KEY_BITS, MAX_KEY_BITS = 2_048, 8_192
MAX_EXPONENT = 2**32
_NEW_TOKEN = "request a new token in the step; GitHub's tokens are valid for five minutes"  # noqa: S105 - a sentence

#: Returns the body of a URL. Raises OSError or ValueError.
Fetch = Callable[[str], Awaitable[bytes]]


async def fetch_url(url: str) -> bytes:
    return await asyncio.to_thread(_read_url, url)


def _read_url(url: str) -> bytes:
    import urllib.error  # noqa: PLC0415 - not needed while the keys are cached
    import urllib.request  # noqa: PLC0415
    from http.client import HTTPException  # noqa: PLC0415

    class NoRedirects(urllib.request.HTTPRedirectHandler):
        """The issuer itself must answer."""

        def redirect_request(self, *_: Any) -> None:
            return None

    handlers: list[Any] = [NoRedirects]
    if url.startswith("https:"):
        handlers.append(urllib.request.HTTPSHandler(context=client_context(os.environ.get("SSL_CERT_FILE", ""))))
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(url, timeout=FETCH_TIMEOUT_S) as answer:
            body: bytes = answer.read(MAX_JWKS_BYTES + 1)
    except urllib.error.HTTPError as error:
        # It is also the response, with an open connection.
        with error:
            raise ValueError(f"HTTP status {error.code}") from None
    except HTTPException as error:
        raise ValueError(f"the answer is not HTTP: {error}") from None
    if len(body) > MAX_JWKS_BYTES:
        raise ValueError(f"the answer is larger than {MAX_JWKS_BYTES} bytes")
    return body


@dataclass(frozen=True, kw_only=True, slots=True)
class _CachedKeys:
    keys: Mapping[str, RSAPublicKey]
    at: datetime


class IssuerKeys:
    """The signing keys of an issuer, cached.

    Ages are measured by the wall clock: the monotonic clock of a Lambda function may stop between invocations.
    """

    def __init__(self, *, issuer: str, clock: Clock, fetch: Fetch) -> None:
        self._issuer = issuer
        self._clock = clock
        self._fetch = fetch
        self._cached: _CachedKeys | None = None
        self._tried_at: datetime | None = None

    async def find(self, key_id: str) -> RSAPublicKey:
        """The key of that id. Raises `TokenRejected` if none exists, `Unavailable` if the issuer does not answer."""
        cached = self._cached
        if cached is not None and self._age_s(cached.at) >= KEYS_MAX_AGE_S:
            cached = None
        is_fresh = cached is not None and self._age_s(cached.at) < KEYS_LIFETIME_S
        if cached is not None and key_id in cached.keys and (is_fresh or not self._may_fetch()):
            return cached.keys[key_id]
        if cached is None or self._may_fetch():
            cached = await self._renewed(cached, key_id)
        found = cached.keys.get(key_id)
        if found is None:
            raise TokenRejected(
                f"the OIDC token is signed with a key that {self._issuer} does not publish",
                field="token",
                fix=_NEW_TOKEN,
            )
        return found

    async def _renewed(self, cached: _CachedKeys | None, key_id: str) -> _CachedKeys:
        """The keys after a fetch. If it fails, known keys are used further."""
        self._tried_at = self._clock.now()
        url = f"{self._issuer}/.well-known/jwks"
        try:
            keys = parse_keys(await self._fetch(url))
        except (OSError, ValueError, RecursionError) as error:
            if cached is not None and key_id in cached.keys:
                return cached
            raise Unavailable(
                f"the signing keys of OIDC tokens cannot be read from {url}: {quote(str(error), MAX_CLAIM_SHOWN)}",
                fix="try again; if it persists, check that the broker can reach the issuer",
            ) from None
        self._cached = _CachedKeys(keys=keys, at=self._tried_at)
        return self._cached

    def _may_fetch(self) -> bool:
        return self._tried_at is None or self._age_s(self._tried_at) >= REFETCH_AFTER_S

    def _age_s(self, at: datetime) -> float:
        return abs((self._clock.now() - at).total_seconds())


def parse_keys(body: bytes) -> dict[str, RSAPublicKey]:
    """The usable keys of a JSON Web Key Set by id (RFC 7517). Raises ValueError if there are none."""
    document = json.loads(body)
    listed = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise ValueError("it is not a JSON Web Key Set")
    found: dict[str, RSAPublicKey] = {}
    for item in listed[:MAX_KEYS]:
        if isinstance(item, dict) and isinstance(key_id := item.get("kid"), str) and (key := _parse_key(item)):
            found[key_id] = key
    if not found:
        raise ValueError("it contains no RSA key")
    return found


def _parse_key(item: Mapping[str, Any]) -> RSAPublicKey | None:
    expected = {"kty": "RSA", "use": "sig", "alg": ALGORITHM}
    # `use` and `alg` are optional.
    if item.get("kty") != "RSA" or any(item.get(name, value) != value for name, value in expected.items()):
        return None
    try:
        modulus, exponent = (int.from_bytes(_decode(str(item.get(name)).encode())) for name in ("n", "e"))
        if not MIN_KEY_BITS <= modulus.bit_length() <= MAX_KEY_BITS or exponent > MAX_EXPONENT:
            return None
        return RSAPublicNumbers(e=exponent, n=modulus).public_key()
    except ValueError:
        return None


class TokenVerifier:
    def __init__(self, *, issuer: str, audience: str, clock: Clock, keys: IssuerKeys) -> None:
        self._issuer = issuer
        self._audience = audience
        self._clock = clock
        self._keys = keys

    async def verify(self, token: str) -> Mapping[str, Any]:
        """The claims of a valid token for this audience. Raises `TokenRejected`, or `Unavailable` (see `IssuerKeys`).

        Everything but the signature is checked first, so that invalid tokens cause no request to the issuer.
        """
        signed, header, claims, signature = _parse_token(token)
        key_id = _check_header(header)
        self._check_claims(claims)
        key = await self._keys.find(key_id)
        try:
            key.verify(signature, signed, PKCS1v15(), SHA256())
        except InvalidSignature:
            raise TokenRejected("the signature of the OIDC token is not valid", field="token", fix=_NEW_TOKEN) from None
        return claims

    def _check_claims(self, claims: Mapping[str, Any]) -> None:
        if claims.get("iss") != self._issuer:
            raise TokenRejected(
                f"the OIDC token was issued by {quote(claims.get('iss'), MAX_CLAIM_SHOWN)}, not by {self._issuer}",
                field="token",
                fix="set OidcIssuer of the pool's stack to the issuer of your GitHub",
            )
        if claims.get("aud") != self._audience:
            raise TokenRejected(
                f"the OIDC token is for {quote(claims.get('aud'), MAX_CLAIM_SHOWN)}, not for {self._audience}",
                field="token",
                fix=f"request it with the audience {self._audience}",
            )
        now = self._clock.now().timestamp()
        expires, begins = _seconds(claims, "exp"), max(_seconds(claims, "nbf"), _seconds(claims, "iat"))
        if now >= expires + LEEWAY_S:
            raise TokenRejected(f"the OIDC token expired {now - expires:.0f} s ago", field="token", fix=_NEW_TOKEN)
        if now < begins - LEEWAY_S:
            raise TokenRejected(
                f"the OIDC token is not valid yet: it begins in {begins - now:.0f} s",
                field="token",
                fix="check the clock of the issuer",
            )


def _parse_token(token: str) -> tuple[bytes, Mapping[str, Any], Mapping[str, Any], bytes]:
    """The signed part, header, claims and signature of a JWT in its compact form (RFC 7515 and 7519)."""
    problem = ""
    if len(token) > MAX_TOKEN:
        problem = f"it is longer than {MAX_TOKEN} characters"
    else:
        try:
            head, body, tail = token.encode("ascii").split(b".")
            header, claims = json.loads(_decode(head)), json.loads(_decode(body))
            if isinstance(header, dict) and isinstance(claims, dict):
                return head + b"." + body, header, claims, _decode(tail)
        except (ValueError, RecursionError):
            pass
    shown = f": {problem}" if problem else ""
    raise TokenRejected(f"the OIDC token is not a JWT{shown}", field="token", fix=_NEW_TOKEN)


def _decode(part: bytes) -> bytes:
    """Decode unpadded base64url, in its only form: Python's decoder ignores other characters and unused bits."""
    try:
        decoded = base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4))
    except binascii.Error as error:
        raise ValueError(str(error)) from None
    if not part or base64.urlsafe_b64encode(decoded).rstrip(b"=") != part:
        raise ValueError("not base64url")
    return decoded


def _check_header(header: Mapping[str, Any]) -> str:
    """The id of the key. A critical extension (RFC 7515, 4.1.11) must be rejected by those who do not know it."""
    if header.get("alg") != ALGORITHM:
        raise TokenRejected(
            f"the OIDC token has the algorithm {quote(header.get('alg'), MAX_CLAIM_SHOWN)}; only RS256 is accepted",
            field="token",
            fix=_NEW_TOKEN,
        )
    if "crit" in header or "b64" in header:
        raise TokenRejected("the OIDC token has an extension that is not supported", field="token", fix=_NEW_TOKEN)
    key_id = header.get("kid")
    if not isinstance(key_id, str) or not key_id:
        raise TokenRejected("the OIDC token does not name its key", field="token", fix=_NEW_TOKEN)
    return key_id


def _seconds(claims: Mapping[str, Any], name: str) -> float:
    value = claims.get(name)
    # The comparison excludes NaN and numbers beyond the limits of a time.
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 2**40:
        return float(value)
    raise TokenRejected(
        f"the claim {name} of the OIDC token is {quote(value, MAX_CLAIM_SHOWN)}", field="token", fix=_NEW_TOKEN
    )
