"""How long an instance may stay in a state, and when time has certainly run out.

Clocks differ by up to the margin: an instance is used until its threshold less the margin, and ended at its threshold
plus the margin.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime, timedelta

#: A heartbeat that did not change for so long is dead, one first seen with an older stamp too (skew included).
HEARTBEAT_INTERVAL_S = 5.0
HEARTBEAT_DEAD_AFTER_S = 15.0
HEARTBEAT_STALE_AFTER_S = 75.0
#: A century: with more, times could not be counted with.
MAX_LIFETIME = 100 * 366 * 86_400


@dataclass(frozen=True, kw_only=True, slots=True)
class Lifetimes:
    """The limits of a pool; `refresh` applies them."""

    #: A provision must be complete by then; also the life of `created` and `claimed`.
    provision_timeout_s: float = 300.0
    #: The life of `running`, unless a provision asks for another.
    max_runtime_s: float = 1_800.0
    #: The life of `idle`.
    idle_time_s: float = 420.0
    #: The life of `releasing`, extended while a job runs.
    release_time_s: float = 300.0
    #: Beyond this age, or so many uses, an instance is not pooled again.
    max_age_s: float = 86_400.0
    max_uses: int = 50
    #: What clocks may differ by.
    margin_s: float = 60.0
    #: An EC2 instance with our tags may lack a record for so long.
    unrecorded_grace_s: float = 300.0
    #: A registration with our prefix may lack a record and a machine for so long.
    ghost_grace_s: float = 900.0
    #: An instance must be missing twice, so far apart, to be gone.
    gone_after_s: float = 60.0
    #: An idle instance is announced again after so long.
    reannounce_s: float = 600.0
    #: How long the record of a terminated instance is kept.
    keep_records_s: float = 30 * 86_400.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) <= MAX_LIFETIME:
                raise ValueError(f"Lifetimes.{field.name} is not from 0 to {MAX_LIFETIME}")

    @property
    def missing_after_s(self) -> float:
        """What EC2 does not list for so long is not there: a list may lag, and the times are of several clocks."""
        return self.gone_after_s + self.margin_s

    @property
    def ghost_after_s(self) -> float:
        """So long a registration must have had neither a record nor a machine."""
        return max(self.ghost_grace_s, self.missing_after_s)


def expired(threshold: datetime, *, now: datetime, margin_s: float) -> bool:
    return threshold <= now - timedelta(seconds=margin_s)
