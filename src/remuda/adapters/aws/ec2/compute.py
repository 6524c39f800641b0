"""EC2 as compute: a launch template for the pool, instant fleets, tags as the only index."""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from botocore.exceptions import ClientError

from remuda.adapters.aws.ec2.calls import Ec2Calls, batches
from remuda.adapters.aws.ec2.describe import by_id, by_tag, tags_by_id, views_of
from remuda.adapters.aws.ec2.launch import Launcher
from remuda.adapters.aws.ec2.options import AMI, SECURITY_GROUPS, SUBNETS, Options
from remuda.adapters.aws.ec2.template import LaunchTemplate, template_data
from remuda.adapters.aws.errors import code_of, said_by
from remuda.adapters.aws.gather import gathered
from remuda.adapters.aws.user_data import Layout, build_user_data
from remuda.domain.errors import NotFound, RemudaError, UserError
from remuda.domain.resources import is_instance_id
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, Ids
from remuda.ports.compute import POOL_TAG, LaunchRequest, LaunchResult, MachineView

if TYPE_CHECKING:
    from types_aiobotocore_ec2 import EC2Client
    from types_aiobotocore_ec2.type_defs import RequestLaunchTemplateDataTypeDef

#: Ids in one call. EC2 advises against more for TerminateInstances, and takes up to 200 values in a filter.
BATCH = 100
#: Tokens whose launches are remembered, to look before one is repeated.
MAX_TOKENS = 1_000
#: Machines that this process launched: they are ours, even while a describe does not show them yet.
MAX_BORN = 10_000
_UNKNOWN_IDS = frozenset({"InvalidInstanceID.NotFound", "InvalidInstanceID.Malformed", "InvalidID"})
#: One with termination protection fails a whole call, too.
_PROTECTED = "OperationNotPermitted"
_ID = re.compile(r"i-[0-9a-f]{8,17}")


class _Kind(NamedTuple):
    """Something a launch needs, and how EC2 lists it."""

    option: str
    operation: str
    filter: str
    listed: str
    key: str


_SUBNETS = _Kind(SUBNETS, "DescribeSubnets", "subnet-id", "Subnets", "SubnetId")
_IMAGES = _Kind(AMI, "DescribeImages", "image-id", "Images", "ImageId")
_GROUPS = _Kind(SECURITY_GROUPS, "DescribeSecurityGroups", "group-id", "SecurityGroups", "GroupId")


