"""The listener interrupted at each of its port calls: another one continues, and nothing is left (D1, D5, S10)."""

from __future__ import annotations

import asyncio

import pytest

from remuda.controlplane.demand import DemandListener
from remuda.domain.instance import State
from tests.support.set_world import DemandWorld, runner_set, window
from tests.support.virtual_time import Cut, CutKind, run_virtual

#: More calls than the scenario makes. The enumeration ends when the scenario ends before the interruption.
MAX_CALLS = 400
#: Seconds in which the next listener must have served the jobs: the lease and the session of the first expire.
PATIENCE_S = 400.0
#: Seconds after the jobs in which the first listener may be interrupted.
AFTERWARDS_S = 15.0


async def interrupt_once(at: int, kind: CutKind) -> bool:
    """Two jobs, one idle machine, one hot runner. Return whether the listener was interrupted."""
    world = DemandWorld()
    await world.configure_sets(runner_set(max=2, windows=window(hot=1)))
    await world.warm(1)
    cut = Cut(at, kind)
    jobs = world.queue(2, seconds=3.0)
    first = asyncio.create_task(cut.run(DemandListener(world.demand(cut, owner="first")).run()))
    await world.wait_for(lambda: first.done() or all(job.conclusion for job in jobs), PATIENCE_S)
    await asyncio.wait({first}, timeout=AFTERWARDS_S)
    interrupted = first.done()
    if not interrupted:
        await cut.discard()
    world.listen()
    await world.wait_for_jobs(jobs, PATIENCE_S)
    # One runner stays, as the window asks for; the other machine returns to the pool.
    await world.wait_for(lambda: len(world.in_state(State.RUNNING)) == 1, PATIENCE_S)
    await world.configure_sets(runner_set(max=2))
    await world.wait_for(lambda: not world.in_state(State.RUNNING, State.CREATED, State.CLAIMED), PATIENCE_S)
    world.check()
    await world.end()
    await cut.discard()
    return interrupted


@pytest.mark.parametrize(
    ("kind", "stride"), [(CutKind.CRASH_AFTER, 3), (CutKind.CANCEL_BEFORE, 7)], ids=["killed", "stopped"]
)
def test_interrupted_listener_loses_no_job_and_leaks_nothing(kind: CutKind, stride: int) -> None:
    for at in range(1, MAX_CALLS, stride):
        if not run_virtual(interrupt_once(at, kind)):
            assert at > 20
            return
    raise AssertionError("the scenario makes more calls than expected")
