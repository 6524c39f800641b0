"""The events that trigger a transition, and the transition table with one row per conditional write.

Each event carries the evidence that its row requires. The state diagram in the docs is generated from the table.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from remuda.domain.holder import Holder
from remuda.domain.instance import RETIREMENTS, Actor, Assignment, Credential, RetireReason, State
from remuda.domain.resources import Reuse, Tier
from remuda.domain.signals import Report


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    holder: Holder
    #: Token of this claim.
    claim: str
    scope: str
    tier: Tier
    threshold: datetime
    assignment: Assignment
    #: The pool's policy.
    reuse: Reuse = Reuse.SAME_TRUST
    #: The run's repository in lower case.
    repository: str = ""
    #: Seconds that must remain until the instance's threshold.
    margin_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    #: Token of the claim or launch that registered.
    claim: str
    report: Report | None
    max_runtime_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Equip:
    """A just-in-time registration exists for the instance's runner name: its listener may start."""

    #: Token of the claim or launch that registered.
    claim: str
    #: Evidence for a created instance: its UD_OK.
    report: Report | None
    #: Just-in-time configuration, a credential, and GitHub's id of the registration.
    jit_config: str = field(repr=False)
    runner_id: int
    #: Whether the set refuses untrusted jobs on instances of the trusted tier, whatever they have served.
    strict: bool = False
    #: Seconds that it may listen without a job, and that a job may run.
    listening_time_s: float
    max_runtime_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Bind:
    """A job has started on a runner of a set.

    The evidence is GitHub's event with this runner's name, or the agent's report of a running or ended job. Without the
    event, the job's run and repository are unknown, and it counts as untrusted.
    """

    #: Name of the runner in GitHub's event; empty without an event.
    runner_name: str = ""
    report: Report | None = None
    run_id: str = ""
    repository: str = ""
    tier: Tier = Tier.UNTRUSTED
    #: Trust in the set's jobs: a trusted set does not reuse a machine that served a job of a lower tier.
    set_tier: Tier
    max_runtime_s: float
    #: Seconds after the threshold in which it is still accepted: no sweep terminates the instance earlier.
    margin_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ListenOn:
    """A listening runner without a job stays wanted."""

    report: Report
    listening_time_s: float
    max_runtime_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Fill:
    """A machine that was launched for the pool has booted."""

    #: Token of the launch.
    claim: str
    report: Report | None
    idle_time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    release_time_s: float
    #: Removal token. None for a just-in-time registration, which no token can remove.
    credential: Credential | None
    #: Set by a rollback, which may release only what it has claimed or launched itself.
    claim: str | None = None
    #: Whether GitHub confirmed the removal of a just-in-time registration.
    deregistered: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Extend:
    report: Report
    #: Seconds from now, limited by the run's deadline.
    extension_s: float
    #: Seconds after the threshold in which an extension is still accepted: no sweep terminates the instance earlier.
    margin_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RenewCredential:
    credential: Credential


