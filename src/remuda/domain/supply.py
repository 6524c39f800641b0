"""Supply of a runner set: how many runners it needs, which machines count, and what to do with each of them.

Pure decisions. GitHub's statistics may be wrong and messages may be missing, so the jobs that are known and the reports
of the machines are counted as well. Whatever the counts say, a machine that may have a job keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum

from remuda.domain.demand import DemandStatistics
from remuda.domain.instance import SINGLE_USE, Instance, State, decide_retirement
from remuda.domain.resources import RunnerRequest, Tier, UsageClass, mismatch
from remuda.domain.runner_set import CapacityWindow, RunnerSet
from remuda.domain.signals import Report, Verdict, boot_verdict, registration_verdict
from remuda.domain.thresholds import Lifetimes
from remuda.domain.timestamps import after

#: Seconds that a started runner has to listen before it does not count any more.
LISTENS_WITHIN_S = 60.0
#: Seconds that a job may have run without GitHub's message before its runner is bound without it.
LATE_BINDING_S = 15.0
#: Seconds that a machine may take from the end of its job, or from its release, to the pool. Until then, none is
#: launched in its place: a launch takes longer on AWS. After that time its reset may have failed, and one is launched.
RETURNS_WITHIN_S = 20.0
#: Seconds after which a known job that has not started does not count any more: GitHub assigns it again under a new id.
JOB_COUNTS_FOR_S = 600.0


class MachineUse(StrEnum):
    """Use of a machine for its set. The first six are supply."""

    #: Boots.
    COMING = "coming"
    #: Has booted or is claimed, and gets a registration next.
    READY = "ready"
    #: Started, but its runner does not listen yet.
    STARTING = "starting"
    LISTENING = "listening"
    #: Has a job, by GitHub's message or by its own report.
    WORKING = "working"
    #: GitHub says that its job has ended, but the machine does not yet.
    FINISHING = "finishing"
    #: Its only job has ended.
    SPENT = "spent"
    #: Its agent has reported a failure.
    FAILED = "failed"
    #: Without a job, and not to be given one: dead, silent, retired or too old.
    UNFIT = "unfit"
    #: Dead or expired; only its time limit may end it, because it may have a job.
    LOST = "lost"
    #: Launched for the pool, and not there yet.
    FILLING = "filling"


SUPPLY = frozenset(
    {
        MachineUse.COMING,
        MachineUse.READY,
        MachineUse.STARTING,
        MachineUse.LISTENING,
        MachineUse.WORKING,
        MachineUse.FINISHING,
    }
)
#: Supply that can be given up.
_VACANT = frozenset({MachineUse.READY, MachineUse.STARTING, MachineUse.LISTENING})


@dataclass(frozen=True, kw_only=True, slots=True)
class SetMachine:
    """A machine of a set, as its reader knows it."""

    instance: Instance
    report: Report | None = None
    #: Whether its heartbeat is dead by the reader's clock.
    dead: bool = False
    #: Since when it has not been listening and had no job; None while it listens or has one.
    silent_since: datetime | None = None
    #: Since when its only job has ended.
    spent_since: datetime | None = None
    #: Since when the set can do without it.
    surplus_since: datetime | None = None
    #: Whether GitHub said that its job has ended.
    completed: bool = False
    #: Since when it is on its way back to the pool: since the end of its job, by GitHub's message or its own report, or
    #: since its release.
    returning_since: datetime | None = None
    #: Whether GitHub refused to remove its registration because of a job that no message and no report has named.
    taken: bool = False
    #: Why it must not get a job, for people; empty if it may.
    unwanted: str = ""
    #: Whether it was launched for the pool.
    for_pool: bool = False
    #: Whether the reader is changing it now: it counts, and no step is due.
    handled: bool = False

    @property
    def is_spent(self) -> bool:
        return self.report is not None and self.report.spent_epoch == self.instance.epoch

    @property
    def is_busy(self) -> bool:
        return self.taken or (self.report is not None and self.report.busy and self.report.epoch == self.instance.epoch)

    @property
    def is_listening(self) -> bool:
        report = self.report
        return report is not None and report.listening and report.epoch == self.instance.epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineStep:
    machine: SetMachine
    #: Reason, for people.
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SupplyPlan:
    desired: int
    supply: int
    #: Missing runners.
    deficit: int
    #: Runners to acquire even if the pool has no idle machine. The others wait for machines that are about to return.
    acquire: int
    #: Jobs that no runner of the set has yet, as far as known.
    waiting: int
    #: Supply without a job.
    vacant: int
    #: Why this many are desired, for people.
    why: str
    #: Machines that get a registration and start to listen.
    equip: tuple[MachineStep, ...] = ()
    #: Machines that have booted and go to the pool.
    fill: tuple[MachineStep, ...] = ()
    #: Listening runners to keep: their threshold is renewed.
    renew: tuple[MachineStep, ...] = ()
    #: Runners with a job that no message has named, to be bound without it.
    bind: tuple[MachineStep, ...] = ()
    #: Runners whose job has ended, to be released.
    release: tuple[MachineStep, ...] = ()
    #: Runners without a job, to be released after GitHub has removed their registration.
    withdraw: tuple[MachineStep, ...] = ()
    #: Machines that failed or cannot be used, to be terminated.
    end: tuple[MachineStep, ...] = ()
    #: Ids of the runners that the set can do without now.
    surplus: frozenset[str] = frozenset()
    #: Earliest time at which the decision changes by itself.
    recheck_at: datetime | None = None

    @property
    def is_at_capacity(self) -> bool:
        """Whether jobs wait only because the set has its maximum of runners."""
        return self.waiting > 0 and self.deficit == 0 and self.waiting > self.vacant


@dataclass(kw_only=True, slots=True)
class _Draft:
    """The plan while the machines are classified."""

    uses: dict[str, MachineUse] = field(default_factory=dict)
    equip: list[MachineStep] = field(default_factory=list)
    fill: list[MachineStep] = field(default_factory=list)
    renew: list[MachineStep] = field(default_factory=list)
    bind: list[MachineStep] = field(default_factory=list)
    release: list[MachineStep] = field(default_factory=list)
    withdraw: list[MachineStep] = field(default_factory=list)
    end: list[MachineStep] = field(default_factory=list)
    rechecks: list[datetime] = field(default_factory=list)
    #: Machines that are about to return to the pool.
    returning: int = 0


def decide_supply(
    runner_set: RunnerSet,
    window: CapacityWindow,
    statistics: DemandStatistics,
    machines: Sequence[SetMachine],
    *,
    waiting_jobs: int,
    ended_jobs: int = 0,
    lost_jobs: int = 0,
    acquiring: int,
    publishing: int = 0,
    draining: bool = False,
    lifetimes: Lifetimes,
    now: datetime,
) -> SupplyPlan:
    """Decide about one set.

    `waiting_jobs` are known jobs that have not started; `ended_jobs` are those that have ended by the reports of their
    machines, and that GitHub may still count; `lost_jobs` are those whose instance has ended under them: GitHub counts
    them as running for about ten minutes, and gives them to no other runner; `acquiring` are acquisitions in progress
    that have no machine yet; `publishing` are machines that have returned from the set and have no pool message yet. A
    `draining` set was removed from the configuration: it needs no runner, and gives them up at once.
    """
    draft = _Draft()
    machines = [_with_trust(machine, runner_set) for machine in machines]
    for machine in machines:
        _classify(machine, draft, lifetimes=lifetimes, now=now)
    uses = draft.uses
    used = list(uses.values())
    supply = acquiring + sum(map(SUPPLY.__contains__, used))
    finishing, working = used.count(MachineUse.FINISHING), used.count(MachineUse.WORKING)
    vacant = supply - finishing - working
    # A machine may report the start and the end of a job before GitHub's messages about them are here.
    started = sum(_has_taken_job(item, uses) for item in machines)
    spent = sum(_has_taken_job(item, uses) for item in machines if item.is_spent)
    lost = min(lost_jobs + sum(_has_lost_job(item, uses) for item in machines), statistics.running)
    jobs = max(statistics.assigned - ended_jobs - spent - lost, working + max(0, waiting_jobs - started))
    desired = 0 if draining else min(runner_set.max, jobs + window.hot)
    shortfall = desired - (supply - finishing)
    # Not more than the maximum, even if a lost machine has returned and GitHub says that another one is finishing.
    surplus = _choose_surplus(machines, uses, max(-shortfall, supply - runner_set.max))
    grace_s = 0.0 if draining else lifetimes.surplus_grace_s
    _decide_surplus(machines, surplus, draft, desired=desired, grace_s=grace_s, now=now)
    deficit = max(0, min(shortfall, runner_set.max - supply))
    deficit -= _decide_ready(machines, surplus, draft, deficit)
    _decide_renewals(machines, surplus, draft, lifetimes=lifetimes, now=now)
    return SupplyPlan(
        desired=desired,
        supply=supply,
        deficit=deficit,
        acquire=max(0, deficit - publishing - draft.returning),
        waiting=0 if draining else max(0, jobs - working),
        vacant=vacant,
        why=_describe(runner_set, window, jobs, draining=draining),
        equip=_due(draft.equip),
        fill=_due(draft.fill),
        renew=_due(draft.renew),
        bind=_due(draft.bind),
        release=_due(draft.release),
        withdraw=_due(draft.withdraw),
        end=_due(draft.end),
        surplus=surplus,
        recheck_at=min((at for at in draft.rechecks if at > now), default=None),
    )


def _has_taken_job(machine: SetMachine, uses: Mapping[str, MachineUse]) -> bool:
    """Whether it has or had a job that no message has named: by GitHub's messages, this job still waits."""
    is_named = machine.instance.is_bound or machine.completed
    uses_with_job = {MachineUse.WORKING, MachineUse.SPENT}
    return not is_named and (uses.get(machine.instance.instance_id) in uses_with_job or _has_lost_job(machine, uses))


