"""Pool status and explanations as JSON documents and terminal output; changes of the status as log lines."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

from remuda.cli.output import format_duration, table
from remuda.cli.rendering.results import instance_document, record_document
from remuda.controlplane.read.status import RECENT_PROVISIONS, OpenProvision, Status
from remuda.domain.demand import JobRecord
from remuda.domain.instance import ABSORBING, Instance
from remuda.domain.provision import describe_status
from remuda.domain.reporting.demand import DemandStatus, ListenerStatus, RunnerSetStatus, waited_s
from remuda.domain.reporting.explanation import ExplainedEvent, Explanation, Severity
from remuda.domain.reporting.warnings import PoolWarning, WarningKind
from remuda.domain.runner_release import RunnerRelease
from remuda.domain.serialization import to_jsonable
from remuda.domain.text import sanitize

if TYPE_CHECKING:
    from rich.text import Text

#: Terminal width from which all columns are shown.
FULL_WIDTH = 120
#: Maximum number of runs shown.
MAX_RUNS = 10

_NUMERIC = frozenset(
    {"time left", "heartbeat", "uses", "idle", "messages", "runners", "attempt", "oldest wait", "last message"}
    | {"waiting", "assigned", "running", "hot", "warm", "launching", "at capacity"}
)
_NO_WRAP = frozenset({"instance", "state", "run", "class", "tier", "warning"})
_STYLES = {Severity.NORMAL: "", Severity.GOOD: "green", Severity.BAD: "yellow", Severity.MINOR: "dim"}
#: Width of an instance id, to align the texts.
_ID_WIDTH = 19


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
                **record_document(run),
                "status": run.shown_status,
                "lost_ids": list(status.lost.get(run.provision_id, ())),
            }
            for run in status.runs
        ],
        "runner_sets": [_set_document(item) for item in status.demand.sets],
        "listener": _listener_document(status.demand.listener) if status.demand.listener else None,
        "jobs": [{**record_document(job), "waited_seconds": _waited(job, status.at)} for job in status.demand.jobs],
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
        "reason": item.reason.value if item.reason else None,
        "detail": item.detail,
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


def _open_provision_document(item: OpenProvision) -> dict[str, Any]:
    run = item.provision
    return {
        "run_id": run.run_id,
        "attempt": run.attempt,
        "provision_id": run.provision_id,
        "resource_class": run.resource_class,
        "count": run.count,
        "instances": dict(item.instances),
        "created_at": to_jsonable(run.created_at),
        "deadline": to_jsonable(run.deadline),
    }


# Tables -----------------------------------------------------------------------------------------------------------


def status_tables(status: Status, *, width: int, rows: int | None = None) -> list[Any]:
    """Build the tables. `rows` is the maximum number of instances shown."""
    return list(_tables(status, width, rows))


def _tables(status: Status, width: int, rows: int | None) -> Iterator[Any]:
    if status.warnings:
        found = [(item.kind, item.subject, item.text) for item in status.warnings]
        yield table("Warnings", ("warning", "subject", "meaning"), found, no_wrap=_NO_WRAP)
    if status.config:
        version = f", runner {status.config.runner_version}" if status.config.runner else ""
        yield f"pool {status.pool}, reuse {status.config.reuse}{version}"
    if status.demand.sets:
        yield from _sets(status.demand, wide=width >= FULL_WIDTH)
    if not status.instances and not status.runs:
        yield "no instances, no runs"
        return
    yield from _instances(status, rows, wide=width >= FULL_WIDTH)
    if status.open_provisions:
        provisions = [_open_provision_row(item, status.at) for item in status.open_provisions]
        columns = ("run", "attempt", "class", "runners", "acquired", "time left")
        yield table("Open provisions", columns, provisions, numeric=_NUMERIC, no_wrap=_NO_WRAP)
    pools = [(name, str(level.idle), str(level.messages)) for name, level in status.pools.items() if _is_used(level)]
    if pools:
        yield table("Pools", ("class", "idle", "messages"), pools, numeric=_NUMERIC, no_wrap=_NO_WRAP)
    yield from _runs(status)


def _sets(demand: DemandStatus, *, wide: bool) -> Iterator[Any]:
    columns = ["set", "waiting", "assigned", "hot", "warm", "launching", "at capacity"]
    if wide:
        columns[3:3] = ["running"]
        columns += ["oldest wait", "last message", "session"]
    rows = [[_set_values(item)[name] for name in columns] for item in demand.sets]
    yield table("Runner sets", columns, rows, numeric=_NUMERIC, no_wrap=_NO_WRAP)
    for item in demand.sets:
        if item.reason is not None:
            oldest = f"; the oldest waits for {format_duration(item.oldest_wait_s)}" if item.oldest_wait_s else ""
            jobs = f"{item.waiting} job{'' if item.waiting == 1 else 's'}"
            yield sanitize(f"  {item.name}: {jobs} waiting: {item.detail}{oldest}")


def _set_values(item: RunnerSetStatus) -> dict[str, str]:
    return {
        "set": item.name,
        "waiting": str(item.waiting),
        "assigned": str(item.assigned),
        "running": str(item.running),
        "hot": str(item.hot),
        "warm": str(item.warm),
        "launching": str(item.launching),
        "at capacity": f"yes, {item.max}" if item.is_at_capacity else f"{item.machines} of {item.max}",
        "oldest wait": "" if item.oldest_wait_s is None else format_duration(item.oldest_wait_s),
        "last message": "none" if item.message_age_s is None else f"{format_duration(item.message_age_s)} ago",
        "session": item.session.value,
    }


def _runs(status: Status) -> Iterator[Any]:
    # The provisions of runner sets are shown with their sets.
    runs = [run for run in status.runs if not run.runner_set]
    if not runs:
        return
    shown = [
        (
            *(run.run_id, str(run.attempt), run.resource_class, str(run.count), run.shown_status),
            describe_status(run, status.lost.get(run.provision_id, ())),
        )
        for run in runs[:MAX_RUNS]
    ]
    columns = ("run", "attempt", "class", "runners", "status", "reason")
    yield table("Runs, newest first", columns, shown, numeric=_NUMERIC, no_wrap=_NO_WRAP)
    if more := len(runs) - len(shown):
        # The status reads only the newest provisions.
        at_least = "at least " if len(status.runs) >= RECENT_PROVISIONS else ""
        yield f"  and {at_least}{more} more"


def _is_used(level: Any) -> bool:
    return bool(level.idle or level.messages)


def _open_provision_row(item: OpenProvision, now: datetime) -> tuple[str, ...]:
    run = item.provision
    acquired = ", ".join(f"{count} {state}" for state, count in item.instances.items())
    left = _left(run.deadline, now)
    return run.run_id, str(run.attempt), run.resource_class, str(run.count), acquired or "none yet", left


def _instances(status: Status, rows: int | None, *, wide: bool) -> Iterator[Any]:
    if not status.instances:
        yield "no instances"
        return
    columns = ["instance", "state", "run", "time left", "class", "tier", "uses", "remark"]
    if wide:
        columns[4:4] = ["heartbeat"]
        columns[6:6] = ["type", "usage"]
    shown = status.instances if rows is None else status.instances[: max(rows, 1)]
    values = [_column_values(status, instance) for instance in shown]
    yield table(
        "Instances", columns, [[row[name] for name in columns] for row in values], numeric=_NUMERIC, no_wrap=_NO_WRAP
    )
    if len(shown) < len(status.instances):
        yield f"  and {len(status.instances) - len(shown)} more"


def _column_values(status: Status, instance: Instance) -> dict[str, str]:
    now = status.at
    report = status.reports.get(instance.instance_id)
    age_s = (now - report.beat_at).total_seconds() if report and report.beat_at else None
    busy = "a job is running" if report and report.busy else ""
    dead = "agent dead" if status.agent_death(instance) else ""
    return {
        "instance": instance.instance_id,
        "state": instance.state.value,
        "run": instance.run_id or (f"({instance.last_run_id})" if instance.last_run_id else ""),
        "time left": "" if instance.state in ABSORBING else _left(instance.threshold, now),
        "heartbeat": "none" if age_s is None else f"{format_duration(max(age_s, 0))} ago",
        "class": instance.resource_class,
        "type": instance.instance_type,
        "usage": instance.usage_class.value,
        "tier": instance.tier.value,
        "uses": str(instance.uses),
        "remark": "; ".join(filter(None, (dead, instance.retire_text or busy))),
    }


def _left(threshold: datetime, now: datetime) -> str:
    seconds = (threshold - now).total_seconds()
    return format_duration(seconds) if seconds >= 0 else f"overdue by {format_duration(-seconds)}"


# Log lines --------------------------------------------------------------------------------------------------------


def headline(status: Status) -> str:
    states = ", ".join(f"{count} {state}" for state, count in status.by_state().items())
    live = sum(status.by_state().values())
    warnings = len(status.warnings)
    text = f"pool {status.pool} at {status.at:%H:%M:%S} UTC: {live} live" + (f" ({states})" if states else "")
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
        run = f" for run {instance.run_id}" if instance.run_id else ""
        left = "" if instance.state in ABSORBING else f", {_left(instance.threshold, after.at)} left"
        previous = f" (was {old.state})" if old is not None and old.state is not instance.state else ""
        reason = f": {instance.retire_text}" if instance.retire_text else ""
        yield f"{instance.instance_id} is {instance.state}{run}{previous}{left}{reason}"
    for instance_id in known:
        yield f"{instance_id} is gone"


def _set_changes(before: Status | None, after: Status) -> Iterator[str]:
    known = {item.name: item for item in before.demand.sets} if before else {}
    for item in after.demand.sets:
        old = known.get(item.name)
        counts = f"{item.waiting} waiting, {item.running} running, {item.hot} hot, {item.launching} launching"
        if old is None or (old.waiting, old.running, old.hot, old.launching, old.session) != (
            *(item.waiting, item.running, item.hot, item.launching),
            item.session,
        ):
            yield f"set {item.name}: {counts}, session {item.session}"


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


def explanation_lines(explanation: Explanation) -> list[Text]:
    from rich.text import Text  # noqa: PLC0415 - slow to import

    lines = [Text(sanitize(explanation.title), style="bold")]
    day = None
    began = explanation.events[0].at if explanation.events else None
    for event in explanation.events:
        if event.at.date() != day:
            day = event.at.date()
            lines.append(Text(f"{event.at:%Y-%m-%d} UTC", style="dim"))
        lines.append(_event_line(event, began or event.at, with_id=explanation.kind == "run"))
    lines += [Text("Next", style="bold"), *(Text(f"  {sanitize(text)}") for text in explanation.next_steps)]
    return lines


def _event_line(event: ExplainedEvent, began: datetime, *, with_id: bool) -> Text:
    from rich.text import Text  # noqa: PLC0415

    since_s = (event.at - began).total_seconds()
    text = Text(f"  {event.at:%H:%M:%S}.{event.at.microsecond // 1000:03d} {since_s:>+10.2f} s  ", style="dim")
    if with_id:
        text.append(f"{sanitize(event.instance_id):<{_ID_WIDTH}}  ", style="not dim")
    text.append(sanitize(event.what), style=f"not dim {_STYLES[event.severity]}".strip())
    if event.why:
        text.append(f": {sanitize(event.why)}", style="not dim")
    return text
