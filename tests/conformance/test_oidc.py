"""Verification of OIDC tokens with issuers over HTTP: the local GitHub, and servers that do not behave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from remuda.adapters.github.oidc import MAX_JWKS_BYTES, IssuerKeys, TokenVerifier, fetch_url
from remuda.adapters.system.clock import SystemClock
from remuda.config.sources import load
from remuda.domain.errors import Unavailable
from remuda.domain.workflow_identity import TokenRejected, parse_identity
from remuda.fake_github import Endpoint
from tests.support.oidc import KEY_ID, jwk, rsa_key
from tests.support.tls_server import TlsFileServer


def verifier(issuer: str, audience: str = "remuda-ci") -> TokenVerifier:
    clock = SystemClock()
    keys = IssuerKeys(issuer=issuer, clock=clock, fetch=fetch_url)
    return TokenVerifier(issuer=issuer, audience=audience, clock=clock, keys=keys)


async def test_tokens_of_the_local_github_are_accepted(endpoint: Endpoint) -> None:
    issuer = load({}, environ={"REMUDA_OIDC_ISSUER": f"{endpoint.url}/_services/token"}).oidc_issuer
    async with httpx.AsyncClient() as http:
        job = {"repository": "acme/widgets", "run_id": "4711", "run_attempt": "2", "environment": "prod"}
        headers = {"authorization": f"Bearer {endpoint.token}"}
        variables = (await http.post(f"{endpoint.url}/_admin/oidc-jobs", json=job, headers=headers)).json()
        headers = {"authorization": f"Bearer {variables['ACTIONS_ID_TOKEN_REQUEST_TOKEN']}"}
        url = f"{variables['ACTIONS_ID_TOKEN_REQUEST_URL']}&audience=remuda-ci"
        token = (await http.get(url, headers=headers)).json()["value"]
    identity = parse_identity(await verifier(issuer).verify(token))
    assert (identity.repository, identity.run_id, identity.run_attempt) == ("acme/widgets", "4711", 2)
    assert (identity.event, identity.environment) == ("workflow_dispatch", "prod")
    with pytest.raises(TokenRejected, match="is for 'remuda-ci', not for remuda-other"):
        await verifier(issuer, "remuda-other").verify(token)
    with pytest.raises(TokenRejected, match="was issued by"):
        await verifier("https://token.actions.githubusercontent.com").verify(token)


@asynccontextmanager
async def answering(response: bytes) -> AsyncIterator[str]:
    """A server with one response for all requests."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(response)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n",
        # The issuer itself must answer.
        b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/jwks\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (MAX_JWKS_BYTES + 1),
        b"HTTP/1.1 200 OK\r\ncontent-length: 90\r\n\r\n{",
        b"nonsense\r\n\r\n",
        b"",
    ],
    ids=["500", "404", "redirect", "no keys", "large", "cut", "no HTTP", "closed"],
)
async def test_issuers_without_keys_are_unavailable(response: bytes) -> None:
    async with answering(response) as url:
        keys = IssuerKeys(issuer=url, clock=SystemClock(), fetch=fetch_url)
        with pytest.raises(Unavailable, match=f"cannot be read from {url}/.well-known/jwks") as raised:
            await keys.find("x")
    assert "127.0.0.1:1/" not in raised.value.message


async def test_the_certificate_of_the_issuer_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GitHub Enterprise Server may have a certificate of a private authority."""
    body = tmp_path / "jwks"
    body.write_text(json.dumps({"keys": [jwk(rsa_key())]}))
    with TlsFileServer(tmp_path, {"/_services/token/.well-known/jwks": body}) as server:
        issuer = f"{server.url}/_services/token"
        with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
            await IssuerKeys(issuer=issuer, clock=SystemClock(), fetch=fetch_url).find(KEY_ID)
        monkeypatch.setenv("SSL_CERT_FILE", str(server.ca))
        assert await IssuerKeys(issuer=issuer, clock=SystemClock(), fetch=fetch_url).find(KEY_ID)
