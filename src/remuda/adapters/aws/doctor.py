"""Looks at AWS: who we are there, what the pool has, and what a launch would need. Nothing is changed or launched.

Rights are tried by EC2's own dry runs. A role that may not launch is no fault by itself: refresh launches nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from remuda.adapters.aws.clients import AwsClients, config
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.aws.ec2.compute import Ec2Compute
from remuda.adapters.aws.ec2.create_fleet import fleet_request
from remuda.adapters.aws.ec2.options import AMI, SECURITY_GROUPS, SUBNETS, Options
from remuda.adapters.aws.ec2.template import template_name
from remuda.adapters.aws.errors import answered, code_of, said_by, translated
from remuda.adapters.aws.sqs import SqsResourcePool
from remuda.domain.errors import UserError
from remuda.domain.resources import ResourceClass, RunnerRequest, Tier, TypePatterns, UsageClass
from remuda.ports.clock import Clock
from remuda.ports.compute import POOL_TAG, PROVISION_TAG, MachineState
from remuda.ports.doctor import Check, CheckResult, clocks, ok, problem, warning

REGION = "aws region"
CREDENTIALS = "aws credentials"
LAUNCH = "launch options"
TEMPLATE = "launch template"
IMAGE = "image"
NETWORK = "subnets"

#: Of a fleet that is never launched.
DRY_TOKEN = "remuda-doctor"  # noqa: S105 - EC2's word for a name of a request
_DRY_RUN = "DryRunOperation"
_UNAUTHORIZED = "UnauthorizedOperation"
_NO_PROFILE = "NoSuchEntity"
#: Architectures that the actions runner is built for; how downloads for the other are called; a type of each, to try.
_OTHERS = {"x86_64": ("arm64", "aarch64"), "arm64": ("x64", "x86_64", "amd64")}
_TYPES = {"x86_64": "m5.large", "arm64": "m6g.large"}
REFRESH_FIX = "run remuda refresh"
WORKFLOW_FIX = "nothing where only refresh runs here; provision needs deploy/policies/workflow.json"


@dataclass(frozen=True, kw_only=True)
class AwsParts:
    """The pool's adapters."""

    store: DynamoInstanceStore
    pool: SqsResourcePool
    compute: Ec2Compute


