"""The invariants, and the rules that the simulation, the unit tests and the exhaustive search share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from remuda.domain.instance import Instance, State

INVARIANTS: Mapping[str, str] = {
    "S1": "at most one provision owns an instance",
    "S2": "a job runs only on an instance whose current or last assignment is its run, never on an idle one",
    "S3": "an idle instance has no listener and no online registration, and its machine is reset",
    "S4": "a signal counts only for its epoch and step, and is true when it is sent",
    "S5": "an instance never leaves terminating and terminated",
    "S6": "no machine, job or registration in use is ended before its time",
    "S7": "only machines with this pool's tags and runners with its names are removed",
    "S8": "the intent is recorded before a machine is launched",
    "S9": "an instance is terminated only after EC2 confirmed it",
    "S10": "every operation can be interrupted at any await and finished by another process; none fails unexpectedly",
    "S11": "the trust tier of an instance never rises, and falls only if it is given to a run of the lower tier",
    "S12": "no credential is in logs, tags, messages or history, or on a record after its step",
    "S13": "safety does not depend on clocks: nothing expires early, nothing is claimed late",
    "S14": "a machine serves only runs that the pool's reuse policy allows; an ephemeral one serves one run",
    "L1": "every live state ends by its threshold and two sweeps",
    "L2": "no machine is without a record for longer than its grace period and a sweep",
    "L3": "stale registrations are removed within a sweep after GitHub allows it",
    "L4": "a lost pool message is sent again within a sweep of its time; no message is deleted before its claim",
    "L5": "every provision ends with a typed result and holds nothing after that",
}

ABSORBING = frozenset({State.TERMINATING, State.TERMINATED})
#: Order of the states within an epoch.
STATE_ORDER = {
    State.CREATED: 0,
    State.CLAIMED: 0,
    State.RUNNING: 1,
    State.RELEASING: 2,
    State.IDLE: 3,
    State.TERMINATING: 4,
    State.TERMINATED: 5,
}
_SECRETS = ("AREGISTRATION", "AREMOVAL", "AJITCONFIG", "github_pat_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    invariant: str
    text: str
    instance_id: str
    at: float

    def __str__(self) -> str:
        return f"{self.invariant} at {self.at:.3f} s: {self.text}"


def transition_violations(before: Instance, after: Instance) -> Iterator[tuple[str, str]]:
    """Violations by a write to a record by any process: invariant and text."""
    if before.state in ABSORBING and (after.state not in ABSORBING or before.state is State.TERMINATED):
        yield "S5", f"{before.state} became {after.state}"
        return
    if (after.epoch, STATE_ORDER[after.state]) < (before.epoch, STATE_ORDER[before.state]):
        yield "S5", f"{before.state} at epoch {before.epoch} became {after.state} at epoch {after.epoch}"
    claimed = after.state is State.CLAIMED and before.state is not State.CLAIMED
    if claimed and before.state is not State.IDLE:
        yield "S1", f"claimed while {before.state}"
    if after.epoch != before.epoch + claimed:
        yield "S1", f"epoch {before.epoch} became {after.epoch} at {before.state} to {after.state}"
    if not claimed and (after.owner, after.provision_id) != (before.owner, before.provision_id):
        yield "S1", f"owner {before.owner} became {after.owner} at {before.state} to {after.state}"
    if after.state is State.TERMINATED and before.state is not State.TERMINATING:
        yield "S9", f"{before.state} became terminated"


def is_secret(text: str) -> bool:
    return any(mark in text for mark in _SECRETS)
