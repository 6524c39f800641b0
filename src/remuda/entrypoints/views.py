"""Results as documents for programs and as tables for people."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from remuda.controlplane.provision.order import ProvisionResult
from remuda.controlplane.refresh.result import RefreshResult
from remuda.controlplane.release import Fate, ReleaseResult
from remuda.controlplane.status import Status
from remuda.domain.documents import plain, to_document
from remuda.domain.instance import Instance
from remuda.domain.resources import TypePatterns
from remuda.settings import Loaded, Settings, key

if TYPE_CHECKING:
    from rich.table import Table


def instance_document(instance: Instance) -> dict[str, Any]:
    """A record without what opens a door."""
    document = to_document(instance)
    if document["assignment"]:
        document["assignment"] = {
            key: value for key, value in document["assignment"].items() if key in {"url", "runnerName", "labels"}
        }
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
    def rows(fate: Fate) -> list[dict[str, Any]]:
        return [{"instance_id": item.instance_id, "reason": item.why} for item in result.of(fate)]

    return {
        "run_id": result.run_id,
        "released": [
            {"instance_id": item.instance_id, "deregistration_seconds": item.deregistration_s}
            for item in result.of(Fate.RELEASED)
        ],
        "retired": rows(Fate.RETIRED),
        "expired": rows(Fate.EXPIRED),
        "skipped": rows(Fate.SKIPPED),
        "errors": list(result.errors),
        "seconds": result.seconds,
        "calls": plain(result.calls),
    }


def refresh_document(result: RefreshResult) -> dict[str, Any]:
    return {
        "applied": list(result.applied),
        "retired": [{"instance_id": key, "reason": why} for key, why in result.retired.items()],
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
                "report": to_document(report) if (report := status.reports.get(instance.instance_id)) else None,
            }
            for instance in status.instances
        ],
        "pools": {name: {"idle": level.idle, "hints": level.hints} for name, level in status.pools.items()},
        "runs": [to_document(provision) for provision in status.runs],
    }


def status_table(status: Status, now: datetime) -> Table:
    from rich.table import Table  # noqa: PLC0415 - only where a table is shown

    table = Table(title="Instances", title_justify="left")
    for column in ("instance", "state", "run", "time left", "beat", "class", "type", "usage", "uses", "remark"):
        table.add_column(column, justify="right" if column in {"time left", "beat", "uses"} else "left")
    for instance in status.instances:
        report = status.reports.get(instance.instance_id)
        beat = f"{(now - report.beat_at).total_seconds():.0f} s ago" if report and report.beat_at else "none"
        busy = "a job runs" if report and report.busy else ""
        table.add_row(
            instance.instance_id,
            instance.state.value,
            instance.run_id or (f"({instance.last_run_id})" if instance.last_run_id else ""),
            _left(instance.threshold, now),
            beat,
            instance.resource_class,
            instance.instance_type,
            instance.usage_class.value,
            str(instance.uses),
            instance.retire or busy,
        )
    return table


def pools_table(status: Status) -> Table:
    from rich.table import Table  # noqa: PLC0415 - only where a table is shown

    table = Table(title="Pools", title_justify="left")
    table.add_column("class")
    table.add_column("idle", justify="right")
    table.add_column("hints", justify="right")
    for name, level in status.pools.items():
        if level.idle or level.hints:
            table.add_row(name, str(level.idle), str(level.hints))
    return table


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
