"""The client of runner scale sets: recorded shapes, tokens, faults of GitHub, and untrusted responses."""

from __future__ import annotations

import asyncio
import base64
import codecs
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from aiohttp import web

from remuda.adapters.github import scale_sets
from remuda.adapters.github.auth import AppAuth
from remuda.adapters.github.client import MAX_ATTEMPTS, GitHubClient
from remuda.adapters.github.responses import parse_service_access
from remuda.adapters.github.scale_sets import SERVICE, ScaleSetSession, ScaleSetSource
from remuda.adapters.system.clock import SystemIds
from remuda.domain.demand import DemandStatistics, JobEventKind
from remuda.domain.errors import Conflict, NotFound, Throttled, TimedOut, Unavailable, UserError
from remuda.domain.runner_set import RunnerSet
from remuda.fake_github import Endpoint
from remuda.fake_github.client import FakeGitHubClient
from remuda.fake_github.fake_runner.credentials import secret_of, unpack
from remuda.ports.calls import CallCounter
from remuda.ports.github import Deletion
from tests.conformance.test_github_client import APP_ID, KEY, PUBLIC, pem
from tests.support.records import LONG_S
from tests.support.virtual_time import AdjustableClock

pytestmark = pytest.mark.usefixtures("patient_client")

SHAPES = {path.stem: json.loads(path.read_text()) for path in sorted((Path(__file__).parent / "shapes").glob("*.json"))}
REPO = "acme/widgets"
SET = RunnerSet(name="large", labels=("self-hosted", "large"), resource_class="large", scope=REPO, max=5)
SETS = "/tenant/_apis/runtime/runnerscalesets"
_numbers = itertools.count(1)


@dataclass
class RecordedEvents:
    events: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)

    def record(self, action: str, why: str = "", **facts: Any) -> None:
        self.events.append((action, why, facts))


@pytest.fixture
def clock() -> AdjustableClock:
    return AdjustableClock(longest_sleep_s=0.0)


@pytest.fixture
def event_log() -> RecordedEvents:
    return RecordedEvents()


# A scripted server, which answers with the shapes -------------------------------------------------------------------


@dataclass
class ScriptedAnswer:
    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class ReceivedRequest:
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


def token_until(moment: datetime) -> str:
    """A JSON web token that expires at this time."""
    claims = base64.urlsafe_b64encode(json.dumps({"exp": int(moment.timestamp())}).encode()).rstrip(b"=").decode()
    return f"e30.{claims}.{next(_numbers)}"


