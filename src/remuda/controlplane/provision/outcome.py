"""Gathers how a provision goes, for its result and its record. It writes nothing itself."""

from __future__ import annotations

from collections import Counter

from remuda.domain.provision_outcome import (
    MAX_ACQUIRED,
    MAX_LAUNCHES,
    MAX_REASON,
    MAX_REJECTED,
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
        self._began = self._last = clock.monotonic()
        self._sources: Counter[RunnerSource] = Counter()
        self._acquired: list[AcquiredRunner] = []
        self._rejected: list[RejectedCandidate] = []
        self._launches: list[LaunchAttempt] = []
        self.phases: dict[str, float] = {}
        #: Number of rejected candidates per kind.
        self.rejections: Counter[str] = Counter()

    @property
    def seconds(self) -> float:
        return round(self._clock.monotonic() - self._began, 4)

    def done(self, phase: str) -> None:
        """Phases come one after the other."""
        now = self._clock.monotonic()
        self.phases[phase] = round(now - self._last, 4)
        self._last = now

    def reject(self, kind: RejectionKind, why: str, instance_id: str = "") -> None:
        self.rejections[kind] += 1
        if len(self._rejected) < MAX_REJECTED:
            self._rejected.append(
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
        if len(self._acquired) < MAX_ACQUIRED:
            self._acquired.append(
                AcquiredRunner(
                    instance_id=instance_id, source=source, seconds=self.seconds, registration_s=registration_s
                )
            )

    def outcome(self, *, error: str = "") -> ProvisionOutcome:
        return ProvisionOutcome(
            ended_at=to_milliseconds(self._clock.now()),
            seconds=self.seconds,
            reused=self._sources[RunnerSource.POOL],
            created=self._sources[RunnerSource.CREATED],
            phases=dict(self.phases),
            acquired=tuple(self._acquired),
            rejections=dict(self.rejections),
            rejected=tuple(self._rejected),
            launches=tuple(self._launches),
            error=error[:MAX_REASON],
        )
