"""Checks of the AWS setup: credentials, the pool's resources, launch options and permissions. All are read-only.

Permissions are checked by EC2's dry runs. Missing permission to launch is only a warning: `remuda refresh` does not
need it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from remuda.adapters.aws.calls import code_of, message_of, translated
from remuda.adapters.aws.clients import AwsClients, config
from remuda.adapters.aws.dynamodb.keys import instance_profile_role, profile_name
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.aws.ec2.compute import Ec2Compute
from remuda.adapters.aws.ec2.create_fleet import MAX_ZONES, fleet_request, one_subnet_per_zone
from remuda.adapters.aws.ec2.options import AGENT_URL, AMI, JOB_IMAGE_URL, SECURITY_GROUPS, SUBNETS, Ec2LaunchOptions
from remuda.adapters.aws.ec2.template import template_name
from remuda.adapters.aws.sqs import SqsResourcePool
from remuda.domain.errors import UserError
from remuda.domain.resources import ResourceClass, RunnerRequest, Tier, TypePatterns, UsageClass, split_type
from remuda.domain.runner_release import SHA256 as RUNNER_SHA256
from remuda.domain.runner_release import PackageArchitecture
from remuda.ports.clock import Clock
from remuda.ports.compute import POOL_TAG, PROVISION_TAG, MachineState
from remuda.ports.doctor import Check, CheckResult, CheckStatus, compare_clocks, ok, problem, warning

REGION = "aws region"
CREDENTIALS = "aws credentials"
LAUNCH = "launch options"
TEMPLATE = "launch template"
IMAGE = "image"
NETWORK = "subnets"

#: Client token of the dry run of CreateFleet.
DRY_RUN_TOKEN = "remuda-doctor"  # noqa: S105 - not a credential
_DRY_RUN = "DryRunOperation"
_UNAUTHORIZED = "UnauthorizedOperation"
#: Architectures supported by the actions runner, with the words in file names that mean the other architecture.
_OTHER_ARCHITECTURE = {"x86_64": ("arm64", "aarch64"), "arm64": ("x64", "x86_64", "amd64")}
#: Instance type for the dry run of RunInstances, by architecture.
_DRY_RUN_TYPES = {"x86_64": "m5.large", "arm64": "m6g.large"}
#: The oldest kernel for sandboxes.
MIN_KERNEL = (5, 19)
#: Amazon's images have the version of their kernel in their names.
_KERNEL = re.compile(r"kernel-(\d+)\.(\d+)")
#: Names of public images with an older kernel.
_OLD_SYSTEMS = re.compile(r"amzn2-ami-|ubuntu-(?:xenial|bionic|focal)-|debian-(?:9|10|11)-")
REFRESH_FIX = "run remuda refresh"
PROVISION_FIX = "ignore this if only remuda refresh runs here; otherwise grant deploy/policies/provision.json"


@dataclass(frozen=True, kw_only=True)
class AwsAdapters:
    """The pool's adapters."""

    store: DynamoInstanceStore
    pool: SqsResourcePool
    compute: Ec2Compute


