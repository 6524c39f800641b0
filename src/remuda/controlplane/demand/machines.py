"""The machines of the runner sets as the listener knows them, from its own writes and its reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta

from remuda.controlplane.demand.acquisition_record import AcquisitionRecord
from remuda.domain.instance import ABSORBING, Instance, State
from remuda.domain.resources import PoolMessage
from remuda.domain.signals import Pulse, Report, Verdict, boot_verdict
from remuda.domain.supply import SetMachine
from remuda.domain.thresholds import HEARTBEAT_DEAD_AFTER_S, HEARTBEAT_STALE_AFTER_S
from remuda.ports.clock import Clock

#: States in which a machine belongs to its set, or is on its way back from it.
HELD = frozenset({State.CREATED, State.CLAIMED, State.RUNNING, State.RELEASING})
#: The order of states within an epoch. Each one is left once.
_ORDER = {
    State.CREATED: 0,
    State.CLAIMED: 0,
    State.RUNNING: 1,
    State.RELEASING: 2,
    State.IDLE: 3,
    State.TERMINATING: 4,
    State.TERMINATED: 5,
}
#: Seconds between two reads of a report: of one that changes soon, at first, of a booting machine, and of others. A
#: heartbeat is dead after three of the latter.
SOON_S = 0.5
BOOTING_S = 1.0
STEADY_S = 5.0
#: Seconds for which a runner counts as busy after GitHub refused to remove its registration.
TAKEN_FOR_S = 60.0
#: Seconds in which a search may miss a machine that this process has moved to the pool.
SEARCH_LAG_S = 10.0


class KnownMachine:
    """One use (epoch) of a machine: its record, its report, and what was observed since.

    A task that is late holds the machine's earlier use, and cannot change the present one.
    """

    __slots__ = (
        "acquisition",
        "check_at",
        "completed",
        "dead",
        "expected_since",
        "failures",
        "for_pool",
        "handled",
        "instance",
        "interrupted",
        "job_id",
        "pulse",
        "read_at",
        "report",
        "retry_at",
        "returning_since",
        "silent_since",
        "spent_since",
        "surplus_since",
        "taken_until",
        "unwanted",
    )

    def __init__(self, instance: Instance, *, now: datetime) -> None:
        self.instance = instance
        self.report: Report | None = None
        self.pulse = Pulse(dead_after_s=HEARTBEAT_DEAD_AFTER_S, stale_after_s=HEARTBEAT_STALE_AFTER_S)
        self.dead = False
        self.silent_since: datetime | None = now
        self.spent_since: datetime | None = None
        self.surplus_since: datetime | None = None
        self.completed = False
        self.returning_since: datetime | None = now if instance.state is State.RELEASING else None
        self.taken_until: datetime | None = None
        self.unwanted = ""
        self.for_pool = False
        #: Whether a task is changing it.
        self.handled = False
        #: The record of its acquisition by this process; None as soon as its runner starts.
        self.acquisition: AcquisitionRecord | None = None
        #: The job that GitHub started on it.
        self.job_id = ""
        #: Whether its spot notice was recorded for its job.
        self.interrupted = False
        #: Monotonic times: of the next read of its report, and before which a failed step is not repeated.
        self.read_at = 0.0
        self.retry_at = 0.0
        #: Monotonic time before which the cloud is not asked again whether it has ended.
        self.check_at = 0.0
        #: Monotonic time since when a change of its report is expected.
        self.expected_since = 0.0
        #: Consecutive failed steps.
        self.failures = 0

    def update(self, instance: Instance, *, now: datetime, monotonic: float) -> None:
        before, self.instance = self.instance, instance
        if before.state is not instance.state:
            self.silent_since = now
            self.spent_since = self.surplus_since = self.taken_until = None
            self.completed = self.for_pool = False
            self.unwanted = ""
            if instance.state is State.RELEASING:
                # Its job may have ended earlier.
                self.returning_since = self.returning_since or now
            # The agent must read the record before it reports something new.
            self.expected_since = monotonic
            self.read_later(monotonic)
        self._observe(now)

    def next_use(self, instance: Instance, *, now: datetime, monotonic: float) -> KnownMachine:
        """The machine with a record of a later epoch. Its agent is the same."""
        machine = KnownMachine(instance, now=now)
        machine.report, machine.pulse, machine.dead = self.report, self.pulse, self.dead
        machine.expected_since = monotonic
        machine.read_later(monotonic)
        return machine

    def observe(self, report: Report | None, *, now: datetime, monotonic: float) -> bool:
        """Note a report. Return whether a decision may change."""
        before, was_dead = self.report, self.dead
        self.report = report
        self.pulse = self.pulse.observe(report, now=now, monotonic=monotonic)
        self.dead = self.pulse.is_dead(monotonic)
        self.read_later(monotonic)
        self._observe(now)
        return self.dead != was_dead or _decisive(before) != _decisive(report)

    def _observe(self, now: datetime) -> None:
        report, instance = self.report, self.instance
        is_current = report is not None and report.epoch == instance.epoch
        active = report is not None and is_current and (report.busy or report.listening)
        if active or instance.is_bound:
            self.silent_since = None
        elif self.silent_since is None:
            self.silent_since = now
        if report is not None and report.spent_epoch == instance.epoch:
            self.spent_since = self.spent_since or now
            self.returning_since = self.returning_since or now
        if active and report is not None and report.busy:
            self.taken_until = None

    def read_later(self, monotonic: float) -> None:
        """Plan the next read of the report: the longer a change is expected already, the later."""
        interval_s = BOOTING_S if self.instance.state is State.CREATED else STEADY_S
        if self.instance.state is State.RELEASING or self.completed:
            interval_s = min(STEADY_S, max(SOON_S, (monotonic - self.expected_since) / 2))
        self.read_at = monotonic + interval_s

    def view(self, now: datetime, monotonic: float) -> SetMachine:
        return SetMachine(
            instance=self.instance,
            report=self.report,
            dead=self.dead,
            silent_since=self.silent_since,
            spent_since=self.spent_since,
            surplus_since=self.surplus_since,
            completed=self.completed,
            returning_since=self.returning_since,
            taken=self.taken_until is not None and self.taken_until > now,
            unwanted=self.unwanted,
            for_pool=self.for_pool,
            handled=self.handled or self.retry_at > monotonic,
        )

    @property
    def is_spent(self) -> bool:
        return self.report is not None and self.report.spent_epoch == self.instance.epoch

    @property
    def has_booted(self) -> bool:
        """Whether it is new, and its agent has reported that it can be used."""
        is_new = self.instance.state is State.CREATED
        return is_new and boot_verdict(self.report, self.instance.epoch) is Verdict.OK

    @property
    def has_job(self) -> bool:
        """Whether a job has started on it, by GitHub's message or its own report, and not ended by its own report."""
        report, instance = self.report, self.instance
        is_busy = report is not None and report.busy and report.epoch == instance.epoch
        return instance.state is State.RUNNING and not self.is_spent and (instance.is_bound or is_busy)

    def restart_heartbeat(self, monotonic: float) -> None:
        """Forget how long the heartbeat has not changed."""
        self.pulse = replace(self.pulse, changed_at=monotonic)

    def complete(self, now: datetime) -> None:
        """GitHub says that its job has ended."""
        self.completed = True
        self.returning_since = self.returning_since or now

    def take(self, now: datetime) -> None:
        """GitHub says that it has a job."""
        self.taken_until = now + timedelta(seconds=TAKEN_FOR_S)


