"""Decisions of scale-down: which machines are terminated, kept or marked as orphans, and why.

Phase 1 handles machines that are tagged as orphans, phase 2 the others. A decision to terminate names the registrations
that must be removed before the machine may be terminated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum, StrEnum
from operator import itemgetter

from remuda.domain.instance import Instance, State
from remuda.domain.scale_down.fleet import GHR_OWNER_TAG, GHR_TYPE_TAG, FleetMachine, Registration, Registrations
from remuda.domain.scale_down.idle_config import Eviction, Quota
from remuda.domain.scale_down.policy import IdleScope, ScaleDownPolicy
from remuda.domain.timestamps import after

#: Instance id at the end of a runner's name.
_INSTANCE = re.compile(r"i-[0-9a-f]{8,17}$", re.IGNORECASE)


class Action(StrEnum):
    TERMINATE = "terminate"
    KEEP = "keep"
    MARK_ORPHAN = "mark-orphan"
    UNMARK_ORPHAN = "unmark-orphan"
    SKIP = "skip"


class ScaleDownPhase(Enum):
    ORPHANS = 1
    ACTIVE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    instance_id: str
    owner: str
    action: Action
    reason: str
    phase: ScaleDownPhase
    #: Scope of its registrations.
    scope: str | None = None
    #: Registrations that must be removed before the machine is terminated.
    registrations: tuple[Registration, ...] = ()
    #: Runner id in the machine's tag, if no list contains it: it must be checked as well.
    tagged_runner_id: int | None = None

    @property
    def is_removal(self) -> bool:
        """Whether it removes a registration from GitHub."""
        return self.action is Action.TERMINATE and bool(self.registrations)


def decision(
    machine: FleetMachine,
    action: Action,
    reason: str,
    phase: ScaleDownPhase,
    *,
    scope: str | None = None,
    registrations: tuple[Registration, ...] = (),
) -> Decision:
    return Decision(
        instance_id=machine.instance_id,
        owner=machine.owner,
        action=action,
        reason=reason,
        phase=phase,
        scope=scope or machine.scope,
        registrations=registrations,
    )


# Exceptions -----------------------------------------------------------------------------------------------------------


def decide_bypassed(machine: FleetMachine, phase: ScaleDownPhase) -> Decision | None:
    if not machine.is_bypassed:
        return None
    return decision(machine, Action.SKIP, "tagged with ghr:bypass-removal", phase)


def decide_recorded(machine: FleetMachine, record: Instance, phase: ScaleDownPhase) -> Decision:
    """Leave a machine of the pool to its record and threshold."""
    if machine.is_orphan:
        reason = f"it has a live record ({record.state}): the orphan tag is wrong"
        return decision(machine, Action.UNMARK_ORPHAN, reason, phase)
    return decision(machine, Action.KEEP, f"managed by its record ({record.state})", phase)


# Phase 1 --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookup:
    """Result of a request to GitHub for the runner in a machine's tag."""

    #: None if there is no such runner.
    found: Registration | None = None
    #: Why the request failed, or empty.
    failed: str = ""


def decide_orphan(
    machine: FleetMachine,
    lookup: Lookup | None,
    registered: Sequence[Registration] | None,
    *,
    found_in: str | None = None,
) -> Decision:
    """Decide about a machine that is tagged as an orphan.

    `registered` are its registrations in the owner's list, None if that list is incomplete. `found_in` is the scope of
    that list if the machine's tags do not name it.
    """
    if machine.scope is None and machine.runner_id_tag:
        return decision(machine, Action.SKIP, _contradictory_tags(machine), ScaleDownPhase.ORPHANS)
    if lookup is None:
        return _decide_unverified(machine, "it has no valid runner id", registered, found_in)
    if lookup.failed:
        return decision(machine, Action.SKIP, f"the request to GitHub failed: {lookup.failed}", ScaleDownPhase.ORPHANS)
    runner = lookup.found
    if runner is None:
        return _decide_unverified(machine, f"GitHub has no runner {machine.runner_id}", registered, found_in)
    if _is_of_another(runner, machine):
        # The tag is wrong: that runner says nothing about this machine.
        why = f"runner {runner.runner_id} is {runner.name}, another machine's"
        return _decide_unverified(machine, why, registered, found_in)
    is_confirmed = runner.busy and not runner.online
    if not is_confirmed and not runner.belongs_to(machine.instance_id):
        # Unmarking would not last: phase 2 finds registrations by name and would mark it again.
        reason = f"runner {runner.runner_id} exists, but its name does not end with the instance id: {runner.name}"
        return decision(machine, Action.SKIP, reason, ScaleDownPhase.ORPHANS)
    if not is_confirmed:
        state = "online" if runner.online else "offline"
        work = "busy" if runner.busy else "idle"
        reason = f"not an orphan: runner {runner.runner_id} is {state} and {work}"
        return decision(machine, Action.UNMARK_ORPHAN, reason, ScaleDownPhase.ORPHANS)
    why = f"confirmed: runner {runner.runner_id} is offline and busy"
    others = [item for item in registered or () if item.runner_id != runner.runner_id]
    return _decide_registered(machine, why, others, found_in)


