"""JSON documents of the dashboard's page, without credentials, and the log of their changes.

Each document is encoded once for all clients. There is no queue per client: a slow client asks later and gets the
newest text of each changed item once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from remuda.cli.rendering.results import record_document
from remuda.controlplane.read.feed import KnownInstance
from remuda.controlplane.read.status import Status
from remuda.domain.demand import JobRecord
from remuda.domain.holder import describe_holder
from remuda.domain.instance import ABSORBING, ASSIGNED, HistoryEntry, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision, describe_status
from remuda.domain.reporting.demand import RunnerSetStatus, WaitingJob
from remuda.domain.reporting.explanation import explain_entry
from remuda.domain.reporting.timeline import MachinePhase, spans_of
from remuda.domain.reporting.usage import UsageSummary, duration_stats
from remuda.domain.transitions import Actor

#: Spans refer to phases by their index here.
PHASES = tuple(MachinePhase)
#: Characters of a reason shown in lists; explanations show all of it.
MAX_TEXT = 300
#: Number of warnings shown; the total is given too.
MAX_WARNINGS = 100
#: Number of instance types without a price that are named.
MAX_UNPRICED = 5
#: Newest jobs of runner sets shown.
MAX_JOBS = 50
_DECIDING_TRANSITIONS = ("retire", "quarantine")
_KEEPING_TRANSITION = "renew"
#: Suffix of a decision to keep an instance. It is repeated by each scale-down, so only the last one is shown.
KEPT_SUFFIX = "/kept"
#: Number of removed items to remember. A client whose version is older than that starts again from a snapshot.
MAX_TOMBSTONES = 5_000

Key = tuple[str, str]


def encode(document: Any) -> str:
    return json.dumps(document, separators=(",", ":"))


def milliseconds(at: datetime | None) -> int:
    return 0 if at is None else round(at.timestamp() * 1_000)


def instance_text(seen: KnownInstance, *, now: datetime, busy: bool, agent_dead: bool) -> str:
    instance = seen.instance
    spans, holders, ended_at = _spans(instance, seen.history, now)
    # The record of an ended instance keeps its quarantine, which means nothing any more.
    quarantined = instance.state not in ABSORBING and instance.is_quarantined(now)
    return encode(
        {
            "state": instance.state.value,
            "class": instance.resource_class,
            "type": instance.instance_type,
            "usage": instance.usage_class.value,
            "created_at": milliseconds(instance.created_at),
            "threshold": milliseconds(instance.threshold),
            "set": instance.runner_set if instance.state in ASSIGNED else "",
            "run": instance.run_id,
            "holder": instance.subject,
            "last_holder": instance.last_subject,
            "uses": instance.uses,
            "epoch": instance.epoch,
            "retire_text": instance.retire_text[:MAX_TEXT],
            "quarantined_until": milliseconds(instance.quarantined_until) if quarantined else 0,
            "busy": busy,
            "agent_dead": agent_dead,
            "ended_at": ended_at,
            "spans": spans,
            "holders": holders,
        }
    )


def _spans(
    instance: Instance, history: Sequence[HistoryEntry] | None, now: datetime
) -> tuple[list[int] | None, list[str], int]:
    """Return the instance's spans, its holders, and its end in milliseconds (0 if it is not terminated).

    A span is three numbers: milliseconds after creation, index in `PHASES`, and index in the list of holders (-1:
    none). It ends when the next one begins; the last one lasts until the end, or until now.
    """
    terminated = instance.state is State.TERMINATED
    if history is None:
        return None, [], milliseconds(instance.threshold) if terminated else 0
    # Clocks differ: the last entry may be later than this process's time.
    until = max([now, instance.created_at, *(entry.at for entry in history[-1:])]) + timedelta(milliseconds=1)
    spans = spans_of(instance, history, now=until)
    created_at = milliseconds(instance.created_at)
    holders: dict[str, int] = {}
    numbers: list[int] = []
    for span in spans:
        holder = holders.setdefault(describe_holder(span.holder), len(holders)) if span.holder else -1
        numbers += (milliseconds(span.begin) - created_at, PHASES.index(span.phase), holder)
    return numbers, list(holders), milliseconds(spans[-1].end) if terminated and spans else 0


def provision_text(provision: Provision, config: PoolConfig | None = None) -> str:
    outcome = provision.outcome
    return encode(
        {
            "run": provision.subject,
            "set": provision.runner_set,
            "repository": provision.repository,
            "url": config.run_url(provision.repository, provision.run_id) if config else "",
            "attempt": provision.attempt,
            "class": provision.resource_class,
            "count": provision.count,
            "at": milliseconds(provision.created_at),
            "deadline": milliseconds(provision.deadline),
            "status": provision.shown_status,
            "why": provision.reason[:MAX_TEXT],
            "kind": outcome.kind if outcome else "",
            "seconds": round(outcome.seconds, 3) if outcome else None,
            "reused": outcome.reused if outcome else 0,
            "created": outcome.created if outcome else 0,
        }
    )


def provision_times_text(provisions: Sequence[Provision]) -> str:
    """Count and percentiles of the provision times, by kind."""
    times = duration_stats((item.outcome.kind, item.outcome.seconds) for item in provisions if item.outcome)
    return encode(
        {
            kind: {"count": item.count, "p50": round(item.p50, 3), "p95": round(item.p95, 3)}
            for kind, item in times.items()
        }
    )


def usage_text(found: UsageSummary) -> str:
    """Reuse rate, cost and savings."""
    savings = found.savings
    return encode(
        {
            "since": milliseconds(found.since),
            "runs": found.runs,
            "reused": found.reused,
            "created": found.created,
            "cost": round(found.cost, 4),
            "idle_cost": round(savings.idle_cost, 4),
            "currency": found.currency,
            "prices_as_of": found.prices_as_of,
            "unpriced": list(found.unpriced[:MAX_UNPRICED]),
            "boot_s": None if savings.boot_s is None else round(savings.boot_s, 2),
            "saved_waiting_s": round(savings.waiting_s, 1),
            "saved_boot_cost": round(savings.boot_cost, 4),
            "saved_cost": savings.describe_cost(found.currency),
        }
    )


def decisions(seen: KnownInstance) -> list[tuple[datetime, str, str]]:
    """Return time, name and text of each decision to retire, terminate or quarantine, and of the last one to keep."""
    name = seen.instance.instance_id
    history = seen.history or ()
    found = [
        (entry.at, f"{name}/{milliseconds(entry.at)}/{entry.transition}", _decision(seen.instance, entry))
        for entry in history
        if entry.is_end or entry.transition in _DECIDING_TRANSITIONS
    ]
    kept = [entry for entry in history if entry.transition == _KEEPING_TRANSITION and entry.by is Actor.SCALE_DOWN]
    return [*found, *((entry.at, f"{name}{KEPT_SUFFIX}", _decision(seen.instance, entry)) for entry in kept[-1:])]


def _decision(instance: Instance, entry: HistoryEntry) -> str:
    return encode(
        {
            "at": milliseconds(entry.at),
            "instance": instance.instance_id,
            "class": instance.resource_class,
            "run": entry.subject,
            "what": explain_entry(instance.instance_id, entry).what,
            "why": entry.why[:MAX_TEXT],
            "by": entry.by,
        }
    )


def status_texts(status: Status) -> dict[str, str]:
    """Facts that come with a status: queues, warnings, runner sets, and the instances of open provisions by state."""
    warnings = [record_document(item) for item in status.warnings[:MAX_WARNINGS]]
    runs = {run.provision_id: run for run in status.runs}
    return {
        "pools": encode(
            {name: {"idle": level.idle, "messages": level.messages} for name, level in status.pools.items()}
        ),
        "warnings": encode({"count": len(status.warnings), "shown": warnings}),
        "lost": encode({name: describe_status(runs[name], ids)[:MAX_TEXT] for name, ids in status.lost.items()}),
        "sets": encode([_set_document(item) for item in status.demand.sets]),
        "queued": encode([_queued_document(job, status.config) for job in status.demand.queued]),
        "jobs": encode([_job_document(job, status.config) for job in status.demand.jobs[:MAX_JOBS]]),
        "open_provisions": encode(
            {item.provision.provision_id: dict(item.instances) for item in status.open_provisions}
        ),
    }


def _set_document(item: RunnerSetStatus) -> dict[str, Any]:
    """Times, not ages: an unchanged set must not make a new version."""
    return {
        "name": item.name,
        "labels": list(item.runner_set.labels) if item.runner_set else [],
        "waiting": item.waiting,
        "assigned": item.assigned,
        "running": item.running,
        "hot": item.hot,
        "warm": item.warm,
        "launching": item.launching,
        "max": item.max,
        "at_capacity": item.is_at_capacity,
        "session": item.session.value,
        "owner": item.owner,
        "updated_at": milliseconds(item.updated_at),
        "oldest_queued_at": milliseconds(item.oldest_queued_at),
        "detail": item.detail,
        "summary": item.summary,
        "current": item.is_current,
        "counted_at": milliseconds(item.counted_at),
    }


def _queued_document(job: WaitingJob, config: PoolConfig | None) -> dict[str, Any]:
    return {
        "id": job.job_id,
        "run": job.run_id,
        "set": job.runner_set,
        "name": job.name,
        "repository": job.repository,
        "url": config.run_url(job.repository, job.run_id) if config else "",
        "queued_at": milliseconds(job.queued_at),
        "detail": job.detail,
    }


def _job_document(job: JobRecord, config: PoolConfig | None) -> dict[str, Any]:
    return {
        "id": job.job_id,
        "run": job.run_id,
        "set": job.runner_set,
        "name": job.display_name,
        "repository": job.repository,
        "url": config.run_url(job.repository, job.run_id) if config else "",
        "queued_at": milliseconds(job.queued_at or job.seen_at),
        "started_at": milliseconds(job.started_at),
        "completed_at": milliseconds(job.completed_at),
        "result": job.result,
        "lost": job.is_lost,
        "instance": job.instance_id,
    }


@dataclass(frozen=True, slots=True)
class _Item:
    version: int
    #: JSON text, encoded once for all clients; None if the item was removed.
    text: str | None


class ChangeLog:
    """Versioned items, from which a client gets the changes since the version that it knows."""

    def __init__(self, *, process_id: str) -> None:
        #: Part of every tag: distinguishes the versions of this process from those of another.
        self.process_id = process_id
        self.version = 0
        # In the order of their last change.
        self._items: dict[Key, _Item] = {}
        self._tombstones = 0
        self._oldest_version = 0
        self._dirty = False

    def put(self, kind: str, name: str, text: str) -> None:
        key = (kind, name)
        before = self._items.get(key)
        if before is None or before.text != text:
            self._set(key, text)

    def drop(self, kind: str, name: str) -> None:
        before = self._items.get((kind, name))
        if before is not None and before.text is not None:
            self._set((kind, name), None)

    def commit(self) -> bool:
        """Turn the changes since the last commit into one version. Return whether there were any."""
        if not self._dirty:
            return False
        self._dirty = False
        self.version += 1
        self._prune_tombstones()
        return True

    @property
    def tag(self) -> str:
        return f"{self.process_id}-{self.version}"

    def version_of(self, tag: str) -> int | None:
        """Return the version that a tag names, or None if the client needs a snapshot."""
        process_id, _, number = tag.rpartition("-")
        if process_id != self.process_id or not (number.isascii() and number.isdigit()) or len(number) > 15:
            return None
        version = int(number)
        return version if self._oldest_version <= version <= self.version else None

    def snapshot(self) -> str:
        current = [(key, item.text) for key, item in self._items.items() if item.text is not None]
        return self._document(current)

    def changes(self, since: int) -> str:
        """Return the items changed after version `since`, by kind and name; removed items are null."""
        return self._document(self._newer(since))

    def _newer(self, since: int) -> Iterator[tuple[Key, str | None]]:
        for key in reversed(self._items):
            item = self._items[key]
            if item.version <= since:
                return
            yield key, item.text

    def _document(self, items: Iterable[tuple[Key, str | None]]) -> str:
        kinds: dict[str, list[str]] = {}
        for (kind, name), text in items:
            kinds.setdefault(kind, []).append(f"{json.dumps(name)}:{'null' if text is None else text}")
        parts = [f'"version":{self.version}', f'"tag":{json.dumps(self.tag)}']
        parts += [f"{json.dumps(kind)}:{{{','.join(texts)}}}" for kind, texts in kinds.items()]
        return f"{{{','.join(parts)}}}"

    def _set(self, key: Key, text: str | None) -> None:
        before = self._items.pop(key, None)
        self._tombstones += (text is None) - (before is not None and before.text is None)
        self._items[key] = _Item(self.version + 1, text)
        self._dirty = True

    def _prune_tombstones(self) -> None:
        if self._tombstones <= MAX_TOMBSTONES:
            return
        removed = [key for key, item in self._items.items() if item.text is None]
        oldest = removed[: self._tombstones - MAX_TOMBSTONES // 2]
        for key in oldest:
            self._oldest_version = self._items.pop(key).version
        self._tombstones -= len(oldest)