class AwsDoctor:
    def __init__(
        self,
        *,
        clients: AwsClients,
        adapters: Callable[[], Awaitable[AwsAdapters]],
        pool: str,
        launch: Mapping[str, str],
        classes: Collection[ResourceClass],
        clock: Clock,
    ) -> None:
        """`adapters` opens the pool's adapters, which needs a region, so it is called only by checks that need them."""
        self._clients = clients
        self._adapters = adapters
        self._pool = pool
        self._launch = launch
        self._classes = classes
        self._clock = clock

    def checks(self) -> Sequence[Check]:
        with_credentials = (CREDENTIALS,)
        with_options = (CREDENTIALS, LAUNCH)
        return (
            Check(name=REGION, run=self._region),
            Check(name=CREDENTIALS, run=self._credentials, needs=(REGION,)),
            Check(name="aws clock", run=self._clocks, needs=with_credentials),
            Check(name="table", run=self._table, needs=with_credentials),
            Check(name="queues", run=self._queues, needs=with_credentials),
            Check(name=LAUNCH, run=self._options),
            Check(name=IMAGE, run=self._image, needs=with_options),
            Check(name=NETWORK, run=self._subnets, needs=with_options),
            Check(name="security groups", run=self._groups, needs=with_options),
            Check(name="instance profile", run=self._profile, needs=with_options),
            Check(name=TEMPLATE, run=self._template, needs=(*with_options, IMAGE)),
            Check(name="launch permission", run=self._may_launch, needs=(TEMPLATE, IMAGE, NETWORK)),
            Check(name="terminate permission", run=self._may_terminate, needs=with_credentials),
        )

    def provision_checks(self) -> Sequence[Check]:
        """The checks that the role of the broker makes, with the permissions of a provision. They change nothing."""
        return (
            Check(name="table reads", run=self._may_read),
            Check(name="table writes", run=self._may_write),
            Check(name="queues", run=self._queues),
            Check(name="launch permission", run=self._may_launch),
            Check(name="terminate permission", run=self._may_terminate),
        )

    # Identity -------------------------------------------------------------------------------------------------

    async def _region(self) -> CheckResult:
        return ok(self._clients.region())

    async def _credentials(self) -> CheckResult:
        return ok(str((await self._identity())["Arn"]))

    async def _identity(self) -> dict[str, Any]:
        client = await self._clients.service("sts", "STS", config())
        with translated("STS", "the caller's identity"):
            answer: dict[str, Any] = await client.get_caller_identity()
        return answer

    async def _clocks(self) -> CheckResult:
        headers = (await self._identity())["ResponseMetadata"]["HTTPHeaders"]
        return compare_clocks("AWS", str(headers.get("date", "")), self._clock)

    # Table and queues -----------------------------------------------------------------------------------------

    async def _table(self) -> CheckResult:
        name = template_name(self._pool)
        found = await (await self._adapters()).store.inspect()
        if not found.active:
            return warning(f"table {name} is not active yet", "run remuda doctor again in a minute")
        if not found.expires:
            return warning(f"table {name}: expiry of old records is not enabled", REFRESH_FIX)
        if not found.on_demand:
            return warning(f"table {name} has provisioned throughput, which throttles bursts", "switch it to on-demand")
        return ok(f"{name}: keys, indexes and expiry are correct, billed on demand")

    async def _may_read(self) -> CheckResult:
        store = (await self._adapters()).store
        await store.get_config()
        await store.count_live()
        await store.find_by_provision(DRY_RUN_TOKEN)
        return ok("permitted, by reads of a record and of two indexes")

    async def _may_write(self) -> CheckResult:
        await (await self._adapters()).store.try_writes()
        return ok("permitted, by writes under conditions that are not met")

    async def _queues(self) -> CheckResult:
        deviations = await (await self._adapters()).pool.inspect([each.name for each in self._classes])
        if deviations:
            return problem("; ".join(f"{name} {deviation}" for name, deviation in deviations.items()), REFRESH_FIX)
        return ok(f"{len(self._classes)} queues, one per class")

    # Launch options -------------------------------------------------------------------------------------------

    async def _options(self) -> CheckResult:
        options = self._launch_options()
        return ok(f"{options.ami}, {len(options.subnets)} subnets, profile {options.profile}")

    def _launch_options(self) -> Ec2LaunchOptions:
        return Ec2LaunchOptions.parse(self._launch)

    async def _describe(self, operation: str, filter_name: str, values: Sequence[str]) -> list[dict[str, Any]]:
        list_name = operation.removeprefix("Describe")
        calls = (await self._adapters()).compute.calls
        pages = calls.pages(operation, Filters=[{"Name": filter_name, "Values": list(values)}])
        return [item async for page in pages for item in page.get(list_name, ())]

    async def _image(self) -> CheckResult:
        options = self._launch_options()
        image = await (await self._adapters()).compute.find_image(options.ami)
        if image is None:
            return problem(f"{options.ami} does not exist in this region, or is not shared", f"set another {AMI}")
        if image.get("State") != "available":
            return problem(
                f"{options.ami} is {image.get('State')}", f"wait until it is available, or set another {AMI}"
            )
        result = _check_architecture(options, str(image.get("Architecture", "")), str(image.get("Platform", "")))
        name = str(image.get("Name", ""))
        if result.status is CheckStatus.OK and has_old_kernel(name):
            return warning(
                f"the kernel of {options.ami} ({name}) is too old: sandboxes need Linux 5.19 or newer",
                f"set {AMI} to an image such as Ubuntu 24.04, Debian 12 or Amazon Linux 2023",
            )
        return result

    async def _subnets(self) -> CheckResult:
        wanted = self._launch_options().subnets
        found = {item["SubnetId"]: item for item in await self._describe("DescribeSubnets", "subnet-id", wanted)}
        missing = [name for name in wanted if name not in found]
        if missing:
            return problem(f"{', '.join(missing)} not found in this region and account", f"correct {SUBNETS}")
        full = [name for name, item in found.items() if item.get("AvailableIpAddressCount", 1) == 0]
        if len(full) == len(found):
            return problem(f"no free IP address in {', '.join(full)}", f"add a subnet to {SUBNETS}")
        if full:
            return warning(f"no free IP address in {', '.join(full)}", f"add a subnet to {SUBNETS}")
        used = one_subnet_per_zone([found[name] for name in wanted])
        used_text = ", ".join(f"{name} in {zone}" for zone, name in sorted(used.items()))
        unused = [name for name in wanted if name not in used.values()]
        if unused:
            return ok(
                f"{used_text}; not used now: {', '.join(unused)} "
                f"(a launch uses one subnet per zone in up to {MAX_ZONES} zones, those with the most free addresses)"
            )
        return ok(used_text)

    async def _groups(self) -> CheckResult:
        options = self._launch_options()
        wanted = options.security_groups
        if not wanted:
            return ok("none configured; the VPC's default group applies")
        groups = await self._describe("DescribeSecurityGroups", "group-id", wanted)
        found = {item["GroupId"]: str(item.get("VpcId", "")) for item in groups}
        missing = [name for name in wanted if name not in found]
        if missing:
            return problem(f"{', '.join(missing)} not found in this region and account", f"correct {SECURITY_GROUPS}")
        vpcs = {
            str(item.get("VpcId", "")) for item in await self._describe("DescribeSubnets", "subnet-id", options.subnets)
        }
        stray = [name for name, vpc in found.items() if vpcs and {vpc} != vpcs]
        if stray:
            fix = f"set {SUBNETS} and {SECURITY_GROUPS} of one VPC"
            return problem(f"{', '.join(stray)} and the subnets are in different VPCs", fix)
        return ok(", ".join(wanted))

    async def _profile(self) -> CheckResult:
        name = profile_name(self._launch_options().profile)
        role = await instance_profile_role(await self._clients.service("iam", "IAM", config()), name)
        return ok(f"{name}, with role {role['RoleName']}")

    async def _template(self) -> CheckResult:
        name = template_name(self._pool)
        current = await (await self._adapters()).compute.has_template(self._launch)
        if current is None:
            return problem(f"launch template {name} does not exist", REFRESH_FIX)
        if not current:
            return warning(f"{name} does not match the launch options", f"{REFRESH_FIX}, which creates a new version")
        return ok(f"{name} is current")

    # Permissions ----------------------------------------------------------------------------------------------

    async def _may_launch(self) -> CheckResult:
        """Dry-run CreateFleet and RunInstances: a fleet needs the permissions of both."""
        options = self._launch_options()
        # Preferably one with the pool's image, which the launch template names.
        smallest = min(self._classes, key=lambda each: (bool(each.ami), each.cpu))
        compute = (await self._adapters()).compute
        subnets = tuple((await compute.subnets_by_zone(options.subnets)).values())
        tags = {POOL_TAG: self._pool, PROVISION_TAG: "doctor"}
        fleet = fleet_request(
            template=template_name(self._pool),
            request=RunnerRequest(
                resource_class=smallest,
                usage_class=UsageClass.ON_DEMAND,
                patterns=smallest.types,
                tier=Tier.TRUSTED,
            ),
            subnets=subnets,
            count=1,
            usage=UsageClass.ON_DEMAND,
            token=DRY_RUN_TOKEN,
            tags=tags,
        )
        single = {
            "LaunchTemplate": {"LaunchTemplateName": template_name(self._pool), "Version": "$Default"},
            "InstanceType": await self._dry_run_type(options, smallest.types),
            "SubnetId": subnets[0],
            "MinCount": 1,
            "MaxCount": 1,
            # RunInstances does not accept tags of fleets.
            "TagSpecifications": [each for each in fleet["TagSpecifications"] if each["ResourceType"] != "fleet"],
        }
        denials = [
            f"({operation}): {denial}"
            for operation, parameters in (("CreateFleet", fleet), ("RunInstances", single))
            if (denial := await self._dry_run(operation, parameters))
        ]
        if denials:
            return warning(f"the AWS credentials do not permit launches {'; '.join(denials)}", PROVISION_FIX)
        return ok("permitted, by a dry run of CreateFleet and RunInstances")

    async def _dry_run_type(self, options: Ec2LaunchOptions, types: TypePatterns) -> str:
        """A type of the class: the policy `provision` allows no others."""
        usual = _DRY_RUN_TYPES.get(await self._architecture(options), _DRY_RUN_TYPES["x86_64"])
        if types.matches(usual):
            return usual
        family, size = split_type(types.words[0])
        return f"{family.replace('*', '5')}.{'large' if '*' in size else size}"

    async def _architecture(self, options: Ec2LaunchOptions) -> str:
        try:
            image = await (await self._adapters()).compute.find_image(options.ami) or {}
        except UserError as error:
            if error.field != "aws-permission":
                raise
            # The policy `provision` does not permit DescribeImages. A pool with one kind of agents has such images.
            return options.agents[0].architecture if len(options.agents) == 1 else ""
        return str(image.get("Architecture", ""))

    async def _may_terminate(self) -> CheckResult:
        machines = await (await self._adapters()).compute.list_pool()
        running = [item.instance_id for item in machines if item.state is MachineState.RUNNING]
        if not running:
            return ok("not checked: the pool has no running instance")
        denial = await self._dry_run("TerminateInstances", {"InstanceIds": running[:1]})
        # Remuda reads the pool tag before it terminates an instance.
        tags_of_instance = {"Filters": [{"Name": "resource-id", "Values": running[:1]}]}
        denial = denial or await self._dry_run("DescribeTags", tags_of_instance)
        if denial:
            return problem(
                f"the AWS credentials do not permit terminating the pool's instances: {denial}",
                "grant the role the permissions in deploy/policies/refresh.json",
            )
        return ok("permitted, by a dry run of TerminateInstances and DescribeTags")

    async def _dry_run(self, operation: str, parameters: Mapping[str, Any]) -> str:
        """EC2's reason for denying the operation, or an empty string if it is permitted."""
        calls = (await self._adapters()).compute.calls
        try:
            await calls.call(operation, raw_codes={_DRY_RUN, _UNAUTHORIZED}, DryRun=True, **parameters)
        except ClientError as error:
            return "" if code_of(error) == _DRY_RUN else message_of(error).partition(" Encoded authorization")[0]
        raise UserError(
            f"EC2 ignored DryRun and executed {operation}", fix="check the EC2 endpoint and what was created"
        )