@dataclass(frozen=True, kw_only=True, slots=True)
class ReturnToPool:
    report: Report | None
    idle_time_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Announce:
    """A pool message was sent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Renew:
    #: Absolute time, so that a delayed write does not prolong the decision.
    until: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class Retire:
    reason: RetireReason
    #: Free text for people.
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantine:
    until: datetime
    #: Free text for people.
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    reason: RetireReason
    #: Free text for people.
    detail: str = ""
    #: Seconds after the threshold, for EXPIRED.
    margin_s: float = 0.0
    #: Evidence for FAILED, and for retirements from `releasing`.
    report: Report | None = None
    #: Token of the claim or launch that must be the instance's; None for any.
    claim: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Confirm:
    keep_records_s: float


Event = (
    Claim
    | Commit
    | Equip
    | Bind
    | ListenOn
    | Fill
    | Release
    | Extend
    | RenewCredential
    | ReturnToPool
    | Announce
    | Renew
    | Retire
    | Quarantine
    | End
    | Confirm
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """One row of the table."""

    name: str
    #: None stands for "no record".
    sources: frozenset[State | None]
    #: None if the transition keeps the state.
    target: State | None
    by: tuple[Actor, ...]
    #: Condition and effect for the documentation only. The code that checks and applies them is in `apply`.
    when: str
    effect: str
    #: Reasons that a row to `terminating` accepts.
    reasons: frozenset[RetireReason] = frozenset()


def _row(  # noqa: PLR0917 - table rows read best by position
    name: str,
    sources: tuple[State | None, ...],
    target: State | None,
    by: tuple[Actor, ...],
    when: str,
    effect: str,
    reasons: tuple[RetireReason, ...] = (),
) -> Transition:
    return Transition(
        name=name,
        sources=frozenset(sources),
        target=target,
        by=by,
        when=when,
        effect=effect,
        reasons=frozenset(reasons),
    )


_END_EFFECT = "holder and assignment cleared; threshold = now"
#: Reasons that every state before `terminating` accepts.
_ALWAYS = (RetireReason.EXPIRED, RetireReason.GONE, RetireReason.TERMINATED_BY_OPERATOR)
_BEFORE_TERMINATING = (State.CREATED, State.CLAIMED, State.RUNNING, State.RELEASING, State.IDLE)

TRANSITIONS: tuple[Transition, ...] = (
    _row(
        "create",
        (None,),
        State.CREATED,
        (Actor.PROVISION, Actor.LISTENER),
        "no record",
        "epoch 1; threshold = provision deadline; "
        "marked not reusable at creation if the reuse policy is never or the runner is ephemeral",
    ),
    _row(
        "tombstone",
        (None,),
        State.TERMINATING,
        (Actor.PROVISION, Actor.REFRESH, Actor.LISTENER),
        "EC2 instance with the pool's tags and no record after a grace period, or the provision was rolled back",
        "exists only to terminate the instance; never claimable",
        (RetireReason.UNRECORDED,),
    ),
    _row(
        "claim",
        (State.IDLE,),
        State.CLAIMED,
        (Actor.PROVISION, Actor.LISTENER),
        "epoch equals the pool message's; tier and repository fit the pool's reuse policy; not retired",
        "epoch + 1; holder, claim, assignment; tier may fall, never rise; threshold = provision deadline",
    ),
    _row(
        "commit",
        (State.CREATED, State.CLAIMED),
        State.RUNNING,
        (Actor.PROVISION,),
        "UD_REG_OK of this epoch, with its claim",
        "threshold = now + max runtime; registration credential removed",
    ),
    _row(
        "equip",
        (State.CREATED, State.CLAIMED),
        State.RUNNING,
        (Actor.LISTENER,),
        "just-in-time registration for this epoch's runner name, with its claim; if created, UD_OK of this epoch",
        "just-in-time configuration and runner id in the assignment; threshold = now + listening time",
    ),
    _row(
        "bind",
        (State.RUNNING,),
        None,
        (Actor.LISTENER, Actor.REFRESH),
        "a runner of a set, not bound: GitHub's job-started event with its name, or the agent reports a job",
        "job of the holder, repository, tier; configuration removed; threshold = now + max runtime; "
        "retired if the tier is below the set's",
    ),
    _row(
        "listen-on",
        (State.RUNNING,),
        None,
        (Actor.LISTENER,),
        "a runner of a set, not bound, wanted, listening and not busy",
        "threshold = now + listening time",
    ),
    _row(
        "fill",
        (State.CREATED,),
        State.IDLE,
        (Actor.LISTENER,),
        "UD_OK of this epoch, with its claim, not retired",
        "holder and assignment cleared; threshold = now + idle time",
    ),
    _row(
        "release",
        (State.CLAIMED, State.RUNNING),
        State.RELEASING,
        (Actor.PROVISION, Actor.RELEASE, Actor.REFRESH, Actor.LISTENER),
        "provision released or failed; a runner of a set has run its job, or GitHub removed its unused registration",
        "holder cleared; threshold = now + release time; removal credential added",
    ),
    _row(
        "extend",
        (State.RELEASING,),
        None,
        (Actor.RELEASE, Actor.REFRESH, Actor.LISTENER),
        "the agent reports a running job",
        "threshold = now + an extension, at most the run's deadline",
    ),
    _row(
        "credential",
        (State.RELEASING,),
        None,
        (Actor.RELEASE, Actor.REFRESH, Actor.LISTENER),
        "the credential expires before the threshold",
        "credential only",
    ),
    _row(
        "pool",
        (State.RELEASING,),
        State.IDLE,
        (Actor.RELEASE, Actor.REFRESH, Actor.LISTENER),
        "UD_REMOVE_REG_REMOVE_RUN_OK of this epoch, not retired",
        "credential removed; uses + 1; threshold = now + idle time",
    ),
    _row(
        "announce",
        (State.IDLE,),
        None,
        (Actor.RELEASE, Actor.REFRESH, Actor.LISTENER),
        "never announced, or long ago",
        "announced at = now",
    ),
    # Scale-down renews the idle instances that it keeps; the others expire.
    _row(
        "renew",
        (State.IDLE,),
        None,
        (Actor.SCALE_DOWN, Actor.LISTENER),
        "within the idle quota and the maximum age",
        "threshold only",
    ),
    _row(
        "retire",
        _BEFORE_TERMINATING,
        None,
        (Actor.RELEASE, Actor.REFRESH, Actor.OPERATOR, Actor.LISTENER),
        "spot notice, or drained",
        "not pooled again",
    ),
    _row(
        "quarantine",
        _BEFORE_TERMINATING,
        None,
        (Actor.OPERATOR,),
        "ordered by an operator",
        "not claimable; if idle, threshold = end of the quarantine; if releasing, not before it",
    ),
    _row(
        "end-created",
        (State.CREATED,),
        State.TERMINATING,
        (Actor.PROVISION, Actor.RELEASE, Actor.REFRESH, Actor.OPERATOR, Actor.LISTENER),
        "failed, timed out, released, expired, gone from EC2, ordered by an operator",
        _END_EFFECT,
        (RetireReason.FAILED, RetireReason.TIMED_OUT, RetireReason.RELEASED, *_ALWAYS),
    ),
    _row(
        "end-claimed",
        (State.CLAIMED,),
        State.TERMINATING,
        (Actor.PROVISION, Actor.REFRESH, Actor.OPERATOR, Actor.LISTENER),
        "failed signal, timeout of its claim, expired, gone, ordered by an operator",
        _END_EFFECT,
        (RetireReason.FAILED, RetireReason.TIMED_OUT, *_ALWAYS),
    ),
    _row(
        "end-running",
        (State.RUNNING,),
        State.TERMINATING,
        (Actor.REFRESH, Actor.OPERATOR, Actor.LISTENER),
        "expired, UD_REG_FAILED of this epoch, gone, ordered by an operator",
        _END_EFFECT,
        (RetireReason.FAILED, *_ALWAYS),
    ),
    _row(
        "end-releasing",
        (State.RELEASING,),
        State.TERMINATING,
        (Actor.RELEASE, Actor.REFRESH, Actor.OPERATOR, Actor.LISTENER),
        "UD_REMOVE_*_FAILED of this epoch; UD_REMOVE_REG_REMOVE_RUN_OK of this epoch and retired; "
        "expired; gone; ordered by an operator",
        _END_EFFECT,
        (RetireReason.FAILED, *_ALWAYS, *RETIREMENTS),
    ),
    _row(
        "end-idle",
        (State.IDLE,),
        State.TERMINATING,
        (Actor.REFRESH, Actor.OPERATOR),
        "expired, too old, too many uses, spot notice, reuse policy is never, outdated runner, gone, "
        "ordered by an operator",
        _END_EFFECT,
        (*_ALWAYS, *RETIREMENTS),
    ),
    _row(
        "confirm",
        (State.TERMINATING,),
        State.TERMINATED,
        (Actor.REFRESH,),
        "EC2 reports it terminated",
        "kept for reports, then deleted",
    ),
)

ROWS_BY_NAME = {row.name: row for row in TRANSITIONS}
#: The row to `terminating` per source state.
END_ROWS = {
    source: row
    for row in TRANSITIONS
    if row.target is State.TERMINATING
    for source in row.sources
    if source is not None
}