class Ec2Compute:
    def __init__(
        self,
        *,
        client: EC2Client,
        pool: str,
        clock: Clock,
        ids: Ids,
        calls: CallCounter,
        agent_environment: Mapping[str, str] | None = None,
        layout: Layout | None = None,
    ) -> None:
        """`client` is made with `client_config()` and closed by whoever made it. `agent_environment` goes into the user
        data, for the agents: nothing secret.
        """
        self._pool = pool
        #: For whoever looks at more than machines.
        self.calls = Ec2Calls(client=client, clock=clock, ids=ids, calls=calls)
        self._template = LaunchTemplate(calls=self.calls, pool=pool)
        self._launcher = Launcher(calls=self.calls, pool=pool, template=self._template.name)
        self._environment = dict(agent_environment or {})
        self._layout = layout
        self._asked: OrderedDict[str, asyncio.Lock] = OrderedDict()
        self._born: OrderedDict[str, None] = OrderedDict()

    async def close(self) -> None:
        """Nothing is held: the client is its maker's."""

    async def prepare(self, launch: Mapping[str, str]) -> Sequence[str]:
        options = Options.parse(launch)
        data = self._template_data(options)
        await self._check_places(options)
        return await self._template.ensure(data)

    async def has_template(self, launch: Mapping[str, str]) -> bool | None:
        """Whether `prepare` would leave the launch template as it is; None where there is none."""
        return await self._template.is_current(self._template_data(Options.parse(launch)))

    def _template_data(self, options: Options) -> RequestLaunchTemplateDataTypeDef:
        user_data = build_user_data(options, pool=self._pool, environment=self._environment, layout=self._layout)
        return template_data(options, user_data)

    async def launch(self, request: LaunchRequest) -> LaunchResult:
        options = Options.parse(request.launch)
        again = request.client_token in self._asked
        lock = self._asked.setdefault(request.client_token, asyncio.Lock())
        while len(self._asked) > MAX_TOKENS:
            self._asked.popitem(last=False)
        async with lock:
            result = await self._launcher.launch(request, options, look_first=again)
        self._born.update(dict.fromkeys(launched.instance_id for launched in result.instances))
        while len(self._born) > MAX_BORN:
            self._born.popitem(last=False)
        return result

    async def describe(self, instance_ids: Collection[str]) -> Mapping[str, MachineView]:
        # By filter: an id that EC2 does not know is left out, where naming it would fail the whole call.
        known: dict[str, MachineView] = {}
        wanted = sorted({name for name in instance_ids if is_instance_id(name)})
        for batch in batches(wanted, BATCH):
            for view in await views_of(self.calls, by_id(batch)):
                known[view.instance_id] = view
        return known

    async def list_pool(self) -> Sequence[MachineView]:
        return await views_of(self.calls, by_tag(POOL_TAG, self._pool))

    async def terminate(self, instance_ids: Collection[str]) -> Mapping[str, str]:
        wanted = list(dict.fromkeys(instance_ids))
        failures = {name: f"{name[:40]!r} is no instance id" for name in wanted if not is_instance_id(name)}
        # Looked at first: only what is proven to be this pool's is ever ended. What EC2 does not know is gone, or so
        # new that its describe lags: we launched it ourselves, or the next sweep sees it.
        pools = await self._pools_of(wanted)
        ours: list[str] = []
        for name in wanted:
            is_ours = pools[name] == self._pool if name in pools else name in self._born
            if is_ours:
                ours.append(name)
            elif name in pools:
                failures[name] = f"it does not carry the tag {POOL_TAG}={self._pool}"
        for batch in batches(ours, BATCH):
            failures |= await self._terminate(list(batch))
        return failures

    async def tag(self, instance_ids: Collection[str], tags: Mapping[str, str]) -> None:
        pairs = [{"Key": key, "Value": value} for key, value in sorted(tags.items())]
        await self._change_tags("CreateTags", instance_ids, pairs)

    async def untag(self, instance_ids: Collection[str], keys: Collection[str]) -> None:
        await self._change_tags("DeleteTags", instance_ids, [{"Key": key} for key in sorted(set(keys))])

    async def _check_places(self, options: Options) -> None:
        """Image, subnets and groups: better one sentence now than a launch that fails."""
        asked = {_SUBNETS: options.subnets, _IMAGES: _plain_images(options.ami), _GROUPS: options.security_groups}
        missing = await gathered(self._missing(kind, wanted) for kind, wanted in asked.items() if wanted)
        for kind, name in missing:
            if name:
                raise UserError(
                    f"{kind.option}: there is no {name} in this region and account",
                    field=kind.option,
                    fix=f"give one that {kind.operation} shows",
                )

    async def _missing(self, kind: _Kind, wanted: Sequence[str]) -> tuple[_Kind, str]:
        """The first that is not there, or empty."""
        answer = await self.calls.ask(kind.operation, Filters=[{"Name": kind.filter, "Values": list(wanted)}])
        known = {item.get(kind.key) for item in answer.get(kind.listed, ())}
        return kind, next((name for name in wanted if name not in known), "")

    async def _pools_of(self, instance_ids: Sequence[str]) -> dict[str, str]:
        """By id the pool that a machine is tagged with, empty where it has no such tag. Those that EC2 knows."""
        wanted = sorted({name for name in instance_ids if is_instance_id(name)})
        pools: dict[str, str] = {}
        for batch in batches(wanted, BATCH):
            # To ask for the tag alone is far less work for both sides than to ask for the machines.
            pools |= await tags_by_id(self.calls, POOL_TAG, batch)
        odd = await self.describe([name for name in wanted if name not in pools])
        return {**pools, **{name: view.tags.get(POOL_TAG, "") for name, view in odd.items()}}

    async def _terminate(self, names: list[str]) -> dict[str, str]:
        """One unknown or protected id fails a whole call: leave out those it names, or halve, and go on."""
        if not names:
            return {}
        try:
            await self.calls.ask("TerminateInstances", passes=_UNKNOWN_IDS | {_PROTECTED}, InstanceIds=names)
        except ClientError as error:
            named = set(_ID.findall(said_by(error)))
            rest = [name for name in names if name not in named]
            if len(rest) < len(names):
                failed = [name for name in names if name in named] if code_of(error) == _PROTECTED else []
                return {**dict.fromkeys(failed, said_by(error)), **await self._terminate(rest)}
            if len(names) == 1:
                # Gone, if EC2 says that it does not know this very one.
                gone = code_of(error) == "InvalidInstanceID.NotFound"
                return {} if gone else {names[0]: said_by(error)}
            middle = len(names) // 2
            return {**await self._terminate(names[:middle]), **await self._terminate(names[middle:])}
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
        for batch in batches([name for name in names if name not in unknown], BATCH):
            resources = list(batch)
            while resources:
                try:
                    await self.calls.ask(operation, passes=_UNKNOWN_IDS, Resources=resources, Tags=list(tags))
                    break
                except ClientError as error:
                    named = set(_ID.findall(said_by(error))) & set(resources)
                    # Where it does not say which one: all of them are left out, and named.
                    unknown |= named or set(resources)
                    resources = [name for name in resources if name not in unknown]
        if unknown:
            raise NotFound(f"there is no machine {', '.join(sorted(unknown))}")


def _plain_images(ami: str) -> tuple[str, ...]:
    """`resolve:ssm:` is looked up by EC2 at launch."""
    return (ami,) if ami.startswith("ami-") else ()