def has_old_kernel(image_name: str) -> bool:
    """Whether the name of a public image shows a kernel that is too old for sandboxes."""
    version = _KERNEL.search(image_name)
    if version is not None:
        return (int(version[1]), int(version[2])) < MIN_KERNEL
    return _OLD_SYSTEMS.search(image_name) is not None


def _check_architecture(options: Ec2LaunchOptions, architecture: str, system: str) -> CheckResult:
    """Whether the image runs Linux, and has the same architecture as the downloads for it."""
    if system.lower() == "windows":
        return problem(f"{options.ami} is a Windows image", f"set {AMI} to a Linux image")
    if architecture not in _OTHER_ARCHITECTURE:
        known = " or ".join(_OTHER_ARCHITECTURE)
        return problem(
            f"{options.ami} is for {architecture or 'an unknown architecture'}", f"set {AMI} to an image for {known}"
        )
    release = options.runner.release
    runner_url = ""
    if release is not None:
        wanted = PackageArchitecture.X64 if architecture == "x86_64" else PackageArchitecture.ARM64
        runner_url = next((item.url for item in release.packages if item.architecture is wanted), "")
        if not runner_url:
            return problem(
                f"{options.ami} is for {architecture}, but {RUNNER_SHA256} has no value for {wanted}",
                f"set {RUNNER_SHA256} for {wanted}",
            )
    agent_url = next((each.url for each in options.agents if each.architecture == architecture), "")
    if options.agents and not agent_url:
        return problem(
            f"{options.ami} is for {architecture}, but {AGENT_URL} has no value for it",
            f"set {AGENT_URL} for {architecture}",
        )
    downloads = {
        "actions-runner-url": runner_url,
        AGENT_URL: agent_url,
        JOB_IMAGE_URL: options.job_image_url,
    }
    for name, url in downloads.items():
        word = next((word for word in _OTHER_ARCHITECTURE[architecture] if word in url.rpartition("/")[2].lower()), "")
        if word:
            return problem(f"{options.ami} is for {architecture}, {name} for {word}", f"set {name} for {architecture}")
    return ok(f"{options.ami}, {architecture}")
