"""Invariants of runner sets (D1 to D8), and what S2 and S11 mean for their machines.

As the other checks, these use the true state of GitHub and of the machines, not the demand and job records.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from remuda.controlplane.operator import OperatorAction
from remuda.domain.instance import Instance, State, decide_retirement
from remuda.domain.pool_config import PoolConfig
from remuda.domain.runner_set import RunnerSet
from remuda.ports.compute import POOL_TAG, LaunchRequest
from simulation.demand_liveness import DemandLiveness
from simulation.faults import Fault
from simulation.invariants import ABSORBING, parse_runner
from simulation.loop import START
from simulation.memory.github import MemoryDemandJob, MemoryRunner

if TYPE_CHECKING:
    from simulation.fake_machine import FakeMachine
    from simulation.world import SimulatedProcess, World

Found = Iterable[tuple[str, str]]

#: States in which a machine counts for its set.
HELD = frozenset({State.CREATED, State.CLAIMED, State.RUNNING})
#: Faults that end machines and do nothing else.
_LOSSES = frozenset({Fault.POWER_CUT})
#: Seconds from the end of a job in which its machine counts as returning: less than the control plane waits for it.
RETURNS_S = 15.0
#: Seconds from the decision to launch to the call.
DECIDED_S = 1.0
#: Seconds of a reconciliation: reads, writes and calls.
RECONCILE_S = 30.0
#: Seconds after a change of the configuration in which a listener may still use the former one.
CONFIG_READ_S = 90.0
#: Seconds for which a pool counts as full after it was.
FULL_S = 30.0
#: Longest effect of a fault in seconds: a call that hangs, statistics that are wrong, a machine that never boots.
FAULT_EFFECT_S = 300.0


class DemandInvariants:
    def __init__(self, world: World) -> None:
        self._world = world
        #: Sets of each configuration, with the time from which it applied.
        self._sets: list[tuple[float, tuple[RunnerSet, ...]]] = []
        #: Job that ran on each instance and epoch.
        self._jobs: dict[tuple[str, int], MemoryDemandJob] = {}
        #: Times since which a set has had too many machines, and at which sets and the pool were seen without room.
        self._above_max_since: dict[str, float] = {}
        self._full_at: dict[str, float] = {}
        self._pool_full_at = 0.0
        self._fills = any(window.warm for sets in world.plan.runner_sets for item in sets for window in item.windows)
        #: Names of the jobs of each run whose machine got a spot notice.
        self._interrupted: dict[int, set[str]] = {}
        #: When each process read that a run has ended, when runs were started again, and re-runs that were requested.
        self._read_end_at: dict[tuple[str, int], float] = {}
        self._restarted_at: dict[int, float] = {}
        self._reruns: Counter[int] = Counter()
        self.liveness = DemandLiveness(world)
        #: When GitHub or a listener last deleted each set.
        self.deleted_at: dict[str, float] = {}
        self.checks = 0

    def _violated(self, invariant: str, text: str, instance_id: str = "") -> None:
        self._world.safety.violated(invariant, text, instance_id)

    # Configuration

    def configured(self, config: PoolConfig) -> None:
        if not self._sets or self._sets[-1][1] != config.runner_sets:
            self._sets.append((self._world.loop.time(), config.runner_sets))

    @property
    def configured_sets(self) -> tuple[RunnerSet, ...]:
        return self._sets[-1][1] if self._sets else ()

    def configured_at(self, name: str) -> float:
        """The time since which a set has been configured as it is now, or has not been."""
        since = self._sets[-1][0] if self._sets else 0.0
        present = [item for item in self.configured_sets if item.name == name]
        for at, sets in reversed(self._sets):
            if [item for item in sets if item.name == name] != present:
                break
            since = at
        return since

    def changed_at(self) -> float:
        """When the configuration of the sets was changed last."""
        return self._sets[-1][0] if self._sets else 0.0

    def sets_since(self, name: str, since: float) -> list[RunnerSet | None]:
        """The set in every configuration that applied at or after a time; None where it was missing."""
        until = [*(at for at, _ in self._sets[1:]), float("inf")]
        return [
            next((item for item in sets if item.name == name), None)
            for (_, sets), end in zip(self._sets, until, strict=True)
            if end >= since
        ]

    def restarted_at(self, run_id: int) -> float:
        return self._restarted_at.get(run_id, -1e9)

    def reruns_of(self, run_id: int) -> int:
        return self._reruns[run_id]

    def is_full(self) -> bool:
        """Whether the pool had no room for another machine a moment ago."""
        return self._world.loop.time() - self._pool_full_at < FULL_S

    def _recent(self, name: str, since: float) -> list[RunnerSet]:
        """The set in every configuration that applied at or after a time."""
        until = [*(at for at, _ in self._sets[1:]), float("inf")]
        return [
            item
            for (_, sets), end in zip(self._sets, until, strict=True)
            if end >= since
            for item in sets
            if item.name == name
        ]

    def known_set(self, name: str) -> RunnerSet | None:
        """The set as it was configured last, even if it was removed since."""
        found = [item for _, sets in self._sets for item in sets if item.name == name]
        return found[-1] if found else None

    # D6

    def polled(self, process: SimulatedProcess, name: str, capacity: int) -> None:
        """A poll announces the set's maximum, never 0."""
        self.checks += 1
        known = self._recent(name, self._world.loop.time() - CONFIG_READ_S - process.pause_s)
        # A removed set is drained under its last maximum, or under 1.
        allowed = {item.max for item in known} or {item.max for _, sets in self._sets for item in sets} | {1}
        is_disturbed = self._world.loop.time() - process.last_fault_at < CONFIG_READ_S
        if capacity < 1 or (capacity not in allowed and not is_disturbed):
            self._violated("D6", f"{process} announces {capacity} runners of set {name}, not {sorted(allowed)}")

    # Jobs: S2, D4

    def job_starts(self, job: MemoryDemandJob, machine: FakeMachine) -> None:
        self.checks += 1
        instance_id = machine.instance_id
        record = self._world.database.instances.get(instance_id)
        if record is None:
            self._violated("S2", f"a job runs on {instance_id}, which has no record", instance_id)
            return
        epoch = self._epoch_of(machine)
        holder = f"{record.state} for set {record.runner_set!r} at epoch {record.epoch}"
        if (
            record.runner_set != job.set_name
            or record.epoch != epoch
            or record.state
            not in {
                State.RUNNING,
                State.RELEASING,
            }
        ):
            self._violated("S2", f"a job of set {job.set_name} runs on {instance_id}, which is {holder}", instance_id)
        if (instance_id, epoch) in self._jobs:
            self._violated("D4", f"a second job runs on {instance_id} at epoch {epoch}", instance_id)
        self._jobs[instance_id, epoch] = job
        if machine.notice:
            self.interrupted(machine)

    def job_of(self, record: Instance) -> MemoryDemandJob | None:
        """The job that has started on an instance in its epoch."""
        return self._jobs.get((record.instance_id, record.epoch))

    # Re-runs: D7

    def interrupted(self, machine: FakeMachine) -> None:
        """A machine got a spot notice."""
        self.liveness.interrupted(machine)
        if isinstance(machine.job, MemoryDemandJob):
            self._interrupted.setdefault(int(machine.job.run_id), set()).add(machine.job.name)

    def read_end(self, process: SimulatedProcess, run_id: int) -> None:
        self._read_end_at[process.name, run_id] = self._world.loop.time()

    def run_restarted(self, run_id: int) -> None:
        self._restarted_at[run_id] = self._world.loop.time()

    def rerun_requested(self, process: SimulatedProcess, run_id: int, *, has_ended: bool) -> None:
        self.checks += 1
        # GitHub refuses a call for a run that has not ended.
        self._reruns[run_id] += has_ended
        read_at = self._read_end_at.get((process.name, run_id))
        # Somebody else may have run it again since.
        if read_at is None or (not has_ended and self._restarted_at.get(run_id, -1.0) < read_at):
            self._violated("D7", f"{process} runs run {run_id} again, which has not ended")
        jobs = self._interrupted.get(run_id, set())
        if self._reruns[run_id] > len(jobs):
            lost = ", ".join(sorted(jobs)) or "none"
            self._violated(
                "D7", f"{process} runs run {run_id} again for the {self._reruns[run_id]}. time; lost: {lost}"
            )

    # Records: D2

    def equipped(self, before: Instance, after: Instance) -> Found:
        """A runner may start only with a registration of its epoch, which was made for its set."""
        self.checks += 1
        held = after.assignment
        if held is None or parse_runner(held.runner_name) != (after.epoch, after.instance_id) or not held.runner_id:
            yield "S4", f"running with the registration {held and held.runner_name}"
            return
        runner = self._world.github.runners.get(held.runner_id)
        if runner is not None and runner.name != held.runner_name:
            yield "S4", f"running with the registration of {runner.name}"
        if before.runner_set != after.runner_set:
            yield "S1", f"set {before.runner_set!r} became {after.runner_set!r}"

    def changed_while_running(self, before: Instance, after: Instance) -> Found:
        """A runner of a set is renewed while it listens, and bound once, to a job that has started on it."""
        self.checks += 1
        if before.holder == after.holder:
            if before.is_bound:
                yield "S6", "the threshold of a runner with a job was changed"
            elif after.threshold < before.threshold:
                yield "D2", "the time of a listening runner was shortened"
            return
        job = self.job_of(after)
        if before.is_bound:
            yield "S1", f"run {before.run_id!r} became {after.run_id!r}"
        elif job is None:
            yield "S2", f"bound to run {after.run_id}, but no job has started on it"
        elif after.run_id not in {job.run_id, ""}:
            yield "S2", f"bound to run {after.run_id}, but its job is of run {job.run_id}"
        elif job.is_fork and after.tier.value == "trusted":
            yield "S11", f"bound as trusted, but its job is of a fork (run {job.run_id})"

    def released(self, before: Instance, process: SimulatedProcess) -> Found:
        """A runner that has or may get a job is not released before its time."""
        self.checks += 1
        machine = self._world.machines[before.instance_id]
        if not machine.alive or self._is_past(before.deadline(busy=True)):
            return
        if machine.job is not None:
            yield "D2", f"{process} released it while a job of run {machine.job.run_id} runs"
        elif (runner := self._online(before)) is not None:
            yield "D2", f"{process} released it while {runner.name} listens and can get a job"

    def ended(self, before: Instance, process: SimulatedProcess) -> Found:
        """A machine with a job that no one has recorded is not terminated before the time of such a job is over."""
        self.checks += 1
        machine = self._world.machines[before.instance_id]
        if machine.job is None or before.is_bound or before.run_deadline is None or self._is_lost(machine):
            return
        if process.action is not OperatorAction.TERMINATE and not self._is_past(before.run_deadline):
            yield "D2", f"{process} ended it while a job of run {machine.job.run_id} runs"

    def ends_itself(self, record: Instance, machine: FakeMachine) -> Found:
        """An agent knows of the job on its machine, whether or not anybody has recorded it."""
        self.checks += 1
        if record.state is not State.RUNNING or not record.runner_set or machine.job is None:
            return
        if not self._is_past(record.deadline(busy=True)):
            yield "D2", f"ends itself while a job of run {machine.job.run_id} runs"

    def _online(self, record: Instance) -> MemoryRunner | None:
        """The registration by which GitHub can give the instance a job."""
        found = self._world.registrations(record.instance_id)
        return next((runner for runner in found if runner.take is not None and runner.scale_set_id), None)

    def _is_past(self, at: datetime) -> bool:
        safety = self._world.safety
        return self._world.clock.now() >= at + safety.margin - safety.tolerance

    def _is_lost(self, machine: FakeMachine) -> bool:
        """Whether a fault may have kept the machine from reporting its job."""
        since = max(self._world.disturbed_at(machine), self._world.faults.last_at)
        return not machine.alive or self._world.loop.time() - since < FAULT_EFFECT_S

    def acquired(self, after: Instance) -> Found:
        """Without faults, a listener does not even take one machine too many."""
        self.checks += 1
        runner_set = self.known_set(after.runner_set)
        now = self._world.loop.time()
        max_age = timedelta(seconds=self._world.most("max_age_s"))
        self._world.safety.patience.acquired(after)
        self._world.safety.pauses.acquired(after)
        if runner_set is None or self._fills or now < max(self.quiet_since(), self._sets[-1][0] + CONFIG_READ_S):
            return
        count = sum(
            record.runner_set == runner_set.name
            and record.state in HELD
            and not self._world.machines[record.instance_id].state().spent
            and record.deadline(busy=True) > self._world.clock.now() + self._world.safety.tolerance
            # One that is too old is replaced in the moment in which it is given up.
            and self._world.clock.now() + self._world.safety.tolerance < record.created_at + max_age
            for record in self._world.database.instances.values()
        )
        if count > runner_set.max:
            yield "D3", f"it is the {count}th runner of set {runner_set.name}, and at most {runner_set.max} are allowed"

    # Launches: D8

    def launch_requested(self, request: LaunchRequest, process: SimulatedProcess) -> None:
        """No machine is launched for a lost job, or for one that a returning machine can serve sooner.

        Other faults than the loss of machines may hide either from the listener, and another set may take the machine.
        """
        world = self._world
        runner_set = self._set_of(request)
        if runner_set is not None:
            world.safety.patience.launch_began(runner_set.name)
        is_alone = len({item.name for _, sets in self._sets for item in sets}) == 1
        if runner_set is None or self._fills or not is_alone or not _LOSSES.issuperset(world.faults.counts):
            return
        self.checks += 1
        # The job for which it was decided may have been cancelled just now.
        decided_at = world.clock.now() - timedelta(seconds=DECIDED_S)
        cancelled = [
            job
            for job in world.scale_sets.jobs
            if job.ended_at is not None and job.ended_at > decided_at and job.started_at is None
        ]
        waiting = [*world.scale_sets.open_jobs, *cancelled]
        jobs = [job for job in waiting if self._waits_for(job, runner_set) and job.fails_at is None]
        hot = max((window.hot for window in runner_set.windows), default=0)
        supply, returning = self.supply(runner_set.name), self._returning(runner_set.name)
        if len(supply) + len(returning) + request.count > len(jobs) + hot:
            have = f"{len(jobs)} jobs, {hot} hot runners and {len(supply)} machines, and {len(returning)} return"
            text = f"{process} launches {request.count} machines for set {runner_set.name}, which has {have}"
            self._violated("D8", text)

    def launch_failed(self, request: LaunchRequest) -> None:
        runner_set = self._set_of(request)
        if runner_set is not None and not self._fills:
            self._world.safety.patience.launch_failed(runner_set.name)

    def _set_of(self, request: LaunchRequest) -> RunnerSet | None:
        provision = self._world.database.provisions.by_id(request.provision_id)
        return self.known_set(provision.runner_set) if provision is not None and provision.runner_set else None

    def _returning(self, name: str) -> list[Instance]:
        """Machines whose job has just ended, and that may be used again."""
        world = self._world
        since, soon = world.loop.time() - RETURNS_S, world.clock.now() + timedelta(seconds=RETURNS_S)
        max_age_s, max_uses = world.most("max_age_s"), int(world.most("max_uses"))
        return [
            record
            for record in self._world.database.instances.values()
            if record.runner_set == name
            and record.state in {State.RUNNING, State.RELEASING}
            and record.is_bound
            and decide_retirement(record, now=soon, max_age_s=max_age_s, max_uses=max_uses) is None
            and (machine := self._world.machines[record.instance_id]).alive
            and machine.job is None
            and not machine.notice
            and since < machine.job_ended_at < world.loop.time() - DECIDED_S
            and (record.instance_id, record.epoch) in self._jobs
        ]

    # D1 and D3, checked regularly

    def check(self) -> None:
        world = self._world
        now = world.loop.time()
        live = sum(
            world.cloud.is_alive(key)
            for key, machine in world.cloud.machines.items()
            if machine.tags.get(POOL_TAG) == world.pool_name
        )
        recorded = sum(record.state not in ABSORBING for record in world.database.instances.values())
        if max(live, recorded) >= world.max_instances:
            self._pool_full_at = now
        for runner_set in self.configured_sets:
            self._check_waiting(runner_set, now)
            self._check_supply(runner_set, now)
        self.liveness.check()

    def quiet_since(self) -> float:
        """Time since which no fault has had an effect."""
        faults = self._world.faults
        return faults.last_at + FAULT_EFFECT_S if faults.last_at > 0 else 0.0

    def waits_s(self) -> float:
        """Seconds within which some machine of a set must listen: boot deadline, one poll, reconciliation."""
        return self._world.most("provision_timeout_s") + self._world.scale_sets.poll_s + RECONCILE_S

    def _check_waiting(self, runner_set: RunnerSet, now: float) -> None:
        self.checks += 1
        world = self._world
        sets = world.scale_sets
        found = sets.find(runner_set.scope, runner_set.name)
        if found is not None and set(found.labels) != set(runner_set.labels):
            # GitHub does not change the labels of a set.
            self._full_at[runner_set.name] = now
            return
        jobs = [job for job in sets.open_jobs if self._waits_for(job, runner_set)]
        held = [job for job in jobs if job.runner_name]
        if len(held) >= runner_set.max:
            self._full_at[runner_set.name] = now
        waiting = [job for job in jobs if not job.runner_name and not job.is_stranded]
        if not waiting:
            return
        assigned = [job for job in waiting if job.set_id]
        if not assigned and found is not None and len(held) + len(assigned) >= (found.capacity or 0) > 0:
            return
        first = min(assigned or waiting, key=lambda job: job.assigned_at or job.waits_until)
        since = max(
            ((first.assigned_at or first.waits_until) - START).total_seconds(),
            self._full_at.get(runner_set.name, 0.0),
            self._pool_full_at,
            self._sets[-1][0],
            self.quiet_since(),
        )
        if now - since > self.waits_s():
            what = "assigned" if assigned else "waiting"
            self._violated("D1", f"job {first.key} of set {runner_set.name} has been {what} for {now - since:.0f} s")

    @staticmethod
    def _waits_for(job: MemoryDemandJob, runner_set: RunnerSet) -> bool:
        return job.set_name == runner_set.name if job.set_id else runner_set.serves(job.labels)

    def _check_supply(self, runner_set: RunnerSet, now: float) -> None:
        self.checks += 1
        count = len(self.supply(runner_set.name))
        limit = max(runner_set.max, len(self._busy(runner_set.name)))
        if count <= limit:
            self._above_max_since.pop(runner_set.name, None)
            return
        since = max(self._above_max_since.setdefault(runner_set.name, now), self._sets[-1][0], self.quiet_since())
        grace_s = self._world.most("surplus_grace_s") + self._world.scale_sets.poll_s + RECONCILE_S
        if now - since > grace_s:
            self._violated("D3", f"set {runner_set.name} has {count} runners, and at most {runner_set.max} are allowed")

    def supply(self, name: str) -> list[Instance]:
        """Machines of a set that have, or may get, a job, and whose time is not over."""
        found = []
        now = self._world.clock.now() + self._world.safety.tolerance
        for record in self._world.database.instances.values():
            machine = self._world.machines.get(record.instance_id)
            if record.runner_set != name or record.state not in HELD or machine is None or not machine.alive:
                continue
            if record.deadline(busy=True) <= now:
                # A sweep ends it.
                continue
            if record.state is State.RUNNING and self._online(record) is None and machine.job is None:
                continue
            if record.state is State.CREATED and self._fills:
                # It may be for the pool.
                continue
            found.append(record)
        return found

    def _busy(self, name: str) -> list[Instance]:
        return [record for record in self.supply(name) if self._world.machines[record.instance_id].job is not None]

    def _epoch_of(self, machine: FakeMachine) -> int:
        parsed = parse_runner(machine.state().registered_as)
        return parsed[0] if parsed else 0

    # D5

    def open_jobs(self) -> list[MemoryDemandJob]:
        """Jobs that some configured set must still run."""
        served = self.configured_sets
        return [
            job
            for job in self._world.scale_sets.open_jobs
            if job.runner_name or any(item.serves(job.labels) for item in served)
        ]

    def check_jobs(self) -> None:
        """Every job has run once, or has ended by GitHub's rules."""
        self.checks += 1
        for job in self.open_jobs():
            why = "it was queued while no capacity was announced" if job.is_stranded else "it was never served"
            self._violated("D5", f"job {job.key} was lost: {why}")

    def at_rest(self) -> None:
        """After the sets were removed from the configuration, nothing of them is left on GitHub."""
        self.checks += 1
        sets = self._world.scale_sets
        sets.settle()
        for scale_set in sets.sets.values():
            self._violated("D5", f"scale set {scale_set.name} is left on GitHub: {scale_set.sessions}")