def _has_lost_job(machine: SetMachine, uses: Mapping[str, MachineUse]) -> bool:
    """Whether its job is lost with it or, if only its agent is dead, still runs on it: no other runner gets it."""
    instance = machine.instance
    has_started = instance.state is State.RUNNING and (instance.is_bound or machine.is_busy)
    return has_started and not machine.completed and uses.get(instance.instance_id) is MachineUse.LOST


def _with_trust(machine: SetMachine, runner_set: RunnerSet) -> SetMachine:
    """The set's trust may have been changed since the machine was acquired. Its job, if it has one, may end."""
    tier, trust = machine.instance.tier, runner_set.trust
    if tier is trust or machine.unwanted:
        return machine
    return replace(machine, unwanted=f"it is {tier}, and its set is {trust} now")


def _due(steps: list[MachineStep]) -> tuple[MachineStep, ...]:
    return tuple(step for step in steps if not step.machine.handled) if steps else ()


def _describe(runner_set: RunnerSet, window: CapacityWindow, jobs: int, *, draining: bool) -> str:
    if draining:
        return "the set was removed from the configuration"
    hot = f" and {window.hot} hot" if window.hot else ""
    limit = f", limited to {runner_set.max}" if jobs + window.hot > runner_set.max else ""
    return f"{jobs} assigned {'job' if jobs == 1 else 'jobs'}{hot}{limit}"


