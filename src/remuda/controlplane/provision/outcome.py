"""Gathers how a provision goes, for its result and its record. It writes nothing itself."""

from __future__ import annotations

from collections import Counter

from remuda.domain.provision_outcome import (
    MAX_LAUNCHES,
    MAX_REASON,
    MAX_REFUSALS,
    MAX_TAKEN,
    AcquiredRunner,
    LaunchAttempt,
    ProvisionOutcome,
    RejectedCandidate,
    RunnerSource,
)
from remuda.domain.timestamps import to_milliseconds
from remuda.ports.clock import Clock


class OutcomeRecorder:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = self._last = clock.monotonic()
        self._sources: Counter[RunnerSource] = Counter()
        self._taken: list[AcquiredRunner] = []
        self._refusals: list[RejectedCandidate] = []
        self._launches: list[LaunchAttempt] = []
        self.phases: dict[str, float] = {}
        #: Hints that were not used, and why, counted.
        self.refused: Counter[str] = Counter()

    @property
    def seconds(self) -> float:
        return round(self._clock.monotonic() - self._began, 4)

    def done(self, phase: str) -> None:
        """Phases come one after the other."""
        now = self._clock.monotonic()
        self.phases[phase] = round(now - self._last, 4)
        self._last = now

    def refuse(self, kind: str, why: str, instance_id: str = "") -> None:
        self.refused[kind] += 1
        if len(self._refusals) < MAX_REFUSALS:
            self._refusals.append(
                RejectedCandidate(kind=kind, why=why[:MAX_REASON], seconds=self.seconds, instance_id=instance_id)
            )

    def launch(self, count: int, launched: int, errors: tuple[str, ...], *, why: str = "") -> None:
        if len(self._launches) < MAX_LAUNCHES:
            cut = tuple(error[:MAX_REASON] for error in errors[:MAX_LAUNCHES])
            self._launches.append(
                LaunchAttempt(count=count, launched=launched, seconds=self.seconds, errors=cut, why=why[:MAX_REASON])
            )

    def take(self, instance_id: str, source: RunnerSource, registration_s: float | None) -> None:
        self._sources[source] += 1
        if len(self._taken) < MAX_TAKEN:
            self._taken.append(
                AcquiredRunner(
                    instance_id=instance_id, source=source, seconds=self.seconds, registration_s=registration_s
                )
            )

    def course(self, *, error: str = "") -> ProvisionOutcome:
        return ProvisionOutcome(
            ended_at=to_milliseconds(self._clock.now()),
            seconds=self.seconds,
            reused=self._sources[RunnerSource.POOL],
            created=self._sources[RunnerSource.CREATED],
            phases=dict(self.phases),
            taken=tuple(self._taken),
            refused=dict(self.refused),
            refusals=tuple(self._refusals),
            launches=tuple(self._launches),
            error=error[:MAX_REASON],
        )
