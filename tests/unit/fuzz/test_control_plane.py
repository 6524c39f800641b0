"""The control plane with corrupt records: the damage is reported, other instances are not affected.

Real use cases and agents in virtual time; `simulation.invariants` checks every write.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from remuda.controlplane.context import Context
from remuda.controlplane.read.explain import explain
from remuda.controlplane.read.status import status
from remuda.controlplane.refresh import RefreshResult, refresh
from remuda.domain.errors import RemudaError
from remuda.domain.instance import ABSORBING, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision
from remuda.domain.resources import PoolMessage, UsageClass
from remuda.domain.serialization import from_document, to_document
from remuda.domain.signals import Report
from simulation.memory.github import MemoryGitHub
from tests.support.mutations import (
    CorruptDocuments,
    CorruptingStore,
    any_json,
    check_shown,
    check_told,
    fuzzed,
    mutated,
)
from tests.support.records import message as make_message
from tests.support.records import sweep_record
from tests.support.virtual_time import in_virtual_time
from tests.support.world import PoolWorld

FEW = 10
#: Message that claims another class and size than the instance has.
LIE = make_message(1, resource_class="xlarge", usage_class=UsageClass.ON_DEMAND, cpu=4, memory_mib=8_192)


class CorruptWorld(PoolWorld):
    """Its agents read correct records; its control plane reads corrupt ones."""

    def __init__(self) -> None:
        super().__init__()
        # Mutations copy credentials to places where a name is expected.
        self.ignore("S12")
        self.corrupt = CorruptDocuments()

    def process(self, hook: Any = None, *, credentialed: bool = False) -> Context:
        context = super().process(hook, credentialed=credentialed)
        store = CorruptingStore(clock=self.clock, calls=context.calls, database=self.database, corrupt=self.corrupt)
        github = MemoryGitHub(github=self.github, token=self.token, calls=context.calls) if credentialed else None
        return replace(context, store=store, github=github)

    def check_others(self, *corrupted: str) -> None:
        """Check the invariants of all instances whose records are intact."""
        others = [str(item) for item in self.violations if item.instance_id not in corrupted]
        assert not others, "\n".join(others)

    async def close(self) -> None:
        for machine in self.machines.values():
            machine.power_off("test")


async def opened() -> CorruptWorld:
    world = CorruptWorld()
    await world.configure()
    return world


def is_readable(kind: type[Any], name: str, document: Any) -> bool:
    try:
        record = from_document(kind, document)
    except ValueError:
        return False
    return getattr(record, "instance_id", None) == name or getattr(record, "provision_id", None) == name


async def sweep(world: PoolWorld) -> RefreshResult:
    result = await refresh(world.process(credentialed=True), None)
    for error in result.errors:
        check_shown(error, 12_000)
    return result


@fuzzed(FEW)
@given(st.data())
@in_virtual_time
async def test_messages(data: st.DataObject) -> None:
    """Malformed messages are dropped and counted. False ones never lead to an instance that does not fit."""
    world = await opened()
    (name,) = await world.warm(1)
    good = world.record(name).message()
    documents = data.draw(st.lists(mutated(to_document(good)), min_size=1, max_size=4))
    dropped = 0
    for document in documents:
        try:
            message: PoolMessage | None = from_document(PoolMessage, document)
            why = ""
        except ValueError as error:
            message, why = None, str(error)
            dropped += 1
        world.queues.put("large", message, shuffle=0.5, malformed=why)
    process = world.process()
    made = await world.provision("2", count=1, process=process)
    assert [item.instance.resource_class for item in made.instances] == ["large"]
    assert made.rejected.get("malformed", 0) <= dropped
    for note, why in process.event_log.lines:  # type: ignore[attr-defined]
        check_shown(f"{note} {why}", 12_000)
    for item in made.instances:
        assert world.record(item.instance.instance_id).epoch <= 2
    await world.release("2")
    # Two sweeps detect the surplus messages; later provisions find no malformed ones.
    for _ in range(3):
        await asyncio.sleep(11)
        await sweep(world)
    assert not [item for item in world.queues.named("large").messages if item.message is None]
    world.check()
    await world.end()


@fuzzed(FEW)
@given(mutated(to_document(LIE)))
@example(to_document(LIE))
@in_virtual_time
async def test_false_message(document: Any) -> None:
    """The message claims a larger instance. The record decides."""
    world = await opened()
    (small,) = await world.warm(1)
    try:
        lie = replace(from_document(PoolMessage, document), id=small)
    except ValueError:
        lie = replace(LIE, id=small)
    world.queues.put("xlarge", lie, shuffle=0.5)
    made = await world.provision("2", resource_class="xlarge")
    assert [item.instance.resource_class for item in made.instances] == ["xlarge"]
    assert world.record(small).state is State.IDLE
    for _ in range(3):
        await asyncio.sleep(11)
        await sweep(world)
    assert world.messages("xlarge") == []
    assert world.messages("large") == [small]
    world.check()
    await world.release("2")
    await world.end()


@fuzzed(FEW)
@given(st.data())
@in_virtual_time
async def test_reports(data: st.DataObject) -> None:
    """A machine that writes anything into its own report affects only itself."""
    world = await opened()
    bad, good = await world.warm(2)
    world.corrupt.documents[Report, bad] = data.draw(mutated(to_document(world.database.reports[bad])) | any_json)
    try:
        made = await world.provision("2", count=2)
        assert len(made.instances) == 2
    except RemudaError as error:
        check_told(error)
    world.corrupt.documents[Report, bad] = data.draw(mutated(to_document(world.database.reports[bad])))
    await sweep(world)
    assert not world.corrupt.documents or await status(world.process())
    try:
        await explain(world.process(), "2")
    except RemudaError as error:
        check_told(error)
    for reported in (await world.release("2")).errors:
        check_shown(reported, 12_000)
    await sweep(world)
    assert world.states()[good] in {State.IDLE, State.RUNNING, State.RELEASING, *ABSORBING}
    world.check_others(bad)
    world.corrupt.documents.clear()
    await world.pass_time(480)
    assert not world.alive()
    await world.close()


@fuzzed(FEW)
@given(st.data(), st.sampled_from([State.IDLE, State.RUNNING]))
@in_virtual_time
async def test_control_records(data: st.DataObject, state: State) -> None:
    """An unreadable record is reported by name and left unchanged; all others work."""
    world = await opened()
    names = await world.warm(2)
    if state is State.RUNNING:
        await world.provision("2", count=2)
    bad, good = names
    document = data.draw(
        (mutated(to_document(world.record(bad))) | any_json).filter(lambda found: not is_readable(Instance, bad, found))
    )
    before = world.record(bad)
    world.corrupt.documents[Instance, bad] = document
    process = world.process()
    if state is State.IDLE:
        made = await world.provision("3", count=1, process=process)
        assert [item.instance.instance_id for item in made.instances] != [bad]
    result = await sweep(world)
    assert any(bad in error for error in result.errors), result.errors
    await world.release("2")
    await world.release("3")
    await sweep(world)
    assert (await status(world.process())).unreadable
    assert world.record(bad) == before, "it is left unchanged"
    assert world.cloud.is_alive(bad)
    assert world.record(good).run_id == ""
    world.check()
    # The record is repaired.
    world.corrupt.documents.clear()
    await world.end()


@fuzzed(FEW)
@given(st.data())
@in_virtual_time
async def test_provisions(data: st.DataObject) -> None:
    world = await opened()
    await world.provision("1")
    await world.provision("2")
    broken = next(item for (run, _), item in world.database.provisions.items() if run == "1")
    document = data.draw(
        mutated(to_document(broken)).filter(lambda found: not is_readable(Provision, broken.provision_id, found))
    )
    world.corrupt.documents[Provision, broken.provision_id] = document
    released = await world.release("1")
    assert any(broken.provision_id in error for error in released.errors)
    done = await world.release("2")
    assert not done.errors
    await sweep(world)
    world.check()
    world.corrupt.documents.clear()
    await world.end()


@fuzzed(FEW)
@given(mutated(to_document(sweep_record())) | any_json)
@in_virtual_time
async def test_the_record_of_the_last_sweep(document: Any) -> None:
    """An unreadable record is reported once and started anew."""
    world = await opened()
    await world.warm(1)
    world.corrupt.sweep = document
    await sweep(world)
    assert not (await sweep(world)).errors
    world.check()
    await world.end()


@fuzzed(FEW)
@given(st.data())
@in_virtual_time
async def test_the_configuration(data: st.DataObject) -> None:
    """No operation starts with an unusable configuration; the error is one sentence."""
    world = await opened()
    await world.warm(1)
    assert world.database.config is not None
    document = data.draw(mutated(to_document(world.database.config)))
    world.corrupt.documents[PoolConfig, "config"] = document
    for work in (world.provision("2"), refresh(world.process(credentialed=True), None), world.release("2")):
        try:
            await work
        except RemudaError as error:
            check_told(error)
    world.corrupt.documents.clear()
    await world.release("2")
    world.check_others()
    await world.close()
