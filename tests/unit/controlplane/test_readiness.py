"""A new listener completes the launch of its instance when it could serve the pool, and not before."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from remuda.controlplane.demand.readiness import ATTEMPTS, RETRY_S
from remuda.domain.errors import RemudaError, Unavailable, UserError
from tests.support.set_world import DemandWorld
from tests.support.virtual_time import Call, failing


class FakeLaunch:
    """The launch of an instance by an Auto Scaling group, which waits for one completion."""

    def __init__(self, *errors: RemudaError) -> None:
        self.errors = list(errors)
        self.completed = self.calls = 0

    async def complete(self) -> bool:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        self.completed += 1
        return self.completed == 1


async def test_listener_that_serves_completes_its_launch(sets: DemandWorld) -> None:
    launch = FakeLaunch()
    listener = sets.listen(launch=launch)
    await asyncio.sleep(60.0)
    assert (launch.calls, launch.completed) == (1, 1)
    assert [action for action, _ in listener.events].count("launch-completed") == 1


async def test_standby_completes_its_launch_so_that_its_predecessor_may_end(sets: DemandWorld) -> None:
    sets.listen()
    await asyncio.sleep(10.0)
    launch = FakeLaunch()
    standby = sets.listen(launch=launch)
    await asyncio.sleep(60.0)
    assert launch.completed == 1
    assert ("standby", "listener-1 serves the pool") in standby.events


@pytest.mark.parametrize("operation", ["source.find_set", "store.get_config", "store.get_lease"])
async def test_standby_that_reaches_less_than_it_needs_does_not_complete(sets: DemandWorld, operation: str) -> None:
    sets.listen()
    await asyncio.sleep(10.0)
    launch = FakeLaunch()
    sets.listen(failing(operation, Unavailable("no answer")), launch)
    await asyncio.sleep(600.0)
    assert launch.calls == 0


async def test_listener_that_cannot_serve_does_not_complete(sets: DemandWorld) -> None:
    launch = FakeLaunch()
    listener = sets.listen(failing("store.get_demand", UserError("denied")), launch)
    await asyncio.sleep(600.0)
    assert listener.task.done()
    assert launch.calls == 0


async def test_listener_completes_when_github_answers_again(sets: DemandWorld) -> None:
    sets.listen()
    await asyncio.sleep(10.0)
    is_down = True

    async def hook(name: str, call: Call) -> Any:
        if is_down and name == "source.find_set":
            raise Unavailable("GitHub does not answer")
        return await call()

    launch = FakeLaunch()
    standby = sets.listen(hook, launch)
    await asyncio.sleep(60.0)
    assert (launch.calls, ("launch-not-completed", "GitHub does not answer") in standby.events) == (0, True)
    is_down = False
    await sets.wait_for(lambda: launch.completed, RETRY_S + 1.0)


async def test_credential_that_github_refuses_to_the_old_listener_too_is_no_obstacle(sets: DemandWorld) -> None:
    sets.listen()
    await asyncio.sleep(10.0)
    launch = FakeLaunch()
    sets.listen(failing("source.find_set", UserError("the credential is rejected")), launch)
    await asyncio.sleep(60.0)
    assert launch.completed == 1


async def test_failed_reports_are_repeated_until_nothing_can_wait_any_more(sets: DemandWorld) -> None:
    launch = FakeLaunch(Unavailable("throttled"), UserError("denied"))
    sets.listen(launch=launch)
    await asyncio.sleep(60.0)
    assert (launch.calls, launch.completed) == (3, 1)
    refused = FakeLaunch(*[UserError("denied")] * 1_000)
    sets.listen(launch=refused)
    await asyncio.sleep(2 * ATTEMPTS * RETRY_S)
    assert refused.calls == ATTEMPTS
