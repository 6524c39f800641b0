"""Sweep of runner sets: finishes what their listener would do, so that machines return even without one."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from remuda.controlplane.context import map_concurrently, transition
from remuda.controlplane.reconcile import binding_of_unknown_job, leave
from remuda.controlplane.refresh.machines import PartialSweep
from remuda.domain.decide.next_step import Leave, leave_holder
from remuda.domain.errors import Conflict, RemudaError
from remuda.domain.instance import Instance, State
from remuda.domain.resources import Tier
from remuda.domain.signals import Report
from remuda.domain.transitions import Actor

#: A job that no listener has recorded is bound if it was seen before and its runner expires within this many seconds,
#: which is more than the time to the next sweep.
BIND_BEFORE_S = 600.0


class RunnerSetSweep(PartialSweep):
    """Releases runners whose job has ended, and binds jobs that would end with the listening time."""

    async def run(self, records: Mapping[str, Instance], reports: Mapping[str, Report]) -> frozenset[str]:
        """Return the ids of the instances that were changed."""
        running = [item for item in records.values() if item.state is State.RUNNING and item.runner_set]
        changed: set[str] = set()

        async def one(instance: Instance) -> None:
            report = reports.get(instance.instance_id)
            if report is not None and await self._advance(instance, report):
                changed.add(instance.instance_id)

        for instance, result in zip(running, await map_concurrently(running, one), strict=True):
            if isinstance(result, RemudaError) and not isinstance(result, Conflict):
                self._result.error(f"{instance.instance_id}: {result.message}")
        return frozenset(changed)

    async def _advance(self, instance: Instance, report: Report) -> bool:
        now = self._context.clock.now()
        if report.spent_epoch == instance.epoch:
            # Give the listener, or GitHub's message, the time of a sweep.
            if not instance.is_bound and not self._seen_before("spent", instance):
                return False
            if not instance.is_bound:
                instance = await self._bind(instance, report)
            return await self._release(instance, report)
        if report.busy and not instance.is_bound and self._is_binding_due(instance, now):
            await self._bind(instance, report)
            return True
        return False

    async def _release(self, instance: Instance, report: Report) -> bool:
        context, config, leaving = self._context, self._config, leave_holder(instance, report)
        if not isinstance(leaving, Leave):
            return False
        after = await leave(context, config, instance, leaving, by=Actor.REFRESH, why="its job has ended")
        return after is not None

    def _is_binding_due(self, instance: Instance, now: datetime) -> bool:
        margin = timedelta(seconds=self._config.lifetimes.margin_s)
        if instance.threshold <= now - margin:
            # Too late for a new time limit; the report protects the job until the one that the runner began with.
            return False
        lead = timedelta(seconds=BIND_BEFORE_S)
        return instance.threshold <= now + margin or (
            self._seen_before("unbound-job", instance) and instance.threshold <= now + lead
        )

    def _seen_before(self, anomaly: str, instance: Instance) -> bool:
        return self._first_seen.was_seen_before(f"{anomaly}:{instance.instance_id}:{instance.epoch}")

    async def _bind(self, instance: Instance, report: Report) -> Instance:
        runner_set = self._config.find_set(instance.runner_set)
        set_tier = runner_set.trust if runner_set else Tier.TRUSTED
        event = binding_of_unknown_job(self._config, report, set_tier=set_tier)
        why = "it has a job, and no listener has recorded it"
        return await transition(self._context, instance, event, by=Actor.REFRESH, why=why)
