"""The fake GitHub's Actions service and workflow runs over HTTP: what it refuses, and what its responses look like."""

from __future__ import annotations

import asyncio
import base64
import codecs
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from remuda.fake_github.app_state import AppState
from remuda.fake_github.fake_runner.credentials import unpack
from remuda.fake_github.server import build_app, open_app_state
from remuda.fake_github.state import Conclusion
from tests.support.records import LONG_S

URL = "http://github.test"
REPO = "acme/widgets"
LABELS = ["self-hosted", "remuda"]
VERSION = {"api-version": "6.0-preview"}
SETS = "_apis/runtime/runnerscalesets"
AGENTS = "_apis/distributedtask/pools/0/agents"


class CountedClock:
    def __init__(self) -> None:
        self.at = 1_900_000_000.0
        self._numbers = itertools.count(1)

    def now(self) -> float:
        return self.at

    def token(self, prefix: str) -> str:
        return f"{prefix}{next(self._numbers)}"


class ServiceWorld:
    def __init__(self, http: httpx.AsyncClient, app: AppState, clock: CountedClock) -> None:
        self.http = http
        self.app = app
        self.core = app.core
        self.clock = clock
        self.service = ""
        self.token = ""

    async def rest(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return await self.http.request(method, path, json=body, headers={"authorization": "Bearer administrator"})

    async def settings(self, **changed: Any) -> None:
        assert (await self.rest("PATCH", "/_admin/settings", changed)).status_code == 200

    async def registration_token(self, scope: str = f"repos/{REPO}") -> str:
        answer = await self.rest("POST", f"/{scope}/actions/runners/registration-token")
        return str(answer.json()["token"])

    async def connect(self, **changed: Any) -> httpx.Response:
        token = changed.pop("token", None) or await self.registration_token()
        body = {"url": f"{URL}/{REPO}", "runner_event": "register", **changed.pop("body", {})}
        headers = {"authorization": changed.pop("scheme", "RemoteAuth") + f" {token}"}
        answer = await self.http.post("/actions/runner-registration", json=body, headers=headers)
        if answer.status_code == 200:
            self.service, self.token = answer.json()["url"], answer.json()["token"]
        return answer

    async def call(
        self, method: str, path: str, body: Any = None, *, params: Any = VERSION, token: str = ""
    ) -> httpx.Response:
        headers = {"authorization": f"Bearer {token or self.token}"}
        return await self.http.request(method, self.service + path, json=body, params=params, headers=headers)

    async def create(self, name: str = "large") -> int:
        labels = [{"name": label, "type": "System"} for label in LABELS]
        body = {"name": name, "runnerGroupId": 1, "labels": labels, "RunnerSetting": {"disableUpdate": True}}
        answer = await self.call("POST", SETS, body)
        assert answer.status_code == 200, answer.text
        return int(document(answer)["id"])

    async def session(self, number: int) -> dict[str, Any]:
        answer = await self.call("POST", f"{SETS}/{number}/sessions", {"ownerName": "listener"})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = document(answer)
        return found

    async def poll(
        self, session: dict[str, Any], *, last: int = 0, capacity: str | None = "5", **headers: str
    ) -> httpx.Response:
        given = {
            "authorization": f"Bearer {session['messageQueueAccessToken']}",
            "accept": "application/json; api-version=6.0-preview",
            **({} if capacity is None else {"x-scalesetmaxcapacity": capacity}),
            **headers,
        }
        url = session["messageQueueUrl"] + (f"&lastMessageId={last}" if last else "")
        return await self.http.get(url, headers=given)

    async def begin_poll(self, session: dict[str, Any]) -> asyncio.Task[httpx.Response]:
        """A poll that has announced its capacity and waits for a message."""
        version = (await self.rest("GET", "/_admin/scale-sets")).json()["version"]
        poll = asyncio.create_task(self.poll(session))
        changed = (await self.rest("GET", f"/_admin/scale-sets?since={version}&wait={LONG_S}")).json()
        assert changed["scale_sets"][0]["capacity"] == 5
        return poll

    async def queue(self, **changed: Any) -> dict[str, Any]:
        body = {"repo": REPO, "run_id": 7, "labels": LABELS, "steps": [{"run": "true"}], **changed}
        answer = await self.rest("POST", "/_admin/jobs", body)
        assert answer.status_code == 201, answer.text
        found: dict[str, Any] = answer.json()
        return found


def document(answer: httpx.Response) -> Any:
    """The JSON of a response, which begins with a byte order mark."""
    assert answer.content.startswith(codecs.BOM_UTF8)
    return json.loads(answer.content.removeprefix(codecs.BOM_UTF8))


def exception(answer: httpx.Response) -> tuple[int, str]:
    name = document(answer)["typeName"].partition(",")[0]
    return answer.status_code, name.rpartition(".")[2]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[ServiceWorld]:
    clock = CountedClock()
    app = open_app_state(tmp_path, clock=clock)
    app.core.registry.keep_access("administrator")
    app.commit_changes()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(build_app(app)), base_url=URL) as http:
        world = ServiceWorld(http, app, clock)
        await world.settings(message_poll_s=0.01)
        await world.connect()
        yield world


