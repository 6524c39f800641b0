"""The pool's EC2 instances: launch, description, termination and tags; spot prices."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from botocore.exceptions import ClientError

from remuda.adapters.aws.calls import chunks, code_of, gather, message_of
from remuda.adapters.aws.ec2.calls import Ec2Calls, by_id, by_tag, describe_machines, tags_by_id
from remuda.adapters.aws.ec2.create_fleet import FleetLauncher, one_subnet_per_zone
from remuda.adapters.aws.ec2.options import AMI, SECURITY_GROUPS, SSM_PREFIX, SUBNETS, Ec2LaunchOptions
from remuda.adapters.aws.ec2.template import LaunchTemplate, RootDevice, check_same_root, root_device, template_data
from remuda.adapters.aws.user_data import MachineLayout, build_user_data
from remuda.domain.errors import NotFound, RemudaError, UserError
from remuda.domain.resources import ResourceClass, check_image_architecture, is_instance_id
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, Ids
from remuda.ports.compute import POOL_TAG, LaunchRequest, LaunchResult, MachineView

if TYPE_CHECKING:
    from types_aiobotocore_ec2 import EC2Client

    from remuda.domain.reporting.prices import SpotPrice

#: Ids or instance types per call. EC2 advises against more for TerminateInstances; a filter takes up to 200 values.
BATCH = 100
#: Maximum number of remembered client tokens. A launch with a remembered token may be a repetition.
MAX_TOKENS = 1_000
#: Maximum number of remembered instances that this process launched. They belong to the pool even if they are not yet
#: visible in DescribeTags.
MAX_LAUNCHED = 10_000
_UNKNOWN_IDS = frozenset({"InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed", "InvalidID"})
#: An instance with termination protection also fails the whole call.
_PROTECTED = "OperationNotPermitted"
_ID = re.compile(r"i-[0-9a-f]{8,17}")
LINUX = "Linux/UNIX"
#: The setting with the images of classes.
CLASSES = "resource-class-config"


class _ResourceKind(NamedTuple):
    """A kind of resource that a launch needs, and the call that lists it."""

    option: str
    operation: str
    filter: str
    listed: str
    key: str


_SUBNETS = _ResourceKind(SUBNETS, "DescribeSubnets", "subnet-id", "Subnets", "SubnetId")
_GROUPS = _ResourceKind(SECURITY_GROUPS, "DescribeSecurityGroups", "group-id", "SecurityGroups", "GroupId")


class Ec2Compute:
    def __init__(
        self,
        *,
        client: EC2Client,
        pool: str,
        clock: Clock,
        ids: Ids,
        calls: CallCounter,
        read_parameter: Callable[[str], Awaitable[str]],
        agent_environment: Mapping[str, str] | None = None,
        layout: MachineLayout | None = None,
    ) -> None:
        """`client` has the settings of `client_config()` and is closed by the caller.

        `read_parameter` returns the value of a Systems Manager parameter.
        `agent_environment` becomes part of the user data and must not contain a secret.
        """
        self._pool = pool
        #: Used by the doctor.
        self.calls = Ec2Calls(client=client, clock=clock, ids=ids, calls=calls)
        self._template = LaunchTemplate(calls=self.calls, pool=pool)
        self._launcher = FleetLauncher(calls=self.calls, pool=pool, template=self._template.name)
        self._read_parameter = read_parameter
        self._environment = dict(agent_environment or {})
        self._layout = layout
        self._tokens: OrderedDict[str, asyncio.Lock] = OrderedDict()
        self._launched: OrderedDict[str, None] = OrderedDict()

    async def close(self) -> None:
        """Does nothing: the client belongs to the caller."""

    async def prepare(self, launch: Mapping[str, str], classes: Sequence[ResourceClass] = ()) -> Sequence[str]:
        options = Ec2LaunchOptions.parse(launch)
        user_data = self._user_data(options)  # Checked before any call.
        await self._check_resources(options)
        root = await self._root_device(options)
        await self._check_class_images(options, root, classes)
        return await self._template.ensure(template_data(options, user_data, self._pool, root))

    async def has_template(self, launch: Mapping[str, str]) -> bool | None:
        """Whether the launch template matches these options; None if it does not exist. Read-only."""
        options = Ec2LaunchOptions.parse(launch)
        data = template_data(options, self._user_data(options), self._pool, await self._root_device(options))
        return await self._template.is_current(data)

    def _user_data(self, options: Ec2LaunchOptions) -> str:
        return build_user_data(options, pool=self._pool, environment=self._environment, layout=self._layout)

    async def find_image(self, ami: str) -> Mapping[str, Any] | None:
        """The image as DescribeImages returns it, or None."""
        return (await self._find_images([ami])).get(ami)

    async def _find_images(self, amis: Collection[str]) -> dict[str, Mapping[str, Any]]:
        """Images by id or parameter. A parameter is resolved as EC2 does at a launch."""
        wanted = sorted(set(amis))
        ids = dict(zip(wanted, await gather(map(self._image_id, wanted)), strict=True))
        filters = [{"Name": "image-id", "Values": sorted(set(ids.values()))}]
        answer = await self.calls.call("DescribeImages", Filters=filters)
        found = {str(item.get("ImageId", "")): item for item in answer.get("Images", ())}
        return {ami: found[name] for ami, name in ids.items() if name in found}

    async def _image_id(self, ami: str) -> str:
        if ami.startswith(SSM_PREFIX):
            return await self._read_parameter(ami.removeprefix(SSM_PREFIX))
        return ami

    async def _root_device(self, options: Ec2LaunchOptions) -> RootDevice:
        image = await self.find_image(options.ami)
        if image is None:
            raise UserError(
                f"{AMI}: {options.ami} does not exist in this region and account",
                field=AMI,
                fix=f"set {AMI} to an id that DescribeImages returns",
            )
        return root_device(image, f"{AMI}: {options.ami}")

    async def subnets_by_zone(self, wanted: Sequence[str]) -> dict[str, str]:
        """The subnet to launch in, by zone. Subnets that do not exist are left out."""
        answer = await self.calls.call("DescribeSubnets", Filters=[{"Name": "subnet-id", "Values": list(wanted)}])
        order = {name: number for number, name in enumerate(wanted)}
        found = sorted(answer.get("Subnets", ()), key=lambda item: order.get(item.get("SubnetId"), len(order)))
        if not found:
            raise UserError(
                f"{SUBNETS}: none of {', '.join(wanted)} exists in this region and account",
                field=SUBNETS,
                fix=f"set {SUBNETS} to ids that DescribeSubnets returns, and run remuda refresh",
            )
        return one_subnet_per_zone(found)

    async def launch(self, request: LaunchRequest) -> LaunchResult:
        options = Ec2LaunchOptions.parse(request.launch)
        if len(options.subnets) > 1:
            options = replace(options, subnets=tuple((await self.subnets_by_zone(options.subnets)).values()))
        is_repeated = request.client_token in self._tokens
        lock = self._tokens.setdefault(request.client_token, asyncio.Lock())
        while len(self._tokens) > MAX_TOKENS:
            self._tokens.popitem(last=False)
        async with lock:
            result = await self._launcher.launch(request, options, may_have_launched=is_repeated)
        self._launched.update(dict.fromkeys(launched.instance_id for launched in result.instances))
        while len(self._launched) > MAX_LAUNCHED:
            self._launched.popitem(last=False)
        return result

    async def describe(self, instance_ids: Collection[str]) -> Mapping[str, MachineView]:
        # Ids are passed as a filter: an unknown value of InstanceIds would fail the whole call.
        known: dict[str, MachineView] = {}
        wanted = sorted({name for name in instance_ids if is_instance_id(name)})
        for batch in chunks(wanted, BATCH):
            for view in await describe_machines(self.calls, by_id(batch)):
                known[view.instance_id] = view
        return known

    async def list_pool(self) -> Sequence[MachineView]:
        return await describe_machines(self.calls, by_tag(POOL_TAG, self._pool))

    async def terminate(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        wanted = list(dict.fromkeys(instance_ids))
        failures = {name: f"{name[:40]!r} is not an instance id" for name in wanted if not is_instance_id(name)}
        # Only instances with this pool's tag are terminated. One that EC2 does not return is gone, or was launched so
        # recently that it is not visible yet: by this process, or the next sweep finds it.
        pools = await self._pools_of(wanted)
        ours: list[str] = []
        for name in wanted:
            is_ours = pools[name] == self._pool if name in pools else name in self._launched
            if is_ours:
                ours.append(name)
            elif name in pools:
                failures[name] = f"it does not have the tag {POOL_TAG}={self._pool}"
        for batch in chunks(ours, BATCH):
            failures |= await self._terminate_batch(list(batch))
        return failures

    async def tag(self, instance_ids: Collection[str], tags: Mapping[str, str]) -> None:
        pairs = [{"Key": key, "Value": value} for key, value in sorted(tags.items())]
        await self._change_tags("CreateTags", instance_ids, pairs)

    async def untag(self, instance_ids: Collection[str], keys: Collection[str]) -> None:
        await self._change_tags("DeleteTags", instance_ids, [{"Key": key} for key in sorted(set(keys))])

    async def _check_resources(self, options: Ec2LaunchOptions) -> None:
        """Check that subnets and security groups exist and are in one VPC, so that no launch fails because of them."""
        wanted_by_kind = {_SUBNETS: options.subnets, _GROUPS: options.security_groups}
        used = {kind: wanted for kind, wanted in wanted_by_kind.items() if wanted}
        found = dict(zip(used, await gather(self._vpcs(kind, wanted) for kind, wanted in used.items()), strict=True))
        for kind, wanted in used.items():
            for name in wanted:
                if name not in found[kind]:
                    raise UserError(
                        f"{kind.option}: {name} does not exist in this region and account",
                        field=kind.option,
                        fix=f"set {kind.option} to an id that {kind.operation} returns",
                    )
        of_subnets = found[_SUBNETS]
        for group, vpc in found.get(_GROUPS, {}).items():
            subnet = next((name for name in options.subnets if of_subnets[name] != vpc), "")
            if subnet:
                raise UserError(
                    f"{SECURITY_GROUPS}: {group} is in {vpc}, and subnet {subnet} is in {of_subnets[subnet]}",
                    field=SECURITY_GROUPS,
                    fix=f"set {SUBNETS} and {SECURITY_GROUPS} of one VPC",
                )

    async def _check_class_images(
        self, options: Ec2LaunchOptions, root: RootDevice, classes: Sequence[ResourceClass]
    ) -> None:
        """Check that the images of classes exist, have their architectures, and fit the root volume."""
        of_classes = {
            each.name: each.ami or options.ami
            for each in classes
            if each.ami or each.architecture or each.types.architecture
        }
        if not of_classes:
            return
        found = await self._find_images(of_classes.values())
        for each in classes:
            if each.name in of_classes:
                ami = of_classes[each.name]
                own = _class_root(each, ami, found.get(ami))
                check_same_root(
                    f"{CLASSES}: ami {ami} of class {each.name!r}", own, root, options.volume, field=CLASSES
                )

    async def _vpcs(self, kind: _ResourceKind, wanted: Sequence[str]) -> dict[str, str]:
        """The VPC of each subnet or security group, by id. Those that do not exist are missing."""
        answer = await self.calls.call(kind.operation, Filters=[{"Name": kind.filter, "Values": list(wanted)}])
        return {str(item.get(kind.key)): str(item.get("VpcId", "")) for item in answer.get(kind.listed, ())}

    async def _pools_of(self, instance_ids: Sequence[str]) -> dict[str, str]:
        """The value of the pool tag by id, empty without such a tag. Instances unknown to EC2 are missing."""
        wanted = sorted({name for name in instance_ids if is_instance_id(name)})
        pools: dict[str, str] = {}
        for batch in chunks(wanted, BATCH):
            # DescribeTags is much cheaper than DescribeInstances.
            pools |= await tags_by_id(self.calls, POOL_TAG, batch)
        untagged = await self.describe([name for name in wanted if name not in pools])
        return {**pools, **{name: view.tags.get(POOL_TAG, "") for name, view in untagged.items()}}

    async def _terminate_batch(self, names: list[str]) -> dict[str, str]:
        """Terminate one batch. Return the failures by id.

        One unknown or protected id fails the whole call. The ids named in the error are left out; if it names none, the
        batch is halved.
        """
        if not names:
            return {}
        try:
            await self.calls.call("TerminateInstances", raw_codes=_UNKNOWN_IDS | {_PROTECTED}, InstanceIds=names)
        except ClientError as error:
            named = set(_ID.findall(message_of(error)))
            rest = [name for name in names if name not in named]
            if len(rest) < len(names):
                failed = [name for name in names if name in named] if code_of(error) == _PROTECTED else []
                return {**dict.fromkeys(failed, message_of(error)), **await self._terminate_batch(rest)}
            if len(names) == 1:
                # If EC2 does not know this single id, the instance is gone.
                is_gone = code_of(error) == "InvalidInstanceID.NotFound"
                return {} if is_gone else {names[0]: message_of(error)}
            middle = len(names) // 2
            return {**await self._terminate_batch(names[:middle]), **await self._terminate_batch(names[middle:])}
        except RemudaError as error:
            return dict.fromkeys(names, error.message)
        return {}

    async def _change_tags(
        self, operation: str, instance_ids: Collection[str], tags: Sequence[Mapping[str, str]]
    ) -> None:
        names = list(dict.fromkeys(instance_ids))
        if not names or not tags:
            return
        unknown: set[str] = {name for name in names if not is_instance_id(name)}
        for batch in chunks([name for name in names if name not in unknown], BATCH):
            resources = list(batch)
            while resources:
                try:
                    await self.calls.call(operation, raw_codes=_UNKNOWN_IDS, Resources=resources, Tags=list(tags))
                    break
                except ClientError as error:
                    named = set(_ID.findall(message_of(error))) & set(resources)
                    # If the error names no id, the whole batch counts as unknown.
                    unknown |= named or set(resources)
                    resources = [name for name in resources if name not in unknown]
        if unknown:
            raise NotFound(f"no such instance: {', '.join(sorted(unknown))}")


def _class_root(wanted: ResourceClass, ami: str, image: Mapping[str, Any] | None) -> RootDevice:
    """The root volume of a class's image, which must have the architecture of the class."""
    label = f"{CLASSES}: ami {ami} of class {wanted.name!r}"
    if image is None:
        raise UserError(
            f"{label} does not exist in this region and account",
            field=CLASSES,
            fix="give an id that DescribeImages returns",
        )
    architecture = str(image.get("Architecture") or "an unknown architecture")
    check_image_architecture(wanted, ami, architecture, field=CLASSES)
    return root_device(image, label, field=CLASSES)


