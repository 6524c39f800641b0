"""Transitions of an instance: the table of rows, the events that trigger them, and the conditional write per event."""

from remuda.domain.instance import Actor, RetireReason
from remuda.domain.transitions.apply import (
    MAX_WHY,
    Change,
    WriteCondition,
    advance,
    create,
    presumed_idle,
    tombstone,
)
from remuda.domain.transitions.events import (
    Announce,
    Claim,
    Commit,
    Confirm,
    End,
    Event,
    Extend,
    Quarantine,
    Release,
    Renew,
    RenewCredential,
    Retire,
    ReturnToPool,
)
from remuda.domain.transitions.table import TRANSITIONS, Transition

__all__ = [
    "MAX_WHY",
    "TRANSITIONS",
    "Actor",
    "Announce",
    "Change",
    "Claim",
    "Commit",
    "Confirm",
    "End",
    "Event",
    "Extend",
    "Quarantine",
    "Release",
    "Renew",
    "RenewCredential",
    "Retire",
    "RetireReason",
    "ReturnToPool",
    "Transition",
    "WriteCondition",
    "advance",
    "create",
    "presumed_idle",
    "tombstone",
]