async def test_registration_exchanges_a_registration_token(world: ServiceWorld) -> None:
    answer = (await world.connect()).json()
    claims = json.loads(base64.urlsafe_b64decode(answer["token"].split(".")[1] + "=="))
    assert claims["exp"] == world.clock.at + 3600
    assert answer["url"].startswith(URL)


async def test_registration_refuses_other_tokens_and_scopes(world: ServiceWorld) -> None:
    removal = (await world.rest("POST", f"/repos/{REPO}/actions/runners/remove-token")).json()["token"]
    for changed in (
        {"token": "unknown"},
        {"token": removal},
        {"token": await world.registration_token("orgs/acme")},
        {"scheme": "Bearer"},
        {"body": {"url": f"{URL}/acme/other"}},
    ):
        assert (await world.connect(**changed)).status_code == 404, changed
    assert (await world.connect(body={"runner_event": "remove"})).status_code == 422
    token = await world.registration_token()
    world.clock.at += 3601
    assert (await world.connect(token=token)).status_code == 404


async def test_service_refuses_expired_and_foreign_tokens_in_plain_text(world: ServiceWorld) -> None:
    service = world.service
    await world.connect(token=await world.registration_token("orgs/acme"), body={"url": f"{URL}/acme"})
    foreign = await world.http.get(service + SETS, params=VERSION, headers={"authorization": f"Bearer {world.token}"})
    assert foreign.status_code == 401
    world.clock.at += 3601
    answer = await world.call("GET", SETS)
    assert answer.status_code == 401
    assert answer.headers["content-type"].startswith("text/plain")


async def test_service_needs_a_version_and_json(world: ServiceWorld) -> None:
    for version, name in (
        ({}, "VssVersionNotSpecifiedException"),
        ({"api-version": "6.0"}, "VssInvalidPreviewVersionException"),
        ({"api-version": "7.1-preview"}, "VssVersionOutOfRangeException"),
        ({"api-version": "5.1-preview.1"}, "VssVersionOutOfRangeException"),
    ):
        assert exception(await world.call("GET", SETS, params=version)) == (400, name)
    headers = {"authorization": f"Bearer {world.token}"}
    answer = await world.http.post(world.service + SETS, content=b"{}", params=VERSION, headers=headers)
    assert answer.status_code == 415
    assert exception(await world.call("POST", SETS, {"name": "large"})) == (400, "VssPropertyValidationException")


async def test_service_refuses_requests_without_a_user_agent(world: ServiceWorld) -> None:
    """GitHub's client sends one with every request."""
    number = await world.create()
    session = await world.session(number)
    await world.call("DELETE", f"{SETS}/{number}/sessions/{session['sessionId']}")
    del world.http.headers["user-agent"]
    for method, path in (("GET", SETS), ("POST", f"{SETS}/{number}/sessions")):
        answer = await world.call(method, path, {"ownerName": "listener"})
        assert (answer.status_code, "User-Agent" in answer.text) == (403, True)
    assert (await world.poll(session)).status_code == 403
    assert (await world.connect(token="any")).status_code == 403


