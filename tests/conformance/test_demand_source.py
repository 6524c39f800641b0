"""Contract of `DemandSource` (`remuda.ports.demand`): scale sets in memory, and the client with a local GitHub."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import pytest

from remuda.adapters.github.client import GitHubClient
from remuda.adapters.github.scale_sets import SERVICE, ScaleSetSource
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.domain.demand import DemandMessage, JobEventKind
from remuda.domain.errors import Conflict, NotFound, UserError
from remuda.domain.runner_set import RunnerSet
from remuda.fake_github import Endpoint
from remuda.fake_github.client import FakeGitHubClient
from remuda.fake_github.fake_runner.credentials import secret_of, unpack
from remuda.ports.calls import CallCounter
from remuda.ports.demand import DemandSession, DemandSource
from remuda.ports.github import Deletion, JitRunner
from simulation.memory.demand import MemoryDemandSource, MemoryScaleSets
from simulation.memory.github import MemoryGitHubServer
from tests.support.records import LONG_S
from tests.support.virtual_time import AdjustableClock

pytestmark = pytest.mark.usefixtures("patient_client")

REPO = "octo/sets"
#: Seconds that an empty poll takes here.
SHORT_POLL_S = 0.05
_numbers = itertools.count(1)


class DemandService:
    """GitHub's side: sources for any number of processes, jobs, and runners that run them."""

    def __init__(self) -> None:
        self.calls = CallCounter()

    def open(self) -> DemandSource:
        raise NotImplementedError

    async def queue(self, runner_set: RunnerSet) -> None:
        """Queue a job with the labels of the set."""
        raise NotImplementedError

    async def start(self, runner: JitRunner) -> None:
        """Connect a runner and let it start the job that it gets."""
        raise NotImplementedError

    async def finish(self, runner: JitRunner) -> None:
        raise NotImplementedError

    async def delete(self, scale_set_id: int) -> None:
        """Delete a set as GitHub itself does."""
        raise NotImplementedError

    async def offer_jobs(self) -> None:
        """Let jobs be acquired, like GitHub Enterprise Server."""
        raise NotImplementedError

    async def omit_fields(self) -> None:
        """Answer with the fields that GitHub's own client needs only: without labels and without expiries."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close all sources."""


class MemoryService(DemandService):
    def __init__(self) -> None:
        super().__init__()
        self._server = MemoryScaleSets(github=MemoryGitHubServer(clock=SystemClock()), poll_s=SHORT_POLL_S)

    def open(self) -> DemandSource:
        return MemoryDemandSource(server=self._server, calls=self.calls)

    async def queue(self, runner_set: RunnerSet) -> None:
        self._server.queue(run_id="4711", labels=runner_set.labels, repository=REPO, event="pull_request")

    async def start(self, runner: JitRunner) -> None:
        assert self._server.github.connect(runner.runner_id, self._server.github.start)

    async def finish(self, runner: JitRunner) -> None:
        job = self._server.github.runners[runner.runner_id].job
        assert job is not None
        self._server.github.finish(job, "succeeded")

    async def delete(self, scale_set_id: int) -> None:
        self._server.delete(scale_set_id)

    async def offer_jobs(self) -> None:
        self._server.offers_jobs = True

    async def omit_fields(self) -> None:
        self._server.lists_labels = False


