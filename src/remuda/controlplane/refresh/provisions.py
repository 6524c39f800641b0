"""Sweep of provisions: releases those past their deadline and takes back the instances of released ones."""

from __future__ import annotations

from datetime import datetime, timedelta

from remuda.controlplane.context import Context, map_concurrently, skip_unreadable, transition
from remuda.controlplane.deregistration import removal_credential, remove_jit_registration
from remuda.controlplane.refresh.result import RefreshResultBuilder
from remuda.domain.errors import Conflict, RemudaError
from remuda.domain.instance import ASSIGNED, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision, ProvisionStatus, released, settled
from remuda.domain.timestamps import after
from remuda.domain.transitions import Actor, End, Release, RetireReason

#: Seconds after its deadline until a released provision is settled: a claim in progress may be applied late.
SETTLE_AFTER_S = 60.0


class ProvisionSweep:
    def __init__(self, context: Context, config: PoolConfig, result: RefreshResultBuilder) -> None:
        self._context = context
        self._config = config
        self._result = result

    async def run(self) -> None:
        margin = timedelta(seconds=self._config.lifetimes.margin_s)
        unsettled = await self._context.store.unsettled_provisions(self._context.clock.now() - margin)
        for provision, result in zip(unsettled, await map_concurrently(unsettled, self._settle), strict=True):
            self._report(provision, result)

    async def _settle(self, provision: Provision) -> None:
        if provision.status is not ProvisionStatus.RELEASED:
            provision = await self._release(provision)
        found = await self._context.store.find_by_provision(provision.provision_id)
        ids = {*provision.instance_ids, *(instance.instance_id for instance in found)}
        records, unreadable = await skip_unreadable(self._context.store.get_many(ids), self._result.error)
        assigned = [
            instance
            for instance in records.values()
            if instance.provision_id == provision.provision_id and instance.state in ASSIGNED
        ]
        for result in await map_concurrently(assigned, self._take_back):
            self._report(provision, result)
        now = self._context.clock.now()
        # An unreadable instance may still be assigned.
        if not assigned and not unreadable and self._may_settle(provision, now):
            forget_at = after(now, self._config.lifetimes.keep_records_s)
            await self._context.store.replace_provision(provision, settled(provision, forget_at=forget_at))

    def _report(self, provision: Provision, result: RemudaError | None) -> None:
        if isinstance(result, RemudaError) and not isinstance(result, Conflict):
            self._result.error(f"provision {provision.provision_id}: {result.message}")

    async def _release(self, provision: Provision) -> Provision:
        was_open = provision.status is ProvisionStatus.OPEN
        why = "its deadline passed before the commit" if was_open else "it was not released before its deadline"
        closed = released(provision, now=self._context.clock.now(), why=why)
        await self._context.store.replace_provision(provision, closed)
        self._context.event_log.record("provision-closed", closed.why, run_id=provision.run_id)
        return closed

    def _may_settle(self, provision: Provision, now: datetime) -> bool:
        latest = max(provision.deadline, provision.released_at or provision.deadline)
        return now - latest >= timedelta(seconds=SETTLE_AFTER_S + self._config.lifetimes.margin_s)

    async def _take_back(self, instance: Instance) -> None:
        why = "its provision was released"
        event: End | Release
        if instance.state is State.CREATED:
            event = End(reason=RetireReason.RELEASED)
        else:
            credential = await removal_credential(self._context, self._config, instance.scope)
            event = Release(
                release_time_s=self._config.lifetimes.release_time_s,
                credential=credential,
                deregistered=await remove_jit_registration(self._context, instance),
            )
        await transition(self._context, instance, event, by=Actor.REFRESH, why=why)
        self._result.rolled_back.append(instance.instance_id)
        if isinstance(event, End):
            self._result.retired[instance.instance_id] = why
