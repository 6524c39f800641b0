"""How often a store without notifications is polled, by who waits and for what.

The adapter of DynamoDB polls so, and the simulation's store in a share of its worlds.
"""

from __future__ import annotations

from dataclasses import dataclass

from remuda.domain.instance import Instance, State
from remuda.domain.signals import Report
from remuda.ports.clock import Clock

#: Random deviation of each interval, as a fraction, so that processes do not poll in lockstep.
JITTER = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class PollInterval:
    """Seconds between two reads: the first interval, its growth factor and its maximum."""

    first_s: float
    last_s: float
    growth: float = 1.0

    def after(self, interval_s: float) -> float:
        return min(interval_s * self.growth, self.last_s)


#: The control plane waits for reports of agents. A workflow run waits for it, and one call reads all of them.
REPORT = PollInterval(first_s=0.07, last_s=0.15, growth=1.01)
#: The instance runs a job: the awaited signal comes only after its end.
BUSY_REPORT = PollInterval(first_s=0.5, last_s=1.0, growth=1.3)
#: An agent waits for its next assignment or step.
CONTROL = PollInterval(first_s=0.25, last_s=0.25)
#: Seconds after which an agent whose record does not change polls by LONG_IDLE instead of CONTROL.
WARM_FOR_S = 600.0
LONG_IDLE = PollInterval(first_s=0.5, last_s=0.5)
#: The agent runs a job: no change of its record is urgent.
BUSY = PollInterval(first_s=2.0, last_s=2.0)
#: Entries kept of the time at which waiting for an instance began. An agent needs one.
MAX_REMEMBERED = 1_000
#: States in which an instance may stay for long.
RESTING = frozenset({State.IDLE, State.RUNNING})


class PollIntervals:
    """Chooses the interval of a wait: short if a run waits for the result, long if not, which costs less."""

    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        #: Monotonic time of the first wait for an instance in this state and epoch.
        self._resting_since: dict[tuple[str, State, int], float] = {}

    @staticmethod
    def for_report(since: Report | None) -> PollInterval:
        return BUSY_REPORT if since is not None and since.busy else REPORT

    def for_control(self, instance_id: str, since: Instance | None, *, urgent: bool) -> PollInterval:
        if not urgent:
            return BUSY
        if since is None or since.state not in RESTING:
            return CONTROL
        now = self._clock.monotonic()
        if len(self._resting_since) > MAX_REMEMBERED:
            self._resting_since.clear()
        began = self._resting_since.setdefault((instance_id, since.state, since.epoch), now)
        return LONG_IDLE if now - began >= WARM_FOR_S else CONTROL
