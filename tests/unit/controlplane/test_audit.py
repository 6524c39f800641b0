"""Audit of waiting jobs by refresh: which jobs it finds, how many calls it makes, and who shows the result."""

from __future__ import annotations

import asyncio
import json
from datetime import timedelta
from typing import Any

import pytest

from remuda.controlplane.doctor import _check_runner_sets
from remuda.controlplane.read.explain import explain
from remuda.controlplane.read.status import status
from remuda.controlplane.refresh.audit import MAX_CALLS, MAX_STORED
from remuda.controlplane.refresh.result import RefreshResult
from remuda.domain.demand import DemandRecord, DemandStatistics, JobRecord, Lease
from remuda.domain.errors import NotFound, Unavailable, UserError
from remuda.domain.reporting.demand import (
    LISTENER_SILENT_S,
    WAITING_LIMIT_S,
    DemandStatus,
    SessionState,
    WaitReason,
)
from remuda.domain.reporting.job_queue import AUDIT_INTERVAL_S
from remuda.domain.runner_set import RunnerSet
from remuda.domain.serialization import to_document
from simulation.invariants import SCOPE
from tests.support.virtual_time import failing
from tests.support.world import PoolWorld

LABELS = ("self-hosted", "remuda", "large")


def runner_set(name: str = "large", **changed: Any) -> RunnerSet:
    values: dict[str, Any] = {"labels": LABELS, "resource_class": "large", "scope": SCOPE, "max": 3}
    return RunnerSet(name=name, **{**values, **changed})


@pytest.fixture
async def world(world: PoolWorld) -> PoolWorld:
    await world.configure(runner_sets=(runner_set(),))
    await listen(world)
    return world


async def listen(world: PoolWorld, beat: int = 1, jobs: tuple[JobRecord, ...] = (), **statistics: int) -> None:
    """Write the lease, the demand record and the jobs of a listener."""
    store = world.process().store
    before = await store.get_lease("listener")
    await store.replace_lease("listener", before, Lease(owner="host", beat=beat, beat_at=world.clock.now()))
    stored = (await store.get_demand()).get("large")
    await store.put_demand(
        DemandRecord(
            revision=1 + (stored.revision if stored else 0),
            runner_set="large",
            session_id="session",
            owner="host",
            statistics=DemandStatistics(**statistics),
            updated_at=world.clock.now(),
        ),
        jobs,
    )


async def demand(world: PoolWorld) -> DemandStatus:
    return (await status(world.process())).demand


async def wait_and_sweep(world: PoolWorld, seconds: float = WAITING_LIMIT_S + 1) -> RefreshResult:
    await asyncio.sleep(seconds)
    await listen(world, beat=int(world.clock.now().timestamp()))
    return await world.sweep()


async def test_job_whose_labels_no_set_has(world: PoolWorld) -> None:
    job = world.github.queue(run_id="77", labels=["self-hosted", "gpu"], repository=SCOPE)
    world.github.queue(run_id="78", labels=["ubuntu-latest"], repository=SCOPE)
    result = await wait_and_sweep(world)
    (sentence,) = result.waiting_jobs
    assert "no runner has label gpu; sets: large (self-hosted, remuda, large)" in sentence
    (found,) = (await demand(world)).overdue
    assert (found.reason, found.run_id, found.job_id) == (WaitReason.NO_SET, "77", str(job.job_id))
    for subject in ("77", str(job.job_id)):
        explanation = await explain(world.process(), subject, command="deploy")
        why, command = explanation.next_steps
        assert why == f"job {found.name} waits: {found.detail}"
        assert command.startswith(f"to get a runner: remuda deploy --github-scope {SCOPE} --runner-sets ")
    job.started = True
    assert (await wait_and_sweep(world, AUDIT_INTERVAL_S + 1)).waiting_jobs == ()
    assert (await demand(world)).overdue == ()


async def test_recent_job_is_no_anomaly_yet(world: PoolWorld) -> None:
    await asyncio.sleep(AUDIT_INTERVAL_S)
    world.github.queue(run_id="77", labels=["self-hosted", "gpu"], repository=SCOPE)
    assert (await wait_and_sweep(world, WAITING_LIMIT_S - 5)).waiting_jobs == ()


async def test_job_that_another_runner_serves_is_none_of_ours(world: PoolWorld) -> None:
    world.ignore("S3")
    world.github.add(SCOPE, "own-machine", ["self-hosted", "GPU", "linux"])
    world.github.queue(run_id="77", labels=["self-hosted", "gpu"], repository=SCOPE)
    assert (await wait_and_sweep(world)).waiting_jobs == ()


