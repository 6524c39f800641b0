"""An instance's record: what the control plane writes and the agent reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from remuda.domain.resources import PoolMessage, Reuse, Tier, UsageClass


class State(StrEnum):
    CREATED = "created"
    CLAIMED = "claimed"
    RUNNING = "running"
    RELEASING = "releasing"
    IDLE = "idle"
    TERMINATING = "terminating"
    TERMINATED = "terminated"


#: An instance in one of these may exist in EC2 and holds money or a job.
LIVE = frozenset(State) - {State.TERMINATED}
#: These belong to a run.
ASSIGNED = frozenset({State.CREATED, State.CLAIMED, State.RUNNING})
ABSORBING = frozenset({State.TERMINATING, State.TERMINATED})


@dataclass(frozen=True, kw_only=True, slots=True)
class Credential:
    """A token for one step. Never printed."""

    token: str = field(repr=False)
    expires_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What the agent needs for the present step."""

    #: Where the runner registers: https://github.com/owner or https://github.com/owner/repo.
    url: str
    runner_name: str
    labels: tuple[str, ...]
    #: The repository of the run, owner/name, where it is known.
    repository: str = ""
    #: Registration or removal token, for this step only.
    credential: Credential | None = None
    #: A just-in-time configuration in place of a registration token: one job only.
    jit_config: str = field(default="", repr=False)
    #: Of a registration made just in time: its number on GitHub, by which alone it can be removed. 0: there is none, or
    #: it is known to be gone.
    runner_id: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """The control record: the control plane writes it, the agent reads it."""

    instance_id: str
    state: State
    #: Number of the assignment: 1 at creation, +1 at each claim, nothing else.
    epoch: int
    #: Until when the instance may stay in its state.
    threshold: datetime
    resource_class: str
    instance_type: str
    usage_class: UsageClass
    cpu: int
    memory_mib: int
    created_at: datetime
    run_id: str = ""
    last_run_id: str = ""
    #: Provision id and worker nonce of who took it.
    owner: str = ""
    provision_id: str = ""
    scope: str = ""
    tier: Tier = Tier.TRUSTED
    #: The only repository that it ever served, in lower case. Empty: it served several, or one that nobody named.
    repository: str = ""
    uses: int = 0
    #: The threshold of `running`, kept while `releasing`: a job may last until then.
    run_deadline: datetime | None = None
    #: Why it will not be pooled again, or empty.
    retire: str = ""
    #: In quarantine: not claimed, and not ended before, whatever `retire` says.
    quarantined_until: datetime | None = None
    announced_at: datetime | None = None
    assignment: Assignment | None = None
    #: When a terminated record may be forgotten.
    forget_at: datetime | None = None

    def check(self) -> None:
        """Of a record that was read: `ValueError` where no step could be taken with it."""
        if self.epoch < 1 or self.uses < 0:
            raise ValueError("its epoch or its uses are below what they begin with")
        if self.state is State.IDLE:
            self.message()

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
    """One line of an instance's story. `source` and `target` are states; equal where the state stayed."""

    at: datetime
    transition: str
    source: str
    target: str
    epoch: int
    run_id: str
    by: str
    why: str
    #: Of an end: one of `transitions.ENDINGS`, so that ends can be counted. Empty where an older version wrote it.
    cause: str = ""


#: Why an instance that serves one run alone is retired from its birth on.
NEVER_REUSED = "reuse is never"
EPHEMERAL = "ephemeral: for one job"
BORN_RETIRED = frozenset({NEVER_REUSED, EPHEMERAL})


def retirement(
    instance: Instance,
    *,
    now: datetime,
    max_age_s: float,
    max_uses: int,
    reuse: Reuse = Reuse.SAME_TRUST,
    notice: str = "",
) -> str:
    """Why an instance should not go back to the pool after this use, or empty: in quarantine it is kept there."""
    if instance.is_quarantined(now):
        return ""
    if instance.retire:
        return instance.retire
    if notice:
        return f"spot notice: {notice}"
    if reuse is Reuse.NEVER:
        return NEVER_REUSED
    if (now - instance.created_at).total_seconds() >= max_age_s:
        return f"too old: {max_age_s:g} s is the most"
    if instance.uses + 1 >= max_uses:
        return f"used {instance.uses + 1} times: {max_uses} is the most"
    return ""