class ScriptedService:
    """Answers each request with the next answer for its method and path; the last one is repeated."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: list[ReceivedRequest] = []
        self._answers: dict[tuple[str, str], list[ScriptedAnswer]] = {}

    def answer(self, method: str, path: str, *answers: ScriptedAnswer) -> None:
        self._answers[method, path] = list(answers)

    def shape(self, method: str, path: str, name: str, **changed: Any) -> None:
        shape = SHAPES[name]
        self.answer(method, path, ScriptedAnswer(shape["status"], {**shape["body"], **changed}))

    def of(self, method: str, path: str) -> list[ReceivedRequest]:
        return [each for each in self.requests if (each.method, each.path) == (method, path)]

    async def handle(self, request: web.Request) -> web.Response:
        raw = await request.read()
        self.requests.append(
            ReceivedRequest(
                request.method,
                request.path,
                dict(request.query),
                {name.lower(): value for name, value in request.headers.items()},
                json.loads(raw) if raw else None,
            )
        )
        answers = self._answers.get((request.method, request.path), [ScriptedAnswer(404)])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer.body, bytes):
            body = answer.body
        else:
            body = b"" if answer.body is None else codecs.BOM_UTF8 + json.dumps(answer.body).encode()
        headers = {"content-type": "application/json", **answer.headers}
        return web.Response(status=answer.status, body=body, headers=headers)


@pytest.fixture
async def script(clock: AdjustableClock) -> AsyncIterator[ScriptedService]:
    """A service with a set and a session, for the repository of the set."""
    script = ScriptedService()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", script.handle)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    script.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    expires_at = (clock.now() + timedelta(hours=1)).isoformat()
    script.answer(
        "POST",
        f"/repos/{REPO}/actions/runners/registration-token",
        ScriptedAnswer(201, {"token": "AREGISTRATION", "expires_at": expires_at}),
    )
    hour = clock.now() + timedelta(hours=1)
    script.shape(
        "POST", "/actions/runner-registration", "connection", url=f"{script.url}/tenant/", token=token_until(hour)
    )
    script.shape("GET", SETS, "scale_sets")
    session = {"messageQueueUrl": f"{script.url}/queue/message?key=1", "messageQueueAccessToken": "queue-1"}
    script.shape("POST", f"{SETS}/27/sessions", "session", **session)
    yield script
    await runner.cleanup()


@pytest.fixture
async def scripted(
    script: ScriptedService, clock: AdjustableClock, calls: CallCounter, event_log: RecordedEvents
) -> AsyncIterator[ScaleSetSource]:
    github = GitHubClient(api_url=script.url, token="github_pat_1", clock=clock, ids=SystemIds(), calls=calls)
    source = ScaleSetSource(github=github, clock=clock, ids=SystemIds(), calls=calls, event_log=event_log)
    yield source
    await source.close()
    await github.close()


async def scripted_session(scripted: ScaleSetSource) -> ScaleSetSession:
    return await scripted.open_session(SET, 27, owner="listener")


async def test_requests_are_those_of_githubs_client(scripted: ScaleSetSource, script: ScriptedService) -> None:
    """client.go and session_client.go: paths, headers, bodies and tokens."""
    script.answer("GET", SETS, ScriptedAnswer(200, {"count": 0, "value": []}))
    script.shape("POST", SETS, "scale_set")
    script.shape("GET", "/queue/message", "message_assigned")
    script.answer("DELETE", "/queue/message/100072254", ScriptedAnswer(204))
    script.shape("POST", f"{SETS}/27/acquirejobs", "acquired")
    script.shape("POST", f"{SETS}/27/generatejitconfig", "jit_config")
    assert await scripted.find_set(SET) is None
    assert await scripted.create_set(SET) == 27
    session = await scripted_session(scripted)
    message = await session.receive(last_message_id=7, capacity=5)
    assert message is not None
    await session.acknowledge(message.message_id)
    assert await session.acquire([4242]) == [4242]
    await scripted.register(SET, 27, name="remuda-3-i-0abc")

    [connect] = script.of("POST", "/actions/runner-registration")
    assert connect.headers["authorization"] == "RemoteAuth AREGISTRATION"
    assert connect.body == {"url": f"{script.url}/{REPO}", "runner_event": "register"}
    [find] = script.of("GET", SETS)
    assert find.query == {"runnerGroupId": "1", "name": "large", "api-version": "6.0-preview"}
    admin = find.headers["authorization"]
    assert admin.startswith("Bearer e30.")
    [create] = script.of("POST", SETS)
    assert create.body == {
        "name": "large",
        "runnerGroupId": 1,
        "labels": [{"name": "self-hosted", "type": "System"}, {"name": "large", "type": "System"}],
        "RunnerSetting": {"disableUpdate": True},
    }
    [open_session] = script.of("POST", f"{SETS}/27/sessions")
    assert open_session.body == {"ownerName": "listener"}
    [poll] = script.of("GET", "/queue/message")
    assert poll.query == {"key": "1", "lastMessageId": "7"}
    assert poll.headers["authorization"] == "Bearer queue-1"
    assert poll.headers["x-scalesetmaxcapacity"] == "5"
    assert poll.headers["accept"] == "application/json; api-version=6.0-preview"
    [acknowledge] = script.of("DELETE", "/queue/message/100072254")
    assert (acknowledge.query, acknowledge.headers["authorization"]) == ({"key": "1"}, "Bearer queue-1")
    [acquire] = script.of("POST", f"{SETS}/27/acquirejobs")
    assert (acquire.body, acquire.headers["authorization"]) == ([4242], "Bearer queue-1")
    [register] = script.of("POST", f"{SETS}/27/generatejitconfig")
    assert register.body == {"name": "remuda-3-i-0abc", "workFolder": "_work"}
    for each in script.requests:
        if each.path.startswith(SETS):
            assert each.query["api-version"] == "6.0-preview"
            assert each.headers["content-type"] == "application/json"
    agent = json.loads(register.headers["user-agent"])
    assert (agent["system"], agent["scale_set_id"], agent["kind"]) == ("remuda", 27, "scaleset")


async def test_first_poll_names_no_last_message(scripted: ScaleSetSource, script: ScriptedService) -> None:
    script.answer("GET", "/queue/message", ScriptedAnswer(202))
    session = await scripted_session(scripted)
    assert await session.receive(last_message_id=0, capacity=5) is None
    assert script.of("GET", "/queue/message")[0].query == {"key": "1"}


async def test_counts_of_a_set(scripted: ScaleSetSource, script: ScriptedService, calls: CallCounter) -> None:
    """The field is that of a session (actions/scaleset: types.go, RunnerScaleSet)."""
    script.shape("GET", f"{SETS}/27", "scale_set", statistics=SHAPES["session"]["body"]["statistics"])
    assert await scripted.count_jobs(SET, 27) == DemandStatistics(assigned=2, running=1)
    assert calls.by_service()[SERVICE]["GET runnerscalesets"] == 1
    script.shape("GET", f"{SETS}/27", "scale_set")
    assert await scripted.count_jobs(SET, 27) is None
    script.shape("GET", f"{SETS}/27", "error_set_not_found")
    with pytest.raises(NotFound):
        await scripted.count_jobs(SET, 27)


async def test_session_shape(scripted: ScaleSetSource) -> None:
    session = await scripted_session(scripted)
    assert session.session_id == SHAPES["session"]["body"]["sessionId"]
    assert session.statistics == DemandStatistics(assigned=2, running=1)


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ("message_assigned", JobEventKind.ASSIGNED),
        ("message_started", JobEventKind.STARTED),
        ("message_completed", JobEventKind.COMPLETED),
        ("message_available", JobEventKind.AVAILABLE),
    ],
)
async def test_message_shapes(
    scripted: ScaleSetSource, script: ScriptedService, event_log: RecordedEvents, shape: str, kind: JobEventKind
) -> None:
    script.shape("GET", "/queue/message", shape)
    message = await (await scripted_session(scripted)).receive(last_message_id=0, capacity=5)
    assert message is not None
    assert event_log.events == []
    body = SHAPES[shape]["body"]
    assert message.message_id == body["messageId"]
    assert message.statistics.assigned == body["statistics"]["totalAssignedJobs"]
    [event] = message.events
    [sent] = json.loads(body["body"])
    assert event.kind is kind
    assert (event.job_id, event.request_id, event.run_id) == (sent["jobId"], sent["runnerRequestId"], "17123456789")
    assert (event.repository, event.event, event.labels) == (REPO, "pull_request", SET.labels)
    assert (event.workflow, event.display_name) == (sent["jobWorkflowRef"], "test (3.11)")
    assert event.queued_at == datetime(2026, 8, 13, 8, 57, 13, 901_000, tzinfo=UTC)
    assert (event.assigned_at is None) is (kind is JobEventKind.AVAILABLE)
    assert (event.started_at is None) is (kind in {JobEventKind.AVAILABLE, JobEventKind.ASSIGNED})
    assert (event.finished_at is None) is (kind is not JobEventKind.COMPLETED)
    assert (event.runner_id, event.runner_name) == (sent.get("runnerId", 0), sent.get("runnerName", ""))
    assert event.result == sent.get("result", "")


async def test_runner_shapes(scripted: ScaleSetSource, script: ScriptedService) -> None:
    agents = "/tenant/_apis/distributedtask/pools/0/agents"
    script.shape("POST", f"{SETS}/27/generatejitconfig", "jit_config")
    script.shape("GET", agents, "runners")
    script.answer("GET", f"{agents}/88", ScriptedAnswer(200))
    script.answer("DELETE", f"{agents}/88", ScriptedAnswer(204))
    runner = await scripted.register(SET, 27, name="remuda-3-i-0abc")
    assert (runner.runner_id, runner.config) == (88, SHAPES["jit_config"]["body"]["encodedJITConfig"])
    assert await scripted.find_runner(SET, name="remuda-3-i-0abc") == 88
    assert script.of("GET", agents)[0].query["agentName"] == "remuda-3-i-0abc"
    assert await scripted.deregister(SET, 88) is Deletion.DELETED
    script.shape("DELETE", f"{agents}/88", "error_job_still_running")
    assert await scripted.deregister(SET, 88) is Deletion.BUSY
    script.shape("DELETE", f"{agents}/88", "error_agent_not_found")
    assert await scripted.deregister(SET, 88) is Deletion.GONE
    # GitHub answers a DELETE of a runner that does not exist with 204.
    script.shape("GET", f"{agents}/88", "error_agent_not_found")
    script.answer("DELETE", f"{agents}/88", ScriptedAnswer(204))
    assert await scripted.deregister(SET, 88) is Deletion.GONE


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("error_agent_exists", Conflict),
        ("error_session_conflict", Conflict),
        ("error_set_exists", Conflict),
        ("error_job_still_running", Conflict),
        ("error_set_not_found", NotFound),
    ],
)
async def test_error_shapes(
    scripted: ScaleSetSource, script: ScriptedService, shape: str, expected: type[Exception]
) -> None:
    script.shape("POST", f"{SETS}/27/sessions", shape)
    with pytest.raises(expected, match=SHAPES[shape]["body"]["message"]):
        await scripted_session(scripted)


async def test_wrapped_error_is_recognised(scripted: ScaleSetSource, script: ScriptedService) -> None:
    """A gateway wraps the error of the service, as reported for cloudbase/garm."""
    inner = json.dumps(SHAPES["error_set_exists"]["body"])
    script.answer(
        "GET",
        SETS,
        ScriptedAnswer(200, SHAPES["scale_sets"]["body"]),
    )
    script.answer("POST", SETS, ScriptedAnswer(400, {"error": "Bad Request", "details": f"failed: {inner}"}))
    assert await scripted.create_set(SET) == 27


async def test_plain_text_error_is_shown_without_the_token(scripted: ScaleSetSource, script: ScriptedService) -> None:
    session = await scripted_session(scripted)
    text = b"no upstream for Authorization: Bearer queue-1, sorry"
    headers = {"content-type": "text/plain", "x-github-request-id": "80F6:38429C"}
    script.answer("GET", "/queue/message", ScriptedAnswer(503, text, headers))
    with pytest.raises(Unavailable, match="no upstream") as caught:
        await session.receive(last_message_id=0, capacity=5)
    assert "queue-1" not in caught.value.message
    assert "80F6:38429C" in caught.value.message
    assert "/queue/message" not in caught.value.message


async def test_rate_limit_is_reported(scripted: ScaleSetSource, script: ScriptedService) -> None:
    script.answer("GET", SETS, ScriptedAnswer(429, b"slow down", {"retry-after": "77"}))
    with pytest.raises(Throttled) as caught:
        await scripted.find_set(SET)
    assert caught.value.retry_after_s == 77


# Untrusted messages -------------------------------------------------------------------------------------------------


async def receive(scripted: ScaleSetSource, script: ScriptedService, body: Any) -> Any:
    script.answer("GET", "/queue/message", ScriptedAnswer(200, body))
    return await (await scripted_session(scripted)).receive(last_message_id=0, capacity=5)


def message_with(**changed: Any) -> dict[str, Any]:
    return {**SHAPES["message_assigned"]["body"], **changed}


async def test_unknown_job_messages_are_reported_and_left_out(
    scripted: ScaleSetSource, script: ScriptedService, event_log: RecordedEvents
) -> None:
    [known] = json.loads(SHAPES["message_assigned"]["body"]["body"])
    items = [{"messageType": "JobTeleported"}, 5, {"messageType": "JobAssigned"}, known]
    message = await receive(scripted, script, message_with(body=json.dumps(items)))
    assert [event.job_id for event in message.events] == [known["jobId"]]
    assert [action for action, _, _ in event_log.events] == ["message-ignored"] * 3
    assert "JobTeleported" in event_log.events[0][1]
    assert event_log.events[0][2] == {"runner_set": "large", "message_id": message.message_id}


@pytest.mark.parametrize(
    "changed",
    [
        {"body": "{not json"},
        {"body": '{"messageType": "JobAssigned"}'},
        {"body": 5},
        {"body": "[" * 100_000},
        {"messageType": "SomethingElse"},
    ],
)
async def test_message_with_a_bad_body_can_be_acknowledged(
    scripted: ScaleSetSource, script: ScriptedService, event_log: RecordedEvents, changed: dict[str, Any]
) -> None:
    message = await receive(scripted, script, message_with(**changed))
    assert message.message_id == SHAPES["message_assigned"]["body"]["messageId"]
    assert message.events == ()
    assert message.statistics.assigned == 1
    assert len(event_log.events) == 1


async def test_message_without_events_updates_the_statistics(
    scripted: ScaleSetSource, script: ScriptedService, event_log: RecordedEvents
) -> None:
    message = await receive(scripted, script, message_with(body=""))
    assert (message.events, message.statistics.assigned) == ((), 1)
    assert event_log.events == []


async def test_missing_statistics_are_replaced_by_the_latest(
    scripted: ScaleSetSource, script: ScriptedService, event_log: RecordedEvents
) -> None:
    message = await receive(scripted, script, message_with(statistics=None))
    assert message.statistics == DemandStatistics(assigned=2, running=1)
    assert len(event_log.events) == 1


async def test_hostile_fields_become_harmless(scripted: ScaleSetSource, script: ScriptedService) -> None:
    event = {
        "messageType": "JobStarted",
        "jobId": "x" * 100_000,
        "runnerRequestId": -5,
        "ownerName": "acme/../..",
        "repositoryName": "widgets",
        "workflowRunId": "17",
        "eventName": ["push"],
        "requestLabels": [1, "a\u001b[31m", *("b" for _ in range(100))],
        "queueTime": "9999-99-99",
        "runnerId": 2**80,
        "runnerName": "\ud800",
    }
    counts = {"totalAssignedJobs": -7, "totalRunningJobs": 10**30, "totalBusyRunners": "many"}
    message = await receive(scripted, script, message_with(body=json.dumps([event]), statistics=counts))
    [found] = message.events
    assert (len(found.job_id), found.request_id, found.repository, found.run_id) == (300, 0, "", "")
    assert (found.event, found.queued_at, found.runner_id, len(found.labels)) == ("", None, 0, 20)
    assert all(label.isprintable() for label in found.labels)
    assert found.runner_name.isprintable()
    assert (message.statistics.assigned, message.statistics.running, message.statistics.busy) == (0, 1_000_000, 0)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"{", {"messageId": 0}, {"messageId": "7"}, {"messageId": 2**63}]
)
async def test_unusable_message_is_unavailable(scripted: ScaleSetSource, script: ScriptedService, body: Any) -> None:
    with pytest.raises(Unavailable):
        await receive(scripted, script, body)


@pytest.mark.parametrize(
    "changed",
    [
        {"sessionId": "../../other"},
        {"sessionId": None},
        {"messageQueueUrl": "ftp://example.org/"},
        {"messageQueueUrl": "http://user:password@example.org/"},
        {"messageQueueUrl": "http://[::1"},
        {"messageQueueUrl": 5},
        {"messageQueueAccessToken": "two\nlines"},
        {"messageQueueAccessToken": ""},
    ],
)
async def test_unusable_session_is_unavailable(
    scripted: ScaleSetSource, script: ScriptedService, changed: dict[str, Any]
) -> None:
    script.shape("POST", f"{SETS}/27/sessions", "session", **changed)
    with pytest.raises(Unavailable) as caught:
        await scripted_session(scripted)
    assert "password" not in caught.value.message


@pytest.mark.parametrize(
    "changed", [{"token": "no.jwt"}, {"token": "a.!!!.c"}, {"token": "a.e30.c"}, {"token": None}, {"url": "https://"}]
)
async def test_unusable_connection_is_unavailable(
    scripted: ScaleSetSource, script: ScriptedService, clock: AdjustableClock, changed: dict[str, Any]
) -> None:
    known = {"url": f"{script.url}/tenant/", "token": token_until(clock.now())}
    script.answer("POST", "/actions/runner-registration", ScriptedAnswer(200, {**known, **changed}))
    with pytest.raises(Unavailable):
        await scripted.find_set(SET)


@pytest.mark.parametrize("url", ["http://p.example/", "https://p.example:0/", "https://me@p.example/", "https:///x"])
async def test_tokens_are_never_sent_unencrypted_to_another_service(clock: AdjustableClock, url: str) -> None:
    """With an API that is reached over TLS, the service must be, too."""
    body = {"url": url, "token": token_until(clock.now() + timedelta(hours=1))}
    with pytest.raises(Unavailable, match="address"):
        parse_service_access(body, now=clock.now(), is_local=False)
    assert parse_service_access({**body, "url": "https://p.example/x"}, now=clock.now(), is_local=False).url


async def test_capacity_must_be_above_zero(scripted: ScaleSetSource, script: ScriptedService) -> None:
    session = await scripted_session(scripted)
    with pytest.raises(ValueError, match="capacity"):
        await session.receive(last_message_id=0, capacity=0)
    assert script.of("GET", "/queue/message") == []


async def test_silent_service_is_a_timeout(scripted: ScaleSetSource, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
        ended.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    session = await scripted_session(scripted)
    port = server.sockets[0].getsockname()[1]
    session._access = replace(session._access, queue_url=f"http://127.0.0.1:{port}/m")
    monkeypatch.setattr(scale_sets, "POLL_TIMEOUT_S", 0.2)
    with pytest.raises(TimedOut, match="GET message"):
        await session.receive(last_message_id=0, capacity=5)
    await asyncio.wait_for(ended.wait(), LONG_S)
    server.close()


def test_polls_wait_longer_than_github() -> None:
    assert scale_sets.POLL_TIMEOUT_S > 55


# Tokens -------------------------------------------------------------------------------------------------------------


async def test_admin_token_is_cached_and_renewed_before_it_expires(
    scripted: ScaleSetSource, script: ScriptedService, clock: AdjustableClock
) -> None:
    await asyncio.gather(*(scripted.find_set(SET) for _ in range(5)))
    assert len(script.of("POST", "/actions/runner-registration")) == 1
    clock.ahead_s = 3600 - 61
    await scripted.find_set(SET)
    assert len(script.of("POST", "/actions/runner-registration")) == 1
    clock.ahead_s = 3600 - 58
    await scripted.find_set(SET)
    assert len(script.of("POST", "/actions/runner-registration")) == 2


async def test_rejected_admin_token_is_replaced_once(scripted: ScaleSetSource, script: ScriptedService) -> None:
    found = ScriptedAnswer(200, SHAPES["scale_sets"]["body"])
    script.answer("GET", SETS, ScriptedAnswer(401, b"expired"), found)
    assert await scripted.find_set(SET) == 27
    assert len(script.of("POST", "/actions/runner-registration")) == 2
    script.answer("GET", SETS, ScriptedAnswer(401, b"expired"))
    with pytest.raises(UserError) as caught:
        await scripted.find_set(SET)
    assert caught.value.field == "github-token"
    assert len(script.of("POST", "/actions/runner-registration")) == 3


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_registration_token_may_be_unknown_for_a_moment(
    scripted: ScaleSetSource, script: ScriptedService, clock: AdjustableClock, status: int
) -> None:
    good = {"url": f"{script.url}/tenant/", "token": token_until(clock.now() + timedelta(hours=1))}
    path = "/actions/runner-registration"
    script.answer(
        "POST",
        path,
        ScriptedAnswer(status, {"message": "Bad"}),
        ScriptedAnswer(status, {"message": "Bad"}),
        ScriptedAnswer(200, good),
    )
    assert await scripted.find_set(SET) == 27
    script.answer("POST", path, ScriptedAnswer(status, {"message": "token AREGISTRATION is bad"}))
    clock.ahead_s = 3600
    with pytest.raises(UserError) as caught:
        await scripted.find_set(SET)
    assert "AREGISTRATION" not in caught.value.message
    assert len(script.of("POST", path)) == 3 + MAX_ATTEMPTS


async def test_expired_queue_token_is_renewed_once(scripted: ScaleSetSource, script: ScriptedService) -> None:
    session = await scripted_session(scripted)
    script.answer("GET", "/queue/message", ScriptedAnswer(401, b"expired"), ScriptedAnswer(202))
    renewed = {"messageQueueUrl": f"{script.url}/queue/message", "messageQueueAccessToken": "queue-2"}
    script.shape("PATCH", f"{SETS}/27/sessions/{session.session_id}", "session", **renewed)
    assert await session.receive(last_message_id=0, capacity=5) is None
    assert [each.headers["authorization"] for each in script.of("GET", "/queue/message")] == [
        "Bearer queue-1",
        "Bearer queue-2",
    ]
    script.answer("GET", "/queue/message", ScriptedAnswer(401, b"expired"))
    with pytest.raises(Unavailable, match="token"):
        await session.receive(last_message_id=0, capacity=5)
    assert len(script.of("PATCH", f"{SETS}/27/sessions/{session.session_id}")) == 2


async def test_concurrent_calls_renew_the_queue_token_together(
    scripted: ScaleSetSource, script: ScriptedService
) -> None:
    session = await scripted_session(scripted)
    path = f"{SETS}/27/sessions/{session.session_id}"
    renewed = {"messageQueueUrl": f"{script.url}/queue/message", "messageQueueAccessToken": "queue-2"}
    script.shape("PATCH", path, "session", **renewed)
    script.answer("GET", "/queue/message", ScriptedAnswer(401), ScriptedAnswer(202))
    script.answer("DELETE", "/queue/message/5", ScriptedAnswer(401), ScriptedAnswer(204))
    await asyncio.gather(session.receive(last_message_id=0, capacity=5), session.acknowledge(5))
    assert len(script.of("PATCH", path)) == 1


async def test_session_that_is_gone_cannot_be_renewed(scripted: ScaleSetSource, script: ScriptedService) -> None:
    session = await scripted_session(scripted)
    script.answer("GET", "/queue/message", ScriptedAnswer(401, b"expired"))
    script.answer("PATCH", f"{SETS}/27/sessions/{session.session_id}", ScriptedAnswer(404, b"gone"))
    with pytest.raises(NotFound):
        await session.receive(last_message_id=0, capacity=5)


#: Answer to a session that has ended by inactivity (actions-runner-controller#4285).
EXPIRED_SESSION = ScriptedAnswer(
    400,
    {
        "typeName": "GitHub.Actions.Runtime.WebApi.RunnerScaleSetSessionExpiredException, GitHub.Actions.Runtime",
        "message": "The session identifier 5d1c is not valid.",
    },
)
#: Answer of the broker to an invalid session of a runner (actions/runner#4556).
INVALID_SESSION = ScriptedAnswer(
    400, {"source": "actions-broker-listener", "errorKind": "RunnerSessionInvalid", "statusCode": 400}
)


@pytest.mark.parametrize("answer", [EXPIRED_SESSION, INVALID_SESSION, ScriptedAnswer(403), ScriptedAnswer(500)])
async def test_session_that_cannot_be_taken_over_is_replaced(
    scripted: ScaleSetSource, script: ScriptedService, answer: ScriptedAnswer
) -> None:
    """The id of a lapsed session is recorded: if it could not be replaced, the set would never be served again."""
    script.answer("PATCH", f"{SETS}/27/sessions/5d1c", answer)
    session = await scripted.open_session(SET, 27, owner="listener", session_id="5d1c")
    assert session.session_id == SHAPES["session"]["body"]["sessionId"]


async def test_missing_counts_of_a_session_are_not_taken_for_zero(
    scripted: ScaleSetSource, script: ScriptedService
) -> None:
    """In types.go, the statistics of a session are optional."""
    access = {"messageQueueUrl": f"{script.url}/queue/message", "messageQueueAccessToken": "queue-2"}
    script.shape("PATCH", f"{SETS}/27/sessions/5d1c", "session", sessionId="5d1c", statistics=None, **access)
    session = await scripted.open_session(SET, 27, owner="listener", session_id="5d1c")
    assert (session.session_id, session.statistics) == ("5d1c", None)


async def test_session_that_may_exist_is_not_replaced(scripted: ScaleSetSource, script: ScriptedService) -> None:
    script.answer("PATCH", f"{SETS}/27/sessions/5d1c", ScriptedAnswer(429, headers={"retry-after": "60"}))
    with pytest.raises(Throttled):
        await scripted.open_session(SET, 27, owner="listener", session_id="5d1c")
    assert script.of("POST", f"{SETS}/27/sessions") == []


async def test_expired_session_is_gone(scripted: ScaleSetSource, script: ScriptedService) -> None:
    session = await scripted_session(scripted)
    path = f"{SETS}/27/sessions/{session.session_id}"
    script.answer("GET", "/queue/message", EXPIRED_SESSION)
    with pytest.raises(NotFound, match="not valid"):
        await session.receive(last_message_id=0, capacity=5)
    assert len(script.of("GET", "/queue/message")) == 1
    script.answer("DELETE", "/queue/message/5", EXPIRED_SESSION)
    await session.acknowledge(5)
    script.answer("DELETE", path, EXPIRED_SESSION)
    await session.close()


async def test_temporary_failures_are_retried_unless_the_call_may_have_an_effect(
    scripted: ScaleSetSource, script: ScriptedService, calls: CallCounter
) -> None:
    script.answer(
        "GET", SETS, ScriptedAnswer(502), ScriptedAnswer(503), ScriptedAnswer(200, SHAPES["scale_sets"]["body"])
    )
    assert await scripted.find_set(SET) == 27
    assert calls.outcomes()[SERVICE, "GET runnerscalesets"] == (1, 2)
    script.answer("POST", f"{SETS}/27/sessions", ScriptedAnswer(502))
    with pytest.raises(Unavailable):
        await scripted_session(scripted)
    assert len(script.of("POST", f"{SETS}/27/sessions")) == 1


async def test_labels_that_github_ignored_are_an_error(scripted: ScaleSetSource, script: ScriptedService) -> None:
    """GitHub Enterprise Server before 3.21 keeps one label unless a feature is enabled."""
    script.shape("POST", SETS, "scale_set", labels=[{"type": "System", "name": "large"}])
    with pytest.raises(UserError, match="has the labels large on GitHub"):
        await scripted.create_set(SET)


@pytest.mark.parametrize("labels", [{}, {"labels": None}, {"labels": []}])
async def test_labels_that_github_does_not_list_are_unknown(
    scripted: ScaleSetSource, script: ScriptedService, labels: dict[str, Any]
) -> None:
    """The answers of actions/scaleset, client_test.go."""
    found = {"id": 27, "name": SET.name, **labels}
    script.answer("GET", SETS, ScriptedAnswer(200, {"count": 1, "value": [found]}))
    script.answer("POST", SETS, ScriptedAnswer(200, found))
    assert await scripted.find_set(SET) == await scripted.create_set(SET) == 27


async def test_registration_token_without_expiry_opens_the_service(
    scripted: ScaleSetSource, script: ScriptedService
) -> None:
    path = f"/repos/{REPO}/actions/runners/registration-token"
    script.answer("POST", path, ScriptedAnswer(201, {}), ScriptedAnswer(201, {"token": "AREGISTRATION"}))
    with pytest.raises(Unavailable, match="registration-token is missing or invalid"):
        await scripted.find_set(SET)
    assert await scripted.find_set(SET) == 27
    [connect] = script.of("POST", "/actions/runner-registration")
    assert connect.headers["authorization"] == "RemoteAuth AREGISTRATION"


async def test_jobs_that_were_offered_before_the_session_are_offered_again(
    scripted: ScaleSetSource, script: ScriptedService
) -> None:
    counts = {**SHAPES["session"]["body"]["statistics"], "totalAvailableJobs": 1}
    session = {"messageQueueUrl": f"{script.url}/queue/message", "messageQueueAccessToken": "q", "statistics": counts}
    script.shape("POST", f"{SETS}/27/sessions", "session", **session)
    script.shape("GET", f"{SETS}/27/acquirablejobs", "acquirable")
    opened = await scripted_session(scripted)
    message = await opened.receive(last_message_id=40, capacity=5)
    assert message is not None
    assert (message.message_id, message.statistics.available) == (40, 1)
    [event] = message.events
    assert (event.kind, event.request_id, event.job_id) == (JobEventKind.AVAILABLE, 4242, "4242")
    await opened.acknowledge(40)
    script.answer("GET", "/queue/message", ScriptedAnswer(202))
    assert await opened.receive(last_message_id=40, capacity=5) is None


# The local GitHub: its responses have the shapes, and its faults -----------------------------------------------------


@dataclass
class LocalScaleSets:
    admin: FakeGitHubClient
    endpoint: Endpoint
    source: ScaleSetSource
    runner_set: RunnerSet

    async def session(self) -> tuple[int, ScaleSetSession]:
        """The set's id, and a session that has announced its capacity."""
        number = await self.source.create_set(self.runner_set)
        session = await self.source.open_session(self.runner_set, number, owner="listener")
        assert await session.receive(last_message_id=0, capacity=5) is None
        return number, session

    async def queue(self) -> None:
        await self.admin.queue_job(repo=REPO, run_id=17123456789, labels=self.runner_set.labels)


