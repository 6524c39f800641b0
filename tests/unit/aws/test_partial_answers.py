"""Answers of AWS in parts: half a batch, a page of a list, and a launch whose instances become visible one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from remuda.adapters.aws.dynamodb.table import BATCH_ATTEMPTS, Table
from remuda.adapters.aws.ec2.calls import Ec2Calls
from remuda.adapters.aws.ec2.create_fleet import FIND_ATTEMPTS, MAX_TOKEN, FleetLauncher, client_token
from remuda.adapters.aws.ec2.options import Ec2LaunchOptions
from remuda.adapters.aws.ec2.template import DESCRIPTION_PREFIX, LaunchTemplate, RootDevice, digest, template_data
from remuda.domain.errors import Throttled, Unavailable
from remuda.domain.runner_release import RunnerChoice
from remuda.ports.calls import CallCounter
from remuda.ports.compute import POOL_TAG
from simulation.loop import SeededIds
from tests.support.records import NOW, instance_id, launch_request
from tests.support.virtual_time import FixedClock

TABLE = "remuda"


class BatchClient:
    """A table that reads and writes a limited number of items per call, and returns the rest as unprocessed."""

    def __init__(self, per_call: int) -> None:
        self._per_call = per_call
        self.written: list[Any] = []

    async def batch_get_item(self, *, RequestItems: Any) -> Any:  # noqa: N803 - AWS' name
        wanted = RequestItems[TABLE]
        done, rest = wanted["Keys"][: self._per_call], wanted["Keys"][self._per_call :]
        return {"Responses": {TABLE: done}, "UnprocessedKeys": {TABLE: {**wanted, "Keys": rest}} if rest else {}}

    async def batch_write_item(self, *, RequestItems: Any) -> Any:  # noqa: N803 - AWS' name
        wanted = RequestItems[TABLE]
        self.written += wanted[: self._per_call]
        rest = wanted[self._per_call :]
        return {"UnprocessedItems": {TABLE: rest} if rest else {}}


def table(client: BatchClient | ItemClient) -> Table:
    return Table(client=cast("Any", client), name=TABLE, clock=FixedClock(), ids=SeededIds(), calls=CallCounter())


def keys(count: int) -> list[Any]:
    return [{"pk": {"S": f"control#{number}"}, "sk": {"S": "-"}} for number in range(count)]


@pytest.mark.parametrize("per_call", [1, 2, 3, 5])
async def test_batch_in_parts_is_read_and_written_completely(per_call: int) -> None:
    client = BatchClient(per_call)
    assert await table(client).get_all(keys(5)) == keys(5)
    await table(client).put_all(keys(5))
    assert client.written == [{"PutRequest": {"Item": item}} for item in keys(5)]


async def test_batch_that_makes_no_progress_is_an_error() -> None:
    """A part of the items must not be taken for all of them."""
    with pytest.raises(Throttled):
        await table(BatchClient(1)).get_all(keys(BATCH_ATTEMPTS + 1))
    with pytest.raises(Throttled):
        await table(BatchClient(1)).put_all(keys(BATCH_ATTEMPTS + 1))


class ItemClient:
    """A table that answers a read of one item with this."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def get_item(self, **_: Any) -> Any:
        return self._answer


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ({"Item": keys(1)[0]}, keys(1)[0]),
        ({"Item": keys(1)[0], "ResponseMetadata": {"RequestId": "r"}}, keys(1)[0]),
        ({"ResponseMetadata": {"RequestId": "r"}}, None),
    ],
)
async def test_item_is_read_or_missing(answer: Any, found: Any) -> None:
    assert await table(ItemClient(answer)).get(keys(1)[0]) == found


async def test_answer_without_item_and_request_id_is_not_one_of_a_table() -> None:
    with pytest.raises(Unavailable):
        await table(ItemClient({"ResponseMetadata": {}})).get(keys(1)[0])


class LostLaunch(Ec2Calls):
    """EC2 whose answers to CreateFleet are lost. `visible` instances are shown by the first and each later call."""

    def __init__(self, visible: Sequence[int]) -> None:
        super().__init__(client=cast("Any", None), clock=FixedClock(), ids=SeededIds(), calls=CallCounter())
        self._visible = list(visible)
        self.fleets = 0

    async def call(self, operation: str, **_: Any) -> dict[str, Any]:
        if operation == "CreateFleet":
            self.fleets += 1
            raise Unavailable("the answer was lost")
        count = self._visible.pop(0) if len(self._visible) > 1 else self._visible[0]
        found = [{"InstanceId": instance_id(number), "LaunchTime": NOW} for number in range(1, count + 1)]
        return {"Reservations": [{"Instances": found}]}


class OldTemplate(Ec2Calls):
    """EC2 with a launch template of this many versions, the newest of which is the default.

    As EC2, it returns all versions in pages, unless the request names some.
    """

    PAGE = 200

    def __init__(self, versions: int, newest: str) -> None:
        super().__init__(client=cast("Any", None), clock=FixedClock(), ids=SeededIds(), calls=CallCounter())
        self._versions = [
            {"VersionNumber": number, "DefaultVersion": number == versions, "VersionDescription": f"remuda {number}"}
            for number in range(1, versions + 1)
        ]
        self._versions[-1]["VersionDescription"] = newest

    async def call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        if operation == "DescribeLaunchTemplates":
            return {"LaunchTemplates": [{"Tags": [{"Key": POOL_TAG, "Value": "test"}]}]}
        assert operation == "DescribeLaunchTemplateVersions"
        if not (named := parameters["Versions"]):
            return {"LaunchTemplateVersions": self._versions[: self.PAGE], "NextToken": "next"}
        assert set(named) <= {"$Default", "$Latest"}
        return {"LaunchTemplateVersions": self._versions[-1:]}


async def test_default_version_of_a_template_with_many_versions_is_found() -> None:
    options = Ec2LaunchOptions(ami="ami-1", subnets=("subnet-1",), profile="p", runner=RunnerChoice.parse({}))
    data = template_data(options, "#!/bin/sh", "test", RootDevice(name="/dev/xvda", gib=8))
    ec2 = OldTemplate(OldTemplate.PAGE + 1, DESCRIPTION_PREFIX + digest(data))
    template = LaunchTemplate(calls=ec2, pool="test")
    assert await template.is_current(data) is True
    assert await template.ensure(data) == []


async def launch(ec2: LostLaunch, count: int) -> tuple[int, tuple[str, ...]]:
    launcher = FleetLauncher(calls=ec2, pool="test", template="remuda-test")
    options = Ec2LaunchOptions(ami="ami-1", subnets=("subnet-1",), profile="p", runner=RunnerChoice.parse({}))
    result = await launcher.launch(launch_request(count=count), options, may_have_launched=False)
    return len(result.instances), result.errors


def test_token_that_ec2_accepts_is_used_as_it_is() -> None:
    assert client_token("x" * MAX_TOKEN) == "x" * MAX_TOKEN
    digests = [client_token(token) for token in ("x" * (MAX_TOKEN + 1), "ü", "a\nb")]
    assert len({*digests}) == 3
    assert {len(token) for token in digests} == {64}


async def test_all_instances_of_a_lost_launch_are_found() -> None:
    """EC2 shows three of them, then four, then five."""
    ec2 = LostLaunch([3, 4, 5])
    assert await launch(ec2, 5) == (5, ())
    assert ec2.fleets == 1


async def test_instances_of_a_lost_launch_that_stay_invisible_are_reported() -> None:
    found, errors = await launch(LostLaunch([2] * FIND_ATTEMPTS), 3)
    assert found == 2
    assert "2 of 3 instances were found" in errors[0]
