"""The request, plan and result of a provision. The plan is the validated request with what its instances share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from remuda.controlplane.context import Context, read_config, skip_unreadable
from remuda.controlplane.provision.rollback import AcquiredInstance
from remuda.domain.errors import CapacityError, TimedOut, Unreadable, UserError
from remuda.domain.holder import RunHolder
from remuda.domain.instance import Actor, Assignment, Credential, RetireReason
from remuda.domain.pool_config import DEFAULT_GROUP_ID, PoolConfig, runner_name
from remuda.domain.provision import MAX_REASON, Provision, ProvisionStatus, RunnerSource, exclusive_id, lost_instances
from remuda.domain.resources import (
    Reuse,
    RunnerRequest,
    Tier,
    TypePatterns,
    UsageClass,
    labels_of_run,
    normalize_repository,
    repository_of,
)
from remuda.domain.runner_set import RunnerSet
from remuda.domain.timestamps import to_milliseconds
from remuda.ports.clock import Clock

#: A provision stops acquiring instances this many seconds, or this fraction of its timeout, before its deadline,
#: whichever is less. Claimed instances can be given back only before their threshold, which is the deadline.
ROLLBACK_RESERVE_S = 10.0
ROLLBACK_RESERVE_FRACTION = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionLimits:
    """The times of a provision, on both clocks. Both are read at the same moment: what follows uses up both alike."""

    started_at: datetime
    #: Threshold of the instances until the commit.
    deadline: datetime
    #: Monotonic time at which the provision stops acquiring instances.
    until: float

    @classmethod
    def start(cls, clock: Clock, timeout_s: float) -> ProvisionLimits:
        now, reserve_s = clock.now(), min(ROLLBACK_RESERVE_S, timeout_s * ROLLBACK_RESERVE_FRACTION)
        return cls(
            started_at=to_milliseconds(now),
            deadline=to_milliseconds(now + timedelta(seconds=timeout_s)),
            until=clock.monotonic() + timeout_s - reserve_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionRequest:
    run_id: str
    attempt: int
    count: int
    resource_class: str
    usage_class: UsageClass
    patterns: TypePatterns
    scope: str
    tier: Tier
    #: Why the run has this tier, for people.
    tier_reason: str = ""
    #: The run's repository as owner/name; empty if unknown.
    repository: str = ""
    #: Create new instances with a just-in-time registration for one job each. Requires a GitHub credential.
    ephemeral: bool = False
    #: Whether the run may have runners of this class already.
    add: bool = False
    #: None: the pool's value.
    max_runtime_s: float | None = None
    timeout_s: float | None = None
    #: Whether the pool's value limits `max_runtime_s`.
    is_runtime_limited: bool = False
    #: Upper limit of the timeout, such as the time that the caller has left.
    max_timeout_s: float | None = None


def missing_credential() -> UserError:
    """The error for ephemeral runners without a GitHub credential."""
    return UserError(
        "ephemeral runners need a GitHub credential to register, and none is configured",
        field="ephemeral",
        fix="set REMUDA_GITHUB_TOKEN, or REMUDA_GITHUB_APP_ID and REMUDA_GITHUB_APP_KEY, or leave --ephemeral out",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionResult:
    run_id: str
    provision_id: str
    label: str
    instances: tuple[AcquiredInstance, ...]
    tier: Tier
    tier_reason: str
    ephemeral: bool
    seconds: float
    #: Seconds per phase.
    phases: Mapping[str, float]
    calls: Mapping[str, Mapping[str, int]]
    #: Number of pool messages that did not become a runner, by kind.
    rejected: Mapping[str, int] = field(default_factory=dict)

    @property
    def reused(self) -> int:
        return sum(1 for item in self.instances if item.source is RunnerSource.POOL)

    @property
    def created(self) -> int:
        return len(self.instances) - self.reused


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionPlan:
    config: PoolConfig
    provision: Provision
    request: RunnerRequest
    scope: str
    #: None if each instance gets a just-in-time registration.
    registration: Credential | None = None
    #: Monotonic time at which the provision stops acquiring instances.
    until: float
    max_runtime_s: float
    #: The run's repository as it was given.
    repository: str = ""
    #: The set that the instance is for; None for a run.
    runner_set: RunnerSet | None = None

    @property
    def actor(self) -> Actor:
        return Actor.LISTENER if self.runner_set is not None else Actor.PROVISION

    @property
    def retire_reason(self) -> RetireReason | None:
        """Why new instances of this provision never serve another run; None if they may."""
        if self.registration is None and self.runner_set is None:
            return RetireReason.EPHEMERAL
        return RetireReason.NEVER_REUSED if self.request.reuse is Reuse.NEVER else None

    def assignment(self, instance_id: str, epoch: int) -> Assignment:
        tokens, runner_set = self.config.find_tokens(self.scope), self.runner_set
        return Assignment(
            url=f"{self.config.github_url}/{self.scope}",
            runner_name=runner_name(self.config.pool, epoch, instance_id),
            labels=runner_set.labels
            if runner_set
            else labels_of_run(self.provision.run_id, self.provision.resource_class),
            repository=self.repository,
            runner_group=runner_set.runner_group if runner_set else tokens.runner_group if tokens else "",
            tier=self.request.tier,
            credential=self.registration,
        )

    @property
    def runner_group_id(self) -> int:
        tokens = self.config.find_tokens(self.scope)
        return tokens.runner_group_id if tokens else DEFAULT_GROUP_ID


def raise_if_past_deadline(context: Context, plan: ProvisionPlan) -> None:
    """Called before each claim and launch: an instance acquired now would only be given back."""
    clock = context.clock
    # The monotonic clock of a computer that was suspended did not go on.
    if clock.monotonic() >= plan.until or clock.now() >= plan.provision.deadline:
        count = plan.provision.count
        raise TimedOut(
            f"run {plan.provision.run_id}: fewer than {count} of {count} instances registered in time",
            fix=f"raise --provision-timeout-sec, or check the agents with 'remuda explain {plan.provision.run_id}'",
        )


async def make_plan(context: Context, request: ProvisionRequest) -> ProvisionPlan:
    """Validate the request and obtain a registration token. Rejects before the first claim or launch."""
    if request.ephemeral and context.github is None:
        raise missing_credential()
    config, provision_id = await asyncio.gather(read_config(context), _provision_id(context, request))
    _validate(request, config)
    resource_class = config.resource_class(request.resource_class)
    timeout_s = request.timeout_s or config.lifetimes.provision_timeout_s
    if request.max_timeout_s is not None and timeout_s > request.max_timeout_s:
        timeout_s = request.max_timeout_s
        context.event_log.record("limit", f"the provision has {timeout_s:.0f} s, the most that is possible here")
    limits = ProvisionLimits.start(context.clock, timeout_s)
    return ProvisionPlan(
        config=config,
        provision=Provision(
            holder=RunHolder(run_id=request.run_id, attempt=request.attempt, provision_id=provision_id),
            nonce=context.ids.new(""),
            resource_class=request.resource_class,
            count=request.count,
            created_at=limits.started_at,
            repository=repository_of(request.scope, "") or request.repository,
            deadline=limits.deadline,
            request_summary=_describe_request(request),
        ),
        request=RunnerRequest(
            resource_class=resource_class,
            usage_class=request.usage_class,
            patterns=resource_class.types.narrowed(request.patterns),
            tier=request.tier,
            reuse=config.reuse,
            repository=normalize_repository(request.repository),
        ),
        scope=request.scope,
        repository=request.repository,
        registration=await _registration_token(context, config, request, timeout_s),
        until=limits.until,
        max_runtime_s=_max_runtime_s(context, request, config),
    )


async def _provision_id(context: Context, request: ProvisionRequest) -> str:
    """The id of the provision: a new one if it adds runners, else one that only one provision can have at a time.

    Raises `UserError` if this attempt of the run has runners of the class already, or is about to get them.
    """
    if request.add:
        return context.ids.new("p-")
    try:
        provisions = await context.store.provisions_of_run(request.run_id)
        stored_ids = {provision.provision_id for provision in provisions}
    except Unreadable as error:
        provisions = list(error.records.values())
        stored_ids = {*error.records, *error.unreadable}
    now = context.clock.now()
    for provision in provisions:
        if (provision.attempt, provision.resource_class) != (request.attempt, request.resource_class):
            continue
        if provision.status is ProvisionStatus.RELEASED or provision.deadline <= now:
            continue
        records, _ = await skip_unreadable(context.store.get_many(provision.instance_ids))
        lost = lost_instances(provision, records)
        if provision.status is ProvisionStatus.OPEN or len(lost) < len(provision.instance_ids):
            raise already_provisioned(request, provision, now=now)
    return exclusive_id(request.run_id, request.attempt, request.resource_class, stored_ids)


def already_provisioned(request: ProvisionRequest, held: Provision, *, now: datetime) -> UserError:
    runners = "1 runner" if held.count == 1 else f"{held.count} runners"
    wanted = f"{runners} of class {held.resource_class}"
    if held.status is ProvisionStatus.OPEN:
        age_s = max(0.0, (now - held.created_at).total_seconds())
        text = (
            f"run {request.run_id} is being provisioned with {wanted} ({held.provision_id}, started {age_s:.0f} s ago)"
        )
        fix = "wait for it, pass --add for more, or stop it"
    else:
        text = f"run {request.run_id} has {wanted} already ({held.provision_id})"
        fix = "pass --add for more, or release them first"
    return UserError(text, field="add", fix=f"{fix} with 'remuda release --run-id {request.run_id}'")


def _max_runtime_s(context: Context, request: ProvisionRequest, config: PoolConfig) -> float:
    limit_s = config.lifetimes.max_runtime_s
    if request.is_runtime_limited and (request.max_runtime_s or 0) > limit_s:
        context.event_log.record("limit", f"max-runtime-min is {limit_s / 60:g}, the limit of the pool")
        return limit_s
    return request.max_runtime_s or limit_s


def _validate(request: ProvisionRequest, config: PoolConfig) -> None:
    types = config.resource_class(request.resource_class).types
    if not types.narrowed(request.patterns).words:
        raise UserError(
            f"allowed-instance-types {str(request.patterns)!r} has no type in common with the types of class "
            f"{request.resource_class!r}: {str(types)!r}",
            field="allowed-instance-types",
            fix="give types of the class, or choose another resource class",
        )
    if config.reuse is Reuse.SAME_REPO and not request.ephemeral and not request.repository:
        raise UserError(
            f"the pool's reuse is {config.reuse}, and the repository of run {request.run_id} is unknown",
            field="repository",
            fix="give --repository owner/name",
        )
    if request.count > config.max_instances:
        raise CapacityError(
            f"instance-count is {request.count}; the pool's max-instances is {config.max_instances}",
            fix="request fewer instances, or raise --max-instances and run remuda refresh",
        )
    if request.run_id.lower() in {candidate.name.lower() for candidate in config.classes}:
        raise UserError(
            f"run-id is {request.run_id!r}, the name of a resource class: as a label it would attract other runs' jobs",
            field="run-id",
            fix="give the workflow's run id (github.run_id)",
        )


async def _registration_token(
    context: Context, config: PoolConfig, request: ProvisionRequest, timeout_s: float
) -> Credential | None:
    """A token that outlives the provision. With one that expires earlier, every claimed instance would fail."""
    if request.ephemeral:
        # Sweeps remove stale registrations only in the pool's scopes, so require one of them.
        config.tokens_for(request.scope)
        return None
    if context.github is not None:
        return await context.github.registration_token(request.scope)
    credential = config.tokens_for(request.scope).registration
    left_s = (credential.expires_at - context.clock.now()).total_seconds()
    if left_s < timeout_s:
        raise UserError(
            f"the pool's registration token for {request.scope} expires in {max(0, left_s):.0f} s; "
            f"a provision may take {timeout_s:.0f} s",
            field="github-scope",
            fix="run remuda refresh",
        )
    return credential


def _describe_request(request: ProvisionRequest) -> str:
    tier = f"{request.tier} ({request.tier_reason})" if request.tier_reason else request.tier
    kind = f"ephemeral, {request.usage_class}" if request.ephemeral else request.usage_class
    return f"{kind}, {tier}, for {request.repository or request.scope}, types {request.patterns}"[:MAX_REASON]