@pytest.mark.parametrize(
    "changed", [{"name": "x" * 46}, {"labels": [{"name": "x" * 257, "type": "System"}]}, {"labels": [{"name": ""}]}]
)
async def test_sets_have_limits(world: ServiceWorld, changed: dict[str, Any]) -> None:
    body = {"name": "x" * 45, "runnerGroupId": 1, "labels": [{"name": "x" * 256, "type": "System"}]}
    refused = await world.call("POST", SETS, {**body, **changed})
    assert exception(refused) == (400, "VssPropertyValidationException")
    number = document(await world.call("POST", SETS, body))["id"]
    if "name" in changed:
        refused = await world.call("PATCH", f"{SETS}/{number}", changed)
        assert exception(refused) == (400, "VssPropertyValidationException")


async def test_sets_are_created_found_changed_and_deleted(world: ServiceWorld) -> None:
    number = await world.create()
    assert exception(
        await world.call("POST", SETS, {"name": "Large", "labels": [{"name": "x", "type": "System"}]})
    ) == (400, "RunnerScaleSetExistsException")
    query = {**VERSION, "runnerGroupId": 1, "name": "large"}
    assert document(await world.call("GET", SETS, params=query))["value"][0]["id"] == number
    assert document(await world.call("GET", SETS, params={**query, "name": "none"})) == {"count": 0, "value": []}
    changed = {"name": "huge", "labels": [{"name": "new", "type": "System"}]}
    answer = document(await world.call("PATCH", f"{SETS}/{number}", changed))
    assert (answer["name"], [label["name"] for label in answer["labels"]]) == ("huge", LABELS)
    assert document(await world.call("GET", f"{SETS}/{number}"))["statistics"]["totalAssignedJobs"] == 0
    assert (await world.call("DELETE", f"{SETS}/{number}")).status_code == 204
    assert exception(await world.call("GET", f"{SETS}/{number}")) == (404, "RunnerScaleSetNotFoundException")


async def test_groups_are_found_by_name(world: ServiceWorld) -> None:
    query = {**VERSION, "groupName": "default"}
    assert document(await world.call("GET", "_apis/runtime/runnergroups/", params=query))["value"] == [
        {"id": 1, "name": "Default", "size": 0, "isDefaultGroup": True}
    ]


async def test_second_session_is_a_conflict_until_the_first_ends(world: ServiceWorld) -> None:
    number = await world.create()
    session = await world.session(number)
    answer = await world.call("POST", f"{SETS}/{number}/sessions", {"ownerName": "another"})
    assert exception(answer) == (409, "RunnerScaleSetSessionConflictException")
    path = f"{SETS}/{number}/sessions/{session['sessionId']}"
    renewed = document(await world.call("PATCH", path))
    assert renewed["sessionId"] == session["sessionId"]
    assert renewed["messageQueueAccessToken"] != session["messageQueueAccessToken"]
    assert (await world.call("DELETE", path)).status_code == 204
    assert exception(await world.call("PATCH", path)) == (400, "RunnerScaleSetSessionExpiredException")
    assert (await world.poll(session)).status_code == 400
    await world.session(number)


async def test_poll_is_answered_by_a_message_or_202(world: ServiceWorld) -> None:
    session = await world.session(await world.create())
    assert (await world.poll(session)).status_code == 202
    await world.queue()
    message = document(await world.poll(session))
    assert document(await world.poll(session)) == message
    assert (await world.poll(session, last=message["messageId"])).status_code == 202
    queue, _, query = session["messageQueueUrl"].partition("?")
    headers = {"authorization": f"Bearer {session['messageQueueAccessToken']}"}
    acknowledged = await world.http.delete(f"{queue}/{message['messageId']}?{query}", headers=headers)
    assert acknowledged.status_code == 204
    assert (await world.poll(session)).status_code == 202


