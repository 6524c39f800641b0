"""Intervals, graces and pauses of a listener: nothing comes too early, too often, or because of something else."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.controlplane.demand.listener import ListenerService
from remuda.controlplane.demand.sets import new_state
from remuda.domain.errors import Unavailable
from remuda.domain.instance import State
from remuda.domain.supply import SupplyPlan
from tests.support.backoffs import now_s
from tests.support.set_world import DemandWorld, runner_set, window
from tests.support.virtual_time import Call, in_virtual_time

# Intervals --------------------------------------------------------------------------------------------------------

#: Least and most seconds between two calls of an operation by a listener at rest, without and with a hot runner.
COMMON = {"store.replace_lease": (10.0, 10.0), "store.get_config": (60.0, 60.0), "session.receive": (1.0, 51.0)}
QUIET = COMMON | {"store.find": (300.0, 301.0)}
HOT = COMMON | {"store.find": (10.0, 11.0), "store.get_reports": (4.5, 5.5)}
#: Operations that fail for a while before.
OUTAGES = (
    "", "store.find", "store.get_reports", "store.get_config", "store.put_demand",
    "session.receive", "source.find_set", "source.register",
)  # fmt: skip
#: Seconds of an outage, and until everything is at rest again.
OUTAGE_S, RECOVERY_S = 100.0, 250.0


class Calls:
    """Notes when each operation is called, and lets one of them fail for a while."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        self.fails = ""

    async def hook(self, name: str, call: Call) -> Any:
        self.times.setdefault(name, []).append(now_s())
        if name == self.fails:
            raise Unavailable("no answer")
        return await call()

    def check(self, name: str, least_s: float, most_s: float, *, since: float) -> None:
        times = [at for at in self.times.get(name, []) if at >= since] + [now_s()]
        pauses = [after - before for before, after in pairwise([since, *times])]
        assert max(pauses) <= most_s + 0.01, f"{name} after {max(pauses):.2f} s"
        assert min(pauses[1:-1], default=least_s) >= least_s - 0.01, f"{name} after {min(pauses[1:-1]):.2f} s"


@pytest.mark.parametrize("fails", OUTAGES)
@pytest.mark.parametrize("hot", [0, 1])
async def test_intervals_of_a_listener_at_rest_are_the_same_whatever_failed_before(
    sets: DemandWorld, hot: int, fails: str
) -> None:
    await sets.configure_sets(runner_set(windows=window(hot=hot)))
    calls = Calls()
    sets.listen(calls.hook)
    await asyncio.sleep(50.0)
    calls.fails = fails
    # Something to do in the meantime.
    sets.queue(seconds=1.0)
    await asyncio.sleep(OUTAGE_S)
    calls.fails = ""
    # Machines that the job or a failure left end meanwhile.
    await sets.pass_time(RECOVERY_S)
    since = now_s()
    await asyncio.sleep(100.0 if hot else 700.0)
    for name, (least_s, most_s) in (HOT if hot else QUIET).items():
        calls.check(name, least_s, most_s, since=since)


# Grace of runners that are not needed -----------------------------------------------------------------------------


@pytest.mark.parametrize(("needed_s", "unneeded_s"), [(1.0, 8.0), (4.0, 4.0), (15.0, 9.0)])
async def test_runner_is_given_up_only_after_an_unbroken_grace(
    sets: DemandWorld, needed_s: float, unneeded_s: float
) -> None:
    listener = sets.listen()
    await asyncio.sleep(1.0)

    async def want(count: int) -> None:
        await sets.configure_sets(runner_set(windows=window(hot=count)))
        listener.listener.reload()

    await want(1)
    await sets.wait_for(lambda: sets.in_state(State.RUNNING))
    await asyncio.sleep(10.0)
    (hot,) = sets.in_state(State.RUNNING)
    for _ in range(4):
        await want(0)
        await asyncio.sleep(unneeded_s)
        assert sets.in_state(State.RUNNING) == [hot]
        await want(1)
        await asyncio.sleep(needed_s)
    await want(0)
    grace_s = sets.lifetimes.surplus_grace_s
    waited_s = await sets.wait_for(lambda: not sets.in_state(State.RUNNING))
    assert grace_s <= waited_s <= grace_s + 2.0


@pytest.mark.parametrize("pulses", [0, 3])
async def test_grace_of_one_runner_is_not_that_of_another(sets: DemandWorld, pulses: int) -> None:
    """Two runners that become unneeded one after the other are given up one after the other."""
    listener = sets.listen()

    async def want(count: int) -> float:
        await sets.configure_sets(runner_set(windows=window(hot=count)))
        listener.listener.reload()
        return now_s()

    await asyncio.sleep(1.0)
    await want(2)
    await sets.wait_for(lambda: len(sets.in_state(State.RUNNING)) == 2)
    await asyncio.sleep(10.0)
    for _ in range(pulses):
        await want(0)
        await asyncio.sleep(3.0)
        await want(2)
        await asyncio.sleep(3.0)
    first_at = await want(1)
    await asyncio.sleep(6.0)
    second_at = await want(0)
    grace_s = sets.lifetimes.surplus_grace_s
    await sets.wait_for(lambda: len(sets.in_state(State.RUNNING)) == 1)
    assert grace_s <= now_s() - first_at <= grace_s + 2.0
    await sets.wait_for(lambda: not sets.in_state(State.RUNNING))
    assert grace_s <= now_s() - second_at <= grace_s + 2.0


# Acquisitions during a pause --------------------------------------------------------------------------------------


async def test_machines_that_came_while_nothing_was_missing_are_not_remembered_for_a_pause(sets: DemandWorld) -> None:
    """Those that come while a launch is in progress, which may fail, are."""
    listener = sets.listen()
    await asyncio.sleep(2.0)
    assert listener.listener._service is not None
    state = listener.listener._service._states()["large"]
    for acquiring, remembered in ((0, 0), (1, 2)):
        state.returned, state.acquiring = 2, acquiring
        state.wake()
        await asyncio.sleep(1.0)
        assert state.returned == remembered
    state.acquiring = 0


def _plan(deficit: int, acquire: int) -> SupplyPlan:
    return SupplyPlan(desired=9, supply=0, deficit=deficit, acquire=acquire, waiting=0, vacant=0, why="a test")


#: Machines that came to the pool, missing runners, those of them that do not wait for returning machines, whether the
#: pool has idle machines, and whether the set pauses after a failure.
DECISIONS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 3), st.integers(0, 1), st.booleans()), max_size=12
)


@given(DECISIONS)
@in_virtual_time
async def test_no_more_is_acquired_during_a_pause_than_came_to_the_pool_since_the_last_decision(
    decisions: list[tuple[int, int, int, int, bool]],
) -> None:
    world = DemandWorld()
    await world.configure_sets()
    demand = world.demand()
    service = ListenerService(demand)
    await service._start()
    reconciler, state, started = service._reconciler, new_state(demand.context, runner_set(), None), 0

    def start(_state: object, _config: object, count: int, **_: object) -> None:
        nonlocal started
        started += count

    reconciler._acquisitions.start = start  # type: ignore[method-assign,assignment]
    came = 0
    for returned, deficit, acquire, idle, is_paused in decisions:
        state.returned += returned
        came += returned
        if not deficit:
            continue
        count = idle
        reconciler._count_idle = lambda *_, count=count: count  # type: ignore[method-assign]
        started = 0
        plan = _plan(deficit, min(deficit, acquire))
        reconciler._acquire(state, service.config(), plan, is_paused=is_paused)
        if is_paused:
            assert started == min(deficit, came)
        else:
            assert plan.acquire <= started <= deficit
        came = 0
