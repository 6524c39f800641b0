"""What happens next to a `releasing` instance, seen its report. `release` and `refresh` decide alike."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from remuda.domain.instance import Instance, retirement
from remuda.domain.resources import Reuse
from remuda.domain.signals import Report, Verdict, removal_verdict, took_s, without_took
from remuda.domain.thresholds import Lifetimes
from remuda.domain.transitions import Cause, End, Event, Extend, ReturnToPool

#: Three sweeps of five minutes.
MIN_EXTENSION_S = 900.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NextAction:
    event: Event
    why: str


def next_for_releasing(
    instance: Instance,
    report: Report | None,
    *,
    now: datetime,
    lifetimes: Lifetimes,
    reuse: Reuse = Reuse.SAME_TRUST,
) -> NextAction | None:
    """The next event, or None while there is nothing to do but wait."""
    verdict = removal_verdict(report, instance.epoch)
    if report is not None and verdict is Verdict.OK:
        reason = retirement(
            instance,
            now=now,
            max_age_s=lifetimes.max_age_s,
            max_uses=lifetimes.max_uses,
            reuse=reuse,
            notice=report.notice,
        )
        found = without_took(report.detail)
        if reason:
            why = f"clean, but {reason}" + (f"; {found}" if found else "")
            return NextAction(event=End(cause=Cause.RETIRED, report=report, reason=reason), why=why)
        took = took_s(report.detail)
        why = "deregistered and reset" + (f" in {took:.3f} s" if took is not None else "")
        why += f": {found}" if found else ""
        return NextAction(event=ReturnToPool(report=report, idle_time_s=lifetimes.idle_time_s), why=why)
    if report is not None and verdict is Verdict.FAILED and not instance.is_quarantined(now):
        return NextAction(event=End(cause=Cause.FAILED, report=report), why=f"{report.signal}: {report.detail}")
    if report is not None and report.busy and _worth_extending(instance, now=now, lifetimes=lifetimes):
        extend = Extend(report=report, extension_s=_extension_s(lifetimes), margin_s=lifetimes.margin_s)
        return NextAction(event=extend, why="a job still runs")
    return None


def _extension_s(lifetimes: Lifetimes) -> float:
    """Long enough that a job lives on although nobody but the sweeps looks after its release."""
    return max(lifetimes.release_time_s, MIN_EXTENSION_S)


def _worth_extending(instance: Instance, *, now: datetime, lifetimes: Lifetimes) -> bool:
    """Only once half of an extension is used up, and only as far as the run's own deadline."""
    half = timedelta(seconds=_extension_s(lifetimes) / 2)
    latest = instance.run_deadline or instance.threshold
    return instance.threshold < latest and instance.threshold - now < half


def credential_is_short(instance: Instance, *, now: datetime, margin_s: float) -> bool:
    """Whether the removal credential runs out before the instance's time does."""
    credential = instance.assignment.credential if instance.assignment else None
    if credential is None:
        return instance.assignment is not None
    soon = now + timedelta(seconds=margin_s)
    # A quarantine may last longer than any credential does.
    return credential.expires_at <= (soon if instance.quarantined_until is not None else max(soon, instance.threshold))
