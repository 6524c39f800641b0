"""Results of commands as JSON documents and terminal tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remuda.cli.rendering.table import SHORTEN, FittedTable
from remuda.config.declaration import DEFAULT, Secret, key
from remuda.config.settings import LIFETIME_SETTINGS, POOL_SETTINGS, SETTINGS, Settings
from remuda.domain.holder import Holder, SetHolder
from remuda.domain.instance import Instance
from remuda.domain.pool_config import PoolConfig, may_hold_secret
from remuda.domain.resources import ResourceClass, TypePatterns
from remuda.domain.runner_set import RunnerSet
from remuda.domain.scale_down.idle_config import IdleWindow
from remuda.domain.serialization import to_jsonable
from remuda.domain.thresholds import Lifetimes

if TYPE_CHECKING:
    from remuda.controlplane.provision.plan import ProvisionResult
    from remuda.controlplane.refresh.result import RefreshResult
    from remuda.controlplane.release import ReleaseResult
    from remuda.controlplane.scale_down.result import ScaleDownResult


def record_document(record: Any) -> dict[str, Any]:
    """Convert a dataclass to a JSON document with the same field names."""
    return {item.name: to_jsonable(getattr(record, item.name)) for item in fields(record)}


def instance_document(instance: Instance) -> dict[str, Any]:
    """Convert an instance record to a JSON document without its credentials."""
    document = record_document(instance)
    document |= {name: holder_document(getattr(instance, name)) for name in ("holder", "last_holder")}
    if instance.assignment is not None:
        shown = {"url", "runner_name", "labels", "repository"}
        assignment = record_document(instance.assignment)
        document["assignment"] = {name: value for name, value in assignment.items() if name in shown}
    return document


def holder_document(holder: Holder | None) -> dict[str, Any] | None:
    """A run or a runner set with its job, as people read it. None for nobody."""
    if holder is None:
        return None
    if isinstance(holder, SetHolder):
        job = None if holder.job is None else record_document(holder.job)
        return {"runner_set": holder.name, "job": job, "provision_id": holder.provision_id}
    return record_document(holder)


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
        "ends_at": to_jsonable(min((item.instance.threshold for item in result.instances), default=None)),
        "tier": result.tier.value,
        "tier_reason": result.tier_reason,
        "ephemeral": result.ephemeral,
        "seconds": result.seconds,
        "phases": dict(result.phases),
        "rejected": dict(result.rejected),
        "calls": to_jsonable(result.calls),
    }


def release_document(result: ReleaseResult) -> dict[str, Any]:
    from remuda.controlplane.release import ReleaseStatus  # noqa: PLC0415 - not every command waits for it

    return {
        "run_id": result.run_id,
        **{status.value: [item.instance_id for item in result.of(status)] for status in ReleaseStatus},
        "reasons": {item.instance_id: item.why for item in result.outcomes},
        "details": {item.instance_id: item.detail for item in result.outcomes if item.detail},
        "deregistration_seconds": {
            item.instance_id: item.deregistration_s for item in result.outcomes if item.deregistration_s is not None
        },
        "warnings": list(result.warnings),
        "errors": list(result.errors),
        "seconds": result.seconds,
        "calls": to_jsonable(result.calls),
    }


def refresh_document(result: RefreshResult) -> dict[str, Any]:
    return {
        "applied": list(result.applied),
        "changes": to_jsonable(result.changes),
        "retired": list(result.retired),
        "reasons": dict(result.retired),
        "terminated": list(result.terminated),
        "rolled_back": list(result.rolled_back),
        "published": list(result.published),
        "finished_releases": list(result.finished_releases),
        "stale_registrations": list(result.stale_registrations),
        "stale_messages": result.stale_messages,
        "deleted_records": result.deleted_records,
        "errors": list(result.errors),
        "warnings": list(result.warnings),
        "waiting_jobs": list(result.waiting_jobs),
        "seconds": result.seconds,
        "calls": to_jsonable(result.calls),
    }


def config_rows(settings: Settings) -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for name, declared in SETTINGS.items():
        value = _jsonable_setting(name, getattr(settings, name))
        rows[declared.key] = {"value": value, "source": settings.origins.get(name, DEFAULT)}
    return rows


def _jsonable_setting(name: str, value: Any) -> Any:
    if isinstance(value, Secret):
        return "(hidden)"
    if name == "resource_class_config":
        return {item.name: item.describe() for item in value}
    if name == "runner_sets":
        return [_runner_set_document(item) for item in value]
    if name == "idle_config":
        return [_window_document(window) for window in value]
    if name == "repositories":
        return [str(pattern) for pattern in value]
    return str(value) if isinstance(value, TypePatterns | Path) else to_jsonable(value)


def pool_config_rows(stored: PoolConfig, settings: Settings) -> dict[str, dict[str, Any]]:
    """The pool's stored values by setting, with the local value of those that a flag, a variable or the file sets."""
    tokens = stored.find_tokens(settings.github_scope)
    pool = _pool_values(
        classes=stored.classes,
        lifetimes=stored.lifetimes,
        launch=stored.launch,
        values={
            "max_instances": stored.max_instances,
            "reuse": stored.reuse,
            "runner_sets": stored.runner_sets,
            "runner_group": tokens.runner_group if tokens else "",
            "monthly_budget": stored.monthly_budget,
        },
    )
    here = _pool_values(
        classes=settings.resource_class_config,
        lifetimes=settings.lifetimes,
        launch=settings.launch_options(),
        values={name: getattr(settings, name) for name in POOL_SETTINGS},
    )
    rows: dict[str, dict[str, Any]] = {}
    for name in sorted({**pool, **here}, key=list(SETTINGS).index):
        is_given, is_secret = settings.given(name), may_hold_secret(key(name))
        value, local = pool.get(name), here.get(name)
        rows[key(name)] = {
            "value": "(hidden)" if is_secret and value else _jsonable_setting(name, value),
            "here": None if not is_given else "(hidden)" if is_secret and local else _jsonable_setting(name, local),
            "source": settings.origins.get(name),
            "differs": is_given and (value or None) != (local or None),
        }
    return rows


