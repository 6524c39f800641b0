"""Every operation of the GitHub clients with every class of errors of GitHub: the error, and how often it was sent."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from remuda.adapters.github import client as client_module
from remuda.adapters.github.auth import AppAuth
from remuda.adapters.github.client import MAX_ATTEMPTS, GitHubClient
from remuda.adapters.github.scale_sets import ScaleSetSource
from remuda.domain.errors import Conflict, NotFound, Throttled, TimedOut, Unavailable, UserError
from remuda.domain.runner_set import RunnerSet
from remuda.http import (
    ClientResponse,
    ConnectError,
    ConnectionLost,
    ConnectTimeout,
    InvalidRequest,
    ReadTimeout,
    ResponseTooLong,
)
from remuda.ports.calls import CallCounter
from simulation.loop import SeededIds
from tests.support.failure_tables import Expected, Failing, Outcome, Scripted, deviations
from tests.support.github_connections import GitHubScript, json_answer
from tests.support.records import NOW, at
from tests.support.virtual_time import FixedClock

REPO, ORG = "acme/widgets", "acme"
ONCE_MORE = {"retry-after": "1"}
LONG = {"retry-after": "3600"}
SOON = {"x-ratelimit-reset": str(int(NOW.timestamp()) + 2)}
OUTCOMES: dict[str, Outcome] = {
    "unreachable": ConnectError("refused"),
    "unreachable in time": ConnectTimeout("slow"),
    "lost": ConnectionLost("closed"),
    "timeout": ReadTimeout("slow"),
    "unsendable": InvalidRequest("a header has a character that is not allowed"),
    "too long": ResponseTooLong("the response is too long"),
    "server": json_answer({"message": "Server Error"}, 500),
    "bad gateway": ClientResponse(502, {}, b"<html>"),
    "unavailable": ClientResponse(503, {}, b""),
    "credential": json_answer({"message": "Bad credentials"}, 401),
    "denied": json_answer({"message": "Resource not accessible by integration"}, 403),
    "secondary limit": json_answer({"message": "You have exceeded a secondary rate limit"}, 403, ONCE_MORE),
    "too many": json_answer({"message": "Too many requests"}, 429, ONCE_MORE),
    "used up": json_answer({"message": "API rate limit exceeded"}, 403, LONG),
    # Beside its own limits, GitHub always tells when the primary limit begins anew.
    "secondary limit without a time": json_answer(
        {"message": "You have exceeded a secondary rate limit"}, 403, {**SOON, "x-ratelimit-remaining": "4999"}
    ),
    "too many without a time": json_answer({"message": "Too many requests"}, 429),
    "used up until soon": json_answer(
        {"message": "API rate limit exceeded"}, 403, {**SOON, "x-ratelimit-remaining": "0"}
    ),
    "missing": json_answer({"message": "Not Found"}, 404),
    "exists": json_answer({"message": "Already exists"}, 409),
    "invalid": json_answer({"message": "Validation Failed"}, 422),
    "moved": ClientResponse(301, {"location": "https://api.github.com/repositories/1"}, b"{}"),
    "unreadable": ClientResponse(200, {}, b"<html>"),
}
EXPECTED = {
    "unreachable": Expected(Unavailable, MAX_ATTEMPTS),
    # A call may take ten seconds: callers decide whether they have the time for another one.
    "unreachable in time": Expected(TimedOut, 1),
    "lost": Expected(Unavailable, MAX_ATTEMPTS),
    "timeout": Expected(TimedOut, 1),
    "unsendable": Expected(UserError, 1),
    "too long": Expected(Unavailable, MAX_ATTEMPTS),
    "server": Expected(Unavailable, MAX_ATTEMPTS),
    "bad gateway": Expected(Unavailable, MAX_ATTEMPTS),
    "unavailable": Expected(Unavailable, MAX_ATTEMPTS),
    "credential": Expected(UserError, 1),
    "denied": Expected(UserError, 1),
    "secondary limit": Expected(Throttled, MAX_ATTEMPTS),
    "too many": Expected(Throttled, MAX_ATTEMPTS),
    "used up": Expected(Throttled, 1),
    # A minute at least (best-practices-for-using-the-rest-api), which callers do not wait for.
    "secondary limit without a time": Expected(Throttled, 1),
    "too many without a time": Expected(Throttled, 1),
    "used up until soon": Expected(Throttled, MAX_ATTEMPTS),
    "missing": Expected(UserError, 1),
    "exists": Expected(Conflict, 1),
    "invalid": Expected(UserError, 1),
    "moved": Expected(UserError, 1),
    "unreadable": Expected(Unavailable, 1),
}
AMBIGUOUS = ("unreachable", "lost", "too long", "server", "bad gateway", "unavailable")
#: Never sent again, whether or not GitHub received it.
ONCE = dict.fromkeys(AMBIGUOUS, Expected(Unavailable, 1))
#: Sent once more by a caller that can tell whether the first request was carried out.
TWICE = {
    **dict.fromkeys(AMBIGUOUS, Expected(Unavailable, 2)),
    "unreadable": Expected(Unavailable, 2),
    **dict.fromkeys(("timeout", "unreachable in time"), Expected(TimedOut, 2)),
}
GONE = {"missing": Expected(None, 1)}
NOT_FOUND = {"missing": Expected(NotFound, 1)}
NO_BODY = {"unreadable": Expected(None, 1)}
OPERATIONS = [
    Failing("registration_token", "POST registration-token", lambda it: it.registration_token(REPO)),
    Failing("removal_token", "POST remove-token", lambda it: it.removal_token(ORG)),
    Failing(
        "jit_config",
        "POST generate-jitconfig",
        lambda it: it.jit_config(REPO, name="remuda-1-i-1", labels=["large"]),
        # The name of a runner that a lost request has registered is taken.
        but=TWICE,
    ),
    Failing("runner_group_id", "GET runner-groups", lambda it: it.runner_group_id(ORG, "Default")),
    Failing("immutable_name", "GET widgets", lambda it: it.immutable_name(REPO)),
    Failing("runner_downloads", "GET downloads", lambda it: it.runner_downloads(REPO)),
    Failing("list_runners", "GET runners", lambda it: it.list_runners(REPO)),
    Failing("first_runner_response", "GET runners", lambda it: it.first_runner_response(REPO), but=NO_BODY),
    Failing("get_runner", "GET runners/1", lambda it: it.get_runner(REPO, 7), but=GONE),
    Failing(
        "delete_runner",
        "DELETE runners/1",
        lambda it: it.delete_runner(REPO, 7),
        # It runs a job.
        but={**GONE, **NO_BODY, "invalid": Expected(None, 1)},
    ),
    Failing("list_runs", "GET runs", lambda it: it.list_runs(REPO, REPO, status="queued"), but=NOT_FOUND),
    Failing("list_jobs", "GET jobs", lambda it: it.list_jobs(REPO, REPO, 7), but=GONE),
    Failing("get_run", "GET runs/1", lambda it: it.get_run(REPO, REPO, 7), but=NOT_FOUND),
    Failing(
        "rerun_failed_jobs",
        "POST rerun-failed-jobs",
        lambda it: it.rerun_failed_jobs(REPO, REPO, 7),
        but={**ONCE, **NOT_FOUND, **NO_BODY},
    ),
]


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Callable[[GitHubScript], None]:
    """Let the clients that are opened later talk to a scripted GitHub."""
    return lambda script: monkeypatch.setattr(client_module, "HttpConnections", script.connections)


Connect = Callable[[GitHubScript], None]


@asynccontextmanager
async def open_client(**credential: Any) -> AsyncIterator[GitHubClient]:
    given: dict[str, Any] = {"clock": FixedClock(), "ids": SeededIds(), "calls": CallCounter()}
    client = GitHubClient(api_url="https://api.github.com", **given, **(credential or {"token": "github_pat_1"}))
    try:
        yield client
    finally:
        await client.close()


@pytest.mark.parametrize("failing", OPERATIONS, ids=str)
async def test_client(scripts: Connect, failing: Failing) -> None:
    async def use(script: GitHubScript, failing: Failing) -> None:
        scripts(script)
        async with open_client() as client:
            await failing.call(client)

    assert not await deviations(GitHubScript, failing, OUTCOMES, EXPECTED, use)


async def test_a_registration_whose_answer_was_lost_is_replaced(scripts: Connect) -> None:
    """GitHub keeps the configuration of the lost answer to itself, so the runner is deleted and registered again."""
    runner = {"id": 7, "name": "remuda-1-i-1", "status": "offline", "busy": False, "labels": []}
    made = json_answer({"runner": runner, "encoded_jit_config": "eyJ9"}, 201)
    script = GitHubScript(
        {
            "POST generate-jitconfig": [ConnectionLost("closed"), json_answer({"message": "exists"}, 409), made],
            "GET runners": [json_answer({"total_count": 1, "runners": [runner]})],
            "DELETE runners/1": [ClientResponse(204, {}, b"")],
        }
    )
    scripts(script)
    async with open_client() as client:
        assert (await client.jit_config(REPO, name="remuda-1-i-1", labels=["large"])).runner_id == 7
    assert [name for name, _ in script.sent] == [
        "POST generate-jitconfig",
        "POST generate-jitconfig",
        "GET runners",
        "DELETE runners/1",
        "POST generate-jitconfig",
    ]


# Apps -----------------------------------------------------------------------------------------------------------------


@cache
def app_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


INSTALLED: Scripted = {"GET installation": [json_answer({"id": 3})]}
EXPIRES_AT = at(3_600).isoformat()
APP_OPERATIONS = [
    Failing("installation", "GET installation", lambda it: it.list_runners(REPO)),
    Failing(
        "installation token",
        "POST access_tokens",
        lambda it: it.list_runners(REPO),
        INSTALLED,
        # The App was reinstalled since its installation was looked up.
        {"missing": Expected(Unavailable, 1)},
    ),
    Failing(
        "installation token that is rejected",
        "GET runners",
        lambda it: it.list_runners(REPO),
        {**INSTALLED, "POST access_tokens": [json_answer({"token": "ghs_1", "expires_at": EXPIRES_AT}, 201)]},
        # Another token is created once.
        {"credential": Expected(UserError, 2)},
    ),
]


@pytest.mark.parametrize("failing", APP_OPERATIONS, ids=str)
async def test_app(scripts: Connect, failing: Failing) -> None:
    async def use(script: GitHubScript, failing: Failing) -> None:
        scripts(script)
        async with open_client(auth=AppAuth(app_id="4711", key=app_key(), clock=FixedClock())) as client:
            await failing.call(client)

    assert not await deviations(GitHubScript, failing, OUTCOMES, EXPECTED, use)


# Runner scale sets ----------------------------------------------------------------------------------------------------

SET = RunnerSet(name="large", labels=("large",), resource_class="large", scope=REPO, max=5)
IN_GROUP = replace(SET, scope=ORG, runner_group="builds")
_CLAIMS = base64.urlsafe_b64encode(json.dumps({"exp": (NOW + timedelta(hours=1)).timestamp()}).encode()).decode()
CONNECTED: Scripted = {
    "POST registration-token": [json_answer({"token": "AREGISTRATION", "expires_at": EXPIRES_AT}, 201)],
    "POST runner-registration": [
        json_answer({"url": "https://pipelines.example/tenant/", "token": f"e30.{_CLAIMS.rstrip('=')}.x"})
    ],
}
SESSION_ID = "0d6d1f1b-7a11-4c55-8a61-6f2c9d0e5d5b"
SESSION = json_answer(
    {
        "sessionId": SESSION_ID,
        "messageQueueUrl": "https://broker.example/queue/message?key=1",
        "messageQueueAccessToken": "queue-1",
    }
)
IN_SESSION: Scripted = {**CONNECTED, "POST sessions": [SESSION], "PATCH sessions/1": [SESSION]}
FOUND: Scripted = {**CONNECTED, "GET runnerscalesets": [json_answer({"value": [{"id": 27, "name": "large"}]})]}
#: The service has no permissions of its own: its 404 means what it says, and a rejected token is replaced once.
SERVICE_EXPECTED = {
    **EXPECTED,
    **NOT_FOUND,
    "credential": Expected(UserError, 2),
    "unsendable": Expected(Unavailable, 4),
}
#: Its addresses are GitHub's, so one that cannot be sent is no error of the user.
SERVICE_ONCE = {**ONCE, "unsendable": Expected(Unavailable, 1)}
SERVICE_TWICE = {**TWICE, "unsendable": Expected(Unavailable, 2)}
#: The session's token is replaced by the session, not by another registration.
QUEUE = {"credential": Expected(Unavailable, 2)}


def in_session(call: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
    async def opened(source: ScaleSetSource) -> None:
        await call(await source.open_session(SET, 27, owner="listener"))

    return opened


SET_OPERATIONS = [
    Failing("connect", "POST registration-token", lambda it: it.find_set(SET), but=EXPECTED),
    Failing(
        "connect",
        "POST runner-registration",
        lambda it: it.find_set(SET),
        CONNECTED,
        # GitHub does not know a new token at once.
        {**EXPECTED, **dict.fromkeys(("credential", "denied", "missing"), Expected(UserError, MAX_ATTEMPTS))},
    ),
    Failing("find_set", "GET runnerscalesets", lambda it: it.find_set(SET), CONNECTED),
    Failing("find group", "GET runnergroups", lambda it: it.find_set(IN_GROUP), CONNECTED),
    Failing("create_set", "POST runnerscalesets", lambda it: it.create_set(SET), FOUND, {"exists": Expected(None, 1)}),
    Failing("delete_set", "DELETE runnerscalesets/1", lambda it: it.delete_set(SET), FOUND, {**GONE, **NO_BODY}),
    Failing("count_jobs", "GET runnerscalesets/1", lambda it: it.count_jobs(SET, 27), CONNECTED),
    Failing(
        "open_session", "POST sessions", lambda it: it.open_session(SET, 27, owner="listener"), CONNECTED, SERVICE_ONCE
    ),
    Failing("refresh_session", "PATCH sessions/1", lambda it: it.refresh_session(SET, 27, SESSION_ID), CONNECTED),
    Failing(
        "delete_session",
        "DELETE sessions/1",
        lambda it: it.delete_session(SET, 27, SESSION_ID),
        CONNECTED,
        {**GONE, **NO_BODY},
    ),
    Failing("acquirable_jobs", "GET acquirablejobs", lambda it: it.acquirable_jobs(SET, 27), CONNECTED),
    Failing(
        "register",
        "POST generatejitconfig",
        lambda it: it.register(SET, 27, name="remuda-1-i-1"),
        CONNECTED,
        SERVICE_TWICE,
    ),
    Failing("find_runner", "GET agents", lambda it: it.find_runner(SET, name="remuda-1-i-1"), CONNECTED),
    Failing(
        "deregister",
        "GET agents/1",
        lambda it: it.deregister(SET, 7),
        {**CONNECTED, "DELETE agents/1": [ClientResponse(204, {}, b"")]},
        {**GONE, **NO_BODY},
    ),
    Failing(
        "deregister",
        "DELETE agents/1",
        lambda it: it.deregister(SET, 7),
        {**CONNECTED, "GET agents/1": [json_answer({"id": 7})]},
        {**GONE, **NO_BODY},
    ),
    Failing(
        "receive",
        "GET message",
        in_session(lambda session: session.receive(last_message_id=0, capacity=5)),
        IN_SESSION,
        QUEUE,
    ),
    Failing(
        "acknowledge",
        "DELETE message/1",
        in_session(lambda session: session.acknowledge(5)),
        IN_SESSION,
        {**QUEUE, **GONE, **NO_BODY},
    ),
    # The service keeps what it has acquired: the jobs come as assigned.
    Failing("acquire", "POST acquirejobs", in_session(lambda session: session.acquire([1])), IN_SESSION, QUEUE),
    Failing("close", "DELETE sessions/1", in_session(lambda session: session.close()), IN_SESSION, {**GONE, **NO_BODY}),
]


@pytest.mark.parametrize("failing", SET_OPERATIONS, ids=str)
async def test_scale_sets(scripts: Connect, failing: Failing) -> None:
    async def use(script: GitHubScript, failing: Failing) -> None:
        scripts(script)
        async with open_client() as client:
            source = ScaleSetSource(github=client, clock=FixedClock(), ids=SeededIds(), calls=CallCounter())
            await failing.call(source)

    assert not await deviations(GitHubScript, failing, OUTCOMES, SERVICE_EXPECTED, use)
