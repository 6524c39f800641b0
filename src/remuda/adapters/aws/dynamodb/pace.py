"""How often a record that somebody waits for is looked at: latency against cost, by what is waited for."""

from __future__ import annotations

from remuda.adapters.aws.dynamodb.watch import Pace
from remuda.domain.instance import Instance, State
from remuda.ports.clock import Clock

#: A control plane that waits for agents.
REPORT = Pace(first_s=0.1, last_s=1.0, growth=1.3)
#: An agent that waits for its next step.
CONTROL = Pace(first_s=0.25, last_s=0.25)
#: An idle machine, warm for so long and then a little slower.
WARM_FOR_S = 600.0
LONG_IDLE = Pace(first_s=0.5, last_s=0.5)
#: A job runs: nothing is urgent.
RUNNING = Pace(first_s=2.0, last_s=2.0)
#: How many idle machines one process remembers the beginning of. An agent has one.
MAX_REMEMBERED = 1_000


class Paces:
    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        #: Since when this process has waited on an idle machine, by its id and epoch.
        self._idle_since: dict[tuple[str, int], float] = {}

    @staticmethod
    def for_report() -> Pace:
        return REPORT

    def for_control(self, instance_id: str, since: Instance | None) -> Pace:
        if since is None or since.state is not State.IDLE:
            return RUNNING if since is not None and since.state is State.RUNNING else CONTROL
        now = self._clock.monotonic()
        if len(self._idle_since) > MAX_REMEMBERED:
            self._idle_since.clear()
        began = self._idle_since.setdefault((instance_id, since.epoch), now)
        return LONG_IDLE if now - began >= WARM_FOR_S else CONTROL