def _classify(machine: SetMachine, draft: _Draft, *, lifetimes: Lifetimes, now: datetime) -> None:
    """Add the machine's use and, unless it depends on the other machines, the step that is due."""
    instance = machine.instance
    if instance.state is State.RUNNING:
        use = _classify_running(machine, draft, lifetimes=lifetimes, now=now)
    elif instance.state in {State.CREATED, State.CLAIMED}:
        use = _classify_coming(machine, draft, now=now)
    else:
        _expect_return(machine, draft, lifetimes=lifetimes, now=now)
        # It is terminated then.
        draft.rechecks.append(instance.threshold + timedelta(seconds=lifetimes.margin_s))
        return
    draft.uses[instance.instance_id] = use


def _classify_coming(machine: SetMachine, draft: _Draft, *, now: datetime) -> MachineUse:
    instance, report = machine.instance, machine.report
    booted = boot_verdict(report, instance.epoch)
    if instance.threshold <= now:
        return MachineUse.LOST
    if booted is Verdict.FAILED:
        why = f"it failed: {report.describe_signal() if report else ''}"
        draft.end.append(MachineStep(machine=machine, why=why))
        return MachineUse.FAILED
    why = machine.unwanted or ("its heartbeat is dead" if machine.dead else "")
    if why:
        # A claimed machine has been in the pool: it may return there.
        (draft.end if instance.state is State.CREATED else draft.withdraw).append(MachineStep(machine=machine, why=why))
        return MachineUse.UNFIT
    draft.rechecks.append(instance.threshold)
    if machine.for_pool:
        return MachineUse.FILLING
    is_ready = instance.state is State.CLAIMED or booted is Verdict.OK
    return MachineUse.READY if is_ready else MachineUse.COMING


