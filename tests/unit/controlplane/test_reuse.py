"""Reuse policy: which runs may share a machine; ephemeral instances: registered just in time for one job each."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from remuda.controlplane.release import ReleaseStatus
from remuda.domain.errors import Conflict, RemudaError, Throttled, Unavailable, UserError
from remuda.domain.instance import RetireReason, State
from remuda.domain.resources import Reuse, Tier
from tests.support.virtual_time import Call
from tests.support.world import PoolWorld

T, U = Tier.TRUSTED, Tier.UNTRUSTED
ONE, TWO = "octo/one", "octo/two"


@pytest.mark.parametrize(
    ("reuse", "first", "then", "expected"),
    [
        (Reuse.SAME_TRUST, (T, ONE), (T, TWO), True),
        (Reuse.SAME_TRUST, (U, ONE), (U, TWO), True),
        (Reuse.SAME_TRUST, (T, ONE), (U, ONE), False),
        (Reuse.SAME_TRUST, (U, ONE), (T, ONE), False),
        (Reuse.SAME_REPO, (T, ONE), (T, ONE), True),
        (Reuse.SAME_REPO, (T, ONE), (T, "Octo/One"), True),
        (Reuse.SAME_REPO, (T, ONE), (T, TWO), False),
        (Reuse.SAME_REPO, (T, ONE), (U, ONE), False),
        (Reuse.SAME_REPO, (U, ONE), (T, ONE), False),
        (Reuse.ALWAYS, (T, ONE), (T, TWO), True),
        (Reuse.ALWAYS, (T, ONE), (U, TWO), True),
        (Reuse.ALWAYS, (U, ONE), (U, TWO), True),
        (Reuse.ALWAYS, (U, ONE), (T, ONE), False),
        (Reuse.NEVER, (T, ONE), (T, ONE), False),
    ],
)
async def test_reuse_policy_decides_which_runs_share_machines(
    world: PoolWorld, reuse: Reuse, first: tuple[Tier, str], then: tuple[Tier, str], *, expected: bool
) -> None:
    await world.configure(reuse=reuse)
    await world.warm(1, tier=first[0], repository=first[1])
    result = await world.provision("1", tier=then[0], repository=then[1])
    assert (result.reused == 1) is expected


async def test_tier_of_a_machine_never_rises(world: PoolWorld) -> None:
    await world.configure(reuse=Reuse.ALWAYS)
    (machine,) = await world.warm(1, tier=T)
    assert (await world.provision("1", tier=U)).reused == 1
    assert world.record(machine).tier is U
    await world.release("1")
    assert world.messages() == [machine]
    assert (await world.provision("2", tier=T)).created == 1
    assert world.record(machine).state is State.IDLE
    history = [item.why for item in world.database.histories[machine] if item.transition == "claim"]
    assert history == ["matches the request; tier untrusted from now on"]


async def test_machine_of_two_repositories_is_not_reused_after_policy_change(world: PoolWorld) -> None:
    await world.configure(reuse=Reuse.ALWAYS)
    (machine,) = await world.warm(1, repository=ONE)
    assert world.record(machine).repository == ONE
    assert (await world.provision("1", repository=TWO)).reused == 1
    assert world.record(machine).repository == ""
    await world.release("1")
    await world.configure(reuse=Reuse.SAME_REPO)
    for run_id, repository in (("2", ONE), ("3", TWO)):
        assert (await world.provision(run_id, repository=repository)).created == 1
        await world.release(run_id)


async def test_machine_of_an_unknown_repository_is_not_reused(world: PoolWorld) -> None:
    (machine,) = await world.warm(1)
    assert world.record(machine).repository == ""
    assert (await world.provision("1", repository=ONE)).reused == 1
    assert world.record(machine).repository == ""


@pytest.mark.parametrize("wrong", [{"repository": TWO}, {"tier": T}])
async def test_wrong_pool_message_claims_nothing_and_is_deleted(world: PoolWorld, wrong: dict[str, Any]) -> None:
    """The claim's conditional write checks the record, not the message."""
    await world.configure(reuse=Reuse.SAME_REPO)
    (machine,) = await world.warm(1, tier=U, repository=ONE)
    (sent,) = world.queues.named("large").messages
    assert sent.message is not None
    sent.message = replace(sent.message, **wrong)
    request: dict[str, Any] = {"tier": U, "repository": ONE, **wrong}
    result = await world.provision("1", **request)
    assert (result.created, result.rejected["claim-lost"]) == (1, 1)
    assert world.record(machine).state is State.IDLE
    assert world.messages() == []