Connect = Callable[..., ScaleSetSource]


@pytest.fixture
async def connect(endpoint: Endpoint, clock: AdjustableClock, calls: CallCounter) -> AsyncIterator[Connect]:
    opened: list[Any] = []

    def connect(path: str = "", **credential: Any) -> ScaleSetSource:
        given = credential or {"token": endpoint.token}
        github = GitHubClient(api_url=endpoint.url + path, clock=clock, ids=SystemIds(), calls=calls, **given)
        source = ScaleSetSource(github=github, clock=clock, ids=SystemIds(), calls=calls)
        opened.extend([source, github])
        return source

    yield connect
    for each in opened:
        await each.close()


@pytest.fixture
async def local(endpoint: Endpoint, connect: Connect) -> AsyncIterator[LocalScaleSets]:
    admin = FakeGitHubClient(endpoint.url, endpoint.token)
    await admin.clear_faults()
    await admin.change_settings(message_poll_s=0.05, jobs_must_be_acquired=False, queue_token_life_s=3600)
    name = f"local-{next(_numbers)}"
    runner_set = RunnerSet(name=name, labels=("self-hosted", name), resource_class="x", scope=REPO, max=5)
    yield LocalScaleSets(admin, endpoint, connect(), runner_set)
    await admin.clear_faults()
    await admin.aclose()


