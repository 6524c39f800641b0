"""Removal of a pool: the steps of `remuda destroy`, runner sets and machines first.

Every step lists the resources that are left, so an interrupted removal continues when it is run again. Until the
stack is deleted, the pool goes on if no one does so: the next refresh creates the launch template again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from remuda.adapters.aws.ec2.template import TEMPLATE_MISSING, template_name
from remuda.config.settings import Settings
from remuda.controlplane import operator
from remuda.controlplane.context import Context
from remuda.controlplane.demand.lease import EXPIRES_AFTER_S
from remuda.controlplane.demand.listener import removed_set
from remuda.controlplane.operator import InstanceSelector
from remuda.controlplane.refresh import refresh
from remuda.deployment.api import AwsAccount, AwsApi, tags_of
from remuda.deployment.deploy import DeployProgress, pool_settings, template_key
from remuda.deployment.resources import (
    Bucket,
    CredentialSecret,
    FoundResource,
    LogGroups,
    OidcProvider,
    PoolTable,
    SecurityGroup,
    stack_name,
)
from remuda.deployment.stack import STACK_TAG, Stack, StackState
from remuda.domain.demand import LISTENER_LEASE, Lease
from remuda.domain.errors import Conflict, RemudaError, Unavailable, UserError
from remuda.domain.instance import ABSORBING, Instance
from remuda.domain.runner_set import RunnerSet
from remuda.ports.clock import Clock
from remuda.ports.compute import POOL_TAG, MachineState
from remuda.ports.event_log import SilentEventLog
from remuda.wiring import open_context
from remuda.wiring.github import open_demand_source

#: Seconds between two reads of the machines: the first, and the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
#: Seconds until the network interfaces of terminated machines must be gone.
GROUP_TIMEOUT_S = 300.0
REASON = "the pool is destroyed"
#: Maximum number of other pools that an error names.
MAX_NAMED = 10
#: Logical ids of the resources with data. Log groups have the ending.
TABLE, LOGS_ENDING = "Table", "Logs"
#: Prefixes of the objects that `deploy` stores.
OWN_PREFIXES = ("agent/", "lambda/", "template/")
_NOT_OURS = "remuda deploy did not create it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Removal:
    """A resource, and whether it is deleted."""

    what: str
    #: Why it is kept; empty if it is deleted.
    kept_because: str = ""
    #: Whether it holds data that cannot be created again.
    is_data: bool = False


@dataclass(frozen=True, kw_only=True)
class RemovalPlan:
    removals: tuple[Removal, ...]
    #: Machines of the pool, and those of them that belong to a run.
    machines: int = 0
    busy: int = 0

    @property
    def deleted(self) -> list[Removal]:
        return [item for item in self.removals if not item.kept_because]

    @property
    def kept(self) -> list[Removal]:
        return [item for item in self.removals if item.kept_because]


@dataclass(kw_only=True)
class _Pool:
    """Resources that are left of the pool."""

    stack: StackState | None = None
    has_table: bool = False
    has_template: bool = False
    log_groups: list[str] = field(default_factory=list)


class Destruction:
    def __init__(
        self, *, api: AwsApi, pool: str, account: AwsAccount, clock: Clock, progress: DeployProgress, keeps_data: bool
    ) -> None:
        self._api = api
        self._pool = pool
        self._account = account
        self._clock = clock
        self._progress = progress
        self._keeps_data = keeps_data
        self._stack = Stack(api, stack_name(pool), clock)
        self._bucket = Bucket(api, pool, account)
        self._secret = CredentialSecret(api, pool)
        self._group = SecurityGroup(api, pool)
        self._table = PoolTable(api, pool)
        self._logs = LogGroups(api, pool)
        #: Runner sets to delete on GitHub.
        self._sets: dict[str, RunnerSet] = {}
        self._lease: Lease | None = None
        self._lease_changed_at = clock.monotonic()

    # What is there --------------------------------------------------------------------------------------------

    async def plan(self) -> RemovalPlan:
        found = await self._find()
        if found.stack is not None and found.stack.pool != self._pool:
            raise UserError(
                f"stack {self._stack.name} is not a stack of pool {self._pool}", field="--pool", fix="check --pool"
            )
        removals: list[Removal] = []
        data = "--keep-data" if self._keeps_data else ""

        def add(what: str, *, why: str = "", is_data: bool = False) -> None:
            removals.append(Removal(what=what, kept_because=why or (data if is_data else ""), is_data=is_data))

        if found.has_template:
            add(f"launch template {template_name(self._pool)}")
        if found.stack is not None:
            add(f"stack {self._stack.name}")
        if found.has_table:
            is_ours = (found.stack is not None and found.stack.exists) or await self._table.is_ours()
            add(f"table {self._table.name}", why="" if is_ours else _NOT_OURS, is_data=True)
        for name in found.log_groups:
            add(f"log group {name}", is_data=True)
        await self._plan_others(add)
        for provider, why in await self._providers():
            add(f"OIDC provider {provider.arn}", why=why)
        machines, busy = await self._count_machines(found)
        return RemovalPlan(removals=tuple(removals), machines=machines, busy=busy)

    async def check_existed(self) -> None:
        """For a pool of which nothing is left, raise `UserError` with the names of the others if it never existed.

        CloudFormation lists a deleted stack for 90 days:
        https://docs.aws.amazon.com/AWSCloudFormation/latest/APIReference/API_ListStacks.html
        """
        deleted = self._api.items(
            "cloudformation", "ListStacks", "StackSummaries", StackStatusFilter=["DELETE_COMPLETE"]
        )
        async for item in deleted:
            if item["StackName"] == self._stack.name:
                return
        stacks = self._api.items("cloudformation", "DescribeStacks", "Stacks")
        tags = [tags_of(item.get("Tags")) async for item in stacks]
        pools = sorted({tag[STACK_TAG] for tag in tags if STACK_TAG in tag})
        where = f"{self._account.region} of account {self._account.account_id}"
        fix = f"name one of {', '.join(pools[:MAX_NAMED])}" if pools else "check --region and the AWS credentials"
        raise UserError(f"--pool is {self._pool!r}, but there is no such pool in {where}", field="--pool", fix=fix)

    async def _plan_others(self, add: Callable[..., None]) -> None:
        for group in await self._group.find_all():
            add(f"security group {self._group.name} ({group.identifier})")
        bucket = await self._bucket.find()
        if bucket is not None:
            why, other = await self._inspect(bucket)
            add(
                f"bucket {self._bucket.name}{f' with {other}' if other and not why else ''}",
                why=why,
                is_data=bool(other),
            )
        secret = await self._secret.find()
        if secret is not None:
            why = "" if secret.is_ours else _NOT_OURS
            add(f"secret {self._secret.name}", why=why, is_data=True)

    async def _inspect(self, bucket: FoundResource) -> tuple[str, str]:
        """Why the bucket is kept, and an object in it that `deploy` did not store; both may be empty."""
        if bucket.problem:
            return bucket.problem, ""
        keys = (item["Key"] for item in await self._bucket.keys())
        other = next((key for key in keys if not key.startswith(OWN_PREFIXES)), "")
        return (f"--keep-data, and it has other objects, such as {other}" if self._keeps_data and other else ""), other

    async def _find(self) -> _Pool:
        return _Pool(
            stack=await self._stack.describe(),
            has_table=await self._table.exists(),
            has_template=await self._has_template(),
            log_groups=await self._logs.names(),
        )

    async def _has_template(self) -> bool:
        answer = await self._api.find(
            "ec2", "DescribeLaunchTemplates", TEMPLATE_MISSING, LaunchTemplateNames=[template_name(self._pool)]
        )
        found = (answer or {}).get("LaunchTemplates") or ()
        return any(tags_of(item.get("Tags")).get(POOL_TAG) == self._pool for item in found)

    async def _providers(self) -> list[tuple[OidcProvider, str]]:
        """Providers that `deploy` created, each with the reason to keep it.

        A provider created for a pool that still exists is that pool's.
        """
        answer = await self._api.call("iam", "ListOpenIDConnectProviders")
        found: list[tuple[OidcProvider, str]] = []
        for item in answer.get("OpenIDConnectProviderList") or ():
            arn = str(item["Arn"])
            provider = OidcProvider(self._api, self._account, f"https://{arn.partition(':oidc-provider/')[2]}")
            owner = await provider.owner()
            if not owner or (owner != self._pool and await self._exists(owner)):
                continue
            own = {f"{stack_name(self._pool)}-{role}" for role in ("workflow", "refresh")}
            others = [name for name in await provider.users() if name not in own]
            found.append((provider, f"role {others[0]} uses it" if others else ""))
        return found

    async def _exists(self, pool: str) -> bool:
        return await Stack(self._api, stack_name(pool), self._clock).describe() is not None

    async def _count_machines(self, found: _Pool) -> tuple[int, int]:
        async with AsyncExitStack() as stack:
            context = await self._open(stack, found)
            machines = [item for item in await context.compute.list_pool() if item.state in _EXISTING]
            busy = [item for item in await _live(context) if item.holder is not None] if found.has_table else []
        return len(machines), len(busy)

    # Machines -------------------------------------------------------------------------------------------------

    async def remove_machines(self, *, force: bool) -> None:
        """Drain the machines and wait until they are gone, or terminate them now."""
        found = await self._find()
        async with AsyncExitStack() as stack:
            context = await self._open(stack, found)
            shown, pause_s = "", FIRST_PAUSE_S
            while True:
                await self._delete_template()
                has_sets = found.has_table and await self._give_up_sets(context)
                live = await self._end_machines(context, force=force) if found.has_table else []
                if not any(item.state not in ABSORBING for item in live):
                    # What is left has no record that could protect it, or is ending.
                    left = [item.instance_id for item in await context.compute.list_pool() if item.state in _RUNNING]
                    await self._terminate(context, left)
                    left = [item.instance_id for item in await context.compute.list_pool() if item.state in _EXISTING]
                    if not left and not live and not has_sets:
                        break
                busy = sum(item.holder is not None for item in live)
                text = f"{len(live)} machines are left, {busy} of them in use" if live else "machines are shutting down"
                if has_sets and not live:
                    text = f"the listener removes its runner sets from GitHub: {', '.join(self._sets)}"
                if text != shown:
                    hint = "; --force terminates them now" if busy and not force else ""
                    self._progress.step(text + hint)
                    shown = text
                await self._clock.sleep(pause_s)
                pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
            await self._delete_sets(context)

    async def _give_up_sets(self, context: Context) -> bool:
        """Configure no runner sets. Whether a listener still has to delete some on GitHub.

        The next refresh may configure them again, so this is repeated.
        """
        config, demand = await context.store.get_config(), await context.store.get_demand()
        self._sets |= {name: removed_set(name, record) for name, record in demand.items()}
        if config is not None and config.runner_sets:
            self._sets |= {item.name: item for item in config.runner_sets}
            with suppress(Conflict):
                await context.store.put_config(replace(config, runner_sets=(), revision=config.revision + 1))
        lease, now = await context.store.get_lease(LISTENER_LEASE), self._clock.monotonic()
        if lease != self._lease:
            self._lease, self._lease_changed_at = lease, now
        is_alive = lease is not None and bool(lease.owner) and now - self._lease_changed_at < EXPIRES_AFTER_S
        return bool(demand) and is_alive

    async def _delete_sets(self, context: Context) -> None:
        """Delete the sets on GitHub that no listener has deleted, or that one has created again."""
        if not self._sets or context.github is None:
            return
        async with open_demand_source(context) as source:
            for name, runner_set in self._sets.items():
                try:
                    if await source.delete_set(runner_set):
                        self._progress.step(f"runner set {name} deleted on GitHub")
                except RemudaError as error:
                    self._progress.detail(f"runner set {name} stays on GitHub: {error.message}")

    async def _end_machines(self, context: Context, *, force: bool) -> list[Instance]:
        """Drain or terminate all, sweep, and return those that are left."""
        live = await _live(context)
        if live:
            act = operator.terminate if force else operator.drain
            result = await act(context, live, reason=REASON, dry_run=False)
            for error in result.errors:
                self._progress.detail(error)
        # Ends idle machines, and removes registrations from GitHub.
        swept = await refresh(context, None)
        for error in swept.errors:
            self._progress.detail(error)
        return await _live(context)

    async def _terminate(self, context: Context, instance_ids: list[str]) -> None:
        failures = await context.compute.terminate(instance_ids) if instance_ids else {}
        for instance_id, why in failures.items():
            raise Unavailable(f"{instance_id} cannot be terminated: {why}")

    async def _open(self, stack: AsyncExitStack, found: _Pool) -> Context:
        """The ports of the pool; without GitHub if the credential is gone."""
        values = found.stack.parameters if found.stack else {}
        settings = partial(
            pool_settings, self._pool, scope=values.get("GithubScope", ""), api_url=values.get("GithubApiUrl", "")
        )
        if secret := values.get("GithubSecretArn", ""):
            with_github = settings(app_id=values.get("GithubAppId", ""), secret=secret)
            try:
                return await self._enter(stack, with_github, needs_github=True)
            except RemudaError as error:
                self._progress.detail(f"registrations stay on GitHub: {error.message}")
        return await self._enter(stack, settings(), needs_github=False)

    @staticmethod
    async def _enter(stack: AsyncExitStack, settings: Settings, *, needs_github: bool) -> Context:
        return await stack.enter_async_context(open_context(settings, SilentEventLog(), needs_github=needs_github))

    async def _delete_template(self) -> None:
        if await self._has_template():
            await self._api.find(
                "ec2", "DeleteLaunchTemplate", TEMPLATE_MISSING, LaunchTemplateName=template_name(self._pool)
            )

    # Everything else ------------------------------------------------------------------------------------------

    async def remove_rest(self) -> None:
        state = await self._stack.describe()
        if state is not None:
            if state.is_busy and state.status != "DELETE_IN_PROGRESS":
                self._progress.step(f"stack {self._stack.name} is {state.status}; waiting for its end")
                state = await self._settle()
            if self._keeps_data and state is not None and state.exists and state.status != "DELETE_FAILED":
                await self._retain_data(state)
            self._progress.step(f"deleting stack {self._stack.name}")
            await self._stack.delete(self._progress.detail)
        # A refresh that ran meanwhile may have created the template, and a provision a machine.
        await self.remove_machines(force=True)
        await self._delete_data()
        await self._delete_groups()
        bucket = await self._bucket.find()
        if bucket is not None and not (await self._inspect(bucket))[0]:
            await self._bucket.delete()
            self._progress.step(f"bucket {self._bucket.name} deleted")
        secret = await self._secret.find()
        if secret is not None and secret.is_ours and not self._keeps_data:
            await self._secret.delete()
            self._progress.step(f"secret {self._secret.name} deleted")
        for provider, why in await self._providers():
            if not why:
                await provider.delete()
                self._progress.step(f"OIDC provider {provider.arn} deleted")

    async def _settle(self) -> StackState | None:
        try:
            return await self._stack.settle(self._progress.detail)
        except RemudaError as error:
            self._progress.detail(error.message)
            return await self._stack.describe()

    async def _retain_data(self, state: StackState) -> None:
        """Change the policies of table and log groups, so that the deletion of the stack keeps them.

        CloudFormation ignores an update that changes nothing but a DeletionPolicy ("Update stack templates" in its user
        guide), so the metadata of these resources changes, too.
        """
        answer = await self._api.call("cloudformation", "GetTemplate", StackName=self._stack.name)
        body: Any = answer["TemplateBody"]
        if not isinstance(body, dict):
            raise UserError(
                f"the template of stack {self._stack.name} is not that of remuda deploy",
                field="--keep-data",
                fix="run remuda deploy first, or omit --keep-data",
            )
        for name, resource in body["Resources"].items():
            if name == TABLE or name.endswith(LOGS_ENDING):
                resource |= {"DeletionPolicy": "Retain", "Metadata": {"KeptBy": "remuda destroy --keep-data"}}
        self._progress.step("changing the stack so that its data is kept")
        text = json.dumps(body, separators=(",", ":")).encode()
        key = template_key(text)
        await self._bucket.upload(key, text)
        changes = await self._stack.plan(
            template_url=await self._bucket.address(key),
            parameters={},
            kept=tuple(name for name in body["Parameters"] if name in state.parameters),
            tags={**state.tags, STACK_TAG: self._pool},
            is_new=False,
        )
        if changes:
            await self._stack.apply(self._progress.detail)

    async def _delete_data(self) -> None:
        """Delete the remains of an earlier removal with `--keep-data`, and log groups that a function created again."""
        if self._keeps_data:
            return
        if await self._table.is_ours():
            await self._table.delete()
            self._progress.step(f"table {self._table.name} deleted")
        for name in await self._logs.names():
            await self._logs.delete(name)

    async def _delete_groups(self) -> None:
        started_at = self._clock.monotonic()
        for group in await self._group.find_all():
            while not await self._group.delete(group.identifier):
                if self._clock.monotonic() - started_at > GROUP_TIMEOUT_S:
                    raise Unavailable(
                        f"security group {group.identifier} is still in use",
                        fix="remove its other users, and run remuda destroy again",
                    )
                await self._clock.sleep(LONGEST_PAUSE_S)
            self._progress.step(f"security group {group.identifier} deleted")


#: Machines that still have a network interface.
_EXISTING = frozenset({MachineState.PENDING, MachineState.RUNNING, MachineState.SHUTTING_DOWN})
_RUNNING = frozenset({MachineState.PENDING, MachineState.RUNNING})


async def _live(context: Context) -> list[Instance]:
    """All machines with a record. A pool without a configuration has none."""
    if await context.store.get_config() is None:
        return []
    return await operator.select_instances(context, InstanceSelector(everything=True))
