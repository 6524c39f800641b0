"""Runner scale sets in memory: GitHub's rules for sessions, messages, assignments and registrations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

import pytest

from remuda.domain.demand import DemandMessage, JobEvent, JobEventKind
from remuda.domain.errors import Conflict, NotFound, UserError
from remuda.domain.runner_set import RunnerSet
from remuda.ports.calls import CallCounter
from remuda.ports.demand import DemandSession
from remuda.ports.github import Deletion
from simulation.loop import VirtualClock, new_loop
from simulation.memory.demand import MAX_LAPSES, MemoryDemandSource, MemoryScaleSets
from simulation.memory.github import MemoryDemandJob, MemoryGitHubServer, MemoryJob

LARGE = RunnerSet(name="large", labels=("self-hosted", "large"), resource_class="large", scope="octo", max=2)


class Service:
    def __init__(self, **options: bool | float) -> None:
        self.github = MemoryGitHubServer(clock=VirtualClock())
        self.sets = MemoryScaleSets(github=self.github, **options)  # type: ignore[arg-type]
        self.source = MemoryDemandSource(server=self.sets, calls=CallCounter())
        self.taken: list[MemoryJob] = []

    async def session(self, *, session_id: str = "") -> DemandSession:
        set_id = await self.source.create_set(LARGE)
        return await self.source.open_session(LARGE, set_id, owner="a", session_id=session_id)

    def queue(self) -> MemoryDemandJob:
        return self.sets.queue(run_id="7", labels=("large",), repository="octo/repo")

    async def runner(self, name: str) -> int:
        jit = await self.source.register(LARGE, await self.source.create_set(LARGE), name=name)
        assert self.github.connect(jit.runner_id, self.taken.append)
        return jit.runner_id


def run(work: Callable[[], object]) -> None:
    loop = new_loop()
    loop.run(work())  # type: ignore[arg-type]


def events(message: DemandMessage | None) -> list[tuple[JobEventKind, str]]:
    assert message is not None
    return [(event.kind, event.job_id) for event in message.events]


def test_a_second_session_is_refused_until_the_first_expires():
    async def work() -> None:
        service = Service()
        first = await service.session()
        with pytest.raises(Conflict):
            await service.session()
        assert (await service.session(session_id=first.session_id)).session_id == first.session_id
        await asyncio.sleep(101)
        second = await service.session(session_id=first.session_id)
        assert second.session_id != first.session_id
        with pytest.raises(NotFound):
            await first.receive(last_message_id=0, capacity=1)

    run(work)


def test_a_message_comes_again_until_it_is_acknowledged():
    async def work() -> None:
        service = Service()
        session = await service.session()
        polling = asyncio.ensure_future(session.receive(last_message_id=0, capacity=2))
        await asyncio.sleep(1)
        service.queue()
        message = await polling
        assert message is not None
        assert await session.receive(last_message_id=0, capacity=2) == message
        await session.acknowledge(message.message_id)
        assert await session.receive(last_message_id=message.message_id, capacity=2) is None

    run(work)


def test_a_poll_without_a_message_ends_after_its_time():
    async def work() -> None:
        service = Service(poll_s=50.0)
        session = await service.session()
        assert await session.receive(last_message_id=0, capacity=1) is None
        assert asyncio.get_running_loop().time() == 50

    run(work)


def test_capacity_limits_the_assigned_jobs_and_idle_runners_take_them_in_order():
    async def work() -> None:
        service = Service()
        session = await service.session()
        jobs = [service.queue() for _ in range(3)]
        message = await session.receive(last_message_id=0, capacity=2)
        assert events(message) == [(JobEventKind.ASSIGNED, jobs[0].key), (JobEventKind.ASSIGNED, jobs[1].key)]
        assert message is not None
        assert message.statistics.assigned == 2
        await service.runner("one")
        assert service.taken == [jobs[0]]
        service.github.start(jobs[0])
        service.github.finish(jobs[0])
        assert jobs[2].set_id
        following = await session.receive(last_message_id=message.message_id, capacity=2)
        kinds = [kind for kind, _ in events(following)]
        assert kinds == [JobEventKind.STARTED, JobEventKind.COMPLETED, JobEventKind.ASSIGNED]
        assert not service.github.runners

    run(work)


def test_a_job_that_is_queued_while_the_capacity_is_0_is_never_delivered():
    async def work() -> None:
        service = Service()
        session = await service.session()
        await session.receive(last_message_id=0, capacity=0)
        job = service.queue()
        assert await session.receive(last_message_id=0, capacity=2) is None
        assert not job.set_id

    run(work)


def test_an_assignment_lapses_and_comes_back_under_a_new_id_three_times():
    async def work() -> None:
        service = Service(lapse_s=60.0)
        session = await service.session()
        job = service.queue()
        seen: list[JobEvent] = []
        last = 0
        while not job.is_over:
            message = await session.receive(last_message_id=last, capacity=2)
            if message is not None:
                seen += message.events
                last = message.message_id
                await session.acknowledge(last)
        assert len({event.job_id for event in seen if event.kind is JobEventKind.ASSIGNED}) == MAX_LAPSES + 1

    run(work)


def test_available_jobs_must_be_acquired():
    async def work() -> None:
        service = Service(offers_jobs=True)
        session = await service.session()
        job = service.queue()
        message = await session.receive(last_message_id=0, capacity=2)
        assert events(message) == [(JobEventKind.AVAILABLE, job.key)]
        assert message is not None
        await service.runner("one")
        assert not service.taken
        assert await session.acquire([event.request_id for event in message.events]) == [job.job_id]
        assert service.taken == [job]

    run(work)


def test_a_registration_with_a_job_is_not_removed_and_a_name_is_taken_once():
    async def work() -> None:
        service = Service()
        session = await service.session()
        runner_id = await service.runner("one")
        with pytest.raises(Conflict):
            await service.source.register(LARGE, await service.source.create_set(LARGE), name="one")
        assert await service.source.find_runner(LARGE, name="one") == runner_id
        service.queue()
        await session.receive(last_message_id=0, capacity=2)
        assert await service.source.deregister(LARGE, runner_id) is Deletion.BUSY
        with pytest.raises(Conflict):
            await service.source.delete_set(LARGE)
        service.github.finish(service.taken[0])
        assert await service.source.deregister(LARGE, runner_id) is Deletion.GONE

    run(work)


def test_a_registration_that_never_connects_is_removed():
    async def work() -> None:
        service = Service(never_used_s=600.0)
        await service.source.register(LARGE, await service.source.create_set(LARGE), name="one")
        await asyncio.sleep(599)
        assert await service.source.find_runner(LARGE, name="one")
        await asyncio.sleep(1)
        assert await service.source.find_runner(LARGE, name="one") is None

    run(work)


def test_jobs_of_a_deleted_set_wait_for_another_one():
    async def work() -> None:
        service = Service()
        session = await service.session()
        await session.receive(last_message_id=0, capacity=2)
        job = service.queue()
        assert job.set_id
        assert await service.source.delete_set(LARGE)
        assert not await service.source.delete_set(LARGE)
        assert not job.set_id
        with pytest.raises(NotFound):
            await session.receive(last_message_id=0, capacity=2)
        again = await service.session()
        await again.receive(last_message_id=0, capacity=2)
        assert job.set_id
        assert job.assigned_at is not None
        assert job.assigned_at - job.queued_at >= timedelta()

    run(work)


def test_labels_of_a_set_cannot_be_changed():
    async def work() -> None:
        service = Service()
        await service.session()
        other = RunnerSet(name="large", labels=("other",), resource_class="large", scope="octo", max=2)
        with pytest.raises(UserError, match="large"):
            await service.source.create_set(other)

    run(work)