def _decisive(report: Report | None) -> object:
    if report is None:
        return None
    return (
        report.epoch,
        report.signal,
        report.busy,
        report.listening,
        report.spent_epoch,
        report.notice,
    )


def _is_older(one: Instance, other: Instance) -> bool:
    return (one.epoch, _ORDER[one.state]) < (other.epoch, _ORDER[other.state])


class MachineTable:
    """All known machines, by id and by set."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        #: Called if a report is to be read sooner than planned.
        self.on_due: Callable[[], None] = lambda: None
        #: Called with a machine, as it was known, when its record says that it is terminated.
        self.on_end: Callable[[KnownMachine], None] = lambda _machine: None
        self._by_id: dict[str, KnownMachine] = {}
        self._by_set: dict[str, dict[str, KnownMachine]] = {}
        #: Provisions whose machines are being acquired by this process, which adds each machine when it has it.
        self.acquiring: set[str] = set()
        #: Idle machines by id, as the last search found them.
        self._idle: dict[str, Instance] = {}
        #: Machines that this process moved to the pool, with the monotonic time.
        self._pooled: dict[str, tuple[Instance, float]] = {}
        #: Idle machines whose pool message is being sent.
        self._publishing: dict[str, Instance] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[KnownMachine]:
        return iter(list(self._by_id.values()))

    def get(self, instance_id: str) -> KnownMachine | None:
        return self._by_id.get(instance_id)

    def of_set(self, name: str) -> Iterable[KnownMachine]:
        return self._by_set.get(name, {}).values()

    def set_names(self) -> Iterable[str]:
        return [name for name, machines in self._by_set.items() if machines]

    def put(self, instance: Instance) -> KnownMachine | None:
        """Note a record that was written or read. Return its machine; None if it belongs to no set any more.

        A record that is older than the known one, from an answer that came late, changes nothing.
        """
        instance_id = instance.instance_id
        machine = self._by_id.get(instance_id)
        if machine is not None and _is_older(instance, machine.instance):
            return machine
        if machine is not None and machine.instance.runner_set != instance.runner_set:
            self._by_set[machine.instance.runner_set].pop(instance_id, None)
        now, monotonic = self._clock.now(), self._clock.monotonic()
        if not instance.runner_set or instance.state not in HELD:
            self.remove(instance_id)
            if machine is not None and machine.instance.epoch == instance.epoch and instance.state in ABSORBING:
                self.on_end(machine)
            if instance.state is State.IDLE:
                # A sweep may have moved it to the pool, whose message comes later than a job.
                self._pooled[instance_id] = (instance, monotonic)
            return None
        if machine is None:
            machine = KnownMachine(instance, now=now)
        elif machine.instance.epoch != instance.epoch:
            machine = machine.next_use(instance, now=now, monotonic=monotonic)
        else:
            machine.update(instance, now=now, monotonic=monotonic)
        self._by_id[instance_id] = machine
        self._by_set.setdefault(instance.runner_set, {})[instance_id] = machine
        self._pooled.pop(instance_id, None)
        self._idle.pop(instance_id, None)
        self.on_due()
        return machine

    def read_soon(self, machine: KnownMachine) -> None:
        """Its report is expected to change."""
        machine.expected_since = self._clock.monotonic()
        machine.read_at = 0.0
        self.on_due()

    def remove(self, instance_id: str) -> None:
        machine = self._by_id.pop(instance_id, None)
        if machine is not None:
            self._by_set.get(machine.instance.runner_set, {}).pop(instance_id, None)

    # Idle machines

    def add_publishing(self, instance: Instance) -> None:
        self._publishing[instance.instance_id] = instance

    def publishing(self, name: str) -> int:
        """Machines that return from this set, and have no pool message yet."""
        return sum(item.runner_set == name for item in self._publishing.values())

    def add_idle(self, instance: Instance, monotonic: float) -> None:
        self._publishing.pop(instance.instance_id, None)
        self._pooled[instance.instance_id] = (instance, monotonic)

    def is_idle(self, instance: Instance) -> bool:
        """Whether a machine that this process moved to the pool is still there, as far as this process knows."""
        found, _ = self._pooled.get(instance.instance_id, (None, 0.0))
        return found is not None and found.epoch == instance.epoch

    def take_idle(self, fits: Callable[[Instance], bool]) -> PoolMessage | None:
        """Take an idle machine that no other task of this process may claim now. Return its pool message."""
        for item in self.idle():
            if item.retire_reason is None and fits(item):
                self._idle.pop(item.instance_id, None)
                self._pooled.pop(item.instance_id, None)
                return item.message()
        return None

    def set_idle(self, found: Iterable[Instance], monotonic: float) -> None:
        self._idle = {item.instance_id: item for item in found}
        self._pooled = {key: (item, at) for key, (item, at) in self._pooled.items() if monotonic - at < SEARCH_LAG_S}

    def idle(self) -> list[Instance]:
        """Idle machines, without those that this process has claimed since the search."""
        known = {**self._idle, **{key: item for key, (item, _) in self._pooled.items()}}
        return [item for key, item in known.items() if key not in self._by_id and key not in self._publishing]