def _is_of_another(runner: Registration, machine: FleetMachine) -> bool:
    """Whether the runner's name contains the id of another machine. A name without an id does not."""
    named = _INSTANCE.search(runner.name)
    return named is not None and named[0].lower() != machine.instance_id.lower()


def _decide_unverified(
    machine: FleetMachine, why: str, registered: Sequence[Registration] | None, found_in: str | None
) -> Decision:
    """Terminate unless GitHub lists a busy runner of this machine."""
    if registered is None:
        reason = f"{why}, and the owner's runners cannot be listed: it may be busy"
        return decision(machine, Action.SKIP, reason, ScaleDownPhase.ORPHANS)
    return _decide_registered(machine, why, registered, found_in)


def _decide_registered(
    machine: FleetMachine, why: str, registered: Sequence[Registration], found_in: str | None
) -> Decision:
    busy = next((item for item in registered if item.busy), None)
    if busy is not None:
        reason = f"{why}, but it runs a job as {busy.name}"
        return decision(machine, Action.UNMARK_ORPHAN, reason, ScaleDownPhase.ORPHANS)
    return decision(
        machine,
        Action.TERMINATE,
        f"orphan: {why}",
        ScaleDownPhase.ORPHANS,
        scope=found_in,
        registrations=tuple(registered),
    )


# Phase 2 --------------------------------------------------------------------------------------------------------------


def decide_active(
    machines: Sequence[FleetMachine],
    registered: Mapping[str, Registrations | None],
    policy: ScaleDownPolicy,
    quota: Quota,
    now: datetime,
) -> list[Decision]:
    """Decide about machines in EC2's order. `registered` is by scope; None if an owner's list is incomplete."""
    groups: dict[str | None, list[FleetMachine]] = {}
    for machine in machines:
        groups.setdefault(machine.scope, []).append(machine)
    decisions: list[Decision] = []
    idle_left = quota.idle_count
    for scope, group in groups.items():
        if policy.idle_scope is IdleScope.OWNER:
            idle_left = quota.idle_count
        if scope is None:
            decisions += [
                decision(machine, Action.SKIP, _contradictory_tags(machine), ScaleDownPhase.ACTIVE) for machine in group
            ]
            continue
        known = registered.get(scope)
        for machine in _keep_first(group, quota.eviction):
            if known is None:
                reason = f"the runners of {scope} cannot be listed"
                decisions.append(decision(machine, Action.SKIP, reason, ScaleDownPhase.ACTIVE))
                continue
            found = known.get(machine.instance_id, ())
            made, quota_used = _decide_one(machine, found, policy, quota=quota, idle_left=idle_left, now=now)
            idle_left -= quota_used
            decisions.append(made)
    return decisions


def _keep_first(group: Sequence[FleetMachine], eviction: Eviction) -> list[FleetMachine]:
    """Sort machines so that those to keep come first. Machines without a launch time come last; they count as young."""
    known = [(machine.launched_at, machine) for machine in group if machine.launched_at is not None]
    unknown = [machine for machine in group if machine.launched_at is None]
    # Stable also with `reverse`: equal launch times keep the order of the list.
    known.sort(key=itemgetter(0), reverse=eviction is Eviction.OLDEST_FIRST)
    return [*(machine for _, machine in known), *unknown]


