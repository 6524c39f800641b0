"""Pool status and explanations as JSON documents and terminal output; changes of the status as log lines."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from remuda.cli.output import format_duration
from remuda.cli.rendering.results import instance_document, record_document
from remuda.cli.rendering.table import SHORTEN, FittedTable, fit_height, shorten_ids, spaced
from remuda.controlplane.read.status import RECENT_PROVISIONS, OpenProvision, PoolLevel, Status
from remuda.domain.demand import JobRecord
from remuda.domain.holder import describe_holder
from remuda.domain.instance import ABSORBING, Instance, State
from remuda.domain.provision import Provision, ProvisionStatus, describe_status
from remuda.domain.reporting.demand import DemandStatus, ListenerStatus, RunnerSetStatus, waited_s
from remuda.domain.reporting.explanation import ExplainedEvent, Explanation, Severity
from remuda.domain.reporting.warnings import PoolWarning, WarningKind
from remuda.domain.runner_release import RunnerRelease
from remuda.domain.serialization import to_jsonable
from remuda.domain.text import sanitize

if TYPE_CHECKING:
    from rich.padding import Padding
    from rich.text import Text

#: Maximum number of runs shown.
MAX_RUNS = 10

_NUMERIC = frozenset(
    {"time left", "heartbeat", "uses", "idle", "messages", "runners", "attempt", "oldest wait", "last message"}
    | {"waiting", "assigned", "running", "hot", "warm", "launching", "machines"}
)
#: Columns of runner sets that are dropped first.
_SET_REDUCTIONS = ("last message", "session", "oldest wait")
_NO_WRAP = frozenset({"instance", "state", "run", "time left", "status", "class", "tier", "warning", "uses", "usage"})
#: Styles of states and statuses.
_STATUS_STYLES = {
    "running": "green",
    "committed": "green",
    "open": "cyan",
    "terminating": "magenta",
    "failed": "yellow",
    "expired": "yellow",
    "unreleased": "yellow",
    "interrupted": "yellow",
}
_STYLES = {Severity.NORMAL: "", Severity.GOOD: "green", Severity.BAD: "yellow", Severity.MINOR: "dim"}


def status_document(status: Status) -> dict[str, Any]:
    return {
        "at": to_jsonable(status.at),
        "pool": status.pool,
        "reuse": status.config.reuse.value if status.config else None,
        "runner": _runner_document(status.config.runner) if status.config and status.config.runner else None,
        "instances": [_instance(status, instance) for instance in status.instances],
        "pools": {name: {"idle": level.idle, "messages": level.messages} for name, level in status.pools.items()},
        "runs": [
            {
                **_run_document(run),
                "status": run.shown_status,
                "lost_ids": list(status.lost.get(run.provision_id, ())),
            }
            for run in status.runs
        ],
        "runner_sets": [_set_document(item) for item in status.demand.sets],
        "listener": _listener_document(status.demand.listener) if status.demand.listener else None,
        "jobs": [{**record_document(job), "waited_seconds": _waited(job, status.at)} for job in status.demand.jobs],
        "queued_jobs": [record_document(job) for job in status.demand.queued],
        "queues_read_at": {name: to_jsonable(at) for name, at in status.demand.queues_read_at.items()},
        "waiting_too_long": [record_document(job) for job in status.demand.overdue],
        "open_provisions": [_open_provision_document(item) for item in status.open_provisions],
        "warnings": [record_document(warning) for warning in status.warnings],
        "unreadable": list(status.unreadable),
    }


def _runner_document(release: RunnerRelease) -> dict[str, Any]:
    return {
        "version": release.version,
        "latest": release.latest,
        "checked_at": to_jsonable(release.checked_at),
        "deadline": to_jsonable(release.deadline),
    }


def _set_document(item: RunnerSetStatus) -> dict[str, Any]:
    return {
        "name": item.name,
        "configured": item.runner_set is not None,
        "labels": list(item.runner_set.labels) if item.runner_set else [],
        "scope": item.runner_set.scope if item.runner_set else None,
        "resource_class": item.runner_set.resource_class if item.runner_set else None,
        "waiting": item.waiting,
        "assigned": item.assigned,
        "running": item.running,
        "hot": item.hot,
        "warm": item.warm,
        "launching": item.launching,
        "max": item.max,
        "at_capacity": item.is_at_capacity,
        "session": item.session.value,
        "owner": item.owner or None,
        "failing_since": to_jsonable(item.failing_since),
        "last_message_age_seconds": _rounded(item.message_age_s),
        "oldest_wait_seconds": _rounded(item.oldest_wait_s),
        "counts_current": item.is_current,
        "counts_at": to_jsonable(item.known_at),
        "reason": item.reason.value if item.reason else None,
        "detail": item.detail,
        "summary": item.summary,
    }


def _listener_document(listener: ListenerStatus) -> dict[str, Any]:
    return {
        "owner": listener.owner or None,
        "beat": listener.beat,
        "alive": listener.is_alive,
        "silent_since": to_jsonable(listener.silent_since),
    }


def _waited(job: JobRecord, now: datetime) -> float:
    return round(waited_s(job, now), 3)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _instance(status: Status, instance: Instance) -> dict[str, Any]:
    report = status.reports.get(instance.instance_id)
    left_s = (instance.threshold - status.at).total_seconds()
    beat_at = report.beat_at if report else None
    return {
        **instance_document(instance),
        "report": record_document(report) if report else None,
        "agent_dead": bool(status.agent_death(instance)),
        "seconds_left": None if instance.state in ABSORBING else round(left_s, 3),
        "heartbeat_age_seconds": round((status.at - beat_at).total_seconds(), 3) if beat_at else None,
    }


def _run_document(run: Provision) -> dict[str, Any]:
    """The record, with its holder as fields of their own."""
    document = record_document(run)
    del document["holder"]
    return {**_holder_fields(run), **document}


def _holder_fields(run: Provision) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "attempt": run.attempt,
        "runner_set": run.runner_set,
        "provision_id": run.provision_id,
    }


def _open_provision_document(item: OpenProvision) -> dict[str, Any]:
    run = item.provision
    return {
        **_holder_fields(run),
        "resource_class": run.resource_class,
        "count": run.count,
        "instances": dict(item.instances),
        "created_at": to_jsonable(run.created_at),
        "deadline": to_jsonable(run.deadline),
    }


# Tables -----------------------------------------------------------------------------------------------------------


def status_tables(status: Status, *, limit: int | None = None) -> list[Any]:
    """Build the tables. `limit` is the maximum number of instances shown; the other tables get a part of that."""
    return list(spaced(_tables(status, limit)))


def status_screen(status: Status, *, width: int, height: int) -> list[Any]:
    """Build the tables with as many rows as fit a terminal of this size."""
    return fit_height(lambda limit: status_tables(status, limit=limit), width=width, height=height)


def _tables(status: Status, limit: int | None) -> Iterator[Any]:
    if status.warnings:
        shown = status.warnings if limit is None else status.warnings[: max(limit // 2, 2)]
        found = [(item.kind, item.subject, item.text) for item in shown]
        yield FittedTable(
            "",
            ("warning", "subject", "meaning"),
            found,
            no_wrap=_NO_WRAP,
            ids=frozenset({"subject"}),
            reductions=[SHORTEN],
            cuts=limit is not None,
        )
        yield from _more(len(status.warnings) - len(shown))
        yield ""
    if status.config:
        version = f", runner {status.config.runner_version}" if status.config.runner else ""
        yield f"pool {status.pool}, reuse {status.config.reuse}{version}{_live(status)}"
    if status.demand.sets:
        yield from _sets(status.demand, limit)
    if not status.instances and not status.runs:
        yield "no instances, no runs"
        return
    yield from _instances(status, limit)
    levels = [_level(name, level) for name, level in status.pools.items() if level.idle or level.messages]
    if levels:
        yield sanitize(f"idle by class: {', '.join(levels)}")
    runs = MAX_RUNS if limit is None else min(max(limit // 3, 1), MAX_RUNS)
    yield from _runs(status, runs, cuts=limit is not None)


def _indented(text: str, *, cuts: bool) -> Padding:
    from rich.padding import Padding  # noqa: PLC0415 - slow to import
    from rich.text import Text  # noqa: PLC0415

    shown = Text(sanitize(text), no_wrap=cuts, overflow="ellipsis" if cuts else "fold")
    # Without spaces up to the end of a line, which `--wide` makes very long.
    return Padding(shown, (0, 0, 0, 2), expand=False)


def _more(count: int, of_what: str = "") -> Iterator[str]:
    if count:
        yield f"  and {count} more{of_what}"


def _live(status: Status) -> str:
    counts = status.by_state()
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    return f": {sum(counts.values())} live ({states})" if counts else ""


def _level(name: str, level: PoolLevel) -> str:
    """The idle instances of a class. The number of messages in its queue is shown only if it differs."""
    return f"{name} {level.idle}" + (f" ({level.messages} messages)" if level.messages != level.idle else "")


def _sets(demand: DemandStatus, limit: int | None) -> Iterator[Any]:
    shown = demand.sets if limit is None else demand.sets[: max(limit // 2, 2)]
    columns = ("set", "waiting", "assigned", "running", "hot", "warm", "launching", "machines", *_SET_REDUCTIONS[::-1])
    rows = [[values[name] for name in columns] for values in map(_set_values, shown)]
    reductions = (*_SET_REDUCTIONS, "running", "warm")
    yield FittedTable("", columns, rows, numeric=_NUMERIC, no_wrap=frozenset(columns), reductions=reductions)
    for item in shown:
        if item.reason is not None or not item.is_current:
            oldest = f"; the oldest waits for {format_duration(item.oldest_wait_s)}" if item.oldest_wait_s else ""
            yield _indented(f"{item.name}: {item.summary}{oldest}", cuts=limit is not None)
    yield from _more(len(demand.sets) - len(shown))
    unserved = [job for job in demand.queued if not job.runner_set]
    jobs = unserved if limit is None else unserved[:limit]
    for job in jobs:
        name = f"job {job.name or job.job_id} of run {job.run_id}"
        yield _indented(f"{name}: {job.detail}", cuts=limit is not None)
    yield from _more(len(unserved) - len(jobs), " of no set")


def _set_values(item: RunnerSetStatus) -> dict[str, str]:
    return {
        "set": item.name,
        # An old count has a question mark; the line below the table has its time.
        "waiting": str(item.waiting) if item.is_current else f"{item.waiting}?",
        "assigned": str(item.assigned) if item.is_current else f"{item.assigned}?",
        "running": str(item.running),
        "hot": str(item.hot),
        "warm": str(item.warm),
        "launching": str(item.launching),
        "machines": f"all {item.max}" if item.is_at_capacity else f"{item.machines} of {item.max}",
        "oldest wait": "" if item.oldest_wait_s is None else format_duration(item.oldest_wait_s),
        "last message": "none" if item.message_age_s is None else f"{format_duration(item.message_age_s)} ago",
        "session": item.session.value,
    }


def _runs(status: Status, limit: int, *, cuts: bool) -> Iterator[Any]:
    """Open provisions, then the other runs, newest first. Those of runner sets are shown with their sets."""
    opened = status.open_provisions
    runs = [run for run in status.runs if not run.runner_set and run.status is not ProvisionStatus.OPEN]
    if not opened and not runs:
        return
    shown = [_run_row(item.provision, _progress(item, status.at)) for item in opened[:limit]]
    shown += [
        _run_row(run, describe_status(run, status.lost.get(run.provision_id, ()))) for run in runs[: limit - len(shown)]
    ]
    columns = ("run", "attempt", "class", "runners", "status", "reason")
    yield FittedTable(
        "",
        columns,
        shown,
        numeric=_NUMERIC,
        no_wrap=_NO_WRAP,
        reductions=("attempt", "class"),
        styles=_STATUS_STYLES,
        cuts=cuts,
    )
    if more := len(opened) + len(runs) - len(shown):
        # The status reads only the newest provisions.
        at_least = "at least " if len(status.runs) >= RECENT_PROVISIONS else ""
        yield f"  and {at_least}{more} more"


def _run_row(run: Provision, reason: str) -> tuple[str, ...]:
    return run.subject, str(run.attempt), run.resource_class, str(run.count), run.shown_status, reason


def _progress(item: OpenProvision, now: datetime) -> str:
    acquired = ", ".join(f"{count} {state}" for state, count in item.instances.items())
    return f"{acquired or 'no runner yet'}; {_left(item.provision.deadline, now, after=' left')}"


def _instances(status: Status, limit: int | None) -> Iterator[Any]:
    if not status.instances:
        yield "no instances"
        return
    shown = status.instances
    if limit is not None and len(shown) > limit:
        subjects = {warning.subject for warning in status.warnings}
        shown = sorted(shown, key=lambda item: _urgency(status, item, subjects))[:limit]
    columns = ("instance", "state", "run", "time left", "heartbeat", "class", "type", "usage", "tier", "uses", "remark")
    found = (_column_values(status, instance) for instance in shown)
    rows = [[values[name] for name in columns] for values in found]
    empty = [name for index, name in enumerate(columns) if not any(row[index] for row in rows)]
    yield FittedTable(
        "",
        columns,
        rows,
        numeric=_NUMERIC,
        no_wrap=_NO_WRAP,
        ids=frozenset({"instance"}),
        reductions=(*empty, "usage", "type", "heartbeat", SHORTEN, "uses", "tier", "class"),
        styles=_STATUS_STYLES,
        cuts=limit is not None,
    )
    yield from _more(len(status.instances) - len(shown), "; --wide shows all")


def _urgency(status: Status, instance: Instance, subjects: Collection[str]) -> tuple[bool, ...]:
    """Sorts instances with a warning first, then those that are overdue, retired or in use."""
    return (
        instance.instance_id not in subjects,
        instance.state in ABSORBING or instance.threshold >= status.at,
        not instance.retire_text,
        instance.state in {State.IDLE, *ABSORBING},
        instance.state in ABSORBING,
    )


def _column_values(status: Status, instance: Instance) -> dict[str, str]:
    now = status.at
    report = status.reports.get(instance.instance_id)
    age_s = (now - report.beat_at).total_seconds() if report and report.beat_at else None
    busy = "a job is running" if report and report.busy else ""
    dead = "agent dead" if status.agent_death(instance) else ""
    return {
        "instance": instance.instance_id,
        "state": instance.state.value,
        "run": instance.subject or (f"({instance.last_subject})" if instance.last_subject else ""),
        "time left": "" if instance.state in ABSORBING else _left(instance.threshold, now),
        "heartbeat": "none" if age_s is None else f"{format_duration(max(age_s, 0))} ago",
        "class": instance.resource_class,
        "type": instance.instance_type,
        "usage": instance.usage_class.value,
        "tier": instance.tier.value,
        "uses": str(instance.uses),
        "remark": "; ".join(filter(None, (dead, instance.retire_text or busy))),
    }


def _left(threshold: datetime, now: datetime, *, after: str = "") -> str:
    seconds = (threshold - now).total_seconds()
    return format_duration(seconds) + after if seconds >= 0 else f"{format_duration(-seconds)} late"


# Log lines --------------------------------------------------------------------------------------------------------


def headline(status: Status) -> str:
    warnings = len(status.warnings)
    text = f"pool {status.pool} at {status.at:%H:%M:%S} UTC{_live(status) or ': 0 live'}"
    return text + (f"; {warnings} warning{'s' if warnings > 1 else ''}" if warnings else "")


def changes(before: Status | None, after: Status) -> list[str]:
    """Return one line per change after a headline, or nothing if there are no changes."""
    lines = [*_instance_changes(before, after), *_set_changes(before, after), *_new_warnings(before, after)]
    return [headline(after), *(f"  {line}" for line in lines)] if lines or before is None else []


def _instance_changes(before: Status | None, after: Status) -> Iterator[str]:
    known = {item.instance_id: item for item in before.instances} if before else {}
    for instance in after.instances:
        old = known.pop(instance.instance_id, None)
        if old is not None and (old.state, old.epoch, old.retire_text) == (
            instance.state,
            instance.epoch,
            instance.retire_text,
        ):
            continue
        holder = f" for {describe_holder(instance.holder)}" if instance.holder is not None else ""
        left = "" if instance.state in ABSORBING else f", {_left(instance.threshold, after.at, after=' left')}"
        previous = f" (was {old.state})" if old is not None and old.state is not instance.state else ""
        reason = f": {instance.retire_text}" if instance.retire_text else ""
        yield f"{instance.instance_id} is {instance.state}{holder}{previous}{left}{reason}"
    for instance_id in known:
        yield f"{instance_id} is gone"


def _set_changes(before: Status | None, after: Status) -> Iterator[str]:
    known = {item.name: item for item in before.demand.sets} if before else {}
    for item in after.demand.sets:
        old = known.get(item.name)
        counts = f"{item.waiting} waiting, {item.running} running, {item.hot} hot, {item.launching} launching"
        if old is None or (old.waiting, old.running, old.hot, old.launching, old.session, old.is_current) != (
            *(item.waiting, item.running, item.hot, item.launching),
            *(item.session, item.is_current),
        ):
            doubt = "" if item.is_current else f"; {item.summary}"
            yield f"set {item.name}: {counts}, session {item.session}{doubt}"


def warning_lines(status: Status) -> list[str]:
    """One line per warning, except for unreadable records, which are errors of the command."""
    return [_warning_line(item) for item in status.warnings if item.kind is not WarningKind.UNREADABLE]


def _warning_line(warning: PoolWarning) -> str:
    subject = f" {warning.subject}" if warning.subject else ""
    return f"warning: {warning.kind}{subject}: {warning.text}"


def _new_warnings(before: Status | None, after: Status) -> Iterator[str]:
    """A warning is new if its kind or subject is: its text may contain a number of seconds."""
    known = {(item.kind, item.subject) for item in before.warnings} if before else set()
    for item in after.warnings:
        if (item.kind, item.subject) not in known:
            yield _warning_line(item)


def explanation_document(explanation: Explanation) -> dict[str, Any]:
    return {
        "kind": explanation.kind,
        "subject": explanation.subject,
        "title": explanation.title,
        "events": [{**record_document(event), "at": to_jsonable(event.at)} for event in explanation.events],
        "next": list(explanation.next_steps),
    }


def explanation_lines(explanation: Explanation, *, wide: bool = True) -> list[Any]:
    """One line per event. Unless it is `wide`, for terminals: texts are wrapped and ids shortened."""
    from rich.table import Table  # noqa: PLC0415 - slow to import
    from rich.text import Text  # noqa: PLC0415

    lines: list[Any] = [Text(sanitize(explanation.title), style="bold")]
    day = None
    began = explanation.events[0].at if explanation.events else None
    ids = [sanitize(event.instance_id) for event in explanation.events]
    ids = ids if wide else shorten_ids(ids)
    id_width = max(map(len, ids), default=0) if explanation.kind == "run" else 0
    for event, instance_id in zip(explanation.events, ids, strict=True):
        if event.at.date() != day:
            day = event.at.date()
            lines.append(Text(f"{event.at:%Y-%m-%d} UTC", style="dim"))
        start = Text(_event_start(event, began or event.at), style="dim")
        if id_width:
            start.append(f"{instance_id:<{id_width}}  ", style="not dim")
        if wide:
            lines.append(start + _event_text(event))
        else:
            grid = Table.grid()
            grid.add_column(no_wrap=True)
            grid.add_column(overflow="fold")
            grid.add_row(start, _event_text(event))
            lines.append(grid)
    steps = explanation.next_steps
    lines += [Text("Next", style="bold")]
    return [*lines, *(Text(f"  {sanitize(step)}") if wide else _indented(step, cuts=False) for step in steps)]


def _event_start(event: ExplainedEvent, began: datetime) -> str:
    since_s = (event.at - began).total_seconds()
    return f"  {event.at:%H:%M:%S}.{event.at.microsecond // 1000:03d} {since_s:>+10.2f} s  "


def _event_text(event: ExplainedEvent) -> Text:
    from rich.text import Text  # noqa: PLC0415

    text = Text(sanitize(event.what), style=f"not dim {_STYLES[event.severity]}".strip())
    if event.why:
        text.append(f": {sanitize(event.why)}", style="not dim")
    return text
