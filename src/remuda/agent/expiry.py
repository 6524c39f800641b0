"""Expiry of the machine: the agent enforces the last threshold it read, even if the store is unreachable."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

from remuda.domain.instance import Instance
from remuda.domain.thresholds import expired
from remuda.ports.clock import Clock
from remuda.ports.machine import Machine

#: Minimum number of seconds between the agent's own end and the dead-man timer.
DEAD_MAN_SLACK_S = 5.0


class Expiry:
    """Stores the threshold on disk and sets the dead-man timer to it."""

    def __init__(self, *, machine: Machine, clock: Clock, margin_s: float) -> None:
        self._machine = machine
        self._clock = clock
        self._margin_s = margin_s
        self._threshold = machine.load().threshold
        if self._threshold is not None:
            self._set_dead_man_timer(self._threshold)

    def observe(self, record: Instance) -> None:
        if record.threshold == self._threshold:
            return
        self._set_dead_man_timer(record.threshold)
        self._machine.save(replace(self._machine.load(), threshold=record.threshold))
        # Assigned last, so that the next call repeats a step that failed.
        self._threshold = record.threshold

    def has_passed(self) -> bool:
        return self._threshold is not None and expired(self._threshold, now=self._clock.now(), margin_s=self._margin_s)

    def seconds_left(self, record: Instance | None) -> float | None:
        """Seconds until the agent must end the machine. None if neither the record nor the disk has a threshold."""
        threshold = record.threshold if record else self._threshold
        if threshold is None:
            return None
        return (threshold - self._clock.now()).total_seconds() + self._margin_s

    def _set_dead_man_timer(self, threshold: datetime) -> None:
        slack_s = self._margin_s + max(self._margin_s, DEAD_MAN_SLACK_S)
        self._machine.set_dead_man_timer(threshold + timedelta(seconds=slack_s))