async def test_same_repo_requires_the_repository(world: PoolWorld) -> None:
    await world.configure(reuse=Reuse.SAME_REPO)
    with pytest.raises(UserError, match="the repository of run 1 is unknown") as refused:
        await world.provision("1")
    assert refused.value.field == "repository"
    assert not world.database.provisions


async def test_reuse_never_gives_each_machine_one_run(world: PoolWorld) -> None:
    await world.configure(reuse=Reuse.NEVER)
    made = await world.provision("1", count=2)
    machines = [item.instance.instance_id for item in made.instances]
    assert {world.record(machine).retire_reason for machine in machines} == {RetireReason.NEVER_REUSED}
    done = await world.release("1")
    assert {outcome.why for outcome in done.outcomes} == {"never reused"}
    assert world.in_state(State.TERMINATING) == sorted(machines)
    ends = [world.database.histories[machine][-1].retire_reason for machine in machines]
    assert ends == [RetireReason.NEVER_REUSED] * 2
    assert world.messages() == []


async def test_idle_machines_of_an_earlier_policy_are_terminated(world: PoolWorld) -> None:
    (idle,) = await world.warm(1)
    made = await world.provision("1")
    (working,) = (item.instance.instance_id for item in made.instances)
    assert working == idle
    (second,) = await world.warm(1)
    await world.configure(reuse=Reuse.NEVER)
    assert world.record(second).state is State.TERMINATING
    # A running instance finishes its run first.
    assert world.record(working).state is State.RUNNING
    await world.release("1")
    assert world.record(working).state is State.TERMINATING


async def test_policy_change_is_reported(world: PoolWorld) -> None:
    result = await world.configure(reuse=Reuse.SAME_REPO)
    assert result.applied == ("reuse",)


async def test_assignment_contains_the_repository(world: PoolWorld) -> None:
    made = await world.provision("1", repository="Octo/One")
    (item,) = made.instances
    assert item.instance.assignment is not None
    assert (item.instance.assignment.repository, item.instance.repository) == ("Octo/One", ONE)


async def provisioned(world: PoolWorld, count: int = 1, hook: Any = None) -> list[str]:
    process = world.process(hook, credentialed=True)
    made = await world.provision("1", count=count, ephemeral=True, process=process)
    assert (made.created, made.ephemeral) == (count, True)
    return sorted(item.instance.instance_id for item in made.instances)


async def test_ephemeral_provision_requires_a_credential(world: PoolWorld) -> None:
    process = world.process()
    with pytest.raises(UserError, match="ephemeral runners need a GitHub credential") as refused:
        await world.provision("1", ephemeral=True, process=process)
    assert (refused.value.field, "REMUDA_GITHUB_TOKEN" in refused.value.fix) == ("ephemeral", True)
    assert not any(process.calls.by_service().values())


async def test_scope_outside_the_pool_is_rejected(world: PoolWorld) -> None:
    with pytest.raises(UserError, match="octo/other"):
        await world.provision("1", ephemeral=True, scope="octo/other", process=world.process(credentialed=True))
    assert not world.registrations()


