"""Rules for requests to GitHub that test servers do not check: path, query, headers, body, and the kind of credential.

They are those of GitHub's REST API and of github.com/actions/scaleset.
"""

from __future__ import annotations

import json
import re
from base64 import urlsafe_b64decode
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

Body = Any
_REST = "https://docs.github.com/en/rest/"
_CLIENT = "github.com/actions/scaleset, client.go"
_SESSION = "github.com/actions/scaleset, session_client.go"

BEARER, REMOTE_AUTH = "Bearer", "RemoteAuth"
#: Of Apps: a JSON web token that is signed with the App's key (authenticating-as-a-github-app).
APP_TOKEN = re.compile(r"eyJ[\w-]+\.[\w-]+\.[\w-]{300,}")
#: Seconds of its validity at most.
MAX_APP_TOKEN_S = 600
MAX_NAME, MAX_LABELS, MAX_PER_PAGE = 64, 100, 100
API_HEADERS = {
    "accept": "application/vnd.github+json",
    "x-github-api-version": "2022-11-28",
    "user-agent": "remuda",
}
SERVICE_VERSION = "6.0-preview"
#: Part of the user agent of a client of scale sets, which is a JSON document.
_AGENT = '"kind": "scaleset"'
#: Values of `status` (list-workflow-runs-for-a-repository).
RUN_STATUSES = frozenset(
    [
        "completed",
        "action_required",
        "cancelled",
        "failure",
        "neutral",
        "skipped",
        "stale",
        "success",
        "timed_out",
        "in_progress",
        "queued",
        "requested",
        "waiting",
        "pending",
    ]
)


class BrokenGitHubRule(AssertionError):
    """GitHub would refuse the request, or carry out something else."""


class SentRequest(NamedTuple):
    method: str
    #: Without the base of the API.
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Body

    @property
    def credential(self) -> tuple[str, str]:
        scheme, _, token = self.headers.get("authorization", "").partition(" ")
        return scheme, token

    def __str__(self) -> str:
        return f"{self.method} {self.path} {dict(self.query)}"


class KnownRequest(NamedTuple):
    """A request that the adapters may make."""

    method: str
    #: Regular expression of the path.
    path: str
    source: str
    #: Names of its parameters.
    query: str = ""
    #: Whether the body is right. None: there is none.
    body: Callable[[Body], bool] | None = None
    #: A condition beyond those of all requests to the same service.
    also: Callable[[SentRequest], bool] = lambda _: True
    is_for_apps: bool = False
    scheme: str = BEARER


_RUNNERS = r"/(repos/[^/]+/[^/]+|orgs/[^/]+)/actions/runners"
_SCOPE = r"/(repos/[^/]+/[^/]+|orgs/[^/]+)"
_RUNS = r"/repos/[^/]+/[^/]+/actions/runs"
_RUNNER_API = f"{_REST}actions/self-hosted-runners"
_APP_API = f"{_REST}apps/apps"


def _is_jit_request(body: Body) -> bool:
    is_whole = isinstance(body, dict) and set(body) == {"name", "runner_group_id", "labels"}
    return is_whole and 0 < len(body["name"]) <= MAX_NAME and 0 < len(body["labels"]) <= MAX_LABELS


def _is_registration(body: Body) -> bool:
    return isinstance(body, dict) and set(body) == {"url", "runner_event"} and body["runner_event"] == "register"