class AwsDoctor:
    def __init__(
        self,
        *,
        clients: AwsClients,
        parts: Callable[[], Awaitable[AwsParts]],
        pool: str,
        launch: Mapping[str, str],
        classes: Collection[ResourceClass],
        clock: Clock,
    ) -> None:
        """`parts` opens the adapters, once: without a region there are none."""
        self._clients = clients
        self._parts = parts
        self._pool = pool
        self._launch = launch
        self._classes = classes
        self._clock = clock

    def checks(self) -> Sequence[Check]:
        known = (CREDENTIALS,)
        asked = (CREDENTIALS, LAUNCH)
        return (
            Check(name=REGION, look=self._region),
            Check(name=CREDENTIALS, look=self._credentials, needs=(REGION,)),
            Check(name="aws clock", look=self._clocks, needs=known),
            Check(name="table", look=self._table, needs=known),
            Check(name="queues", look=self._queues, needs=known),
            Check(name=LAUNCH, look=self._options),
            Check(name=IMAGE, look=self._image, needs=asked),
            Check(name=NETWORK, look=self._subnets, needs=asked),
            Check(name="security groups", look=self._groups, needs=asked),
            Check(name="instance profile", look=self._profile, needs=asked),
            Check(name=TEMPLATE, look=self._template, needs=asked),
            Check(name="right to launch", look=self._may_launch, needs=(TEMPLATE, IMAGE, NETWORK)),
            Check(name="right to terminate", look=self._may_terminate, needs=known),
        )

    # Who we are -----------------------------------------------------------------------------------------------

    async def _region(self) -> CheckResult:
        return ok(self._clients.region())

    async def _credentials(self) -> CheckResult:
        return ok(str((await self._identity())["Arn"]))

    async def _identity(self) -> dict[str, Any]:
        client = await self._clients.client("sts", "STS", config())
        with translated("STS", "the caller's identity"):
            answer: dict[str, Any] = await answered(client.get_caller_identity())
        return answer

    async def _clocks(self) -> CheckResult:
        headers = (await self._identity())["ResponseMetadata"]["HTTPHeaders"]
        return clocks("AWS", str(headers.get("date", "")), self._clock)

    # What the pool has ----------------------------------------------------------------------------------------

    async def _table(self) -> CheckResult:
        name = template_name(self._pool)
        found = await (await self._parts()).store.inspect()
        if not found.active:
            return warning(f"{name} is not active yet", "wait a moment")
        if not found.expires:
            return warning(f"{name}: old records do not expire", REFRESH_FIX)
        if not found.on_demand:
            return warning(f"{name} has provisioned throughput", "switch it to on-demand: bursts would be throttled")
        return ok(f"{name}: keys, indexes and expiry as they should be, paid on demand")

    async def _queues(self) -> CheckResult:
        wrong = await (await self._parts()).pool.inspect([each.name for each in self._classes])
        if wrong:
            return problem("; ".join(f"{name} {what}" for name, what in wrong.items()), REFRESH_FIX)
        return ok(f"{len(self._classes)}, one a class")

    # What a launch needs --------------------------------------------------------------------------------------

    async def _options(self) -> CheckResult:
        options = self._parsed()
        return ok(f"{options.ami}, {len(options.subnets)} subnets, profile {options.profile}")

    def _parsed(self) -> Options:
        return Options.parse(self._launch)

    async def _described(self, operation: str, name: str, values: Sequence[str]) -> list[dict[str, Any]]:
        listed = operation.removeprefix("Describe")
        calls = (await self._parts()).compute.calls
        pages = calls.pages(operation, Filters=[{"Name": name, "Values": list(values)}])
        return [item async for page in pages for item in page.get(listed, ())]

    async def _image(self) -> CheckResult:
        options = self._parsed()
        if not options.ami.startswith("ami-"):
            return ok(f"{options.ami}: EC2 looks it up at each launch")
        images = await self._described("DescribeImages", "image-id", [options.ami])
        if not images:
            return problem(f"there is no {options.ami} in this region, or it is not shared", f"give another {AMI}")
        image = images[0]
        if image.get("State") != "available":
            return problem(f"{options.ami} is {image.get('State')}", f"give another {AMI}, or wait")
        return _fits(options, str(image.get("Architecture", "")), str(image.get("Platform", "")))

    async def _subnets(self) -> CheckResult:
        wanted = self._parsed().subnets
        found = {item["SubnetId"]: item for item in await self._described("DescribeSubnets", "subnet-id", wanted)}
        missing = [name for name in wanted if name not in found]
        if missing:
            return problem(f"there is no {', '.join(missing)} in this region and account", f"correct {SUBNETS}")
        full = [name for name, item in found.items() if item.get("AvailableIpAddressCount", 1) == 0]
        if len(full) == len(found):
            return problem(f"no free address in {', '.join(full)}", f"add a subnet to {SUBNETS}")
        if full:
            return warning(f"no free address in {', '.join(full)}", f"add a subnet to {SUBNETS}")
        zones = sorted({str(item.get("AvailabilityZone", "")) for item in found.values()})
        return ok(f"{', '.join(wanted)} in {', '.join(zones)}")

    async def _groups(self) -> CheckResult:
        options = self._parsed()
        wanted = options.security_groups
        if not wanted:
            return ok("none given: the network's default one")
        groups = await self._described("DescribeSecurityGroups", "group-id", wanted)
        found = {item["GroupId"]: str(item.get("VpcId", "")) for item in groups}
        missing = [name for name in wanted if name not in found]
        if missing:
            return problem(f"there is no {', '.join(missing)} in this region and account", f"correct {SECURITY_GROUPS}")
        networks = {
            str(item.get("VpcId", ""))
            for item in await self._described("DescribeSubnets", "subnet-id", options.subnets)
        }
        stray = [name for name, network in found.items() if networks and {network} != networks]
        if stray:
            fix = f"give subnets and groups of one network: {SUBNETS}, {SECURITY_GROUPS}"
            return problem(f"{', '.join(stray)} and the subnets are of different networks", fix)
        return ok(", ".join(wanted))

    async def _profile(self) -> CheckResult:
        name = self._parsed().profile.rpartition("/")[2]
        client = await self._clients.client("iam", "IAM", config())
        with translated("IAM", name):
            try:
                answer = await answered(client.get_instance_profile(InstanceProfileName=name))
            except ClientError as error:
                if code_of(error) != _NO_PROFILE:
                    raise
                fix = "create it (deploy/cloudformation.yml does), or correct iam-instance-profile"
                return problem(f"there is no instance profile {name}", fix)
        roles = [str(role["RoleName"]) for role in answer["InstanceProfile"].get("Roles", ())]
        if not roles:
            return problem(f"instance profile {name} has no role", "add the agent's role to it")
        return ok(f"{name}, with role {roles[0]}")

    async def _template(self) -> CheckResult:
        name = template_name(self._pool)
        current = await (await self._parts()).compute.has_template(self._launch)
        if current is None:
            return problem(f"there is no launch template {name}", REFRESH_FIX)
        if not current:
            return warning(f"{name} differs from these options", f"{REFRESH_FIX}: it makes a new version")
        return ok(f"{name} is current")

    # Rights ---------------------------------------------------------------------------------------------------

    async def _may_launch(self) -> CheckResult:
        """EC2 judges a fleet by the fleet and by each launch in it."""
        options = self._parsed()
        tags = {POOL_TAG: self._pool, PROVISION_TAG: "doctor"}
        fleet = fleet_request(
            template=template_name(self._pool),
            request=RunnerRequest(
                resource_class=min(self._classes, key=lambda each: each.cpu),
                usage_class=UsageClass.ON_DEMAND,
                patterns=TypePatterns(("*",)),
                tier=Tier.TRUSTED,
            ),
            subnets=options.subnets,
            count=1,
            usage=UsageClass.ON_DEMAND,
            token=DRY_TOKEN,
            tags=tags,
        )
        single = {
            "LaunchTemplate": {"LaunchTemplateName": template_name(self._pool), "Version": "$Default"},
            "InstanceType": await self._any_type(options),
            "SubnetId": options.subnets[0],
            "MinCount": 1,
            "MaxCount": 1,
            "TagSpecifications": fleet["TagSpecifications"],
        }
        for operation, parameters in (("CreateFleet", fleet), ("RunInstances", single)):
            refusal = await self._refused(operation, parameters)
            if refusal:
                return warning(f"these credentials may not launch ({operation}): {refusal}", WORKFLOW_FIX)
        return ok("by a dry run of CreateFleet and of RunInstances")

    async def _any_type(self, options: Options) -> str:
        images = await self._described("DescribeImages", "image-id", [options.ami])
        return _TYPES.get(str(images[0].get("Architecture", "")) if images else "", _TYPES["x86_64"])

    async def _may_terminate(self) -> CheckResult:
        machines = await (await self._parts()).compute.list_pool()
        running = [item.instance_id for item in machines if item.state is MachineState.RUNNING]
        if not running:
            return ok("the pool has no machine to try it on")
        refusal = await self._refused("TerminateInstances", {"InstanceIds": running[:1]})
        # It is asked for first: whose they are.
        whose = {"Filters": [{"Name": "resource-id", "Values": running[:1]}]}
        refusal = refusal or await self._refused("DescribeTags", whose)
        if refusal:
            return problem(
                f"these credentials may not end the pool's machines: {refusal}",
                "give the role the rights in deploy/policies/refresh.json",
            )
        return ok("by a dry run of TerminateInstances and of DescribeTags")

    async def _refused(self, operation: str, parameters: Mapping[str, Any]) -> str:
        """What EC2 says to a dry run; empty where it would have done it."""
        calls = (await self._parts()).compute.calls
        try:
            await calls.ask(operation, passes={_DRY_RUN, _UNAUTHORIZED}, DryRun=True, **parameters)
        except ClientError as error:
            return "" if code_of(error) == _DRY_RUN else said_by(error).partition(" Encoded authorization")[0]
        raise UserError(f"EC2 did {operation} though it was asked for a dry run", fix="see what it made")


def _fits(options: Options, architecture: str, system: str) -> CheckResult:
    """The image and what is put on it must be of one kind."""
    if system.lower() == "windows":
        return problem(f"{options.ami} is a Windows image", "give a Linux image: machines are set up by a shell script")
    if architecture not in _OTHERS:
        known = " or ".join(_OTHERS)
        return problem(
            f"{options.ami} is for {architecture or 'an unknown architecture'}", f"give an image for {known}"
        )
    downloads = {"actions-runner-url": options.runner_url, "python-url": options.python_url}
    for name, url in downloads.items():
        word = next((word for word in _OTHERS[architecture] if word in url.rpartition("/")[2].lower()), "")
        if word:
            return problem(f"{options.ami} is for {architecture}, {name} for {word}", f"give {name} for {architecture}")
    return ok(f"{options.ami}, {architecture}")