async def test_app_and_organisation(local: LocalScaleSets, connect: Connect, clock: AdjustableClock) -> None:
    await local.admin.change_settings(
        app_id=APP_ID, app_key=PUBLIC, app_owners=["acme"], runner_groups=["warm"], admin_token_life_s=3600
    )
    source = connect(auth=AppAuth(app_id=APP_ID, key=pem(KEY), clock=clock))
    runner_set = replace(local.runner_set, scope="acme", runner_group="Warm")
    assert await source.create_set(runner_set) == await source.create_set(runner_set)
    with pytest.raises(UserError, match="no runner group 'cold'"):
        await source.create_set(replace(runner_set, runner_group="cold"))


async def test_runner_group_that_was_created_again_has_its_new_id(
    local: LocalScaleSets, connect: Connect, clock: AdjustableClock
) -> None:
    settings = {"app_id": APP_ID, "app_key": PUBLIC, "app_owners": ["acme"]}
    await local.admin.change_settings(**settings, runner_groups=["again", "other"])
    source = connect(auth=AppAuth(app_id=APP_ID, key=pem(KEY), clock=clock))
    runner_set = replace(local.runner_set, scope="acme", runner_group="again")
    first = await source.create_set(runner_set)
    # The ids are those of the order.
    await local.admin.change_settings(runner_groups=["other", "again"])
    assert await source.create_set(runner_set) != first
    assert await source.delete_set(replace(runner_set, runner_group="other"))
    await local.admin.change_settings(runner_groups=["other"])
    with pytest.raises(UserError, match="no runner group 'again'"):
        await source.delete_set(runner_set)


