"""Invariants of completeness (L5, L6): work that a command must have done when it ends, even after a fault that it
survived.

A sweep, release or scale-down that met no fault leaves nothing undone that was due when it began. A failed or
cancelled provision gives back what it holds, unless it was killed or its rollback ran out of time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from remuda.domain.instance import Instance, State
from remuda.domain.provision import Provision, ProvisionStatus
from remuda.domain.resources import Reuse
from remuda.domain.signals import Report, Signal
from simulation.faults import Fault
from simulation.invariants import ABSORBING
from simulation.threshold_invariants import EXTENSION_S, PolicyHistory

if TYPE_CHECKING:
    from simulation.world import SimulatedProcess, World

Found = Iterable[tuple[str, str, str]]

HELD = frozenset({State.CREATED, State.CLAIMED, State.RUNNING})
#: Seconds that a rollback may take.
ROLLBACK_S = 10.0
#: Faults that a rollback survives: a write is repeated four times.
SURVIVED_FAULTS = 4
_RESET = frozenset({Signal.UD_REMOVE_REG_REMOVE_RUN_OK, Signal.UD_REMOVE_REG_REMOVE_RUN_FAILED})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Beginning:
    """The records when a command began, and the time by its clock."""

    at: datetime
    instances: dict[str, Instance]
    reports: dict[str, Report]
    provisions: dict[tuple[str, str], Provision]


@dataclass(kw_only=True, slots=True)
class _Rollback:
    """The beginning of a rollback, with the faults and pauses of its process until then."""

    at: float
    fault_count: int
    pause_s: float


class CompletenessInvariants:
    def __init__(self, world: World, policies: PolicyHistory) -> None:
        self._world = world
        self._policies = policies
        self._beginnings: dict[SimulatedProcess, _Beginning] = {}
        self._rollbacks: dict[SimulatedProcess, _Rollback] = {}

    def began(self, process: SimulatedProcess) -> None:
        if process.kind not in {"refresh", "release", "scale-down"}:
            return
        database = self._world.database
        self._beginnings[process] = _Beginning(
            at=self._wall(process),
            instances=dict(database.instances),
            reports=dict(database.reports),
            provisions=dict(database.provisions),
        )

    def rolls_back(self, process: SimulatedProcess) -> None:
        self._rollbacks[process] = _Rollback(
            at=self._world.loop.time(), fault_count=len(process.faults), pause_s=process.pause_s
        )

    def ended(self, process: SimulatedProcess) -> Found:
        beginning = self._beginnings.pop(process, None)
        task = process.task
        if process.dead or task is None or not task.done():
            return
        if process.kind == "provision" and (task.cancelled() or task.exception() is not None):
            yield from self._given_back(process)
        complete = process.is_undisturbed and not task.cancelled() and not task.exception()
        if beginning is None or not complete:
            return
        if process.kind == "refresh":
            for instance_id, record in beginning.instances.items():
                if self._world.database.instances.get(instance_id) is record:
                    yield from self._swept(record, beginning, process)
            yield from self._closed(beginning, process)
        elif process.kind == "scale-down":
            yield from self._kept_idle(beginning, process)
        else:
            yield from self._released(beginning, process)

    def _wall(self, process: SimulatedProcess) -> datetime:
        return self._world.clock.now() + timedelta(seconds=process.skew_s)

    # Sweeps

    def _swept(self, record: Instance, beginning: _Beginning, process: SimulatedProcess) -> Found:
        """A record that no one has changed since the sweep began has nothing due."""
        for text in self._due(record, beginning, process):
            yield "L6", f"{process} left {record.instance_id} {record.state}: {text}", record.instance_id

    def _due(self, record: Instance, beginning: _Beginning, process: SimulatedProcess) -> Iterable[str]:
        policies = [config.lifetimes for config in self._policies.may_have_read(process)]
        report = beginning.reports.get(record.instance_id)
        now, left = self._wall(process), record.threshold - beginning.at
        if record.state in ABSORBING or (record.runner_set and record.state is State.RUNNING):
            return
        margin = timedelta(seconds=max(limits.margin_s for limits in policies))
        if left <= -margin:
            yield f"its time was up at {record.threshold}"
            return
        provision = self._released_before(record, beginning)
        if record.state in HELD and provision is not None and record.threshold > now:
            yield f"provision {provision.provision_id} was released"
        is_held = record.quarantined_until is not None and record.quarantined_until > beginning.at
        if report is None:
            return
        if report.notice and record.retire_reason is None and record.threshold > now and not record.runner_set:
            yield "it has a spot notice"
        signal = report.signal if report.epoch == record.epoch else None
        if record.state is State.RELEASING and signal in _RESET and not is_held and record.threshold > now:
            yield f"it has signalled {signal}"
        latest = self._world.database.reports.get(record.instance_id)
        is_busy = report.busy and latest is not None and latest.busy
        if record.state is State.RELEASING and is_busy and record.run_deadline is not None:
            half = min(max(limits.release_time_s, EXTENSION_S) for limits in policies) / 2
            if left < timedelta(seconds=half) and record.threshold < record.run_deadline:
                yield f"its job may run until {record.run_deadline}"

    @staticmethod
    def _released_before(record: Instance, beginning: _Beginning) -> Provision | None:
        found = (item for item in beginning.provisions.values() if item.provision_id == record.provision_id)
        return next((item for item in found if item.status is ProvisionStatus.RELEASED), None)

    def _closed(self, beginning: _Beginning, process: SimulatedProcess) -> Found:
        margin = timedelta(seconds=max(config.lifetimes.margin_s for config in self._policies.may_have_read(process)))
        for key, provision in beginning.provisions.items():
            is_due = provision.status is not ProvisionStatus.RELEASED and provision.deadline <= beginning.at - margin
            if is_due and self._world.database.provisions.get(key) is provision and not provision.runner_set:
                yield "L6", f"{process} left {provision.provision_id} {provision.status} after its deadline", ""

    # Scale-down

    def _kept_idle(self, beginning: _Beginning, process: SimulatedProcess) -> Found:
        """As many idle instances of each class as asked for have their whole idle time again."""
        policies = self._policies.may_have_read(process)
        if len(policies) != 1 or policies[0].reuse is not Reuse.SAME_TRUST:
            # With the other policies, some idle instances fit no run, and need not be kept.
            return
        lifetimes, now = policies[0].lifetimes, self._world.database.instances
        idle_time = timedelta(seconds=lifetimes.idle_time_s)
        youngest = self._wall(process) + idle_time - timedelta(seconds=lifetimes.max_age_s)
        renewed_until = beginning.at + idle_time - 2 * self._world.max_skew
        idle = [item for item in beginning.instances.values() if item.state is State.IDLE and not item.retire_reason]
        for name in {item.resource_class for item in idle}:
            ours = [item for item in idle if item.resource_class == name]
            same = [item for item in ours if _is_still_idle(item, now.get(item.instance_id))]
            could = [item for item in same if item.created_at > youngest and item.threshold > self._wall(process)]
            wanted = min(process.idle_count - (len(ours) - len(same)), len(could))
            fresh = sum(
                item.state is State.IDLE and item.resource_class == name and item.threshold >= renewed_until
                for item in now.values()
            )
            if fresh < wanted:
                yield "L6", f"{process} keeps {fresh} instances of class {name} idle, not {wanted}", ""

    # Releases and rollbacks

    def _released(self, beginning: _Beginning, process: SimulatedProcess) -> Found:
        ours = {item.provision_id for item in beginning.provisions.values() if process.may_release(item)}
        now = self._wall(process)
        for instance_id, record in beginning.instances.items():
            unchanged = self._world.database.instances.get(instance_id) is record
            if unchanged and record.state in HELD and record.provision_id in ours and record.threshold > now:
                yield "L6", f"{process} left {instance_id} {record.state}", instance_id

    def _given_back(self, process: SimulatedProcess) -> Found:
        """A provision that failed holds nothing, unless its rollback was cut short."""
        # Without a rollback, everything since the start counts.
        rollback = self._rollbacks.get(process) or _Rollback(at=process.started_at, fault_count=0, pause_s=0.0)
        if self._is_cut_short(process, rollback):
            return
        for provision_id in process.provisions:
            provision = self._world.database.provisions.by_id(provision_id)
            if provision is not None and provision.status is not ProvisionStatus.RELEASED:
                yield "L5", f"{process} failed and left {provision_id} {provision.status}", ""
        for record in self._world.database.instances.values():
            alive = self._world.cloud.is_alive(record.instance_id) and record.threshold > self._wall(process)
            if record.state in HELD and record.provision_id in process.provisions and alive:
                yield "L5", f"{process} failed and still holds {record.instance_id}", record.instance_id

    def _is_cut_short(self, process: SimulatedProcess, rollback: _Rollback) -> bool:
        """Only the store and a pause may cut it short: GitHub and EC2 are not needed to give an instance back."""
        since = process.faults[rollback.fault_count :]
        is_over = self._world.loop.time() - rollback.at > ROLLBACK_S - 0.01 and Fault.SLOW_CALL in since
        return process.pause_s > rollback.pause_s or len(since) > SURVIVED_FAULTS or is_over


def _is_still_idle(before: Instance, after: Instance | None) -> bool:
    return after is not None and (after.state, after.epoch, after.retire_reason) == (State.IDLE, before.epoch, None)
