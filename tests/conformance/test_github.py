"""Contract of the GitHub port (`remuda.ports.github`): the memory adapter, and the client with a local GitHub."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import httpx
import pytest

from remuda.adapters.github.client import LIST_ATTEMPTS, MAX_ATTEMPTS, GitHubClient, web_url
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.domain.errors import Conflict, NotFound, Throttled, Unavailable, UserError
from remuda.domain.runner_release import PackageArchitecture, release_url
from remuda.fake_github import Endpoint
from remuda.fake_github.client import FakeGitHubClient
from remuda.fake_github.fake_runner.credentials import secret_of
from remuda.http import ClientResponse
from remuda.ports.calls import CallCounter
from remuda.ports.clock import ServerDates
from remuda.ports.github import Deletion, GitHub, GitHubRun, JobList
from simulation.memory.github import MemoryGitHub, MemoryGitHubServer
from tests.conformance.conftest import Adapters
from tests.support.records import LONG_S
from tests.support.virtual_time import AdjustableClock

pytestmark = pytest.mark.usefixtures("patient_client")

REPO, ORG = "octo/repo", "octo"
#: Scopes in which runners may remain from earlier tests.
BUSY_REPO, LONG_REPO = "octo/busy", "octo/long"
RUNNER_PERMISSIONS = ("actions", "administration", "organization_self_hosted_runners")
KNOWN = [REPO, ORG, BUSY_REPO, LONG_REPO]
MANY = 205


class GitHubs(Adapters):
    async def grant(self, *, scopes: Sequence[str] = (), write: bool = True) -> str:
        raise NotImplementedError

    async def run_job(self, scope: str, name: str, labels: Sequence[str]) -> int:
        """Register a runner that runs a job. Return its id."""
        raise NotImplementedError

    async def queue_job(self, repository: str, run_id: int, labels: Sequence[str]) -> int:
        """Queue a job that no runner takes. Return its id."""
        raise NotImplementedError

    async def add_run(self, repository: str, run_id: int, *, head: str) -> Callable[[], Awaitable[object]]:
        """Start a run of code of another repository. Return a function that cancels its only job."""
        raise NotImplementedError


class MemoryGitHubs(GitHubs):
    def __init__(self) -> None:
        self._github = MemoryGitHubServer(clock=SystemClock(), known_scopes=KNOWN)
        self._github.groups["warm"] = 2
        super().__init__(MemoryGitHub, github=self._github, token=self._github.grant())

    async def grant(self, *, scopes: Sequence[str] = (), write: bool = True) -> str:
        return self._github.grant(scopes=scopes, write=write)

    async def run_job(self, scope: str, name: str, labels: Sequence[str]) -> int:
        runner = self._github.add(scope, name, labels)

        def take(job: Any) -> None:
            job.started = True

        self._github.connect(runner.runner_id, take)
        self._github.queue(run_id="1", labels=labels)
        return runner.runner_id

    async def queue_job(self, repository: str, run_id: int, labels: Sequence[str]) -> int:
        return self._github.queue(run_id=str(run_id), labels=labels, repository=repository).job_id

    async def add_run(self, repository: str, run_id: int, *, head: str) -> Callable[[], Awaitable[object]]:
        runs, key = self._github.runs, (repository, run_id)
        runs[key] = GitHubRun(run_id=run_id, status="queued", conclusion="", head_repository=head, attempt=1)

        async def cancel() -> None:
            runs[key] = replace(runs[key], status="completed", conclusion="cancelled")

        return cancel


class GitHubClients(GitHubs):
    def __init__(self, endpoint: Endpoint) -> None:
        self._url = endpoint.url
        self.admin = FakeGitHubClient(endpoint.url, endpoint.token)
        given: dict[str, Any] = {"clock": AdjustableClock(longest_sleep_s=0.01), "ids": SystemIds()}
        super().__init__(GitHubClient, api_url=endpoint.url, token=endpoint.token, **given)

    async def grant(self, *, scopes: Sequence[str] = (), write: bool = True) -> str:
        permissions = None if write else dict.fromkeys(RUNNER_PERMISSIONS, "read")
        return await self.admin.issue_token(scopes=scopes, permissions=permissions)

    async def run_job(self, scope: str, name: str, labels: Sequence[str]) -> int:
        token = (await self.open().registration_token(scope)).token
        async with httpx.AsyncClient(base_url=self._url, trust_env=False, timeout=LONG_S) as http:
            body = {"url": f"{self._url}/{scope}", "token": token, "name": name, "labels": list(labels)}
            files = (await http.post("/_runner/register", json=body)).json()["files"]
            http.headers["authorization"] = f"Bearer {secret_of(files['.credentials_rsaparams'])}"
            session = (await http.post("/_runner/sessions", json={"version": "2.336.0"})).json()["session"]
            job = await self.admin.queue_job(repo=scope, run_id=1, labels=labels)
            answer = await http.post(f"/_runner/sessions/{session}/jobs/{job.id}/acknowledge")
            assert answer.is_success, answer.text
        return int(files[".runner"]["agentId"])

    async def queue_job(self, repository: str, run_id: int, labels: Sequence[str]) -> int:
        return (await self.admin.queue_job(repo=repository, run_id=run_id, labels=labels)).id

    async def add_run(self, repository: str, run_id: int, *, head: str) -> Callable[[], Awaitable[object]]:
        job = await self.admin.queue_job(
            repo=repository, run_id=run_id, labels=["nobody-has-this"], event="pull_request", head_repo=head
        )
        return partial(self.admin.cancel_job, job.id)


@pytest.fixture
async def fake_github(endpoint: Endpoint) -> AsyncIterator[GitHubClients]:
    """The server, without the faults and runners of earlier tests."""
    github_clients = GitHubClients(endpoint)
    await github_clients.admin.clear_faults()
    await github_clients.admin.change_settings(known_scopes=KNOWN, runner_groups=["warm"], enforce_rate_limit=False)
    github = github_clients.open(calls=CallCounter())
    for scope in (REPO, ORG):
        for runner in await github.list_runners(scope):
            await github.delete_runner(scope, runner.runner_id)
    yield github_clients
    await github_clients.close()
    await github_clients.admin.clear_faults()
    await github_clients.admin.aclose()


@pytest.fixture(params=["memory", "github"])
def github_clients(request: pytest.FixtureRequest) -> GitHubs:
    return MemoryGitHubs() if request.param == "memory" else request.getfixturevalue("fake_github")


@pytest.fixture
async def github(github_clients: GitHubs) -> AsyncIterator[GitHub]:
    yield github_clients.open()
    await github_clients.close()


async def names(github: GitHub, scope: str = REPO) -> list[str]:
    return sorted(runner.name for runner in await github.list_runners(scope))


@pytest.mark.parametrize("scope", [REPO, ORG])
async def test_tokens_are_new_and_valid_for_an_hour(github: GitHub, scope: str) -> None:
    now = SystemClock().now()
    tokens = [await github.registration_token(scope), await github.removal_token(scope)]
    tokens.append(await github.registration_token(scope))
    assert len({credential.token for credential in tokens}) == 3
    for credential in tokens:
        assert timedelta(minutes=50) < credential.expires_at - now < timedelta(minutes=70)
        assert credential.expires_at.utcoffset() == timedelta(0)
        assert credential.expires_at.microsecond % 1000 == 0


async def test_runner_groups_are_found_by_name(github: GitHub) -> None:
    assert await github.runner_group_id(ORG, "Default") == 1
    group = await github.runner_group_id(ORG, "warm")
    assert group > 1
    assert (await github.jit_config(ORG, name="one", labels=["x"], group_id=group)).config
    with pytest.raises(UserError, match="octo has no runner group 'cold'") as caught:
        await github.runner_group_id(ORG, "cold")
    assert caught.value.field == "runner-group"
    assert "Default, warm" in caught.value.fix


async def test_registration_in_an_unknown_group_is_rejected(github: GitHub) -> None:
    with pytest.raises((NotFound, UserError)):
        await github.jit_config(ORG, name="one", labels=["x"], group_id=99)


async def test_token_is_never_printed(github: GitHub) -> None:
    credential = await github.registration_token(REPO)
    assert credential.token not in repr(credential)
    assert credential.token not in str(credential)


async def test_runner_can_be_listed_read_and_deleted(github: GitHub) -> None:
    jit = await github.jit_config(REPO, name="one", labels=["7", "7/large"])
    assert jit.config
    (listed,) = await github.list_runners(REPO)
    assert (listed.runner_id, listed.name, listed.online, listed.busy) == (jit.runner_id, "one", False, False)
    assert {"7", "7/large"} <= set(listed.labels)
    assert await github.get_runner(REPO, jit.runner_id) == listed
    assert await github.delete_runner(REPO, jit.runner_id) is Deletion.DELETED
    assert await github.delete_runner(REPO, jit.runner_id) is Deletion.GONE
    assert await github.get_runner(REPO, jit.runner_id) is None
    assert await github.list_runners(REPO) == []


async def test_queued_jobs_of_a_repository(github: GitHub, github_clients: GitHubs) -> None:
    before = await github.list_runs(REPO, REPO, status="queued")
    assert before is not None
    assert before.etag
    assert await github.list_runs(REPO, REPO, status="queued", etag=before.etag) is None
    began = SystemClock().now() - timedelta(minutes=1)
    job_id = await github_clients.queue_job(REPO, 4_711, ["self-hosted", "nobody-has-this"])
    runs = await github.list_runs(REPO, REPO, status="queued", etag=before.etag)
    assert runs is not None
    assert set(runs.run_ids) - set(before.run_ids) == {4_711}
    in_any_status = await github.list_runs(REPO, REPO, status="")
    assert in_any_status is not None
    assert 4_711 in in_any_status.run_ids
    assert await github.list_runs(REPO, REPO, status="", etag=in_any_status.etag) is None
    await github_clients.queue_job(REPO, 4_713, ["self-hosted", "nobody-has-this"])
    added = await github.list_runs(REPO, REPO, status="", etag=in_any_status.etag)
    assert added is not None
    assert 4_713 in added.run_ids
    listed = await github.list_jobs(REPO, REPO, 4_711)
    assert listed is not None
    (job,) = listed.jobs
    assert (job.job_id, job.run_id, job.status, job.labels) == (
        job_id,
        4_711,
        "queued",
        ("self-hosted", "nobody-has-this"),
    )
    assert began < job.created_at < began + timedelta(minutes=2)
    assert 4_711 not in (await github.list_runs(REPO, REPO, status="in_progress") or before).run_ids
    assert await github.list_jobs(REPO, REPO, 4_711, etag=listed.etag) is None
    await github_clients.queue_job(REPO, 4_711, ["self-hosted", "nobody-has-this"])
    changed = await github.list_jobs(REPO, REPO, 4_711, etag=listed.etag)
    assert changed is not None
    assert (len(changed.jobs), changed.etag != listed.etag) == (2, True)
    assert await github.list_jobs(REPO, REPO, 4_712) == JobList()


async def test_run_names_its_head_and_runs_again_when_it_has_ended(github: GitHub, github_clients: GitHubs) -> None:
    cancel = await github_clients.add_run(REPO, 4_800, head="stranger/fork")
    waiting = GitHubRun(run_id=4_800, status="queued", conclusion="", head_repository="stranger/fork", attempt=1)
    assert await github.get_run(REPO, REPO, 4_800) == waiting
    assert not waiting.has_ended
    with pytest.raises(UserError):
        await github.rerun_failed_jobs(REPO, REPO, 4_800)
    await cancel()
    ended = replace(waiting, status="completed", conclusion="cancelled")
    assert await github.get_run(REPO, REPO, 4_800) == ended
    assert ended.has_ended
    await github.rerun_failed_jobs(REPO, REPO, 4_800)
    again = await github.get_run(REPO, REPO, 4_800)
    assert again is not None
    assert (again.run_id, again.attempt, again.status) == (4_800, 2, "queued"), "a re-run keeps the id"
    with pytest.raises(NotFound):
        await github.get_run(REPO, REPO, 4_801)


async def test_time_of_the_answers_is_observed(fake_github: GitHubClients) -> None:
    clock = AdjustableClock()
    clock.ahead_s = 1_200.0
    dates = ServerDates(clock)
    await fake_github.open(clock=clock, dates=dates).list_runners(REPO)
    assert str(dates.error()) == "the clock of this computer is 20 min ahead of GitHub's"


async def test_run_that_has_not_changed_is_not_sent_again(github: GitHub, github_clients: GitHubs) -> None:
    cancel = await github_clients.add_run(REPO, 4_810, head=REPO)
    first = await github.get_run(REPO, REPO, 4_810)
    assert first is not None
    assert first.etag
    assert await github.get_run(REPO, REPO, 4_810, etag=first.etag) is None
    await cancel()
    changed = await github.get_run(REPO, REPO, 4_810, etag=first.etag)
    assert changed is not None
    assert changed.has_ended


async def test_run_with_jobs_elsewhere_ends_when_it_is_said_to_end(fake_github: GitHubClients) -> None:
    """`remuda run-workflow` has jobs that the local GitHub does not know, and some that it does not know yet."""
    github, admin = fake_github.open(), fake_github.admin
    await admin.put_run(repo=REPO, run_id=4_820, run_attempt=1)
    begun = await github.get_run(REPO, REPO, 4_820)
    assert begun is not None
    assert (begun.attempt, begun.has_ended) == (1, False)
    job = await admin.queue_job(repo=REPO, run_id=4_820, labels=["nobody-has-this"])
    await admin.cancel_job(job.id)
    between = await github.get_run(REPO, REPO, 4_820)
    assert between is not None
    assert not between.has_ended
    await admin.put_run(repo=REPO, run_id=4_820, run_attempt=1, conclusion="failure")
    ended = await github.get_run(REPO, REPO, 4_820)
    assert ended is not None
    assert (ended.has_ended, ended.conclusion) == (True, "failure")
    await admin.put_run(repo=REPO, run_id=4_820, run_attempt=2)
    again = await github.get_run(REPO, REPO, 4_820)
    assert again is not None
    assert (again.attempt, again.has_ended) == (2, False)


@pytest.mark.parametrize("scope", [REPO, ORG])
async def test_newest_release_of_the_runner(github: GitHub, github_clients: GitHubs, scope: str) -> None:
    release = await github.runner_downloads(scope)
    assert release.version == "2.336.0"
    assert {item.architecture: item.url for item in release.packages} == {
        each: release_url("2.336.0", each) for each in PackageArchitecture
    }
    assert len({item.sha256 for item in release.packages}) == 2
    assert github_clients.calls.by_service()["github"]["GET downloads"] == 1


async def test_scopes_are_separate(github: GitHub) -> None:
    jit = await github.jit_config(REPO, name="one", labels=["x"])
    await github.jit_config(ORG, name="two", labels=["x"])
    assert (await names(github), await names(github, ORG)) == (["one"], ["two"])
    assert await github.get_runner(ORG, jit.runner_id) is None
    assert await github.delete_runner(ORG, jit.runner_id) is Deletion.GONE
    assert await names(github) == ["one"]


async def test_long_list_is_read_completely(github: GitHub, github_clients: GitHubs) -> None:
    made = [github.jit_config(LONG_REPO, name=f"runner-{number:03d}", labels=["x"]) for number in range(MANY)]
    await asyncio.gather(*made)
    # A registration that timed out has listed the runners too.
    before = github_clients.calls.by_service()["github"].get("GET runners", 0)
    assert await names(github, LONG_REPO) == [f"runner-{number:03d}" for number in range(MANY)]
    assert github_clients.calls.by_service()["github"]["GET runners"] - before == 3


async def test_busy_runner_is_not_deleted(github: GitHub, github_clients: GitHubs) -> None:
    runner_id = await github_clients.run_job(BUSY_REPO, "worker", ["busy-label"])
    runner = await github.get_runner(BUSY_REPO, runner_id)
    assert runner is not None
    assert (runner.online, runner.busy) == (True, True)
    assert await github.delete_runner(BUSY_REPO, runner_id) is Deletion.BUSY
    assert await names(github, BUSY_REPO) == ["worker"]


async def test_existing_name_is_a_conflict(github: GitHub) -> None:
    first = await github.jit_config(REPO, name="one", labels=["x"])
    with pytest.raises(Conflict):
        await github.jit_config(REPO, name="one", labels=["x"])
    assert await github.get_runner(REPO, first.runner_id) is not None


WRONG = "ghp_wrongwrongwrong"


async def test_unknown_credential_is_a_user_error(github_clients: GitHubs) -> None:
    github = github_clients.open(token=WRONG)
    for call in (
        github.registration_token(REPO),
        github.removal_token(REPO),
        github.list_runners(REPO),
        github.get_runner(REPO, 1),
        github.delete_runner(REPO, 1),
        github.jit_config(REPO, name="one", labels=["x"]),
        github.runner_downloads(REPO),
    ):
        with pytest.raises(UserError) as error:
            await call
        assert error.value.field == "github-token"
        assert WRONG not in f"{error.value!r} {error.value} {error.value.fix} {error.value.__cause__!r}"
    assert WRONG not in repr(github)


async def test_read_only_credential(github_clients: GitHubs) -> None:
    github = github_clients.open(token=await github_clients.grant(write=False))
    assert await github.list_runners(REPO) == []
    assert await github.runner_downloads(REPO)
    for call in (github.registration_token(REPO), github.delete_runner(REPO, 1)):
        with pytest.raises(UserError) as error:
            await call
        assert error.value.field == "github-token"


async def test_inaccessible_scope_is_a_user_error(github_clients: GitHubs) -> None:
    """GitHub returns 404, which must not be taken for a scope without runners."""
    restricted = github_clients.open(token=await github_clients.grant(scopes=[ORG]))
    for github, scope in ((github_clients.open(), "nobody/nothing"), (restricted, REPO)):
        if github is restricted and isinstance(github_clients, GitHubClients):
            continue  # here an owner's token covers its repositories
        for call in (
            github.registration_token(scope),
            github.removal_token(scope),
            github.list_runners(scope),
            github.jit_config(scope, name="one", labels=["x"]),
            github.runner_downloads(scope),
        ):
            with pytest.raises(UserError) as error:
                await call
            assert error.value.field == "github-scope"
        assert await github.get_runner(scope, 1) is None
        assert await github.delete_runner(scope, 1) is Deletion.GONE


# Network failures ------------------------------------------------------------------------------------------------


@pytest.fixture
def client(fake_github: GitHubClients) -> Any:
    return fake_github.open()


async def test_deletion_with_a_lost_response(fake_github: GitHubClients, client: GitHub) -> None:
    jit = await client.jit_config(REPO, name="one", labels=["x"])
    await fake_github.admin.set_fault("lost_answer", operation="delete")
    assert await client.delete_runner(REPO, jit.runner_id) is Deletion.GONE
    assert await client.list_runners(REPO) == []


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("list", lambda client: client.list_runners(REPO)),
        ("registration-token", lambda client: client.registration_token(REPO)),
        ("remove-token", lambda client: client.removal_token(REPO)),
        ("get", lambda client: client.get_runner(REPO, 1)),
        ("downloads", lambda client: client.runner_downloads(REPO)),
        ("run", lambda client: client.get_run(REPO, REPO, 4_830)),
    ],
    ids=["list", "registration-token", "remove-token", "get", "downloads", "run"],
)
async def test_idempotent_calls_with_lost_responses_are_retried(
    fake_github: GitHubClients, client: GitHub, operation: str, call: Callable[[GitHub], Awaitable[object]]
) -> None:
    await fake_github.admin.put_run(repo=REPO, run_id=4_830, run_attempt=1)
    await fake_github.admin.set_fault("lost_answer", operation=operation, times=MAX_ATTEMPTS - 1)
    await call(client)


async def test_jit_configuration_with_a_lost_response_leaves_one_registration(
    fake_github: GitHubClients, client: GitHub
) -> None:
    """The runner of the lost call is deleted and created again, because its configuration was lost."""
    await fake_github.admin.set_fault("lost_answer", operation="jitconfig")
    made = await client.jit_config(REPO, name="one", labels=["x"])
    assert [runner.runner_id for runner in await client.list_runners(REPO)] == [made.runner_id]


async def test_server_error_is_retried_and_then_raised(fake_github: GitHubClients, client: GitHub) -> None:
    await fake_github.admin.set_fault("status", operation="list", status=502, times=MAX_ATTEMPTS - 1)
    assert await client.list_runners(REPO) == []
    await fake_github.admin.set_fault("status", operation="list", status=503, times=MAX_ATTEMPTS)
    with pytest.raises(Unavailable) as error:
        await client.list_runners(REPO)
    assert not isinstance(error.value, Throttled)
    assert "503" in error.value.message
    assert await client.list_runners(REPO) == []


async def test_incomplete_list_is_read_again_and_then_rejected(fake_github: GitHubClients, client: GitHub) -> None:
    for name in ("one", "two"):
        await client.jit_config(REPO, name=name, labels=["x"])
    await fake_github.admin.set_fault("short_list", operation="list", times=LIST_ATTEMPTS - 1)
    assert await names(client) == ["one", "two"]
    await fake_github.admin.set_fault("short_list", operation="list", times=LIST_ATTEMPTS)
    with pytest.raises(Unavailable, match=f"runners of {REPO} is incomplete: 1 of 2"):
        await client.list_runners(REPO)


class Pages:
    """Replaces the connections: one page per request, with ids and total count. Further requests fail."""

    def __init__(self, *pages: tuple[list[int], int | None]) -> None:
        self._pages = list(pages)

    async def request(self, _method: str, target: str, **_: Any) -> ClientResponse:
        if not self._pages:
            return ClientResponse(500, {}, b"")
        numbers, total = self._pages.pop(0)
        body: dict[str, Any] = {
            "runners": [{"id": each, "name": str(each), "status": "online", "busy": False} for each in numbers]
        }
        if total is not None:
            body["total_count"] = total
        link = {"link": '<http://x/?page=2>; rel="next"'} if "&page=1" in target else {}
        return ClientResponse(200, link, json.dumps(body).encode())

    async def close(self) -> None:
        """Nothing to close."""


async def listed(client: GitHub, *pages: tuple[list[int], int | None]) -> list[int]:
    client._http = Pages(*pages)  # type: ignore[attr-defined]
    return sorted(runner.runner_id for runner in await client.list_runners(REPO))


async def test_partial_list_is_never_returned(client: GitHub) -> None:
    """The second page fails."""
    with pytest.raises(Unavailable):
        await listed(client, ([1], 2))


async def test_removal_between_two_pages_is_detected(client: GitHub) -> None:
    """Runner 1 was removed after the first page, so runner 3 moved to it. The number of runners alone looks right."""
    first = [([1, 2], 4), ([4], 3)]
    assert await listed(client, *first, ([2, 3], 3), ([4], 3)) == [2, 3, 4]


async def test_constantly_changing_list_returns_all_runners_seen(client: GitHub) -> None:
    restless: list[tuple[list[int], int | None]] = [([1, 2], 4), ([4], 3), ([2, 3], 3), ([5], 4), ([3, 5], 4), ([6], 3)]
    assert await listed(client, *restless) == [1, 2, 3, 4, 5, 6]


async def test_list_without_total_count_is_rejected(client: GitHub) -> None:
    with pytest.raises(Unavailable):
        await listed(client, ([1], None))


async def test_failed_calls_are_counted(fake_github: GitHubClients, client: GitHub) -> None:
    await fake_github.admin.set_fault("status", operation="list", status=502)
    await client.list_runners(REPO)
    assert await client.get_runner(REPO, 1) is None
    with pytest.raises(UserError):
        await fake_github.open(token=WRONG).registration_token(REPO)
    counted = fake_github.calls.outcomes()
    # One list and one lookup succeed; 404 is not a failure.
    assert counted["github", "GET runners"] == (2, 1)
    assert counted["github", "POST registration-token"] == (0, 1)


async def test_unreachable_server(fake_github: GitHubClients) -> None:
    github = fake_github.open(api_url="http://127.0.0.1:9", token="ghp_secret")
    with pytest.raises(Unavailable) as error:
        await github.list_runners(REPO)
    assert "ghp_secret" not in f"{error.value!r} {error.value.__context__!r} {github!r} {vars(github)!r}"


async def test_local_github_is_called_without_a_proxy(
    fake_github: GitHubClients, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert await fake_github.open().list_runners(REPO) == []


def test_registration_url() -> None:
    assert web_url("https://api.github.com/") == "https://github.com"
    assert web_url("https://ghes.example.com/api/v3") == "https://ghes.example.com"
    assert web_url("https://api.acme.ghe.com") == "https://acme.ghe.com"
    assert web_url("http://127.0.0.1:4711/") == "http://127.0.0.1:4711"
