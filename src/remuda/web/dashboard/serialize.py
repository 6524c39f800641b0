"""Records as the page reads them: short documents, encoded once for all clients. Nothing that opens a door."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from remuda.cli.rendering.results import record_document
from remuda.controlplane.read.feed import Seen
from remuda.controlplane.read.status import Status
from remuda.domain.instance import HistoryEntry, Instance, State
from remuda.domain.provision import Provision
from remuda.domain.reporting.explanation import entry_line
from remuda.domain.reporting.timeline import Phase, spans_of
from remuda.domain.reporting.usage import Worth, is_end, times_of
from remuda.domain.transitions import Actor

#: A lane names phases by their place here.
PHASES = tuple(Phase)
#: Of a long reason, so much is shown in lists; stories have all of it.
MAX_TEXT = 300
#: A page with more would be read by nobody; how many there are is told.
MAX_WARNINGS = 100
#: Types without a price that are named.
MAX_UNPRICED = 5
_ACTS = ("retire", "quarantine")
_KEPT = "renew"
#: How the name of a decision ends that a machine stays: it is made again and again, and shown once.
KEPT = "/kept"


def encode(document: Any) -> str:
    return json.dumps(document, separators=(",", ":"))


def milliseconds(at: datetime | None) -> int:
    return 0 if at is None else round(at.timestamp() * 1_000)


def instance_text(seen: Seen, *, now: datetime, busy: bool) -> str:
    instance = seen.instance
    lane, runs, end = _lane(instance, seen.history, now)
    return encode(
        {
            "state": instance.state.value,
            "class": instance.resource_class,
            "type": instance.instance_type,
            "usage": instance.usage_class.value,
            "born": milliseconds(instance.created_at),
            "until": milliseconds(instance.threshold),
            "run": instance.run_id,
            "last": instance.last_run_id,
            "uses": instance.uses,
            "epoch": instance.epoch,
            "retire": instance.retire[:MAX_TEXT],
            "held": milliseconds(instance.quarantined_until) if instance.is_held(now) else 0,
            "busy": busy,
            "end": end,
            "lane": lane,
            "runs": runs,
        }
    )


def _lane(
    instance: Instance, history: Sequence[HistoryEntry] | None, now: datetime
) -> tuple[list[int] | None, list[str], int]:
    """Spans as three numbers each: milliseconds after the birth, the phase, and whose of `runs` it was (-1: nobody's).

    The last one lasts until the end, or still.
    """
    over = instance.state is State.TERMINATED
    if history is None:
        return None, [], milliseconds(instance.threshold) if over else 0
    # Clocks differ: what was written last has begun, whatever time this one has.
    until = max([now, instance.created_at, *(entry.at for entry in history[-1:])]) + timedelta(milliseconds=1)
    spans = spans_of(instance, history, now=until)
    born = milliseconds(instance.created_at)
    runs: dict[str, int] = {}
    lane: list[int] = []
    for span in spans:
        run = runs.setdefault(span.run_id, len(runs)) if span.run_id else -1
        lane += (milliseconds(span.begin) - born, PHASES.index(span.phase), run)
    return lane, list(runs), milliseconds(spans[-1].end) if over and spans else 0


def provision_text(provision: Provision) -> str:
    course = provision.course
    return encode(
        {
            "run": provision.run_id,
            "attempt": provision.attempt,
            "class": provision.resource_class,
            "count": provision.count,
            "at": milliseconds(provision.created_at),
            "deadline": milliseconds(provision.deadline),
            "status": provision.status.value,
            "why": (course.error if course and course.error else provision.why)[:MAX_TEXT],
            "kind": course.kind if course else "",
            "seconds": round(course.seconds, 3) if course else None,
            "reused": course.reused if course else 0,
            "created": course.created if course else 0,
        }
    )


def times_text(provisions: Sequence[Provision]) -> str:
    """Of the provisions in sight, by kind."""
    times = times_of((item.course.kind, item.course.seconds) for item in provisions if item.course)
    return encode(
        {
            kind: {"count": item.count, "p50": round(item.p50, 3), "p95": round(item.p95, 3)}
            for kind, item in times.items()
        }
    )


def worth_text(found: Worth) -> str:
    """Whether reuse pays off."""
    savings = found.savings
    return encode(
        {
            "since": milliseconds(found.since),
            "runs": found.runs,
            "reused": found.reused,
            "created": found.created,
            "cost": round(found.cost, 4),
            "idle": round(savings.idle_cost, 4),
            "currency": found.currency,
            "priced": found.priced,
            "unpriced": list(found.unpriced[:MAX_UNPRICED]),
            "boot_s": None if savings.boot_s is None else round(savings.boot_s, 2),
            "waiting_s": round(savings.waiting_s, 1),
            "boots": round(savings.boot_cost, 4),
            "net": round(savings.net, 4),
        }
    )


def decisions(seen: Seen) -> list[tuple[datetime, str, str]]:
    """Why an instance was retired, ended or held, and why scale-down kept it last: time, name and text of each."""
    name = seen.instance.instance_id
    history = seen.history or ()
    found = [
        (entry.at, f"{name}/{milliseconds(entry.at)}/{entry.transition}", _decision(seen.instance, entry))
        for entry in history
        if is_end(entry) or entry.transition in _ACTS
    ]
    kept = [entry for entry in history if entry.transition == _KEPT and entry.by == Actor.SCALE_DOWN]
    return [*found, *((entry.at, f"{name}{KEPT}", _decision(seen.instance, entry)) for entry in kept[-1:])]


def _decision(instance: Instance, entry: HistoryEntry) -> str:
    return encode(
        {
            "at": milliseconds(entry.at),
            "instance": instance.instance_id,
            "class": instance.resource_class,
            "run": entry.run_id,
            "what": entry_line(instance.instance_id, entry).what,
            "why": entry.why[:MAX_TEXT],
            "by": entry.by,
        }
    )


def status_texts(status: Status) -> dict[str, str]:
    """What a thorough look adds, by name: pools, warnings, and what open launches hold so far."""
    warnings = [record_document(item) for item in status.concerns[:MAX_WARNINGS]]
    return {
        "pools": encode({name: {"idle": level.idle, "hints": level.hints} for name, level in status.pools.items()}),
        "warnings": encode({"count": len(status.concerns), "shown": warnings}),
        "open": encode({item.provision.provision_id: dict(item.held) for item in status.openings}),
    }