class Ec2SpotPrices:
    def __init__(self, *, client: EC2Client, clock: Clock, ids: Ids, calls: CallCounter) -> None:
        self._calls = Ec2Calls(client=client, clock=clock, ids=ids, calls=calls)

    async def spot_history(
        self, instance_types: Collection[str], *, since: datetime, until: datetime
    ) -> Sequence[SpotPrice]:
        found: list[SpotPrice] = []
        for part in chunks(sorted(set(instance_types)), BATCH):
            pages = self._calls.pages(
                "DescribeSpotPriceHistory",
                # Passed as a filter: an unknown value of InstanceTypes would fail the whole call.
                Filters=[{"Name": "instance-type", "Values": list(part)}],
                ProductDescriptions=[LINUX],
                StartTime=since,
                EndTime=until,
            )
            async for page in pages:
                found += (point for item in page.get("SpotPriceHistory", []) if (point := _point(item)) is not None)
        return found


def _point(item: Mapping[str, Any]) -> SpotPrice | None:
    from remuda.domain.reporting.prices import SpotPrice  # noqa: PLC0415 - only reports need prices

    """The price in an entry, or None if the entry is malformed."""
    at = item.get("Timestamp")
    try:
        price = float(item.get("SpotPrice", ""))
    except (TypeError, ValueError, OverflowError):
        return None
    if not isinstance(at, datetime):
        return None
    return SpotPrice(
        instance_type=str(item.get("InstanceType", "")),
        zone=str(item.get("AvailabilityZone", "")),
        at=at if at.tzinfo else at.replace(tzinfo=UTC),
        price=price,
    )
