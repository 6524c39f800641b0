"""Timeline of instances: the time from launch to termination, divided into phases, from record and history."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum

from remuda.domain.holder import Holder
from remuda.domain.instance import HistoryEntry, Instance, State
from remuda.domain.resources import UsageClass


class MachinePhase(StrEnum):
    """Phase of a machine in reports. EC2 bills all of them."""

    BOOTING = "booting"
    CLAIMED = "claimed"
    RUNNING = "running"
    RELEASING = "releasing"
    IDLE = "idle"
    ENDING = "ending"
    #: The history is not kept any more.
    UNKNOWN = "unknown"


_PHASES = {
    State.CREATED: MachinePhase.BOOTING,
    State.CLAIMED: MachinePhase.CLAIMED,
    State.RUNNING: MachinePhase.RUNNING,
    State.RELEASING: MachinePhase.RELEASING,
    State.IDLE: MachinePhase.IDLE,
    State.TERMINATING: MachinePhase.ENDING,
}
#: Row of the transition table that tells a running machine of a set the run of its job.
_BIND = "bind"
#: Phases in which the instance serves its holder.
_ASSIGNED = frozenset({MachinePhase.BOOTING, MachinePhase.CLAIMED, MachinePhase.RUNNING, MachinePhase.RELEASING})


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Time that an instance spent in one phase."""

    instance_id: str
    instance_type: str
    resource_class: str
    usage_class: UsageClass
    phase: MachinePhase
    begin: datetime
    end: datetime
    #: Who held the instance; None while nobody did.
    holder: Holder | None = None

    @property
    def seconds(self) -> float:
        return (self.end - self.begin).total_seconds()


def lifetime(instance: Instance, history: Sequence[HistoryEntry], *, now: datetime) -> tuple[datetime, datetime]:
    """Return the time of the launch and that of the confirmed termination, or now."""
    begin = min(instance.created_at, now)
    if instance.state is not State.TERMINATED:
        return begin, now
    confirmed = [entry.at for entry in history if entry.target is State.TERMINATED]
    return begin, min(max(begin, confirmed[-1] if confirmed else instance.threshold), now)


def spans_of(instance: Instance, history: Sequence[HistoryEntry], *, now: datetime) -> list[Span]:
    """Divide the lifetime into adjacent spans. They cover it completely, even if the history is incomplete."""
    begin, end = lifetime(instance, history, now=now)
    found: list[Span] = []
    holder: Holder | None
    phase, holder, at = MachinePhase.UNKNOWN, None, begin
    for entry in [item for item in history if item.source is not item.target or item.transition == _BIND]:
        # Clocks differ: a later entry may have an earlier time.
        until = min(max(entry.at, at), end)
        found.append(_span(instance, phase, at, until, holder))
        phase, at = _PHASES.get(entry.target, MachinePhase.UNKNOWN), until
        holder = entry.holder if phase in _ASSIGNED else None
    found.append(_span(instance, phase, at, end, holder))
    return [span for span in found if span.end > span.begin]


def _span(instance: Instance, phase: MachinePhase, begin: datetime, end: datetime, holder: Holder | None) -> Span:
    return Span(
        instance_id=instance.instance_id,
        instance_type=instance.instance_type,
        resource_class=instance.resource_class,
        usage_class=instance.usage_class,
        phase=phase,
        begin=begin,
        end=end,
        holder=holder,
    )


def clip(spans: Iterable[Span], *, since: datetime, until: datetime) -> Iterator[Span]:
    """Yield the parts of the spans that lie between two times."""
    for span in spans:
        if since <= span.begin and span.end <= until:
            yield span
            continue
        begin, end = max(span.begin, since), min(span.end, until)
        if begin < end:
            yield replace(span, begin=begin, end=end)


def mean_counts(
    spans: Sequence[Span], *, since: datetime, until: datetime, steps: int
) -> list[dict[MachinePhase, float]]:
    """Return the mean number of machines per phase in each of `steps` equal intervals."""
    width = (until - since) / steps
    found: list[dict[MachinePhase, float]] = [{} for _ in range(steps)]
    if width <= timedelta(0):
        return found
    for span in clip(spans, since=since, until=until):
        first = min(int((span.begin - since) / width), steps - 1)
        last = min(int((span.end - since) / width), steps - 1)
        for step in range(first, last + 1):
            begin, end = since + step * width, since + (step + 1) * width
            overlap = (min(span.end, end) - max(span.begin, begin)) / width
            if overlap > 0:
                found[step][span.phase] = found[step].get(span.phase, 0.0) + overlap
    return found