class GitHubService(DemandService):
    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__()
        self.admin = FakeGitHubClient(endpoint.url, endpoint.token)
        self._endpoint = endpoint
        self._opened: list[Any] = []
        self._jobs: dict[int, tuple[httpx.AsyncClient, str]] = {}

    def open(self) -> DemandSource:
        shared: dict[str, Any] = {"clock": AdjustableClock(longest_sleep_s=0.01), "ids": SystemIds()}
        github = GitHubClient(api_url=self._endpoint.url, token=self._endpoint.token, calls=self.calls, **shared)
        source = ScaleSetSource(github=github, calls=self.calls, **shared)
        self._opened += [source, github]
        return source

    async def queue(self, runner_set: RunnerSet) -> None:
        await self.admin.queue_job(repo=REPO, run_id=4711, labels=runner_set.labels, event="pull_request")

    async def start(self, runner: JitRunner) -> None:
        secret = secret_of(json.loads(unpack(runner.config)[".credentials_rsaparams"]))
        headers = {"authorization": f"Bearer {secret}"}
        http = httpx.AsyncClient(base_url=self._endpoint.url, headers=headers, trust_env=False, timeout=LONG_S)
        session = (await http.post("/_runner/sessions", json={"version": "2.336.0"})).json()["session"]
        path = f"/_runner/sessions/{session}"
        message = (await http.get(f"{path}/message", params={"wait": LONG_S})).json()
        path = f"{path}/jobs/{message['job_id']}"
        assert (await http.post(f"{path}/acknowledge")).is_success
        self._jobs[runner.runner_id] = http, path

    async def finish(self, runner: JitRunner) -> None:
        http, path = self._jobs[runner.runner_id]
        assert (await http.post(f"{path}/complete", json={"conclusion": "success"})).is_success

    async def delete(self, scale_set_id: int) -> None:
        await self.admin.delete_scale_set(scale_set_id)

    async def offer_jobs(self) -> None:
        await self.admin.change_settings(jobs_must_be_acquired=True)

    async def omit_fields(self) -> None:
        await self.admin.change_settings(only_needed_fields=True)

    async def close(self) -> None:
        await asyncio.gather(*(each.close() for each in self._opened))
        await asyncio.gather(*(http.aclose() for http, _ in self._jobs.values()))
        await self.admin.change_settings(jobs_must_be_acquired=False, only_needed_fields=False)
        await self.admin.aclose()


@pytest.fixture(params=["memory", "github"])
async def service(request: pytest.FixtureRequest) -> AsyncIterator[DemandService]:
    service: DemandService
    if request.param == "memory":
        service = MemoryService()
    else:
        service = found = GitHubService(request.getfixturevalue("endpoint"))
        await found.admin.clear_faults()
        await found.admin.change_settings(message_poll_s=SHORT_POLL_S, runner_groups=["warm"])
    yield service
    await service.close()


@pytest.fixture
def source(service: DemandService) -> DemandSource:
    return service.open()


@pytest.fixture
def runner_set() -> RunnerSet:
    """A set that no other test uses."""
    name = f"set-{next(_numbers)}"
    return RunnerSet(name=name, labels=("self-hosted", name), resource_class="small", scope=REPO, max=10)


async def receive(session: DemandSession, *, last: int = 0, kinds: Sequence[JobEventKind] = ()) -> DemandMessage:
    """The next message, which must have events of these kinds."""
    message = await session.receive(last_message_id=last, capacity=10)
    assert message is not None
    assert [event.kind for event in message.events] == list(kinds)
    return message


async def take(session: DemandSession, *kinds: JobEventKind) -> DemandMessage:
    """Receive and acknowledge a message."""
    message = await receive(session, kinds=kinds)
    await session.acknowledge(message.message_id)
    return message


# Sets


async def test_set_is_created_once(service: DemandService, source: DemandSource, runner_set: RunnerSet) -> None:
    assert await source.find_set(runner_set) is None
    number = await source.create_set(runner_set)
    assert number > 0
    assert await service.open().create_set(runner_set) == number
    assert await service.open().find_set(runner_set) == number


async def test_set_with_other_labels_is_an_error(source: DemandSource, runner_set: RunnerSet) -> None:
    await source.create_set(runner_set)
    other = replace(runner_set, labels=(*runner_set.labels, "gpu"))
    for use in (source.find_set, source.create_set):
        with pytest.raises(UserError) as caught:
            await use(other)
        assert caught.value.field == "runner-sets"
        assert runner_set.labels[1] in caught.value.message
    assert await source.find_set(replace(runner_set, labels=tuple(label.upper() for label in runner_set.labels)))


async def test_set_without_listed_labels_is_found(
    service: DemandService, source: DemandSource, runner_set: RunnerSet
) -> None:
    """GitHub's client needs neither the labels of a set nor the expiry of a registration token."""
    number = await source.create_set(runner_set)
    await service.omit_fields()
    other = replace(runner_set, labels=(*runner_set.labels, "gpu"))
    for wanted in (runner_set, other):
        assert await service.open().find_set(wanted) == number
        assert await service.open().create_set(wanted) == number
    assert await service.open().delete_set(runner_set)


async def test_deleted_set_is_gone(source: DemandSource, runner_set: RunnerSet) -> None:
    number = await source.create_set(runner_set)
    assert await source.delete_set(runner_set)
    assert not await source.delete_set(runner_set)
    with pytest.raises(NotFound):
        await source.open_session(runner_set, number, owner="one")
    with pytest.raises(NotFound):
        await source.register(runner_set, number, name=f"{runner_set.name}-1")
    assert await source.create_set(runner_set) != number


