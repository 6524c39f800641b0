"""Launches on EC2: fleet requests, tags, partial and lost responses, capacity, errors."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from remuda.adapters.aws.ec2.create_fleet import FleetLaunchError, is_shortage
from remuda.domain.errors import CapacityError, Throttled, Unavailable, UserError
from remuda.ports.compute import POOL_TAG, PROVISION_TAG, MachineState
from tests.support.aws.ec2 import Ec2Fixture, ec2_fixture, instance_ids

NO_ROOM = "InsufficientInstanceCapacity"


@pytest.fixture
async def world() -> AsyncIterator[Ec2Fixture]:
    async with ec2_fixture() as made:
        yield made


async def test_instant_fleet_has_one_override_per_subnet(world: Ec2Fixture) -> None:
    compute = await world.prepared_compute()
    result = await compute.launch(world.launch_request(count=3, patterns="m6i.* r*"))

    assert len(instance_ids(result)) == 3
    sent = world.server.last("CreateFleet")
    assert sent["Type"] == "instant"
    assert sent["ClientToken"] == "token"
    assert sent["TargetCapacitySpecification.TotalTargetCapacity"] == "3"
    assert sent["TargetCapacitySpecification.DefaultTargetCapacityType"] == "on-demand"
    assert sent["OnDemandOptions.AllocationStrategy"] == "lowest-price"
    template = "LaunchTemplateConfigs.1.LaunchTemplateSpecification"
    assert (sent[f"{template}.LaunchTemplateName"], sent[f"{template}.Version"]) == ("remuda-pool", "$Default")
    for number, subnet in enumerate(world.subnets, start=1):
        override = f"LaunchTemplateConfigs.1.Overrides.{number}"
        assert sent[f"{override}.SubnetId"] == subnet
        assert sent[f"{override}.InstanceRequirements.VCpuCount.Min"] == "2"
        assert sent[f"{override}.InstanceRequirements.MemoryMiB.Min"] == "4096"
        assert sent[f"{override}.InstanceRequirements.AllowedInstanceType.1"] == "m6i.*"
        assert sent[f"{override}.InstanceRequirements.AllowedInstanceType.2"] == "r*"
    assert world.calls.by_service()["ec2"]["CreateFleet"] == 1


async def test_any_type_omits_the_type_list_and_spot_sets_its_strategy(world: Ec2Fixture) -> None:
    compute = await world.prepared_compute()
    result = await compute.launch(world.launch_request(spot=True, patterns="* c6i.large"))
    sent = world.server.last("CreateFleet")
    assert not [key for key in sent if "AllowedInstanceType" in key]
    assert sent["SpotOptions.AllocationStrategy"] == "price-capacity-optimized"
    (item,) = await world.instances()
    assert item["InstanceId"] == instance_ids(result)[0]
    assert item["InstanceLifecycle"] == "spot"


async def test_burstable_and_metal_types_are_included_if_named(world: Ec2Fixture) -> None:
    compute = await world.prepared_compute()
    with pytest.raises(CapacityError):  # the test server has no such types
        await compute.launch(world.launch_request(patterns="t3.* m5.metal"))
    sent = world.server.last("CreateFleet")
    requirements = "LaunchTemplateConfigs.1.Overrides.1.InstanceRequirements"
    assert sent[f"{requirements}.BurstablePerformance"] == "included"
    assert sent[f"{requirements}.BareMetal"] == "included"


async def test_instances_and_volumes_are_tagged_at_launch(world: Ec2Fixture) -> None:
    compute = await world.prepared_compute()
    options = {"github-environment": "prod"}
    result = await compute.launch(world.launch_request(launch=options, tags={"team": "a", POOL_TAG: "forged"}))

    tags = (await compute.describe(instance_ids(result)))[instance_ids(result)[0]].tags
    assert tags == {
        "ghr:environment": "prod",
        "ghr:Application": "github-action-runner",
        "ghr:Owner": "acme/widgets",
        "ghr:Type": "Repo",
        "remuda:first-life-s": "401",
        "remuda:margin-s": "60",
        "remuda:launch": "token",
        "team": "a",
        POOL_TAG: "pool",
        PROVISION_TAG: "provision-token",
    }
    sent = world.server.last("CreateFleet")
    kinds = {sent[f"TagSpecification.{number}.ResourceType"] for number in (1, 2)}
    assert kinds == {"instance", "volume"}
    for number in (1, 2):
        spelled = {
            sent[f"TagSpecification.{number}.Tag.{each}.Key"]: sent[f"TagSpecification.{number}.Tag.{each}.Value"]
            for each in range(1, len(tags) + 1)
        }
        assert spelled == tags
    assert "CreateTags" not in world.server.requests()


async def test_type_tag_of_an_organisation(world: Ec2Fixture) -> None:
    compute = await world.prepared_compute()
    (name,) = instance_ids(await compute.launch(world.launch_request(scope="acme")))
    tags = (await compute.describe([name]))[name].tags
    assert (tags["ghr:Owner"], tags["ghr:Type"], tags["ghr:environment"]) == ("acme", "Org", "pool")


async def test_partial_capacity_returns_instances_and_errors(world: Ec2Fixture) -> None:
    compute = await world.prepared_compute()
    first, second = world.subnets
    world.server.configure(capacity={first: 1, second: 1})

    result = await compute.launch(world.launch_request(count=5, patterns="c6i.large"))

    assert len(instance_ids(result)) == 2
    assert len(result.errors) == 2
    for subnet in world.subnets:
        assert any(f"{subnet} c6i.large (on-demand): {NO_ROOM}" in error for error in result.errors)


async def test_missing_capacity_names_the_subnets(world: Ec2Fixture) -> None:
    compute = await world.prepared_compute()
    world.server.configure(capacity=dict.fromkeys(world.subnets, 0))
    with pytest.raises(CapacityError) as caught:
        await compute.launch(world.launch_request(count=2, patterns="c6i.large"))
    assert all(f"{subnet} c6i.large" in caught.value.message for subnet in world.subnets)
    assert caught.value.fix
    assert await world.instances() == []


async def test_spot_shortage_is_an_error(world: Ec2Fixture) -> None:
    compute = await world.prepared_compute()
    world.server.configure(capacity={"spot": 1})
    result = await compute.launch(world.launch_request(count=3, spot=True))
    assert len(instance_ids(result)) == 1
    assert result.errors
    world.server.configure(capacity={"spot": 0})
    with pytest.raises(CapacityError, match="spot"):
        await compute.launch(world.launch_request("other", count=3, spot=True))


async def test_spot_falls_back_to_on_demand_for_the_rest(world: Ec2Fixture) -> None:
    compute = await world.prepared_compute()
    world.server.configure(capacity={"spot": 1})
    request = world.launch_request(count=3, spot=True, launch={"spot-fallback": "on-demand"})

    result = await compute.launch(request)

    kinds = sorted(item.get("InstanceLifecycle", "on-demand") for item in await world.instances())
    assert kinds == ["on-demand", "on-demand", "spot"]
    lifecycles = {item["InstanceId"]: item.get("InstanceLifecycle", "on-demand") for item in await world.instances()}
    assert {item.instance_id: item.usage_class.value for item in result.instances} == lifecycles
    assert any("(spot)" in error for error in result.errors)
    assert (await compute.launch(request)).instances == result.instances
    assert len(await world.instances()) == 3


@pytest.mark.parametrize(
    ("code", "falls_back"),
    [
        ("InsufficientInstanceCapacity", True),
        ("MaxSpotInstanceCountExceeded", True),
        ("RequestLimitExceeded", False),
        ("UnauthorizedOperation", False),
        ("InvalidParameterValue", False),
    ],
)
def test_only_a_shortage_makes_spot_fall_back(code: str, falls_back: bool) -> None:  # noqa: FBT001
    assert is_shortage([FleetLaunchError(code=code, sentence="")]) is falls_back


async def test_spot_instances_are_returned_if_the_fallback_fails(world: Ec2Fixture) -> None:
    compute = await world.prepared_compute()
    world.server.configure(capacity={"spot": 1, "on-demand": 0})
    result = await compute.launch(world.launch_request(count=3, spot=True, launch={"spot-fallback": "on-demand"}))
    assert len(instance_ids(result)) == 1
    assert any("(on-demand)" in error for error in result.errors)


@pytest.mark.parametrize("honoured", [True, False])
async def test_lost_response_launches_once(world: Ec2Fixture, honoured: bool) -> None:  # noqa: FBT001
    compute = await world.prepared_compute()
    world.server.configure(lost=[{"action": "CreateFleet"}], honour_tokens=honoured)

    result = await compute.launch(world.launch_request(count=2))

    assert len(instance_ids(result)) == 2
    assert sorted(item["InstanceId"] for item in await world.instances()) == instance_ids(result)
    assert instance_ids(await compute.launch(world.launch_request(count=2))) == instance_ids(result)
    assert len(await world.instances()) == 2


async def test_client_token_prevents_a_second_launch_if_describe_lags(world: Ec2Fixture) -> None:
    compute = await world.prepared_compute()
    world.server.configure(lost=[{"action": "CreateFleet"}], lag=1)
    result = await compute.launch(world.launch_request(count=2))
    assert world.server.requests()["CreateFleet"] == 2
    assert len(instance_ids(result)) == 2
    assert len(await world.instances()) == 2


async def test_instances_of_lost_responses_are_found_by_tag(world: Ec2Fixture) -> None:
    compute = await world.prepared_compute()
    world.server.configure(
        lost=[{"action": "CreateFleet", "times": 99}],
        faults=[{"action": "DescribeInstances", "code": "InternalError", "status": 500, "times": 99}],
    )
    with pytest.raises(Unavailable):
        await compute.launch(world.launch_request(count=2))
    world.server.configure(lost=[], faults=[])
    assert [view.tags[PROVISION_TAG] for view in await compute.list_pool()] == ["provision-token"] * 2
    # A later launch with the same token returns them.
    assert len(instance_ids(await compute.launch(world.launch_request(count=2)))) == 2
    assert len(await world.instances()) == 2


async def test_same_token_in_another_process_returns_the_same_instances(world: Ec2Fixture) -> None:
    first, second = await world.prepared_compute(), world.compute()
    result = await first.launch(world.launch_request(count=2))
    assert await second.launch(world.launch_request(count=2)) == result
    assert len(await world.instances()) == 2


@pytest.mark.parametrize(
    ("code", "status", "error", "field"),
    [
        ("RequestLimitExceeded", 503, Throttled, ""),
        ("VcpuLimitExceeded", 400, CapacityError, ""),
        ("InsufficientInstanceCapacity", 500, CapacityError, ""),
        ("UnauthorizedOperation", 403, UserError, "aws-permission"),
        ("AuthFailure", 401, UserError, "aws-credentials"),
        ("AuthFailure.ServiceLinkedRoleCreationNotPermitted", 400, UserError, "aws-permission"),
        ("InvalidParameterValue", 400, UserError, "launch"),
        ("InvalidLaunchTemplateName.NotFoundException", 400, UserError, "launch"),
        ("InternalError", 500, Unavailable, ""),
    ],
)
async def test_errors_contain_a_fix(
    world: Ec2Fixture, code: str, status: int, error: type[Exception], field: str
) -> None:
    compute = await world.prepared_compute()
    world.server.configure(faults=[{"action": "CreateFleet", "code": code, "status": status, "times": 99}])
    with pytest.raises(error) as caught:
        await compute.launch(world.launch_request())
    assert type(caught.value) is error
    assert code in str(caught.value)
    assert getattr(caught.value, "field", "") == field
    if issubclass(error, UserError | CapacityError):
        assert getattr(caught.value, "fix", "")
    if code == "VcpuLimitExceeded":
        assert "quota" in getattr(caught.value, "fix", "")
    assert await world.instances() == []


async def test_throttled_calls_are_retried(world: Ec2Fixture) -> None:
    compute = await world.prepared_compute()
    world.server.configure(
        faults=[{"action": "CreateFleet", "code": "RequestLimitExceeded", "status": 503, "times": 2}]
    )
    assert len(instance_ids(await compute.launch(world.launch_request()))) == 1
    assert len(world.clock.slept) == 2


async def test_new_instance_is_visible_after_the_lag(world: Ec2Fixture) -> None:
    compute = await world.prepared_compute()
    world.server.configure(lag=1)
    names = instance_ids(await compute.launch(world.launch_request()))
    assert await compute.describe(names) == {}
    assert (await compute.describe(names))[names[0]].state is MachineState.RUNNING
