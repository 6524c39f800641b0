"""Runs that ended on GitHub and were not released by their workflow: when a sweep releases them, and who says so."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from remuda.controlplane.doctor import release_check
from remuda.controlplane.read.explain import explain
from remuda.controlplane.read.status import status
from remuda.controlplane.refresh.ended_runs import CHECK_INTERVAL_S, MAX_CALLS, REFUSED_S
from remuda.controlplane.refresh.result import RefreshResult
from remuda.domain.errors import Conflict, RemudaError, Unavailable, Unreadable, UserError
from remuda.domain.instance import State
from remuda.domain.provision import Provision, ProvisionEnding, ProvisionStatus
from remuda.ports.doctor import CheckStatus
from remuda.ports.github import GitHubRun
from simulation.invariants import SCOPE
from simulation.memory.github import MemoryGitHub
from tests.support.virtual_time import Call, failing
from tests.support.world import LIFETIMES, PoolWorld

GRACE_S = 200.0
RUN = 77


@pytest.fixture
async def world() -> PoolWorld:
    world = PoolWorld(
        lifetimes=replace(
            LIFETIMES, max_runtime_s=21_600.0, idle_time_s=7_200.0, release_time_s=120.0, ended_run_grace_s=GRACE_S
        )
    )
    await world.configure()
    return world


def is_now(world: PoolWorld, status: str, *, attempt: int = 1, run_id: int = RUN) -> None:
    """Set the state of a run on GitHub."""
    world.github.runs[SCOPE.lower(), run_id] = GitHubRun(
        run_id=run_id, status=status, conclusion="", head_repository=SCOPE, attempt=attempt
    )


async def sweeps(world: PoolWorld, seconds: float, every_s: float = 30.0) -> list[RefreshResult]:
    found = []
    for _ in range(int(seconds / every_s)):
        await asyncio.sleep(every_s)
        found.append(await world.sweep())
        assert found[-1].errors == ()
    return found


def of_run(world: PoolWorld, run_id: str = str(RUN), attempt: int = 1) -> Provision:
    (found,) = [item for item in world.database.provisions.values() if (item.run_id, item.attempt) == (run_id, attempt)]
    return found


async def test_run_that_ends_without_a_release_is_released_after_the_grace_period(world: PoolWorld) -> None:
    is_now(world, "in_progress")
    await world.provision(str(RUN), repository=SCOPE, count=2)
    await sweeps(world, 600)
    assert len(world.in_state(State.RUNNING)) == 2
    is_now(world, "completed")
    await sweeps(world, CHECK_INTERVAL_S + 30)
    (warning,) = (await status(world.process())).warnings
    assert (warning.kind, warning.subject) == ("run-unreleased", "77")
    assert "has ended and still holds its instances: refresh releases them in" in warning.text
    results = await sweeps(world, GRACE_S + 120)
    assert len(world.in_state(State.IDLE)) == 2
    provision = of_run(world)
    assert (provision.status, provision.ending) == (ProvisionStatus.RELEASED, ProvisionEnding.UNRELEASED)
    (sentence,) = [text for result in results for text in result.warnings]
    assert sentence == (
        f"run 77 of {SCOPE} ended 4 min ago and was not released: its 2 instances return to the pool; "
        "add a release job with if: always() to its workflow"
    )
    assert [len(result.rolled_back) for result in results if result.rolled_back] == [2]


async def test_grace_period_begins_when_the_end_was_read_however_long_the_sweep_has_taken(world: PoolWorld) -> None:
    is_now(world, "in_progress")
    await world.provision(str(RUN), repository=SCOPE)

    async def slow(name: str, call: Call) -> Any:
        if name == "github.get_run":
            await asyncio.sleep(GRACE_S)
            is_now(world, "completed")
        return await call()

    await world.sweep(slow)
    await sweeps(world, GRACE_S - 30)
    assert len(world.in_state(State.RUNNING)) == 1
    await sweeps(world, 120)
    assert len(world.in_state(State.IDLE)) == 1


async def test_everyone_says_why_it_was_released(world: PoolWorld) -> None:
    is_now(world, "completed")
    made = await world.one(str(RUN), repository=SCOPE)
    await sweeps(world, GRACE_S + 120)
    explanation = await explain(world.process(), "77")
    why = "its workflow run ended in attempt 1 and did not release it"
    assert explanation.title == f"Run 77: unreleased ({why})"
    history = await explain(world.process(), made.instance_id)
    assert any(why in event.why for event in history.events)
    (warning,) = (await status(world.process())).warnings
    assert (warning.kind, warning.subject) == ("run-unreleased", "77")
    assert why in warning.text
    check = release_check(world.process().store.recent_provisions)
    found = await check.run()
    assert found.status is CheckStatus.WARNING
    assert "77" in found.message
    assert "if: always()" in found.fix


async def test_doctor_is_content_with_released_runs(world: PoolWorld) -> None:
    await world.provision(str(RUN), repository=SCOPE)
    await world.release(str(RUN))
    assert (await release_check(world.process().store.recent_provisions).run()).status is CheckStatus.OK


async def test_run_that_is_released_in_time_is_left_alone(world: PoolWorld) -> None:
    is_now(world, "completed")
    await world.provision(str(RUN), repository=SCOPE)
    await sweeps(world, GRACE_S - 60)
    await world.release(str(RUN))
    results = await sweeps(world, GRACE_S)
    assert of_run(world).ending is ProvisionEnding.RELEASED
    assert [text for result in results for text in result.warnings] == []
    assert (await status(world.process())).warnings == ()


async def test_rerun_within_the_grace_period_keeps_the_instances(world: PoolWorld) -> None:
    """Its id stays, and its jobs may need the instances of the first attempt."""
    is_now(world, "completed")
    await world.provision(str(RUN), repository=SCOPE)
    await sweeps(world, GRACE_S - 60)
    is_now(world, "in_progress", attempt=2)
    await sweeps(world, 600)
    assert len(world.in_state(State.RUNNING)) == 1
    is_now(world, "completed", attempt=2)
    await sweeps(world, CHECK_INTERVAL_S + GRACE_S - 60)
    assert len(world.in_state(State.RUNNING)) == 1, "the grace period begins again"
    await sweeps(world, 210)
    assert world.in_state(State.IDLE)


async def test_grace_period_begins_again_although_no_sweep_saw_the_rerun_in_progress(world: PoolWorld) -> None:
    is_now(world, "completed")
    await world.provision(str(RUN), repository=SCOPE)
    await sweeps(world, GRACE_S - 60)
    is_now(world, "completed", attempt=2)
    # The second end is found when the first period is over.
    await sweeps(world, GRACE_S + 60)
    assert len(world.in_state(State.RUNNING)) == 1
    await sweeps(world, 240)
    assert world.in_state(State.IDLE)


async def test_provision_of_a_newer_attempt_is_not_released(world: PoolWorld) -> None:
    """A re-run that began between the reads of the records and of GitHub."""
    is_now(world, "completed")
    await world.provision(str(RUN), repository=SCOPE)
    await sweeps(world, GRACE_S - 30)
    await world.provision(str(RUN), repository=SCOPE, attempt=2)
    await sweeps(world, 600)
    assert of_run(world, attempt=2).status is ProvisionStatus.COMMITTED
    assert of_run(world, attempt=1).ending is ProvisionEnding.UNRELEASED


async def test_run_that_github_does_not_call_ended_any_more_is_kept(world: PoolWorld) -> None:
    """GitHub is read just before the release."""
    is_now(world, "completed")
    await world.provision(str(RUN), repository=SCOPE)
    await sweeps(world, 30)
    is_now(world, "queued", attempt=2)
    await asyncio.sleep(GRACE_S)
    await world.sweep()
    assert world.in_state(State.RUNNING)


async def test_release_by_another_process_wins(world: PoolWorld) -> None:
    is_now(world, "completed")
    await world.provision(str(RUN), repository=SCOPE)
    await sweeps(world, 30)
    await asyncio.sleep(GRACE_S)

    async def hook(name: str, call: Call) -> Any:
        if name == "store.replace_provision":
            raise Conflict("it was released meanwhile")
        return await call()

    result = await world.sweep(hook)
    assert (result.warnings, result.errors) == ((), ())
    assert world.in_state(State.RUNNING)


async def test_running_job_is_not_killed(world: PoolWorld) -> None:
    """GitHub may be wrong about the end of a run: the instance is released, but its job ends first."""
    await world.provision(str(RUN), repository=SCOPE)
    job = world.github.queue(run_id=str(RUN), labels=(str(RUN),), seconds=GRACE_S + 200, repository=SCOPE)
    await sweeps(world, 30)
    is_now(world, "completed")
    await sweeps(world, GRACE_S + CHECK_INTERVAL_S + 30)
    assert world.in_state(State.RELEASING)
    await sweeps(world, 300)
    assert job.conclusion == "success"
    assert world.in_state(State.IDLE)


async def test_calls_are_limited_and_unchanged_runs_cost_nothing(world: PoolWorld) -> None:
    for number in range(100, 100 + MAX_CALLS + 5):
        is_now(world, "in_progress", run_id=number)
        await world.provision(str(number), repository=SCOPE)
    first = await world.sweep()
    assert first.calls["github"]["GET run"] == MAX_CALLS
    second = await world.sweep()
    assert second.calls["github"]["GET run"] == 5, "those that the first sweep left out; each run once a minute"
    assert "GET run" not in (await world.sweep()).calls["github"]


async def test_unknown_run_and_foreign_ids_keep_their_instances(world: PoolWorld) -> None:
    """GitHub answers 404 also to a credential that does not see the repository."""
    for run_id, repository in (("12", SCOPE), ("by-hand", SCOPE), ("13", "")):
        await world.provision(run_id, repository=repository)
    results = await sweeps(world, 900)
    assert len(world.in_state(State.RUNNING)) == 3
    assert [text for result in results for text in result.warnings] == []


async def test_missing_permission_is_said_once(world: PoolWorld) -> None:
    is_now(world, "completed")
    await world.provision(str(RUN), repository=SCOPE)
    asked = 0

    async def hook(name: str, call: Call) -> Any:
        nonlocal asked
        if name == "github.get_run":
            asked += 1
            raise UserError("GitHub refuses the credential (403)", fix=f"grant it to read Actions of {SCOPE}")
        return await call()

    results = []
    for _ in range(10):
        await asyncio.sleep(30)
        results.append(await world.sweep(hook))
    (sentence,) = [text for result in results for text in result.warnings]
    assert sentence.endswith(f"GitHub refuses the credential (403); grant it to read Actions of {SCOPE}")
    assert [result.errors for result in results] == [()] * 10
    assert asked == 1, "GitHub is asked again after an hour"
    await asyncio.sleep(REFUSED_S)
    await world.sweep()
    await sweeps(world, GRACE_S + 120)
    assert world.in_state(State.IDLE), "as soon as the permission is granted"


async def test_github_that_does_not_answer_is_asked_once_per_sweep(world: PoolWorld) -> None:
    for number in (1, 2, 3):
        is_now(world, "completed", run_id=number)
        await world.provision(str(number), repository=SCOPE)
    await world.sweep()
    asked = 0

    async def hook(name: str, call: Call) -> Any:
        nonlocal asked
        if name == "github.get_run":
            asked += 1
            raise Unavailable("GitHub did not respond")
        return await call()

    await asyncio.sleep(GRACE_S + 1)
    assert (await world.sweep(hook)).errors == ()
    assert asked == 1
    assert len(world.in_state(State.RUNNING)) == 3
    await world.sweep()
    assert len(world.in_state(State.RUNNING)) == 1, "the grace period was not forgotten"
    await asyncio.sleep(CHECK_INTERVAL_S)
    await world.sweep()
    assert len(world.in_state(State.RUNNING)) == 0


@pytest.mark.parametrize("problem", [Unreadable("the table", {"p-1": "no JSON"}), Unavailable("gone")])
async def test_run_that_cannot_be_released_does_not_stop_the_others(world: PoolWorld, problem: RemudaError) -> None:
    for number in (1, 2, 3):
        is_now(world, "completed", run_id=number)
        await world.provision(str(number), repository=SCOPE)
    await world.sweep()
    reads = 0

    async def hook(name: str, call: Call) -> Any:
        nonlocal reads
        if name == "store.provisions_of_run":
            reads += 1
            if reads == 1:
                raise problem
        return await call()

    await asyncio.sleep(GRACE_S + 1)
    result = await world.sweep(hook)
    assert reads == 3
    assert result.errors == (f"run 1 of {SCOPE.lower()} cannot be released: {problem.message}",)
    assert [of_run(world, str(number)).ending for number in (1, 2, 3)] == [
        None,
        ProvisionEnding.UNRELEASED,
        ProvisionEnding.UNRELEASED,
    ]


async def test_run_whose_instances_cannot_be_taken_back_is_reported_and_finished_later(world: PoolWorld) -> None:
    is_now(world, "completed")
    await world.provision(str(RUN), repository=SCOPE)
    await world.sweep()
    await asyncio.sleep(GRACE_S + 1)
    result = await world.sweep(failing("store.find_by_provision", Unavailable("the table is down")))
    assert result.errors == (f"run {RUN} of {SCOPE.lower()} cannot be released: the table is down",)
    assert len(result.warnings) == 1
    assert of_run(world).ending is ProvisionEnding.UNRELEASED
    assert (await world.sweep()).rolled_back


async def test_run_that_github_fails_to_read_does_not_starve_the_others(
    world: PoolWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        is_now(world, "completed", run_id=number)
        await world.provision(str(number), repository=SCOPE)

    get_run = MemoryGitHub.get_run

    async def fail_first(
        github: MemoryGitHub, scope: str, repository: str, run_id: int, *, etag: str = ""
    ) -> GitHubRun | None:
        if run_id == 1:
            raise Unavailable("GitHub answers 500")
        return await get_run(github, scope, repository, run_id, etag=etag)

    monkeypatch.setattr(MemoryGitHub, "get_run", fail_first)
    await sweeps(world, GRACE_S + 400)
    assert len(world.in_state(State.RUNNING)) == 1


@pytest.mark.parametrize("state", ["unknown", "of a newer attempt"])
async def test_each_run_is_asked_about_once_per_interval(world: PoolWorld, state: str) -> None:
    await world.provision(str(RUN), repository=SCOPE, attempt=2)
    if state != "unknown":
        is_now(world, "completed")
    results = await sweeps(world, GRACE_S + 900, every_s=10)
    calls = [result.calls["github"].get("GET run", 0) for result in results]
    assert 900 / CHECK_INTERVAL_S - 1 <= sum(calls) <= (GRACE_S + 900) / CHECK_INTERVAL_S + 1
    assert world.in_state(State.RUNNING)