async def test_set_with_a_busy_runner_is_not_deleted(
    service: DemandService, source: DemandSource, runner_set: RunnerSet
) -> None:
    number = await source.create_set(runner_set)
    session = await source.open_session(runner_set, number, owner="one")
    assert await session.receive(last_message_id=0, capacity=10) is None
    await service.queue(runner_set)
    await service.start(await source.register(runner_set, number, name=f"{runner_set.name}-1"))
    with pytest.raises(Conflict):
        await source.delete_set(runner_set)


# Sessions


async def test_set_has_one_session(service: DemandService, source: DemandSource, runner_set: RunnerSet) -> None:
    number = await source.create_set(runner_set)
    session = await source.open_session(runner_set, number, owner="one")
    with pytest.raises(Conflict):
        await service.open().open_session(runner_set, number, owner="two")
    await session.close()
    await session.close()
    other = await service.open().open_session(runner_set, number, owner="two", session_id=session.session_id)
    assert other.session_id != session.session_id
    with pytest.raises(NotFound):
        await session.receive(last_message_id=0, capacity=10)


async def test_session_is_taken_over_by_its_id(
    service: DemandService, source: DemandSource, runner_set: RunnerSet
) -> None:
    number = await source.create_set(runner_set)
    first = await source.open_session(runner_set, number, owner="one")
    await first.receive(last_message_id=0, capacity=10)
    await service.queue(runner_set)
    second = await service.open().open_session(runner_set, number, owner="two", session_id=first.session_id)
    assert second.session_id == first.session_id
    assert second.statistics is not None
    assert second.statistics.assigned == 1
    await receive(second, kinds=[JobEventKind.ASSIGNED])


async def test_session_of_a_deleted_set_ends(
    service: DemandService, source: DemandSource, runner_set: RunnerSet
) -> None:
    number = await source.create_set(runner_set)
    session = await source.open_session(runner_set, number, owner="one")
    await service.delete(number)
    with pytest.raises(NotFound):
        await session.receive(last_message_id=0, capacity=10)
    await session.close()


# Messages


async def test_job_is_assigned_started_and_completed(
    service: DemandService, source: DemandSource, runner_set: RunnerSet
) -> None:
    number = await source.create_set(runner_set)
    session = await source.open_session(runner_set, number, owner="one")
    assert session.statistics is not None
    assert session.statistics.assigned == 0
    assert await session.receive(last_message_id=0, capacity=10) is None
    await service.queue(runner_set)
    message = await take(session, JobEventKind.ASSIGNED)
    assert message.statistics.assigned == 1
    assigned = message.events[0]
    assert (assigned.run_id, assigned.repository, assigned.event) == ("4711", REPO, "pull_request")
    assert (assigned.labels, assigned.request_id) == (runner_set.labels, 0)
    assert assigned.queued_at is not None
    assert assigned.assigned_at is not None
    assert assigned.started_at is assigned.finished_at is None
    runner = await source.register(runner_set, number, name=f"{runner_set.name}-1")
    await service.start(runner)
    message = await take(session, JobEventKind.STARTED)
    assert (message.statistics.running, message.statistics.busy) == (1, 1)
    started = message.events[0]
    assert (started.job_id, started.runner_name) == (assigned.job_id, f"{runner_set.name}-1")
    assert started.runner_id == runner.runner_id
    assert started.started_at is not None
    await service.finish(runner)
    message = await take(session, JobEventKind.COMPLETED)
    completed = message.events[0]
    assert (completed.job_id, completed.result) == (assigned.job_id, "succeeded")
    assert completed.finished_at is not None
    assert (message.statistics.assigned, message.statistics.registered) == (0, 0)


async def test_message_comes_again_until_it_is_acknowledged(
    service: DemandService, source: DemandSource, runner_set: RunnerSet
) -> None:
    session = await source.open_session(runner_set, await source.create_set(runner_set), owner="one")
    await session.receive(last_message_id=0, capacity=10)
    await service.queue(runner_set)
    first = await receive(session, kinds=[JobEventKind.ASSIGNED])
    await service.queue(runner_set)
    assert await receive(session, kinds=[JobEventKind.ASSIGNED]) == first
    second = await receive(session, last=first.message_id, kinds=[JobEventKind.ASSIGNED])
    assert second.message_id > first.message_id
    assert second.statistics.assigned == 2
    for _ in range(2):
        await session.acknowledge(first.message_id)
    assert await receive(session, kinds=[JobEventKind.ASSIGNED]) == second
    await session.acknowledge(second.message_id)
    assert await session.receive(last_message_id=0, capacity=10) is None


