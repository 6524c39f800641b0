"""Rules for requests to GitHub, and the requests that break them."""

from __future__ import annotations

import json
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from typing import Any

import pytest

from remuda.adapters.github.scale_sets import _user_agent
from remuda.http import ClientResponse
from tests.support.github_requests import API_HEADERS, BrokenGitHubRule, SentRequest, judge_request
from tests.support.github_sequence import BrokenSequence, GitHubSequence

TOKEN = "github_pat_1"


def app_token(seconds: int) -> str:
    """A JSON web token of an App that is valid for so long."""
    parts = ({"alg": "RS256"}, {"iss": "4711", "iat": 1_000, "exp": 1_000 + seconds})
    encoded = (urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
    return f"{'.'.join(encoded)}.{'x' * 342}"


APP = app_token(600)
JSON = {"content-type": "application/json"}
RUNNERS = "/repos/acme/widgets/actions/runners"
JIT = {"name": "remuda-1-i-1", "runner_group_id": 1, "labels": ["large"]}
SETS = "/tenant/_apis/runtime/runnerscalesets"
VERSION = {"api-version": "6.0-preview"}
SERVICE = {"authorization": f"Bearer {TOKEN}", "user-agent": _user_agent(0), **JSON}
POLL = {**SERVICE, "accept": "application/json; api-version=6.0-preview", "x-scalesetmaxcapacity": "5"}


def api(
    method: str,
    path: str,
    query: dict[str, str] | None = None,
    body: Any = None,
    credential: str = f"Bearer {TOKEN}",
    headers: Mapping[str, str] | None = None,
) -> SentRequest:
    given = {**API_HEADERS, "authorization": credential, **(JSON if body is not None else {})}
    return SentRequest(method, path, query or {}, {**given, **(headers or {})}, body)


def service(
    method: str,
    path: str,
    query: dict[str, str] | None = None,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
) -> SentRequest:
    return SentRequest(method, path, VERSION if query is None else query, {**SERVICE, **(headers or {})}, body)


@pytest.mark.parametrize(
    "request_",
    [
        api("GET", RUNNERS, {"per_page": "100", "page": "2"}),
        api("DELETE", f"{RUNNERS}/7"),
        api("POST", "/orgs/acme/actions/runners/registration-token"),
        api("POST", f"{RUNNERS}/generate-jitconfig", body=JIT),
        api("GET", "/repos/acme/widgets/installation", credential=f"Bearer {APP}"),
        api(
            "POST",
            "/actions/runner-registration",
            body={"url": "https://github.com/acme", "runner_event": "register"},
            credential=f"RemoteAuth {TOKEN}",
        ),
        service("GET", SETS, {**VERSION, "runnerGroupId": "1", "name": "large"}),
        service("POST", f"{SETS}/27/acquirejobs", body=[1, 2]),
        SentRequest("GET", "/queue/message", {"key": "1"}, POLL, None),
        SentRequest("DELETE", "/queue/message/5", {"key": "1"}, SERVICE, None),
    ],
    ids=str,
)
def test_requests_that_keep_the_rules(request_: SentRequest) -> None:
    judge_request(request_)


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        (api("GET", f"{RUNNERS}/busy"), "no such request"),
        (api("PUT", f"{RUNNERS}/7"), "no such request"),
        (api("POST", "/repos/acme/actions/runners/registration-token"), "no such request"),
        (api("GET", RUNNERS), "default length"),
        (api("GET", RUNNERS, {"per_page": "1000"}), "too long"),
        (api("GET", RUNNERS, {"per_page": "100", "label": "x"}), "other parameters"),
        (api("GET", f"{RUNNERS}/7", headers={"x-github-api-version": "2021-01-01"}), "lacks a header"),
        (api("GET", f"{RUNNERS}/7", headers={"accept": "*/*"}), "lacks a header"),
        (api("GET", f"{RUNNERS}/7", headers={"accept-encoding": "gzip, br"}), "content coding"),
        (api("GET", f"{RUNNERS}/7", credential=f"Bearer {APP}"), "another kind"),
        (api("GET", f"{RUNNERS}/7", credential=f"RemoteAuth {TOKEN}"), "scheme"),
        (api("GET", f"{RUNNERS}/7", credential=""), "scheme"),
        (api("POST", "/app/installations/3/access_tokens"), "another kind"),
        (api("GET", "/repos/acme/widgets/installation", credential=f"Bearer {app_token(660)}"), "too long"),
        (api("POST", f"{RUNNERS}/generate-jitconfig", body={**JIT, "labels": []}), "body"),
        (api("POST", f"{RUNNERS}/generate-jitconfig", body={**JIT, "name": "x" * 65}), "body"),
        (api("POST", f"{RUNNERS}/generate-jitconfig", body=JIT, headers={"content-type": "text/plain"}), "JSON"),
        (api("POST", f"{RUNNERS}/remove-token", body={}), "body"),
        (api("GET", "/repos/acme/widgets/actions/runs", {"per_page": "100", "status": "running"}), "otherwise"),
        (api("GET", "/repos/acme/widgets/actions/runs/7/jobs", {"per_page": "100", "filter": "all"}), "otherwise"),
        (service("GET", f"{SETS}/27", {}), "another version"),
        (service("GET", f"{SETS}/27", {**VERSION, "x": "y"}), "other parameters"),
        (service("GET", f"{SETS}/27", headers={"user-agent": "remuda"}), "User-Agent"),
        (service("GET", f"{SETS}/27", headers={"content-type": "text/plain"}), "Content-Type"),
        (service("POST", f"{SETS}/27/acquirejobs", body=["1"]), "body"),
        (SentRequest("GET", "/queue/message", {}, {**POLL, "x-scalesetmaxcapacity": "0"}, None), "otherwise"),
        (SentRequest("GET", "/queue/message", {"lastMessageId": "0"}, POLL, None), "otherwise"),
        (SentRequest("GET", "/queue/message", {}, {**POLL, "accept": "application/json"}, None), "otherwise"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_requests_that_break_a_rule(request_: SentRequest, problem: str) -> None:
    with pytest.raises(BrokenGitHubRule, match=problem):
        judge_request(request_)


# Several requests -----------------------------------------------------------------------------------------------------


def answered(document: Any) -> ClientResponse:
    return ClientResponse(200, {}, json.dumps(document).encode())


def with_token(request: SentRequest, token: str, scheme: str = "Bearer") -> SentRequest:
    return request._replace(headers={**request.headers, "authorization": f"{scheme} {token}"})


REGISTER = api("POST", "/actions/runner-registration", body={})
SESSION = service("POST", f"{SETS}/27/sessions", body={"ownerName": "x"})
MESSAGE = SentRequest("GET", "/queue/message", {}, POLL, None)
ACQUIRE = service("POST", f"{SETS}/27/acquirejobs", body=[1])


@pytest.fixture
def sequence() -> GitHubSequence:
    """GitHub has issued a token of each kind."""
    made = GitHubSequence({})
    made.observe(api("POST", f"{RUNNERS}/registration-token"), answered({"token": "of-registration"}))
    made.observe(api("POST", f"{RUNNERS}/remove-token"), answered({"token": "of-removal"}))
    made.observe(api("POST", "/app/installations/3/access_tokens"), answered({"token": "of-installation"}))
    made.observe(REGISTER, answered({"token": "of-admin"}))
    made.observe(SESSION, answered({"messageQueueAccessToken": "of-session"}))
    return made


@pytest.mark.parametrize(
    ("request_", "tokens"),
    [
        (api("GET", f"{RUNNERS}/7"), (TOKEN, "of-installation")),
        (REGISTER, ("of-registration",)),
        (service("GET", f"{SETS}/27"), ("of-admin",)),
        (SESSION, ("of-admin",)),
        (ACQUIRE, ("of-session",)),
        (MESSAGE, ("of-session",)),
    ],
    ids=str,
)
def test_each_request_has_its_kind_of_credential(
    sequence: GitHubSequence, request_: SentRequest, tokens: tuple[str, ...]
) -> None:
    for token in (TOKEN, "of-registration", "of-removal", "of-installation", "of-admin", "of-session"):
        if token in tokens:
            sequence.judge(with_token(request_, token))
            continue
        with pytest.raises(BrokenSequence, match="its credential is"):
            sequence.judge(with_token(request_, token))


def test_pages_are_asked_for_in_turn(sequence: GitHubSequence) -> None:
    def page(number: int, **query: str) -> SentRequest:
        return api("GET", RUNNERS, {"per_page": "100", "page": str(number), **query})

    for number in (1, 2, 3, 1, 2):
        sequence.judge(page(number))
    for wrong in (page(5), page(2, name="x"), page(2)._replace(path="/orgs/acme/actions/runners")):
        with pytest.raises(BrokenSequence, match="without page"):
            sequence.judge(wrong)


@pytest.mark.parametrize(
    ("request_", "tag"),
    [
        (api("GET", f"{RUNNERS}/7"), '"x"'),
        (api("GET", "/repos/acme/widgets/actions/runs/7"), "x"),
        (api("GET", "/repos/acme/widgets/actions/runs/7"), 'w/"x"'),
    ],
)
def test_entity_tags_are_repeated_as_they_came(sequence: GitHubSequence, request_: SentRequest, tag: str) -> None:
    run = api("GET", "/repos/acme/widgets/actions/runs/7")
    sequence.judge(run._replace(headers={**run.headers, "if-none-match": 'W/"x"'}))
    with pytest.raises(BrokenSequence, match="entity tag"):
        sequence.judge(request_._replace(headers={**request_.headers, "if-none-match": tag}))