def _classify_running(machine: SetMachine, draft: _Draft, *, lifetimes: Lifetimes, now: datetime) -> MachineUse:
    instance, report = machine.instance, machine.report
    if machine.is_spent:
        _decide_spent(machine, draft, lifetimes=lifetimes, now=now)
        return MachineUse.SPENT
    # An agent that restarted after the failure may have started the runner again.
    if registration_verdict(report, instance.epoch) is Verdict.FAILED and not machine.is_busy:
        why = f"its runner failed: {report.detail if report else ''}"
        draft.end.append(MachineStep(machine=machine, why=why))
        return MachineUse.FAILED
    if instance.is_bound or machine.is_busy:
        return _classify_working(machine, draft, lifetimes=lifetimes, now=now)
    unfit = _describe_unfit(machine, lifetimes=lifetimes, now=now)
    if unfit:
        if instance.threshold > now:
            draft.withdraw.append(MachineStep(machine=machine, why=unfit))
        return MachineUse.UNFIT
    draft.rechecks.append(instance.threshold)
    draft.rechecks.append(instance.created_at + timedelta(seconds=lifetimes.max_age_s))
    if machine.silent_since is None:
        return MachineUse.LISTENING
    draft.rechecks.append(machine.silent_since + timedelta(seconds=LISTENS_WITHIN_S))
    return MachineUse.STARTING


def _expect_return(machine: SetMachine, draft: _Draft, *, lifetimes: Lifetimes, now: datetime) -> None:
    """Count a machine whose job has ended, or that is being released, as returning to the pool, for a time.

    Example: a failed job is run again at once. Its machine is reset and back within two seconds, so none is launched.
    """
    retirement = decide_retirement(
        machine.instance,
        now=now,
        max_age_s=lifetimes.max_age_s,
        max_uses=lifetimes.max_uses,
        notice=machine.report.notice if machine.report else "",
    )
    will_return = retirement is None and machine.instance.retire_reason is None and not machine.dead
    until = (machine.returning_since or now) + timedelta(seconds=RETURNS_WITHIN_S)
    if will_return and until > now:
        draft.returning += 1
        draft.rechecks.append(until)


def _decide_spent(machine: SetMachine, draft: _Draft, *, lifetimes: Lifetimes, now: datetime) -> None:
    if machine.instance.is_bound:
        _expect_return(machine, draft, lifetimes=lifetimes, now=now)
        draft.release.append(MachineStep(machine=machine, why="its job has ended"))
        return
    due = (machine.spent_since or now) + timedelta(seconds=LATE_BINDING_S)
    if due <= now:
        why = "its job has ended, and GitHub sent no message about it"
        draft.bind.append(MachineStep(machine=machine, why=why))
    else:
        draft.rechecks.append(due)