async def test_ephemeral_provision_takes_nothing_from_the_pool(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    (machine,) = await provisioned(world)
    assert machine != warm
    assert world.record(warm).state is State.IDLE
    record = world.record(machine)
    assert (record.retire_reason, record.state) == (RetireReason.EPHEMERAL, State.RUNNING)


@pytest.mark.parametrize("credentialed", [True, False])
async def test_ephemeral_instance_runs_one_job_and_is_terminated(world: PoolWorld, credentialed: bool) -> None:  # noqa: FBT001
    machines = await provisioned(world, 2)
    jobs = [world.github.queue(run_id="1", labels=("1",)) for _ in range(3)]
    await asyncio.sleep(20)
    # Each has run one job. The third job stays queued, and no listener has failed.
    assert sorted(job.conclusion for job in jobs) == ["", "success", "success"]
    assert world.registrations() == []
    await world.sweep()
    assert world.in_state(State.RUNNING) == machines
    done = await world.release("1", process=world.process(credentialed=credentialed))
    assert {(item.status, item.why) for item in done.outcomes} == {(ReleaseStatus.RETIRED, "ephemeral")}
    assert world.in_state(State.TERMINATING) == machines
    assert {world.database.histories[machine][-1].retire_reason for machine in machines} == {RetireReason.EPHEMERAL}


async def test_release_with_a_credential_removes_unused_registration(world: PoolWorld) -> None:
    (machine,) = await provisioned(world)
    assert len(world.registrations(machine)) == 1
    done = await world.release("1", process=world.process(credentialed=True))
    assert [(item.status, item.why) for item in done.outcomes] == [(ReleaseStatus.RETIRED, "ephemeral")]
    assert world.registrations() == []


async def test_without_a_credential_a_sweep_removes_the_registration(world: PoolWorld) -> None:
    (machine,) = await provisioned(world)
    done = await world.release("1")
    assert [item.status for item in done.outcomes] == [ReleaseStatus.RETIRED]
    assert world.record(machine).state is State.TERMINATING
    await world.sweep()
    assert world.registrations() == []


async def test_release_waits_for_the_job(world: PoolWorld) -> None:
    (machine,) = await provisioned(world)
    job = world.github.queue(run_id="1", labels=("1",), seconds=15.0)
    await asyncio.sleep(5)
    done = await world.release("1", process=world.process(credentialed=True))
    assert job.conclusion == "success"
    assert [(item.status, item.why) for item in done.outcomes] == [(ReleaseStatus.RETIRED, "ephemeral")]
    assert world.record(machine).state is State.TERMINATING


async def test_release_before_boot_removes_the_registration(world: PoolWorld) -> None:
    world.behaviour.boot_s = 30.0
    provisioning = asyncio.create_task(provisioned(world))
    await asyncio.sleep(5)
    assert len(world.registrations()) == 1
    await world.release("1", process=world.process(credentialed=True))
    with pytest.raises(RemudaError):
        await provisioning
    assert world.registrations() == []


async def test_jit_config_is_removed_from_the_record_after_its_step(world: PoolWorld) -> None:
    seen: set[tuple[State, bool]] = set()
    tell = world.database.changes.notify

    def watch(key: tuple[type, str]) -> None:
        record = world.database.instances.get(key[1])
        if record is not None and record.assignment is not None:
            seen.add((record.state, bool(record.assignment.jit_config)))
        tell(key)

    world.database.changes.notify = watch  # type: ignore[method-assign]
    await provisioned(world)
    await world.release("1", process=world.process(credentialed=True))
    assert seen == {(State.CREATED, True), (State.RUNNING, False), (State.RELEASING, False)}


FAILURES = [Throttled("slowly"), Unavailable("GitHub is away"), Conflict("it exists"), UserError("403", field="x")]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda item: type(item).__name__)
async def test_failed_jit_registration_leaves_nothing(world: PoolWorld, failure: RemudaError) -> None:
    asked = 0

    async def hook(name: str, call: Call) -> Any:
        nonlocal asked
        if name == "github.jit_config":
            asked += 1
            if asked == 2:
                raise failure
        return await call()

    with pytest.raises(RemudaError) as raised:
        await provisioned(world, 3, hook)
    assert not isinstance(raised.value, Conflict)
    assert asked == 3
    world.check_holds_nothing("1")
    assert world.registrations() == []
    assert len(world.in_state(State.TERMINATING)) == 3


async def test_failed_provision_leaves_no_registration(world: PoolWorld) -> None:
    world.behaviour.boot_s = 1_000.0
    with pytest.raises(Unavailable):
        await provisioned(world, 2)
    world.check_holds_nothing("1")
    assert world.registrations() == []


async def test_provision_interrupted_during_commit_leaves_no_registration(world: PoolWorld) -> None:
    async def hook(name: str, call: Call) -> Any:
        result = await call()
        if name == "store.apply" and State.RUNNING in world.states().values():
            raise asyncio.CancelledError
        return result

    with pytest.raises(asyncio.CancelledError):
        await provisioned(world, 2, hook)
    await asyncio.sleep(20)
    await world.sweep()
    assert world.registrations() == []
    assert not world.in_state(State.CREATED, State.RUNNING)
