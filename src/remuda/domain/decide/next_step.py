"""The next step of one instance: the only place that decides how an instance leaves its holder, and that it ends.

`next_step` is asked by everybody who may find work left to do: the sweeps, a release that waits for its agent, and the
listener. `leave_holder` is asked by those who have decided that a holder does not want an instance any more: a release,
the rollback of a provision, and the sweep of released provisions. Neither does anything: their callers carry a step out
by one conditional write, so two of them may decide the same at once.

Example: a release finds an instance that is `running` for its run. `leave_holder` answers that the agent removes the
registration with a removal token, and the release writes `releasing` with such a token. The agent reports that it has
reset the machine, and `next_step` answers `ReturnToPool`; if the instance is too old by then, it answers `End`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum

from remuda.domain.holder import SetHolder
from remuda.domain.instance import (
    ABSORBING,
    Instance,
    Retirement,
    RetireReason,
    State,
    decide_retirement,
    describe_retirement,
)
from remuda.domain.resources import Reuse, Tier
from remuda.domain.signals import Report, Verdict, registration_verdict, removal_verdict
from remuda.domain.thresholds import Lifetimes, expired
from remuda.domain.transitions import End, Event, Extend, Retire, ReturnToPool

#: Minimum seconds of an extension: three sweeps of five minutes, so that a job survives if only sweeps extend it.
MIN_EXTENSION_S = 900.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPolicy:
    """The rules of a pool for the instances in it. Part of its configuration."""

    lifetimes: Lifetimes
    reuse: Reuse = Reuse.SAME_TRUST
    #: Version of the actions runner that the pool installs; empty if it uses that of the image.
    runner_version: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """One conditional write."""

    event: Event
    #: Reason, for people.
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NewCredential:
    """A new removal token is needed: the present one expires before the agent must have used it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Publish:
    """The message of an idle instance is sent to the pool: it was never sent, or so long ago that it may be lost."""


class RegistrationRemoval(Enum):
    """How the registration of a runner is removed when its instance leaves its holder."""

    #: By its agent, before it stops the runner, with a removal token. GitHub refuses while a job runs.
    BY_AGENT = "by-agent"
    #: There is none: its only job has used it up, or the listener has just removed it.
    USED_UP = "used-up"
    #: It was not recorded, so there is probably none. The listener of a set looks for it; otherwise a sweep finds it.
    NOT_RECORDED = "not-recorded"


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """The instance is released: its agent removes the registration where that is left to it, and resets the machine."""

    removal: RegistrationRemoval


@dataclass(frozen=True, kw_only=True, slots=True)
class Terminate:
    """The new instance is terminated, because it was released before it was ready."""


Step = Write | NewCredential | Publish


def leave_holder(instance: Instance, report: Report | None = None) -> Terminate | Leave | None:
    """Decide how an instance leaves the run or the set that holds it; None if it does not.

    Nobody holds it, or it may have a job of a set. GitHub tells only the set's listener whether its registration has a
    job, so only the listener takes it away before its end (`domain.supply`).

    A new instance is terminated, because its agent may still be starting a runner, and no one has used it. Every other
    one has been in the pool, or is as good as those in it, and returns there after its reset.
    """
    if instance.state is State.CREATED:
        return Terminate()
    if instance.state not in {State.CLAIMED, State.RUNNING}:
        return None
    if not instance.runner_set:
        return Leave(removal=RegistrationRemoval.BY_AGENT)
    if instance.state is State.CLAIMED:
        return Leave(removal=RegistrationRemoval.NOT_RECORDED)
    is_spent = report is not None and report.spent_epoch == instance.epoch
    return Leave(removal=RegistrationRemoval.USED_UP) if is_spent else None


def next_step(instance: Instance, report: Report | None, policy: PoolPolicy, *, now: datetime) -> Step | None:
    """Decide what is due for an instance, whoever holds it; None if there is nothing to do but wait."""
    if instance.state in ABSORBING:
        return None
    if end := end_of_time(instance, report, policy, now=now):
        return end
    noticed = _retire_after_notice(instance, report, now=now)
    match instance.state:
        case State.RELEASING:
            # Its end after the reset has the notice as its reason, too.
            return _after_release(instance, report, policy, now=now) or noticed
        case State.RUNNING:
            return noticed or _after_failure(instance, report)
        case State.IDLE:
            return noticed or _in_pool(instance, policy, now=now)
        case _:
            return noticed


def end_of_time(instance: Instance, report: Report | None, policy: PoolPolicy, *, now: datetime) -> Write | None:
    """The end of an instance whose time in its state is up. It is the only end that may hit a running job."""
    busy, margin_s = is_busy(instance, report), policy.lifetimes.margin_s
    if not expired(instance.deadline(busy=busy), now=now, margin_s=margin_s):
        return None
    detail = "a job was running" if busy else ""
    why = f"its time as {instance.state} is up" + (f"; {detail}" if detail else "")
    return Write(event=End(reason=RetireReason.EXPIRED, detail=detail, margin_s=margin_s), why=why)


def has_failed(instance: Instance, report: Report | None) -> bool:
    """Whether the runner of a running instance has failed for good: no job can start on it."""
    if report is None or instance.state is not State.RUNNING:
        return False
    # The agent of a set that restarted after the failure may have started the runner again.
    is_working = bool(instance.runner_set) and report.busy
    return registration_verdict(report, instance.epoch) is Verdict.FAILED and not is_working


