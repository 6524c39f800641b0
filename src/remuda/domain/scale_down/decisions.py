"""Who goes, who stays, and why: the decision table of scale-down, as pure functions.

Phase 1 judges machines that are tagged as orphans, phase 2 the others. A decision to terminate names the registrations
that must be gone before the machine may go.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum, StrEnum
from operator import itemgetter

from remuda.domain.instance import Instance, State
from remuda.domain.scale_down.fleet import FleetMachine, Registered, Registration
from remuda.domain.scale_down.idle_config import Eviction, IdleWindow, Quota
from remuda.domain.timestamps import after

#: How long a runner may not be removed after its launch, unless a setting says otherwise.
MINIMUM_MIN = {"linux": 5.0, "windows": 15.0}
BOOT_MIN = 5.0
#: At the end of a runner's name.
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


class IdleScope(StrEnum):
    """What an idle quota counts for."""

    ENVIRONMENT = "environment"
    OWNER = "owner"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleDownPolicy:
    windows: tuple[IdleWindow, ...] = ()
    #: In minutes; None: by operating system.
    minimum_min: float | None = None
    boot_min: float = BOOT_MIN
    idle_scope: IdleScope = IdleScope.ENVIRONMENT
    #: How many machines may lose a registration in one cycle; None: all of them.
    max_removals: int | None = None

    def minimum(self, machine: FleetMachine) -> timedelta:
        minutes = MINIMUM_MIN[machine.os] if self.minimum_min is None else self.minimum_min
        return timedelta(minutes=minutes)

    @property
    def boot(self) -> timedelta:
        return timedelta(minutes=self.boot_min)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    instance_id: str
    owner: str
    action: Action
    reason: str
    phase: ScaleDownPhase
    #: Where its registrations are, and those that must be gone before the machine may go.
    scope: str | None = None
    registrations: tuple[Registration, ...] = ()
    #: The runner that the machine says is its own, where it is in no list: to be looked at as well.
    tagged_runner_id: int | None = None

    @property
    def is_removal(self) -> bool:
        """It takes a registration from GitHub."""
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


# Whom the table does not concern --------------------------------------------------------------------------------------


def decide_bypassed(machine: FleetMachine, phase: ScaleDownPhase) -> Decision | None:
    if not machine.is_bypassed:
        return None
    return decision(machine, Action.SKIP, "tagged to be left alone (ghr:bypass-removal)", phase)


def decide_recorded(machine: FleetMachine, record: Instance, phase: ScaleDownPhase) -> Decision:
    """A machine of the pool is ruled by its record and the threshold in it."""
    if machine.is_orphan:
        reason = f"it has a live record ({record.state}): the orphan tag is a stray one"
        return decision(machine, Action.UNMARK_ORPHAN, reason, phase)
    return decision(machine, Action.KEEP, f"its record rules it ({record.state})", phase)


# Phase 1 --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookup:
    """What GitHub says of the runner whose id the machine told. `found` is None for: there is none."""

    found: Registration | None = None
    #: Why GitHub could not be asked.
    failed: str = ""


def needs_lookup(machine: FleetMachine) -> bool:
    return machine.scope is not None and machine.runner_id is not None


def decide_orphan(
    machine: FleetMachine,
    lookup: Lookup | None,
    registered: Sequence[Registration] | None,
    *,
    found_in: str | None = None,
) -> Decision:
    """`registered` are its registrations in the owner's list, None where that list is not complete. `found_in` is the
    scope of that list, where the machine's tags do not say.
    """
    if machine.scope is None and machine.runner_id_tag:
        return decision(machine, Action.SKIP, _unclear(machine), ScaleDownPhase.ORPHANS)
    if lookup is None:
        return _decide_unverified(machine, "it has no usable runner id", registered, found_in)
    if lookup.failed:
        return decision(machine, Action.SKIP, f"GitHub could not be asked: {lookup.failed}", ScaleDownPhase.ORPHANS)
    runner = lookup.found
    if runner is None:
        return _decide_unverified(machine, f"GitHub knows no runner {machine.runner_id}", registered, found_in)
    if _is_of_another(runner, machine):
        # Its tag is wrong: what GitHub says of that runner says nothing of this machine.
        why = f"runner {runner.runner_id} is not its own but {runner.name}"
        return _decide_unverified(machine, why, registered, found_in)
    is_confirmed = runner.busy and not runner.online
    if not is_confirmed and not runner.belongs_to(machine.instance_id):
        # Without the tag it would be marked again: no name says that it is this machine's.
        reason = f"runner {runner.runner_id} exists, by a name that does not end with the instance: {runner.name}"
        return decision(machine, Action.SKIP, reason, ScaleDownPhase.ORPHANS)
    if not is_confirmed:
        state = "online" if runner.online else "offline"
        work = "busy" if runner.busy else "idle"
        reason = f"a false alarm: runner {runner.runner_id} is {state} and {work}"
        return decision(machine, Action.UNMARK_ORPHAN, reason, ScaleDownPhase.ORPHANS)
    why = f"confirmed: runner {runner.runner_id} is offline and busy"
    others = [item for item in registered or () if item.runner_id != runner.runner_id]
    return _decide_registered(machine, why, others, found_in)


def _is_of_another(runner: Registration, machine: FleetMachine) -> bool:
    """Whether the name says so. One that names no machine says nothing against the tag."""
    named = _INSTANCE.search(runner.name)
    return named is not None and named[0].lower() != machine.instance_id.lower()


def _decide_unverified(
    machine: FleetMachine, why: str, registered: Sequence[Registration] | None, found_in: str | None
) -> Decision:
    """Terminate, unless GitHub shows a runner that is this machine's all the same."""
    if registered is None:
        reason = f"{why}, and the owner's runners could not be listed: it may be busy"
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
    registered: Mapping[str, Registered | None],
    policy: ScaleDownPolicy,
    quota: Quota,
    now: datetime,
) -> list[Decision]:
    """`machines` in the order of compute's list; `registered` by scope, None where an owner's list is not complete."""
    groups: dict[str | None, list[FleetMachine]] = {}
    for machine in machines:
        groups.setdefault(machine.scope, []).append(machine)
    decisions: list[Decision] = []
    idle_left = quota.idle_count
    for scope, group in groups.items():
        if policy.idle_scope is IdleScope.OWNER:
            idle_left = quota.idle_count
        if scope is None:
            decisions += [decision(machine, Action.SKIP, _unclear(machine), ScaleDownPhase.ACTIVE) for machine in group]
            continue
        known = registered.get(scope)
        for machine in _keep_first(group, quota.eviction):
            if known is None:
                reason = f"the runners of {scope} could not be listed"
                decisions.append(decision(machine, Action.SKIP, reason, ScaleDownPhase.ACTIVE))
                continue
            found = known.get(machine.instance_id, ())
            made, took = _decide_one(machine, found, policy, quota=quota, idle_left=idle_left, now=now)
            idle_left -= took
            decisions.append(made)
    return decisions


