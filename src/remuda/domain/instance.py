"""Instance records: the state of one machine, its assignment, its history, and when it must be retired."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from remuda.domain.holder import Holder, SetHolder, subject_of
from remuda.domain.resources import PoolMessage, Reuse, Tier, UsageClass


class State(StrEnum):
    CREATED = "created"
    CLAIMED = "claimed"
    RUNNING = "running"
    RELEASING = "releasing"
    IDLE = "idle"
    TERMINATING = "terminating"
    TERMINATED = "terminated"


#: States in which the machine may exist in EC2.
LIVE = frozenset(State) - {State.TERMINATED}
#: States in which somebody holds the instance.
ASSIGNED = frozenset({State.CREATED, State.CLAIMED, State.RUNNING})
#: States that an instance never leaves for a state outside this set.
ABSORBING = frozenset({State.TERMINATING, State.TERMINATED})


class Actor(StrEnum):
    """Process that makes a transition."""

    PROVISION = "provision"
    RELEASE = "release"
    REFRESH = "refresh"
    SCALE_DOWN = "scale-down"
    LISTENER = "listener"
    #: A person, by `drain`, `quarantine` or `terminate`.
    OPERATOR = "operator"


class RetireReason(StrEnum):
    """Why an instance does not return to the pool, or why it was terminated."""

    #: The threshold of its state has passed.
    EXPIRED = "expired"
    #: The agent sent a failed signal in this epoch.
    FAILED = "failed"
    #: The provision that holds it stopped waiting.
    TIMED_OUT = "timed-out"
    #: Its run was released before it was ready.
    RELEASED = "released"
    #: EC2 does not know the machine any more.
    GONE = "gone"
    #: The machine has the pool's tags but no record.
    UNRECORDED = "unrecorded"
    TERMINATED_BY_OPERATOR = "terminated-by-operator"
    SPOT_NOTICE = "spot-notice"
    TOO_OLD = "too-old"
    USED_UP = "used-up"
    DRAINED = "drained"
    QUARANTINED = "quarantined"
    #: The pool's reuse policy is `never`.
    NEVER_REUSED = "never-reused"
    #: Registered just in time for one job.
    EPHEMERAL = "ephemeral"
    #: Its actions runner has another version than the pool's.
    OUTDATED = "outdated"
    #: A machine of a trusted runner set served an untrusted or an unknown job.
    UNTRUSTED_JOB = "untrusted-job"


#: Reasons to terminate an instance that works: after it has been reset, and not while it is in quarantine.
RETIREMENTS = frozenset(
    {
        RetireReason.SPOT_NOTICE,
        RetireReason.TOO_OLD,
        RetireReason.USED_UP,
        RetireReason.DRAINED,
        RetireReason.QUARANTINED,
        RetireReason.NEVER_REUSED,
        RetireReason.EPHEMERAL,
        RetireReason.OUTDATED,
        RetireReason.UNTRUSTED_JOB,
    }
)
#: Reasons that an instance has from its creation because it serves a single run.
SINGLE_USE = frozenset({RetireReason.NEVER_REUSED, RetireReason.EPHEMERAL})


@dataclass(frozen=True, kw_only=True, slots=True)
class Credential:
    """A token for one step. Its value never appears in `repr`."""

    token: str = field(repr=False)
    expires_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """Input of the agent for the current step."""

    #: URL that the runner registers with: https://github.com/owner or https://github.com/owner/repo.
    url: str
    runner_name: str
    labels: tuple[str, ...]
    #: The run's repository as owner/name, or empty if unknown.
    repository: str = ""
    #: Runner group that the runner joins, or empty for the default group.
    runner_group: str = ""
    #: The run's trust tier.
    tier: Tier = Tier.UNTRUSTED
    #: Registration or removal token, for this step only.
    credential: Credential | None = None
    #: Just-in-time configuration, valid for one job. Replaces the registration token.
    jit_config: str = field(default="", repr=False)
    #: Whether it may run jobs of any run of its scope, as a runner of a set does.
    any_run: bool = False
    #: Whether it refuses jobs that are not proven to be trusted.
    only_trusted: bool = False
    #: GitHub's id of a just-in-time registration, which can be removed only by this id. 0 if there is no such
    #: registration or GitHub confirmed its removal.
    runner_id: int = 0

    @property
    def is_tier_known(self) -> bool:
        """Whether each job that it can get has its tier. A trusted set that is not strict gets untrusted jobs, too."""
        return not self.any_run or self.only_trusted or self.tier is Tier.UNTRUSTED


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """Control record of one instance. The control plane writes it, the agent reads it."""

    instance_id: str
    state: State
    #: Number of the assignment: 1 at creation, +1 per claim.
    epoch: int
    #: Time until which the instance may stay in its state.
    threshold: datetime
    resource_class: str
    instance_type: str
    usage_class: UsageClass
    cpu: int
    memory_mib: int
    created_at: datetime
    #: Who holds it while it is created, claimed or running; None in the other states.
    holder: Holder | None = None
    #: Who held it last; None while somebody holds it, and if nobody ever did.
    last_holder: Holder | None = None
    #: Token of its claim or launch, by which a process that lost the answer to its write knows the write as its own.
    #: Example: `p-0f3a…/w-91c2…`, the provision and one of its workers.
    claim: str = ""
    scope: str = ""
    tier: Tier = Tier.TRUSTED
    #: The only repository that the instance ever served, in lower case. Empty if it served several or an unknown one.
    repository: str = ""
    uses: int = 0
    #: Version of the actions runner that the pool installed at the launch. Empty if the image contains the runner.
    runner_version: str = ""
    #: Threshold of `running`, kept while `releasing`: a job may run until then. While a runner of a set listens, the
    #: time until which a job may run that starts before anybody has recorded it.
    run_deadline: datetime | None = None
    #: Why the instance does not return to the pool, or why it was terminated. None while it may be reused.
    retire_reason: RetireReason | None = None
    #: Free text about the reason, for people.
    retire_detail: str = ""
    #: End of the quarantine. Until then the instance is neither claimed nor retired.
    quarantined_until: datetime | None = None
    announced_at: datetime | None = None
    assignment: Assignment | None = None
    #: Time after which a terminated record may be deleted.
    forget_at: datetime | None = None

    def check(self) -> None:
        """Raise `ValueError` if a stored record has impossible values."""
        if self.epoch < 1 or self.uses < 0:
            raise ValueError("its epoch is below 1 or its uses are below 0")
        if self.state is State.IDLE:
            self.message()

    @property
    def retire_text(self) -> str:
        """The retire reason for people, or empty."""
        return describe_retirement(self.retire_reason, self.retire_detail) if self.retire_reason else ""

    @property
    def latest_holder(self) -> Holder | None:
        """Who holds it, or held it last."""
        return self.holder or self.last_holder

    @property
    def run_id(self) -> str:
        """The run that it serves: its holder, or that of the job of its runner set. Empty if there is none."""
        return self.holder.run_id if self.holder is not None else ""

    @property
    def runner_set(self) -> str:
        """The runner set that holds it, or held it last; empty if that is a run."""
        return self.latest_holder.name if isinstance(self.latest_holder, SetHolder) else ""

    @property
    def provision_id(self) -> str:
        """The provision of the holder that it has, or had last."""
        return self.latest_holder.provision_id if self.latest_holder is not None else ""

    @property
    def subject(self) -> str:
        """What people call its holder. Empty if nobody holds it."""
        return subject_of(self.holder)

    @property
    def last_subject(self) -> str:
        """What people call the holder that it had last. Empty while somebody holds it, and if nobody ever did."""
        return subject_of(self.last_holder)

    @property
    def is_bound(self) -> bool:
        """False while a runner set holds it and no job is recorded that has started on it."""
        return not isinstance(self.holder, SetHolder) or self.holder.job is not None

    def deadline(self, *, busy: bool) -> datetime:
        """The time at which it expires. A job that no one has recorded yet protects a listening runner."""
        if busy and self.state is State.RUNNING and self.run_deadline is not None and not self.is_bound:
            return max(self.threshold, self.run_deadline)
        return self.threshold

    def is_quarantined(self, now: datetime) -> bool:
        return self.quarantined_until is not None and self.quarantined_until > now

    def message(self) -> PoolMessage:
        return PoolMessage(
            id=self.instance_id,
            epoch=self.epoch,
            resource_class=self.resource_class,
            instance_type=self.instance_type,
            usage_class=self.usage_class,
            cpu=self.cpu,
            memory_mib=self.memory_mib,
            tier=self.tier,
            repository=self.repository,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HistoryEntry:
    """One transition of an instance."""

    at: datetime
    #: Name of the row in the transition table.
    transition: str
    #: None if there was no record before.
    source: State | None
    #: Equal to `source` if the transition kept the state.
    target: State
    epoch: int
    #: Who holds the instance after it, or held it last.
    holder: Holder | None
    by: Actor
    #: Free text for people.
    why: str
    #: Set by transitions to `terminating`.
    retire_reason: RetireReason | None = None

    @property
    def subject(self) -> str:
        """What people call the holder. Empty if the instance never had one."""
        return subject_of(self.holder)

    @property
    def is_end(self) -> bool:
        """Whether this entry decided that the instance is terminated."""
        return self.target is State.TERMINATING and self.source is not self.target


@dataclass(frozen=True, kw_only=True, slots=True)
class Retirement:
    reason: RetireReason
    #: Free text for people.
    detail: str = ""

    def __str__(self) -> str:
        return describe_retirement(self.reason, self.detail)


def describe_retirement(reason: RetireReason, detail: str) -> str:
    label = reason.value.replace("-", " ")
    return f"{label}: {detail}" if detail else label


def decide_retirement(
    instance: Instance,
    *,
    now: datetime,
    max_age_s: float,
    max_uses: int,
    reuse: Reuse = Reuse.SAME_TRUST,
    runner_version: str = "",
    notice: str = "",
) -> Retirement | None:
    """Return why the instance must not return to the pool, or stay in it. None if it may, or is in quarantine.

    A use counts from its beginning: an instance that serves its third use is not used again if `max_uses` is 3.
    `runner_version` is the pool's. An empty version, here or in the record, is unknown and no reason.
    """
    if instance.is_quarantined(now):
        return None
    if instance.retire_reason is not None:
        return Retirement(reason=instance.retire_reason, detail=instance.retire_detail)
    if notice:
        return Retirement(reason=RetireReason.SPOT_NOTICE, detail=notice)
    if reuse is Reuse.NEVER:
        return Retirement(reason=RetireReason.NEVER_REUSED)
    if (now - instance.created_at).total_seconds() >= max_age_s:
        return Retirement(reason=RetireReason.TOO_OLD, detail=f"the maximum age is {max_age_s:g} s")
    # The record counts a use when it ends.
    uses = instance.uses if instance.state is State.IDLE else instance.uses + 1
    if uses >= max_uses:
        return Retirement(reason=RetireReason.USED_UP, detail=f"{uses} of {max_uses} uses")
    if runner_version and instance.runner_version and instance.runner_version != runner_version:
        detail = f"its runner is {instance.runner_version}, the pool's is {runner_version}"
        return Retirement(reason=RetireReason.OUTDATED, detail=detail)
    return None
