"""A GitHub that hangs, or answers late: instances are still given back in time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from remuda.adapters.github.client import TIMEOUT_S as GITHUB_TIMEOUT_S
from remuda.controlplane.context import CONCURRENCY
from remuda.controlplane.provision.plan import ROLLBACK_RESERVE_S
from remuda.controlplane.reconcile import TOKEN_TIMEOUT_S
from remuda.controlplane.refresh import refresh
from remuda.domain.errors import CapacityError, RemudaError, TimedOut, Unavailable
from remuda.domain.instance import ASSIGNED, State
from remuda.domain.provision import ProvisionStatus
from tests.support.virtual_time import Call, Cut, CutKind, EventRecorder, hanging
from tests.support.world import PoolWorld


def provision_status(world: PoolWorld, run_id: str = "1") -> set[ProvisionStatus]:
    return {item.status for item in world.database.provisions.values() if item.run_id == run_id}


async def test_rollback_gives_everything_back(world: PoolWorld) -> None:
    """New instances and the provision do not wait for GitHub; claimed instances use the pool's token."""
    ids = await world.warm(1)
    world.cloud.capacity = dict.fromkeys([kind.name for kind in world.cloud.types], 0) | {"c6i.large": 3}
    before_token: list[Any] = []
    hang = hanging("github.removal_token")

    async def hook(name: str, call: Call) -> Any:
        if name == "github.removal_token":
            before_token.append(
                (world.in_state(State.CLAIMED), world.in_state(State.TERMINATING), provision_status(world))
            )
        return await hang(name, call)

    with pytest.raises(CapacityError):
        await world.provision(count=4, process=world.process(hook, credentialed=True))
    ((claimed, ended, statuses),) = before_token
    assert (claimed, len(ended), statuses) == (ids, 2, {ProvisionStatus.RELEASED})
    world.check_holds_nothing("1")
    assert world.in_state(State.RELEASING) == ids
    await world.pass_time(15)
    assert world.in_state(State.IDLE) == ids


async def test_rollback_of_a_short_provision_is_within_its_reserve(world: PoolWorld) -> None:
    """The token may not take longer than what is left of the claimed instance's time."""
    ids = await world.warm(1)
    world.behaviour.configure_s = 50.0
    process = world.process(hanging("github.removal_token"), credentialed=True)
    with pytest.raises(TimedOut):
        await world.provision(timeout_s=10.0, process=process)
    assert world.in_state(State.RELEASING) == ids


async def test_rollback_without_a_token_closes_the_provision(world: PoolWorld) -> None:
    """In a scope for which the pool has no token, sweeps release the claimed instances."""
    ids = await world.warm(1)
    world.cloud.capacity = dict.fromkeys([kind.name for kind in world.cloud.types], 0)
    process = world.process(hanging("github.removal_token"), credentialed=True)
    with pytest.raises(CapacityError):
        await world.provision(count=2, scope="octo/other", process=process)
    assert provision_status(world) == {ProvisionStatus.RELEASED}
    assert world.in_state(State.CLAIMED) == ids
    assert isinstance(process.event_log, EventRecorder)
    assert process.event_log.count("rollback-incomplete") == 1
    await world.sweep()
    assert world.in_state(State.CLAIMED) == []


async def test_rollback_of_a_failed_commit_of_ephemeral_runners(world: PoolWorld) -> None:
    """The registrations are left to a sweep, the instances are not."""

    async def hook(name: str, call: Call) -> Any:
        if name == "store.replace_provision" and world.in_state(State.RUNNING):
            raise Unavailable("no answer of the store")
        return await hanging("github.delete_runner")(name, call)

    with pytest.raises(RemudaError):
        await world.provision(count=2, ephemeral=True, process=world.process(hook, credentialed=True))
    assert len(world.in_state(State.RELEASING)) == 2
    assert world.registrations()


