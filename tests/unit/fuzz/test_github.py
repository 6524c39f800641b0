"""Arbitrary responses in place of GitHub's: the caller gets a valid result or a `RemudaError`."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, timedelta
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from remuda.adapters.github.auth import AppAuth, Auth, StaticToken
from remuda.adapters.github.client import LIST_ATTEMPTS, MAX_ATTEMPTS, GitHubClient
from remuda.adapters.github.doctor import GitHubDoctor
from remuda.adapters.github.responses import MAX_BODY, MAX_RETRY_AFTER_S
from remuda.domain.errors import RemudaError, Throttled, Unavailable, UserError
from remuda.domain.instance import Credential
from remuda.domain.runner_release import RunnerChoice, RunnerRelease
from remuda.domain.serialization import from_document, to_document
from remuda.http import ClientResponse, InvalidRequest, ResponseTooLong
from remuda.ports.calls import CallCounter
from remuda.ports.clock import clock_skew_s
from remuda.ports.github import Deletion, GitHubRunner, JitRunner
from simulation.loop import SeededIds, VirtualClock
from tests.support.mutations import DEEP, ESCAPES, LONE, TEXTS, check_shown, fuzzed, in_virtual_time, spoiled_text
from tests.support.records import NOW

RUNNER = {
    "id": 7,
    "name": "remuda-test-1-i-00000000000000001",
    "os": "linux",
    "status": "online",
    "busy": False,
    "labels": [{"id": 1, "name": "self-hosted", "type": "read-only"}],
}
LIST = {"total_count": 1, "runners": [RUNNER]}
TOKEN = {"token": "LLBF3JGZDX3P5PMEXLND6TS6FCWO6", "expires_at": "2025-05-31T13:00:00.000Z"}
JIT = {"runner": RUNNER, "encoded_jit_config": "abc123"}
REFUSAL = {"message": "API rate limit exceeded", "documentation_url": "https://docs.github.com"}
PACKAGES = [
    {
        "os": system,
        "architecture": name,
        "download_url": f"https://github.com/actions/runner/releases/download/v2.336.0/{filename}",
        "filename": filename,
        "sha256_checksum": "0" * 64,
    }
    for system, name in (("linux", "x64"), ("linux", "arm64"), ("windows", "x64"))
    for filename in [f"actions-runner-{system}-{name}-2.336.0.tar.gz"]
]
GOOD = {
    "packages": PACKAGES,
    "list": LIST,
    "token": TOKEN,
    "jit": JIT,
    "runner": RUNNER,
    "refusal": REFUSAL,
    "delete": {},
}
STATUS = {"packages": 200, "list": 200, "token": 201, "jit": 201, "runner": 200, "refusal": 403, "delete": 204}

numbers = st.sampled_from(["0", "1", "-1", "nan", "inf", "-inf", "1e400", "9" * 400, "1_0", " 5 ", "Wed, 21 Oct 2015"])
headers = st.fixed_dictionaries(
    {},
    optional={
        "link": st.sampled_from(['<https://api.github.com/?page=2>; rel="next"', 'rel="next"' * 50, "<", ESCAPES[:3]]),
        "retry-after": numbers,
        "x-ratelimit-remaining": numbers,
        "x-ratelimit-reset": numbers,
        "x-ratelimit-limit": numbers,
        "date": st.sampled_from(["Sat, 31 May 2025 12:00:00 GMT", "Mon, 99 Abc 0000 99:99:99 GMT", *TEXTS[:6]]),
        "content-type": st.sampled_from(
            ["text/html", "application/json; charset=utf-7", "application/json; charset=x"]
        ),
        "content-encoding": st.sampled_from(["gzip", "br", "identity", "deflate"]),
    },
)
statuses = st.sampled_from([200, 201, 204, 206, 301, 304, 400, 401, 403, 404, 409, 422, 429, 500, 502, 503])


class FixedResponse:
    """Replaces the connections: gives the same response to every request and counts the requests."""

    def __init__(self, status: int, found: dict[str, str], body: bytes) -> None:
        # A head is read as Latin-1.
        found = {name: value.encode("latin-1", "replace").decode("latin-1") for name, value in found.items()}
        self._answer = ClientResponse(status, found, body)
        self.requests = 0

    async def request(self, method: str, target: str, **_: Any) -> ClientResponse:
        check_target(method, target)
        self.requests += 1
        return self._answer


def check_target(method: str, target: str) -> None:
    """Fail for a method or target that the real connections do not accept."""
    assert method in {"DELETE", "GET", "POST"}
    assert re.fullmatch("/[!-~]+", target)


#: Shared by all examples: creating a client is slow, and it keeps no state.
_FORGE = GitHubClient(
    api_url="http://127.0.0.1:1", clock=VirtualClock(), ids=SeededIds(), calls=CallCounter(), token="t0ken"
)


def github_on(http: Any, auth: Auth | None = None) -> GitHubClient:
    _FORGE._http = http
    _FORGE._auth = auth or StaticToken("t0ken")
    return _FORGE


CALLS: dict[str, Callable[[GitHubClient], Awaitable[Any]]] = {
    "token": lambda github: github.registration_token("octo/repo"),
    "list": lambda github: github.list_runners("octo"),
    "runner": lambda github: github.get_runner("octo", 7),
    "jit": lambda github: github.jit_config("octo", name="remuda-x", labels=["1"]),
    "delete": lambda github: github.delete_runner("octo", 7),
    "packages": lambda github: github.runner_downloads("octo"),
}


def packages_response(**changed: Any) -> bytes:
    """A list of packages whose package for x64 has these fields."""
    return json.dumps([{**PACKAGES[0], **changed}, *PACKAGES[1:]]).encode()


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"download_url": "http://github.com/a.tar.gz"}, "https URL"),
        ({"download_url": "https://github.com/a.tar.gz?token=x"}, "https URL"),
        ({"download_url": "https://github.com/a'; reboot; '.tar.gz"}, "https URL"),
        ({"download_url": "s3://bucket/a.tar.gz"}, "https URL"),
        ({"filename": "actions-runner-linux-arm64-2.336.0.tar.gz"}, "filename for x64"),
        ({"filename": "actions-runner-linux-x64-latest.tar.gz"}, "filename for x64"),
        ({"filename": "actions-runner-linux-x64-2.335.0.tar.gz"}, "different versions"),
        ({"sha256_checksum": "0" * 63}, "SHA-256"),
        ({"sha256_checksum": None}, "SHA-256"),
        ({"architecture": "arm64", "filename": PACKAGES[1]["filename"]}, "several"),
    ],
)
def test_unusable_runner_packages_are_reported(changed: dict[str, Any], problem: str) -> None:
    result = run(github_on(FixedResponse(200, {}, packages_response(**changed))).runner_downloads("octo"))
    assert isinstance(result, Unavailable)
    assert problem in result.message
    assert "actions-runner-version" in result.fix


def test_download_token_is_not_kept() -> None:
    body = packages_response(temp_download_token="s3cr3t")
    result = run(github_on(FixedResponse(200, {}, body)).runner_downloads("octo"))
    assert isinstance(result, RunnerRelease)
    assert "s3cr3t" not in repr(result)


def check_result(result: Any) -> None:
    """Check the types and limits of a result."""
    match result:
        case Credential():
            check_shown(result.token, 10_000)
            assert result.token
            assert result.expires_at.tzinfo is UTC
            assert result.expires_at - timedelta(days=365) < result.expires_at + timedelta(days=365)
        case JitRunner():
            assert type(result.runner_id) is int
            assert result.config
            result.config.encode()
        case GitHubRunner():
            assert type(result.runner_id) is int
            assert type(result.online) is bool
            assert type(result.busy) is bool
            "".join([result.name, *result.labels]).encode()
        case list():
            for runner in result:
                assert isinstance(runner, GitHubRunner)
                check_result(runner)
        case RunnerRelease():
            assert from_document(RunnerRelease, to_document(result)) == result
            assert RunnerChoice.parse(result.launch_options()).release == result
        case Deletion() | None:
            pass
        case _:
            raise AssertionError(result)


def run(work: Awaitable[Any]) -> Any:
    return in_virtual_time(work, 3_600)


@pytest.mark.parametrize("call", CALLS)
@fuzzed()
@given(data=st.data())
def test_response(call: str, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([call, call, call, "refusal"]))
    status = data.draw(st.just(STATUS[kind]) | statuses)
    transport = FixedResponse(status, data.draw(headers), data.draw(spoiled_text(GOOD[kind])))
    result = run(CALLS[call](github_on(transport)))
    assert transport.requests <= 3 * MAX_ATTEMPTS * LIST_ATTEMPTS
    if isinstance(result, Throttled):
        assert 0 <= result.retry_after_s <= MAX_RETRY_AFTER_S
    if not isinstance(result, RemudaError):
        check_result(result)


BAD_BODIES = [
    b"[" * DEEP * 40,
    json.dumps({**TOKEN, "expires_at": "0001-01-01T00:00:00+23:59"}).encode(),
    json.dumps({**TOKEN, "expires_at": "9999-12-31T23:59:59-23:59"}).encode(),
    json.dumps({**TOKEN, "token": None}).encode(),
    json.dumps({**TOKEN, "token": LONE}).encode(),
    json.dumps({**TOKEN, "token": "t\r\nX-Evil: 1"}).encode(),
    b'{"id":Infinity,"name":"x","status":"online","busy":false}',
    b'{"id":NaN,"name":"x","status":"online","busy":false}',
    b'{"id":true,"name":null,"status":"online","busy":"false"}',
    b'{"runner":{"id":1e999},"encoded_jit_config":"x"}',
    b'{"runner":{"id":1},"encoded_jit_config":null}',
    b'{"total_count":true,"runners":[]}',
    b'{"message":"\\u001b[2J\\n::error::forged \\ud800"}',
    b'{"message":' * DEEP,
]


@pytest.mark.parametrize("body", BAD_BODIES, ids=range(len(BAD_BODIES)))
@pytest.mark.parametrize("call", ["token", "list", "runner", "jit"])
@pytest.mark.parametrize("status", [200, 403])
def test_responses_that_once_failed(body: bytes, call: str, status: int) -> None:
    transport = FixedResponse(status, {}, body)
    result = run(CALLS[call](github_on(transport)))
    if not isinstance(result, RemudaError):
        check_result(result)


def test_endless_pages_are_not_followed() -> None:
    """Each page links to a next one and contains the same runner."""
    transport = FixedResponse(
        200, {"link": '<x>; rel="next"'}, json.dumps({"total_count": 500, "runners": [RUNNER]}).encode()
    )
    error = run(github_on(transport).list_runners("octo"))
    assert "incomplete: 1 of 500" in str(error)
    assert transport.requests <= 2 * LIST_ATTEMPTS


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (gzip.compress(json.dumps(TOKEN).encode()), ""),
        (gzip.compress(json.dumps(TOKEN).encode())[:-9], "cannot be decompressed"),
        (gzip.compress(b" " * (MAX_BODY + 1)), f"longer than {MAX_BODY}"),
        (json.dumps(TOKEN).encode(), "cannot be decompressed"),
    ],
    ids=["valid", "truncated", "bomb", "not compressed"],
)
def test_compressed_response(body: bytes, problem: str) -> None:
    result = run(github_on(FixedResponse(201, {"content-encoding": "gzip"}, body)).registration_token("octo"))
    assert isinstance(result, Unavailable if problem else Credential)
    assert problem in str(result)


@pytest.mark.parametrize(
    ("failure", "error", "said"),
    [(ResponseTooLong(""), Unavailable, f"longer than {MAX_BODY}"), (InvalidRequest(""), UserError, "credential")],
    ids=["long", "request"],
)
def test_request_without_a_usable_response(failure: Exception, error: type[RemudaError], said: str) -> None:
    class Failing:
        async def request(self, *_: Any, **__: Any) -> ClientResponse:
            raise failure

    result = run(github_on(Failing()).registration_token("octo"))
    assert type(result) is error
    assert said in str(result)


@fuzzed()
@given(spoiled_text({"id": 9, "app_id": 1}), spoiled_text({"token": "ghs_x", "expires_at": "2025-05-31T13:00:00Z"}))
@example(b'{"id":Infinity}', b"{}")
@example(b'{"id":9}', b'{"token":"x","expires_at":"9999-12-31T23:59:59-23:59"}')
@example(b'{"id":"../../user"}', b"{}")
def test_app_installation(found: bytes, minted: bytes) -> None:
    """A GitHub App looks up its installation and creates a token."""
    paths: list[str] = []

    class Both:
        async def request(self, method: str, target: str, *, headers: Mapping[str, str], body: bytes) -> ClientResponse:
            check_target(method, target)
            # It accepts what the parsers let through.
            assert re.fullmatch("Bearer [!-~]+", headers["Authorization"])
            assert not body
            path = target.partition("?")[0]
            paths.append(path)
            if path.endswith("/access_tokens"):
                return ClientResponse(201, {}, minted)
            return ClientResponse(200, {}, found if path.endswith("/installation") else json.dumps(LIST).encode())

    auth = AppAuth.__new__(AppAuth)
    auth._app_id, auth._clock, auth._installations = "1", VirtualClock(), {}
    auth._jwt = lambda: "jwt"  # type: ignore[method-assign]
    result = run(github_on(Both(), auth=auth).list_runners("octo/repo"))
    for path in paths:
        assert path.split("/")[1] in {"repos", "orgs"} or path.split("/")[3].isdecimal(), path
    if not isinstance(result, RemudaError):
        check_result(result)


@fuzzed()
@given(st.data())
def test_doctor_checks(data: st.DataObject) -> None:
    transport = FixedResponse(200, data.draw(headers), data.draw(spoiled_text(LIST)))
    github = github_on(transport)

    async def opened() -> GitHubClient:
        return github

    doctor = GitHubDoctor(github=opened, scope="octo", clock=VirtualClock())
    for check in doctor.checks():
        finding = run(check.run())
        if not isinstance(finding, RemudaError):
            check_shown(finding.message, 1_000)


@fuzzed()
@given(st.text(max_size=40) | st.sampled_from(TEXTS))
@example("Mon, 01 Jan 0001 00:00:00 GMT")
def test_date_header(text: str) -> None:
    found = clock_skew_s(text, NOW)
    assert found is None or abs(found) < 1e12
