"""Signature Version 4 of requests to AWS.

https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256

ALGORITHM = "AWS4-HMAC-SHA256"


@dataclass(frozen=True, kw_only=True, slots=True)
class AwsCredentials:
    access_key: str
    secret_key: str = field(repr=False)
    #: Session token of temporary credentials, or empty.
    token: str = field(default="", repr=False)


def sign(
    credentials: AwsCredentials,
    headers: Mapping[str, str],
    body: bytes,
    *,
    service: str,
    region: str,
    at: str,
    method: str = "POST",
    path: str = "/",
) -> dict[str, str]:
    """The headers of a request without a query, with its time (`at`, such as 20150830T123600Z) and its signature.

    All headers are signed; `path` is already encoded.
    """
    signed = {name.lower(): " ".join(value.split()) for name, value in headers.items()} | {"x-amz-date": at}
    if credentials.token:
        signed["x-amz-security-token"] = credentials.token
    names = sorted(signed)
    lines = "".join(f"{name}:{signed[name]}\n" for name in names)
    canonical = "\n".join((method, path, "", lines, ";".join(names), sha256(body).hexdigest()))
    scope = f"{at[:8]}/{region}/{service}/aws4_request"
    text = "\n".join((ALGORITHM, at, scope, sha256(canonical.encode()).hexdigest()))
    signature = hmac.digest(_key(credentials.secret_key, at[:8], region, service), text.encode(), sha256).hex()
    credential = f"{credentials.access_key}/{scope}"
    authorization = f"{ALGORITHM} Credential={credential}, SignedHeaders={';'.join(names)}, Signature={signature}"
    return {**signed, "authorization": authorization}


@lru_cache(maxsize=16)
def _key(secret_key: str, *parts: str) -> bytes:
    """The signing key of a day, a region and a service."""
    key = f"AWS4{secret_key}".encode()
    for part in (*parts, "aws4_request"):
        key = hmac.digest(key, part.encode(), sha256)
    return key