@pytest.mark.parametrize("path", ["/api/v3", "/api/v3/"])
async def test_enterprise_server(local: LocalScaleSets, connect: Connect, path: str) -> None:
    assert await connect(path).create_set(local.runner_set) == await local.source.create_set(local.runner_set)


async def test_bad_credential_is_a_user_error(local: LocalScaleSets, connect: Connect) -> None:
    with pytest.raises(UserError) as caught:
        await connect(token="github_pat_wrong").create_set(local.runner_set)
    assert caught.value.field == "github-token"
    assert "github_pat_wrong" not in caught.value.message
    reader = await local.admin.issue_token(permissions={"administration": "read"})
    with pytest.raises(UserError):
        await connect(token=reader).create_set(local.runner_set)


async def test_lost_registration_is_replaced(local: LocalScaleSets, calls: CallCounter) -> None:
    number, _ = await local.session()
    await local.admin.set_fault("lost_answer", operation="scale-set.jitconfig")
    runner = await local.source.register(local.runner_set, number, name=f"{local.runner_set.name}-1")
    assert await local.source.find_runner(local.runner_set, name=f"{local.runner_set.name}-1") == runner.runner_id
    counts = calls.by_service()[SERVICE]
    assert (counts["POST generatejitconfig"], counts["DELETE agents"]) == (3, 1)


