"""How often a record that somebody waits for is looked at: latency against cost, by what is waited for."""

from __future__ import annotations

from remuda.adapters.aws.dynamodb.watch import Pace
from remuda.domain.instance import Instance, State
from remuda.domain.signals import Report
from remuda.ports.clock import Clock

#: A control plane that waits for agents: a run waits with it, and one call looks at all of them.
REPORT = Pace(first_s=0.07, last_s=0.15, growth=1.01)
#: A job runs there: whatever is waited for comes after it.
BUSY_REPORT = Pace(first_s=0.5, last_s=1.0, growth=1.3)
#: An agent that waits for its next step.
CONTROL = Pace(first_s=0.25, last_s=0.25)
#: A machine without a job, idle or a run's: for so long, and then a little slower.
WARM_FOR_S = 600.0
LONG_IDLE = Pace(first_s=0.5, last_s=0.5)
#: A job runs: nothing is urgent.
BUSY = Pace(first_s=2.0, last_s=2.0)
#: How many such machines one process remembers the beginning of. An agent has one.
MAX_REMEMBERED = 1_000
#: States in which a machine may be for long.
RESTING = frozenset({State.IDLE, State.RUNNING})


class Paces:
    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        #: Since when this process has waited on a machine that rests, by its id, state and epoch.
        self._resting_since: dict[tuple[str, State, int], float] = {}

    @staticmethod
    def for_report(since: Report | None) -> Pace:
        return BUSY_REPORT if since is not None and since.busy else REPORT

    def for_control(self, instance_id: str, since: Instance | None, *, urgent: bool) -> Pace:
        if not urgent:
            return BUSY
        if since is None or since.state not in RESTING:
            return CONTROL
        now = self._clock.monotonic()
        if len(self._resting_since) > MAX_REMEMBERED:
            self._resting_since.clear()
        began = self._resting_since.setdefault((instance_id, since.state, since.epoch), now)
        return LONG_IDLE if now - began >= WARM_FOR_S else CONTROL