async def test_late_registration_token_leaves_the_reserve_for_the_rollback(world: PoolWorld) -> None:
    """The time that GitHub takes counts for the deadline of the instances and for that of the provision."""
    ids = await world.warm(1)
    world.behaviour.boot_s = 500.0
    started = world.loop.time()

    async def hook(name: str, call: Call) -> Any:
        if name == "github.registration_token":
            await asyncio.sleep(ROLLBACK_RESERVE_S + 2)
        return await call()

    with pytest.raises(RemudaError):
        await world.provision(count=2, timeout_s=100.0, process=world.process(hook, credentialed=True))
    assert world.loop.time() - started <= 100.0 - ROLLBACK_RESERVE_S / 2
    # The machine of the pool is healthy: it is given back, not left to expire.
    world.check_holds_nothing("1")
    assert [world.record(key).state for key in ids] == [State.RELEASING]


async def test_release_uses_the_pool_token(world: PoolWorld) -> None:
    """All instances of a run wait together."""
    count = CONCURRENCY + 6
    await world.provision(count=count)
    started = world.loop.time()
    process = world.process(hanging("github.removal_token"), credentialed=True)
    releasing = asyncio.create_task(world.release(process=process))
    await asyncio.sleep(TOKEN_TIMEOUT_S + 0.1)
    assert len(world.in_state(State.RELEASING)) == count
    result = await releasing
    assert not result.errors
    assert len(world.in_state(State.IDLE)) == count
    assert world.loop.time() - started < 2 * TOKEN_TIMEOUT_S


async def test_pool_token_is_used_for_a_while_only(world: PoolWorld) -> None:
    """A process that runs on mints again when GitHub answers."""
    is_hanging = True

    async def hook(name: str, call: Call) -> Any:
        return await (hanging("github")(name, call) if is_hanging else call())

    process = world.process(hook, credentialed=True)
    await world.provision()
    await world.release(process=process)
    is_hanging = False
    await asyncio.sleep(60)
    await world.provision("2")
    result = await world.release("2", process=process)
    assert result.calls["github"]["POST remove-token"] == 1


async def test_release_of_ephemeral_runners(world: PoolWorld) -> None:
    """The deletion of their registrations is limited as well."""
    await world.provision(count=2, ephemeral=True, process=world.process(credentialed=True))
    process = world.process(hanging("github"), credentialed=True)
    releasing = asyncio.create_task(world.release(process=process))
    await asyncio.sleep(2 * TOKEN_TIMEOUT_S + 0.1)
    assert not world.in_state(*ASSIGNED)
    assert not (await releasing).errors
    assert isinstance(process.event_log, EventRecorder)
    assert process.event_log.lines.count(("deregistration-failed", "timeout")) == 2


async def test_sweep_takes_back_instances_of_a_released_provision(world: PoolWorld) -> None:
    await world.provision(count=2)
    cut = Cut(4, CutKind.CRASH_AFTER)
    await cut.run(world.release(process=world.process(cut)))
    assert provision_status(world) == {ProvisionStatus.RELEASED}
    assert len(world.in_state(State.RUNNING)) == 2
    result = await world.sweep(hanging("github"))
    assert len(result.rolled_back) == 2
    assert not world.in_state(*ASSIGNED)
    await cut.discard()


async def test_refresh_with_configuration_sweeps(world: PoolWorld) -> None:
    """Also if the tokens are due: the stored ones are kept, and the failure is reported."""
    (instance_id,) = await world.warm(1)
    await world.configure(scope="octo/other")
    await asyncio.sleep(700)
    assert world.database.config is not None
    tokens = world.database.config.tokens
    started = world.loop.time()
    process = world.process(hanging("github"), credentialed=True)
    result = await refresh(process, world.configuration())
    assert instance_id in result.retired
    assert sum("tokens for" in error for error in result.errors) == 2
    assert world.database.config.tokens == tokens
    # The scopes do not wait for one another: tokens twice, the newest runner, the lists of runners.
    assert world.loop.time() - started <= 4 * GITHUB_TIMEOUT_S + 1


async def test_first_refresh_fails(world: PoolWorld) -> None:
    """Without stored tokens there is nothing to go on with."""
    process = world.process(hanging("github"), credentialed=True)
    with pytest.raises(TimedOut):
        await refresh(process, world.configuration(scope="octo/other"))