async def test_lost_creation_of_a_set_is_found(local: LocalScaleSets) -> None:
    await local.admin.set_fault("lost_answer", operation="scale-set.create")
    number = await local.source.create_set(local.runner_set)
    assert [each.id for each in await local.admin.scale_sets() if each.name == local.runner_set.name] == [number]


async def test_queue_token_expires_during_a_session(local: LocalScaleSets, calls: CallCounter) -> None:
    _, session = await local.session()
    await local.admin.set_fault("status", operation="scale-set.poll", status=401)
    await local.queue()
    message = await session.receive(last_message_id=0, capacity=5)
    assert message is not None
    assert calls.by_service()[SERVICE]["PATCH sessions"] == 1


async def test_admin_token_expires_on_the_server(local: LocalScaleSets) -> None:
    await local.source.create_set(local.runner_set)
    await local.admin.set_fault("status", operation="scale-set.find", status=401)
    assert await local.source.create_set(local.runner_set)


async def test_empty_message_is_unavailable_and_comes_later(local: LocalScaleSets) -> None:
    _, session = await local.session()
    await local.queue()
    await local.admin.set_fault("bad_message")
    with pytest.raises(Unavailable):
        await session.receive(last_message_id=0, capacity=5)
    assert await session.receive(last_message_id=0, capacity=5) is not None