@pytest.mark.parametrize("with_sets", [True, False])
@pytest.mark.parametrize(
    ("labels", "lacks", "use"),
    [
        (["self-hosted", "77"], "self-hosted", "${{ github.run_id }}"),
        # As workflows named the class in earlier versions.
        (["77", "large"], "large", "${{ github.run_id }}/large"),
    ],
)
async def test_job_with_a_label_that_the_runners_of_its_run_lack(
    world: PoolWorld, labels: list[str], lacks: str, use: str, *, with_sets: bool
) -> None:
    if not with_sets:
        await world.configure(runner_sets=())
    await asyncio.sleep(AUDIT_INTERVAL_S)
    await world.provision("77", repository=SCOPE)
    job = world.github.queue(run_id="77", labels=labels, repository=SCOPE)
    world.github.queue(run_id="77", labels=["ubuntu-latest"], repository=SCOPE)
    result = await wait_and_sweep(world, 10)
    (sentence,) = result.waiting_jobs
    why = f"no runner has label {lacks}; run 77 has runners with labels 77, 77/large: use runs-on: {use}"
    assert why in sentence
    (found,) = (await demand(world)).overdue
    assert (found.job_id, found.detail) == (str(job.job_id), why)
    explanation = await explain(world.process(), "77")
    assert f"job {found.name} waits: {why}" in explanation.next_steps
    if not with_sets:
        assert why in _check_runner_sets(await demand(world)).message
    await world.release("77")
    job.started = True
    assert (await wait_and_sweep(world, AUDIT_INTERVAL_S + 1)).waiting_jobs == ()


async def test_job_that_waits_for_a_busy_runner_of_its_run_is_no_anomaly(world: PoolWorld) -> None:
    await world.configure(runner_sets=())
    await world.provision("77", repository=SCOPE)
    for _ in range(2):
        world.github.queue(run_id="77", labels=["77"], seconds=600, repository=SCOPE)
    assert (await wait_and_sweep(world, 60)).waiting_jobs == ()
    await wait_and_sweep(world, 700)
    await world.release("77")


async def test_job_that_github_does_not_assign_to_its_set(world: PoolWorld) -> None:
    queued = world.github.queue(run_id="77", labels=LABELS, repository=SCOPE)
    await wait_and_sweep(world)
    (found,) = (await demand(world)).overdue
    assert (found.reason, found.runner_set) == (WaitReason.DISAGREEMENT, "large")
    known = JobRecord(
        revision=1,
        job_id="guid",
        runner_set="large",
        run_id="77",
        repository=SCOPE,
        display_name=f"job {queued.job_id}",
        seen_at=world.clock.now(),
    )
    await world.process().store.put_jobs([known])
    await wait_and_sweep(world)
    assert [item.job_id for item in (await demand(world)).overdue] == ["guid"]


async def test_queue_is_audited_every_five_minutes_and_unchanged_lists_are_not_read_again(world: PoolWorld) -> None:
    answers: list[Any] = []
    process = world.process(credentialed=True)
    github = process.github
    assert github is not None
    await wait_and_sweep(world)
    assert len((await process.store.get_sweep_record()).audit.empty_lists) == 2
    list_runs = type(github).list_runs

    async def spy(self: Any, *args: Any, **options: Any) -> Any:
        answers.append((options["status"], await list_runs(self, *args, **options)))
        return answers[-1][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(github), "list_runs", spy)
        await wait_and_sweep(world, 60)
        assert answers == []
        await wait_and_sweep(world)
        assert answers == [("queued", None), ("in_progress", None)]
    assert len((await process.store.get_sweep_record()).audit.empty_lists) == 2


async def test_calls_are_limited(world: PoolWorld) -> None:
    for number in range(60):
        world.github.queue(run_id=str(100 + number), labels=["self-hosted", "gpu"], repository=SCOPE)
    result = await wait_and_sweep(world)
    calls = result.calls["github"]
    assert calls["GET runs"] + calls["GET jobs"] == MAX_CALLS
    # The oldest have waited longest.
    runs = {int(sentence.partition(", run ")[2].partition(",")[0]) for sentence in result.waiting_jobs}
    assert runs == set(range(100, 100 + MAX_CALLS - 2))


async def test_stored_results_are_limited(world: PoolWorld) -> None:
    labels = ["self-hosted", *(f"{number}{'x' * 250}" for number in range(19))]
    for number in range(30):
        world.github.queue(run_id=str(100 + number), labels=labels, repository=SCOPE)
    assert 0 < len((await wait_and_sweep(world)).waiting_jobs) < 30
    record = await world.process().store.get_sweep_record()
    assert len(json.dumps(to_document(record))) < MAX_STORED + 1_000


async def test_organisation_is_audited_by_the_repositories_of_its_jobs(world: PoolWorld) -> None:
    owner = SCOPE.partition("/")[0]
    await world.configure(runner_sets=(runner_set(scope=owner),))
    world.github.queue(run_id="77", labels=["self-hosted", "gpu"], repository=SCOPE)
    assert (await wait_and_sweep(world)).waiting_jobs == ()
    known = JobRecord(
        revision=1,
        job_id="guid",
        runner_set="large",
        run_id="5",
        repository=SCOPE,
        seen_at=world.clock.now(),
        completed_at=world.clock.now(),
    )
    await world.process().store.put_jobs([known])
    assert len((await wait_and_sweep(world)).waiting_jobs) == 1