#: Requests to GitHub's REST API.
API: Sequence[KnownRequest] = (
    KnownRequest("GET", _RUNNERS, _RUNNER_API, "per_page page name"),
    KnownRequest("GET", f"{_RUNNERS}/[0-9]+", _RUNNER_API),
    KnownRequest("DELETE", f"{_RUNNERS}/[0-9]+", _RUNNER_API),
    KnownRequest("GET", f"{_RUNNERS}/downloads", _RUNNER_API),
    KnownRequest("POST", f"{_RUNNERS}/(registration|remove)-token", _RUNNER_API),
    KnownRequest("POST", f"{_RUNNERS}/generate-jitconfig", _RUNNER_API, body=_is_jit_request),
    KnownRequest(
        "GET", r"/orgs/[^/]+/actions/runner-groups", f"{_REST}actions/self-hosted-runner-groups", "per_page page"
    ),
    KnownRequest(
        "GET",
        _RUNS,
        f"{_REST}actions/workflow-runs",
        "per_page status",
        also=lambda request: request.query.get("status", "queued") in RUN_STATUSES,
    ),
    KnownRequest("GET", f"{_RUNS}/[0-9]+", f"{_REST}actions/workflow-runs"),
    KnownRequest(
        "GET",
        f"{_RUNS}/[0-9]+/jobs",
        f"{_REST}actions/workflow-jobs",
        "per_page filter",
        also=lambda request: request.query.get("filter") == "latest",
    ),
    KnownRequest("POST", f"{_RUNS}/[0-9]+/rerun-failed-jobs", f"{_REST}actions/workflow-runs"),
    KnownRequest("GET", _SCOPE, f"{_REST}repos/repos"),
    KnownRequest("GET", f"{_SCOPE}/installation", _APP_API, is_for_apps=True),
    KnownRequest("POST", r"/app/installations/[0-9]+/access_tokens", _APP_API, is_for_apps=True),
    KnownRequest("POST", "/actions/runner-registration", _CLIENT, body=_is_registration, scheme=REMOTE_AUTH),
)

_SETS = "/_apis/runtime/runnerscalesets"
_AGENTS = "/_apis/distributedtask/pools/0/agents"


def _is_scale_set(body: Body) -> bool:
    return isinstance(body, dict) and set(body) == {"name", "runnerGroupId", "labels", "RunnerSetting"}


def _announces_capacity(request: SentRequest) -> bool:
    accepts = request.headers.get("accept") == f"application/json; api-version={SERVICE_VERSION}"
    # With 0, jobs that are queued meanwhile are never delivered.
    last = request.query.get("lastMessageId", "1")
    return accepts and int(request.headers.get("x-scalesetmaxcapacity", "0")) > 0 and int(last) > 0


#: Requests to the Actions service, which follow its client.
SERVICE: Sequence[KnownRequest] = (
    KnownRequest("GET", _SETS, _CLIENT, "runnerGroupId name"),
    KnownRequest("POST", _SETS, _CLIENT, body=_is_scale_set),
    KnownRequest("GET", f"{_SETS}/[0-9]+", _CLIENT),
    KnownRequest("DELETE", f"{_SETS}/[0-9]+", _CLIENT),
    KnownRequest("POST", f"{_SETS}/[0-9]+/sessions", _CLIENT, body=lambda body: list(body) == ["ownerName"]),
    KnownRequest("PATCH", f"{_SETS}/[0-9]+/sessions/[^/]+", _CLIENT),
    KnownRequest("DELETE", f"{_SETS}/[0-9]+/sessions/[^/]+", _CLIENT),
    KnownRequest("GET", f"{_SETS}/[0-9]+/acquirablejobs", _CLIENT),
    KnownRequest(
        "POST", f"{_SETS}/[0-9]+/acquirejobs", _SESSION, body=lambda body: body and all(type(n) is int for n in body)
    ),
    KnownRequest(
        "POST", f"{_SETS}/[0-9]+/generatejitconfig", _CLIENT, body=lambda body: set(body) == {"name", "workFolder"}
    ),
    KnownRequest("GET", "/_apis/runtime/runnergroups/", _CLIENT, "groupName"),
    KnownRequest("GET", _AGENTS, _CLIENT, "agentName"),
    KnownRequest("GET", f"{_AGENTS}/[0-9]+", _CLIENT),
    KnownRequest("DELETE", f"{_AGENTS}/[0-9]+", _CLIENT),
)
#: Requests for messages, at the address that a session names, whose own query is kept.
QUEUE: Sequence[KnownRequest] = (
    KnownRequest("GET", ".*", _SESSION, also=_announces_capacity),
    KnownRequest("DELETE", ".*/[0-9]+", _SESSION),
)