async def test_poison_message_comes_again_until_it_is_replaced(local: LocalScaleSets) -> None:
    _, session = await local.session()
    poison = {"messageId": 5, "messageType": "RunnerScaleSetJobMessages", "body": "{", "statistics": {}}
    await local.admin.set_fault("bad_message", message=json.dumps(poison))
    message = await session.receive(last_message_id=0, capacity=5)
    assert message is not None
    assert (message.message_id, message.events) == (5, ())
    await session.acknowledge(5)


async def test_session_of_another_process_ends_by_inactivity(local: LocalScaleSets) -> None:
    number = await local.source.create_set(local.runner_set)
    await local.admin.open_session(number, owner="killed")
    with pytest.raises(Conflict, match="killed"):
        await local.source.open_session(local.runner_set, number, owner="listener")
    await local.admin.end_session(number)
    assert await local.source.open_session(local.runner_set, number, owner="listener")


async def test_offers_of_an_earlier_session_are_found_by_the_next(local: LocalScaleSets) -> None:
    await local.admin.change_settings(jobs_must_be_acquired=True)
    number, session = await local.session()
    await local.queue()
    message = await session.receive(last_message_id=0, capacity=5)
    assert message is not None
    await session.acknowledge(message.message_id)
    await session.close()  # the offer is acknowledged, but was not acquired
    session = await local.source.open_session(local.runner_set, number, owner="listener")
    again = await session.receive(last_message_id=message.message_id, capacity=5)
    assert again is not None
    request_id = again.events[0].request_id
    assert request_id == message.events[0].request_id
    assert await session.acquire([request_id]) == [request_id]


