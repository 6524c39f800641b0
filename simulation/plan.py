"""Plans of simulated worlds: user actions, machine losses and interruptions, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto

from remuda.controlplane.operator import OperatorAction
from remuda.domain.resources import Reuse, Tier, UsageClass
from remuda.domain.runner_set import CapacityWindow, RunnerSet
from simulation.faults import OF_MACHINES, Fault, FaultChoice, InjectedFault, Swarm, draw_few, draw_half, draw_separate
from simulation.invariants import REPOSITORIES, SCOPE

#: Approximate seconds that a run holds its instances. Determines the number of runs in a world.
HOLDS_S = 150.0
CLASSES = ("large", "xlarge")
#: Number of configurations that a world switches between.
CONFIGURATIONS = 4
#: Versions of the actions runner that worlds switch between. Empty: that of the image.
RUNNERS = ("2.335.0", "2.336.0", "2.337.0", "")
#: Initial reuse policies. `never` is drawn separately and seldom, because it leaves the pool empty.
POLICIES = (Reuse.SAME_TRUST, Reuse.SAME_TRUST, Reuse.ALWAYS, Reuse.SAME_REPO)
#: Calls after which a command may crash or pause: those that change something.
CALLS = {
    "provision": ("put_provision", "apply", "apply", "apply", "replace_provision", "launch", "receive", "delete"),
    "release": ("replace_provision", "apply", "apply", "send"),
    "sweep": ("apply", "apply", "replace_provision", "terminate", "send", "put_sweep_record", "delete_runner"),
    "operator": ("apply", "terminate"),
    "scale-down": ("apply",),
    "listener": (
        "put_demand", "acknowledge", "open_session", "put_provision", "apply", "apply", "apply", "replace_provision",
        "launch", "register", "register", "deregister", "receive", "delete", "send", "replace_lease",
        "rerun_failed_jobs",
    ),
}  # fmt: skip
#: Calls of these that a command usually makes once.
ONCE = frozenset({"put_provision", "replace_provision", "launch", "send", "terminate", "put_sweep_record"})
#: Approximate seconds between two runs of scale-down.
SCALE_DOWN_S = 300.0
MAX_AGENT_PAUSE_S = 300.0
#: Seconds that tokens are valid: just longer than a provision, some minutes, about half an hour, and GitHub's hour.
TOKEN_LIVES_S = (260.0, 400.0, 400.0, 1_900.0, 3_600.0)
#: Maximum seconds of an interval between two polls that no one waits for.
MAX_QUIET_POLL_S = 15.0
#: Fraction of worlds with runner sets in which nothing keeps the listeners from what is true, so that all of their
#: mistakes are their own.
CALM = 0.25
#: Fractions of worlds with runner sets in which a set changes often, and in which this fraction of jobs is interrupted.
RESTLESS = 0.3
SPOTTY, INTERRUPTED_OFTEN = 0.3, 0.4
#: Fraction of worlds whose store is polled.
POLLED = 0.5
#: Fractions of worlds with slow scripts and with long jobs, least and most seconds of a long job, and the fraction of
#: the runs that have one.
SLOW_SCRIPTS = 0.08
LONG_JOBS = 0.02
LONG_JOB_S = (3_600.0, 3 * 3_600.0)
LONG_RUNS = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """A workflow run: provision, jobs, release. With two attempts it is re-run while the first one is cleaned up."""

    at: float
    run_id: str
    count: int
    resource_class: str
    usage_class: UsageClass
    tier: Tier
    #: Seconds of each job.
    jobs: tuple[float, ...]
    #: Whether its jobs are queued before the provision.
    eager: bool = False
    #: Whether its commands have a GitHub credential.
    credentialed: bool = False
    attempts: int = 1
    released: bool = True
    repository: str = REPOSITORIES[0]
    #: Whether it wants ephemeral machines; then its commands have a credential.
    ephemeral: bool = False

    def __str__(self) -> str:
        kind = "ephemeral " if self.ephemeral else ""
        what = f"{self.count} {kind}{self.usage_class} {self.resource_class}"
        return f"run {self.run_id} of {self.repository}: {what}, {self.tier}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRefresh:
    at: float
    twice: bool = False
    #: Number of the configuration that it applies; None for a sweep only.
    config: int | None = None

    def __str__(self) -> str:
        configures = "" if self.config is None else " with a new configuration"
        return f"refresh{' twice at the same time' if self.twice else ''}{configures}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtraRelease:
    """An additional release of a run, at any point of it."""

    at: float
    run_id: str
    attempt: int
    early: bool

    def __str__(self) -> str:
        return f"release of run {self.run_id} up to attempt {self.attempt}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedInterruption:
    """A crash or pause of a process before its n-th step or, with `call`, after its n-th call of that name."""

    process: str
    step: int
    call: str = ""
    pause_s: float = 0.0
    at: float = 0.0

    def __str__(self) -> str:
        what = f"pauses for {self.pause_s:.0f} s" if self.pause_s else "crashes"
        return f"{self.process} {what} at its {self.call or 'step'} {self.step}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedCancel:
    """A cancellation by Ctrl-C."""

    process: str
    after_s: float
    at: float = 0.0

    def __str__(self) -> str:
        return f"{self.process} is cancelled after {self.after_s:.1f} s"


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineLoss:
    """A power cut or a spot notice. `pick` selects one of the live machines."""

    at: float
    pick: float
    with_notice: bool = False

    def __str__(self) -> str:
        return "a spot notice" if self.with_notice else "a power cut"


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorCommand:
    """A drain, quarantine or termination by an operator. `pick` selects one of the recorded instances."""

    at: float
    number: int
    action: OperatorAction
    pick: float
    #: Seconds of a quarantine.
    for_s: float = 0.0

    def __str__(self) -> str:
        return f"an operator's {self.action}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedScaleDown:
    at: float
    number: int
    #: Idle instances to keep per class.
    idle_count: int

    def __str__(self) -> str:
        return f"scale-down to {self.idle_count} idle instances"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedDemand:
    """A job that is served by a runner set."""

    at: float
    run_id: str
    #: Name of its set.
    runner_set: str
    labels: tuple[str, ...]
    seconds: float
    event: str = "push"
    is_fork: bool = False
    #: Seconds after which a user cancels it; 0 if no one does.
    cancelled_after_s: float = 0.0
    #: Whether it fails by itself, in every attempt.
    fails: bool = False
    #: Seconds after its end at which a user runs the failed jobs of its run again; 0 if no one does.
    rerun_after_s: float = 0.0
    #: Seconds after each start at which its machine gets a spot notice, one for each of the first attempts.
    notices_after_s: tuple[float, ...] = ()

    def __str__(self) -> str:
        fork = " of a fork" if self.is_fork else ""
        return f"job of run {self.run_id} ({self.event}{fork}) for set {self.runner_set}, {self.seconds:.0f} s"


@dataclass(frozen=True, kw_only=True, slots=True)
class SetDeletion:
    """GitHub deletes a scale set. `pick` selects one."""

    at: float
    pick: float

    def __str__(self) -> str:
        return "GitHub deletes a scale set"


@dataclass(frozen=True, kw_only=True, slots=True)
class SetChange:
    """A new configuration of the runner sets, until the listeners have read it."""

    at: float = 0.0
    number: int
    config: int

    def __str__(self) -> str:
        return f"configuration {self.config} is applied and read"


@dataclass(frozen=True, kw_only=True, slots=True)
class Takeover:
    """The time until another listener serves the pool."""

    at: float = 0.0

    def __str__(self) -> str:
        return "a standby takes over"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEnd:
    """The jobs of sets that run now end, and the listeners have been told so."""

    at: float = 0.0

    def __str__(self) -> str:
        return "running jobs end"


@dataclass(frozen=True, kw_only=True, slots=True)
class ListenerOutage:
    """All listeners are killed, a configuration is applied, and they are started again."""

    at: float
    number: int
    config: int
    #: Seconds without a listener after the change.
    for_s: float = 5.0

    def __str__(self) -> str:
        return f"configuration {self.config} is applied while no listener runs"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedHold:
    """A process waits before its n-th call of a port, or for its answer, until others have finished operations."""

    process: str
    call: int
    until: tuple[Operation, ...]
    #: Whether the whole process is held. Otherwise only the task that makes the call waits.
    whole: bool = False
    #: Whether the call takes effect before, and its answer comes late.
    late: bool = False
    at: float = 0.0

    def __str__(self) -> str:
        what = f"{'is stopped' if self.whole else 'waits'} {'after' if self.late else 'before'}"
        return f"{self.process} {what} its call {self.call}, until: {', '.join(map(str, self.until))}"


Operation = (
    PlannedRun
    | PlannedRefresh
    | ExtraRelease
    | PlannedInterruption
    | PlannedCancel
    | MachineLoss
    | OperatorCommand
    | PlannedScaleDown
    | PlannedDemand
    | SetDeletion
    | SetChange
    | JobEnd
    | ListenerOutage
    | Takeover
    | PlannedHold
)


class WorldScale(Enum):
    """Times of a world, which limits of the product must fit."""

    USUAL = auto()
    #: Pre-runner scripts of up to 20 minutes.
    SLOW_SCRIPTS = auto()
    #: Jobs of hours.
    LONG_JOBS = auto()


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldPlan:
    seed: int
    hours: float
    instances: int
    faults: frozenset[Fault]
    operations: tuple[Operation, ...]
    #: Reuse policy of each configuration.
    reuses: tuple[Reuse, ...] = (Reuse.SAME_TRUST,) * CONFIGURATIONS
    #: Version of the actions runner of each configuration.
    runners: tuple[str, ...] = ("",) * CONFIGURATIONS
    #: Runner sets of each configuration; empty in worlds without demand.
    runner_sets: tuple[tuple[RunnerSet, ...], ...] = ((),) * CONFIGURATIONS
    #: Number of listeners: one, or one and a standby.
    listeners: int = 0
    #: Whether GitHub offers jobs, which must be acquired, as on GitHub Enterprise Server.
    offers_jobs: bool = False
    #: Whether the ids of messages begin again with each session.
    restarts_ids: bool = False
    scale: WorldScale = WorldScale.USUAL
    #: Seconds that a registration or removal token is valid.
    token_life_s: float = 400.0
    #: Maximum seconds until an agent with a running job sees a change of its record.
    quiet_poll_s: float = 0.0
    #: Whether waits for changes of the store end as late as with DynamoDB, not at once.
    polls: bool = False
    #: Whether runners do not notice that GitHub has removed their registration.
    deaf_runners: bool = False
    #: Whether the calls of all processes are numbered, as for a hold.
    numbers_calls: bool = False
    #: Faults that the shrinker leaves out.
    suppressed: frozenset[InjectedFault] = frozenset()


def draw_plan(
    seed: int, *, hours: float, instances: int, faults: FaultChoice = Swarm.HALF, demand: bool = False
) -> WorldPlan:
    rng = random.Random(f"{seed} plan")
    # Always drawn, so that the operations of a seed do not depend on how its faults are chosen.
    half = draw_half(rng) | draw_separate(random.Random(f"{seed} separate"))
    # A separate generator, so that worlds without demand do not depend on it.
    demand_rng = random.Random(f"{seed} demand")
    if demand:
        half |= draw_half(demand_rng, demand=True)
        if random.Random(f"{seed} calm").random() < CALM:
            half &= OF_MACHINES | {Fault.CONFIG_CHANGE}
    if isinstance(faults, Swarm):
        on = half if faults is Swarm.HALF else draw_few(random.Random(f"{seed} few"), demand=demand)
    else:
        on = faults
    # A separate generator, so that the other draws do not depend on it.
    reuse_rng = random.Random(f"{seed} reuse")
    # Fewer runs: jobs of sets need machines, too.
    draft = _Draft(rng, on, hours * 3_600.0, max(1, instances // 2) if demand else instances)
    plan = WorldPlan(
        seed=seed,
        hours=hours,
        instances=instances,
        faults=on,
        reuses=_reuses(reuse_rng),
        runners=_runners(random.Random(f"{seed} runners")),
        operations=tuple(_with_repositories(draft.operations(), reuse_rng)),
    )
    plan = _scaled(plan, random.Random(f"{seed} scale"), demand=demand)
    if not demand:
        return plan
    plan = _DemandDraft(demand_rng, on, hours * 3_600.0, instances).added_to(plan)
    # A separate generator, so that the other draws do not depend on it.
    plan = _with_reruns(plan, random.Random(f"{seed} re-runs"))
    return _with_turns(plan, random.Random(f"{seed} turns"))


def _with_turns(plan: WorldPlan, rng: random.Random) -> WorldPlan:
    """In some worlds, remove, restore and change a set again and again, or interrupt many jobs."""
    changes, interrupts = rng.random() < RESTLESS, rng.random() < SPOTTY
    at, seconds = 0.0, plan.hours * 3_600.0
    operations = list(plan.operations)
    if changes and Fault.CONFIG_CHANGE in plan.faults:
        first, *others = plan.runner_sets[0]
        removed, retrusted, relabelled = (
            (),
            (replace(first, trust=Tier.TRUSTED if first.trust is Tier.UNTRUSTED else Tier.UNTRUSTED),),
            (replace(first, labels=(*first.labels, "other")),),
        )
        sets = tuple((*changed, *others) for changed in ((first,), removed, retrusted, relabelled))
        plan = replace(plan, runner_sets=sets)
        while at < seconds:
            for config in (rng.choice((1, 1, 2, 3)), 0):
                # Within the interval in which a listener reads its configuration, or longer than a job.
                at += rng.choice((rng.uniform(1, 20), rng.uniform(20, 90), rng.uniform(60, 300)))
                operations.append(PlannedRefresh(at=at, config=config))
    if interrupts and Fault.SPOT_NOTICE in plan.faults:
        operations = [
            replace(item, seconds=150.0, notices_after_s=(rng.uniform(0, 20),))
            if isinstance(item, PlannedDemand) and not item.notices_after_s and rng.random() < INTERRUPTED_OFTEN
            else item
            for item in operations
        ]
    return replace(plan, operations=tuple(operations))


def _with_reruns(plan: WorldPlan, rng: random.Random) -> WorldPlan:
    """Make sets strict or let them run interrupted jobs again; let jobs fail, be interrupted and be run again."""
    drawn = {item.name: (rng.random() < 0.4, rng.random() < 0.5) for item in plan.runner_sets[0]}
    sets = [
        tuple(
            # Machines of an untrusted set may serve untrusted jobs at any time.
            replace(item, strict=strict and item.trust is Tier.TRUSTED, rerun_on_interruption=rerun)
            for item in configured
            for strict, rerun in [drawn[item.name]]
        )
        for configured in plan.runner_sets
    ]
    jobs = [_rerun(item, plan.faults, rng) if isinstance(item, PlannedDemand) else item for item in plan.operations]
    return replace(plan, runner_sets=tuple(sets), operations=tuple(jobs))


def _rerun(job: PlannedDemand, on: frozenset[Fault], rng: random.Random) -> PlannedDemand:
    fails, rerun, interrupted, again = (rng.random() for _ in range(4))
    rerun_s, first_s, second_s = rng.uniform(1, 120), rng.uniform(0, 20), rng.uniform(0, 20)
    job = replace(job, fails=fails < 0.1, rerun_after_s=rerun_s if rerun < 0.15 else 0.0)
    if interrupted >= INTERRUPTED or Fault.SPOT_NOTICE not in on:
        return job
    # Longer than the time from a notice to the end of the machine.
    notices = (first_s, second_s) if again < 0.5 else (first_s,)
    return replace(job, seconds=150.0, notices_after_s=notices)


def _scaled(plan: WorldPlan, rng: random.Random, *, demand: bool) -> WorldPlan:
    """Draw the times of a world. Few worlds have slow scripts or long jobs, because they take long to simulate."""
    drawn = rng.random()
    token_life_s = rng.choice(TOKEN_LIVES_S)
    quiet_poll_s = rng.choice((0.0, 0.0, MAX_QUIET_POLL_S))
    scale = WorldScale.USUAL
    if drawn < SLOW_SCRIPTS and not demand:
        scale = WorldScale.SLOW_SCRIPTS
    elif drawn < SLOW_SCRIPTS + LONG_JOBS and not demand:
        scale = WorldScale.LONG_JOBS
        operations = [
            replace(item, jobs=(rng.uniform(*LONG_JOB_S), *item.jobs[1:]))
            if isinstance(item, PlannedRun) and rng.random() < LONG_RUNS
            else item
            for item in plan.operations
        ]
        plan = replace(plan, operations=tuple(operations))
    polls = rng.random() < POLLED
    return replace(plan, scale=scale, token_life_s=token_life_s, quiet_poll_s=quiet_poll_s, polls=polls)


def _reuses(rng: random.Random) -> tuple[Reuse, ...]:
    """One policy in most worlds, a policy per configuration in the others."""
    first = Reuse.NEVER if rng.random() < 0.05 else rng.choice(POLICIES)
    changes = rng.random() < 0.4
    later = [rng.choice(tuple(Reuse)) for _ in range(CONFIGURATIONS - 1)]
    return (first, *(later if changes else [first] * len(later)))


def _runners(rng: random.Random) -> tuple[str, ...]:
    """A version per configuration in some worlds, none in the others."""
    return tuple(rng.choice(RUNNERS) for _ in range(CONFIGURATIONS)) if rng.random() < 0.25 else ("",) * CONFIGURATIONS


def _with_repositories(operations: list[Operation], rng: random.Random) -> list[Operation]:
    """Assign repositories to runs; in some worlds make some of them ephemeral."""
    single = rng.random() < 0.35
    made: list[Operation] = []
    for item in operations:
        if isinstance(item, PlannedRun):
            repository, drawn = rng.choice(REPOSITORIES), rng.random() < 0.25
            made.append(replace(item, repository=repository, ephemeral=single and drawn))
        else:
            made.append(item)
    return made


class _Draft:
    def __init__(self, rng: random.Random, on: frozenset[Fault], seconds: float, instances: int) -> None:
        self._rng = rng
        self._on = on
        self._seconds = seconds
        self._instances = instances

    def _sometimes(self, fault: Fault, probability: float) -> bool:
        # Always drawn, so that enabling a fault changes no other draw.
        return self._rng.random() < probability and fault in self._on

    def operations(self) -> list[Operation]:
        made: list[Operation] = []
        runs = max(1, round(self._seconds / HOLDS_S * self._instances * 0.4))
        for number in range(1, runs + 1):
            made += self._run(str(number), self._rng.random() ** 1.1 * self._seconds)
        made += self._losses()
        made += self._refreshes()
        made += self._agent_interruptions()
        made += self._operator_commands()
        made += self._scale_downs()
        return made

    def _run(self, run_id: str, at: float) -> list[Operation]:
        rng = self._rng
        count = rng.choice((1, 1, 1, 2, 2, 3))
        run = PlannedRun(
            at=at,
            run_id=run_id,
            count=min(count, self._instances),
            resource_class=CLASSES[rng.random() < 0.2],
            usage_class=UsageClass.SPOT if rng.random() < 0.2 else UsageClass.ON_DEMAND,
            tier=Tier.UNTRUSTED if rng.random() < 0.15 else Tier.TRUSTED,
            jobs=tuple(self._job_s() for _ in range(rng.randint(1, count + 1))),
            eager=rng.random() < 0.3,
            credentialed=rng.random() < 0.3,
            attempts=2 if self._sometimes(Fault.RERUN, 0.35) else 1,
            released=not self._sometimes(Fault.RELEASE_NEVER, 0.15),
        )
        made: list[Operation] = [run]
        if self._sometimes(Fault.CANCEL, 0.2):
            made.append(
                PlannedCancel(process=f"provision {run_id}.{rng.randint(1, run.attempts)}", after_s=self._soon())
            )
        if self._sometimes(Fault.RELEASE_EARLY, 0.25):
            attempt = rng.randint(1, run.attempts)
            made.append(ExtraRelease(at=at + 2 * self._soon(), run_id=run_id, attempt=attempt, early=True))
        if self._sometimes(Fault.RELEASE_TWICE, 0.3):
            made += [
                ExtraRelease(at=at + after_s, run_id=run_id, attempt=1, early=False)
                for after_s in (rng.uniform(60, 400), rng.uniform(60, 400))
            ]
        for kind in ("provision", "release"):
            made += self._interruptions(f"{kind} {run_id}.{rng.randint(1, run.attempts)}", 110)
        return made

    def _job_s(self) -> float:
        """Most jobs are short; some exceed every timeout."""
        if self._rng.random() < 0.07:
            return 600.0
        return self._rng.uniform(2, 30) if self._rng.random() < 0.6 else self._rng.uniform(20, 150)

    def _soon(self) -> float:
        return self._rng.choice((self._rng.uniform(0, 2), self._rng.uniform(0, 20), self._rng.uniform(0, 90)))

    def _interruptions(self, process: str, steps: int) -> list[Operation]:
        made: list[Operation] = []
        if self._sometimes(Fault.CRASH, 0.25):
            made.append(PlannedInterruption(process=process, step=1 + int(self._rng.random() ** 1.5 * steps)))
        if self._sometimes(Fault.PAUSE, 0.2):
            step = 1 + int(self._rng.random() ** 1.5 * steps)
            made.append(PlannedInterruption(process=process, step=step, pause_s=self._pause_s()))
        call = self._rng.choice(CALLS[process.split(maxsplit=1)[0]])
        nth = 1 if call in ONCE else self._rng.randint(1, 4)
        if self._sometimes(Fault.CRASH, 0.2):
            made.append(PlannedInterruption(process=process, call=call, step=nth))
        if self._sometimes(Fault.PAUSE, 0.1):
            made.append(PlannedInterruption(process=process, call=call, step=nth, pause_s=self._pause_s()))
        return made

    def _pause_s(self) -> float:
        return self._rng.choice(
            (
                self._rng.uniform(1, 30),
                self._rng.uniform(1, 30),
                self._rng.uniform(20, 120),
                self._rng.uniform(20, 120),
                self._rng.uniform(60, 300),
                # Longer than the provision timeout and every grace period.
                self._rng.uniform(240, 600),
            )
        )

    def _losses(self) -> list[Operation]:
        made: list[Operation] = []
        for fault, with_notice in ((Fault.POWER_CUT, False), (Fault.SPOT_NOTICE, True)):
            for _ in range(self._rng.randint(1, 2 + self._instances // 2)):
                at, pick = self._rng.random() * self._seconds, self._rng.random()
                if fault in self._on:
                    made.append(MachineLoss(at=at, pick=pick, with_notice=with_notice))
        return made

    def _refreshes(self) -> list[Operation]:
        """Refreshes besides the scheduled sweeps."""
        made: list[Operation] = []
        for number in range(max(1, round(self._seconds / 300))):
            at = self._rng.random() * self._seconds
            twice = self._sometimes(Fault.REFRESH_TWICE, 0.7)
            config = self._rng.randrange(CONFIGURATIONS) if self._sometimes(Fault.CONFIG_CHANGE, 0.5) else None
            if twice or config is not None:
                made.append(PlannedRefresh(at=at, twice=twice, config=config))
            made += self._interruptions(f"sweep {number * 3 + self._rng.randint(1, 3)}", 90)
        return made

    def _agent_interruptions(self) -> list[Operation]:
        made: list[Operation] = []
        machines = max(4, round(self._seconds / HOLDS_S * self._instances * 0.3))
        pick: Callable[[], int] = lambda: 1 + int(self._rng.random() ** 2.5 * 600)  # noqa: E731
        for machine in range(1, machines + 1):
            for agent in (1, 2):
                process = f"agent {machine:04x}.{agent}"
                if self._sometimes(Fault.AGENT_CRASH, 0.6):
                    made.append(PlannedInterruption(process=process, step=pick()))
                if self._sometimes(Fault.AGENT_PAUSE, 0.3):
                    pause_s = min(MAX_AGENT_PAUSE_S, self._pause_s())
                    made.append(PlannedInterruption(process=process, step=pick(), pause_s=pause_s))
                if self._sometimes(Fault.AGENT_CRASH, 0.5):
                    made.append(PlannedInterruption(process=process, call="write_signal", step=self._rng.randint(1, 8)))
        return made

    def _operator_commands(self) -> list[Operation]:
        made: list[Operation] = []
        for number in range(1, 2 + self._instances // 2):
            at, pick = self._rng.random() * self._seconds, self._rng.random()
            for_s = self._rng.choice((self._rng.uniform(5, 60), self._rng.uniform(60, 900)))
            action = self._rng.choice(tuple(OperatorAction))
            if Fault(action.value) not in self._on:
                continue
            made.append(OperatorCommand(at=at, number=number, action=action, pick=pick, for_s=for_s))
            made += self._interruptions(f"operator {number}", 30)
        return made

    def _scale_downs(self) -> list[Operation]:
        made: list[Operation] = []
        for turn in range(max(1, round(self._seconds / SCALE_DOWN_S))):
            at = (turn + self._rng.random()) * SCALE_DOWN_S
            # A scheduler starts it at least once.
            times = 2 if self._rng.random() < 0.3 else 1
            for _ in range(times):
                number = 1 + sum(isinstance(item, PlannedScaleDown) for item in made)
                made.append(PlannedScaleDown(at=at, number=number, idle_count=self._rng.choice((0, 1, 2, 4))))
                made += self._interruptions(f"scale-down {number}", 30)
                at += self._rng.uniform(0, 40)
        return made


#: Events that start runs; a pull request may come from a fork.
_EVENTS = ("push", "push", "push", "workflow_dispatch", "pull_request")
#: Fraction of the jobs of sets whose machines get a spot notice.
INTERRUPTED = 0.1
#: Approximate seconds between two jobs per possible runner of a set.
DEMAND_S = 75.0


class _DemandDraft(_Draft):
    """Runner sets, their jobs, and what happens to their listeners."""

    def added_to(self, plan: WorldPlan) -> WorldPlan:
        rng = self._rng
        sets = self._sets()
        later = [self._changed(sets) for _ in range(CONFIGURATIONS - 1)]
        listeners = 2 if rng.random() < 0.4 else 1
        return replace(
            plan,
            runner_sets=(sets, *later),
            listeners=listeners,
            offers_jobs=rng.random() < 0.2,
            restarts_ids=rng.random() < 0.5,
            operations=(*plan.operations, *self._jobs(sets), *self._deletions(), *self._of_listeners(listeners)),
        )

    def _sets(self) -> tuple[RunnerSet, ...]:
        rng = self._rng
        made = []
        for name in ("one", "two", "three")[: rng.choice((1, 1, 2, 2, 3))]:
            is_untrusted = rng.random() < 0.2
            made.append(
                RunnerSet(
                    name=name,
                    labels=("self-hosted", f"set-{name}"),
                    resource_class=CLASSES[rng.random() < 0.2],
                    usage_class=UsageClass.SPOT if rng.random() < 0.2 else UsageClass.ON_DEMAND,
                    scope=SCOPE,
                    max=rng.choice((1, 2, 2, 3, 4)),
                    trust=Tier.UNTRUSTED if is_untrusted else Tier.TRUSTED,
                    windows=self._windows(),
                )
            )
        return tuple(made)

    def _windows(self) -> tuple[CapacityWindow, ...]:
        rng = self._rng
        if rng.random() < 0.5:
            return ()
        first = CapacityWindow(hot=rng.choice((0, 1, 1, 2)), warm=rng.choice((0, 0, 1, 2)))
        # Worlds begin at noon; the first window may close or open while they run.
        cron = rng.choice(("* * * * *", "* * * * *", "0-9 * * * *", "8-59 * * * *"))
        return (replace(first, cron=cron),)

    def _changed(self, sets: tuple[RunnerSet, ...]) -> tuple[RunnerSet, ...]:
        rng = self._rng
        changed = [replace(item, max=rng.choice((1, 2, 3, 4)), windows=self._windows()) for item in sets]
        # Seldom, because the jobs of a removed set wait forever.
        if len(changed) > 1 and rng.random() < 0.3:
            changed.pop(rng.randrange(len(changed)))
        return tuple(changed)

    def _jobs(self, sets: tuple[RunnerSet, ...]) -> list[Operation]:
        rng = self._rng
        made: list[Operation] = []
        for item in sets:
            left = max(1, round(self._seconds / DEMAND_S * item.max * rng.uniform(0.3, 1.0)))
            while left > 0:
                size = min(left, rng.choice((1, 1, 2, 3, 6)))
                left -= size
                at = rng.random() * self._seconds
                run_id = str(1_000 + len(made))
                event = rng.choice(_EVENTS)
                is_fork = event == "pull_request" and rng.random() < 0.4
                made += [self._job(item, run_id, at + rng.random() * 3, event, is_fork=is_fork) for _ in range(size)]
        return made

    def _job(self, item: RunnerSet, run_id: str, at: float, event: str, *, is_fork: bool) -> PlannedDemand:
        cancelled = self._rng.random() < 0.06
        cancelled_after_s = self._soon() + 0.1
        return PlannedDemand(
            at=at,
            run_id=run_id,
            runner_set=item.name,
            labels=item.labels if self._rng.random() < 0.5 else item.labels[1:],
            seconds=self._job_s(),
            event=event,
            is_fork=is_fork,
            cancelled_after_s=cancelled_after_s if cancelled else 0.0,
        )

    def _deletions(self) -> list[Operation]:
        at, pick = self._rng.random() * self._seconds, self._rng.random()
        return [SetDeletion(at=at, pick=pick)] if self._sometimes(Fault.SET_DELETED, 0.8) else []

    def _of_listeners(self, listeners: int) -> list[Operation]:
        """Interruptions. A restarted listener has its own name."""
        made: list[Operation] = []
        rng = self._rng
        for slot in range(1, listeners + 1):
            for start in range(1, 5):
                process = f"listener {slot}.{start}"
                step = 1 + int(rng.random() ** 2 * 3_000)
                call = rng.choice(CALLS["listener"])
                nth = 1 + int(rng.random() ** 2 * 8)
                pause_s = rng.choice((rng.uniform(1, 15), rng.uniform(15, 90), rng.uniform(60, 240)))
                restart_s = rng.uniform(1, 400)
                if self._sometimes(Fault.LISTENER_RESTART, 0.4):
                    made.append(PlannedCancel(process=process, after_s=restart_s))
                if self._sometimes(Fault.LISTENER_CRASH, 0.5):
                    made.append(PlannedInterruption(process=process, step=step))
                if self._sometimes(Fault.LISTENER_CRASH, 0.6):
                    made.append(PlannedInterruption(process=process, call=call, step=nth))
                if self._sometimes(Fault.LISTENER_PAUSE, 0.6):
                    made.append(PlannedInterruption(process=process, step=step // 2 + 1, pause_s=pause_s))
                if self._sometimes(Fault.LISTENER_PAUSE, 0.4):
                    made.append(PlannedInterruption(process=process, call=call, step=nth + 1, pause_s=pause_s))
        return made
