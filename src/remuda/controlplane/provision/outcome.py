"""Recorder of a provision's progress, for its result and its record. Writes nothing itself."""

from __future__ import annotations

from collections import Counter

from remuda.domain.provision import (
    MAX_ACQUIRED,
    MAX_ERROR,
    MAX_LAUNCHES,
    MAX_REASON,
    MAX_REJECTIONS,
    AcquiredRunner,
    LaunchAttempt,
    ProvisionOutcome,
    RejectedCandidate,
    RejectionKind,
    RunnerSource,
)
from remuda.domain.timestamps import to_milliseconds
from remuda.ports.clock import Clock


class OutcomeRecorder:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_at = self._phase_started_at = clock.monotonic()
        self._sources: Counter[RunnerSource] = Counter()
        self._acquired: list[AcquiredRunner] = []
        self._rejections: list[RejectedCandidate] = []
        self._launches: list[LaunchAttempt] = []
        self.phases: dict[str, float] = {}
        #: Number of pool messages that did not become a runner, by kind.
        self.rejected: Counter[str] = Counter()

    @property
    def seconds(self) -> float:
        """Seconds since the provision began."""
        return round(self._clock.monotonic() - self._started_at, 4)

    def end_phase(self, name: str) -> None:
        """Record the seconds since the previous phase ended."""
        now = self._clock.monotonic()
        self.phases[name] = round(now - self._phase_started_at, 4)
        self._phase_started_at = now

    def reject(self, kind: RejectionKind, why: str, instance_id: str = "") -> None:
        self.rejected[kind.value] += 1
        if len(self._rejections) < MAX_REJECTIONS:
            self._rejections.append(
                RejectedCandidate(kind=kind, why=why[:MAX_REASON], seconds=self.seconds, instance_id=instance_id)
            )

    def launch(self, count: int, launched: int, errors: tuple[str, ...], *, why: str = "") -> None:
        if len(self._launches) < MAX_LAUNCHES:
            errors = tuple(error[:MAX_REASON] for error in errors[:MAX_LAUNCHES])
            self._launches.append(
                LaunchAttempt(count=count, launched=launched, seconds=self.seconds, errors=errors, why=why[:MAX_REASON])
            )

    def acquire(self, instance_id: str, source: RunnerSource, *, registration_s: float | None = None) -> None:
        self._sources[source] += 1
        if len(self._acquired) < MAX_ACQUIRED:
            self._acquired.append(
                AcquiredRunner(
                    instance_id=instance_id, source=source, seconds=self.seconds, registration_s=registration_s
                )
            )

    def outcome(self, *, error: str = "", exit_code: int = 0) -> ProvisionOutcome:
        return ProvisionOutcome(
            ended_at=to_milliseconds(self._clock.now()),
            seconds=self.seconds,
            reused=self._sources[RunnerSource.POOL],
            created=self._sources[RunnerSource.CREATED],
            phases=dict(self.phases),
            acquired=tuple(self._acquired),
            rejected=dict(self.rejected),
            rejections=tuple(self._rejections),
            launches=tuple(self._launches),
            error=error[:MAX_ERROR],
            exit_code=exit_code,
        )