async def test_poll_refuses_bad_headers_and_expired_tokens(world: ServiceWorld) -> None:
    session = await world.session(await world.create())
    assert exception(await world.poll(session, accept="*/*")) == (400, "VssVersionNotSpecifiedException")
    older = await world.poll(session, accept="application/json; api-version=5.0-preview")
    assert exception(older) == (400, "VssVersionOutOfRangeException")
    assert (await world.poll(session, capacity="-1")).status_code == 400
    assert (await world.poll(session, capacity=None)).status_code == 400
    assert (await world.poll({**session, "messageQueueAccessToken": world.token})).status_code == 401
    await world.settings(message_session_s=10_000)
    world.clock.at += 3601
    assert (await world.poll(session)).status_code == 401


async def test_token_that_expires_during_a_poll_is_valid_for_that_poll(world: ServiceWorld) -> None:
    session = await world.session(await world.create())
    await world.settings(message_session_s=10_000, message_poll_s=LONG_S)
    poll = await world.begin_poll(session)
    world.clock.at += 3601
    await world.queue()
    assert (await poll).status_code == 200
    assert (await world.poll(session)).status_code == 401


async def test_session_that_ends_during_a_poll_ends_the_poll(world: ServiceWorld) -> None:
    number = await world.create()
    session = await world.session(number)
    await world.settings(message_poll_s=LONG_S)
    poll = await world.begin_poll(session)
    await world.call("DELETE", f"{SETS}/{number}/sessions/{session['sessionId']}")
    assert exception(await poll) == (400, "RunnerScaleSetSessionExpiredException")


async def test_bad_message_fault_answers_without_a_body(world: ServiceWorld) -> None:
    session = await world.session(await world.create())
    await world.rest("POST", "/_admin/faults", {"kind": "bad_message"})
    answer = await world.poll(session)
    assert (answer.status_code, answer.content) == (200, b"")


async def test_acquisition_uses_the_queue_token(world: ServiceWorld) -> None:
    await world.settings(jobs_must_be_acquired=True)
    number = await world.create()
    session = await world.session(number)
    await world.poll(session)
    assert (await world.call("GET", f"{SETS}/{number}/acquirablejobs")).status_code == 204
    job = await world.queue()
    acquirable = document(await world.call("GET", f"{SETS}/{number}/acquirablejobs"))
    assert acquirable["value"][0]["runnerRequestId"] == job["id"]
    path, body = f"{SETS}/{number}/acquirejobs", [job["id"], 12345]
    assert (await world.call("POST", path, body)).status_code == 401
    token = session["messageQueueAccessToken"]
    assert document(await world.call("POST", path, body, token=token)) == {"count": 1, "value": [job["id"]]}
    assert (await world.call("POST", path, {"a": 1}, token=token)).status_code == 400


async def test_registration_gives_the_files_of_a_one_job_runner(world: ServiceWorld) -> None:
    number = await world.create()
    body = {"name": "r1", "workFolder": "_work"}
    path = f"{SETS}/{number}/generatejitconfig"
    answer = document(await world.call("POST", path, body))
    assert answer["runner"]["runnerScaleSetId"] == number
    files = {name: json.loads(content) for name, content in unpack(answer["encodedJITConfig"]).items()}
    assert set(files) == {".runner", ".credentials", ".credentials_rsaparams"}
    assert files[".runner"] == {
        "AgentId": str(answer["runner"]["id"]),
        "AgentName": "r1",
        "DisableUpdate": "True",
        "Ephemeral": "True",
        "PoolId": "1",
        "PoolName": "Default",
        "ServerUrl": URL,
        "ServerUrlV2": URL,
        "UseV2Flow": "True",
        "WorkFolder": "_work",
    }
    assert files[".credentials"]["Scheme"] == "OAuth"
    assert set(files[".credentials"]["Data"]) == {"ClientId", "AuthorizationUrl", "RequireFipsCryptography"}
    names = {"d", "dp", "dq", "exponent", "inverseQ", "modulus", "p", "q"}
    assert set(files[".credentials_rsaparams"]) == names
    assert exception(await world.call("POST", path, body)) == (409, "AgentExistsException")
    assert (await world.call("POST", path, {"name": "r" * 65})).status_code == 400
    assert exception(await world.call("POST", f"{SETS}/999/generatejitconfig", body)) == (
        404,
        "RunnerScaleSetNotFoundException",
    )


