"""The lease of the listener: how long its holder goes on without a renewal, and when another process takes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from remuda.controlplane.demand.lease import LeaseLost, ListenerLease
from remuda.domain.demand import LISTENER_LEASE, Lease
from remuda.domain.errors import Unavailable
from tests.support.backoffs import now_s
from tests.support.set_world import DemandWorld
from tests.support.virtual_time import Call, Hook, until

#: Seconds between two renewals, after which the holder may stop, and after which another process may take the lease.
BEAT_S, STOPS_S, EXPIRES_S = 10.0, 25.0, 35.0
#: Seconds between two reads of a standby.
READ_S = 5.0


class LeaseStore:
    """A hook that lets calls about the lease fail, and notes when the last write was applied."""

    def __init__(self) -> None:
        #: Seconds until a call fails, for each of the next ones; None for those that succeed. Empty: as the last one.
        self.fails_after: list[float | None] = [None]
        self.applies = False
        self.applied_at = 0.0

    @property
    def hook(self) -> Hook:
        async def hook(name: str, call: Call) -> Any:
            if name not in {"store.replace_lease", "store.get_lease"}:
                return await call()
            fails_after = self.fails_after.pop(0) if len(self.fails_after) > 1 else self.fails_after[0]
            if fails_after is not None and self.applies:
                await call()
            if fails_after is not None:
                await asyncio.sleep(fails_after)
                raise Unavailable("no answer")
            answer = await call()
            if name == "store.replace_lease":
                self.applied_at = now_s()
            return answer

        return hook


async def held(store: LeaseStore) -> tuple[ListenerLease, DemandWorld]:
    world = DemandWorld()
    context = world.process(store.hook)
    lease = ListenerLease(context, context.store, "own")
    await lease.acquire()
    return lease, world


@pytest.mark.parametrize("hangs_s", [0.0, 3.0, 9.9, 14.9, 1_000.0])
@pytest.mark.parametrize("renewals", [0, 1, 5])
async def test_holder_stops_before_another_process_can_have_taken_the_lease(hangs_s: float, renewals: int) -> None:
    store = LeaseStore()
    lease, _ = await held(store)
    keeping = asyncio.create_task(lease.keep())
    await asyncio.sleep(renewals * BEAT_S + 1.0)
    store.fails_after = [hangs_s]
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(keeping, 2 * EXPIRES_S)
    assert STOPS_S <= now_s() - store.applied_at < EXPIRES_S


@pytest.mark.parametrize("lost", [1, 2])
async def test_holder_goes_on_if_renewals_fail_for_less_than_its_limit(lost: int) -> None:
    """However often: the limit begins again with each renewal."""
    store = LeaseStore()
    lease, _ = await held(store)
    keeping = asyncio.create_task(lease.keep())
    for _ in range(20):
        # A failed write is read once, to see whether it was applied.
        store.fails_after = [*([0.0] * 2 * lost), None]
        before = store.applied_at
        await until(lambda before=before: store.applied_at > before)  # type: ignore[misc]
        assert store.applied_at - before <= STOPS_S
    assert not keeping.done()
    keeping.cancel()


async def test_answer_that_comes_late_does_not_prolong_the_lease() -> None:
    """Others see the write when it is applied, and not when its answer arrives."""
    world = DemandWorld()
    slow_s, is_down, applied_at = 0.0, False, 0.0

    async def hook(name: str, call: Call) -> Any:
        nonlocal applied_at
        if is_down:
            raise Unavailable("no answer")
        answer = await call()
        if name == "store.replace_lease":
            applied_at = now_s()
            await asyncio.sleep(slow_s)
        return answer

    context = world.process(hook)
    lease = ListenerLease(context, context.store, "own")
    await lease.acquire()
    keeping = asyncio.create_task(lease.keep())
    slow_s = 12.0
    await asyncio.sleep(BEAT_S + 5.0)
    is_down = True
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(keeping, 2 * EXPIRES_S)
    assert STOPS_S <= now_s() - applied_at < EXPIRES_S


async def test_renewals_follow_each_other_at_the_same_pace(world: DemandWorld) -> None:
    context = world.process()
    lease = ListenerLease(context, context.store, "own")
    await lease.acquire()
    keeping = asyncio.create_task(lease.keep())
    await asyncio.sleep(20.5 * BEAT_S)
    assert world.database.leases[LISTENER_LEASE].beat == 21
    keeping.cancel()


def fail_reads(number: int) -> bool:
    return number % 3 == 1


#: `ahead_s`: by how much the clock of the standby is ahead of that of the holder.
@pytest.mark.parametrize("fails", [lambda _: False, fail_reads])
@pytest.mark.parametrize("ahead_s", [0.0, 30.0, 3_600.0, -3_600.0])
@pytest.mark.parametrize("owners", [("one",), ("one", "another", "one")])
async def test_standby_takes_a_lease_only_a_while_after_its_last_change(
    world: DemandWorld, fails: Callable[[int], bool], owners: tuple[str, ...], ahead_s: float
) -> None:
    """Whoever changed it, whatever the standby could not read in between, and whoever's clock is wrong."""
    reads = 0

    async def hook(name: str, call: Call) -> Any:
        nonlocal reads
        if name == "store.get_lease":
            reads += 1
            if fails(reads):
                raise Unavailable("no answer")
        return await call()

    world.ignore("P4")
    context = world.process(hook)
    ahead = timedelta(seconds=ahead_s)
    lease, changed_at = Lease(owner=owners[0], beat=1, beat_at=world.clock.now() - ahead), now_s()
    world.database.leases[LISTENER_LEASE] = lease
    taking = asyncio.create_task(ListenerLease(context, context.store, "own").acquire())
    for number in range(12):
        # Each pause is shorter than the limit, all of them together are much longer.
        await asyncio.sleep(20.0)
        assert not taking.done()
        owner, beat_at = owners[number % len(owners)], world.clock.now() - ahead
        lease, changed_at = replace(lease, owner=owner, beat=lease.beat + 1, beat_at=beat_at), now_s()
        world.database.leases[LISTENER_LEASE] = lease
    await asyncio.wait_for(taking, 2 * EXPIRES_S)
    assert EXPIRES_S <= now_s() - changed_at <= EXPIRES_S + 3 * READ_S
