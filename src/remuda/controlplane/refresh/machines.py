"""Machines and runner registrations, which exist outside of the store."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta

from remuda.controlplane.context import skip_unreadable, transition, transition_all
from remuda.controlplane.ended import end_of
from remuda.controlplane.refresh.observe import Observed
from remuda.controlplane.refresh.result import RefreshResult, combined, for_each, seen
from remuda.domain.errors import Conflict
from remuda.domain.instance import ABSORBING, Instance, State
from remuda.domain.pool_config import parse_runner_name, stale_registration_reason
from remuda.domain.resources import UsageClass
from remuda.domain.sweep_record import Anomaly, AnomalyKind
from remuda.domain.timestamps import to_milliseconds
from remuda.domain.transitions import Actor, Confirm, End, RetireReason, tombstone
from remuda.ports.compute import ENDED, PROVISION_TAG, MachineState, MachineView
from remuda.ports.github import Deletion, GitHub, GitHubRunner


async def close_unmatched(observed: Observed) -> RefreshResult:
    """End records whose machine has ended, and write locked records for machines that have none."""
    machines = observed.machines
    if machines is None:
        return RefreshResult()
    known = {**observed.records, **observed.others}
    live = [item for item in known.values() if item.state not in ABSORBING]
    missing = [_missing(observed, item) for item in live if item.instance_id not in machines]
    unrecorded = [view for key, view in machines.items() if key not in known and key not in observed.unreadable]
    return combined(
        [
            seen(missing),
            await for_each(live, lambda item: _close_if_gone(observed, machines, item), name=_name),
            await for_each(unrecorded, lambda view: _tombstone_if_unrecorded(observed, view), name=_name),
        ]
    )


def _name(_: object) -> str:
    return "machines"


def _missing(observed: Observed, instance: Instance) -> Anomaly:
    return observed.sighting(AnomalyKind.MISSING, instance.instance_id)


def _is_gone(observed: Observed, instance: Instance, *, listed_at: datetime) -> bool:
    """Whether the machine is missing in two lists, a grace period apart, and was launched before the grace period.

    Compares with the time of the list, which shows nothing of what happened after it.
    """
    grace = timedelta(seconds=observed.config.lifetimes.missing_after_s)
    since = _missing(observed, instance).first_seen_at
    return listed_at - since >= grace and listed_at - instance.created_at >= grace


async def _close_if_gone(observed: Observed, machines: Mapping[str, MachineView], instance: Instance) -> RefreshResult:
    context, view = observed.context, machines.get(instance.instance_id)
    if view is not None and view.state not in ENDED:
        return RefreshResult()
    if view is None and not _is_gone(observed, instance, listed_at=observed.listed_at):
        return RefreshResult()
    event, why = end_of(view) if view else (End(reason=RetireReason.GONE), "the machine no longer exists")
    await transition(context, instance, event, by=Actor.REFRESH, why=why)
    return RefreshResult(retired={instance.instance_id: why})


async def _tombstone_if_unrecorded(observed: Observed, view: MachineView) -> RefreshResult:
    """Write a locked record for a machine that has none after a grace period; `terminate_machines` then ends it."""
    now = observed.context.clock.now()
    grace = timedelta(seconds=observed.config.lifetimes.unrecorded_grace_s)
    if view.state in ENDED or now - view.launched_at < grace:
        return RefreshResult()
    record = Instance(
        instance_id=view.instance_id,
        state=State.TERMINATING,
        epoch=1,
        threshold=to_milliseconds(now),
        resource_class="",
        instance_type=view.instance_type,
        usage_class=UsageClass.ON_DEMAND,
        cpu=0,
        memory_mib=0,
        created_at=to_milliseconds(view.launched_at),
        # All that is known of its launch. Whose it was stands in the record that was never written.
        claim=view.tags.get(PROVISION_TAG, ""),
        retire_reason=RetireReason.UNRECORDED,
    )
    why = "a machine of this pool without a record"
    await observed.context.store.apply(tombstone(record, by=Actor.REFRESH, now=now, why=why))
    observed.context.event_log.record(
        "tombstone", why, instance_id=view.instance_id, retire_reason=RetireReason.UNRECORDED
    )
    return RefreshResult(retired={view.instance_id: why})


async def terminate_machines(observed: Observed, *, also: Collection[str]) -> RefreshResult:
    """Terminate machines until EC2 confirms, including those that run although their record is terminated.

    `also` are the instances whose end this sweep has decided.
    """
    if observed.machines is None:
        return RefreshResult()
    context, known = observed.context, {**observed.records, **observed.others}
    revived = {
        key
        for key, view in observed.machines.items()
        if key in known and known[key].state is State.TERMINATED and view.state not in ENDED
    }
    ending = {key for key, item in known.items() if item.state is State.TERMINATING} | set(also)
    if not ending and not revived:
        return RefreshResult()
    errors: list[str] = []
    # The search may lag, so read the records by key before terminating a machine.
    records, _ = await skip_unreadable(context.store.get_many(sorted(ending | revived)), errors.append)
    unconfirmed = [item for key, item in records.items() if key in ending and item.state is State.TERMINATING]
    still_running = [key for key in sorted(revived) if key in records and records[key].state is State.TERMINATED]
    ids = [*sorted(item.instance_id for item in unconfirmed), *still_running]
    if not ids:
        return RefreshResult(errors=tuple(errors))
    for instance_id, why in (await context.compute.terminate(ids)).items():
        errors.append(f"{instance_id} could not be terminated: {why}")
    described_at = context.clock.now()
    views = await context.compute.describe(sorted(item.instance_id for item in unconfirmed))
    missing = [item for item in unconfirmed if item.instance_id not in views]
    ended = [
        item for item in unconfirmed if (view := views.get(item.instance_id)) and view.state is MachineState.TERMINATED
    ]
    ended += [item for item in missing if _is_gone(observed, item, listed_at=described_at)]
    return combined(
        [
            RefreshResult(errors=tuple(errors)),
            seen(_missing(observed, item) for item in missing),
            await _confirm(observed, ended),
        ]
    )


async def _confirm(observed: Observed, ended: list[Instance]) -> RefreshResult:
    event = Confirm(keep_records_s=observed.config.lifetimes.keep_records_s)
    why = "the machine has ended"
    results = await transition_all(observed.context, ended, event, by=Actor.REFRESH, why=why)
    failures = [error for error in results if error is not None and not isinstance(error, Conflict)]
    return RefreshResult(
        terminated=tuple(item.instance_id for item, error in zip(ended, results, strict=True) if error is None),
        errors=tuple(f"machines: {error.message}" for error in failures),
    )


# Registrations ------------------------------------------------------------------------------------------------------


async def remove_stale_registrations(observed: Observed) -> RefreshResult:
    """Remove stale registrations: runners with the pool's name prefix that no assignment owns.

    The search for live records may lag, so it can only show that a registration has an owner. The others are decided by
    their current records.
    """
    github = observed.context.github
    if github is None:
        return RefreshResult()
    ours = [
        (scope, runner, parsed[1])
        for scope, listed in observed.runners.items()
        for runner in listed
        if (parsed := parse_runner_name(observed.config.pool, runner.name)) is not None
    ]
    ours = [item for item in ours if not _has_owner(observed, item[1], observed.records.get(item[2]))]
    errors: list[str] = []
    read = observed.context.store.get_many({instance_id for _, _, instance_id in ours})
    records, unreadable = await skip_unreadable(read, errors.append)
    stale, anomalies = [], []
    for scope, runner, instance_id in ours:
        if instance_id in unreadable:
            continue
        record = records.get(instance_id)
        unrecorded = _unrecorded(observed, runner, instance_id) if record is None else None
        if unrecorded is not None:
            anomalies.append(unrecorded)
        if (why := _stale_reason(observed, runner, record, unrecorded)) is not None:
            stale.append((scope, runner, why))
    removed = await for_each(stale, lambda item: _remove(observed, github, *item), name=lambda _: "stale registrations")
    return combined([RefreshResult(errors=tuple(errors)), seen(anomalies), removed])


def _has_owner(observed: Observed, runner: GitHubRunner, record: Instance | None) -> bool:
    return record is not None and _stale_reason(observed, runner, record, None) is None


def _unrecorded(observed: Observed, runner: GitHubRunner, instance_id: str) -> Anomaly | None:
    """A registration without a record and a machine; None if it has a machine.

    An existing machine may get its record any moment; otherwise `close_unmatched` writes a tombstone.
    """
    anomaly = observed.sighting(AnomalyKind.STALE_REGISTRATION, runner.name)
    if observed.machines is None:
        return anomaly if observed.was_seen_before(anomaly) else None
    view = observed.machines.get(instance_id)
    return anomaly if view is None or view.state in ENDED else None


def _stale_reason(
    observed: Observed, runner: GitHubRunner, record: Instance | None, unrecorded: Anomaly | None
) -> str | None:
    return stale_registration_reason(
        runner.name,
        record,
        pool=observed.config.pool,
        # Without a list of machines it may have one.
        unrecorded_since=unrecorded.first_seen_at if unrecorded and observed.machines is not None else None,
        # Not the current time: the process may have been paused since the list was read.
        now=observed.listed_at,
        grace_s=observed.config.lifetimes.registration_stale_after_s,
    )


async def _remove(observed: Observed, github: GitHub, scope: str, runner: GitHubRunner, why: str) -> RefreshResult:
    deletion = await github.delete_runner(scope, runner.runner_id)
    observed.context.event_log.record("stale-registration", f"{why}: {deletion.value}", runner=runner.name, scope=scope)
    return RefreshResult(stale_registrations=() if deletion is Deletion.BUSY else (runner.name,))
