"""The result of a release."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class ReleaseStatus(Enum):
    #: Reset and in the pool.
    RELEASED = "released"
    #: Terminated on purpose: too old, used too often, never ready.
    RETIRED = "retired"
    #: Not finished; the instance is terminated at its threshold.
    EXPIRED = "expired"
    #: Nothing to do, or no longer assigned to this run.
    SKIPPED = "skipped"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseOutcome:
    """The result for one instance."""

    instance_id: str
    status: ReleaseStatus
    why: str
    #: Seconds that deregistration and reset took on the machine; None if the agent did not report it.
    deregistration_s: float | None = None
    #: The agent's report: what it found and removed, and foreign jobs that it refused.
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseResult:
    run_id: str
    outcomes: tuple[ReleaseOutcome, ...]
    errors: tuple[str, ...]
    seconds: float
    calls: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def of(self, status: ReleaseStatus) -> tuple[ReleaseOutcome, ...]:
        return tuple(outcome for outcome in self.outcomes if outcome.status is status)