def _decide_one(
    machine: FleetMachine,
    registrations: tuple[Registration, ...],
    policy: ScaleDownPolicy,
    *,
    quota: Quota,
    idle_left: int,
    now: datetime,
) -> tuple[Decision, int]:
    """Return the decision and the part of the idle quota that it uses."""
    if not registrations:
        return _decide_missing(machine, policy, now), 0
    age = None if machine.launched_at is None else now - machine.launched_at
    minimum = policy.minimum(machine)
    if age is None or age < minimum:
        actual = "unknown age" if age is None else f"{_minutes(age)} old"
        reason = f"too young: {actual}, the minimum is {_minutes(minimum)}"
        return decision(machine, Action.KEEP, reason, ScaleDownPhase.ACTIVE), 0
    if idle_left > 0:
        nth = quota.idle_count - idle_left + 1
        reason = f"kept as idle: {nth} of {quota.idle_count} ({quota.window})"
        return decision(machine, Action.KEEP, reason, ScaleDownPhase.ACTIVE), 1
    busy = next((item for item in registrations if item.busy), None)
    if busy is not None:
        return decision(machine, Action.KEEP, f"busy: {busy.name} is running a job", ScaleDownPhase.ACTIVE), 0
    full = f"the quota of {quota.idle_count} is full" if quota.idle_count else "no idle quota now"
    made = decision(
        machine,
        Action.TERMINATE,
        f"idle, {_minutes(age)} old, {full}",
        ScaleDownPhase.ACTIVE,
        registrations=registrations,
    )
    listed = {item.runner_id for item in registrations}
    return replace(made, tagged_runner_id=None if machine.runner_id in listed else machine.runner_id), 0


def _decide_missing(machine: FleetMachine, policy: ScaleDownPolicy, now: datetime) -> Decision:
    age = None if machine.launched_at is None else now - machine.launched_at
    if age is None:
        return decision(machine, Action.KEEP, "not registered, unknown age", ScaleDownPhase.ACTIVE)
    if age < policy.boot:
        reason = f"booting: {_minutes(age)} of {_minutes(policy.boot)}"
        return decision(machine, Action.KEEP, reason, ScaleDownPhase.ACTIVE)
    reason = f"not registered {_minutes(age)} after its launch, the maximum is {_minutes(policy.boot)}"
    return decision(machine, Action.MARK_ORPHAN, reason, ScaleDownPhase.ACTIVE)


def within_budget(decisions: Sequence[Decision], left: int | None) -> list[Decision]:
    """Limit the removals to `left`, evicting in order; the others wait for the next cycle."""
    if left is None:
        return list(decisions)
    result: list[Decision] = []
    for item in reversed(decisions):
        made = item
        if item.is_removal and left == 0:
            made = revised(item, Action.KEEP, f"postponed to the next cycle (max-removals-per-cycle): {item.reason}")
        elif item.is_removal:
            left -= 1
        result.append(made)
    return result[::-1]


def revised(item: Decision, action: Action, reason: str) -> Decision:
    """Return a decision that replaces one that a later check refuted."""
    return replace(item, action=action, reason=reason, registrations=())


def found_busy(item: Decision, registration: Registration) -> Decision:
    """Return the decision for a machine that turned out to run a job. It is not an orphan then."""
    action = Action.UNMARK_ORPHAN if item.phase is ScaleDownPhase.ORPHANS else Action.KEEP
    return revised(item, action, f"busy: {registration.name} has started a job")


def _contradictory_tags(machine: FleetMachine) -> str:
    kind = machine.tags.get(GHR_TYPE_TAG, "")
    return f"its tags do not identify its owner ({GHR_OWNER_TAG} {machine.owner!r}, {GHR_TYPE_TAG} {kind!r})"


def _minutes(span: timedelta) -> str:
    seconds = span.total_seconds()
    return f"{seconds:.3g} s" if abs(seconds) < 60 else f"{seconds / 60:.4g} min"


# The pool -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Renewal:
    """Longer threshold for an idle instance of the pool within the quota."""

    instance: Instance
    until: datetime
    reason: str


def renewals(
    records: Sequence[Instance],
    quota: Quota,
    *,
    now: datetime,
    idle_time_s: float,
    max_age_s: float,
) -> list[Renewal]:
    """Return the renewals per class. They never exceed the maximum age and never shorten a threshold."""
    result: list[Renewal] = []
    by_class: dict[str, list[Instance]] = {}
    for record in records:
        if record.state is State.IDLE and record.retire_reason is None and record.threshold > now:
            by_class.setdefault(record.resource_class, []).append(record)
    for name, group in sorted(by_class.items()):
        newest_first = quota.eviction is Eviction.OLDEST_FIRST
        group.sort(key=lambda item: (item.created_at, item.instance_id), reverse=newest_first)
        young = [item for item in group if (now - item.created_at).total_seconds() < max_age_s]
        for number, record in enumerate(young[: quota.idle_count], 1):
            until = min(after(now, idle_time_s), after(record.created_at, max_age_s))
            if until <= record.threshold:
                continue
            reason = f"kept as idle: {number} of {quota.idle_count} of class {name} ({quota.window})"
            result.append(Renewal(instance=record, until=until, reason=reason))
    return result
