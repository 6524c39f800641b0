"""Every operation of the EC2 adapters with every class of errors of EC2."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from remuda.adapters.aws.ec2.calls import MAX_ATTEMPTS as EC2_ATTEMPTS
from remuda.adapters.aws.ec2.compute import Ec2Compute, Ec2SpotPrices
from remuda.adapters.aws.ec2.tagged_fleet import Ec2Fleet
from remuda.domain.errors import CapacityError, NotFound, RemudaError, Throttled, TimedOut, Unavailable, UserError
from remuda.http import ReadTimeout
from remuda.ports.calls import CallCounter
from simulation.loop import SeededIds
from tests.support.aws.failures import connection_failures, deviations
from tests.support.aws.scripted_http import AwsScript, ScriptedClient, answer, refusal
from tests.support.failure_tables import Expected, Failing, Outcome, Scripted
from tests.support.records import NOW, at, instance_id, launch_request
from tests.support.virtual_time import FixedClock

POOL = "ci"
FIRST, SECOND = instance_id(1), instance_id(2)
AMI, SUBNET, GROUP = "ami-0123456789abcdef0", "subnet-0123456789abcdef0", "sg-0123456789abcdef0"
OPTIONS = {"ami": AMI, "subnet-ids": SUBNET, "security-group-ids": GROUP, "iam-instance-profile": "remuda-agent"}
EC2_OUTCOMES: dict[str, Outcome] = {
    **connection_failures(),
    "throttled": refusal("ec2", "RequestLimitExceeded", 503),
    "throttled resource": refusal("ec2", "EC2ThrottledException"),
    "server": refusal("ec2", "InternalError", 500),
    "busy": refusal("ec2", "Unavailable", 503),
    "denied": refusal("ec2", "UnauthorizedOperation", 403),
    "expired": refusal("ec2", "RequestExpired"),
    "unknown key": refusal("ec2", "AuthFailure", 401),
    "invalid": refusal("ec2", "InvalidParameterValue"),
    "quota": refusal("ec2", "ResourceLimitExceeded"),
    "capacity": refusal("ec2", "InsufficientInstanceCapacity", 500),
    "verification": refusal("ec2", "PendingVerification"),
    "missing": refusal("ec2", "InvalidInstanceID.NotFound", message=f"The instance ID '{FIRST}' does not exist"),
    "protected": refusal("ec2", "OperationNotPermitted", message=f"The instance '{FIRST}' may not be terminated"),
    "new": refusal("ec2", "SomethingNew"),
}
EC2_EXPECTED = {
    "unreachable": Expected(Unavailable, EC2_ATTEMPTS),
    "unreachable in time": Expected(TimedOut, EC2_ATTEMPTS),
    "lost": Expected(Unavailable, EC2_ATTEMPTS),
    "timeout": Expected(TimedOut, EC2_ATTEMPTS),
    "unsendable": Expected(UserError, 1),
    "gateway": Expected(Unavailable, EC2_ATTEMPTS),
    "unreadable": Expected(Unavailable, EC2_ATTEMPTS),
    "throttled": Expected(Throttled, EC2_ATTEMPTS),
    "throttled resource": Expected(Throttled, EC2_ATTEMPTS),
    "server": Expected(Unavailable, EC2_ATTEMPTS),
    "busy": Expected(Unavailable, EC2_ATTEMPTS),
    "denied": Expected(UserError, 1),
    "expired": Expected(UserError, 1),
    "unknown key": Expected(UserError, 1),
    "invalid": Expected(UserError, 1),
    "quota": Expected(CapacityError, 1),
    "capacity": Expected(CapacityError, 1),
    "verification": Expected(Unavailable, EC2_ATTEMPTS),
    "missing": Expected(NotFound, 1),
    "protected": Expected(UserError, 1),
    "new": Expected(Unavailable, EC2_ATTEMPTS),
}
#: What AWS answers only to calls with ids of instances.
WITHOUT_IDS: dict[str, Expected | None] = {"missing": None, "protected": None}


def xml(operation: str, inner: str) -> Outcome:
    return answer("ec2", operation, inner)


NETWORK: Scripted = {
    "DescribeSubnets": [
        xml(
            "DescribeSubnets",
            f"<subnetSet><item><subnetId>{SUBNET}</subnetId><vpcId>vpc-1</vpcId></item></subnetSet>",
        )
    ],
    "DescribeSecurityGroups": [
        xml(
            "DescribeSecurityGroups",
            f"<securityGroupInfo><item><groupId>{GROUP}</groupId><vpcId>vpc-1</vpcId></item></securityGroupInfo>",
        )
    ],
}
IMAGE: Scripted = {
    "DescribeImages": [
        xml(
            "DescribeImages",
            f"<imagesSet><item><imageId>{AMI}</imageId><rootDeviceName>/dev/sda1</rootDeviceName></item></imagesSet>",
        )
    ]
}
READY: Scripted = {**NETWORK, **IMAGE}
NO_TEMPLATE: Scripted = {
    **READY,
    "DescribeLaunchTemplates": [refusal("ec2", "InvalidLaunchTemplateName.NotFoundException")],
}
OLD_TEMPLATE: Scripted = {
    **READY,
    "DescribeLaunchTemplates": [
        xml(
            "DescribeLaunchTemplates",
            "<launchTemplates><item><tagSet><item><key>remuda:pool</key><value>ci</value></item></tagSet></item>"
            "</launchTemplates>",
        )
    ],
    "DescribeLaunchTemplateVersions": [xml("DescribeLaunchTemplateVersions", "<launchTemplateVersionSet/>")],
    "CreateLaunchTemplateVersion": [
        xml(
            "CreateLaunchTemplateVersion",
            "<launchTemplateVersion><versionNumber>2</versionNumber></launchTemplateVersion>",
        )
    ],
}
TAGGED: Scripted = {
    "DescribeTags": [
        xml(
            "DescribeTags",
            "<tagSet>"
            + "".join(
                f"<item><resourceId>{name}</resourceId><key>remuda:pool</key><value>ci</value></item>"
                for name in (FIRST, SECOND)
            )
            + "</tagSet>",
        )
    ]
}
NOTHING_FOUND: Scripted = {"DescribeInstances": [xml("DescribeInstances", "<reservationSet/>")]}


async def terminated(result: Awaitable[Mapping[str, str]]) -> None:
    """Failures are returned by id."""
    if failures := await result:
        raise RemudaError(str(failures))


#: Of changes that return their failures by id.
RETURNED = {kind: Expected(RemudaError, expected.sends) for kind, expected in EC2_EXPECTED.items()}
COMPUTE_OPERATIONS = [
    Failing("prepare", "DescribeSubnets", lambda it: it.prepare(OPTIONS), READY, WITHOUT_IDS),
    Failing("prepare", "DescribeSecurityGroups", lambda it: it.prepare(OPTIONS), READY, WITHOUT_IDS),
    Failing("prepare", "DescribeImages", lambda it: it.prepare(OPTIONS), NETWORK, WITHOUT_IDS),
    Failing("prepare", "DescribeLaunchTemplates", lambda it: it.prepare(OPTIONS), READY, WITHOUT_IDS),
    Failing("prepare new", "CreateLaunchTemplate", lambda it: it.prepare(OPTIONS), NO_TEMPLATE, WITHOUT_IDS),
    Failing(
        "prepare changed",
        "DescribeLaunchTemplateVersions",
        lambda it: it.prepare(OPTIONS),
        {name: each for name, each in OLD_TEMPLATE.items() if name != "DescribeLaunchTemplateVersions"},
        WITHOUT_IDS,
    ),
    Failing(
        "prepare changed",
        "CreateLaunchTemplateVersion",
        lambda it: it.prepare(OPTIONS),
        {name: each for name, each in OLD_TEMPLATE.items() if name != "CreateLaunchTemplateVersion"},
        WITHOUT_IDS,
    ),
    Failing("prepare changed", "ModifyLaunchTemplate", lambda it: it.prepare(OPTIONS), OLD_TEMPLATE, WITHOUT_IDS),
    Failing("has_template", "DescribeLaunchTemplates", lambda it: it.has_template(OPTIONS), IMAGE, WITHOUT_IDS),
    Failing("describe", "DescribeInstances", lambda it: it.describe([FIRST]), but=WITHOUT_IDS),
    Failing("list_pool", "DescribeInstances", lambda it: it.list_pool(), but=WITHOUT_IDS),
    Failing("launch", "CreateFleet", lambda it: it.launch(launch_request(launch=OPTIONS)), NOTHING_FOUND, WITHOUT_IDS),
    Failing("terminate", "DescribeTags", lambda it: it.terminate([FIRST]), but=WITHOUT_IDS),
    Failing(
        "terminate",
        "TerminateInstances",
        lambda it: terminated(it.terminate([FIRST])),
        {**TAGGED, **NOTHING_FOUND},
        # An unknown instance is gone.
        {**RETURNED, "missing": Expected(None, 1)},
    ),
    Failing("tag", "CreateTags", lambda it: it.tag([FIRST], {"a": "b"})),
    Failing("untag", "DeleteTags", lambda it: it.untag([FIRST], ["a"])),
]


async def no_parameter(_: str) -> str:
    raise NotImplementedError


def ec2_arguments(http: AwsScript) -> dict[str, Any]:
    return {
        "client": ScriptedClient(http, attempts=1),
        "clock": FixedClock(),
        "ids": SeededIds(),
        "calls": CallCounter(),
    }


async def use_compute(http: AwsScript, failing: Failing) -> None:
    await failing.call(Ec2Compute(**ec2_arguments(http), pool=POOL, read_parameter=no_parameter))


@pytest.mark.parametrize("failing", COMPUTE_OPERATIONS, ids=str)
async def test_compute(failing: Failing) -> None:
    assert not await deviations("ec2", failing, EC2_OUTCOMES, EC2_EXPECTED, use_compute)


async def test_a_launch_looks_for_its_instances_before_it_is_sent_again() -> None:
    http = AwsScript("ec2", {**NOTHING_FOUND, "CreateFleet": [ReadTimeout("slow")]})
    compute = Ec2Compute(**ec2_arguments(http), pool=POOL, read_parameter=no_parameter)
    with pytest.raises(TimedOut):
        await compute.launch(launch_request(launch=OPTIONS))
    assert [name for name, _ in http.sent] == ["CreateFleet", *["DescribeInstances", "CreateFleet"] * 3]


async def test_spot_prices() -> None:
    async def use(http: AwsScript, failing: Failing) -> None:
        await failing.call(Ec2SpotPrices(**ec2_arguments(http)))

    history = Failing(
        "spot_history",
        "DescribeSpotPriceHistory",
        lambda it: it.spot_history(["c6i.large"], since=NOW, until=at(60)),
        but=WITHOUT_IDS,
    )
    assert not await deviations("ec2", history, EC2_OUTCOMES, EC2_EXPECTED, use)


ONE_INSTANCE = xml(
    "DescribeInstances",
    f"<reservationSet><item><instancesSet><item><instanceId>{FIRST}</instanceId>"
    "<instanceState><name>running</name></instanceState><tagSet>"
    "<item><key>ghr:environment</key><value>ci</value></item>"
    "<item><key>ghr:Application</key><value>github-action-runner</value></item>"
    "</tagSet></item></instancesSet></item></reservationSet>",
)
ONE_LISTED: Scripted = {"DescribeInstances": [ONE_INSTANCE]}
#: A cycle leaves what timed out to the next one.
ONCE_IN_TIME = {"timeout": Expected(TimedOut, 1), "unreachable in time": Expected(TimedOut, 1)}
CHANGES = {
    **{kind: Expected(RemudaError, expected.sends) for kind, expected in (EC2_EXPECTED | ONCE_IN_TIME).items()},
    "missing": Expected(None, 1),
}


def change_listed(change: Callable[[Ec2Fleet], Awaitable[Mapping[str, str]]]) -> Callable[[Any], Awaitable[None]]:
    async def call(fleet: Ec2Fleet) -> None:
        await fleet.list_machines()
        await terminated(change(fleet))

    return call


FLEET_OPERATIONS = [
    Failing("list", "DescribeInstances", lambda it: it.list_machines(), but=WITHOUT_IDS | ONCE_IN_TIME),
    Failing("terminate", "TerminateInstances", change_listed(lambda it: it.terminate([FIRST])), ONE_LISTED, CHANGES),
    Failing("mark", "CreateTags", change_listed(lambda it: it.mark_orphans([FIRST])), ONE_LISTED, CHANGES),
    Failing("unmark", "DeleteTags", change_listed(lambda it: it.unmark_orphans([FIRST])), ONE_LISTED, CHANGES),
]


@pytest.mark.parametrize("failing", FLEET_OPERATIONS, ids=str)
async def test_fleet(failing: Failing) -> None:
    async def use(http: AwsScript, failing: Failing) -> None:
        await failing.call(Ec2Fleet(**ec2_arguments(http), environment="ci"))

    assert not await deviations("ec2", failing, EC2_OUTCOMES, EC2_EXPECTED, use)


@pytest.mark.parametrize(
    ("name", "inner", "call"),
    [
        ("DescribeInstances", "<reservationSet/>", lambda it: it.list_pool()),
        ("DescribeInstances", "<reservationSet/>", lambda it: it.describe([FIRST])),
        ("DescribeTags", "<tagSet/>", lambda it: it.terminate([FIRST])),
    ],
)
async def test_all_pages_are_read_alike(name: str, inner: str, call: Callable[[Any], Awaitable[Any]]) -> None:
    """The rules compare each page with the one before: its filters and its size."""
    pages = [xml(name, f"{inner}<nextToken>{number}</nextToken>") for number in range(2)]
    http = AwsScript("ec2", {**NOTHING_FOUND, name: [*pages, xml(name, inner)]})
    await call(Ec2Compute(**ec2_arguments(http), pool=POOL, read_parameter=no_parameter))
    assert [operation for operation, _ in http.sent].count(name) == 3
