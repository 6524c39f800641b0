"""Provisions past their deadline, and instances of released ones."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from remuda.controlplane.context import Context, skip_unreadable
from remuda.controlplane.reconcile import leave
from remuda.controlplane.refresh.result import RefreshResult, combined, for_each
from remuda.domain.decide.next_step import leave_holder
from remuda.domain.instance import ABSORBING, ASSIGNED, Instance
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision, ProvisionStatus, lost_instances, released, settled
from remuda.domain.timestamps import after
from remuda.domain.transitions import Actor

#: Seconds after its deadline until a released provision is settled: a claim in progress may be applied late.
SETTLE_AFTER_S = 60.0


async def settle_provisions(context: Context, config: PoolConfig) -> RefreshResult:
    """Release provisions past their deadline and take back the instances of released ones."""
    margin = timedelta(seconds=config.lifetimes.margin_s)
    unsettled = await context.store.unsettled_provisions(context.clock.now() - margin)
    return await for_each(unsettled, lambda item: settle(context, config, item), name=_name)


async def settle(context: Context, config: PoolConfig, provision: Provision) -> RefreshResult:
    """Release a provision and take back its instances; settle it as soon as it holds none."""
    if provision.status is not ProvisionStatus.RELEASED:
        provision = await _release(context, provision)
    if provision.runner_set:
        # The record of an acquisition that its listener did not end. Its instances are held by the set.
        await _settle(context, config, provision)
        return RefreshResult()
    found = await context.store.find_by_provision(provision.provision_id)
    ids = {*provision.instance_ids, *(instance.instance_id for instance in found)}
    errors: list[str] = []
    records, unreadable = await skip_unreadable(context.store.get_many(ids), errors.append)
    assigned = [
        instance
        for instance in records.values()
        if instance.provision_id == provision.provision_id and instance.state in ASSIGNED
    ]
    why = f"its provision was released: {provision.why}" if provision.why else "its provision was released"
    taken = await for_each(
        assigned, lambda item: _take_back(context, config, item, why), name=lambda _: _name(provision)
    )
    now = context.clock.now()
    # An unreadable instance may still be assigned.
    if not assigned and not unreadable and _may_settle(config, provision, now):
        await _settle(context, config, provision, lost=lost_instances(provision, records))
    return combined([taken, RefreshResult(errors=tuple(errors))])


async def _settle(context: Context, config: PoolConfig, provision: Provision, *, lost: tuple[str, ...] = ()) -> None:
    forget_at = after(context.clock.now(), config.lifetimes.keep_records_s)
    await context.store.replace_provision(provision, settled(provision, forget_at=forget_at, lost=lost))


def _name(provision: Provision) -> str:
    return f"provision {provision.provision_id}"


async def _release(context: Context, provision: Provision) -> Provision:
    was_open = provision.status is ProvisionStatus.OPEN
    why = "its deadline passed before the commit" if was_open else "it was not released before its deadline"
    closed = released(provision, now=context.clock.now(), why=why)
    await context.store.replace_provision(provision, closed)
    context.event_log.record("provision-closed", closed.why, run_id=provision.subject)
    return closed


def _may_settle(config: PoolConfig, provision: Provision, now: datetime) -> bool:
    latest = max(provision.deadline, provision.released_at or provision.deadline)
    return now - latest >= timedelta(seconds=SETTLE_AFTER_S + config.lifetimes.margin_s)


async def _take_back(context: Context, config: PoolConfig, instance: Instance, why: str) -> RefreshResult:
    leaving = leave_holder(instance)
    if leaving is None:
        return RefreshResult()
    left = await leave(context, config, instance, leaving, by=Actor.REFRESH, why=why)
    taken = RefreshResult(rolled_back=(instance.instance_id,))
    return replace(taken, retired={instance.instance_id: why}) if left.state in ABSORBING else taken