def is_busy(instance: Instance, report: Report | None) -> bool:
    """Whether the agent reports a job for the present use of the instance."""
    return report is not None and report.busy and report.epoch == instance.epoch


def _retire_after_notice(instance: Instance, report: Report | None, *, now: datetime) -> Write | None:
    """EC2 will take the instance back soon: its job may go on, and no other one begins."""
    if report is None or not report.notice or instance.retire_reason is not None or instance.threshold <= now:
        return None
    event = Retire(reason=RetireReason.SPOT_NOTICE, detail=report.notice)
    return Write(event=event, why=describe_retirement(event.reason, event.detail))


def _after_failure(instance: Instance, report: Report | None) -> Write | None:
    if report is None or not has_failed(instance, report):
        return None
    end = End(reason=RetireReason.FAILED, detail=report.detail, report=report)
    return Write(event=end, why=f"its runner failed: {report.detail}")


def _in_pool(instance: Instance, policy: PoolPolicy, *, now: datetime) -> Step | None:
    if retirement := _retirement(instance, policy, now=now):
        return Write(event=End(reason=retirement.reason, detail=retirement.detail), why=str(retirement))
    republish = timedelta(seconds=policy.lifetimes.republish_s)
    is_due = instance.announced_at is None or now - instance.announced_at >= republish
    return Publish() if is_due else None


def _retirement(instance: Instance, policy: PoolPolicy, *, now: datetime, notice: str = "") -> Retirement | None:
    lifetimes = policy.lifetimes
    return decide_retirement(
        instance,
        now=now,
        max_age_s=lifetimes.max_age_s,
        max_uses=lifetimes.max_uses,
        reuse=policy.reuse,
        runner_version=policy.runner_version,
        notice=notice,
    )


def _after_release(instance: Instance, report: Report | None, policy: PoolPolicy, *, now: datetime) -> Step | None:
    """The way of a releasing instance back to the pool, or to its end, by the agent's report."""
    lifetimes, verdict = policy.lifetimes, removal_verdict(report, instance.epoch)
    if report is not None and verdict is Verdict.OK:
        return _after_reset(instance, report, policy, now=now)
    if report is not None and verdict is Verdict.FAILED:
        if instance.is_quarantined(now):
            # The failure is final, and an operator wants to see the machine: its agent needs no token any more.
            return None
        return Write(event=End(reason=RetireReason.FAILED, report=report), why=report.describe_signal())
    if report is not None and report.busy and _is_worth_extending(instance, now=now, lifetimes=lifetimes):
        extend = Extend(report=report, extension_s=_extension_s(lifetimes), margin_s=lifetimes.margin_s)
        return Write(event=extend, why="a job is still running")
    return NewCredential() if _credential_expires_early(instance, now=now, margin_s=lifetimes.margin_s) else None


def _after_reset(instance: Instance, report: Report, policy: PoolPolicy, *, now: datetime) -> Write:
    retirement = _retirement(instance, policy, now=now, notice=report.notice)
    if retirement is None and not instance.is_quarantined(now) and _had_unknown_job(instance, report):
        detail = "it had a job while its registration was removed"
        retirement = Retirement(reason=RetireReason.UNTRUSTED_JOB, detail=detail)
    if retirement is not None:
        detail = f"; {report.detail}" if report.detail else ""
        end = End(reason=retirement.reason, detail=retirement.detail, report=report)
        return Write(event=end, why=f"clean, but {retirement}{detail}")
    duration = f" in {report.duration_s:.3f} s" if report.duration_s is not None else ""
    detail = f": {report.detail}" if report.detail else ""
    pool = ReturnToPool(report=report, idle_time_s=policy.lifetimes.idle_time_s)
    return Write(event=pool, why=f"deregistered and reset{duration}{detail}")


def _had_unknown_job(instance: Instance, report: Report) -> bool:
    """Whether a trusted instance of a runner set was released without a job and had one, whose run no one knows."""
    was_unbound = isinstance(instance.last_holder, SetHolder) and instance.last_holder.job is None
    return was_unbound and instance.tier is Tier.TRUSTED and report.spent_epoch == instance.epoch


def _extension_s(lifetimes: Lifetimes) -> float:
    return max(lifetimes.release_time_s, MIN_EXTENSION_S)


def _is_worth_extending(instance: Instance, *, now: datetime, lifetimes: Lifetimes) -> bool:
    """Whether half of an extension is used up and the run's own deadline is later than the threshold."""
    half = timedelta(seconds=_extension_s(lifetimes) / 2)
    latest = instance.run_deadline or instance.threshold
    return instance.threshold < latest and instance.threshold - now < half


def _credential_expires_early(instance: Instance, *, now: datetime, margin_s: float) -> bool:
    """Whether the removal credential expires before the instance's threshold.

    An instance of a runner set needs none: GitHub removes its registration, or the API does before the release.
    """
    if instance.runner_set:
        return False
    credential = instance.assignment.credential if instance.assignment else None
    if credential is None:
        return instance.assignment is not None
    soon = now + timedelta(seconds=margin_s)
    # A quarantine may last longer than any credential.
    return credential.expires_at <= (soon if instance.quarantined_until is not None else max(soon, instance.threshold))
