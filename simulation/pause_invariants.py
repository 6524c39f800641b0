"""Invariants of pauses between attempts (P6 to P9): nothing is tried again too early, or much too late.

What failed, and so what is repeated, is read from the events of the processes; when it is tried again, from their
calls. Each series of failures belongs to one case: the sessions of one set, the launches for its jobs, the steps of one
use of a machine, the removals of one registration. Others neither lengthen nor shorten its pauses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from remuda.domain.instance import HistoryEntry, Instance, State
from remuda.domain.provision import Provision
from remuda.domain.signals import Report, Signal
from remuda.ports.machine import RemovalStatus
from simulation.invariants import parse_runner
from simulation.loop import START

if TYPE_CHECKING:
    from datetime import datetime

    from simulation.fake_machine import FakeMachine
    from simulation.world import SimulatedProcess, World

#: Tolerance in seconds, and seconds of the calls from the end of a pause to the attempt that is seen.
TICK_S, SLACK_S = 0.01, 2.0
#: Sessions: seconds of the mean first pause, the longest pause, that while another process has the session, and the one
#: that a throttled store asks for. Each pause is at least half of its mean, and at most one and a half of it.
SESSION_S, SESSION_MOST_S, CONFLICT_S, THROTTLED_S = 1.0, 60.0, 10.0, 1.0
#: Launches: the least of the first pause.
LAUNCH_LEAST_S = 2.5
#: Seconds before a pause in which a machine may have come to the pool that is acquired in it.
CAME_S = 120.0
#: Seconds that a batch of acquisitions may go on after its first machine.
CONCURRENT_S = 5.0
#: Steps of a machine: the first and the longest pause.
STEP_S, STEP_MOST_S = 2.0, 16.0
#: Removals of a registration by an agent: the first and the longest pause. The shortest is half of it.
REMOVAL_S, REMOVAL_MOST_S = 0.2, 5.0
#: Seconds of an agent's wait that nothing ends, and of one after a removal that GitHub refused because of a job.
WAIT_S, BUSY_WAIT_S = 120.0, 1.0
#: Seconds without a renewal after which a listener stops, those until it has noticed that, and those of its last steps.
LEASE_S, NOTICES_S, FINISHES_S = 25.0, 10.0, 40.0
#: Rows of the transition table that are no steps of a listener.
_NO_STEPS = frozenset({"bind", "renew", "claim", "announce"})


@dataclass(kw_only=True, eq=False, slots=True)
class _Series:
    """Failures in a row."""

    failures: int = 0
    #: When the last one was noted, by whom, and how long that process had been paused by then.
    at: float = -1e9
    pause_s: float = 0.0
    why: str = ""
    #: Attempts in the present pause.
    attempts: int = 0
    #: Whether only a person can end what fails, and the pause is the longest one.
    is_refused: bool = False

    def add(self, now: float, process: SimulatedProcess, why: str) -> None:
        self.failures += 1
        self.at, self.pause_s, self.why, self.attempts = now, process.pause_s, why, 0


class PauseInvariants:
    def __init__(self, world: World) -> None:
        self._world = world
        #: By process and set.
        self._sessions: dict[tuple[str, str], _Series] = {}
        self._launches: dict[tuple[str, str], _Series] = {}
        #: By process, instance and epoch.
        self._steps: dict[tuple[str, str, int], _Series] = {}
        #: By instance and epoch.
        self._removals: dict[tuple[str, int], _Series] = {}
        #: When machines of each class came to the pool.
        self._came: dict[str, list[float]] = {}
        #: When each set had got a machine last.
        self._acquired_at: dict[str, float] = {}
        #: Short waits that each agent may make.
        self._short_waits: Counter[str] = Counter()
        #: The last renewal of the lease by each listener, and how long it had been paused by then.
        self._renewed: dict[str, tuple[float, float]] = {}
        self.checks = 0

    def _violated(self, rule: str, text: str, instance_id: str = "") -> None:
        self._world.safety.violated(rule, text, instance_id)

    @property
    def _now(self) -> float:
        return self._world.loop.time()

    @property
    def _holds_calls(self) -> bool:
        """Whether this world delays calls of the processes."""
        return self._world.calls is not None

    # Events of the processes

    def event_recorded(self, process: SimulatedProcess, action: str, why: str, facts: Mapping[str, Any]) -> None:
        if process.kind != "listener":
            return
        name, now = facts.get("runner_set", ""), self._now
        if action in {"lease-lost", "standby"}:
            # Its next turn begins anew.
            for known in (self._sessions, self._launches):
                for key in [key for key in known if key[0] == process.name]:
                    del known[key]
        elif action in {"session-failed", "session-lost"} and name:
            series = self._sessions.setdefault((process.name, name), _Series())
            series.add(now, process, "" if action == "session-lost" else why)
            series.is_refused = bool(facts.get("fix")) or self._is_refused(name)
        elif action == "acquisition-failed" and not facts.get("for_pool"):
            self._launches.setdefault((process.name, name), _Series()).add(now, process, why)
        elif action == "step-failed":
            record = self._world.database.instances.get(facts["instance_id"])
            if record is not None:
                self._step_failed(process, record, why)

    # P6: sessions

    def opens_session(self, process: SimulatedProcess, name: str) -> None:
        series = self._sessions.get((process.name, name))
        if series is None or series.at < 0:
            return
        self.checks += 1
        pause_s, mean_s = self._now - series.at, SESSION_S * 2.0 ** (series.failures - 1)
        is_changed = self._world.safety.demand.configured_at(name) > series.at - SESSION_MOST_S
        is_held = process.pause_s != series.pause_s or self._holds_calls
        if series.why and not is_changed and pause_s < min(THROTTLED_S, mean_s / 2) - TICK_S:
            self._violated("P6", f"{process} opens a session of set {name} {pause_s:.1f} s after a failure")
        most_s = max(CONFLICT_S, min(SESSION_MOST_S, mean_s * 1.5)) + SLACK_S
        if pause_s > most_s and not is_changed and not is_held and not series.is_refused:
            times = series.failures
            text = f"{process} opens a session of set {name} {pause_s:.1f} s after {times} failures in a row"
            self._violated("P6", text)
        # Its next calls belong to the same attempt.
        series.at = -1e9

    def _is_refused(self, name: str) -> bool:
        """Whether GitHub has a set of that name that is not the configured one."""
        for item in self._world.safety.demand.configured_sets:
            found = self._world.scale_sets.find(item.scope, item.name) if item.name == name else None
            if found is not None and set(found.labels) != set(item.labels):
                return True
        return False

    def polled(self, process: SimulatedProcess, name: str) -> None:
        """A poll has ended with or without a message."""
        self._sessions.pop((process.name, name), None)

    # P7: launches

    def acquisition_begins(self, provision: Provision, process: SimulatedProcess) -> None:
        """In the pause after failures, a set acquires only what came to the pool."""
        series = self._launches.get((process.name, provision.runner_set))
        is_for_pool = "for the pool" in provision.request_summary
        if series is None or not series.failures or is_for_pool or self._world.delayed_writer is not None:
            return
        name = provision.runner_set
        if self._world.safety.demand.configured_at(name) > series.at - SESSION_MOST_S or self._holds_calls:
            return
        self.checks += 1
        # Its record may be written some time after it began.
        began_at = (provision.created_at - START).total_seconds() - process.skew_s
        if began_at <= series.at:
            return
        # A later pause is longer, unless an instance that has booted shows that launches work.
        if self._now - series.at >= LAUNCH_LEAST_S - TICK_S or process.last_fault_at > series.at:
            return
        if self._acquired_at.get(name, -CONCURRENT_S) > series.at - CONCURRENT_S:
            # Another batch had begun before the failure and tells its success after it.
            return
        series.attempts += provision.count
        came = sum(at > series.at - CAME_S for at in self._came.get(provision.resource_class, ()))
        if series.attempts > came:
            text = f"{series.attempts} machines {self._now - series.at:.1f} s after {series.failures} failures in a row"
            self._violated("P7", f"{process} acquires {text} for set {name}, and {came} came to the pool")

    def acquired(self, record: Instance) -> None:
        """A set has a machine. If it is for a job, its launches work, or it found one in the pool."""
        provision = self._world.database.provisions.by_id(record.provision_id)
        if provision is None or "for the pool" not in provision.request_summary:
            self._acquired_at[record.runner_set] = self._now
            self._end_launches(record.runner_set)

    def reported(self, report: Report) -> None:
        """When a launched machine boots, those that ended early before say nothing any more."""
        record = self._world.database.instances.get(report.instance_id)
        if record is not None and record.state is State.CREATED and report.signal is Signal.UD_OK:
            self._end_launches(record.runner_set)

    def _end_launches(self, name: str) -> None:
        for key in [key for key in self._launches if key[1] == name]:
            del self._launches[key]

    # P6: steps of machines

    def _step_failed(self, process: SimulatedProcess, record: Instance, why: str) -> None:
        key = (process.name, record.instance_id, record.epoch)
        series = self._steps.setdefault(key, _Series())
        self._check_step(process, record, series)
        series.add(self._now, process, why)

    def written(self, before: Instance | None, after: Instance, entry: HistoryEntry, process: SimulatedProcess) -> None:
        """A record was written. Most writes of a listener are steps of the machine."""
        if entry.target is State.IDLE and entry.source is not State.IDLE:
            self._came.setdefault(after.resource_class, []).append(self._now)
        if before is None or process.kind != "listener" or self._world.delayed_writer is not None:
            return
        self.acts(process)
        if entry.transition in _NO_STEPS:
            return
        series = self._steps.pop((process.name, before.instance_id, before.epoch), None)
        if series is not None:
            self._check_step(process, before, series)

    def _check_step(self, process: SimulatedProcess, record: Instance, series: _Series) -> None:
        if not series.failures:
            return
        self.checks += 1
        pause_s = self._now - series.at
        if pause_s < STEP_S - TICK_S:
            text = f"{process} repeats a step {pause_s:.1f} s after it failed: {series.why}"
            self._violated("P6", text, record.instance_id)

    # P6: removals by agents

    def removal_ended(self, machine: FakeMachine, removal: RemovalStatus) -> None:
        """After a refusal because of a job, the agent tries again after a short wait, or when the job ends."""
        if removal is RemovalStatus.BUSY:
            self._short_waits[machine.instance_id] += 1
        elif removal is not RemovalStatus.REMOVED and machine.agent is not None:
            series = self._removals.setdefault((machine.instance_id, _epoch_of(machine)), _Series())
            series.add(self._now, machine.agent, machine.agent.name)

    def removal_begins(self, machine: FakeMachine) -> None:
        series, process = self._removals.get((machine.instance_id, _epoch_of(machine))), machine.agent
        if series is None or process is None or not series.failures or series.attempts:
            return
        series.attempts += 1
        if series.why != process.name or process.pause_s != series.pause_s:
            return
        self.checks += 1
        pause_s = self._now - series.at
        longest_s = min(REMOVAL_MOST_S, REMOVAL_S * 2.0 ** (series.failures - 1))
        written_at = self._world.safety.written_at(machine.instance_id)
        changed_at = max(self._world.disturbed_at(machine), written_at, machine.job_ended_at)
        is_disturbed = changed_at > series.at or machine.job is not None or self._holds_calls
        if pause_s < REMOVAL_S / 2 - TICK_S:
            text = f"{process} removes its registration {pause_s:.2f} s after a failure"
            self._violated("P6", text, machine.instance_id)
        if pause_s > longest_s + SLACK_S and not is_disturbed:
            text = f"{process} removes its registration {pause_s:.1f} s after {series.failures} failures"
            self._violated("P6", text, machine.instance_id)

    # P8: waits of agents

    def waits(self, process: SimulatedProcess, record: Instance | None, timeout_s: float) -> None:
        """A wait without an event is long, unless the threshold comes earlier or GitHub has just refused a removal."""
        if process.kind != "agent" or timeout_s >= WAIT_S - TICK_S or record is None:
            return
        self.checks += 1
        machine = self._world.machines[record.instance_id]
        now: datetime = self._world.clock.now()
        deadlines = (record.threshold, record.deadline(busy=True))
        left_s = [(at - now).total_seconds() + self._world.most("margin_s") for at in deadlines]
        slack_s = 2 * self._world.max_skew.total_seconds() + SLACK_S
        if min(left_s) <= timeout_s + slack_s:
            return
        if self._short_waits[machine.instance_id] and timeout_s >= BUSY_WAIT_S - TICK_S:
            self._short_waits[machine.instance_id] -= 1
            return
        text = f"{process} waits for {timeout_s:.1f} s only, and is {record.state} for {min(left_s):.0f} s more"
        self._violated("P8", text, record.instance_id)

    # P9: leases

    def renewed(self, owner: str) -> None:
        if owner in self._world.processes:
            self._renewed[owner] = (self._now, self._world.processes[owner].pause_s)

    def acts(self, process: SimulatedProcess) -> None:
        """A listener acts only while no other one can have its lease, and for some seconds to give things back."""
        renewed_at, pause_s = self._renewed.get(process.name, (self._now, 0.0))
        if process.kind != "listener" or process.pause_s != pause_s or self._holds_calls:
            return
        self.checks += 1
        if self._now - renewed_at > LEASE_S + NOTICES_S + FINISHES_S:
            self._violated("P9", f"{process} acts {self._now - renewed_at:.0f} s after the last renewal of its lease")


def _epoch_of(machine: FakeMachine) -> int:
    """The epoch of a machine's registration."""
    parsed = parse_runner(machine.state().registered_as)
    return parsed[0] if parsed else 0
