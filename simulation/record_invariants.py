"""Safety invariants of records, signals and provisions, checked at every write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from remuda.controlplane.operator import OperatorAction
from remuda.domain.demand import DemandRecord, JobRecord
from remuda.domain.instance import Instance, RetireReason, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision, ProvisionEnding, ProvisionStatus
from remuda.domain.resources import Reuse
from remuda.domain.signals import Report, Signal
from remuda.ports.compute import POOL_TAG, MachineState
from remuda.ports.github import GitHubRun
from simulation.completeness import CompletenessInvariants
from simulation.demand_invariants import DemandInvariants
from simulation.invariants import ReuseInvariant, Violation, is_secret, parse_runner, transition_violations
from simulation.ownership import Ownership
from simulation.patience_invariants import PatienceInvariants
from simulation.pause_invariants import PauseInvariants
from simulation.result_invariants import ResultInvariants
from simulation.threshold_invariants import PolicyHistory, ThresholdInvariant
from simulation.waste_invariants import WasteInvariants

if TYPE_CHECKING:
    from simulation.world import SimulatedProcess, World

#: States of a machine on which nothing runs any more.
OVER = (None, MachineState.SHUTTING_DOWN, MachineState.TERMINATED)


class RecordInvariants:
    """Checks of every write to records, reports and provisions."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: dict[str, Instance] = {}
        self._reports: dict[str, Report] = {}
        self._written_at: dict[str, float] = {}
        #: (instance, epoch) that were ever running, and those that were ever releasing.
        self._ran: set[tuple[str, int]] = set()
        self._ran_for: set[tuple[str, str]] = set()
        self._released: set[tuple[str, int]] = set()
        #: When each signal of an instance and epoch was replaced by another one; None if it was not.
        self._signals: dict[tuple[str, int, Signal], float | None] = {}
        #: Provision that returned this instance at this epoch as its result.
        self._returned: dict[tuple[str, int], str] = {}
        #: Time at which each provision was recorded, even if it was deleted since: a paused process may act for it.
        self._intended: dict[str, float] = {}
        #: Time at which the release of each provision was written.
        self._closed_at: dict[str, float] = {}
        self.policies = PolicyHistory(world)
        self._thresholds = ThresholdInvariant(world, self.policies)
        self._reuse = ReuseInvariant(self.policies)
        self.waste = WasteInvariants(world, self.policies)
        self.completeness = CompletenessInvariants(world, self.policies)
        self.demand = DemandInvariants(world)
        self.ownership = Ownership(world)
        self.results = ResultInvariants(world)
        self.patience = PatienceInvariants(world)
        self.pauses = PauseInvariants(world)
        #: By process and run, the last attempt that it read as ended, and how long ago that end was then.
        self._ends_read: dict[tuple[str, str], tuple[int, float]] = {}
        self.checks = 0

    def violated(self, invariant: str, text: str, instance_id: str = "") -> None:
        self._world.stop(Violation(invariant=invariant, text=text, instance_id=instance_id, at=self._world.loop.time()))

    def intended_at(self, provision_id: str) -> float:
        return self._intended[provision_id]

    def released_at(self, provision_id: str) -> float:
        """When its release was written: a process may be paused between its decision and the write."""
        return self._closed_at.get(provision_id, 0.0)

    def written_at(self, instance_id: str) -> float:
        return self._written_at.get(instance_id, -1e9)

    def configured(self, before: PoolConfig | None, config: PoolConfig) -> None:
        self.policies.configured(config)
        self.demand.configured(config)
        for invariant, text in self.ownership.configured(before, config, self._world.writer()):
            self.violated(invariant, text)

    def demand_written(self, before: DemandRecord | None, after: DemandRecord) -> None:
        for invariant, text in self.ownership.demand_written(before, after, self._world.writer()):
            self.violated(invariant, f"set {after.runner_set}: {text}")

    def job_written(self, before: JobRecord | None, after: JobRecord) -> None:
        for invariant, text in self.ownership.job_written(before, after, self._world.writer()):
            self.violated(invariant, text)

    # Records

    def record_written(self, instance_id: str) -> None:
        self.checks += 1
        before = self._known.get(instance_id)
        after = self._world.database.instances.get(instance_id)
        if after is None:
            self._known.pop(instance_id, None)
            if before is not None and before.state is not State.TERMINATED:
                self.violated("S9", f"the record of {instance_id} was deleted while {before.state}", instance_id)
            return
        self._known[instance_id] = after
        self._world.stats[f"transition {self._world.database.histories[instance_id][-1].transition}"] += 1
        self._written_at[instance_id] = self._world.loop.time()
        if after.state is State.RUNNING:
            self._ran.add((instance_id, after.epoch))
            self._ran_for.add((instance_id, after.provision_id))
        elif after.state is State.RELEASING:
            self._released.add((instance_id, after.epoch))
        found = self._created(after) if before is None else self._changed(before, after)
        entry = self._world.database.histories[instance_id][-1]
        process = self._world.writer(instance_id)
        if self._world.delayed_writer is None:
            process.epochs[instance_id] = after.epoch
        self.pauses.written(before, after, entry, process)
        times = self._thresholds.written(before, after, entry, process)
        waste = self.waste.record_written(before, after, entry, process)
        owned = self.ownership.instance_written(before, after, entry)
        for invariant, what in (*found, *self._secrets_of(after), *times, *waste, *owned):
            self.violated(invariant, f"{instance_id}: {what}", instance_id)

    def _created(self, after: Instance) -> Iterable[tuple[str, str]]:
        machine = self._world.cloud.machines.get(after.instance_id)
        if machine is None or machine.tags.get(POOL_TAG) != self._world.pool_name:
            yield "S7", "a record for a machine that is not the pool's"
            return
        if after.epoch != 1:
            yield "S1", f"created at epoch {after.epoch}"
        if after.state is State.CREATED and after.provision_id not in self._intended:
            yield "S8", "a record without a provision"
        process = self._world.writer(after.instance_id)
        if after.state is State.CREATED:
            yield from self.demand.acquired(after)
            yield from self._reuse.created(after, process, runner_set=self.demand.known_set(after.runner_set))
        age = self._world.clock.now() - machine.launched_at
        grace = timedelta(seconds=self._world.lifetimes.unrecorded_grace_s)
        if after.state is State.TERMINATING and process.kind == "refresh" and age < grace - self.tolerance:
            yield "S6", f"tombstone {age.total_seconds():.0f} s after a launch that may still be in progress"

    def _changed(self, before: Instance, after: Instance) -> Iterable[tuple[str, str]]:
        process = self._world.writer(after.instance_id)
        violations = list(transition_violations(before, after))
        yield from violations
        if violations:
            return
        claimed = (before.state, after.state) == (State.IDLE, State.CLAIMED)
        if process.kind == "provision" and not claimed and before.provision_id not in process.provisions:
            yield "S1", f"{process} wrote to an instance of {before.provision_id}"
        bound = before.state is after.state is State.RUNNING and before.holder != after.holder
        if (after.tier, after.repository) != (before.tier, before.repository) and not (claimed or bound):
            yield "S11", f"tier {before.tier} became {after.tier}, or its repository changed, at {after.state}"
        checks = {
            State.CLAIMED: self._claimed,
            State.RUNNING: self._committed,
            State.RELEASING: self._released_by,
            State.IDLE: self._pooled,
            State.TERMINATING: self._ended,
            State.TERMINATED: self._confirmed,
            State.CREATED: self._recreated,
        }
        check = self._same_state if after.state is before.state else checks[after.state]
        yield from check(before, after, process)

    def _recreated(self, before: Instance, after: Instance, process: SimulatedProcess) -> Iterable[tuple[str, str]]:
        yield "S5", f"{before.state} became {after.state} by {process}"

    def _confirmed(self, _before: Instance, after: Instance, _process: SimulatedProcess) -> Iterable[tuple[str, str]]:
        if self._world.cloud.state(after.instance_id) not in {None, MachineState.TERMINATED}:
            yield "S9", "terminated, but the machine is not"

    def _same_state(self, before: Instance, after: Instance, process: SimulatedProcess) -> Iterable[tuple[str, str]]:
        if after.announced_at not in {None, before.announced_at} and (
            (after.instance_id, after.epoch) not in process.sent
        ):
            yield "L4", f"{process} marks it as announced without a pool message"
        of_set = before.state is State.RUNNING and bool(before.runner_set)
        if of_set and (after.threshold, after.holder) != (before.threshold, before.holder):
            yield from self.demand.changed_while_running(before, after)
        elif before.state in {State.CREATED, State.CLAIMED, State.RUNNING} and after.threshold != before.threshold:
            yield "S6", f"the threshold of a {before.state} instance was changed"
        yield from self._retired(before, after, process)
        if before.state is State.IDLE and after.threshold != before.threshold:
            yield from self._renewed(before, after, process)
        if before.state is State.RELEASING and before.run_deadline and after.threshold > before.threshold:
            latest = max(before.run_deadline, before.threshold, after.quarantined_until or before.threshold)
            if after.threshold > latest:
                yield "S6", "a release was extended beyond its run's deadline"
        if before.state is State.RELEASING and after.threshold < before.threshold:
            machine = self._world.machines[after.instance_id]
            if machine.job is not None:
                yield "S6", f"{process} shortened a release while a job runs"

    def _retired(self, before: Instance, after: Instance, process: SimulatedProcess) -> Iterable[tuple[str, str]]:
        """Retirement and quarantine are never undone, and only an operator or a spot notice causes them."""
        if (before.retire_text, before.quarantined_until) == (after.retire_text, after.quarantined_until):
            return
        report = self._world.database.reports.get(after.instance_id)
        has_notice = report is not None and bool(report.notice) and before.quarantined_until == after.quarantined_until
        ordered = process.action is OperatorAction.QUARANTINE or (
            process.action is OperatorAction.DRAIN
            and before.quarantined_until == after.quarantined_until
            and not before.retire_reason
        )
        # By a job of a lower tier than its set's; or its registration was gone, so that there may have been one.
        untrusted = (
            after.retire_reason is RetireReason.UNTRUSTED_JOB and bool(before.runner_set) and not before.is_bound
        )
        if not after.retire_reason or not (ordered or has_notice or (untrusted and not before.retire_reason)):
            yield (
                "S6",
                f"{process} changed {before.retire_text!r} to {after.retire_text!r} until {after.quarantined_until}",
            )

    def _renewed(self, before: Instance, after: Instance, process: SimulatedProcess) -> Iterable[tuple[str, str]]:
        if process.action is OperatorAction.QUARANTINE:
            return
        latest = before.created_at + timedelta(seconds=self._world.most("max_age_s")) + 2 * self.tolerance
        allowed = process.kind in {"scale-down", "listener"}
        if not allowed or before.retire_reason or not before.threshold < after.threshold <= latest:
            yield (
                "S6",
                f"{process} moved the threshold of an idle instance from {before.threshold} to {after.threshold}",
            )

    def _claimed(self, before: Instance, after: Instance, process: SimulatedProcess) -> Iterable[tuple[str, str]]:
        yield from self.demand.acquired(after)
        self.demand.liveness.claimed((before.resource_class, before.usage_class, before.tier))
        if after.runner_set:
            # The claim is its own intent: the set holds the machine by its record.
            process.provisions.add(after.provision_id)
        elif after.provision_id not in self._intended:
            yield "S8", "a claim without a provision"
        if after.provision_id not in process.provisions or bool(after.runner_set) is not (process.kind == "listener"):
            yield "S1", f"claimed by {process} for {after.provision_id}"
        yield from self._reuse.claimed(after, process, runner_set=self.demand.known_set(after.runner_set))
        if process.request is not None and process.request.run_id != after.run_id:
            yield "S1", f"claimed for run {after.run_id} by {process}"
        if before.retire_reason:
            yield "S6", f"claimed although {before.retire_text}"
        left = before.threshold - self._world.clock.now()
        if left < self.margin - self.tolerance - timedelta(seconds=process.pause_s):
            yield "S13", f"claimed {left.total_seconds():.0f} s before its end"
        if after.assignment is None or self._epoch_of(after.assignment.runner_name) != after.epoch:
            yield "S4", "its runner's name is not of this epoch"

    def _may_have_read(self, record: Instance, signal: Signal, process: SimulatedProcess) -> bool:
        """Whether the signal was sent for this epoch and not replaced before the process began. A process acts on a
        report some time after reading it, and no write can be conditional on both record and report.
        """
        key = (record.instance_id, record.epoch, signal)
        replaced_at = self._signals.get(key)
        return key in self._signals and (replaced_at is None or process.started_at <= replaced_at)

    def _committed(self, before: Instance, after: Instance, process: SimulatedProcess) -> Iterable[tuple[str, str]]:
        if before.state not in {State.CREATED, State.CLAIMED}:
            yield "S5", f"{before.state} became running"
        if after.runner_set:
            if before.state is State.CREATED and not self._may_have_read(after, Signal.UD_OK, process):
                yield "S4", "running before it has booted"
            yield from self.demand.equipped(before, after)
            return
        report = self._world.database.reports.get(after.instance_id)
        if not self._may_have_read(after, Signal.UD_REG_OK, process):
            yield "S4", f"running on {report and report.signal} of epoch {report and report.epoch}"
        machine = self._world.machines[after.instance_id]
        if machine.alive and self._epoch_of(machine.state().registered_as) != after.epoch:
            yield "S4", f"running, but its runner is {machine.state()}"

    def _released_by(self, before: Instance, _: Instance, process: SimulatedProcess) -> Iterable[tuple[str, str]]:
        if before.state not in {State.CLAIMED, State.RUNNING}:
            yield "S5", f"{before.state} became releasing"
        provision = self._provision(before.provision_id)
        if before.runner_set and before.state is State.RUNNING:
            yield from self.demand.released(before, process)
            yield from self.patience.given_up(before, process)
        if before.runner_set:
            # Whether a runner may be given up is checked above. Before it listens, only the listener decides.
            if process.kind != "listener" and (before.state is State.CLAIMED or process.kind != "refresh"):
                yield "S1", f"{process} took it from set {before.runner_set}"
        elif process.kind in {"release", "refresh", "listener"} and (
            provision is None or provision.status is not ProvisionStatus.RELEASED
        ):
            yield "S1", f"{process} took it from provision {before.provision_id}, which is not released"
        if process.kind == "release" and provision is not None and not process.may_release(provision):
            yield "S1", f"{process} took it from attempt {provision.attempt} of run {provision.run_id}"

    def _pooled(self, before: Instance, after: Instance, process: SimulatedProcess) -> Iterable[tuple[str, str]]:
        filled = before.state is State.CREATED and bool(before.runner_set)
        if before.state is not State.RELEASING and not filled:
            yield "S3", f"{before.state} became idle"
        report = self._world.database.reports.get(after.instance_id)
        needed = Signal.UD_OK if filled else Signal.UD_REMOVE_REG_REMOVE_RUN_OK
        if not self._may_have_read(after, needed, process):
            yield "S4", f"idle on {report and report.signal} of epoch {report and report.epoch}"
        if after.retire_reason and not self._is_held(after, slack=self.tolerance):
            yield "S6", f"idle although {after.retire_text}"
        yield from self._reuse.pooled(after)
        yield from self._idle(after)

    def _idle(self, record: Instance) -> Iterable[tuple[str, str]]:
        machine = self._world.machines[record.instance_id]
        online = [runner.name for runner in self._world.registrations(record.instance_id) if runner.take is not None]
        if online:
            yield "S3", f"idle, but {online[0]} is online"
        if machine.alive and (
            machine.dirty or machine.state().listening or machine.state().registered_as or machine.job
        ):
            yield "S3", f"idle, but the machine is not clean: {machine.state()}, dirty: {machine.dirty}"

    def _ended(self, before: Instance, after: Instance, process: SimulatedProcess) -> Iterable[tuple[str, str]]:
        if self._world.cloud.state(before.instance_id) in OVER or process.action is OperatorAction.TERMINATE:
            return
        if before.runner_set and before.state is State.RUNNING:
            yield from self.demand.ended(before, process)
        late = self._world.clock.now() >= before.threshold + self.margin - self.tolerance
        if late:
            return
        report = self._world.database.reports.get(before.instance_id)
        signal = report.signal if report is not None and report.epoch == before.epoch else None
        provision = self._provision(before.provision_id)
        released = provision is None or provision.status is ProvisionStatus.RELEASED
        own = process.kind in {"provision", "listener"} and before.provision_id in process.provisions
        allowed = {
            # A machine that boots has no job: any listener of its set may end it.
            State.CREATED: own or released or (process.kind == "listener" and bool(before.runner_set)),
            State.CLAIMED: own or signal in {Signal.UD_FAILED, Signal.UD_REG_FAILED},
            State.RUNNING: signal is Signal.UD_REG_FAILED,
            State.RELEASING: signal in {Signal.UD_REMOVE_REG_FAILED, Signal.UD_REMOVE_REG_REMOVE_RUN_FAILED}
            or (signal is Signal.UD_REMOVE_REG_REMOVE_RUN_OK and bool(after.retire_reason)),
            State.IDLE: self._may_retire(before, report)
            or Reuse.NEVER in self._reuse.may_have_read(process)
            or self._may_be_outdated(before, process),
        }[before.state]
        if before.state in {State.RELEASING, State.IDLE} and self._is_held(before, slack=-self.tolerance):
            allowed = False
        if not allowed:
            left = (before.threshold - self._world.clock.now()).total_seconds()
            rule = "S6" if before.state in {State.RUNNING, State.RELEASING} else "S13"
            yield rule, f"{before.state} was ended by {process} {left:.0f} s before its threshold, on {signal}"

    def _is_held(self, record: Instance, *, slack: timedelta) -> bool:
        """Whether it is in quarantine, with tolerance for clock errors."""
        return record.quarantined_until is not None and self._world.clock.now() < record.quarantined_until + slack

    def _may_be_outdated(self, record: Instance, process: SimulatedProcess) -> bool:
        """Whether the process may have read a configuration with another version of the runner."""
        read = {config.runner_version for config in self.policies.may_have_read(process)}
        versions = read - {"", record.runner_version}
        return bool(record.runner_version and versions)

    def _may_retire(self, record: Instance, report: Report | None) -> bool:
        age = self._world.clock.now() - record.created_at
        return (
            bool(record.retire_reason)
            or (report is not None and bool(report.notice))
            or age
            >= timedelta(seconds=self._world.least("max_age_s")) - 2 * self._world.max_skew - self._world.max_latency
            or record.uses >= self._world.least("max_uses")
        )

    def _secrets_of(self, record: Instance) -> Iterable[tuple[str, str]]:
        credential = record.assignment.credential if record.assignment else None
        allowed = {State.CREATED: "AREGISTRATION", State.CLAIMED: "AREGISTRATION", State.RELEASING: "AREMOVAL"}
        if credential is not None and not credential.token.startswith(allowed.get(record.state, "no credential")):
            yield "S12", f"{record.state} with a credential of another step"
        starting = record.state is State.RUNNING and bool(record.runner_set) and not record.is_bound
        may_have_jit = record.state is State.CREATED or starting
        if record.assignment is not None and record.assignment.jit_config and not may_have_jit:
            yield "S12", f"{record.state} with a just-in-time configuration"
        entries = self._world.database.histories.get(record.instance_id, ())
        if entries and is_secret(entries[-1].why):
            yield "S12", "a credential in its history"

    # Reports

    def report_written(self, instance_id: str) -> None:
        after = self._world.database.reports.get(instance_id)
        before = self._reports.get(instance_id)
        if after is None:
            self._reports.pop(instance_id, None)
            return
        self._reports[instance_id] = after
        self.waste.report_written(before, after)
        self.pauses.reported(after)
        if before is not None and (before.epoch, before.signal) == (after.epoch, after.signal):
            return
        self.checks += 1
        if before is not None and before.signal is not None:
            self._signals[instance_id, before.epoch, before.signal] = self._world.loop.time()
        if after.signal is not None:
            self._signals[instance_id, after.epoch, after.signal] = None
        if before is not None and (after.epoch, after.rank) < (before.epoch, before.rank):
            self.violated("S4", f"{instance_id}: {before.signal} fell back to {after.signal}", instance_id)
        if is_secret(after.detail):
            self.violated("S12", f"{instance_id}: a credential in its report", instance_id)
        if after.signal is not None and self._world.delayed_writer is None:
            # A delayed signal was checked when it was sent.
            self.signal_sent(instance_id, after.epoch, after.signal)

    def signal_sent(self, instance_id: str, epoch: int, signal: Signal, *, duration_s: float | None = None) -> None:
        """A signal is true when it is sent, and belongs to a step that the record asks for."""
        self.checks += 1
        machine = self._world.machines.get(instance_id)
        if machine is None or not machine.alive:
            return
        for invariant, text in self.waste.signal_sent(machine, epoch, signal):
            self.violated(invariant, text, instance_id)
        if signal is Signal.UD_REMOVE_REG_FAILED:
            for invariant, text in self.patience.gives_up_removal(machine, epoch):
                self.violated(invariant, text, instance_id)
        since = machine.started_at
        record = self._world.database.instances.get(instance_id)
        is_releasing = record is not None and (record.state, record.epoch) == (State.RELEASING, epoch)
        if signal.rank >= Signal.UD_REMOVE_REG_OK.rank and is_releasing:
            since = self.waste.entered_at(instance_id)
        elif signal.rank >= Signal.UD_REG_OK.rank:
            since = self.waste.epoch_began_at(instance_id, epoch)
        if duration_s is not None and not 0 <= duration_s <= self._world.loop.time() - since + 0.001:
            self.violated("S4", f"{instance_id} signals {signal} after {duration_s} s, which is too long", instance_id)
        state = machine.state()
        if signal is Signal.UD_REG_OK and self._epoch_of(state.registered_as) != epoch:
            self.violated("S4", f"{instance_id} signals {signal} of epoch {epoch} while it is {state}", instance_id)
        if signal.rank >= Signal.UD_REMOVE_REG_OK.rank and (instance_id, epoch) not in self._released:
            self.violated("S4", f"{instance_id} signals {signal} before it was released", instance_id)
        if signal is Signal.UD_REMOVE_REG_OK and (state.registered_as or state.listening):
            self.violated("S4", f"{instance_id} signals {signal} while it is {state}", instance_id)
        if signal is Signal.UD_REMOVE_REG_REMOVE_RUN_OK and (state.registered_as or state.listening or machine.dirty):
            self.violated(
                "S3", f"{instance_id} signals {signal} while it is {state}, dirty: {machine.dirty}", instance_id
            )

    def heartbeat_sent(self, instance_id: str, said: Mapping[str, Any]) -> None:
        """A heartbeat says what the machine and its runner are when it is sent."""
        self.checks += 1
        machine = self._world.machines.get(instance_id)
        if machine is None or not machine.alive:
            return
        state = machine.state()
        true = {"notice": machine.notice, "busy": state.busy, "listening": state.listening}
        wrong = {key: said[key] for key, value in true.items() if said[key] != value}
        if wrong:
            self.violated("S4", f"a heartbeat of {instance_id} says {wrong}, but it is {true}", instance_id)

    # Provisions

    def provision_written(self, before: Provision | None, after: Provision) -> None:
        self.checks += 1
        process = self._world.writer()
        if before is None:
            self._provision_recorded(after, process)
            self.pauses.acquisition_begins(after, process)
            return
        if before.status is ProvisionStatus.RELEASED and after.status is not ProvisionStatus.RELEASED:
            self.violated("S1", f"provision {after.provision_id} was released and became {after.status}")
        for invariant, text in self.ownership.provision_written(before, after):
            self.violated(invariant, f"provision {after.provision_id}: {text}")
        if after.status is not before.status:
            if after.status is ProvisionStatus.RELEASED:
                self._closed_at[after.provision_id] = self._world.loop.time()
            self._status_changed(before, after, process)

    def _status_changed(self, before: Provision, after: Provision, process: SimulatedProcess) -> None:
        for text in _untrue_outcome(after):
            self.violated("R1", f"the outcome of provision {after.provision_id} {text}")
        if after.status is ProvisionStatus.RELEASED and not _is_true_ending(before, after):
            self.violated("L5", f"provision {after.provision_id} was {before.status} and ended as {after.ending}")
        own = after.provision_id in process.provisions
        for invariant, text in self.waste.provision_changed(after, process):
            self.violated(invariant, text)
        if after.status is ProvisionStatus.COMMITTED:
            missing = [key for key in after.instance_ids if (key, after.provision_id) not in self._ran_for]
            if not own or missing or len(set(after.instance_ids)) != after.count:
                self.violated(
                    "S1", f"provision {after.provision_id} is committed with {after.instance_ids} by {process}"
                )
        elif process.kind == "release" and not process.may_release(after):
            self.violated("S1", f"{process} released attempt {after.attempt} of run {after.run_id}")
        elif process.kind == "provision" and not own:
            self.violated("S1", f"{process} released provision {after.provision_id}")
        elif after.ending is ProvisionEnding.UNRELEASED:
            self._world.stats["ended runs released"] += 1
            if text := self._wrong_end(after, process):
                self.violated("S15", f"{process} released provision {after.provision_id} of an ended run: {text}")
        elif process.kind == "refresh" and self._world.clock.now() < before.deadline + self.margin - self.tolerance:
            self.violated("S13", f"{process} released provision {after.provision_id} before its deadline")

    def run_read(self, process: SimulatedProcess, run: GitHubRun) -> None:
        """A process has read that a run has ended."""
        ended_at = self._world.github.ended_at.get(str(run.run_id), self._world.loop.time())
        self._ends_read[process.name, str(run.run_id)] = (run.attempt, self._world.loop.time() - ended_at)

    def _wrong_end(self, provision: Provision, process: SimulatedProcess) -> str:
        """Why a process may not release a run as ended, or an empty text."""
        attempt, since_s = self._ends_read.get((process.name, provision.run_id), (0, 0.0))
        grace_s = self._world.least("ended_run_grace_s") - 2 * self.tolerance.total_seconds()
        if provision.attempt > attempt:
            return f"it is of attempt {provision.attempt}, and attempt {attempt or 'none'} was read as ended"
        return f"it ended only {since_s:.0f} s ago" if since_s < grace_s else ""

    def _provision_recorded(self, provision: Provision, process: SimulatedProcess) -> None:
        process.provisions.add(provision.provision_id)
        self._intended[provision.provision_id] = self._world.loop.time()
        for invariant, text in self._thresholds.provision_recorded(provision, process):
            self.violated(invariant, f"provision {provision.provision_id}: {text}")

    # Facts

    @property
    def tolerance(self) -> timedelta:
        """Difference between the true time and the time by which a process decided."""
        return self._world.max_skew + self._world.max_latency

    @property
    def margin(self) -> timedelta:
        return timedelta(seconds=self._world.lifetimes.margin_s)

    def _provision(self, provision_id: str) -> Provision | None:
        return self._world.database.provisions.by_id(provision_id)

    def _epoch_of(self, runner_name: str) -> int:
        parsed = parse_runner(runner_name)
        return parsed[0] if parsed else 0


def _is_true_ending(before: Provision, after: Provision) -> bool:
    """Only the provision of a run that was committed had instances to release, or until their time was up."""
    if before.status is ProvisionStatus.COMMITTED or after.runner_set:
        return after.ending is not None
    return after.ending in {ProvisionEnding.FAILED, ProvisionEnding.INTERRUPTED}


def _untrue_outcome(provision: Provision) -> Iterable[str]:
    """What the outcome of a provision says and its record does not."""
    outcome = provision.outcome
    if outcome is None or provision.runner_set:
        return
    named = {item.instance_id for item in outcome.acquired}
    counted = outcome.reused + outcome.created
    if len(named) != counted:
        yield f"counts {counted} runners and names {sorted(named)}"
    if provision.status is ProvisionStatus.COMMITTED and (outcome.error or named != set(provision.instance_ids)):
        yield f"names {sorted(named)} and the error {outcome.error!r}, but it has {provision.instance_ids}"
