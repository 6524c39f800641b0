"""Invariants of durations (P1 to P5): how long a process must wait before it acts, and how long at most.

A time limit, a pause or a count of failures belongs to one case. It begins with that case, ends with it, and is neither
shorter nor longer because of another one. These checks measure both sides by the true time.

A listener that a fault blinds decides by what it knows, so most of them need some calm. Faults of machines and of
people do not blind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, timedelta
from typing import TYPE_CHECKING

from remuda.domain.demand import LISTENER_LEASE, Lease
from remuda.domain.instance import Instance, State
from remuda.domain.runner_set import RunnerSet
from simulation.faults import OF_MACHINES, Fault
from simulation.invariants import parse_runner

if TYPE_CHECKING:
    from simulation.fake_machine import FakeMachine
    from simulation.world import SimulatedProcess, World

Found = Iterable[tuple[str, str]]

HELD = frozenset({State.CREATED, State.CLAIMED, State.RUNNING})
#: Seconds for which a fault may keep a listener from what is true, by default and for those that last.
BLIND_S = 90.0
_BLIND_S = {
    Fault.STATISTICS_HIGH: 260.0,
    Fault.STATISTICS_LOW: 260.0,
    Fault.DEMAND_HANGS: 320.0,
    Fault.EVENT_LATE: 200.0,
    Fault.LISTENER_PAUSE: 300.0,
    Fault.REGISTRATION_GONE: 120.0,
    Fault.ASSIGNMENT_LAPSES: 120.0,
}
#: Seconds in which a listener has read a new configuration.
CONFIG_READ_S = 90.0
#: Seconds in which a runner must listen after its record is `running`, and those until its listener has acted on it.
LISTENS_WITHIN_S = 60.0
ACTS_WITHIN_S = 45.0
#: The most seconds of the first pause after a failed launch, the factor of the next ones, and the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 7.5, 60.0
#: Seconds from the end of a pause to the next attempt.
SLACK_S = 6.0
#: Seconds without a renewal after which a lease may be taken, and those within which a standby must have taken it.
LEASE_S, TAKEN_WITHIN_S = 35.0, 60.0
#: Seconds in which an undisturbed agent has done what a new record asks for.
AGENT_ACTS_S = 40.0
#: Seconds without a failure after which the next one is the first, and those after it in which an agent reads again.
CALM_S, FIRST_READ_S = 60.0, 0.5
#: Maximum age in seconds of the record that an agent acts on, with the calls that it takes to read it.
RECORD_AGE_S = 0.6
#: Failed removals of a registration after which an agent may give up.
REMOVALS = 5


class PatienceInvariants:
    def __init__(self, world: World) -> None:
        self._world = world
        #: Sets that needed all of their runners at the last check, and when each did so in two checks in a row.
        self._needed: set[str] = set()
        self._needed_at: dict[str, float] = {}
        #: Since when a runner of a set has neither listened nor had a job.
        self._silent_since: dict[tuple[str, int], float] = {}
        #: Failed launches of each set in a row, and the time by which it must try again.
        self._failures: Counter[str] = Counter()
        self._launch_due: dict[str, float] = {}
        self._leased_at = 0.0
        #: Failed removals of a registration, by instance and epoch.
        self._removals: Counter[tuple[str, int]] = Counter()
        #: Agents whose last wait ended without a failure.
        self._waited: set[str] = set()
        #: By which time an agent must read again whose read failed, and its pauses until then; None if at any time.
        self._next_read_due: dict[str, tuple[float, float] | None] = {}
        self.checks = 0

    def _violated(self, text: str, *, rule: str, instance_id: str = "") -> None:
        self._world.safety.violated(rule, text, instance_id)

    @property
    def _now(self) -> float:
        return self._world.loop.time()

    def blind_until(self) -> float:
        """The time until which a listener may not know what is true."""
        last = self._world.faults.last_of
        return max(
            (at + _BLIND_S.get(fault, BLIND_S) for fault, at in last.items() if fault not in OF_MACHINES), default=0.0
        )

    def calm_since(self, name: str) -> float:
        """The time since which the listeners know their sets, and this one is configured as it is now."""
        return max(self.blind_until(), self._world.safety.demand.configured_at(name) + CONFIG_READ_S)

    # P1: surplus

    def _count_runners(self, name: str) -> int:
        """Machines that a listener may count for a set. It may know of fewer, and never of more."""
        world = self._world
        return sum(
            record.runner_set == name
            and record.state in HELD
            and world.machines[record.instance_id].alive
            and not self._is_spent(record)
            for record in world.database.instances.values()
        )

    def _is_spent(self, record: Instance) -> bool:
        """Whether its only job in this epoch has ended."""
        state = self._world.machines[record.instance_id].state()
        return state.spent and parse_runner(state.registered_as) == (record.epoch, record.instance_id)

    def _count_wanted(self, runner_set: RunnerSet) -> int:
        """Runners that the set certainly needs now."""
        world, skew = self._world, self._world.max_skew
        jobs = sum(
            job.set_name == runner_set.name and bool(job.set_id) and not job.is_offered and job.fails_at is None
            for job in world.scale_sets.open_jobs
        )
        now = world.clock.now()
        times = (now - skew - timedelta(seconds=1), now, now + skew + timedelta(seconds=1))
        hot = min(runner_set.capacity_at(at, zone_of=lambda _: UTC).hot for at in times)
        return min(runner_set.max, jobs + hot)

    def _check_need(self, runner_set: RunnerSet) -> None:
        name = runner_set.name
        if self._count_runners(name) > self._count_wanted(runner_set):
            self._needed.discard(name)
            return
        if name in self._needed:
            self._needed_at[name] = self._now
        self._needed.add(name)

    def given_up(self, record: Instance, process: SimulatedProcess) -> Found:
        """A healthy runner of a set without a job is given back only after an unbroken grace period without a need."""
        self.checks += 1
        world, machine = self._world, self._world.machines[record.instance_id]
        name = record.runner_set
        runner_set = next((item for item in world.safety.demand.configured_sets if item.name == name), None)
        if process.kind != "listener" or runner_set is None or not self._is_fit(record, machine, runner_set):
            return
        if self._now < self.calm_since(name) or process.last_fault_at > self._now - BLIND_S:
            return
        if world.safety.demand.deleted_at.get(name, -1e9) > world.safety.waste.entered_at(record.instance_id):
            return
        grace_s = world.least("surplus_grace_s") - 1.0
        unneeded_s = self._now - self._needed_at.get(name, -1e9)
        if unneeded_s < grace_s:
            yield "P1", f"{process} gave up a runner of set {name} that was needed {unneeded_s:.0f} s ago"

    def _is_fit(self, record: Instance, machine: FakeMachine, runner_set: RunnerSet) -> bool:
        world = self._world
        age_s = (world.clock.now() - record.created_at).total_seconds()
        return (
            machine.state().listening
            and not machine.notice
            and record.retire_reason is None
            and record.tier is runner_set.trust
            and age_s < world.least("max_age_s") - 2 * world.max_skew.total_seconds()
            and world.safety.waste.is_healthy(record.instance_id, self._now - LISTENS_WITHIN_S)
            and world.safety.demand.job_of(record) is None
        )

    # P2: pauses after failed launches

    def launch_began(self, name: str) -> None:
        self._launch_due.pop(name, None)

    def launch_failed(self, name: str) -> None:
        self._failures[name] += 1
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self._failures[name] - 1))
        self._launch_due[name] = self._now + pause_s + SLACK_S

    def acquired(self, record: Instance) -> None:
        if record.state is State.CREATED:
            self._failures.pop(record.runner_set, None)
        self._launch_due.pop(record.runner_set, None)

    def _check_launch(self, runner_set: RunnerSet) -> None:
        name = runner_set.name
        due = self._launch_due.get(name)
        if due is None:
            return
        self.checks += 1
        returning = any(
            record.runner_set == name and record.state is State.RELEASING
            for record in self._world.database.instances.values()
        )
        if returning or self._count_runners(name) >= self._count_wanted(runner_set):
            self._launch_due.pop(name)
        elif self._now > max(due, self.calm_since(name) + LONGEST_PAUSE_S + SLACK_S):
            times = self._failures[name]
            self._violated(f"set {name} does not launch again after {times} failures in a row", rule="P2")

    # P4: leases

    def lease_written(self, before: Lease | None, after: Lease, process: SimulatedProcess) -> None:
        self.checks += 1
        held_s, self._leased_at = self._now - self._leased_at, self._now
        if before is None or before.owner in {"", after.owner} or not after.owner:
            return
        if held_s < LEASE_S - 1.0:
            self._violated(f"{process} took the lease of {before.owner} {held_s:.0f} s after its renewal", rule="P4")

    def _check_lease(self) -> None:
        """A standby takes an expired lease soon."""
        lease = self._world.database.leases.get(LISTENER_LEASE)
        if lease is None or self._now - self._leased_at <= TAKEN_WITHIN_S:
            return
        self.checks += 1
        since = max(self._leased_at, self.blind_until())
        for process in self._world.processes.values():
            is_alive = process.kind == "listener" and not process.dead and not process.ended.done()
            if is_alive and self._now - max(since, process.started_at, process.last_fault_at) > TAKEN_WITHIN_S:
                age_s = self._now - self._leased_at
                self._violated(f"{process} leaves the lease of {lease.owner!r} for {age_s:.0f} s", rule="P4")
                return

    # P5: dead runners

    def _check_silent(self, record: Instance) -> None:
        """A runner that does not listen is given up within its limit."""
        machine, key = self._world.machines.get(record.instance_id), (record.instance_id, record.epoch)
        is_waiting = record.state is State.RUNNING and bool(record.runner_set) and not record.is_bound
        if machine is None or not is_waiting or (machine.alive and (machine.state().listening or machine.job)):
            self._silent_since.pop(key, None)
            return
        self.checks += 1
        since = max(self._silent_since.setdefault(key, self._now), self.calm_since(record.runner_set))
        has_job = any(runner.job is not None for runner in self._world.registrations(record.instance_id))
        in_time = record.threshold > self._world.clock.now() + self._world.safety.tolerance
        if in_time and not has_job and self._now - since > LISTENS_WITHIN_S + ACTS_WITHIN_S:
            text = f"{record.instance_id} is kept for set {record.runner_set} and has not listened for a while"
            self._violated(text, rule="P5", instance_id=record.instance_id)

    # P3: agents

    def removal_failed(self, machine: FakeMachine) -> None:
        parsed = parse_runner(machine.state().registered_as)
        self._removals[machine.instance_id, parsed[0] if parsed else 0] += 1

    def gives_up_removal(self, machine: FakeMachine, epoch: int) -> Found:
        """An agent gives up the removal of a registration only after failures of this removal."""
        self.checks += 1
        failed = self._removals[machine.instance_id, epoch]
        if failed < REMOVALS:
            yield "P3", f"{machine.instance_id} gives up after {failed} failed removals"

    def acts(self, machine: FakeMachine, step: str, states: frozenset[State]) -> None:
        """An agent acts on a record that it has just read: what it read before its last step or wait may be over."""
        record = self._world.database.instances.get(machine.instance_id)
        if record is None or record.state in states or self._world.disturbed_at(machine) > self._now - CALM_S:
            return
        self.checks += 1
        old_s = self._now - self._world.safety.waste.entered_at(machine.instance_id)
        if old_s > RECORD_AGE_S:
            text = f"{machine.instance_id} begins to {step}, and has been {record.state} for {old_s:.1f} s"
            self._violated(text, rule="P3", instance_id=machine.instance_id)

    def check_agent(self, machine: FakeMachine) -> None:
        """An undisturbed agent has done after some seconds what its record asks for."""
        world, instance_id = self._world, machine.instance_id
        record = world.database.instances.get(instance_id)
        since = self._now - AGENT_ACTS_S
        if record is None or world.safety.written_at(instance_id) > since:
            return
        failed_at = max(machine.step_failed_at, machine.listener_died_at)
        if not world.safety.waste.is_healthy(instance_id, since) or failed_at > since:
            return
        if machine.started_at > since - AGENT_ACTS_S or machine.job_ended_at > since or machine.job is not None:
            return
        self.checks += 1
        state = machine.state()
        report = world.database.reports.get(instance_id)
        is_told = report is not None and report.epoch == record.epoch
        failed = report is not None and is_told and report.signal is not None and report.signal.failed
        if failed:
            return
        if record.state is State.RELEASING and state.registered_as and is_told and record.assignment is not None:
            credential = record.assignment.credential
            if record.runner_set or (credential and credential.expires_at > world.clock.now() + world.max_skew):
                self._violated(f"{instance_id} does not remove its registration", rule="P3", instance_id=instance_id)
        is_idle = state.registered_as and not state.listening and not state.spent
        if record.state is State.RUNNING and is_idle:
            self._violated(f"{instance_id} does not start its runner", rule="P3", instance_id=instance_id)

    def begins_to_wait(self, process: SimulatedProcess) -> bool:
        """Return whether the agent's last wait ended without a failure."""
        has_waited = process.name in self._waited
        self._waited.discard(process.name)
        return has_waited

    def read_failed(self, process: SimulatedProcess, *, has_waited: bool) -> None:
        """An agent's read fails. If nothing else has failed for a while, the next one follows at once."""
        is_first = has_waited and self._now - process.previous_fault_at > CALM_S
        self._next_read_due[process.name] = (self._now + FIRST_READ_S, process.pause_s) if is_first else None

    def waited(self, process: SimulatedProcess) -> None:
        """A wait of an agent ends without a failure."""
        self._waited.add(process.name)

    def reads(self, process: SimulatedProcess) -> None:
        due = self._next_read_due.pop(process.name, None)
        if due is None:
            return
        self.checks += 1
        if self._now > due[0] and process.pause_s == due[1] and process.last_fault_at < due[0] - FIRST_READ_S + 0.001:
            late_s = self._now - due[0] + FIRST_READ_S
            self._violated(f"{process} reads again {late_s:.1f} s after the first failure for long", rule="P3")

    # Regularly

    def check(self) -> None:
        for machine in self._world.machines.values():
            if machine.alive:
                self.check_agent(machine)
        if not self._world.plan.listeners:
            return
        for runner_set in self._world.safety.demand.configured_sets:
            self._check_need(runner_set)
            self._check_launch(runner_set)
        for record in list(self._world.database.instances.values()):
            self._check_silent(record)
        self._check_lease()