def _keep_first(group: Sequence[FleetMachine], eviction: Eviction) -> list[FleetMachine]:
    """Who is kept first comes first; equal ones in the order of the list. One without a launch time is too young
    anyway.
    """
    known = [(machine.launched_at, machine) for machine in group if machine.launched_at is not None]
    unknown = [machine for machine in group if machine.launched_at is None]
    # A stable sort, also where it is turned round.
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
    """The decision, and how much of the idle quota it takes."""
    if not registrations:
        return _decide_missing(machine, policy, now), 0
    age = None if machine.launched_at is None else now - machine.launched_at
    minimum = policy.minimum(machine)
    if age is None or age < minimum:
        aged = "of unknown age" if age is None else f"{_told(age)} old"
        reason = f"too young: {aged}, {_told(minimum)} is the least"
        return decision(machine, Action.KEEP, reason, ScaleDownPhase.ACTIVE), 0
    if idle_left > 0:
        nth = quota.idle_count - idle_left + 1
        reason = f"kept as idle: {nth} of {quota.idle_count} ({quota.window})"
        return decision(machine, Action.KEEP, reason, ScaleDownPhase.ACTIVE), 1
    busy = next((item for item in registrations if item.busy), None)
    if busy is not None:
        return decision(machine, Action.KEEP, f"busy: {busy.name} runs a job", ScaleDownPhase.ACTIVE), 0
    full = f"the quota of {quota.idle_count} is full" if quota.idle_count else "no idle quota now"
    made = decision(
        machine, Action.TERMINATE, f"idle, {_told(age)} old, {full}", ScaleDownPhase.ACTIVE, registrations=registrations
    )
    listed = {item.runner_id for item in registrations}
    return replace(made, tagged_runner_id=None if machine.runner_id in listed else machine.runner_id), 0


def _decide_missing(machine: FleetMachine, policy: ScaleDownPolicy, now: datetime) -> Decision:
    age = None if machine.launched_at is None else now - machine.launched_at
    if age is None:
        return decision(machine, Action.KEEP, "not on GitHub, of unknown age: wait", ScaleDownPhase.ACTIVE)
    if age < policy.boot:
        reason = f"still booting: {_told(age)} of {_told(policy.boot)}"
        return decision(machine, Action.KEEP, reason, ScaleDownPhase.ACTIVE)
    reason = f"not on GitHub {_told(age)} after its launch, {_told(policy.boot)} is the most"
    return decision(machine, Action.MARK_ORPHAN, reason, ScaleDownPhase.ACTIVE)


def within_budget(decisions: Sequence[Decision], left: int | None) -> list[Decision]:
    """Those to be evicted first go first; what is beyond the removals that are left waits for the next cycle."""
    if left is None:
        return list(decisions)
    result: list[Decision] = []
    for item in reversed(decisions):
        made = item
        if item.is_removal and left == 0:
            made = revised(item, Action.KEEP, f"left for the next cycle (max-removals-per-cycle): {item.reason}")
        elif item.is_removal:
            left -= 1
        result.append(made)
    return result[::-1]


def revised(item: Decision, action: Action, reason: str) -> Decision:
    """What a decision becomes when a closer look shows that it does not hold."""
    return replace(item, action=action, reason=reason, registrations=())


def found_busy(item: Decision, registration: Registration) -> Decision:
    """It runs a job after all: nobody ends it. An orphan that does is none."""
    action = Action.UNMARK_ORPHAN if item.phase is ScaleDownPhase.ORPHANS else Action.KEEP
    return revised(item, action, f"busy: {registration.name} took a job meanwhile")


def _unclear(machine: FleetMachine) -> str:
    return (
        f"its tags do not say whose it is (ghr:Owner {machine.owner!r}, ghr:Type {machine.tags.get('ghr:Type', '')!r})"
    )


def _told(span: timedelta) -> str:
    seconds = span.total_seconds()
    return f"{seconds:.3g} s" if abs(seconds) < 60 else f"{seconds / 60:.4g} min"


# The pool -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Renewal:
    """An idle instance of the pool that the quota keeps: until when, and why."""

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
    """The quota counts for each class. An instance is never kept beyond its maximum age, nor is its time ever cut."""
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
