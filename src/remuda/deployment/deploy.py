"""Deployment of a pool: the steps of `remuda deploy` after its checks.

Each step completes what an interrupted run has left and is skipped if there is nothing to do, so the command can be cut
anywhere and run again. An upgrade is the same command of a newer version.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from remuda.adapters.aws.ec2.options import parse_tags
from remuda.adapters.aws.ec2.template import TEMPLATE_MISSING, template_name
from remuda.adapters.aws.functions import FunctionsDoctor
from remuda.config.settings import Settings
from remuda.config.sources import load
from remuda.controlplane import operator
from remuda.controlplane.doctor import run_checks
from remuda.controlplane.operator import InstanceSelector
from remuda.deployment.api import AwsApi
from remuda.deployment.bundles import Bundle, BundleSource, BundleUse
from remuda.deployment.idle_cost import IdleCost, idle_cost
from remuda.deployment.images import add_sources
from remuda.deployment.policies import check_policies
from remuda.deployment.preflight import DeployFacts, DeployTarget
from remuda.deployment.resources import Bucket, CredentialSecret, OidcProvider, SecurityGroup, SpotRole, stack_name
from remuda.deployment.stack import FAILED_CREATION, STACK_TAG, Stack, StackChange, new_resources
from remuda.deployment.template import FUNCTION_SUBNETS, IMAGE_KEY_PARAMETER, VOLUME_KEY_PARAMETER, template
from remuda.domain.demand import LISTENER_LEASE
from remuda.domain.errors import Partial, Throttled, UserError
from remuda.ports.clock import Clock
from remuda.ports.doctor import CheckResult, CheckStatus
from remuda.ports.event_log import SilentEventLog
from remuda.wiring import open_context
from remuda.wiring.doctor import open_doctor
from remuda.wiring.github import GithubCredential

#: Attempts of the first refresh. New permissions take seconds until every service knows them.
REFRESH_ATTEMPTS = 6
REFRESH_PAUSE_S = 5.0
#: Seconds until a throttled function is invoked again.
THROTTLE_PAUSE_S = 20.0
_DENIED = re.compile(r"AccessDenied|UnauthorizedOperation|not authorized|do not permit")
OUTDATED = "launched before the current launch template"
#: Parameters with lists of ids, of which the template needs the elements.
LIST_SETTINGS = ("SubnetIds", "SecurityGroupIds", FUNCTION_SUBNETS)
#: Seconds in which a new listener must serve the runner sets: its machine boots and downloads the program.
LISTENER_TIMEOUT_S = 300.0
LISTENER_POLL_S = 3.0


class DeployProgress(Protocol):
    def step(self, text: str) -> None: ...

    def detail(self, text: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class DeployRequest:
    wanted: DeployTarget
    #: Parameters of the stack: settings that were given, and others.
    parameters: Mapping[str, str]
    #: The default of the parameter Repositories for a new stack.
    repositories: str
    #: None if the stored credential stays.
    credential: GithubCredential | None
    #: ARN of a secret of the user, instead of a credential.
    own_secret: str
    app_id: str
    api_url: str
    bundles: BundleSource
    #: OWNER/REPO of Remuda, for the workflow; empty if it is not known.
    repository: str = ""
    allow_replacement: bool = False


@dataclass(frozen=True, kw_only=True)
class StackPlan:
    template: Mapping[str, Any]
    parameters: Mapping[str, str]
    #: Parameters that keep the values of the existing stack.
    kept: tuple[str, ...]

    @property
    def text(self) -> bytes:
        return json.dumps(self.template, separators=(",", ":")).encode()

    @property
    def key(self) -> str:
        return template_key(self.text)

    def value(self, name: str, facts: DeployFacts) -> str:
        if name in self.parameters:
            return self.parameters[name]
        default = str(self.template["Parameters"].get(name, {}).get("Default", ""))
        return facts.stored(name) if name in self.kept else default


@dataclass(kw_only=True)
class DeployResult:
    #: Changes outside the stack, in words.
    done: list[str] = field(default_factory=list)
    changes: tuple[StackChange, ...] = ()
    #: The change set with these changes.
    change_set: str = ""
    refresh: dict[str, Any] = field(default_factory=dict)
    drained: list[str] = field(default_factory=list)
    #: The process that serves the runner sets; empty if none exists.
    listener: str = ""
    doctor: Mapping[str, CheckResult] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)


def plan_stack(request: DeployRequest, facts: DeployFacts, *, secret: str, groups: str) -> StackPlan:
    """Template and parameters. `groups` are new security groups; empty if the stack or the user has some."""
    wanted = request.wanted
    check_policies(
        facts.classes, pool=wanted.pool, role_path=request.parameters.get("RolePath") or facts.stored("RolePath") or "/"
    )
    made = template(facts.classes, issuer=wanted.issuer.partition("://")[2])
    for name, names in facts.adopted.items():
        # CloudFormation takes over only resources that it would not delete, and whose names are written as they are.
        made["Resources"][name] |= {"DeletionPolicy": "Retain"}
        made["Resources"][name]["Properties"] |= names
    known = made["Parameters"]
    account = facts.known_account
    bucket = Bucket.name_of(wanted.pool, account)
    architecture = request.parameters.get("Architecture") or facts.stored("Architecture")
    code = choose_code(facts.bundles, architecture)
    agents = {item.architecture: item for item in facts.bundles if item.use is BundleUse.AGENT}
    parameters = {
        "Pool": wanted.pool,
        "CodeBucket": bucket,
        "CodeKey": code.key,
        "Architecture": code.architecture,
        "GithubSecretArn": secret,
        "OidcProviderArn": OidcProvider.arn_of(account, wanted.issuer),
        "OidcIssuer": wanted.issuer,
        "AgentUrl": per_architecture({name: f"s3://{bucket}/{item.key}" for name, item in agents.items()}),
        "AgentSha256": per_architecture({name: item.sha256 for name, item in agents.items()}),
    }
    defaults = {
        "GithubScope": wanted.scope,
        "Repositories": request.repositories,
        "SubnetIds": ",".join(facts.subnets),
    }
    if facts.may_reserve:
        defaults["ReserveConcurrency"] = "true"
    if wanted.vpc:
        parameters["SubnetIds"] = defaults.pop("SubnetIds")
    if facts.volume_key:
        # Or EC2 would take this key without the permissions of its policy.
        defaults[VOLUME_KEY_PARAMETER] = facts.volume_key
    if facts.image_key and facts.image_key != facts.stored(IMAGE_KEY_PARAMETER):
        parameters[IMAGE_KEY_PARAMETER] = facts.image_key
    if groups:
        parameters["SecurityGroupIds"] = groups
    parameters |= {name: value for name, value in defaults.items() if not facts.stored(name)}
    parameters |= {name: each.image for name, each in facts.images.items() if each.image != facts.stored(name)}
    add_sources(made["Outputs"], facts.images)
    parameters |= request.parameters
    for name in LIST_SETTINGS:
        # The template splits them at commas; settings also accept spaces.
        text = parameters.get(name) or facts.stored(name)
        if text and text.split() != [text]:
            parameters[name] = ",".join(text.replace(",", " ").split())
    if request.credential or request.own_secret:
        # Decides what the secret contains.
        parameters["GithubAppId"] = request.app_id
    for name in request.parameters:
        if name not in known:
            raise UserError(
                f"the stack has no parameter {name[:60]!r}", field="--parameter", fix=f"use {', '.join(known)}"
            )
    kept = (
        [] if not facts.stack or not facts.stack.exists else [name for name in known if name in facts.stack.parameters]
    )
    return StackPlan(template=made, parameters=parameters, kept=tuple(name for name in kept if name not in parameters))


def expected_plan(request: DeployRequest, facts: DeployFacts) -> StackPlan:
    """The plan before anything outside the stack exists, with placeholders for what will be created."""
    secret = facts.stored("GithubSecretArn") or request.own_secret or "arn:new"
    return plan_stack(request, facts, secret=secret, groups="" if facts.groups else "sg-new")


def expected_cost(request: DeployRequest, facts: DeployFacts) -> IdleCost:
    """What the pool will cost while nothing runs."""
    plan = expected_plan(request, facts)
    values = {name: plan.value(name, facts) for name in plan.template["Parameters"]}
    resources = [item.logical_id for item in new_resources(plan.template, values)]
    return idle_cost(resources, values, owns_secret=not request.own_secret, outbound=facts.outbound)


def choose_code(bundles: tuple[Bundle, ...], architecture: str) -> Bundle:
    """The bundle of the functions for this architecture, or the first one."""
    found = [item for item in bundles if item.use is BundleUse.LAMBDA]
    for item in found:
        if architecture in {"", item.architecture}:
            return item
    raise UserError(
        f"there is no bundle of the functions for {architecture}, only for {found[0].architecture}",
        field="--parameter",
        fix="build it, or set another Architecture",
    )


def per_architecture(values: Mapping[str, str]) -> str:
    """One value per architecture, as the settings of the agent take them."""
    return ",".join(f"{name}={value}" for name, value in values.items())


class Deployment:
    """The steps. `facts` are those of the checks."""

    def __init__(
        self,
        *,
        api: AwsApi,
        request: DeployRequest,
        facts: DeployFacts,
        clock: Clock,
        progress: DeployProgress,
        result: DeployResult,
    ) -> None:
        """`result` is completed by every step."""
        self._api = api
        self._request = request
        self._facts = facts
        self._clock = clock
        self._progress = progress
        self._pool = request.wanted.pool
        self._stack = Stack(api, stack_name(self._pool), clock)
        self._bucket = Bucket(api, self._pool, facts.known_account)
        self.result = result
        #: The user's tags: of the stack, which CloudFormation gives to its resources, and of what is outside it.
        self._tags = parse_tags(request.parameters.get("Tags", facts.stored("Tags")))

    # Before the stack -----------------------------------------------------------------------------------------

    async def stage(self) -> StackPlan:
        """Create what the stack needs, and the change set."""
        await self._recover()
        await self._ensure_bucket()
        secret = await self._ensure_secret()
        provider = OidcProvider(self._api, self._facts.known_account, self._request.wanted.issuer)
        done = await provider.ensure(self._pool, self._tags)
        self._note("OIDC provider of GitHub", done)
        self._note(f"role {SpotRole.name}", "created" if await SpotRole(self._api).ensure() else "")
        groups = await self._ensure_group()
        plan = plan_stack(self._request, self._facts, secret=secret, groups=groups)
        for bundle in self._used_bundles(plan):
            await self._upload(bundle)
        await self._bucket.upload(plan.key, plan.text)
        self._progress.step(f"change set of stack {self._stack.name}")
        self.result.changes = await self._create_change_set(plan)
        self.result.change_set = self._stack.change_set
        return plan

    async def preview(self) -> tuple[StackChange, ...]:
        """The changes of the stack, and nothing left behind."""
        facts = self._facts
        plan = expected_plan(self._request, facts)
        if facts.stack is None or not facts.stack.exists:
            return new_resources(plan.template, plan.parameters, facts.adopted)
        if facts.stack.is_busy:
            raise UserError(
                f"stack {self._stack.name} is {facts.stack.status}",
                field="--dry-run",
                fix="run it again when it is done",
            )
        is_new = await self._bucket.upload(plan.key, plan.text)
        try:
            return await self._create_change_set(plan)
        finally:
            await self._stack.discard_plan()
            if is_new:
                await self._bucket.remove(plan.key)

    async def _recover(self) -> None:
        """Wait for an operation in progress, and delete the remains of a failed creation."""
        state = await self._stack.describe()
        if state is not None and state.is_busy:
            self._progress.step(f"stack {self._stack.name} is {state.status}; waiting for its end")
            try:
                state = await self._stack.settle(self._progress.detail)
            except Partial as error:
                self._progress.detail(error.message)
                state = await self._stack.describe()
        if state is not None and state.status in FAILED_CREATION:
            self._progress.step(f"stack {self._stack.name} is {state.status}; deleting it")
            await self._stack.delete(self._progress.detail)
            state = None
        self._facts.stack = state

    async def _ensure_bucket(self) -> None:
        self._note(f"bucket {self._bucket.name}", "created" if await self._bucket.ensure(self._tags) else "")

    async def _ensure_secret(self) -> str:
        if self._request.own_secret:
            return self._request.own_secret
        secret = CredentialSecret(self._api, self._pool)
        stored = self._facts.stored("GithubSecretArn")
        if self._request.credential is None and stored:
            return stored
        text = self._request.credential.text if self._request.credential else None
        arn, done = await secret.ensure(text, self._tags)
        self._note(f"secret {secret.name}", done)
        return arn

    async def _ensure_group(self) -> str:
        if self._facts.groups:
            return ""
        group = SecurityGroup(self._api, self._pool)
        group_id, is_new = await group.ensure(self._facts.vpc, self._tags)
        self._note(f"security group {group.name}", "created" if is_new else "")
        return group_id

    def _used_bundles(self, plan: StackPlan) -> list[Bundle]:
        code = plan.parameters["CodeKey"]
        return [item for item in self._facts.bundles if item.use is BundleUse.AGENT or item.key == code]

    async def _upload(self, bundle: Bundle) -> None:
        async def read() -> bytes:
            self._progress.step(f"uploading {bundle.name}")
            return await self._request.bundles.read(bundle)

        if await self._bucket.upload(bundle.key, read):
            self.result.done.append(f"{bundle.name}: uploaded")

    def _note(self, what: str, done: str) -> None:
        if done:
            self._progress.step(f"{what}: {done}")
            self.result.done.append(f"{what}: {done}")

    async def _create_change_set(self, plan: StackPlan) -> tuple[StackChange, ...]:
        changes = await self._stack.plan(
            template_url=await self._bucket.address(plan.key),
            parameters=plan.parameters,
            kept=plan.kept,
            tags={**self._tags, STACK_TAG: self._pool},
            is_new=self._facts.stack is None or not self._facts.stack.exists,
            adopts=bool(self._facts.adopted),
        )
        if not self._request.allow_replacement:
            try:
                check_replacements(self._pool, changes)
            except UserError:
                await self._stack.discard_plan()
                raise
        return changes

    async def discard(self) -> None:
        await self._stack.discard_plan()

    # Stack and after ------------------------------------------------------------------------------------------

    async def apply(self, plan: StackPlan) -> None:
        if self.result.changes:
            self._progress.step(f"changing stack {self._stack.name}")
            self._stack.change_set = self.result.change_set
            await self._stack.apply(self._progress.detail)
        else:
            self._progress.step(f"stack {self._stack.name} is up to date")
        state = await self._stack.describe()
        self.result.outputs = state.outputs if state else {}
        settings = self._settings(plan)
        self._progress.step("first refresh" if "Table" in _added(self.result.changes) else "refresh")
        self.result.refresh = await self._refresh({"command": "refresh"})
        await self._drain_outdated(settings)
        if "ListenerGroupName" in self.result.outputs:
            await self._await_listener(settings)
        await self._await_broker()
        self._progress.step("doctor")
        async with open_doctor(settings, {}) as checks:
            self.result.doctor = await run_checks(checks)

    def _settings(self, plan: StackPlan) -> Settings:
        """The settings of commands that act on the pool from here."""
        facts = self._facts
        return pool_settings(
            self._pool,
            scope=plan.value("GithubScope", facts),
            api_url=self._request.api_url or plan.value("GithubApiUrl", facts),
            app_id=plan.value("GithubAppId", facts),
            secret=plan.value("GithubSecretArn", facts),
        )

    async def _refresh(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """Invoke the function: it proves that its code, its role and its settings work."""
        name = f"{stack_name(self._pool)}-refresh"
        for attempt in range(REFRESH_ATTEMPTS):
            try:
                answer = await self._api.call("lambda", "Invoke", FunctionName=name, Payload=json.dumps(event).encode())
            except Throttled as error:
                # Its reserved execution may be in use by the schedule.
                if attempt == REFRESH_ATTEMPTS - 1:
                    raise
                self._progress.detail(f"{error.message}; again in {THROTTLE_PAUSE_S:g} s")
                await self._clock.sleep(THROTTLE_PAUSE_S)
                continue
            document: dict[str, Any] = json.loads(await answer["Payload"].read() or b"{}")
            if not answer.get("FunctionError"):
                return document
            message = str(document.get("errorMessage") or "it gives no reason")
            if not _DENIED.search(message) or attempt == REFRESH_ATTEMPTS - 1:
                break
            self._progress.detail(f"{message}; again in {REFRESH_PAUSE_S:g} s, until the new permissions are known")
            await self._clock.sleep(REFRESH_PAUSE_S)
        raise Partial(f"function {name} failed: {message}", fix="remove the cause, and run the same command again")

    async def _await_broker(self) -> None:
        """Wait until the permissions of a changed broker are known. Doctor reports those that stay denied."""
        if not self.result.changes:
            return
        for attempt in range(REFRESH_ATTEMPTS):
            doctor = FunctionsDoctor(clients=self._api.clients, pool=self._pool)
            found = await doctor.broker()
            if found.status is not CheckStatus.PROBLEM or attempt == REFRESH_ATTEMPTS - 1:
                return
            self._progress.detail(f"{found.message}; again in {REFRESH_PAUSE_S:g} s, until new permissions are known")
            await self._clock.sleep(REFRESH_PAUSE_S)

    async def _drain_outdated(self, settings: Settings) -> None:
        """Let machines with another agent, image or network finish their runs, and give them no other."""
        since = await self._template_created_at()
        if since is None:
            return
        async with open_context(settings, SilentEventLog(), needs_github=False) as context:
            live = await operator.select_instances(context, InstanceSelector(everything=True))
            old = [item for item in live if item.created_at < since]
            result = await operator.drain(context, old, reason=OUTDATED, dry_run=False)
        self.result.drained = [item.instance_id for item in result.done]
        if self.result.drained:
            self._progress.step(f"{len(self.result.drained)} machines {OUTDATED}: they end when they are free")
            await self._refresh({"command": "refresh", "sweep_only": True})

    async def _await_listener(self, settings: Settings) -> None:
        """Wait until a listener renews its lease. If none does, doctor reports it."""
        self._progress.step("waiting for the listener of the runner sets")
        started_at = self._clock.monotonic()
        async with open_context(settings, SilentEventLog(), needs_github=False) as context:
            before = await context.store.get_lease(LISTENER_LEASE)
            while self._clock.monotonic() - started_at < LISTENER_TIMEOUT_S:
                await self._clock.sleep(LISTENER_POLL_S)
                lease = await context.store.get_lease(LISTENER_LEASE)
                if lease is not None and lease.owner and lease != before:
                    self.result.listener = lease.owner
                    return
        self._progress.detail(
            f"no listener after {LISTENER_TIMEOUT_S:g} s; its machine's log: aws ec2 get-console-output --latest "
            f"--instance-id ID (of the Auto Scaling group {self.result.outputs['ListenerGroupName']})"
        )

    async def _template_created_at(self) -> datetime | None:
        answer = await self._api.find(
            "ec2",
            "DescribeLaunchTemplateVersions",
            TEMPLATE_MISSING,
            LaunchTemplateName=template_name(self._pool),
            Versions=["$Default"],
        )
        for version in (answer or {}).get("LaunchTemplateVersions") or ():
            created: datetime = version["CreateTime"]
            return created if created.tzinfo else created.replace(tzinfo=UTC)
        return None


def check_replacements(pool: str, changes: Sequence[StackChange]) -> None:
    """Raise `UserError` if the changes lose the records of the pool, or would be rolled back."""
    destroy = f"remuda destroy --pool {pool}"
    if lost := [change.logical_id for change in changes if change.loses_data]:
        raise UserError(
            f"the change would replace or remove the table ({', '.join(lost)}), with the records of all instances",
            field="--allow-replacement",
            fix=f"deploy the pool anew: {destroy}, then remuda deploy with all its settings (docs/howto/upgrades.md)",
        )
    if failing := [change.logical_id for change in changes if change.fails]:
        raise UserError(
            f"the change would replace {', '.join(failing)}, and CloudFormation replaces nothing that keeps its name",
            field="--allow-replacement",
            fix=f"deploy the pool anew: {destroy} --keep-data, then remuda deploy with all its settings "
            "(docs/howto/upgrades.md)",
        )


def template_key(text: bytes) -> str:
    return f"template/{hashlib.sha256(text).hexdigest()}.json"


def _added(changes: tuple[StackChange, ...]) -> set[str]:
    return {change.logical_id for change in changes if change.action == "Add"}


def pool_settings(pool: str, *, scope: str, api_url: str, app_id: str = "", secret: str = "") -> Settings:
    """Settings of commands on an existing pool: its name and the GitHub credential, nothing of the environment.

    `secret` is the ARN of the secret with the token, or with the private key if there is an App.
    """
    values = {
        "github_scope": scope,
        "github_api_url": api_url,
        "github_app_id": app_id,
        "github_app_key" if app_id else "github_token": secret,
    }
    given = {name: value for name, value in values.items() if value}
    return load({"backend": "aws", "pool": pool, **given}, environ={"REMUDA_CONFIG": os.devnull})
