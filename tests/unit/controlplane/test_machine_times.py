"""Times that the listener notes about a machine: each follows from the whole history of the machine, computed again.

A time since when something holds is the beginning of the unbroken stretch in which it has held until now. It belongs to
one use of one machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from remuda.controlplane.demand.machines import TAKEN_FOR_S, KnownMachine, MachineTable
from remuda.domain.instance import Instance, State
from remuda.domain.signals import Report
from tests.support.records import at, in_set, set_holder
from tests.support.virtual_time import FixedClock

#: Seconds between two reads of a report, at least and at most, and of the report of a booting machine.
READS_S, BOOTING_READS_S = (0.5, 5.0), (1.0, 1.0)
#: Seconds without a change after which a heartbeat is dead.
DEAD_AFTER_S = 15.0
NEXT_STATES = {
    State.CREATED: (State.RUNNING,),
    State.CLAIMED: (State.RUNNING,),
    State.RUNNING: (State.RUNNING, State.RELEASING),
    State.RELEASING: (State.RELEASING,),
}


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What a listener knew after an event."""

    at: float
    record: Instance
    report: Report | None
    #: The event.
    what: str

    @property
    def is_reported(self) -> bool:
        return self.report is not None and self.report.epoch == self.record.epoch

    @property
    def is_active(self) -> bool:
        report = self.report
        return self.record.is_bound or (report is not None and self.is_reported and (report.busy or report.listening))

    @property
    def is_busy(self) -> bool:
        return self.report is not None and self.is_reported and self.report.busy

    @property
    def is_spent(self) -> bool:
        return self.report is not None and self.report.spent_epoch == self.record.epoch


@dataclass(kw_only=True)
class History:
    """All moments of one machine."""

    moments: list[Moment] = field(default_factory=list)

    @property
    def use(self) -> list[Moment]:
        """Moments of the present use."""
        epoch = self.moments[-1].record.epoch
        return [item for item in self.moments if item.record.epoch == epoch]

    @property
    def stay(self) -> list[Moment]:
        """Moments in the present state of the present use."""
        use = self.use
        first = next(number for number, item in enumerate(use) if item.record.state is use[-1].record.state)
        return use[first:]

    def silent_since(self) -> float | None:
        since = None
        for item in self.stay:
            since = None if item.is_active else item.at if since is None else since
        return since

    def spent_since(self) -> float | None:
        # The first record of a use is judged with the next report.
        return next((item.at for item in self.stay if item.is_spent and item.what != "use"), None)

    def returning_since(self) -> float | None:
        return next(
            (
                item.at
                for item in self.use
                if item.record.state is State.RELEASING
                or item.what == "completed"
                or (item.is_spent and item.what != "use")
            ),
            None,
        )

    def taken_until(self) -> float | None:
        until = None
        for item in self.stay:
            if item.what == "taken":
                until = item.at + TAKEN_FOR_S
            elif item.is_busy and item.what in {"report", "record"}:
                until = None
        return until

    def is_completed(self) -> bool:
        return any(item.what == "completed" for item in self.stay)

    def is_dead(self) -> bool:
        """Its heartbeat has not changed for a while. Reports of earlier uses count: the agent is the same."""
        reports = [item for item in self.moments if item.what == "report"]
        since, beat = None, 0
        for item in reports:
            if item.report is not None and item.report.beat != beat:
                since, beat = item.at, item.report.beat
        return since is not None and reports[-1].at - since >= DEAD_AFTER_S


EVENTS = st.lists(
    st.tuples(
        st.sampled_from((0.0, 0.1, 1.0, 4.0, 20.0, 70.0)),
        st.sampled_from(
            ("report", "report", "report", "silence", "bound", "state", "use", "taken", "completed", "marks", "time")
        ),
        st.fixed_dictionaries(
            {
                "behind": st.sampled_from((0, 0, 0, 1)),
                "busy": st.booleans(),
                "listening": st.booleans(),
                "spent": st.sampled_from((False, False, True)),
                "beats": st.booleans(),
                "choice": st.integers(0, 3),
            }
        ),
    ),
    max_size=20,
)