async def test_lost_answer_leaves_the_registration(world: ServiceWorld) -> None:
    number = await world.create()
    await world.rest(
        "POST", "/_admin/faults", {"kind": "lost_answer", "operation": "scale-set.jitconfig", "status": 502}
    )
    path = f"{SETS}/{number}/generatejitconfig"
    assert (await world.call("POST", path, {"name": "r1"})).status_code == 502
    query = {**VERSION, "agentName": "r1"}
    [runner] = document(await world.call("GET", AGENTS, params=query))["value"]
    assert runner["name"] == "r1"


async def test_runners_are_shown_and_deleted_by_both_apis(world: ServiceWorld) -> None:
    number = await world.create()
    path = f"{SETS}/{number}/generatejitconfig"
    first = document(await world.call("POST", path, {"name": "r1"}))["runner"]
    second = document(await world.call("POST", path, {"name": "r2"}))["runner"]
    listed = (await world.rest("GET", f"/repos/{REPO}/actions/runners")).json()["runners"]
    assert [[label["name"] for label in runner["labels"]] for runner in listed] == [LABELS, LABELS]
    assert (await world.rest("DELETE", f"/repos/{REPO}/actions/runners/{first['id']}")).status_code == 204
    assert exception(await world.call("GET", f"{AGENTS}/{first['id']}")) == (404, "AgentNotFoundException")
    for _ in range(2):
        assert (await world.call("DELETE", f"{AGENTS}/{second['id']}")).status_code == 204


async def test_runner_with_a_job_is_not_deleted(world: ServiceWorld) -> None:
    number = await world.create()
    await world.poll(await world.session(number))
    runner = document(await world.call("POST", f"{SETS}/{number}/generatejitconfig", {"name": "r1"}))["runner"]
    world.core.registry.open_session(world.core.state.runners[runner["id"]], version="2.336.0")
    await world.queue()
    answer = await world.call("DELETE", f"{AGENTS}/{runner['id']}")
    assert exception(answer) == (400, "JobStillRunningException")
    assert exception(await world.call("DELETE", f"{SETS}/{number}")) == (400, "JobStillRunningException")


async def test_runner_gets_a_job_just_before_its_deletion(world: ServiceWorld) -> None:
    number = await world.create()
    session = await world.session(number)
    await world.poll(session)
    runner = document(await world.call("POST", f"{SETS}/{number}/generatejitconfig", {"name": "r1"}))["runner"]
    world.core.registry.open_session(world.core.state.runners[runner["id"]], version="2.336.0")
    await world.rest("POST", "/_admin/faults", {"kind": "job_on_delete", "operation": "scale-set.delete-runner"})
    assert exception(await world.call("DELETE", f"{AGENTS}/{runner['id']}")) == (400, "JobStillRunningException")
    message = document(await world.poll(session))
    [event] = json.loads(message["body"])
    assert (event["messageType"], message["statistics"]["totalAssignedJobs"]) == ("JobAssigned", 1)


async def test_set_deleted_by_github_and_session_of_another_process(world: ServiceWorld) -> None:
    number = await world.create()
    assert (await world.rest("POST", f"/_admin/scale-sets/{number}/session", {"owner": "x"})).status_code == 201
    answer = await world.call("POST", f"{SETS}/{number}/sessions", {"ownerName": "listener"})
    assert answer.status_code == 409
    assert (await world.rest("DELETE", f"/_admin/scale-sets/{number}/session")).status_code == 204
    session = await world.session(number)
    [shown] = (await world.rest("GET", "/_admin/scale-sets")).json()["scale_sets"]
    assert (shown["session_owner"], shown["capacity"]) == ("listener", None)
    assert (await world.rest("DELETE", f"/_admin/scale-sets/{number}")).status_code == 204
    assert (await world.poll(session)).status_code == 404


