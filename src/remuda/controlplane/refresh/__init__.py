"""Refresh: applies the configuration, renews tokens, and sweeps: it finishes what is expired, lost or incomplete.

A sweep is a sequence of parts. Each part is a function from what was observed to a `RefreshResult`: what it has done,
and what it has seen. A part that fails is reported and does not stop the others. A refresh can be interrupted at any
await and run again.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import replace
from datetime import timedelta

from remuda.controlplane.budget import update_spending
from remuda.controlplane.context import Context, check_pool_name
from remuda.controlplane.refresh.audit import audit_waiting_jobs
from remuda.controlplane.refresh.configure import DesiredConfig, apply_configuration, renew_tokens
from remuda.controlplane.refresh.ended_runs import release_ended_runs
from remuda.controlplane.refresh.machines import close_unmatched, remove_stale_registrations, terminate_machines
from remuda.controlplane.refresh.messages import delete_stale_messages
from remuda.controlplane.refresh.observe import Observed, observe
from remuda.controlplane.refresh.provisions import settle_provisions
from remuda.controlplane.refresh.records import sweep_records, warn_before_expiry
from remuda.controlplane.refresh.result import RefreshResult, combined, warned
from remuda.controlplane.refresh.runner_sets import sweep_runner_sets
from remuda.domain.errors import RemudaError
from remuda.domain.pool_config import PoolConfig
from remuda.domain.reporting.warnings import WarningKind, sweep_pause_s
from remuda.domain.sweep_record import SweepRecord
from remuda.domain.timestamps import to_milliseconds
from remuda.ports.clock import CLOCK_FIX

__all__ = ["DesiredConfig", "RefreshResult", "refresh"]


async def refresh(context: Context, desired: DesiredConfig | None, *, interval_s: float | None = None) -> RefreshResult:
    """With `desired` None the stored configuration stays; tokens are renewed and the sweeps run.

    `interval_s` is the time to the next refresh, if the caller repeats it.
    """
    parts, started_at = _Parts(context), context.clock.monotonic()
    if (config := await _configure(parts, context, desired)) is not None:
        check_pool_name(context, config)
        config = await _keep_account(parts, context, config)
        await _sweep(parts, context, config, interval_s=interval_s)
        if (wrong := context.clock_error) is not None:
            parts.add(warned(WarningKind.CLOCK, f"{wrong}: {CLOCK_FIX}"))
    seconds = round(context.clock.monotonic() - started_at, 4)
    return replace(parts.total(), seconds=seconds, calls=context.calls.by_service())


class _Parts:
    """The results of the parts so far. Logs each error and warning once, as soon as a part tells it."""

    def __init__(self, context: Context) -> None:
        self._event_log = context.event_log
        self._results: list[RefreshResult] = []

    def total(self) -> RefreshResult:
        total = combined(self._results)
        # Several parts may read the same unreadable record.
        return replace(total, errors=tuple(dict.fromkeys(total.errors)))

    def add(self, result: RefreshResult) -> None:
        told = {error for earlier in self._results for error in earlier.errors}
        for error in dict.fromkeys(result.errors):
            if error not in told:
                self._event_log.record("sweep-failed", error)
        for warning in result.warnings:
            self._event_log.record("refresh-warning", warning)
        self._results.append(result)

    async def run(self, name: str, part: Awaitable[RefreshResult], *, otherwise: SweepRecord | None = None) -> None:
        """Wait for a part and add its result. `otherwise` is what it has seen if it fails."""
        try:
            self.add(await part)
        except RemudaError as error:
            self.add(RefreshResult(errors=(f"{name}: {error.message}",), record=otherwise or SweepRecord()))


async def _configure(parts: _Parts, context: Context, desired: DesiredConfig | None) -> PoolConfig | None:
    if desired is not None:
        config, applied = await apply_configuration(context, desired)
    else:
        stored = await context.store.get_config()
        if stored is None:
            return None
        config, applied = await renew_tokens(context, stored)
    parts.add(applied)
    if config.runner is not None and (found := config.runner.warning(context.clock.now())):
        parts.add(warned(WarningKind.RUNNER_VERSION, str(found)))
    return config


async def _keep_account(parts: _Parts, context: Context, config: PoolConfig) -> PoolConfig:
    """Before the sweep, which confirms terminations."""
    try:
        config = await update_spending(context, config)
    except RemudaError as error:
        parts.add(RefreshResult(errors=(f"the spending of this month is not updated: {error.message}",)))
    if warning := config.budget.warning(context.clock.now()):
        parts.add(warned(WarningKind.BUDGET, f"budget: {warning}"))
    return config


async def _sweep(parts: _Parts, context: Context, config: PoolConfig, *, interval_s: float | None) -> None:
    await parts.run("provisions", settle_provisions(context, config))
    observed, read = await observe(context, config)
    parts.add(read)
    await parts.run("runner sets", sweep_runner_sets(observed))
    await parts.run("ended runs", release_ended_runs(observed))
    await parts.run("records", sweep_records(observed.without(parts.total().advanced_in_sets)))
    await parts.run("expiry warnings", warn_before_expiry(observed))
    await parts.run("machines", close_unmatched(observed))
    await parts.run("machines", terminate_machines(observed, also=parts.total().retired))
    remaining = observed.without(parts.total().retired)
    await parts.run("stale pool messages", delete_stale_messages(remaining))
    await parts.run("stale registrations", remove_stale_registrations(remaining))
    kept = SweepRecord(audit=observed.before.audit)
    await parts.run("waiting jobs", audit_waiting_jobs(remaining), otherwise=kept)
    await parts.run("anomalies", _save(observed, parts.total().record, interval_s=interval_s))
    await parts.run("old records", _delete_old_records(context))
    unreadable = context.store.malformed_records.items()
    told = (f"the record {name} cannot be read: {why}; repair or delete it by hand" for name, why in unreadable)
    parts.add(RefreshResult(errors=tuple(told)))


async def _save(observed: Observed, record: SweepRecord, *, interval_s: float | None) -> RefreshResult:
    """Record what the parts have seen, and until when the next sweep must have run.

    Frequent sweeps write that time only if half of it has passed. Others write it always, which also proves that the
    store can be written to.
    """
    now, before = observed.context.clock.now(), observed.before
    due, pause = before.next_due_at, timedelta(seconds=sweep_pause_s(interval_s))
    is_recent = interval_s is not None and due is not None and now + pause / 2 <= due <= now + pause
    record = replace(
        record,
        next_due_at=due if is_recent else to_milliseconds(now + pause),
        # Two parts may see the same anomaly. In another order, the record would be another one.
        anomalies=tuple(sorted(set(record.anomalies), key=lambda item: item.key)),
        runs=tuple(sorted(record.runs, key=lambda item: (item.repository, item.run_id))),
    )
    if record != before:
        await observed.context.store.put_sweep_record(record)
    return RefreshResult()


async def _delete_old_records(context: Context) -> RefreshResult:
    return RefreshResult(deleted_records=await context.store.forget(context.clock.now()))