async def test_capacity_limits_the_assigned_jobs(
    service: DemandService, source: DemandSource, runner_set: RunnerSet
) -> None:
    session = await source.open_session(runner_set, await source.create_set(runner_set), owner="one")
    await session.receive(last_message_id=0, capacity=1)
    for _ in range(3):
        await service.queue(runner_set)
    first = await session.receive(last_message_id=0, capacity=1)
    assert first is not None
    assert first.statistics.assigned == 1
    following = await session.receive(last_message_id=first.message_id, capacity=3)
    assert following is not None
    assert (following.statistics.assigned, len(following.events)) == (3, 2)


async def test_jobs_above_the_capacity_are_counted(
    service: DemandService, source: DemandSource, runner_set: RunnerSet
) -> None:
    number = await source.create_set(runner_set)
    session = await source.open_session(runner_set, number, owner="one")
    await session.receive(last_message_id=0, capacity=1)
    for _ in range(4):
        await service.queue(runner_set)
    first = await session.receive(last_message_id=0, capacity=1)
    assert first is not None
    await session.acknowledge(first.message_id)
    # No message tells of the others.
    assert await session.receive(last_message_id=first.message_id, capacity=1) is None
    counts = await source.count_jobs(runner_set, number)
    assert counts is not None
    assert (counts.assigned, counts.available) == (1, 3)
    with pytest.raises(NotFound):
        await source.count_jobs(runner_set, number + 1_000)


async def test_available_jobs_are_acquired(service: DemandService, source: DemandSource, runner_set: RunnerSet) -> None:
    await service.offer_jobs()
    session = await source.open_session(runner_set, await source.create_set(runner_set), owner="one")
    await session.receive(last_message_id=0, capacity=10)
    await service.queue(runner_set)
    message = await take(session, JobEventKind.AVAILABLE)
    assert message.statistics.available == 1
    request_id = message.events[0].request_id
    assert request_id > 0
    assert list(await session.acquire([request_id, 10**9])) == [request_id]
    assert list(await session.acquire([request_id])) == []
    assigned = await take(session, JobEventKind.ASSIGNED)
    assert assigned.statistics.assigned == 1
    assert assigned.events[0].job_id == message.events[0].job_id


# Runners


async def test_runner_names_are_unique(source: DemandSource, runner_set: RunnerSet) -> None:
    number = await source.create_set(runner_set)
    name = f"{runner_set.name}-1"
    assert await source.find_runner(runner_set, name=name) is None
    runner = await source.register(runner_set, number, name=name)
    assert runner.config
    assert runner.config not in repr(runner)
    with pytest.raises(Conflict):
        await source.register(runner_set, number, name=name)
    assert await source.find_runner(runner_set, name=name) == runner.runner_id


async def test_runner_is_deregistered_unless_it_has_a_job(
    service: DemandService, source: DemandSource, runner_set: RunnerSet
) -> None:
    number = await source.create_set(runner_set)
    session = await source.open_session(runner_set, number, owner="one")
    await session.receive(last_message_id=0, capacity=10)
    await service.queue(runner_set)
    busy = await source.register(runner_set, number, name=f"{runner_set.name}-busy")
    idle = await source.register(runner_set, number, name=f"{runner_set.name}-idle")
    await service.start(busy)
    assert await source.deregister(runner_set, busy.runner_id) is Deletion.BUSY
    assert await source.deregister(runner_set, idle.runner_id) is Deletion.DELETED
    # Like one that has had its job.
    assert await source.deregister(runner_set, idle.runner_id) is Deletion.GONE
    assert await source.find_runner(runner_set, name=f"{runner_set.name}-idle") is None


async def test_calls_are_counted_by_operation(
    service: DemandService, source: DemandSource, runner_set: RunnerSet
) -> None:
    number = await source.create_set(runner_set)
    session = await source.open_session(runner_set, number, owner="one")
    await session.receive(last_message_id=0, capacity=10)
    runner = await source.register(runner_set, number, name=f"{runner_set.name}-1")
    await source.deregister(runner_set, runner.runner_id)
    await session.close()
    counts = service.calls.by_service()[SERVICE]
    for operation in ("POST sessions", "GET message", "POST generatejitconfig", "DELETE agents", "DELETE sessions"):
        assert counts[operation] == 1, operation