class _Observed:
    """A table with one machine, and its history."""

    def __init__(self) -> None:
        self.clock = FixedClock()
        self.table = MachineTable(self.clock)
        self.record = in_set(State.CREATED)
        self.report: Report | None = None
        self.history = History()
        self.beat = 0
        self.handled_use = 0
        self._put(self.record, "use")

    @property
    def machine(self) -> KnownMachine:
        found = self.table.get(self.record.instance_id)
        assert found is not None
        return found

    def _put(self, record: Instance, what: str) -> None:
        self.record = record
        self.table.put(record)
        self.note(what)

    def note(self, what: str) -> None:
        moment = Moment(at=self.clock.passed_s, record=self.record, report=self.report, what=what)
        self.history.moments.append(moment)

    def apply(self, event: str, values: dict[str, Any]) -> None:
        machine, record, now = self.machine, self.record, self.clock.now()
        if event == "report":
            self.beat += values["beats"]
            self.report = Report(
                instance_id=record.instance_id,
                epoch=max(0, record.epoch - values["behind"]),
                busy=values["busy"],
                listening=values["listening"],
                spent_epoch=record.epoch if values["spent"] else 0,
                beat=self.beat,
                beat_at=now,
            )
            machine.observe(self.report, now=now, monotonic=self.clock.monotonic())
            self.note("report")
        elif event == "silence":
            self.report = None
            machine.observe(None, now=now, monotonic=self.clock.monotonic())
            self.note("report")
        elif event == "bound" and record.state is State.RUNNING:
            self._put(replace(record, holder=set_holder(run_id="77")), "record")
        elif event == "state":
            following = NEXT_STATES[record.state]
            state = following[values["choice"] % len(following)]
            holder = None if state is State.RELEASING else record.holder
            self._put(replace(record, state=state, holder=holder), "record")
        elif event == "use":
            first = in_set(State.CREATED)
            self._put(replace(first, state=State.CLAIMED, epoch=record.epoch + 1), "use")
        elif event == "taken":
            machine.take(now)
            self.note("taken")
        elif event == "completed":
            machine.complete(now)
            self.note("completed")
        elif event == "marks":
            # What others note about it.
            machine.surplus_since, machine.unwanted, machine.for_pool = now, "a test", True
            machine.failures, machine.retry_at, machine.check_at = 4, 1e6, 1e6
            machine.job_id, machine.interrupted, machine.handled = "77", True, True
            self.note("marks")

    def check(self) -> None:
        machine, history = self.machine, self.history

        def time(seconds: float | None) -> datetime | None:
            return None if seconds is None else at(seconds)

        assert machine.silent_since == time(history.silent_since()), "silent"
        assert machine.spent_since == time(history.spent_since()), "spent"
        assert machine.returning_since == time(history.returning_since()), "returning"
        assert machine.taken_until == time(history.taken_until()), "taken"
        assert machine.completed == history.is_completed(), "completed"
        assert machine.dead == history.is_dead(), "dead"
        is_marked = any(item.what == "marks" for item in history.stay)
        assert (machine.surplus_since is not None) == is_marked, "surplus"
        assert (bool(machine.unwanted), machine.for_pool) == (is_marked, is_marked), "marks of a state"
        is_marked = any(item.what == "marks" for item in history.use)
        failed = (4, 1e6, 1e6, "77", True, True) if is_marked else (0, 0.0, 0.0, "", False, False)
        assert failed == (
            machine.failures,
            machine.retry_at,
            machine.check_at,
            machine.job_id,
            machine.interrupted,
            machine.handled,
        ), "marks of a use"
        self.check_next_read()

    def check_next_read(self) -> None:
        last = self.history.moments[-1]
        if last.what == "use" and len(self.history.moments) == 1:
            assert self.machine.read_at == 0.0
        elif last.what == "report":
            least_s, most_s = BOOTING_READS_S if self.record.state is State.CREATED else READS_S
            assert least_s <= self.machine.read_at - last.at <= most_s, "next read"
            is_expected = self.record.state is State.RELEASING or self.machine.completed
            if not is_expected and self.record.state is not State.CREATED:
                assert self.machine.read_at - last.at == most_s, "next read"


@given(EVENTS)
def test_each_time_follows_from_the_history_of_the_present_use(
    events: list[tuple[float, str, dict[str, Any]]],
) -> None:
    observed = _Observed()
    for passed_s, event, values in events:
        observed.clock.passed_s += passed_s
        observed.apply(event, values)
        observed.check()
