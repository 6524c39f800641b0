"""Liveness of runner sets (D9 to D12): what must happen in the end, also after rare turns.

A configured set is served although it was removed, restored or changed before. A job that a spot interruption ended is
run again, or a true reason says why not. What an acknowledged message said is stored. Warm capacity is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, timedelta
from typing import TYPE_CHECKING

from remuda.domain.demand import JobEvent, JobEventKind
from remuda.domain.instance import State
from remuda.domain.resources import Reuse, Tier, UsageClass
from remuda.domain.runner_set import RunnerSet
from simulation.faults import Fault
from simulation.invariants import parse_runner
from simulation.loop import START
from simulation.memory.github import MemoryDemandJob
from simulation.patience_invariants import CONFIG_READ_S

if TYPE_CHECKING:
    from simulation.fake_machine import FakeMachine
    from simulation.world import SimulatedProcess, World

#: Seconds in which a set is served: the longest pause after failures, GitHub's time until a session ends, and a poll.
SERVED_WITHIN_S = 60.0 + 100.0 + 30.0
#: Seconds in which a configured set is there again after the set of its name was deleted, which its listener knows.
SERVED_AGAIN_S = 12.0
#: Seconds by which a set must have been configured again for a listener to know it when it deletes the set.
RESTORED_S = 5.0
#: Seconds in which a set that is not configured any more is deleted on GitHub after its last job and machine.
DELETED_WITHIN_S = 45.0
#: Seconds in which an idle machine is launched or its launch is tried again: a search, a pause, a boot.
FILLED_WITHIN_S = 20.0 + 60.0 + 150.0
#: Longest effect of a fault on the binding of a job in seconds: repeated reads of its run.
BOUND_WITHIN_S = 60.0
#: Seconds that a listener has at least to notice a spot notice before its machine ends.
NOTICED_WITHIN_S = 60.0
#: Faults by which GitHub does not tell of a job, refuses a re-run, or loses its answer.
_UNTOLD = frozenset(
    {
        Fault.EVENT_LOST,
        Fault.EVENT_LATE,
        Fault.COMPLETED_EARLY,
        Fault.SET_DELETED,
        Fault.ASSIGNMENT_LAPSES,
    }
)
#: States of the machines that a set has, or waits for.
_OF_SET = frozenset({State.CREATED, State.CLAIMED, State.RUNNING, State.RELEASING})


@dataclass(kw_only=True, eq=False, slots=True)
class _Interruption:
    job: MemoryDemandJob
    machine: FakeMachine
    noticed_at: float
    #: When the machine ended under the job; None if the job ended before. And whether its agent and a listener had time
    #: to notice it.
    lost_at: float | None = None
    had_time: bool = False
    #: Whether its record says so, and why it is not run again.
    is_noted: bool = False
    reason: str = ""


class DemandLiveness:
    def __init__(self, world: World) -> None:
        self._world = world
        #: Since when each configured set has not been served, and since when idle machines of a kind are missing.
        self._unserved_since: dict[str, float] = {}
        #: Since when each set on GitHub is neither configured nor used, by its id.
        self._unwanted_since: dict[int, float] = {}
        self._missing_since: dict[tuple[str, UsageClass, Tier], float] = {}
        self._interruptions: list[_Interruption] = []
        self.checks = 0

    def _violated(self, invariant: str, text: str) -> None:
        self._world.safety.violated(invariant, text)

    @property
    def _now(self) -> float:
        return self._world.loop.time()

    # D9: sets

    def deletes(self, runner_set: RunnerSet, process: SimulatedProcess) -> None:
        """A listener never deletes a set that is configured."""
        self.checks += 1
        demand = self._world.safety.demand
        found = next((item for item in demand.configured_sets if item.name == runner_set.name), None)
        if found is None or (found.scope, found.runner_group) != (runner_set.scope, runner_set.runner_group):
            return
        restored_s = self._now - demand.configured_at(runner_set.name)
        if restored_s > RESTORED_S and not process.pause_s:
            text = f"{process} deletes set {runner_set.name}, which has been configured for {restored_s:.0f} s"
            self._violated("D9", text)

    def _check_served(self, runner_set: RunnerSet) -> None:
        world, name = self._world, runner_set.name
        found = world.scale_sets.find(runner_set.scope, name)
        # GitHub does not change the labels of a set.
        can_be_served = found is None or set(found.labels) == set(runner_set.labels)
        if not can_be_served or (found is not None and found.sessions and found.capacity == runner_set.max):
            self._unserved_since.pop(name, None)
            return
        self.checks += 1
        deleted_at = world.safety.demand.deleted_at.get(name, -1e9)
        is_known = world.safety.patience.calm_since(name) < deleted_at
        if found is None and is_known and self._now - deleted_at > SERVED_AGAIN_S:
            text = f"set {name} does not exist {self._now - deleted_at:.0f} s after another one of its name"
            self._violated("D9", text)
        since = max(self._unserved_since.setdefault(name, self._now), world.safety.patience.calm_since(name))
        if self._now - since > SERVED_WITHIN_S:
            what = "does not exist" if found is None else f"has {len(found.sessions)} sessions for {found.capacity}"
            self._violated("D9", f"set {name} is configured, and {what} on GitHub")

    def _check_deleted(self) -> None:
        """A set that is not configured any more, in its scope, is deleted soon after its last use."""
        world = self._world
        configured = {(item.scope.lower(), item.name) for item in world.safety.demand.configured_sets}
        held = {item.runner_set for item in world.database.instances.values() if item.state in _OF_SET}
        for scale_set in world.scale_sets.sets.values():
            number, name = scale_set.scale_set_id, scale_set.name
            is_used = any(runner.job is not None for runner in world.scale_sets.runners_of(number))
            if (scale_set.scope.lower(), name) in configured or is_used or name in held:
                self._unwanted_since.pop(number, None)
                continue
            self.checks += 1
            since = max(self._unwanted_since.setdefault(number, self._now), world.safety.patience.calm_since(name))
            if self._now - since > DELETED_WITHIN_S:
                text = f"set {name} of {scale_set.scope} is not configured, and exists on GitHub"
                self._violated("D9", f"{text} {self._now - since:.0f} s after its last use")

    # D10: interrupted jobs

    def interrupted(self, machine: FakeMachine) -> None:
        job = machine.job
        if isinstance(job, MemoryDemandJob) and not any(item.job is job for item in self._interruptions):
            self._interruptions.append(_Interruption(job=job, machine=machine, noticed_at=self._now))

    def lost(self, machine: FakeMachine) -> None:
        """A machine ends under its job."""
        for item in self._interruptions:
            if item.job is machine.job and item.machine is machine:
                item.lost_at, item.had_time = self._now, self._had_time(item)

    def waiting_reruns(self) -> list[MemoryDemandJob]:
        """Interrupted jobs that a listener must still run again, or say why not."""
        return [item.job for item in self._interruptions if self._is_due(item) and not self._is_settled(item)]

    def _is_due(self, item: _Interruption) -> bool:
        """Whether the set ran interrupted jobs again all the time, and a listener could notice this one."""
        world, job = self._world, item.job
        if item.lost_at is None or job.conclusion in {"success", "succeeded", "cancelled", "canceled"}:
            return False
        since = item.noticed_at - CONFIG_READ_S
        configured = world.safety.demand.sets_since(job.set_name, since)
        if not configured or not all(known is not None and known.rerun_on_interruption for known in configured):
            return False
        queued_at = (job.queued_at - START).total_seconds()
        is_untold = any(world.faults.last_of.get(fault, -1e9) > queued_at for fault in _UNTOLD)
        return not is_untold and item.had_time

    def _had_time(self, item: _Interruption) -> bool:
        """Whether neither the agent nor a listener was stopped since the notice, and GitHub and the store answered.

        A process that is paused has its last fault at the end of the pause, which may be in the future.
        """
        listeners = [process for process in self._world.processes.values() if process.kind == "listener"]
        times = [max(process.started_at, process.last_fault_at) for process in listeners]
        times = [*times, item.noticed_at, self._world.disturbed_at(item.machine)]
        return self._now - max(times) >= NOTICED_WITHIN_S

    def _is_settled(self, item: _Interruption) -> bool:
        world, job = self._world, item.job
        run = world.github.runs.get((job.repository.lower(), int(job.run_id)))
        if world.safety.demand.restarted_at(int(job.run_id)) > (item.lost_at or 0.0):
            return True
        if run is None or not run.has_ended:
            return False
        return bool(item.reason) and self._is_true(item.reason, int(job.run_id))

    def _is_true(self, reason: str, run_id: int) -> bool:
        return reason != "it was run again once" or self._world.safety.demand.reruns_of(run_id) > 0

    def _note_reasons(self) -> None:
        """Note what the records say. They are deleted after a while."""
        for item in self._interruptions:
            record = self._world.database.jobs.get(item.job.key)
            if record is not None:
                item.is_noted = item.is_noted or record.interrupted_at is not None
                item.reason = record.rerun_detail or item.reason

    def check_reruns(self) -> None:
        self.checks += 1
        for item in self._interruptions:
            if self._is_due(item) and not self._is_settled(item):
                job, noted = item.job, "noted" if item.is_noted else "not noted"
                text = f"job {job.key} of run {job.run_id} was interrupted, which was {noted}, and is not run again"
                self._violated("D10", f"{text}: {item.reason or 'nobody says why'}")

    # D11: messages

    def acknowledged(self, process: SimulatedProcess, events: Iterable[JobEvent]) -> None:
        """What an acknowledged message says is stored: nobody gets it again."""
        for event in events:
            self.checks += 1
            record = self._world.database.jobs.get(event.job_id)
            is_known = record is not None and (
                (event.kind is not JobEventKind.STARTED or record.started_at is not None)
                and (event.kind is not JobEventKind.COMPLETED or record.completed_at is not None)
            )
            if event.job_id and not is_known and not (record is None and self._may_be_forgotten(event)):
                text = f"{process} acknowledges that job {event.job_id} is {event.kind}, and has not stored it"
                self._violated("D11", text)
            if event.kind is JobEventKind.STARTED:
                self._check_bound(process, event)

    def _check_bound(self, process: SimulatedProcess, event: JobEvent) -> None:
        """The machine of a started job knows its run. Faults of the last minute may have prevented its binding."""
        disturbed_at = max(self._world.faults.last_at, process.last_fault_at)
        found = parse_runner(event.runner_name)
        record = self._world.database.instances.get(found[1]) if found else None
        if not found or record is None or self._now - disturbed_at < BOUND_WITHIN_S:
            return
        self.checks += 1
        is_its = record.state is State.RUNNING and record.epoch == found[0] and bool(record.runner_set)
        if is_its and not record.is_bound:
            text = f"{process} acknowledges that job {event.job_id} has started, and {record.instance_id} is not bound"
            self._violated("D11", text)

    def _may_be_forgotten(self, event: JobEvent) -> bool:
        """Whether the record of the job may have expired: the answer to the acknowledgement can hang for minutes."""
        happened_at = event.finished_at or event.started_at or event.assigned_at
        keep_s = self._world.least("keep_records_s")
        return happened_at is not None and self._world.clock.now() - happened_at > timedelta(seconds=keep_s)

    # D12: warm capacity

    def claimed(self, kind: tuple[str, UsageClass, Tier]) -> None:
        """An idle machine of this kind has a user: another one takes its time."""
        self._missing_since.pop(kind, None)

    def _check_warm(self) -> None:
        world = self._world
        config = world.database.config
        if config is None or config.reuse is not Reuse.SAME_TRUST:
            return
        now, skew = world.clock.now(), world.max_skew
        wanted: dict[tuple[str, UsageClass, Tier], int] = {}
        for item in config.runner_sets:
            times = (now - skew - timedelta(seconds=1), now, now + skew + timedelta(seconds=1))
            warm = min(item.capacity_at(at, zone_of=lambda _: UTC).warm for at in times)
            kind = (item.resource_class, item.usage_class, item.trust)
            wanted[kind] = wanted.get(kind, 0) + warm
        for kind, count in wanted.items():
            self.checks += 1
            idle = sum(
                record.state is State.IDLE
                and record.retire_reason is None
                and (record.resource_class, record.usage_class, record.tier) == kind
                for record in world.database.instances.values()
            )
            is_full = world.safety.demand.is_full()
            if idle >= count or is_full or world.faults.last_at + FILLED_WITHIN_S > self._now:
                self._missing_since.pop(kind, None)
                continue
            since = max(
                self._missing_since.setdefault(kind, self._now),
                world.safety.patience.blind_until(),
                world.safety.demand.changed_at() + CONFIG_READ_S,
            )
            if self._now - since > FILLED_WITHIN_S:
                self._violated("D12", f"{idle} idle machines of {kind} for {self._now - since:.0f} s, {count} wanted")

    # Regularly

    def check(self) -> None:
        for runner_set in self._world.safety.demand.configured_sets:
            self._check_served(runner_set)
        self._check_deleted()
        self._check_warm()
        self._note_reasons()