async def test_fault_with_the_name_of_an_exception(world: ServiceWorld) -> None:
    fault = {
        "kind": "status",
        "operation": "scale-set.find",
        "status": 404,
        "message": "RunnerScaleSetNotFoundException",
    }
    await world.rest("POST", "/_admin/faults", fault)
    assert exception(await world.call("GET", SETS)) == (404, "RunnerScaleSetNotFoundException")
    await world.rest("POST", "/_admin/faults", {**fault, "status": 503, "message": None})
    answer = await world.call("GET", SETS)
    assert (answer.status_code, answer.text) == (503, "Server Error")


# Workflow runs


def finish(world: ServiceWorld, number: int, conclusion: Conclusion) -> None:
    """Run a job to its end on a new runner."""
    registry, queue = world.core.registry, world.core.queue
    runner = registry.register_jit(scope=REPO, name=f"x{number}", labels=tuple(LABELS), group_id=1)
    registry.open_session(runner, version="2.336.0")
    assert runner.job_id == number
    queue.acknowledge(runner, number)
    queue.complete(runner, number, conclusion, output="", steps=[])
    world.app.commit_changes()


async def test_failed_jobs_are_run_again_as_a_new_attempt(world: ServiceWorld) -> None:
    good, bad = (
        await world.queue(name="good"),
        await world.queue(name="bad", event="pull_request", head_repo="fork/widgets"),
    )
    path = f"/repos/{REPO}/actions/runs/7"
    assert (await world.rest("GET", path)).json()["status"] == "queued"
    assert (await world.rest("POST", f"{path}/rerun-failed-jobs")).status_code == 403
    finish(world, good["id"], Conclusion.SUCCESS)
    assert (await world.rest("GET", path)).json()["status"] == "in_progress"
    finish(world, bad["id"], Conclusion.FAILURE)
    run = (await world.rest("GET", path)).json()
    assert (run["status"], run["conclusion"], run["run_attempt"]) == ("completed", "failure", 1)
    assert (await world.rest("POST", f"{path}/rerun-failed-jobs")).status_code == 201
    run = (await world.rest("GET", path)).json()
    assert (run["status"], run["run_attempt"]) == ("in_progress", 2)
    jobs = (await world.rest("GET", f"{path}/jobs")).json()["jobs"]
    assert [(job["name"], job["run_attempt"]) for job in jobs] == [("good", 1), ("bad", 2)]
    assert jobs[1]["id"] not in {good["id"], bad["id"]}


async def test_one_job_is_run_again(world: ServiceWorld) -> None:
    job = await world.queue(event="pull_request", head_repo="fork/widgets")
    path = f"/repos/{REPO}/actions/jobs/{job['id']}/rerun"
    assert (await world.rest("POST", path)).status_code == 403
    finish(world, job["id"], Conclusion.SUCCESS)
    assert (await world.rest("POST", path)).status_code == 201
    run = (await world.rest("GET", f"/repos/{REPO}/actions/runs/7")).json()
    assert (run["event"], run["head_repository"]["full_name"], run["run_attempt"]) == (
        "pull_request",
        "fork/widgets",
        2,
    )
    assert (await world.rest("POST", path)).status_code == 403
    assert (await world.rest("GET", f"/repos/{REPO}/actions/runs/8")).status_code == 404
    assert (await world.rest("GET", "/repos/acme/other/actions/runs/7")).status_code == 404


async def test_rerun_needs_permission_to_write(world: ServiceWorld) -> None:
    await world.queue()
    reader = (await world.rest("POST", "/_admin/tokens", {"permissions": {"actions": "read"}})).json()["token"]
    headers = {"authorization": f"Bearer {reader}"}
    path = f"/repos/{REPO}/actions/runs/7"
    assert (await world.http.get(path, headers=headers)).status_code == 200
    assert (await world.http.post(f"{path}/rerun-failed-jobs", headers=headers)).status_code == 403
