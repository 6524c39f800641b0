"""An issuer of OIDC tokens with the claims of GitHub's. PyJWT signs them, independently of the code under test."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, generate_private_key

ISSUER = "https://token.actions.githubusercontent.com"
KEY_ID = "cc413527-173f-5a05-976e-9c52b1d7b431"


@cache
def rsa_key(name: str = KEY_ID, bits: int = 2_048) -> RSAPrivateKey:
    return generate_private_key(65_537, bits)


def _number(value: int) -> str:
    data = value.to_bytes((value.bit_length() + 7) // 8)
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def jwk(key: RSAPrivateKey, key_id: str = KEY_ID, **changed: Any) -> dict[str, Any]:
    """A key in the form of https://token.actions.githubusercontent.com/.well-known/jwks."""
    numbers = key.public_key().public_numbers()
    return {
        "kty": "RSA",
        "alg": "RS256",
        "use": "sig",
        "kid": key_id,
        "n": _number(numbers.n),
        "e": _number(numbers.e),
        "x5c": ["MIIDKzCCAhOgAwIBAgIUDnwm6eRIqGFA3o/P1oBrChvx/nowDQYJKoZIhvcNAQELBQAw"],
        "x5t": "ykNaY4qM_ta4k2TgZOCEYLkcYlA",
        **changed,
    }


class TokenIssuer:
    """Issues tokens, and answers requests for its keys."""

    def __init__(self, *, issuer: str = ISSUER) -> None:
        self.issuer = issuer
        self.keys: list[dict[str, Any]] = [jwk(rsa_key())]
        #: Raised instead of an answer.
        self.failure: Exception | None = None
        self.fetched: list[str] = []

    async def fetch(self, url: str) -> bytes:
        self.fetched.append(url)
        if self.failure is not None:
            raise self.failure
        return json.dumps({"keys": self.keys}).encode()

    def claims(self, now: datetime, **changed: Any) -> dict[str, Any]:
        """The claims of GitHub's example (docs.github.com/actions/reference/security/oidc). None removes one."""
        seconds = int(now.timestamp())
        values = {
            "jti": "d6dc2f0c-7b34-4f6c-b1ce-4d3b7bc0f2a1",
            "sub": "repo:octo/repo:ref:refs/heads/main",
            "aud": "remuda-test",
            "ref": "refs/heads/main",
            "sha": "4f5b0c6f6b0e4bb0b0a3c2a1d9e8f7a6b5c4d3e2",
            "repository": "octo/repo",
            "repository_owner": "octo",
            "actor_id": "12",
            "repository_visibility": "private",
            "repository_id": "74",
            "repository_owner_id": "65",
            "run_id": "123",
            "run_number": "10",
            "run_attempt": "1",
            "runner_environment": "github-hosted",
            "actor": "octocat",
            "workflow": "ci",
            "head_ref": "",
            "base_ref": "",
            "event_name": "push",
            "ref_type": "branch",
            "job_workflow_ref": "octo/repo/.github/workflows/ci.yml@refs/heads/main",
            "iss": self.issuer,
            # GitHub's tokens begin ten minutes before they are issued, and live for five.
            "nbf": seconds - 600,
            "exp": seconds + 300,
            "iat": seconds,
            **changed,
        }
        return {name: value for name, value in values.items() if value is not None}

    def token(self, now: datetime, *, headers: Mapping[str, Any] | None = None, **changed: Any) -> str:
        header = {"typ": "JWT", "kid": KEY_ID, "x5t": "ykNaY4qM_ta4k2TgZOCEYLkcYlA", **(headers or {})}
        return jwt.encode(self.claims(now, **changed), rsa_key(), algorithm="RS256", headers=header)


def compact(header: Mapping[str, Any], claims: Mapping[str, Any] | bytes, signature: bytes = b"x") -> str:
    """A token of any content, with any signature."""
    body = claims if isinstance(claims, bytes) else json.dumps(claims).encode()
    parts = (json.dumps(header).encode(), body, signature)
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)
