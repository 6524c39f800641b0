"""Responses of the fake GitHub, validated against GitHub's OpenAPI description."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest

from remuda.fake_github import Endpoint
from remuda.fake_github.fake_runner.credentials import secret_of, unpack
from tests.support.records import LONG_S

OPENAPI = json.loads((pathlib.Path(__file__).parent.parent / "data" / "github" / "openapi-runners.json").read_text())
#: GitHub's error body, for statuses without a schema in the description (401, 403, 404).
BASIC_ERROR = {
    "type": "object",
    "required": ["message", "documentation_url", "status"],
    "properties": {name: {"type": "string"} for name in ("message", "documentation_url", "status")},
}
PATHS = {"repo": "/repos/{owner}/{repo}/actions/runners", "org": "/orgs/{org}/actions/runners"}
READ_ONLY = {"administration": "read", "organization_self_hosted_runners": "read"}
VALUES = {"owner": "acme", "repo": "widgets", "org": "acme"}


class ValidatingClient:
    """Client for the API of one level (repository or organization) that validates each response."""

    def __init__(self, endpoint: Endpoint, level: str, prefix: str) -> None:
        self.base = PATHS[level]
        self.prefix = prefix
        self.client = httpx.Client(
            base_url=endpoint.url,
            headers={"authorization": f"Bearer {endpoint.token}"},
            trust_env=False,
            timeout=LONG_S,
        )

    def call(self, method: str, path: str = "", *, runner_id: Any = None, **more: Any) -> httpx.Response:
        url = self.prefix + (self.base + path).format(**VALUES, runner_id=runner_id)
        response = self.client.request(method, url, **more)
        described = OPENAPI["paths"][self.base + path][method.lower()]["responses"]
        content = described.get(str(response.status_code), {}).get("content")
        if response.status_code == 204:
            assert response.content == b""
        elif content is None:
            assert response.status_code >= 400
            jsonschema_rs.validate(BASIC_ERROR, response.json())
        else:
            jsonschema_rs.validate(as_json_schema(content["application/json"]["schema"]), response.json())
        for name in ("limit", "remaining", "used", "reset", "resource"):
            assert f"x-ratelimit-{name}" in response.headers
        return response

    def jit(self, name: str, **more: Any) -> httpx.Response:
        body = {"name": name, "runner_group_id": 1, "labels": ["self-hosted", "x"], **more}
        return self.call("POST", "/generate-jitconfig", json=body)


def as_json_schema(schema: Any) -> Any:
    """Convert OpenAPI 3.0's `nullable` to JSON Schema's null type."""
    if isinstance(schema, list):
        return [as_json_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    translated = {name: as_json_schema(value) for name, value in schema.items()}
    if translated.pop("nullable", None) is True and isinstance(translated.get("type"), str):
        translated["type"] = [translated["type"], "null"]
    return translated


@pytest.fixture(params=["repo", "org"])
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["", "/api/v3"])
def api(endpoint: Endpoint, level: str, request: pytest.FixtureRequest) -> Iterator[ValidatingClient]:
    api = ValidatingClient(endpoint, level, request.param)
    yield api
    for runner in api.call("GET", params={"per_page": 100}).json()["runners"]:
        assert api.call("DELETE", "/{runner_id}", runner_id=runner["id"]).status_code == 204
    api.client.close()


def test_tokens(api: ValidatingClient) -> None:
    for path in ("/registration-token", "/remove-token"):
        response = api.call("POST", path)
        assert response.status_code == 201
        assert response.json()["token"]


def test_runner_packages(api: ValidatingClient) -> None:
    packages = {(each["os"], each["architecture"]): each for each in api.call("GET", "/downloads").json()}
    assert packages["linux", "x64"]["filename"] == "actions-runner-linux-x64-2.336.0.tar.gz"
    assert packages["windows", "arm64"]["filename"] == "actions-runner-win-arm64-2.336.0.zip"
    reader, stranger = (
        api.client.post("/_admin/tokens", json={"scopes": [scope], "permissions": READ_ONLY}).json()["token"]
        for scope in ("acme", "other")
    )
    # GitHub documents the permission to read for it.
    assert api.call("GET", "/downloads", headers={"authorization": f"Bearer {reader}"}).status_code == 200
    assert api.call("GET", "/downloads", headers={"authorization": f"Bearer {stranger}"}).status_code == 404
    assert api.call("GET", "/downloads", headers={"authorization": "Bearer wrong"}).status_code == 401


def test_life_cycle_of_a_runner(api: ValidatingClient) -> None:
    created = api.jit("one")
    assert created.status_code == 201
    runner = created.json()["runner"]
    assert (runner["status"], runner["busy"], runner["version"]) == ("offline", False, None)
    assert [(label["name"], label["type"]) for label in runner["labels"]] == [
        ("self-hosted", "read-only"),
        ("x", "custom"),
    ]
    assert api.call("GET", "/{runner_id}", runner_id=runner["id"]).json() == runner
    assert api.call("GET").json() == {"total_count": 1, "runners": [runner]}
    assert api.jit("one").status_code == 409
    assert api.call("DELETE", "/{runner_id}", runner_id=runner["id"]).status_code == 204
    assert api.call("DELETE", "/{runner_id}", runner_id=runner["id"]).status_code == 404
    assert api.call("GET", "/{runner_id}", runner_id=runner["id"]).status_code == 404
    assert api.call("GET", "/{runner_id}", runner_id="abc").status_code == 404


@pytest.mark.parametrize(
    "change",
    [
        {"name": None},
        {"name": "x" * 65},
        {"name": ""},
        {"runner_group_id": "one"},
        {"labels": []},
        {"labels": ["x"] * 101},
        {"labels": ["x" * 257]},
        {"labels": "x"},
    ],
)
def test_invalid_input_is_rejected(api: ValidatingClient, change: dict[str, Any]) -> None:
    assert api.jit(**{"name": "two", **change}).status_code == 422


def test_body_that_is_not_json(api: ValidatingClient) -> None:
    assert api.call("POST", "/generate-jitconfig", content=b"{").status_code == 400


def test_paging(api: ValidatingClient) -> None:
    for number in range(5):
        api.jit(f"p{number}")
    first = api.call("GET", params={"per_page": 2})
    assert first.json()["total_count"] == 5
    names = [runner["name"] for runner in first.json()["runners"]]
    response = first
    while "next" in response.links:
        response = api.client.get(response.links["next"]["url"])
        names += [runner["name"] for runner in response.json()["runners"]]
    assert names == [f"p{number}" for number in range(5)]
    assert "last" in first.links
    assert "first" in response.links
    assert api.call("GET", params={"per_page": 1000}).json()["total_count"] == 5
    assert [r["name"] for r in api.call("GET", params={"name": "p3"}).json()["runners"]] == ["p3"]
    assert api.call("GET", params={"page": 9}).json() == {"total_count": 5, "runners": []}


@pytest.mark.parametrize("header", ["Bearer wrong", "Basic abc", "token"])
def test_bad_credentials(api: ValidatingClient, header: str) -> None:
    response = api.call("GET", headers={"authorization": header})
    assert response.status_code == 401
    assert response.json()["message"] == "Bad credentials"


def test_authorization_scheme_token_is_accepted(api: ValidatingClient, endpoint: Endpoint) -> None:
    assert api.call("GET", headers={"authorization": f"token {endpoint.token}"}).status_code == 200


def test_restricted_access_tokens(api: ValidatingClient) -> None:
    reader = api.client.post("/_admin/tokens", json={"scopes": ["acme"], "permissions": READ_ONLY}).json()["token"]
    stranger = api.client.post("/_admin/tokens", json={"scopes": ["other"]}).json()["token"]
    headers = {"authorization": f"Bearer {reader}"}
    assert api.call("GET", headers=headers).status_code == 200
    assert api.call("POST", "/registration-token", headers=headers).status_code == 403
    assert api.call("GET", headers={"authorization": f"Bearer {stranger}"}).status_code == 404
    assert api.client.get("/_admin/runners", headers=headers).status_code == 403


def test_each_kind_of_permission_is_needed(api: ValidatingClient, level: str) -> None:
    kind, other = ("administration", "organization_self_hosted_runners")[:: 1 if level == "repo" else -1]
    for permissions, read, write in (
        ({kind: "write"}, 200, 201),
        ({kind: "read"}, 200, 403),
        ({other: "write", "actions": "write", "contents": "write", "metadata": "read"}, 403, 403),
        ({}, 403, 403),
    ):
        token = api.client.post("/_admin/tokens", json={"permissions": permissions}).json()["token"]
        headers = {"authorization": f"Bearer {token}"}
        for path in ("", "/downloads"):
            assert api.call("GET", path, headers=headers).status_code == read, (path, permissions)
        for path in ("/registration-token", "/remove-token"):
            refused = api.call("POST", path, headers=headers)
            assert refused.status_code == write, (path, permissions)
    assert refused.json()["message"] == "Resource not accessible by personal access token"
    assert api.client.post("/_admin/tokens", json={"permissions": {kind: "admin"}}).status_code == 422


def test_runs_need_the_permission_for_actions(api: ValidatingClient) -> None:
    api.client.post("/_admin/jobs", json={"repo": "acme/widgets", "run_id": 70, "labels": ["nobody"]})
    path = f"{api.prefix}/repos/acme/widgets/actions/runs"
    for permissions, read, write in (
        ({"actions": "read"}, 200, 403),
        ({"administration": "write", "contents": "write"}, 403, 403),
    ):
        token = api.client.post("/_admin/tokens", json={"permissions": permissions}).json()["token"]
        headers = {"authorization": f"Bearer {token}"}
        for each in (path, f"{path}/70", f"{path}/70/jobs"):
            assert api.client.get(each, headers=headers).status_code == read
        refused = api.client.post(f"{path}/70/rerun-failed-jobs", headers=headers)
        assert (refused.status_code, refused.json()["message"]) == (
            write,
            "Resource not accessible by personal access token",
        )


@pytest.mark.parametrize("version", ["2022-11-27", "2021-01-01", "v3"])
def test_unknown_api_versions_are_refused(api: ValidatingClient, version: str) -> None:
    headers = {"x-github-api-version": version}
    refused = api.call("GET", headers=headers)
    assert refused.status_code == 400
    message = f'The version you specified in the "X-GitHub-API-Version" request header, "{version}", is not a supported'
    assert refused.json()["message"].startswith(message)
    runs = api.client.get(f"{api.prefix}/repos/acme/widgets/actions/runs", headers=headers)
    app = api.client.get(f"{api.prefix}/orgs/acme/installation", headers=headers)
    service = api.client.post(f"{api.prefix}/actions/runner-registration", headers=headers)
    assert [each.status_code for each in (runs, app, service)] == [400, 400, 400]
    assert api.call("GET", headers={"x-github-api-version": "2022-11-28"}).status_code == 200


def test_unknown_scopes(api: ValidatingClient) -> None:
    api.client.patch("/_admin/settings", json={"known_scopes": ["other/repo"]})
    try:
        assert api.call("GET").status_code == 404
        assert api.call("POST", "/registration-token").status_code == 404
    finally:
        api.client.patch("/_admin/settings", json={"known_scopes": None})


def test_delete_of_a_runner_that_just_got_a_job(api: ValidatingClient) -> None:
    created = api.jit("racy").json()
    secret = secret_of(json.loads(unpack(created["encoded_jit_config"])[".credentials_rsaparams"]))
    session = api.client.post(
        "/_runner/sessions", json={"version": "2.336.0"}, headers={"authorization": f"Bearer {secret}"}
    ).json()["session"]
    api.client.post("/_admin/faults", json={"kind": "job_on_delete"})
    runner_id = created["runner"]["id"]
    assert api.call("GET", "/{runner_id}", runner_id=runner_id).json()["busy"] is False
    assert api.call("DELETE", "/{runner_id}", runner_id=runner_id).status_code == 422
    (runner,) = api.client.get("/_admin/runners").json()["runners"]
    assert runner["state"] == "assigned"
    assert api.client.post(f"/_admin/jobs/{runner['job_id']}/cancel").status_code == 202
    api.client.delete(f"/_runner/sessions/{session}", headers={"authorization": f"Bearer {secret}"})


def test_faults(api: ValidatingClient) -> None:
    def fault(kind: str, **more: Any) -> None:
        assert api.client.post("/_admin/faults", json={"kind": kind, **more}).status_code == 201

    fault("rate_limit", seconds=7)
    limited = api.call("GET")
    assert (limited.status_code, limited.headers["retry-after"]) == (403, "7")
    fault("rate_limit", status=429, operation="list")
    assert api.call("POST", "/registration-token").status_code == 201
    assert api.call("GET").status_code == 429
    fault("status", status=503, times=2)
    assert [api.call("GET").status_code for _ in range(3)] == [503, 503, 200]
    fault("stale_list", seconds=60, times=None)
    fault("lost_answer", operation="jitconfig")
    with pytest.raises(httpx.RemoteProtocolError):
        api.jit("lost")
    assert api.jit("lost").status_code == 409
    assert api.call("GET").json()["total_count"] == 0
    api.client.delete("/_admin/faults")
    fault("wrong_busy", operation="list")
    assert [api.call("GET").json()["runners"][0]["busy"] for _ in range(2)] == [True, False]
    fault("lost_answer", operation="delete", status=502)
    runner_id = api.call("GET").json()["runners"][0]["id"]
    assert api.call("DELETE", "/{runner_id}", runner_id=runner_id).status_code == 502
    assert api.call("DELETE", "/{runner_id}", runner_id=runner_id).status_code == 404
    assert api.client.get("/_admin/faults").json() == {"faults": []}
    assert api.client.post("/_admin/faults", json={"kind": "nonsense"}).status_code == 422