async def test_missing_permission_is_a_warning(world: PoolWorld) -> None:
    world.github.queue(run_id="77", labels=["self-hosted", "gpu"], repository=SCOPE)
    await wait_and_sweep(world)

    async def refuse(*_: Any, **__: Any) -> Any:
        raise UserError("GitHub refuses the credential", fix="grant it to read Actions")

    github = world.process(credentialed=True).github
    assert github is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(github), "list_runs", refuse)
        result = await wait_and_sweep(world)
    assert result.errors == ()
    found = await status(world.process())
    assert found.demand.unaudited == {SCOPE: "GitHub refuses the credential; grant it to read Actions"}
    assert [(item.kind, item.subject) for item in found.warnings] == [("waiting-job", SCOPE)]
    await wait_and_sweep(world)
    assert (await demand(world)).unaudited == {}


async def test_audit_that_fails_keeps_what_the_last_one_has_found(world: PoolWorld) -> None:
    world.github.queue(run_id="77", labels=["self-hosted", "gpu"], repository=SCOPE)
    await wait_and_sweep(world)
    result = await world.sweep(failing("store.recent_provisions", Unavailable("the table is down")))
    assert result.errors == ("waiting jobs: the table is down",)
    assert [job.run_id for job in (await demand(world)).overdue] == ["77"]


async def test_silent_listener_is_found_by_a_later_sweep(world: PoolWorld) -> None:
    await world.sweep()
    assert (await demand(world)).sets[0].session is SessionState.OPEN
    await asyncio.sleep(LISTENER_SILENT_S + 1)
    found = await demand(world)
    assert found.sets[0].session is SessionState.SILENT
    assert found.listener is not None
    assert found.listener.silent_since == world.clock.now() - timedelta(seconds=LISTENER_SILENT_S + 1)
    await listen(world, beat=2)
    assert (await demand(world)).sets[0].session is SessionState.OPEN


async def test_lasting_difference_of_the_counts_is_found(world: PoolWorld) -> None:
    await listen(world, beat=2, assigned=2)
    await world.sweep()
    assert (await demand(world)).disagreements == {}
    await asyncio.sleep(WAITING_LIMIT_S + 1)
    await listen(world, beat=3, assigned=2)
    await world.sweep()
    assert "large" in (await demand(world)).disagreements
    await listen(world, beat=4)
    await world.sweep()
    assert (await demand(world)).disagreements == {}


async def test_pool_without_sets_costs_no_call(world: PoolWorld) -> None:
    await world.configure(runner_sets=())
    process = world.process()
    assert (await status(process)).demand == DemandStatus()
    assert not {"get_demand", "get_lease", "recent_jobs"} & set(process.calls.by_service()["store"])
    assert "GET runs" not in (await wait_and_sweep(world)).calls["github"]


async def test_audit_that_has_not_read_all_runs_does_not_count_as_one(world: PoolWorld) -> None:
    before = (await demand(world)).queues_read_at
    for number in range(MAX_CALLS):
        world.github.queue(run_id=str(100 + number), labels=["ubuntu-latest"], repository=SCOPE)
    world.github.queue(run_id="999", labels=["self-hosted", "gpu"], repository=SCOPE)
    await wait_and_sweep(world)
    assert (await demand(world)).queues_read_at == before
    for job in world.github.jobs[:MAX_CALLS]:
        job.conclusion = "success"
    await wait_and_sweep(world)
    read_at = (await demand(world)).queues_read_at
    assert read_at != before
    assert [job.run_id for job in (await demand(world)).overdue] == ["999"]
    # More runs than calls: what was found before is kept with its time.
    for number in range(MAX_CALLS):
        world.github.queue(run_id=str(200 + number), labels=["ubuntu-latest"], repository=SCOPE)
    await wait_and_sweep(world)
    found = await demand(world)
    assert (found.queues_read_at, [job.run_id for job in found.overdue]) == (read_at, ["999"])


async def test_queue_of_a_deleted_repository_is_forgotten(world: PoolWorld) -> None:
    async def find_nothing(*_: Any, **__: Any) -> Any:
        raise NotFound("GitHub answers 404")

    world.github.queue(run_id="77", labels=["self-hosted", "gpu"], repository=SCOPE)
    await wait_and_sweep(world)
    assert len((await demand(world)).overdue) == 1
    github = world.process(credentialed=True).github
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(github), "list_runs", find_nothing)
        await wait_and_sweep(world)
    found = await demand(world)
    assert (found.overdue, found.queues_read_at) == ((), {})
