"""Reuse policy: which runs may share a machine, from the configuration to the claim and the release."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from remuda.domain.errors import UserError
from remuda.domain.instance import RetireReason, State
from remuda.domain.resources import Reuse, Tier
from tests.support.world import PoolWorld

T, U = Tier.TRUSTED, Tier.UNTRUSTED
ONE, TWO = "octo/one", "octo/two"


async def is_reused(world: PoolWorld, reuse: Reuse, *, first: tuple[Tier, str], then: tuple[Tier, str]) -> bool:
    """Whether the second run reuses the machine of the first."""
    await world.configure(reuse=reuse)
    await world.warm(1, tier=first[0], repository=first[1])
    result = await world.provision("1", tier=then[0], repository=then[1])
    return result.reused == 1


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
    world: PoolWorld,
    reuse: Reuse,
    first: tuple[Tier, str],
    then: tuple[Tier, str],
    expected: bool,  # noqa: FBT001
) -> None:
    assert await is_reused(world, reuse, first=first, then=then) is expected


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
