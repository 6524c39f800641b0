"""Results as documents for programs and as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from remuda.controlplane.provision.order import ProvisionResult
from remuda.controlplane.refresh.result import RefreshResult
from remuda.controlplane.release import Fate, ReleaseResult
from remuda.controlplane.status import Status
from remuda.domain.documents import plain
from remuda.domain.instance import ABSORBING, Instance
from remuda.domain.resources import TypePatterns
from remuda.settings import Loaded, Settings, key

if TYPE_CHECKING:
    from rich.table import Table


def record_document(record: Any) -> dict[str, Any]:
    """A record as the other documents are: with its fields' own names."""
    return {item.name: plain(getattr(record, item.name)) for item in fields(record)}


def instance_document(instance: Instance) -> dict[str, Any]:
    """A record without what opens a door."""
    document = record_document(instance)
    if instance.assignment is not None:
        shown = {"url", "runner_name", "labels"}
        assignment = record_document(instance.assignment)
        document["assignment"] = {name: value for name, value in assignment.items() if name in shown}
    return document


def provision_document(result: ProvisionResult) -> dict[str, Any]:
    return {
        "run_id": result.run_id,
        "label": result.label,
        "provision_id": result.provision_id,
        "instances": [
            {
                "instance_id": item.instance.instance_id,
                "source": item.source,
                "instance_type": item.instance.instance_type,
                "usage_class": item.instance.usage_class.value,
                "state": item.instance.state.value,
                "registration_seconds": item.registration_s,
            }
            for item in result.instances
        ],
        "reused": result.reused,
        "created": result.created,
        "seconds": result.seconds,
        "phases": dict(result.phases),
        "refused": dict(result.refused),
        "calls": plain(result.calls),
    }


def release_document(result: ReleaseResult) -> dict[str, Any]:
    return {
        "run_id": result.run_id,
        **{fate.value: [item.instance_id for item in result.of(fate)] for fate in Fate},
        "reasons": {item.instance_id: item.why for item in result.outcomes},
        "deregistration_seconds": {
            item.instance_id: item.deregistration_s for item in result.outcomes if item.deregistration_s is not None
        },
        "errors": list(result.errors),
        "seconds": result.seconds,
        "calls": plain(result.calls),
    }


def refresh_document(result: RefreshResult) -> dict[str, Any]:
    return {
        "applied": list(result.applied),
        "retired": list(result.retired),
        "reasons": dict(result.retired),
        "terminated": list(result.terminated),
        "rolled_back": list(result.rolled_back),
        "announced": list(result.announced),
        "finished": list(result.finished),
        "removed": list(result.removed),
        "dropped": result.dropped,
        "forgotten": result.forgotten,
        "errors": list(result.errors),
        "seconds": result.seconds,
        "calls": plain(result.calls),
    }


def status_document(status: Status) -> dict[str, Any]:
    return {
        "instances": [
            {
                **instance_document(instance),
                "report": record_document(report) if (report := status.reports.get(instance.instance_id)) else None,
            }
            for instance in status.instances
        ],
        "pools": {name: {"idle": level.idle, "hints": level.hints} for name, level in status.pools.items()},
        "runs": [record_document(provision) for provision in status.runs],
        "unreadable": list(status.unreadable),
    }


#: Below this width the columns that matter least are left out.
WIDE = 120
#: How many runs a status shows.
MAX_RUNS = 10


def status_tables(status: Status, now: datetime, *, width: int) -> list[Any]:
    if not status.instances and not status.runs:
        return ["no instances, no runs"]
    tables: list[Any] = [_instances_table(status, now, wide=width >= WIDE)] if status.instances else ["no instances"]
    pools = [(name, level) for name, level in status.pools.items() if level.idle or level.hints]
    if pools:
        rows = [(name, str(level.idle), str(level.hints)) for name, level in pools]
        tables.append(_table("Pools", ("class", "idle", "hints"), rows))
    if status.runs:
        shown = [
            (run.run_id, str(run.attempt), run.resource_class, str(run.count), run.status.value, run.why)
            for run in status.runs[:MAX_RUNS]
        ]
        tables.append(_table("Runs, newest first", ("run", "attempt", "class", "asked", "status", "why"), shown))
    return tables


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich import box  # noqa: PLC0415 - only where a table is shown
    from rich.table import Table  # noqa: PLC0415 - as above

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(
            column,
            justify="right" if column in _NUMBERS else "left",
            no_wrap=column in _WHOLE,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*row)
    return table


_NUMBERS = frozenset({"time left", "beat", "uses", "idle", "hints", "asked", "attempt"})
#: Never cut: people copy them.
_WHOLE = frozenset({"instance", "state", "run", "class"})


def _instances_table(status: Status, now: datetime, *, wide: bool) -> Table:
    columns = ["instance", "state", "run", "time left", "class", "uses", "remark"]
    if wide:
        columns[4:4] = ["beat"]
        columns[6:6] = ["type", "usage"]
    rows = []
    for instance in status.instances:
        report = status.reports.get(instance.instance_id)
        beat = f"{(now - report.beat_at).total_seconds():.0f} s ago" if report and report.beat_at else "none"
        busy = "a job runs" if report and report.busy else ""
        cells = {
            "instance": instance.instance_id,
            "state": instance.state.value,
            "run": instance.run_id or (f"({instance.last_run_id})" if instance.last_run_id else ""),
            "time left": "" if instance.state in ABSORBING else _left(instance.threshold, now),
            "beat": beat,
            "class": instance.resource_class,
            "type": instance.instance_type,
            "usage": instance.usage_class.value,
            "uses": str(instance.uses),
            "remark": instance.retire or busy,
        }
        rows.append([cells[column] for column in columns])
    return _table("Instances", columns, rows)


def config_rows(loaded: Loaded) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for name in Settings.model_fields:
        value = getattr(loaded.settings, name)
        if isinstance(value, SecretStr):
            shown: Any = "(hidden)"
        elif isinstance(value, tuple):
            shown = {item.name: {"cpu": item.cpu, "mmem": item.mmem} for item in value}
        elif isinstance(value, TypePatterns | Path):
            shown = str(value)
        else:
            shown = plain(value)
        rows[key(name)] = {"value": shown, "source": loaded.origins[name]}
    return rows


def config_table(rows: dict[str, dict[str, Any]]) -> Table:
    from rich.table import Table  # noqa: PLC0415 - only where a table is shown

    table = Table()
    for column in ("setting", "value", "from"):
        table.add_column(column)
    for name, row in rows.items():
        value = row["value"]
        text = ", ".join(value) if isinstance(value, dict) else "" if value is None else str(value)
        table.add_row(name, text, row["source"])
    return table


def _left(threshold: datetime, now: datetime) -> str:
    seconds = (threshold - now).total_seconds()
    if seconds < 0:
        return f"over by {-seconds:.0f} s"
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
