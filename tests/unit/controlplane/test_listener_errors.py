"""Each call of the listener with each class of error of its service, at its start and later: afterwards it goes on.

No loop may end for good, no task may be lost whose work nothing else does. Where the design ends the process, its
service manager starts it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from remuda.domain.errors import (
    CapacityError,
    Conflict,
    NotFound,
    RemudaError,
    Throttled,
    Unavailable,
    Unreadable,
    UserError,
)
from remuda.domain.instance import State
from remuda.ports.github import GitHubRun
from simulation.invariants import SCOPE
from tests.support.mutations import LONG
from tests.support.set_world import DemandWorld, RunningListener, runner_set, window
from tests.support.virtual_time import Call

USER, UNAVAILABLE = UserError("refused"), Unavailable("no answer")
THROTTLED = Throttled("too many requests", retry_after_s=2.0)
READ = (USER, UNAVAILABLE, THROTTLED, Unreadable("the table", {"i-0": "a test"}))
WRITTEN = (USER, UNAVAILABLE, THROTTLED, Conflict("another process was first"))
ASKED = (USER, UNAVAILABLE, THROTTLED, Conflict("in use"), NotFound("missing"))
#: The calls of a listener that serves jobs, keeps machines and follows an interrupted job, with their errors.
CALLS: dict[str, Sequence[RemudaError]] = {
    **dict.fromkeys(
        (
            "store.get_config",
            "store.get_demand",
            "store.get_jobs",
            "store.get_lease",
            "store.get_many",
            "store.get_reports",
            "store.find",
            "store.count_live",
            "store.jobs_of_run",
            "store.recent_jobs",
        ),
        READ,
    ),
    **dict.fromkeys(
        (
            "store.apply",
            "store.apply_all",
            "store.put_demand",
            "store.put_jobs",
            "store.put_provision",
            "store.replace_lease",
            "store.replace_provision",
        ),
        WRITTEN,
    ),
    **dict.fromkeys(
        (
            "source.find_set",
            "source.create_set",
            "source.open_session",
            "source.count_jobs",
            "source.register",
            "source.deregister",
            "session.receive",
            "session.acknowledge",
            "github.list_runs",
            "github.list_jobs",
            "github.get_run",
            "github.rerun_failed_jobs",
        ),
        ASKED,
    ),
    "compute.describe": (USER, UNAVAILABLE, THROTTLED),
    "compute.launch": (USER, UNAVAILABLE, THROTTLED, CapacityError("there is no capacity")),
    **dict.fromkeys(("pool.receive", "pool.send"), (USER, UNAVAILABLE, THROTTLED)),
}
#: Errors after which a job is not run again, for a reason that its record says.
CLOSED = {("github.get_run", USER), ("github.get_run", ASKED[-1])} | {
    ("github.rerun_failed_jobs", error) for error in ASKED
}
#: Seconds of errors, and until the service manager starts a listener again.
FAILS_S = 25.0
RESTART_S = 5.0
ENDED = GitHubRun(run_id=77, status="completed", conclusion="failure", head_repository=SCOPE)


@dataclass(kw_only=True)
class Manager:
    """Starts a listener again when it ends, as its service manager does."""

    sets: DemandWorld
    operation: str
    error: RemudaError
    is_failing: bool = False
    failures: int = 0
    listeners: list[RunningListener] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            listener = self.sets.listen(self._hook)
            self.listeners.append(listener)
            with suppress(RemudaError):
                await asyncio.shield(listener.task)
            await asyncio.sleep(RESTART_S)

    async def _hook(self, name: str, call: Call) -> Any:
        if self.is_failing and name == self.operation:
            self.failures += 1
            raise self.error
        return await call()

    async def fail(self) -> None:
        self.is_failing = True
        await asyncio.sleep(FAILS_S)
        self.is_failing = False

    def loops(self) -> int:
        """Loops that run for the sets."""
        service = self.listeners[-1].listener._service
        assert service is not None
        return len(service._loops._tasks)


def _bound(sets: DemandWorld) -> list[str]:
    return [key for key in sets.in_state(State.RUNNING) if sets.record(key).is_bound]


async def serve(operation: str, error: RemudaError) -> None:
    sets = DemandWorld()
    # So long that the cloud is asked whether the first machines have ended.
    sets.behaviour.boot_s = 12.0
    large = runner_set(max=2, rerun_on_interruption=True)
    await sets.configure_sets(large, runner_set(name="other", labels=("other",), windows=window(hot=1, warm=1)))
    manager = Manager(sets=sets, operation=operation, error=error)
    running = asyncio.create_task(manager.run())
    # More than the set may serve at once.
    jobs = sets.queue(3, seconds=30.0)
    await manager.fail()
    await sets.wait_for_jobs(jobs, 200.0)
    sets.github.runs[SCOPE, 77] = replace(ENDED, status="in_progress", conclusion="")
    (job,) = sets.queue(seconds=250.0)
    await sets.wait_for(lambda: _bound(sets), 100.0)
    await sets.configure_sets(large, runner_set(name="other", labels=("other",), windows=window(warm=1)))
    await asyncio.sleep(5.0)
    failing = asyncio.create_task(manager.fail())
    manager.listeners[-1].listener.reload()
    sets.machines[_bound(sets)[0]].give_spot_notice()
    await failing
    await sets.wait_for(lambda: job.is_over, 200.0)
    sets.github.runs[SCOPE, 77] = ENDED
    await manager.fail()
    await asyncio.sleep(150.0)
    expected = [] if (operation, error) in CLOSED else [77]
    assert sets.github.reruns == expected, sets.database.jobs[job.key]
    assert manager.failures, "the listener does not make this call"
    await sets.wait_for(lambda: sets.in_state(State.IDLE), 100.0)
    jobs = [*sets.queue(), *sets.queue(labels=("other",))]
    await sets.wait_for_jobs(jobs, 100.0)
    # Observer, idle machines, ended ones, counts, queues, configuration; and two for each set.
    assert manager.loops() == 6 + 2 * 2
    running.cancel()
    sets.check()
    await sets.end()


def _cases() -> Iterator[Any]:
    """A refusal by each call, and by every other one another class of errors in turn: all of them with `make fuzz`."""
    for number, (operation, errors) in enumerate(CALLS.items()):
        refused, *others = errors
        chosen = others if LONG else [others[number // 2 % len(others)]] * (number % 2)
        for error in (refused, *chosen):
            yield pytest.param(operation, error, id=f"{operation}-{type(error).__name__}")


@pytest.mark.parametrize(("operation", "error"), [*_cases()])
async def test_listener_goes_on_after_errors(operation: str, error: RemudaError) -> None:
    await serve(operation, error)
