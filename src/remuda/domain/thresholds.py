"""Time limits of instances.

Clocks may differ by the margin: an instance is used until its threshold minus the margin, and terminated at its
threshold plus the margin.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import datetime, timedelta

#: Seconds between two heartbeats.
HEARTBEAT_INTERVAL_S = 5.0
#: Seconds without a change after which a heartbeat is dead.
HEARTBEAT_DEAD_AFTER_S = 15.0
#: Age in seconds beyond which the first observed heartbeat is dead, clock skew included.
HEARTBEAT_STALE_AFTER_S = 75.0
#: A century in seconds. Longer limits could overflow dates.
MAX_LIFETIME = 100 * 366 * 86_400


@dataclass(frozen=True, kw_only=True, slots=True)
class Lifetimes:
    """Time limits of a pool in seconds. `refresh` applies them."""

    #: Limit of a provision; also of the states `created` and `claimed`.
    provision_timeout_s: float = 300.0
    #: Limit of `running`, unless a provision requests another.
    max_runtime_s: float = 21_600.0
    #: Limit of `running` for a runner of a set without a job; renewed while it is wanted.
    listening_time_s: float = 900.0
    #: Time that a set may have more runners than it needs before they return to the pool.
    surplus_grace_s: float = 60.0
    #: Time after the end of a workflow run in which its own release may still come. Then a sweep releases it.
    ended_run_grace_s: float = 300.0
    #: Limit of `idle`.
    idle_time_s: float = 420.0
    #: Limit of `releasing`, extended while a job runs.
    release_time_s: float = 300.0
    #: Age at which an instance does not return to the pool.
    max_age_s: float = 86_400.0
    #: Uses after which an instance does not return to the pool.
    max_uses: int = 50
    #: Tolerated difference between clocks.
    margin_s: float = 60.0
    #: Time that an EC2 instance with the pool's tags may lack a record.
    unrecorded_grace_s: float = 300.0
    #: Time that a registration with the pool's prefix may lack both a record and a machine.
    stale_registration_grace_s: float = 900.0
    #: Minimum time between two failed lookups before an instance counts as gone.
    gone_after_s: float = 60.0
    #: Time after which an idle instance is announced again.
    republish_s: float = 600.0
    #: Time that the record of a terminated instance is kept.
    keep_records_s: float = 30 * 86_400.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= getattr(self, field.name) <= MAX_LIFETIME:
                raise ValueError(f"Lifetimes.{field.name} must be from 0 to {MAX_LIFETIME}")

    @property
    def missing_after_s(self) -> float:
        """Time that EC2 must not list an instance before it counts as gone: lists lag, and clocks differ."""
        return self.gone_after_s + self.margin_s

    @property
    def registration_stale_after_s(self) -> float:
        """Time that a registration must lack both a record and a machine before it is stale."""
        return max(self.stale_registration_grace_s, self.missing_after_s)


def expired(threshold: datetime, *, now: datetime, margin_s: float) -> bool:
    return threshold <= now - timedelta(seconds=margin_s)
