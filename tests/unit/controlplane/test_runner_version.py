"""The version of the actions runner: how refresh finds it, stores it, and replaces machines with another one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from remuda.cli.rendering.results import applied_lines, refresh_document
from remuda.cli.rendering.status import status_document
from remuda.controlplane.read.status import status
from remuda.controlplane.refresh import RefreshResult, refresh
from remuda.domain.errors import Unavailable, UserError
from remuda.domain.instance import Instance, RetireReason, State
from remuda.domain.reporting.warnings import WarningKind
from remuda.domain.runner_release import SHA256, URL, VERSION, RunnerRelease
from simulation.memory.github import runner_release
from tests.support.virtual_time import AmbiguousAnswer
from tests.support.world import LIFETIMES, PoolWorld

LATEST = {VERSION: "latest"}
FIXED = {VERSION: "2.336.0", SHA256: "0" * 64}
#: Machines stay idle for longer than the tests take.
LONG_LIVED = replace(LIFETIMES, idle_time_s=300.0)
DOWNLOADS = "github.runner_downloads"


def release(world: PoolWorld) -> RunnerRelease:
    assert world.database.config is not None
    assert world.database.config.runner is not None
    return world.database.config.runner


async def configure(world: PoolWorld, launch: dict[str, str] = LATEST, **changed: Any) -> RefreshResult:
    return await world.configure(launch=launch, lifetimes=LONG_LIVED, **changed)


async def without_answer(world: PoolWorld, launch: dict[str, str] = LATEST) -> RefreshResult:
    """Refresh while GitHub does not list its packages."""
    hook = AmbiguousAnswer(DOWNLOADS, applied=False, at=range(1, 100))
    desired = world.configuration(launch=launch, lifetimes=LONG_LIVED)
    return await refresh(world.process(hook, credentialed=True), desired)


def records(world: PoolWorld) -> list[Instance]:
    return list(world.database.instances.values())


# Resolution


async def test_refresh_finds_the_newest_version_and_installs_it() -> None:
    world = PoolWorld()
    await configure(world)
    newest = runner_release("2.336.0")
    assert (release(world).version, release(world).packages) == ("2.336.0", newest.packages)
    assert world.cloud.prepared == newest.launch_options()
    assert world.database.config is not None
    assert world.database.config.launch == LATEST, "the setting stays as the user wrote it"
    assert (await configure(world)).applied == ()


async def test_new_version_is_applied_and_reported(world: PoolWorld) -> None:
    await configure(world)
    world.github.runner_version = "2.337.0"
    result = await configure(world)
    assert applied_lines(refresh_document(result)) == ["actions runner: 2.336.0 -> 2.337.0"]
    assert world.cloud.prepared[VERSION] == "2.337.0"
    assert (await world.one()).runner_version == "2.337.0"


async def test_first_refresh_without_an_answer_fails_and_stores_nothing() -> None:
    world = PoolWorld()
    with pytest.raises(Unavailable, match="newest version of the actions runner"):
        await without_answer(world)
    assert world.database.config is None


async def test_stored_version_stays_without_an_answer(world: PoolWorld) -> None:
    await configure(world)
    before = release(world)
    result = await without_answer(world)
    assert [error for error in result.errors if "new machines install 2.336.0" in error]
    assert release(world) == before
    assert world.cloud.prepared == before.launch_options()


async def test_fixed_version_needs_no_answer() -> None:
    world = PoolWorld()
    result = await without_answer(world, FIXED)
    assert len(result.errors) == 1
    assert {item.sha256 for item in release(world).packages} == {"0" * 64}
    assert world.cloud.prepared[URL].startswith("x64=https://github.com/actions/runner/releases/download/v2.336.0/")


async def test_invalid_option_is_rejected_before_anything_is_stored() -> None:
    world = PoolWorld()
    with pytest.raises(UserError, match=r"2\.329\.0"):
        await world.configure(launch={**FIXED, VERSION: "2.300.0"})
    assert world.database.config is None


@pytest.mark.parametrize("launch", [{}, {VERSION: "image"}])
async def test_github_is_not_asked_if_no_runner_is_installed(launch: dict[str, str]) -> None:
    """Such as by the local backend, which has no such option."""
    world = PoolWorld()
    result = await world.configure(launch=launch)
    assert "GET downloads" not in result.calls["github"]
    assert world.database.config is not None
    assert world.database.config.runner is None
    assert (await world.one()).runner_version == ""


async def test_newer_version_is_recorded_for_a_fixed_one(world: PoolWorld) -> None:
    await configure(world, FIXED)
    world.github.runner_version = "2.337.0"
    await configure(world, FIXED)
    assert (release(world).version, release(world).latest) == ("2.336.0", "2.337.0")
    assert release(world).outdated_since is not None
    first = release(world).outdated_since
    await asyncio.sleep(1_000)
    await configure(world, FIXED)
    assert release(world).outdated_since == first


# Machines


async def test_new_version_replaces_idle_machines_and_no_busy_one(world: PoolWorld) -> None:
    await configure(world)
    idle = set(await world.warm(2))
    busy = [item.instance.instance_id for item in (await world.provision("2", count=3)).instances]
    assert idle < set(busy)
    idle = set(await world.warm(2, resource_class="xlarge"))
    job = world.github.queue(run_id="2", labels=["2"], seconds=60)
    world.github.runner_version = "2.337.0"
    result = await configure(world)
    assert set(result.retired) == idle
    assert {record.retire_reason for record in records(world) if record.instance_id in idle} == {RetireReason.OUTDATED}
    await world.pass_time(30)
    assert set(world.in_state(State.RUNNING)) == set(busy)
    released = await world.release("2")
    assert not released.errors
    assert job.conclusion == "success"
    ended = {record.instance_id: record.retire_reason for record in records(world) if record.instance_id in busy}
    assert ended == dict.fromkeys(busy, RetireReason.OUTDATED), "a release does not return them to the pool"
    fresh = await world.provision("3")
    assert fresh.created == 1
    assert await world.warm(1, resource_class="2xlarge")
    await world.pass_time(30)
    assert {world.record(name).runner_version for name in world.in_state(State.IDLE)} == {"2.337.0"}
    world.check()


async def test_machines_of_an_unknown_version_stay(world: PoolWorld) -> None:
    await world.configure(lifetimes=LONG_LIVED)
    idle = await world.warm(1)
    await configure(world)
    await world.pass_time(100)
    assert world.in_state(State.IDLE) == idle


async def test_image_keeps_the_machines_of_any_version(world: PoolWorld) -> None:
    await configure(world)
    idle = await world.warm(1)
    await configure(world, {VERSION: "image"})
    await world.pass_time(100)
    assert world.in_state(State.IDLE) == idle


async def test_quarantined_machine_stays(world: PoolWorld) -> None:
    world.ignore("T1", "W1", "S17")
    await configure(world)
    (name,) = await world.warm(1)
    until = world.clock.now() + timedelta(seconds=100)
    world.database.instances[name] = replace(
        world.database.instances[name], quarantined_until=until, retire_reason=RetireReason.QUARANTINED
    )
    world.github.runner_version = "2.337.0"
    assert not (await configure(world)).retired
    assert world.database.instances[name].state is State.IDLE


# Warnings


async def test_refresh_and_status_warn_before_the_version_is_refused(world: PoolWorld) -> None:
    await configure(world, FIXED)
    world.github.runner_version = "2.337.0"
    assert not (await configure(world, FIXED)).warnings
    found = status_document(await status(world.process()))
    assert found["runner"]["version"] == "2.336.0"
    assert found["runner"]["latest"] == "2.337.0"
    assert found["warnings"] == []
    assert world.database.config is not None
    since = world.clock.now() - timedelta(days=24)
    world.database.config = replace(
        world.database.config, runner=replace(release(world), outdated_since=since, checked_at=world.clock.now())
    )
    result = await world.sweep()
    assert len(result.warnings) == 1
    assert "runners of version 2.336.0, because 2.337.0 is out" in result.warnings[0]
    assert refresh_document(result)["warnings"] == list(result.warnings)
    seen = await status(world.process())
    assert [(item.kind, item.subject) for item in seen.warnings] == [(WarningKind.RUNNER_VERSION, "2.336.0")]
    assert seen.warnings[0].text == result.warnings[0]