async def fetched(local: LocalScaleSets) -> dict[str, Any]:
    """Responses of the local GitHub by the name of their shape."""
    url, found = local.endpoint.url, {}
    headers = {"authorization": f"Bearer {local.endpoint.token}"}
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=LONG_S) as http:

        async def call(method: str, target: str, *, token: str, body: Any = None, **more: str) -> httpx.Response:
            given = {"authorization": f"Bearer {token}", **more}
            params = {} if "accept" in more else {"api-version": "6.0-preview"}
            separator = "&" if urlsplit(target).query else "?"
            query = separator + "&".join(f"{key}={value}" for key, value in params.items()) if params else ""
            return await http.request(method, target + query, json=body, headers=given)

        path = f"/repos/{REPO}/actions/runners/registration-token"
        registration = (await http.post(path, headers=headers)).json()["token"]
        answer = await http.post(
            "/actions/runner-registration",
            json={"url": f"{url}/{REPO}", "runner_event": "register"},
            headers={"authorization": f"RemoteAuth {registration}"},
        )
        found["connection"] = answer
        base, admin = answer.json()["url"], answer.json()["token"]
        sets, agents = f"{base}_apis/runtime/runnerscalesets", f"{base}_apis/distributedtask/pools/0/agents"
        found["runner_groups"] = await call("GET", f"{base}_apis/runtime/runnergroups/?groupName=default", token=admin)
        labels = [{"name": label, "type": "System"} for label in local.runner_set.labels]
        body = {"name": local.runner_set.name, "runnerGroupId": 1, "labels": labels}
        found["scale_set"] = await call("POST", sets, token=admin, body=body)
        found["error_set_exists"] = await call("POST", sets, token=admin, body=body)
        found["scale_sets"] = await call("GET", f"{sets}?name={local.runner_set.name}", token=admin)
        one = f"{sets}/{document(found['scale_set'])['id']}"
        found["error_set_not_found"] = await call("GET", f"{sets}/999999", token=admin)
        found["session"] = await call("POST", f"{one}/sessions", token=admin, body={"ownerName": "listener"})
        found["error_session_conflict"] = await call("POST", f"{one}/sessions", token=admin, body={"ownerName": "x"})
        session = document(found["session"])
        queue, token = session["messageQueueUrl"], session["messageQueueAccessToken"]
        accept = {"accept": "application/json; api-version=6.0-preview", "x-scalesetmaxcapacity": "5"}

        async def poll() -> httpx.Response:
            answer = await call("GET", queue, token=token, **accept)
            number = document(answer)["messageId"]
            parts = urlsplit(queue)
            target = f"{parts.scheme}://{parts.netloc}{parts.path}/{number}?{parts.query}"
            assert (await call("DELETE", target, token=token, **accept)).status_code == 204
            return answer

        assert (await call("GET", queue, token=token, **accept)).status_code == 202
        await local.queue()
        found["message_assigned"] = await poll()
        name = f"{local.runner_set.name}-1"
        found["jit_config"] = await call("POST", f"{one}/generatejitconfig", token=admin, body={"name": name})
        found["error_agent_exists"] = await call("POST", f"{one}/generatejitconfig", token=admin, body={"name": name})
        runner = document(found["jit_config"])
        found["runner"] = await call("GET", f"{agents}/{runner['runner']['id']}", token=admin)
        found["runners"] = await call("GET", f"{agents}?agentName={name}", token=admin)
        found["error_agent_not_found"] = await call("GET", f"{agents}/999999", token=admin)
        secret = secret_of(json.loads(unpack(runner["encodedJITConfig"])[".credentials_rsaparams"]))
        runner_headers = {"authorization": f"Bearer {secret}"}
        answer = await http.post("/_runner/sessions", json={"version": "2.336.0"}, headers=runner_headers)
        runner_path = f"/_runner/sessions/{answer.json()['session']}"
        job = (await http.get(f"{runner_path}/message?wait={LONG_S}", headers=runner_headers)).json()["job_id"]
        await http.post(f"{runner_path}/jobs/{job}/acknowledge", headers=runner_headers)
        found["message_started"] = await poll()
        found["error_job_still_running"] = await call("DELETE", f"{agents}/{runner['runner']['id']}", token=admin)
        body = {"conclusion": "success"}
        await http.post(f"{runner_path}/jobs/{job}/complete", json=body, headers=runner_headers)
        found["message_completed"] = await poll()
        await local.admin.change_settings(jobs_must_be_acquired=True)
        await local.queue()
        found["message_available"] = await poll()
        found["acquirable"] = await call("GET", f"{one}/acquirablejobs", token=admin)
        number = document(found["acquirable"])["value"][0]["runnerRequestId"]
        found["acquired"] = await call("POST", f"{one}/acquirejobs", token=token, body=[number])
    return found


def document(response: httpx.Response) -> Any:
    return json.loads(response.content.removeprefix(codecs.BOM_UTF8))


async def test_responses_of_the_local_github_have_the_shapes(local: LocalScaleSets) -> None:
    found = await fetched(local)
    assert set(found) == set(SHAPES)
    for name, response in found.items():
        shape = SHAPES[name]
        assert response.status_code == shape["status"], name
        check_shape(shape["body"], document(response), name)
        if name != "connection":
            assert response.content.startswith(codecs.BOM_UTF8), name


def check_shape(shape: Any, value: Any, where: str) -> None:
    """Check that a value has the fields of the shape, with values of the same types."""
    if where.startswith("message_") and where.endswith(".body"):
        shape, value = json.loads(shape), json.loads(value)
    assert type(value) is type(shape), where
    if isinstance(shape, dict):
        assert set(shape) <= set(value), (where, set(shape) - set(value))
        for name, each in shape.items():
            check_shape(each, value[name], f"{where}.{name}")
    elif isinstance(shape, list):
        assert bool(value) is bool(shape), where
        for each in value:
            check_shape(shape[0], each, f"{where}[]")
    elif where.endswith(("Time", "createdOn")):
        assert datetime.fromisoformat(value).tzinfo is not None, where
        assert value.startswith("0001-") is shape.startswith("0001-"), where
    elif where.endswith(("messageType", "result")):
        assert value == shape, where
    elif where.endswith("typeName"):
        assert value.partition(",")[0].rpartition(".")[2] == shape.partition(",")[0].rpartition(".")[2], where