def _pool_values(
    *,
    classes: tuple[ResourceClass, ...],
    lifetimes: Lifetimes,
    launch: Mapping[str, str],
    values: Mapping[str, Any],
) -> dict[str, Any]:
    """The parts of a configuration by the names of their settings, in the units of these."""
    times = {setting: getattr(lifetimes, name) for name, setting in LIFETIME_SETTINGS.items()}
    options = {"boot_delay_sec" if name == "boot-delay-s" else name.replace("-", "_"): launch[name] for name in launch}
    return {
        **values,
        **times,
        "max_runtime_min": lifetimes.max_runtime_s / 60,
        "resource_class_config": classes,
        **{name: value for name, value in options.items() if name in SETTINGS},
    }


def pool_config_table(stored: PoolConfig, rows: Mapping[str, Mapping[str, Any]]) -> FittedTable:
    def shown(value: Any) -> str:
        if isinstance(value, list):
            return json.dumps(value) if value else "none"
        return _shown_value(None if value == "" else value)

    return FittedTable(
        f"Pool {stored.pool}, configured {stored.applied_at:%Y-%m-%d %H:%M:%S} UTC",
        ("setting", "pool", "here", "from"),
        [
            (name, shown(row["value"]), shown(row["here"]) if row["differs"] else "", str(row["source"] or ""))
            for name, row in rows.items()
        ],
        no_wrap=frozenset({"setting"}),
    )


def applied_lines(document: Mapping[str, Any]) -> list[str]:
    """One line per applied change of a refresh document, with the old and the new value."""
    changes = document["changes"]
    return [
        f"{name}: {' -> '.join(map(_shown_value, changes[name]))}" if changes.get(name) else name
        for name in document["applied"]
    ]


def _shown_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} ({_item_text(each)})" for name, each in value.items()) or "none"
    if isinstance(value, float):
        return f"{value:.15g}"
    return "not set" if value is None else str(value)


def _item_text(written: Mapping[str, Any] | str) -> str:
    """A resource class, or a runner set, in words."""
    if isinstance(written, str):
        return written
    others = (f"{name} {value}" for name, value in written.items() if name not in {"cpu", "mmem"})
    return ", ".join((f"{written['cpu']} vCPU", f"{written['mmem']} MiB", *others))


def _runner_set_document(runner_set: RunnerSet) -> dict[str, Any]:
    """The set as it is written in the configuration, with its defaults."""
    document = _with_setting_names(runner_set)
    return {**document, "windows": [_with_setting_names(window) for window in runner_set.windows]}


def _with_setting_names(record: Any) -> dict[str, Any]:
    return {key(name): value for name, value in record_document(record).items()}


def _window_document(window: IdleWindow) -> dict[str, Any]:
    return {
        "cron": window.cron.text,
        "timeZone": window.zone_name,
        "idleCount": window.idle_count,
        "evictionStrategy": window.eviction.value,
    }


def scale_down_document(result: ScaleDownResult) -> dict[str, Any]:
    return {
        "environment": result.environment,
        "dry_run": result.dry_run,
        "idle_quota": {
            "idle_count": result.quota.idle_count,
            "eviction": result.quota.eviction.value,
            "window": result.quota.window,
        },
        "decisions": [
            {
                "instance_id": item.decision.instance_id,
                "owner": item.decision.owner,
                "action": item.decision.action.value,
                "reason": item.decision.reason,
                "phase": item.decision.phase.value,
                "done": item.done,
            }
            for item in result.outcomes
        ],
        "errors": list(result.errors),
        "seconds": result.seconds,
        "calls": {service: dict(counts) for service, counts in result.calls.items()},
    }


def scale_down_table(result: ScaleDownResult) -> FittedTable:
    title = f"Scale-down of {result.environment}" + (" (dry run)" if result.dry_run else "")
    rows = []
    for item in result.outcomes:
        decision = item.decision
        failed = not item.done and not result.dry_run
        action = f"{decision.action} (not done)" if failed else str(decision.action)
        rows.append((str(decision.phase.value), decision.instance_id, decision.owner, action, decision.reason))
    columns = ("phase", "instance", "owner", "action", "reason")
    ids, one_line = frozenset({"instance"}), frozenset({"phase", "instance"})
    return FittedTable(title, columns, rows, no_wrap=one_line, ids=ids, reductions=("phase", SHORTEN))


def config_table(settings: Settings) -> FittedTable:
    rows: list[tuple[str, str, str]] = []
    for name, row in config_rows(settings).items():
        value = row["value"]
        if name == "runner-sets" and settings.runner_sets:
            texts = [f"{item.name}: {item.describe()}" for item in settings.runner_sets]
        else:
            texts = [", ".join(value) if isinstance(value, dict) else "" if value is None else str(value)]
        rows += [(name if index == 0 else "", text, row["source"]) for index, text in enumerate(texts)]
    return FittedTable("", ("setting", "value", "from"), rows, no_wrap=frozenset({"setting"}))
