"""Safety invariants (S1 to S14), checked at every event against the true state of the simulated world.

The checks see what no process can see: the true time, the machines and GitHub as they are, and the author of each
write. They use no decision of the control plane, so that a bug there does not hide itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from remuda.domain.errors import InvariantViolated, RemudaError
from remuda.domain.instance import Assignment, Instance, State
from remuda.domain.provision import ProvisionStatus
from remuda.domain.resources import PoolMessage
from remuda.domain.runner_set import RunnerSet
from remuda.domain.signals import Signal, Verdict, registration_verdict
from remuda.ports.compute import POOL_TAG, LaunchRequest
from simulation.invariants import ABSORBING, is_secret, parse_runner
from simulation.memory.compute import MemoryMachine
from simulation.memory.github import MemoryDemandJob, MemoryJob
from simulation.record_invariants import OVER, RecordInvariants
from simulation.threshold_invariants import PROMPT_S

if TYPE_CHECKING:
    from simulation.fake_machine import FakeMachine
    from simulation.world import SimulatedProcess

#: Seconds after which an agent has read a new version of its record, unless a fault affects it.
AGENT_READ_S = 60.0
#: Seconds within which an undisturbed agent reports that its runner was sent away. It may have to wait for its store.
REPORTED_WITHIN_S = 60.0
#: Minutes that scale-down gives a machine to boot: it must not terminate younger ones without a record.
BOOT_MIN = 5.0


#: Seconds in which a process sends the pool message of an instance that it has read or written as idle, by its kind.
#: A sweep reads all records first.
SENT_WITHIN_S = {"listener": 4.0, "release": 4.0}
#: Seconds without a fault after which a process is prompt again.
CALM_S = 60.0


class SafetyInvariants(RecordInvariants):
    """Checks of machines, runners, jobs, pool messages and processes, besides those of the records."""

    # Machines

    def launched(self, machine: MemoryMachine) -> None:
        self.checks += 1
        if machine.request.provision_id not in self._intended:
            self.violated("S8", f"{machine.instance_id} was launched without a provision", machine.instance_id)
        self._world.writer().held.add(machine.instance_id)
        if is_secret(f"{machine.tags} {machine.request}"):
            self.violated("S12", f"{machine.instance_id} was launched with a credential in its tags or user-data")

    def launch_requested(self, request: LaunchRequest, process: SimulatedProcess) -> None:
        self.checks += 1
        self.demand.launch_requested(request, process)
        for invariant, text in self.waste.launch_requested(request, process):
            self.violated(invariant, text)

    def termination_requested(self, instance_ids: Sequence[str]) -> None:
        self.checks += 1
        for instance_id in instance_ids:
            machine = self._world.cloud.machines.get(instance_id)
            if machine is None or machine.tags.get(POOL_TAG) != self._world.pool_name:
                self.violated("S7", f"{instance_id} is not this pool's", instance_id)
            record = self._world.database.instances.get(instance_id)
            if record is not None and record.state not in ABSORBING:
                self.violated("S6", f"termination was requested of {instance_id}, which is {record.state}", instance_id)
            if record is None and machine is not None and not self._may_end_unrecorded(machine):
                self.violated("S6", f"termination was requested of {instance_id}, which has no record", instance_id)

    def _may_end_unrecorded(self, machine: MemoryMachine) -> bool:
        """Scale-down may terminate a machine without a record once it had time to boot and register."""
        if self._world.cloud.state(machine.instance_id) in OVER:
            return True
        boot = timedelta(minutes=BOOT_MIN)
        age = self._world.clock.now() - machine.launched_at
        return self._world.writer().kind == "scale-down" and age >= boot - self.tolerance

    def ends_itself(self, machine: FakeMachine, reason: str) -> None:
        """An agent ends its machine only if its record says so or its threshold has passed."""
        self.checks += 1
        record = self._world.database.instances.get(machine.instance_id)
        now, margin = self._world.clock.now(), self.margin
        for invariant, text in self.demand.ends_itself(record, machine) if record is not None else ():
            self.violated(invariant, f"{machine.instance_id} {text}", machine.instance_id)
        if record is None or record.state in ABSORBING or now >= record.threshold + margin - self.tolerance:
            return
        recent = self._world.loop.time() - AGENT_READ_S
        is_new = self.written_at(machine.instance_id) > self._world.loop.time() - PROMPT_S
        if is_new or self._world.disturbed_at(machine) > recent:
            threshold = machine.agent_state.threshold
            if threshold is not None and now >= threshold + margin - self.tolerance:
                return
        self.violated("S6", f"{machine.instance_id} ended itself while {record.state}: {reason}", machine.instance_id)

    def dead_man(self, machine: FakeMachine) -> None:
        """The dead-man timer of an undisturbed agent never fires before the threshold."""
        self.checks += 1
        record = self._world.database.instances.get(machine.instance_id)
        if record is None or record.state in ABSORBING or machine.agent is None:
            return
        written_at = self.written_at(machine.instance_id)
        healthy = self._world.disturbed_at(machine) < written_at < self._world.loop.time() - AGENT_READ_S
        if healthy and self._world.clock.now() < record.threshold + self.margin - self.tolerance:
            self.violated(
                "S6", f"the dead-man timer ended {machine.instance_id} while {record.state}", machine.instance_id
            )

    # Runners and jobs

    def listener_starts(self, machine: FakeMachine) -> None:
        self.checks += 1
        epoch = self._epoch_of(machine.state().registered_as)
        record = self._world.database.instances.get(machine.instance_id)
        if (machine.instance_id, epoch) not in self._ran:
            state = record.state if record else "without a record"
            self.violated(
                "S2", f"the listener of {machine.instance_id} starts while it is {state}", machine.instance_id
            )
        elif (machine.instance_id, epoch, Signal.UD_REG_FAILED) in self._signals:
            what = f"the listener of {machine.instance_id} starts after its registration failed in epoch {epoch}"
            self.violated("S16", what, machine.instance_id)
        elif machine.state().spent:
            self.violated(
                "S14", f"the listener of {machine.instance_id} starts again after its one job", machine.instance_id
            )
        elif record is not None and record.state is State.IDLE:
            self.violated("S3", f"the listener of {machine.instance_id} starts while it is idle", machine.instance_id)

    def sent_away(self, machine: FakeMachine, *, since: float) -> bool:
        """The instance of a run says that its runner has exited without a job. Return whether this could be checked."""
        world = self._world
        record = world.database.instances.get(machine.instance_id)
        if record is None or record.state is not State.RUNNING or record.runner_set:
            return True
        if max(since, world.disturbed_at(machine), world.faults.last_at) > world.loop.time() - REPORTED_WITHIN_S:
            return False
        self.checks += 1
        report = world.database.reports.get(machine.instance_id)
        if registration_verdict(report, record.epoch) is not Verdict.FAILED:
            self.violated("L7", f"{machine.instance_id} waits, although its runner was sent away", machine.instance_id)
        return True

    def job_starts(self, job: MemoryJob, machine: FakeMachine, *, refused: bool = False) -> None:
        """A refused job runs no step."""
        self.checks += 1
        self._world.stats["jobs"] += 1
        if isinstance(job, MemoryDemandJob):
            self._world.stats["jobs of sets"] += 1
            self.demand.job_starts(job, machine)
            self._world.stats["refused jobs"] += refused
            served_by = self._served_by(job, machine)
            for invariant, text in () if refused else self._reuse.job_starts(machine.instance_id, job, served_by):
                self.violated(invariant, text, machine.instance_id)
            return
        record = self._world.database.instances.get(machine.instance_id)
        if record is None:
            self.violated("S2", f"a job runs on {machine.instance_id}, which has no record", machine.instance_id)
            return
        served = record.latest_holder.run_id if record.latest_holder is not None else ""
        if job.run_id != served or record.state in {State.CREATED, State.CLAIMED, State.IDLE}:
            what = f"a job of run {job.run_id} runs on {machine.instance_id}, {record.state} for {served!r}"
            self.violated("S2", what, machine.instance_id)
        tier = self._world.tier_of(job.run_id)
        if tier is not None and tier is not record.tier:
            self.violated("S11", f"a {tier} job runs on {machine.instance_id}, {record.tier}", machine.instance_id)

    def _served_by(self, job: MemoryDemandJob, machine: FakeMachine) -> RunnerSet | None:
        """The set of a job, with the trust that it had when it got the machine."""
        record = self._world.database.instances.get(machine.instance_id)
        known = self.demand.known_set(job.set_name)
        return known if known is None or record is None else replace(known, trust=record.tier)

    def job_cut_short(self, machine: FakeMachine, what: str) -> None:
        self.checks += 1
        if machine.job is not None:
            self.violated("S6", f"{what} on {machine.instance_id} while a job runs", machine.instance_id)

    def removal_begins(self, machine: FakeMachine, assignment: Assignment) -> None:
        """An agent does not use a credential that has expired: GitHub would refuse it, and the machine would fail."""
        self.checks += 1
        now = self._world.clock.now() + timedelta(seconds=machine.skew_s)
        credential = assignment.credential
        if credential is not None and credential.expires_at <= now - self._world.max_latency:
            self.violated("W1", f"{machine.instance_id} uses an expired credential", machine.instance_id)

    def registered(self, name: str) -> None:
        self.checks += 1
        parsed = parse_runner(name)
        record = self._world.database.instances.get(parsed[1]) if parsed else None
        if parsed and record is not None and record.state is State.IDLE:
            self.violated("S3", f"{name} is registered while its instance is idle", parsed[1])

    def removal_requested(self, runner_id: int) -> None:
        """A registration in use and one of another pool are never stale."""
        self.checks += 1
        runner = self._world.github.runners.get(runner_id)
        if runner is None:
            return
        parsed = parse_runner(runner.name)
        if parsed is None:
            self.violated("S7", f"{runner.name} is not this pool's runner")
            return
        epoch, instance_id = parsed
        record = self._world.database.instances.get(instance_id)
        if record is None or not self._world.cloud.is_alive(instance_id):
            return
        in_use = record.epoch == epoch and record.state not in {*ABSORBING, State.IDLE}
        if runner.ephemeral and self._is_released(record):
            # Only the control plane can remove it, and GitHub refuses while a job runs.
            in_use = False
        if in_use or record.epoch < epoch:
            what = f"{runner.name} was removed as stale; its instance is {record.state} at epoch {record.epoch}"
            self.violated("S6", what, instance_id)

    def deregistration_requested(self, runner_id: int) -> None:
        """A listener removes registrations of its pool only; GitHub keeps those that have a job."""
        self.checks += 1
        runner = self._world.github.runners.get(runner_id)
        if runner is not None and parse_runner(runner.name) is None:
            self.violated("S7", f"{runner.name} is not this pool's runner")

    def _is_released(self, record: Instance) -> bool:
        provision = self._provision(record.provision_id)
        released = provision is None or provision.status is ProvisionStatus.RELEASED
        return released or record.provision_id in self._world.writer().provisions

    # Pool messages

    def messages_sent(self, messages: Iterable[PoolMessage], process: SimulatedProcess) -> None:
        """A message is sent only about an instance that is idle in its epoch, or was when the sender read that."""
        reads_s = SENT_WITHIN_S.get(process.kind)
        is_prompt = not process.pause_s and self._world.loop.time() - process.last_fault_at > CALM_S
        for message in messages:
            self.checks += 1
            if process.epochs.get(message.id, 0) > message.epoch:
                own = process.epochs[message.id]
                what = (
                    f"{process} sends a message about {message.id} at epoch {message.epoch}, and has used epoch {own}"
                )
                self.violated("S18", what, message.id)
            since = self._world.loop.time() - reads_s if reads_s and is_prompt else process.reads_since
            versions = self._world.versions_since(message.id, since)
            if versions and not any(item is None or _may_be_announced(item, message) for item in versions):
                last = versions[-1]
                state = f"{last.state} at epoch {last.epoch}" if last else "gone"
                what = f"{process} sends a message about {message.id} at epoch {message.epoch}, which is {state}"
                self.violated("S18", what, message.id)

    def messages_deleted(self, resource_class: str, messages: Iterable[PoolMessage]) -> None:
        """The last message about an idle instance is deleted only if it is claimed or retired."""
        process = self._world.writer()
        for message in messages:
            self.checks += 1
            record = self._world.database.instances.get(message.id)
            if record is None or record.retire_reason or (record.state, record.epoch) != (State.IDLE, message.epoch):
                continue
            if process.kind == "refresh" and message.id in process.received_early:
                # The sweep received it twice and cannot tell it from a duplicate.
                continue
            copies = [item.message for item in self._world.queues.named(resource_class).messages]
            if message not in copies:
                self.violated("L4", f"the message about {message.id} was deleted while it is idle", message.id)

    # Processes

    def event_recorded(self, action: str, why: str, facts: Mapping[str, Any]) -> None:
        if is_secret(why) or any(is_secret(value) for value in facts.values() if isinstance(value, str)):
            self.violated("S12", f"a credential in the event log: {action}")
        if why.startswith("a bug:"):
            self.violated("S10", f"{action}: {why}")
        if action == "rollback":
            self.completeness.rolls_back(self._world.writer())

    def state_logged(self, instance_id: str, facts: Mapping[str, Any]) -> None:
        """An agent logs a new state with the epoch and the run that it has, or had a moment ago."""
        self.checks += 1
        record = self._world.database.instances.get(instance_id)
        if record is None:
            return
        epoch = facts.get("epoch")
        runs = {record.subject, record.last_subject}
        if epoch is None or epoch > record.epoch or (epoch == record.epoch and facts.get("run_id") not in runs):
            self.violated("R1", f"{instance_id} logs {dict(facts)}, but its record is {record.epoch}, {runs}")

    def process_ended(self, process: SimulatedProcess) -> None:
        """A command ends with a result or a typed error, unless it is cancelled or killed."""
        self.checks += 1
        for invariant, text in self.waste.process_ended(process):
            self.violated(invariant, text)
        for invariant, text, instance_id in self.completeness.ended(process):
            self.violated(invariant, text, instance_id)
        for invariant, text in self.results.ended(process):
            self.violated(invariant, text)
        task = process.task
        if process.dead or task is None or not task.done() or task.cancelled():
            return
        error = task.exception()
        if error is not None and (not isinstance(error, RemudaError) or isinstance(error, InvariantViolated)):
            self.violated("L5" if process.kind == "provision" else "S10", f"{process} failed unexpectedly: {error!r}")
        if process.kind != "provision" or error is not None:
            return
        result = task.result()
        held = [(item.instance.instance_id, item.instance.epoch) for item in result.instances]
        if process.request is not None and len({key for key, _ in held}) != process.request.count:
            self.violated("L5", f"{process} returned {held}, but {process.request.count} were requested")
        provision = self._provision(result.provision_id)
        if provision is not None and {key for key, _ in held} != set(provision.instance_ids):
            self.violated("L5", f"{process} succeeded, but its provision is {provision.status} without its instances")
        for key in held:
            if self._returned.setdefault(key, result.provision_id) != result.provision_id:
                self.violated("S1", f"{key} was returned by {self._returned[key]} and by {result.provision_id}", key[0])
            if key not in self._ran:
                self.violated("L5", f"{process} returned {key}, which never was running", key[0])


def _may_be_announced(record: Instance, message: PoolMessage) -> bool:
    return record.state is State.IDLE and record.epoch == message.epoch and record.message() == message
