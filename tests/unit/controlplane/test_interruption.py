"""Each use case interrupted at each of its port calls (cancelled or killed, before or after the call); lost answers.

Afterwards sweeps run and time passes; no instance may stay assigned, stuck or unrecorded (S10, L1, L2, L5).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from remuda.controlplane.context import WRITE_RETRIES, Context
from remuda.controlplane.operator import InstanceSelector, drain, quarantine, select_instances, terminate
from remuda.controlplane.refresh import refresh
from remuda.controlplane.refresh.configure import MIN_TOKEN_LIFE_S
from remuda.domain.errors import Conflict, RemudaError, Unavailable, UserError
from remuda.domain.instance import ASSIGNED, State
from remuda.domain.provision import ProvisionStatus
from tests.support.records import provision
from tests.support.virtual_time import AgentCut, AmbiguousAnswer, Call, Cut, CutKind, Hook, failing, run_virtual
from tests.support.world import PoolWorld
from tests.unit.controlplane.test_scale_down_pool import CYCLE_S, cycle, keeping

#: More than any use case makes. The enumeration ends when a use case ends before the interruption.
MAX_CALLS = 400
#: The calls of two assignments; later ones are those of an idle agent.
MAX_AGENT_CALLS = 90

#: Seconds after which a refresh replaces the tokens of the configuration.
TOKENS_AGE_S = 3_600.0 - MIN_TOKEN_LIFE_S + 1

Scenario = Callable[[PoolWorld, Cut], Awaitable[None]]


async def _interrupt_once(at: int, kind: CutKind, scenario: Scenario) -> list[str]:
    world = PoolWorld()
    await world.configure()
    cut = Cut(at, kind)
    await scenario(world, cut)
    world.check()
    await world.end()
    await cut.discard()
    return cut.calls


async def provision_scenario(world: PoolWorld, cut: Cut) -> None:
    """Two instances from the pool, one created."""
    await world.warm(2)
    ended = await cut.run(world.provision("cut", count=3, process=world.process(cut)))
    if cut.dead.is_set():
        return
    assert ended is None or isinstance(ended, RemudaError | asyncio.CancelledError), repr(ended)
    committed = [
        item
        for item in world.database.provisions.values()
        if item.run_id == "cut" and item.status is ProvisionStatus.COMMITTED
    ]
    if ended is None:
        assert committed
    else:
        assert not committed
        world.check_holds_nothing("cut")


async def ephemeral_scenario(world: PoolWorld, cut: Cut) -> None:
    """No registration may outlive its machine; the end of the world checks that."""
    process = world.process(cut, credentialed=True)
    ended = await cut.run(world.provision("cut", count=2, ephemeral=True, process=process))
    if ended is not None and not cut.dead.is_set():
        assert isinstance(ended, RemudaError | asyncio.CancelledError), repr(ended)
        world.check_holds_nothing("cut")


async def ephemeral_release_scenario(world: PoolWorld, cut: Cut) -> None:
    """One instance has run its job, the other has not."""
    await world.provision("cut", count=2, ephemeral=True, process=world.process(credentialed=True))
    world.github.queue(run_id="cut", labels=["cut"], seconds=2)
    await asyncio.sleep(4)
    await cut.run(world.release("cut", process=world.process(cut, credentialed=True)))


async def release_scenario(world: PoolWorld, cut: Cut) -> None:
    await world.provision("cut", count=2)
    world.github.queue(run_id="cut", labels=["cut"], seconds=8)
    await asyncio.sleep(1)
    await cut.run(world.release("cut", process=world.process(cut)))
    again = await world.release("cut")
    assert not again.errors
    assert not [item for item in world.database.instances.values() if item.state in ASSIGNED]


async def refresh_scenario(world: PoolWorld, cut: Cut) -> None:
    """Work for each sweep: expired, unpublished, releasing and unrecorded instances, and stale registrations."""
    await world.warm(1)
    (kept,) = (await world.provision("kept")).instances
    lost = Cut(6, CutKind.CRASH_AFTER)
    await lost.run(world.provision("lost", count=2, process=world.process(lost)))
    (gone,) = (await world.provision("gone")).instances
    world.cloud.end(gone.instance.instance_id, "power loss")
    world.github.add("octo/repo", "remuda-test-1-i-0000000000000beef")
    await asyncio.sleep(70)
    world.github.queue(run_id="kept", labels=["kept"], seconds=20)
    await asyncio.sleep(1)
    await cut.run(world.sweep(cut))
    assert world.states()[kept.instance.instance_id] in ASSIGNED
    await lost.discard()


async def configure_scenario(world: PoolWorld, cut: Cut) -> None:
    """A refresh with other settings and new tokens, while an instance serves a run and another one is idle."""
    await asyncio.sleep(TOKENS_AGE_S)
    await world.warm(1)
    (kept,) = (await world.provision("kept", count=1)).instances
    changed = world.configuration(max_instances=7)
    await cut.run(refresh(world.process(cut, credentialed=True), changed))
    await refresh(world.process(credentialed=True), changed)
    config = world.database.config
    assert config is not None
    assert config.max_instances == 7
    assert world.states()[kept.instance.instance_id] in ASSIGNED


async def scale_down_scenario(world: PoolWorld, cut: Cut) -> None:
    """Three idle instances, of which one stays, and one that serves a run."""
    await world.provision("kept", count=1)
    await world.warm(3)
    await asyncio.sleep(CYCLE_S)
    await cut.run(cycle(world, keeping(1), cut))
    await cycle(world, keeping(1))
    assert len(world.in_state(State.RUNNING)) == 1


async def operator_scenario(world: PoolWorld, cut: Cut) -> None:
    """Instances of each kind drained, one kept to be looked at, and then all of them terminated."""
    (looked_at, _) = await world.warm(2)
    await world.provision("kept", count=1)

    async def operate(process: Context) -> None:
        chosen = await select_instances(process, InstanceSelector(instance_ids=(looked_at,)))
        await quarantine(process, chosen, for_s=20.0, reason="looks odd", dry_run=False)
        everything = InstanceSelector(everything=True)
        await drain(process, await select_instances(process, everything), reason="old image", dry_run=False)
        await terminate(process, await select_instances(process, everything), reason="enough", dry_run=False)

    await cut.run(operate(world.process(cut)))
    await operate(world.process())
    await world.sweep()
    assert not world.alive()


#: Scenarios, and the number of calls that each makes at least.
SCENARIOS: dict[Scenario, int] = {
    provision_scenario: 20,
    ephemeral_scenario: 12,
    ephemeral_release_scenario: 10,
    release_scenario: 15,
    refresh_scenario: 15,
    configure_scenario: 10,
    scale_down_scenario: 5,
    operator_scenario: 8,
}


@pytest.mark.parametrize("kind", CutKind)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__.removesuffix("_scenario"))
def test_use_case_interrupted_at_each_call(scenario: Scenario, kind: CutKind) -> None:
    for at in range(1, MAX_CALLS):
        try:
            calls = run_virtual(_interrupt_once(at, kind, scenario))
        except BaseException as error:
            error.add_note(f"interrupted at call {at}: {kind.value}")
            raise
        if len(calls) < at:
            assert at > SCENARIOS[scenario], f"only {at} calls were interrupted: {calls}"
            return
    pytest.fail("the use case makes more calls than MAX_CALLS")


async def _kill_agent_once(at: int, *, applied: bool) -> list[str]:
    world = PoolWorld()
    await world.configure()
    world.agent_hook = cut = AgentCut(at, applied=applied)
    for run_id in ("first", "second"):
        await world.provision(run_id, count=1)
        job = world.github.queue(run_id=run_id, labels=[run_id], seconds=3)
        async with asyncio.timeout(30):
            while not job.started:  # noqa: ASYNC110 - in virtual time
                await asyncio.sleep(0.1)
        await world.release(run_id)
        # The listener and its job survive the agent.
        assert job.conclusion == "success"
    world.check()
    await world.end()
    return cut.calls


@pytest.mark.parametrize("applied", [False, True])
def test_agent_killed_at_each_call(*, applied: bool) -> None:
    for at in range(1, MAX_CALLS):
        try:
            calls = run_virtual(_kill_agent_once(at, applied=applied))
        except BaseException as error:
            error.add_note(f"killed at call {at} of the agents")
            raise
        if len(calls) < at or at == MAX_AGENT_CALLS:
            return


# Writes that fail with `Unavailable`, applied or not: no instance leaks, and no process adopts another's write --------


WRITES = ("store.apply", "store.put_provision", "store.replace_provision", "pool.delete", "compute.launch")
#: More writes of one kind than a provision of three instances makes.
MAX_WRITES = 12


def lose_each_answer(operation: str, applied: bool, scenario: Callable[[PoolWorld, Hook], Awaitable[None]]) -> None:  # noqa: FBT001
    """Run the scenario once for each write of this kind, whose answer is lost."""

    async def run_once(at: int) -> int:
        world = PoolWorld()
        await world.configure()
        hook = AmbiguousAnswer(operation, applied=applied, at=(at,))
        await scenario(world, hook)
        await world.end()
        return hook.count

    for at in range(1, MAX_WRITES):
        if run_virtual(run_once(at)) < at:
            assert at > 1
            return
    pytest.fail("there are more writes than MAX_WRITES")


async def _provision(world: PoolWorld, hook: Hook) -> None:
    await world.warm(2)
    sibling = asyncio.create_task(world.provision("sibling", count=1))
    try:
        mine = await world.provision("mine", count=3, process=world.process(hook))
    except RemudaError:
        world.check_holds_nothing("mine")
    else:
        assert {world.record(item.instance.instance_id).run_id for item in mine.instances} == {"mine"}
    theirs = await sibling
    assert world.record(theirs.instances[0].instance.instance_id).run_id == "sibling"
    world.check()


@pytest.mark.parametrize("applied", [True, False], ids=["applied", "lost"])
@pytest.mark.parametrize("operation", WRITES)
def test_provision_with_one_ambiguous_write(operation: str, *, applied: bool) -> None:
    lose_each_answer(operation, applied, _provision)


async def _release(world: PoolWorld, hook: Hook) -> None:
    await world.provision("mine", count=2)
    await asyncio.gather(world.release("mine", process=world.process(hook)), world.sweep(), return_exceptions=True)
    await world.pass_time(15)
    assert len(world.in_state(State.IDLE)) == 2
    assert len(set(world.messages())) == 2


@pytest.mark.parametrize("applied", [True, False], ids=["applied", "lost"])
@pytest.mark.parametrize("operation", ["store.apply", "store.replace_provision", "pool.send"])
def test_release_with_one_ambiguous_write(operation: str, *, applied: bool) -> None:
    lose_each_answer(operation, applied, _release)


async def test_applied_claim_is_recognised(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    hook = AmbiguousAnswer("store.apply", applied=True, at=(1,))
    result = await world.provision(process=world.process(hook))
    assert [item.instance.instance_id for item in result.instances] == [warm]
    assert world.record(warm).epoch == 2


async def test_claim_is_recognised_on_the_last_retry(world: PoolWorld) -> None:
    """Every answer except the last is lost, and the write before it was applied."""
    (warm,) = await world.warm(1)

    class Hook(AmbiguousAnswer):
        async def __call__(self, name: str, call: Call) -> Any:
            self._applied = self.count + 1 == WRITE_RETRIES
            return await super().__call__(name, call)

    hook = Hook("store.apply", applied=False, at=range(1, WRITE_RETRIES + 1))
    result = await world.provision(process=world.process(hook))
    assert [item.instance.instance_id for item in result.instances] == [warm]


async def test_provision_fails_if_no_write_succeeds(world: PoolWorld) -> None:
    await world.warm(1)
    hook = AmbiguousAnswer("store.apply", applied=False, at=range(1, 100))
    with pytest.raises(Unavailable):
        await world.provision(process=world.process(hook))
    world.check_holds_nothing("1")


async def test_claim_of_another_provision_is_not_adopted(world: PoolWorld) -> None:
    """Our write is lost, and the other provision claims before our retry."""
    (warm,) = await world.warm(1)
    world.queues.put("large", world.record(warm).message(), shuffle=0.5)
    sibling: list[Any] = []

    async def hook(name: str, call: Call) -> Any:
        if name == "store.apply" and not sibling:
            sibling.append(await world.provision("sibling"))
            raise Unavailable("lost")
        return await call()

    mine = await world.provision("mine", process=world.process(hook))
    assert [item.instance.instance_id for item in sibling[0].instances] == [warm]
    assert mine.created == 1
    assert world.record(warm).run_id == "sibling"


async def test_two_workers_of_a_provision_get_different_machines(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    world.queues.put("large", world.record(warm).message(), shuffle=0.5)
    hook = AmbiguousAnswer("store.apply", applied=True, at=range(1, 4))
    result = await world.provision(count=2, process=world.process(hook))
    assert len({item.instance.instance_id for item in result.instances}) == 2


async def test_machines_of_an_ambiguous_launch_are_found_by_tag(world: PoolWorld) -> None:
    hook = AmbiguousAnswer("compute.launch", applied=True)
    with pytest.raises(Unavailable):
        await world.provision(count=2, process=world.process(hook))
    assert len(world.alive()) == 2
    await world.pass_time(world.lifetimes.unrecorded_grace_s + 25)
    assert not world.alive()


async def test_machines_launched_after_the_cancellation_are_ended(world: PoolWorld) -> None:
    async def hook(name: str, call: Call) -> Any:
        if name == "compute.launch":
            provisioning.cancel()
            await asyncio.sleep(1)
        return await call()

    provisioning = asyncio.create_task(world.provision(count=2, process=world.process(hook)))
    with pytest.raises(asyncio.CancelledError):
        await provisioning
    assert len(world.in_state(State.TERMINATING)) == 2


@pytest.mark.parametrize("applied", [True, False], ids=["applied", "lost"])
async def test_intent_with_a_lost_answer_is_recognised(world: PoolWorld, *, applied: bool) -> None:
    hook = AmbiguousAnswer("store.put_provision", applied=applied, at=(1,))
    result = await world.provision(process=world.process(hook))
    assert [item.provision_id for item in world.database.provisions.values()] == [result.provision_id]


async def test_intent_repeated_by_the_client_is_recognised(world: PoolWorld) -> None:
    """The repetition fails because the first write was applied."""

    async def hook(name: str, call: Call) -> Any:
        if name == "store.put_provision":
            await call()
        return await call()

    assert (await world.provision(process=world.process(hook))).created == 1


async def test_intent_that_is_cancelled_after_its_write_is_closed(world: PoolWorld) -> None:
    async def cancel(name: str, call: Call) -> Any:
        answer = await call()
        if name == "store.put_provision":
            raise asyncio.CancelledError
        return answer

    with pytest.raises(asyncio.CancelledError):
        await world.provision(process=world.process(cancel))
    (intent,) = world.database.provisions.values()
    assert (intent.status, intent.outcome and intent.outcome.error) == (ProvisionStatus.RELEASED, "interrupted")


async def test_intent_of_another_process_is_a_refusal(world: PoolWorld) -> None:
    hook = failing("store.put_provision", Conflict("it exists", current=provision(1)))
    with pytest.raises(UserError, match="is being provisioned"):
        await world.provision(process=world.process(hook))
    world.check_holds_nothing("1")


async def test_applied_commit_is_recognised(world: PoolWorld) -> None:
    hook = AmbiguousAnswer("store.replace_provision", applied=True)
    result = await world.provision(process=world.process(hook))
    (stored,) = world.database.provisions.values()
    assert stored.status is ProvisionStatus.COMMITTED
    assert stored.instance_ids == (result.instances[0].instance.instance_id,)
