"""The agent's own end: the last threshold it read rules, with or without the store."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from remuda.domain.instance import Instance
from remuda.domain.thresholds import expired
from remuda.ports.clock import Clock
from remuda.ports.machine import Machine

#: How long after the agent's own end the dead-man timer fires, at least.
DEAD_MAN_SLACK_S = 5.0


class Expiry:
    """Keeps the threshold on disk and the dead-man timer armed."""

    def __init__(self, *, machine: Machine, clock: Clock, margin_s: float) -> None:
        self._machine = machine
        self._clock = clock
        self._margin_s = margin_s
        self._threshold = machine.load().threshold
        if self._threshold is not None:
            self._arm(self._threshold)

    def observe(self, record: Instance) -> None:
        if record.threshold == self._threshold:
            return
        self._arm(record.threshold)
        self._machine.save(replace(self._machine.load(), threshold=record.threshold))
        # Last: what could not be armed or remembered is tried again.
        self._threshold = record.threshold

    def is_over(self) -> bool:
        return self._threshold is not None and expired(self._threshold, now=self._clock.now(), margin_s=self._margin_s)

    def seconds_left(self, record: Instance | None) -> float | None:
        """Until the agent must end, by the record or by what it remembers; None where it knows neither."""
        threshold = record.threshold if record else self._threshold
        if threshold is None:
            return None
        return (threshold - self._clock.now()).total_seconds() + self._margin_s

    def _arm(self, threshold: datetime) -> None:
        slack_s = self._margin_s + max(self._margin_s, DEAD_MAN_SLACK_S)
        self._machine.set_dead_man_timer(threshold + timedelta(seconds=slack_s))