def judge_request(request: SentRequest) -> None:
    """Raise `BrokenGitHubRule` with all that is wrong with a request."""
    if problems := [*_problems(request)]:
        raise BrokenGitHubRule(f"{request}: {'; '.join(problems)}")


def is_for_service(request: SentRequest) -> bool:
    """Whether it goes to the Actions service."""
    return "/_apis/" in request.path


def is_for_messages(request: SentRequest) -> bool:
    """Whether it goes to the address of a session's messages."""
    return not is_for_service(request) and _AGENT in request.headers.get("user-agent", "")


def _is_short_lived(token: str) -> bool:
    """Whether a JSON web token of an App is valid for at most ten minutes (generating-a-json-web-token-jwt)."""
    payload = token.split(".")[1]
    claims = json.loads(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    return set(claims) == {"iat", "exp", "iss"} and 0 < claims["exp"] - claims["iat"] <= MAX_APP_TOKEN_S


def _problems(request: SentRequest) -> list[str]:
    is_service, is_message = is_for_service(request), is_for_messages(request)
    table = SERVICE if is_service else QUEUE if is_message else API
    path = request.path[request.path.index("/_apis/") :] if is_service else request.path
    found = [each for each in table if each.method == request.method and re.fullmatch(each.path, path)]
    if not found:
        return ["there is no such request"]
    endpoint = found[0]
    scheme, token = request.credential
    checks = {
        f"the scheme of its credential is not {endpoint.scheme}": scheme == endpoint.scheme,
        "its credential is of another kind": bool(token)
        and (APP_TOKEN.fullmatch(token) is not None) == endpoint.is_for_apps,
        "its credential is valid for too long": not APP_TOKEN.fullmatch(token) or _is_short_lived(token),
        "its body is wrong": endpoint.body(request.body) if endpoint.body else request.body is None,
        "its body is not said to be JSON": request.body is None
        or request.headers.get("content-type") == "application/json",
        f"{endpoint.source} says otherwise": endpoint.also(request),
        "it accepts a content coding that the client cannot read": request.headers.get("accept-encoding", "gzip")
        == "gzip",
    }
    if is_service:
        checks["it names another version of the service"] = request.query.get("api-version") == SERVICE_VERSION
        checks["it has other parameters"] = set(request.query) <= {*endpoint.query.split(), "api-version"}
        checks["its Content-Type is missing"] = request.headers.get("content-type") == "application/json"
        checks["its User-Agent is not that of a client of scale sets"] = _AGENT in request.headers.get("user-agent", "")
    elif not is_message:
        checks["it has other parameters"] = set(request.query) <= set(endpoint.query.split())
        checks["it lacks a header of the API"] = API_HEADERS.items() <= request.headers.items()
        checks["its pages are too long, or of GitHub's default length"] = (
            "per_page" not in endpoint.query or 0 < int(request.query.get("per_page", 0)) <= MAX_PER_PAGE
        )
    return [problem for problem, is_right in checks.items() if not is_right]


def parsed_request(base: str, method: str, target: str, headers: Mapping[str, str] | None, body: bytes) -> SentRequest:
    parts = urlsplit(target)
    return SentRequest(
        method,
        parts.path.removeprefix(base.rstrip("/")),
        dict(parse_qsl(parts.query)),
        {name.lower(): value for name, value in (headers or {}).items()},
        json.loads(body) if body else None,
    )


def operation_of(request: SentRequest) -> str:
    """Such as `GET runners` for a list and `GET runners/1` for one of them."""
    parts = request.path.strip("/").split("/")
    *_, before, last = ["", *parts]
    is_one = last.isdecimal() or before == "sessions"
    return f"{request.method} {before}/1" if is_one else f"{request.method} {last}"
