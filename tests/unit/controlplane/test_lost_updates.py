"""What other tasks write to the record of a set while one of them waits is kept.

Each operation on the record is run again for each of its calls of a port: during that call, every field changes that
the operation does not own. Afterwards these fields must have their new values, in memory and in the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from remuda.controlplane.demand.binding import Binder
from remuda.controlplane.demand.context import DemandContext
from remuda.controlplane.demand.equipment import Equipment
from remuda.controlplane.demand.machines import MachineTable
from remuda.controlplane.demand.session import SetSession
from remuda.controlplane.demand.sets import SetState, new_state
from remuda.controlplane.demand.unassigned import UnassignedJobs
from remuda.controlplane.pool_publisher import PoolPublisher
from remuda.domain.demand import DemandRecord, DemandStatistics, JobRecord, RepositoryQueue
from remuda.domain.instance import Actor
from tests.support.records import at
from tests.support.set_world import DemandWorld, runner_set
from tests.support.virtual_time import Call

#: The other value of each field that another task may write.
OTHERS: Mapping[str, Any] = {
    "has_created": True,
    "scale_set_id": 77,
    "session_id": "another",
    "owner": "somebody",
    "last_message_id": 99,
    "statistics": DemandStatistics(assigned=7, running=3, available=2),
    "counted_at": at(999),
    "capacity": 8,
    "queues": (RepositoryQueue(repository="octo/repo", read_at=at(5)),),
    "failing_since": at(6),
    "error": "GitHub does not answer",
    "shortage": "no capacity",
}
#: Fields that no operation changes while a set is served, and the time and the number of the write.
FIXED = {"runner_set", "scope", "runner_group", "updated_at", "revision"}
COUNTS = {"statistics", "counted_at"}


class Parts:
    """A set with a session, without the loops of a listener."""

    def __init__(self, sets: DemandWorld, demand: DemandContext) -> None:
        config = sets.database.config
        assert config is not None
        (item,) = config.runner_sets
        self.sets = sets
        self.demand = demand
        self.state = new_state(demand.context, item, None)
        table = MachineTable(demand.context.clock)
        equipment = Equipment(demand, table, PoolPublisher(demand.context, by=Actor.LISTENER))
        binder = Binder(demand, table, equipment)
        self.session = SetSession(demand, self.state, table, binder, config=lambda: config)
        self.unassigned = UnassignedJobs(demand, lambda: {item.name: self.state}, config=lambda: config)

    async def open(self) -> None:
        await self.session.open()

    async def open_without_counts(self) -> None:
        source = self.demand.source
        opened = source.open_session

        async def open_session(*given: Any, **named: Any) -> Any:
            session = await opened(*given, **named)
            return _Uncounted(session)

        self.session._demand = replace(self.demand, source=_With(source, open_session=open_session))
        await self.session.open()

    async def handle(self) -> None:
        self.sets.queue()
        await self.session.poll()

    async def poll(self) -> None:
        self.sets.scale_sets.poll_s = 0.5
        self.state.record = replace(self.state.record, capacity=1)
        await self.session.poll()

    async def close(self) -> None:
        await self.session.close()

    async def note_problem(self) -> None:
        self.state.session_problem = "the session is lost"
        await self.state.save_problem(self.demand)

    async def count(self) -> None:
        self.sets.queue(9)
        self.sets.scale_sets.settle()
        await self.unassigned._count(self.state)

    async def save_queues(self) -> None:
        self.unassigned._queues = {"octo/repo": RepositoryQueue(repository="octo/repo", read_at=at(1))}
        await self.unassigned._save(self.state)


class _With:
    """A port with another operation."""

    def __init__(self, port: Any, **operations: Any) -> None:
        self._port = port
        self.__dict__.update(operations)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)


class _Uncounted(_With):
    """A session that GitHub opened without counts."""

    def __init__(self, session: Any) -> None:
        super().__init__(session, statistics=None)


@dataclass(frozen=True, kw_only=True)
class Operation:
    run: Callable[[Parts], Awaitable[None]]
    owns: frozenset[str]
    #: Whether the set has a session before.
    is_open: bool = True


SESSION = {"scale_set_id", "session_id", "owner", "last_message_id", "capacity", "has_created"}
OPERATIONS = {
    "open": Operation(run=Parts.open, owns=frozenset(SESSION | COUNTS), is_open=False),
    "open again, without counts": Operation(run=Parts.open_without_counts, owns=frozenset(SESSION)),
    "handle a message": Operation(run=Parts.handle, owns=frozenset({*COUNTS, "capacity", "last_message_id"})),
    "poll": Operation(run=Parts.poll, owns=frozenset({"capacity"})),
    "close": Operation(run=Parts.close, owns=frozenset({"session_id", "owner"})),
    "note a problem": Operation(run=Parts.note_problem, owns=frozenset({"error", "shortage", "failing_since"})),
    # A message that comes meanwhile has newer counts, which stay.
    "count": Operation(run=Parts.count, owns=frozenset(COUNTS)),
    "save queues": Operation(run=Parts.save_queues, owns=frozenset({"queues"})),
}


async def run_held(operation: Operation, *, at_call: int, applied: bool) -> tuple[list[str], DemandRecord]:
    """Run an operation, and change what it does not own in its n-th call: before the call takes effect, or after."""
    sets = DemandWorld()
    await sets.configure_sets(runner_set())
    calls: list[str] = []
    is_running = False
    parts: Parts

    async def hook(name: str, call: Call) -> Any:
        if not is_running:
            return await call()
        calls.append(name)
        if len(calls) != at_call:
            return await call()
        answer = await call() if applied else None
        state: SetState = parts.state
        state.record = replace(state.record, **{key: OTHERS[key] for key in OTHERS if key not in operation.owns})
        return answer if applied else await call()

    demand = sets.demand(hook)
    parts = Parts(sets, demand)
    if operation.is_open:
        await parts.session.open()
    is_running = True
    await operation.run(parts)
    is_running = False
    # Whoever writes next writes what is known.
    await parts.state.save(demand)
    stored = sets.database.demand[parts.state.name]
    assert stored == parts.state.record
    return calls, stored


def test_each_field_of_the_record_of_a_set_is_tried() -> None:
    assert {item.name for item in fields(DemandRecord)} == {*OTHERS, *FIXED}


@pytest.mark.parametrize("name", OPERATIONS)
async def test_fields_of_others_are_kept_while_a_call_is_in_progress(name: str) -> None:
    operation = OPERATIONS[name]
    calls, _ = await run_held(operation, at_call=0, applied=False)
    assert calls
    for at_call in range(1, len(calls) + 1):
        for applied in (False, True):
            made, stored = await run_held(operation, at_call=at_call, applied=applied)
            lost = {
                key: getattr(stored, key)
                for key in OTHERS
                if key not in operation.owns and getattr(stored, key) != OTHERS[key]
            }
            assert not lost, f"{calls[at_call - 1]} {'after' if applied else 'before'} its effect; calls {made}"


@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at_call", [1, 2])
async def test_the_end_of_a_job_is_kept_while_its_interruption_is_recorded(at_call: int, *, applied: bool) -> None:
    """The message about the end comes while a call of the other task is in progress."""
    sets = DemandWorld()
    await sets.configure_sets(runner_set())
    job = JobRecord(job_id="j-1", runner_set="large", seen_at=at(0), started_at=at(1))
    ended = replace(job, completed_at=at(2), result="succeeded")
    others: list[asyncio.Task[None]] = []
    calls = 0

    async def hook(_name: str, call: Call) -> Any:
        nonlocal calls
        calls += 1
        if calls != at_call:
            return await call()
        answer = await call() if applied else None
        others.append(asyncio.create_task(state.save(undisturbed, {job.job_id: ended})))
        # Long enough for the other write, unless it has to wait.
        await asyncio.sleep(1.0)
        return answer if applied else await call()

    undisturbed, demand = sets.demand(), sets.demand(hook)
    state = new_state(demand.context, runner_set(), None)
    await state.save(undisturbed, {job.job_id: job})
    await state.amend_job(demand, job.job_id, interrupted_at=at(3))
    await others[0]
    stored = sets.database.jobs[job.job_id]
    assert (stored.completed_at, stored.interrupted_at) == (at(2), at(3))
