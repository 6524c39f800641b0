"""The OIDC issuer of the fake GitHub: claims, lifetime, keys, and refused requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest

from remuda.fake_github.server import build_app, open_app_state

URL = "http://github.test"
ISSUER = f"{URL}/_services/token"
NOW = 1_900_000_000.0
#: The claims of GitHub's OpenID Connect reference, without those of enterprises and environments.
CLAIMS = {
    *("jti", "sub", "aud", "ref", "sha", "repository", "repository_owner", "repository_owner_id", "repository_id"),
    *("repository_visibility", "run_id", "run_number", "run_attempt", "actor", "actor_id", "workflow", "workflow_ref"),
    *("workflow_sha", "head_ref", "base_ref", "event_name", "ref_type", "ref_protected", "job_workflow_ref"),
    *("job_workflow_sha", "runner_environment", "iss", "nbf", "exp", "iat"),
}


class CountingClock:
    def __init__(self) -> None:
        self.at = NOW
        self._last = 0

    def now(self) -> float:
        return self.at

    def token(self, prefix: str) -> str:
        self._last += 1
        return f"{prefix}{self._last}"


class OidcWorld:
    def __init__(self, http: httpx.AsyncClient, clock: CountingClock, token: str) -> None:
        self.http = http
        self.clock = clock
        self._token = token

    async def permit(self, **job: str) -> dict[str, str]:
        body = {"repository": "acme/widgets", "run_id": "4711", **job}
        answer = await self.http.post(
            "/_admin/oidc-jobs", json=body, headers={"authorization": f"Bearer {self._token}"}
        )
        assert answer.status_code == 201, answer.text
        variables: dict[str, str] = answer.json()
        return variables

    async def request(self, variables: dict[str, str], query: str = "&audience=remuda-ci", **headers: str) -> Any:
        given = {"authorization": f"Bearer {variables['ACTIONS_ID_TOKEN_REQUEST_TOKEN']}", **headers}
        return await self.http.get(variables["ACTIONS_ID_TOKEN_REQUEST_URL"] + query, headers=given)

    async def claims(self, query: str = "&audience=remuda-ci", **job: str) -> dict[str, Any]:
        """The claims of a new token, verified with the published key."""
        token = (await self.request(await self.permit(**job), query)).json()["value"]
        configuration = (await self.http.get(f"{ISSUER}/.well-known/openid-configuration")).json()
        assert configuration["issuer"] == ISSUER
        keys = jwt.PyJWKSet.from_dict((await self.http.get(configuration["jwks_uri"])).json())
        key = keys[jwt.get_unverified_header(token)["kid"]]
        options: Any = {"verify_exp": False, "verify_iat": False, "verify_nbf": False, "verify_aud": False}
        claims: dict[str, Any] = jwt.decode(token, key, algorithms=["RS256"], issuer=ISSUER, options=options)
        assert set(claims) <= set(configuration["claims_supported"])
        return claims


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[OidcWorld]:
    clock = CountingClock()
    app = open_app_state(tmp_path, clock=clock)
    app.core.registry.keep_access("administrator")
    app.commit_changes()
    transport = httpx.ASGITransport(build_app(app))
    async with httpx.AsyncClient(transport=transport, base_url=URL) as http:
        yield OidcWorld(http, clock, "administrator")
    app.store.close()


async def test_token_has_the_claims_of_github(world: OidcWorld) -> None:
    claims = await world.claims(run_attempt="3", event_name="push")
    assert set(claims) == CLAIMS
    assert {name for name, value in claims.items() if not isinstance(value, str)} == {"nbf", "exp", "iat"}
    assert (claims["aud"], claims["iss"]) == ("remuda-ci", ISSUER)
    assert (claims["repository"], claims["run_id"], claims["run_attempt"]) == ("acme/widgets", "4711", "3")
    assert claims["exp"] - claims["iat"] == 300
    assert (await world.claims())["jti"] != claims["jti"]


async def test_default_audience_is_the_owner(world: OidcWorld) -> None:
    assert (await world.claims(query=""))["aud"] == f"{URL}/acme"


@pytest.mark.parametrize(
    ("job", "subject"),
    [
        ({}, "ref:refs/heads/main"),
        ({"ref": "refs/tags/v1"}, "ref:refs/tags/v1"),
        ({"event_name": "pull_request", "ref": "refs/pull/1/merge"}, "pull_request"),
        ({"event_name": "pull_request_target"}, "ref:refs/heads/main"),
        ({"event_name": "pull_request", "environment": "Production:V1"}, "environment:Production%3AV1"),
    ],
)
async def test_subject(world: OidcWorld, job: dict[str, str], subject: str) -> None:
    claims = await world.claims(**job)
    assert claims["sub"] == f"repo:acme/widgets:{subject}"
    assert claims.get("environment") == job.get("environment")


async def test_request_requires_the_token_of_the_job(world: OidcWorld) -> None:
    one, other = await world.permit(), await world.permit(run_id="4712")
    assert (await world.request({**one, "ACTIONS_ID_TOKEN_REQUEST_TOKEN": "wrong"})).status_code == 401
    swapped = {**one, "ACTIONS_ID_TOKEN_REQUEST_TOKEN": other["ACTIONS_ID_TOKEN_REQUEST_TOKEN"]}
    assert (await world.request(swapped)).status_code == 401
    assert (await world.request(one, authorization="")).status_code == 401
    assert (await world.request(one)).status_code == 200
    world.clock.at += 6 * 3600
    assert (await world.request(one)).status_code == 401


async def test_only_the_administrator_permits_tokens(world: OidcWorld) -> None:
    answer = await world.http.post("/_admin/oidc-jobs", json={"repository": "acme/widgets", "run_id": "1"})
    assert answer.status_code == 401
