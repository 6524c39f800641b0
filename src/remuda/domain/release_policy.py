"""Next action for a `releasing` instance, decided from its report. Used by `release` and `refresh`."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from remuda.domain.instance import Instance, Retirement, RetireReason, decide_retirement, holder_id
from remuda.domain.resources import Reuse, Tier
from remuda.domain.signals import Report, Verdict, removal_verdict
from remuda.domain.thresholds import Lifetimes
from remuda.domain.transitions import End, Event, Extend, ReturnToPool

#: Minimum seconds of an extension: three sweeps of five minutes, so that a job survives if only sweeps extend it.
MIN_EXTENSION_S = 900.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NextAction:
    event: Event
    #: Free text for people.
    why: str


def next_for_releasing(
    instance: Instance,
    report: Report | None,
    *,
    now: datetime,
    lifetimes: Lifetimes,
    reuse: Reuse = Reuse.SAME_TRUST,
    runner_version: str = "",
) -> NextAction | None:
    """Return the next action, or None if there is nothing to do but wait."""
    verdict = removal_verdict(report, instance.epoch)
    if report is not None and verdict is Verdict.OK:
        retirement = decide_retirement(
            instance,
            now=now,
            max_age_s=lifetimes.max_age_s,
            max_uses=lifetimes.max_uses,
            reuse=reuse,
            runner_version=runner_version,
            notice=report.notice,
        )
        if retirement is None and not instance.is_quarantined(now) and _had_unknown_job(instance, report):
            detail = "it had a job while its registration was removed"
            retirement = Retirement(reason=RetireReason.UNTRUSTED_JOB, detail=detail)
        return _after_reset(report, retirement, idle_time_s=lifetimes.idle_time_s)
    if report is not None and verdict is Verdict.FAILED and not instance.is_quarantined(now):
        return NextAction(event=End(reason=RetireReason.FAILED, report=report), why=report.describe_signal())
    if report is not None and report.busy and _is_worth_extending(instance, now=now, lifetimes=lifetimes):
        extend = Extend(report=report, extension_s=_extension_s(lifetimes), margin_s=lifetimes.margin_s)
        return NextAction(event=extend, why="a job is still running")
    return None


def _had_unknown_job(instance: Instance, report: Report) -> bool:
    """Whether a trusted machine of a runner set was released without a job and had one, whose run no one knows."""
    was_unbound = bool(instance.runner_set) and instance.last_run_id == holder_id(instance.runner_set)
    return was_unbound and instance.tier is Tier.TRUSTED and report.spent_epoch == instance.epoch


def _after_reset(report: Report, retirement: Retirement | None, *, idle_time_s: float) -> NextAction:
    if retirement is not None:
        detail = f"; {report.detail}" if report.detail else ""
        end = End(reason=retirement.reason, detail=retirement.detail, report=report)
        return NextAction(event=end, why=f"clean, but {retirement}{detail}")
    duration = f" in {report.duration_s:.3f} s" if report.duration_s is not None else ""
    detail = f": {report.detail}" if report.detail else ""
    pool = ReturnToPool(report=report, idle_time_s=idle_time_s)
    return NextAction(event=pool, why=f"deregistered and reset{duration}{detail}")


def _extension_s(lifetimes: Lifetimes) -> float:
    return max(lifetimes.release_time_s, MIN_EXTENSION_S)


def _is_worth_extending(instance: Instance, *, now: datetime, lifetimes: Lifetimes) -> bool:
    """Whether half of an extension is used up and the run's own deadline is later than the threshold."""
    half = timedelta(seconds=_extension_s(lifetimes) / 2)
    latest = instance.run_deadline or instance.threshold
    return instance.threshold < latest and instance.threshold - now < half


def credential_expires_early(instance: Instance, *, now: datetime, margin_s: float) -> bool:
    """Whether the removal credential expires before the instance's threshold.

    A machine of a runner set needs none: its registration is removed by GitHub, or through the API before the release.
    """
    if instance.runner_set:
        return False
    credential = instance.assignment.credential if instance.assignment else None
    if credential is None:
        return instance.assignment is not None
    soon = now + timedelta(seconds=margin_s)
    # A quarantine may last longer than any credential.
    return credential.expires_at <= (soon if instance.quarantined_until is not None else max(soon, instance.threshold))