def _classify_working(machine: SetMachine, draft: _Draft, *, lifetimes: Lifetimes, now: datetime) -> MachineUse:
    instance = machine.instance
    deadline = instance.deadline(busy=True)
    if machine.dead or deadline <= now:
        return MachineUse.LOST
    draft.rechecks.append(deadline)
    if not instance.is_bound and not machine.taken:
        # The report protects it, but the next process may not have read one.
        due = instance.threshold - timedelta(seconds=LATE_BINDING_S)
        if due <= now:
            why = "it has a job, and GitHub sent no message about it"
            draft.bind.append(MachineStep(machine=machine, why=why))
        else:
            draft.rechecks.append(due)
    if not machine.completed:
        return MachineUse.WORKING
    if instance.is_bound:
        _expect_return(machine, draft, lifetimes=lifetimes, now=now)
    return MachineUse.FINISHING


def _describe_unfit(machine: SetMachine, *, lifetimes: Lifetimes, now: datetime) -> str:
    """Return why a runner without a job must not get one; empty if it may."""
    instance, report = machine.instance, machine.report
    if instance.threshold <= now:
        return "its listening time is over"
    if machine.dead:
        return "its heartbeat is dead"
    if machine.unwanted:
        return machine.unwanted
    if instance.retire_reason is not None and instance.retire_reason not in SINGLE_USE:
        return instance.retire_text
    if report is not None and report.notice:
        return f"spot notice: {report.notice}"
    if machine.silent_since is not None and now - machine.silent_since >= timedelta(seconds=LISTENS_WITHIN_S):
        return f"its runner has not listened for {LISTENS_WITHIN_S:g} s"
    if now - instance.created_at >= timedelta(seconds=lifetimes.max_age_s):
        return f"the maximum age is {lifetimes.max_age_s:g} s"
    return ""


def _choose_surplus(machines: Sequence[SetMachine], uses: Mapping[str, MachineUse], count: int) -> frozenset[str]:
    """Choose runners to give up: those without a registration, those that were chosen before, then the oldest."""
    if count <= 0:
        return frozenset()
    vacant = [item for item in machines if uses.get(item.instance.instance_id) in _VACANT]
    vacant.sort(
        key=lambda item: (
            uses[item.instance.instance_id] is not MachineUse.READY,
            item.surplus_since is None,
            item.instance.created_at,
            item.instance.instance_id,
        )
    )
    return frozenset(item.instance.instance_id for item in vacant[:count])


def _decide_surplus(
    machines: Sequence[SetMachine],
    surplus: frozenset[str],
    draft: _Draft,
    *,
    desired: int,
    grace_s: float,
    now: datetime,
) -> None:
    for machine in machines:
        instance_id = machine.instance.instance_id
        if instance_id not in surplus or draft.uses[instance_id] is MachineUse.READY:
            continue
        due = (machine.surplus_since or now) + timedelta(seconds=grace_s)
        if due <= now:
            why = f"not needed for {grace_s:g} s: {desired} wanted"
            draft.withdraw.append(MachineStep(machine=machine, why=why))
        else:
            draft.rechecks.append(due)


