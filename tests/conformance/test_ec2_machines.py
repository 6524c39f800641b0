"""Termination, description and tags of EC2 instances."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from remuda.adapters.aws.ec2.compute import BATCH
from remuda.domain.errors import NotFound
from remuda.ports.compute import POOL_TAG, MachineState
from tests.support.aws.ec2 import Ec2Fixture, ec2_fixture, instance_ids
from tests.support.aws.ec2_shim import PAGE

UNKNOWN = "i-0123456789abcdef0"
MANY, LAUNCHES = 205, 5


@pytest.fixture
async def world() -> AsyncIterator[Ec2Fixture]:
    async with ec2_fixture() as made:
        yield made


async def state(world: Ec2Fixture, name: str) -> str:
    return next(str(item["State"]["Name"]) for item in await world.instances() if item["InstanceId"] == name)


async def test_instance_of_another_pool_is_never_terminated(world: Ec2Fixture) -> None:
    compute = await world.prepared_compute()
    ours, theirs = instance_ids(await compute.launch(world.launch_request())), await world.launch_foreign_instance()

    refused = await compute.terminate([theirs, *ours, "not-an-id"])

    assert set(refused) == {theirs, "not-an-id"}
    assert POOL_TAG in refused[theirs]
    assert await state(world, theirs) == "running"
    assert await state(world, ours[0]) == "terminated"


async def test_description_contains_the_image(world: Ec2Fixture) -> None:
    compute = await world.prepared_compute()
    await compute.launch(world.launch_request())
    assert [view.image for view in await compute.list_pool()] == [world.options["ami"]]


async def test_unknown_ids_do_not_fail_a_batch(world: Ec2Fixture) -> None:
    """DescribeTags knows the instances, TerminateInstances does not any more."""
    compute = await world.prepared_compute()
    names = instance_ids(await compute.launch(world.launch_request(count=5)))
    unknown = {"action": "TerminateInstances", "code": "InvalidInstanceID.NotFound"}

    # The error may name the unknown ids or not.
    world.server.configure(faults=[{**unknown, "message": f"The instance IDs '{names[0]}, {UNKNOWN}' do not exist"}])
    assert await compute.terminate(names[:2]) == {}
    assert [await state(world, name) for name in names[:2]] == ["running", "terminated"]
    world.server.configure(faults=[{**unknown, "message": "some do not exist"}])
    assert await compute.terminate(names[2:]) == {}
    assert [await state(world, name) for name in names[2:]] == ["terminated"] * 3


async def test_protected_instance_does_not_fail_a_batch(world: Ec2Fixture) -> None:
    compute = await world.prepared_compute()
    names = instance_ids(await compute.launch(world.launch_request(count=3)))
    text = f"The instance '{names[1]}' may not be terminated. Modify its 'disableApiTermination' instance attribute."
    world.server.configure(faults=[{"action": "TerminateInstances", "code": "OperationNotPermitted", "message": text}])
    assert await compute.terminate(names) == {names[1]: text}
    assert [await state(world, name) for name in names] == ["terminated", "running", "terminated"]


async def test_launched_instance_is_terminated_before_it_is_visible(world: Ec2Fixture) -> None:
    compute = await world.prepared_compute()
    world.server.configure(lag=1)
    names = instance_ids(await compute.launch(world.launch_request()))
    assert await compute.terminate(names) == {}
    assert await state(world, names[0]) == "terminated"


async def test_terminate_reads_only_the_pool_tag(world: Ec2Fixture) -> None:
    """An instance without the tag is described, to tell a foreign instance from a missing one."""
    compute = await world.prepared_compute()
    names = instance_ids(await compute.launch(world.launch_request(count=2)))
    before = world.server.requests().get("DescribeInstances", 0)
    assert await compute.terminate(names) == {}
    assert world.server.requests().get("DescribeInstances", 0) == before
    stranger = await world.launch_foreign_instance()
    refused = await compute.terminate([stranger, UNKNOWN])
    assert list(refused) == [stranger]
    assert POOL_TAG in refused[stranger]
    assert world.server.requests().get("DescribeInstances", 0) == before + 1
    assert await state(world, stranger) == "running"


async def test_failed_terminations_are_returned(world: Ec2Fixture) -> None:
    compute = await world.prepared_compute()
    names = instance_ids(await compute.launch(world.launch_request(count=2)))
    world.server.configure(faults=[{"action": "TerminateInstances", "code": "UnauthorizedOperation", "status": 403}])
    refused = await compute.terminate(names)
    assert sorted(refused) == names
    assert "UnauthorizedOperation" in refused[names[0]]


async def test_many_instances_in_batches_and_pages(world: Ec2Fixture) -> None:
    compute = await world.prepared_compute()
    results = [
        await compute.launch(world.launch_request(f"token-{number}", count=MANY // LAUNCHES))
        for number in range(LAUNCHES)
    ]
    names = sorted(name for result in results for name in instance_ids(result))
    await world.launch_foreign_instance()
    assert len(names) == MANY

    assert sorted(view.instance_id for view in await compute.list_pool()) == names
    assert world.server.requests()["DescribeInstances"] == -(-LAUNCHES // PAGE)
    assert len(await compute.describe([*names, UNKNOWN])) == MANY
    await compute.tag(names, {"ghr:orphan": "true"})
    await compute.untag(names, ["ghr:orphan"])
    assert await compute.terminate([*names, UNKNOWN]) == {}

    assert {view.state for view in await compute.list_pool()} == {MachineState.TERMINATED}
    requests = world.server.requests()
    batches = -(-MANY // BATCH)
    assert (requests["CreateFleet"], requests["TerminateInstances"]) == (LAUNCHES, batches)
    assert (requests["CreateTags"], requests["DeleteTags"]) == (batches, batches)


async def test_tagging_skips_and_reports_unknown_instances(world: Ec2Fixture) -> None:
    compute = await world.prepared_compute()
    names = instance_ids(await compute.launch(world.launch_request(count=2)))
    text = f"The instance ID '{UNKNOWN}' does not exist"
    world.server.configure(faults=[{"action": "CreateTags", "code": "InvalidInstanceID.NotFound", "message": text}])
    with pytest.raises(NotFound, match=UNKNOWN):
        await compute.tag([names[0], UNKNOWN, names[1]], {"ghr:orphan": "true"})
    assert all(view.tags.get("ghr:orphan") == "true" for view in (await compute.describe(names)).values())
    await compute.untag(names, ["ghr:orphan"])
    assert not any("ghr:orphan" in view.tags for view in (await compute.describe(names)).values())
