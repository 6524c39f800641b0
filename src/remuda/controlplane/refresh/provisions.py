"""Provisions that nobody finishes any more, and the instances that they still hold."""

from __future__ import annotations

from datetime import datetime, timedelta

from remuda.controlplane.context import Context, map_concurrently, skip_unreadable, transition
from remuda.controlplane.deregistration import removal_credential, remove_jit_registration
from remuda.controlplane.refresh.result import Tally
from remuda.domain.errors import Conflict, RemudaError
from remuda.domain.instance import ASSIGNED, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision, ProvisionStatus, released, settled
from remuda.domain.timestamps import after
from remuda.domain.transitions import Actor, End, Release, RetireReason

#: A released provision is looked at for so long after its deadline: a claim under way may come late.
SETTLE_AFTER_S = 60.0


class ProvisionSweep:
    def __init__(self, context: Context, config: PoolConfig, tally: Tally) -> None:
        self._context = context
        self._config = config
        self._tally = tally

    async def run(self) -> None:
        margin = timedelta(seconds=self._config.lifetimes.margin_s)
        unsettled = await self._context.store.unsettled_provisions(self._context.clock.now() - margin)
        for provision, result in zip(unsettled, await map_concurrently(unsettled, self._one), strict=True):
            if isinstance(result, RemudaError) and not isinstance(result, Conflict):
                self._tally.error(f"provision {provision.provision_id}: {result.message}")

    async def _one(self, provision: Provision) -> None:
        if provision.status is not ProvisionStatus.RELEASED:
            provision = await self._release(provision)
        found = await self._context.store.find_by_provision(provision.provision_id)
        ids = {*provision.instance_ids, *(instance.instance_id for instance in found)}
        records, unreadable = await skip_unreadable(self._context.store.get_many(ids), self._tally.error)
        held = [
            instance
            for instance in records.values()
            if instance.provision_id == provision.provision_id and instance.state in ASSIGNED
        ]
        for result in await map_concurrently(held, self._take_back):
            if isinstance(result, RemudaError) and not isinstance(result, Conflict):
                self._tally.error(f"provision {provision.provision_id}: {result.message}")
        now = self._context.clock.now()
        # One that cannot be read may be held, too.
        if not held and not unreadable and self._is_late(provision, now):
            forget_at = after(now, self._config.lifetimes.keep_records_s)
            await self._context.store.replace_provision(provision, settled(provision, forget_at=forget_at))

    async def _release(self, provision: Provision) -> Provision:
        opened = provision.status is ProvisionStatus.OPEN
        why = "its deadline passed before the commit" if opened else "nobody released it while its time lasted"
        closed = released(provision, now=self._context.clock.now(), why=why)
        await self._context.store.replace_provision(provision, closed)
        self._context.event_log.record("provision-closed", closed.why, run_id=provision.run_id)
        return closed

    def _is_late(self, provision: Provision, now: datetime) -> bool:
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
        self._tally.rolled_back.append(instance.instance_id)
        if isinstance(event, End):
            self._tally.retired[instance.instance_id] = why