def _decide_ready(machines: Sequence[SetMachine], surplus: frozenset[str], draft: _Draft, deficit: int) -> int:
    """Decide about machines without a registration. Return how many of the deficit get one launched for the pool."""
    taken = 0
    for machine in machines:
        instance, use = machine.instance, draft.uses.get(machine.instance.instance_id)
        if use not in {MachineUse.READY, MachineUse.FILLING}:
            continue
        has_booted = boot_verdict(machine.report, instance.epoch) is Verdict.OK
        if use is MachineUse.READY and instance.instance_id not in surplus:
            draft.equip.append(MachineStep(machine=machine, why="ready for a job"))
        elif use is MachineUse.FILLING and has_booted and not machine.handled and taken < deficit:
            taken += 1
            draft.equip.append(MachineStep(machine=machine, why="launched for the pool, and a job needs it"))
        elif use is MachineUse.READY and instance.state is State.CLAIMED:
            draft.withdraw.append(MachineStep(machine=machine, why="no job needs it any more"))
        elif use is MachineUse.FILLING and not has_booted:
            continue
        elif instance.retire_reason is None:
            draft.fill.append(MachineStep(machine=machine, why="booted"))
        else:
            draft.end.append(MachineStep(machine=machine, why=f"no job needs it, and {instance.retire_text}"))
    return taken


def _decide_renewals(
    machines: Sequence[SetMachine],
    surplus: frozenset[str],
    draft: _Draft,
    *,
    lifetimes: Lifetimes,
    now: datetime,
) -> None:
    half = timedelta(seconds=lifetimes.listening_time_s / 2)
    for machine in machines:
        instance = machine.instance
        if draft.uses.get(instance.instance_id) is not MachineUse.LISTENING or instance.instance_id in surplus:
            continue
        if instance.threshold - half > now:
            draft.rechecks.append(instance.threshold - half)
        elif machine.is_listening:
            draft.renew.append(MachineStep(machine=machine, why="still wanted"))


# Idle machines that are kept ready ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmKey:
    """Sets with the same key share their idle machines."""

    resource_class: str
    usage_class: UsageClass
    tier: Tier
    #: Only with the reuse policy `same-repo`.
    repository: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmTarget:
    """Idle machines that the open windows of the sets with one key ask for."""

    key: WarmKey
    request: RunnerRequest
    wanted: int
    #: Launches in progress.
    filling: int = 0
    #: Names of the sets.
    sets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleRenewal:
    instance: Instance
    until: datetime
    #: Reason, for people.
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmPlan:
    #: Machines to launch.
    deficits: Mapping[WarmKey, int]
    renewals: tuple[IdleRenewal, ...] = ()
    #: Idle machines by key.
    idle: Mapping[WarmKey, int] = field(default_factory=dict)
    #: Earliest time at which a renewal is due.
    recheck_at: datetime | None = None


def decide_warm(
    targets: Iterable[WarmTarget], idle: Sequence[Instance], *, lifetimes: Lifetimes, now: datetime
) -> WarmPlan:
    """Decide which idle machines to keep, the newest first, and how many to launch."""
    usable = [
        item
        for item in idle
        if item.state is State.IDLE
        and item.retire_reason is None
        and item.threshold > now
        and now - item.created_at < timedelta(seconds=lifetimes.max_age_s)
    ]
    usable.sort(key=lambda item: (item.created_at, item.instance_id), reverse=True)
    counted: set[str] = set()
    deficits: dict[WarmKey, int] = {}
    found: dict[WarmKey, int] = {}
    renewals: list[IdleRenewal] = []
    rechecks: list[datetime] = []
    half = timedelta(seconds=lifetimes.idle_time_s / 2)
    for target in targets:
        fitting = [
            item
            for item in usable
            if item.instance_id not in counted and mismatch(item.message(), target.request) is None
        ]
        found[target.key] = len(fitting)
        kept = fitting[: target.wanted]
        counted.update(item.instance_id for item in kept)
        deficits[target.key] = max(0, target.wanted - len(kept) - target.filling)
        for number, item in enumerate(kept, 1):
            until = min(after(now, lifetimes.idle_time_s), after(item.created_at, lifetimes.max_age_s))
            if item.threshold - half > now:
                rechecks.append(item.threshold - half)
            elif until > item.threshold:
                why = f"kept warm: {number} of {target.wanted} of class {target.key.resource_class}"
                renewals.append(IdleRenewal(instance=item, until=until, why=why))
    return WarmPlan(deficits=deficits, renewals=tuple(renewals), idle=found, recheck_at=min(rechecks, default=None))
