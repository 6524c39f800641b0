"""Directed schedules: every call of every use case is held until another process has finished a whole operation.

A stage is a small world without faults. It is recorded once, which numbers the calls of its processes. Each schedule is
the stage with one hold: one call of one process, and the operations of others that happen meanwhile. After that the
world comes to rest, and all invariants hold. Schedules are deterministic, so their names reproduce them:

    python -m simulation.schedules                          # a sample: each call is held once
    python -m simulation.schedules --all                    # each call with each operation
    python -m simulation.schedules --trace 'runs: provision 2.1, call 7 (apply), drain'
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import click

from remuda.cli.main import run_app
from remuda.cli.output import Output
from remuda.cli.run import EXIT_OK
from remuda.controlplane.operator import OperatorAction
from remuda.domain.errors import InvariantViolated, UserError
from remuda.domain.resources import Tier, UsageClass
from remuda.domain.runner_set import CapacityWindow, RunnerSet
from simulation.campaign import SimulationResult, simulate, worker_pool
from simulation.holds import NumberedCall
from simulation.invariants import SCOPE
from simulation.plan import (
    ExtraRelease,
    JobEnd,
    ListenerOutage,
    MachineLoss,
    Operation,
    OperatorCommand,
    PlannedDemand,
    PlannedHold,
    PlannedRefresh,
    PlannedRun,
    PlannedScaleDown,
    SetChange,
    SetDeletion,
    Takeover,
    WorldPlan,
)

#: Number of commands that only schedules start, beyond those of the stages.
EXTRA = 90
#: Beginnings of the names of calls that read. What they have read is old if their answer is late.
READS = (
    "get",
    "find",
    "list",
    "jobs_of",
    "recent",
    "provisions_of",
    "unsettled",
    "troubled",
    "describe",
    "count",
    "histories",
)
#: Beginnings of the names of calls that wait for a change, and may be cancelled.
WAITS = ("receive", "wait_for")
#: Schedules per task of a worker process.
BATCH = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A small world, the processes whose calls are held in it, and what others do meanwhile."""

    name: str
    plan: WorldPlan
    #: Beginnings of the names of the processes.
    held: tuple[str, ...]
    meanwhile: Mapping[str, tuple[Operation, ...]]
    #: Time of the first call that is held.
    since: float = 0.0


class Way(Enum):
    """How a call is held."""

    #: The task that makes the call waits before it.
    WAITS = "waits"
    #: The whole process is stopped before the call.
    STOPPED = "stopped"
    #: The call is made, and its answer comes late: what it says is old by then.
    LATE = "late"


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    stage: Stage
    call: NumberedCall
    meanwhile: str
    way: Way

    def __str__(self) -> str:
        note = "" if self.way is Way.WAITS else f" ({self.way.value})"
        return f"{self.stage.name}: {self.call}, {self.meanwhile}{note}"

    @property
    def plan(self) -> WorldPlan:
        hold = PlannedHold(
            process=self.call.process,
            call=self.call.number,
            until=self.stage.meanwhile[self.meanwhile],
            whole=self.way is Way.STOPPED,
            late=self.way is Way.LATE,
            at=self.call.at,
        )
        return replace(self.stage.plan, operations=(*self.stage.plan.operations, hold))


# Operations of others -----------------------------------------------------------------------------------------------


def _run(
    run_id: str, *, at: float = 0.0, count: int = 1, seconds: float = 20.0, credentialed: bool = False
) -> PlannedRun:
    return PlannedRun(
        at=at,
        run_id=run_id,
        count=count,
        resource_class="large",
        usage_class=UsageClass.ON_DEMAND,
        tier=Tier.TRUSTED,
        jobs=(seconds,) * count,
        credentialed=credentialed,
    )


def _operator(action: OperatorAction, *, number: int = EXTRA, at: float = 0.0, pick: float = 0.0) -> OperatorCommand:
    return OperatorCommand(at=at, number=number, action=action, pick=pick, for_s=60.0)


def _job(run_id: str, *, at: float = 0.0, seconds: float = 25.0) -> PlannedDemand:
    return PlannedDemand(at=at, run_id=run_id, runner_set="one", labels=("set-one",), seconds=seconds)


_OF_ALL: dict[str, tuple[Operation, ...]] = {
    "another run claims": (_run("90"),),
    "sweep": (PlannedRefresh(at=0.0),),
    "drain": (_operator(OperatorAction.DRAIN),),
    "quarantine": (_operator(OperatorAction.QUARANTINE),),
    "terminate": (_operator(OperatorAction.TERMINATE),),
    "scale-down": (PlannedScaleDown(at=0.0, number=EXTRA, idle_count=1),),
    "power cut": (MachineLoss(at=0.0, pick=0.0),),
    "spot notice": (MachineLoss(at=0.0, pick=0.0, with_notice=True),),
}


def _with_release(run_id: str) -> dict[str, tuple[Operation, ...]]:
    release = ExtraRelease(at=0.0, run_id=run_id, attempt=1, early=True)
    return {
        "release": (release,),
        "release and claim": (release, _run("91")),
        "short limits": (PlannedRefresh(at=0.0, config=1),),
        "low age": (PlannedRefresh(at=0.0, config=3),),
        **_OF_ALL,
    }


_OF_SETS: dict[str, tuple[Operation, ...]] = {
    "sets changed": (SetChange(number=EXTRA, config=2),),
    "set removed": (SetChange(number=EXTRA, config=1),),
    "set removed and restored": (SetChange(number=EXTRA, config=1), SetChange(number=EXTRA + 1, config=0)),
    "trust changed": (SetChange(number=EXTRA, config=3),),
    "a job comes": (_job("9001"),),
    "a job comes and is cancelled": (replace(_job("9002"), cancelled_after_s=2.0),),
    "sweep, and a job comes": (PlannedRefresh(at=0.0), _job("9003")),
    "scale set deleted": (SetDeletion(at=0.0, pick=0.0),),
    **_OF_ALL,
}


# Stages -------------------------------------------------------------------------------------------------------------


def _plan(seed: int, *operations: Operation, minutes: float, **changed: Any) -> WorldPlan:
    values: dict[str, Any] = {
        "seed": seed,
        "hours": minutes / 60,
        "instances": 4,
        "faults": frozenset(),
        "operations": operations,
        "numbers_calls": True,
        **changed,
    }
    return WorldPlan(**values)


#: A machine is launched for run 1, and claimed by run 2, which also launches another one.
_RUNS = (_run("1", at=5.0), _run("2", at=170.0, count=2, credentialed=True))
_SET = RunnerSet(
    name="one",
    labels=("self-hosted", "set-one"),
    resource_class="large",
    scope=SCOPE,
    max=2,
    rerun_on_interruption=True,
)
_KEPT = replace(_SET, windows=(CapacityWindow(cron="* * * * *", hot=1, warm=1),))
#: One job after the other, then two at once.
_JOBS = (_job("1001", at=5.0), _job("1002", at=125.0), _job("1003", at=190.0), _job("1004", at=190.5))


def _stages() -> Iterator[Stage]:
    for polls in (False, True):
        runs = _plan(1 + polls, *_RUNS, minutes=6.0, polls=polls)
        name = "runs, polled" if polls else "runs"
        yield Stage(
            name=name,
            plan=runs,
            held=("provision 1.1", "release 1.1", "agent 0001.1"),
            meanwhile=_with_release("1"),
        )
        yield Stage(
            name=f"{name}, second",
            plan=runs,
            held=("provision 2.1", "release 2.1", "agent 000", "sweep 2", "sweep 3", "sweep 4", "sweep 5"),
            meanwhile=_with_release("2"),
            since=110.0,
        )
    for action in OperatorAction:
        for when, at in (("idle", 140.0), ("running", 200.0)):
            yield Stage(
                name=f"{action} of {when}",
                plan=_plan(3, *_RUNS, _operator(action, number=1, at=at), minutes=5.0),
                held=("operator 1",),
                meanwhile=_with_release("2"),
            )
    for when, at in (("idle", 140.0), ("running", 200.0)):
        extra = (PlannedScaleDown(at=at, number=1, idle_count=1), PlannedRefresh(at=at + 5, config=1))
        yield Stage(
            name=f"upkeep of {when}",
            plan=_plan(4, *_RUNS, *extra, minutes=5.0),
            held=("scale-down 1", "refresh 1a"),
            meanwhile=_with_release("2"),
        )
    for number, (name, sets) in enumerate({"set": _SET, "kept set": _KEPT}.items()):
        changed = replace(sets, max=1, windows=())
        plan = _plan(
            5 + number,
            *_JOBS,
            minutes=6.0,
            instances=2,
            listeners=1,
            runner_sets=((sets,), (), (changed,), (replace(sets, trust=Tier.UNTRUSTED),)),
        )
        yield Stage(name=name, plan=plan, held=("listener 1.1",), meanwhile=_OF_SETS)
        yield Stage(name=f"{name}, others", plan=plan, held=("agent 000", "sweep 2", "sweep 4"), meanwhile=_OF_SETS)
        yield Stage(
            name=f"{name} with a standby",
            plan=replace(plan, listeners=2),
            held=("listener 1.1", "listener 2.1"),
            meanwhile={"takeover": (Takeover(),)},
        )


#: Where a set is after its scope was changed.
_MOVED = replace(_SET, scope="octo/other")


def _rare_stages() -> Iterator[Stage]:
    """What a set seldom meets: an interruption, a lost machine at its end, changes that no listener sees."""
    interrupted = replace(_job("1001", at=5.0, seconds=150.0), notices_after_s=(25.0,))
    sets = ((_SET,), (), (replace(_SET, max=1),), (replace(_SET, trust=Tier.UNTRUSTED),))
    yield Stage(
        name="interrupted",
        plan=_plan(11, interrupted, minutes=4.0, instances=2, listeners=1, runner_sets=sets),
        held=("listener 1.1",),
        meanwhile={"the job ends": (JobEnd(),)},
        since=60.0,
    )
    # GitHub counts the lost job for ten minutes, and does not delete a set with a running job.
    lost = (_job("1001", at=5.0, seconds=150.0), MachineLoss(at=100.0, pick=0.0), PlannedRefresh(at=130.0, config=1))
    yield Stage(
        name="lost and removed",
        plan=_plan(12, *lost, minutes=14.0, instances=2, listeners=1, runner_sets=sets),
        held=("listener 1.1",),
        meanwhile={"sweep": _OF_SETS["sweep"], "a job comes": _OF_SETS["a job comes"]},
        since=640.0,
    )
    for name, turns in {"moved": (1, 0, 1), "changed": (2, 3, 0)}.items():
        outages = [
            ListenerOutage(at=130.0 + 100.0 * turn, number=turn + 1, config=config) for turn, config in enumerate(turns)
        ]
        others = ((_SET,), (_MOVED,), (replace(_SET, max=1),), (replace(_SET, trust=Tier.UNTRUSTED),))
        yield Stage(
            name=f"{name} without a listener",
            plan=_plan(13, _job("1001", at=5.0), *outages, minutes=9.0, instances=2, listeners=1, runner_sets=others),
            held=("listener 1.2",),
            meanwhile={"sweep": _OF_SETS["sweep"], "drain": _OF_SETS["drain"]},
            since=130.0,
        )
    moves = (
        _job("1001", at=5.0, seconds=200.0),
        PlannedRefresh(at=100.0, config=1),
        PlannedRefresh(at=330.0, config=0),
    )
    yield Stage(
        name="moved",
        plan=_plan(15, *moves, minutes=9.0, instances=2, listeners=1, runner_sets=((_SET,), (_MOVED,), (), ())),
        held=("listener 1.1",),
        meanwhile={"sweep": _OF_SETS["sweep"], "drain": _OF_SETS["drain"]},
        since=240.0,
    )
    # The runner of the former set does not notice, and is the only one that the set may have.
    single = (replace(_SET, max=1, windows=(CapacityWindow(hot=1),)),)
    deleted = (SetDeletion(at=140.0, pick=0.0), _job("1001", at=150.0))
    yield Stage(
        name="deleted by GitHub",
        plan=_plan(
            14,
            *deleted,
            minutes=9.0,
            instances=2,
            listeners=1,
            deaf_runners=True,
            runner_sets=(single, (), single, single),
        ),
        held=("listener 1.1",),
        meanwhile={"sweep": _OF_SETS["sweep"], "power cut": _OF_SETS["power cut"]},
        since=135.0,
    )


STAGES = (*_stages(), *_rare_stages())


# Enumeration --------------------------------------------------------------------------------------------------------


def calls_of(stage: Stage) -> list[NumberedCall]:
    """The calls that can be held. Those that repeat another one while no record has changed are left out."""
    seen: set[tuple[str, str, int]] = set()
    calls = []
    for call in simulate(stage.plan).calls:
        key = (call.process, call.operation, call.writes)
        is_held = call.process.startswith(stage.held) and stage.since <= call.at < stage.plan.hours * 3_600
        if is_held and key not in seen:
            seen.add(key)
            calls.append(call)
    return calls


def schedules_of(stage: Stage, *, complete: bool) -> list[Schedule]:
    """Each call with each operation or, if not `complete`, with one of them in turn."""
    names = list(stage.meanwhile)
    return [
        Schedule(stage=stage, call=call, meanwhile=name, way=way)
        for number, call in enumerate(calls_of(stage))
        for at, name in enumerate(names if complete else [names[number % len(names)]])
        for way in _ways(name, call, number + at, complete=complete)
    ]


def _ways(meanwhile: str, call: NumberedCall, number: int, *, complete: bool) -> tuple[Way, ...]:
    """How a call is held: in one way in turn, or in all. Nobody takes over from a listener that renews its lease."""
    if meanwhile == "takeover":
        return (Way.STOPPED,)
    ways = tuple(Way)
    if call.operation.startswith(READS):
        # What is read after a wait is fresh.
        ways = (Way.LATE, Way.STOPPED)
    elif call.operation.startswith(WAITS):
        ways = (Way.WAITS, Way.STOPPED)
    return ways if complete else (ways[number % len(ways)],)


# Runs ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleResult:
    name: str
    #: Text of the violation; empty if there is none.
    violation: str
    #: Whether the call was held. If not, the stage is not deterministic.
    was_held: bool


def run_schedule(schedule: Schedule) -> ScheduleResult:
    result = simulate(schedule.plan)
    violation = "" if result.violation is None else str(result.violation)
    return ScheduleResult(name=str(schedule), violation=violation, was_held=result.held == schedule.call)


def run_batch(schedules: Sequence[Schedule]) -> list[ScheduleResult]:
    return [run_schedule(schedule) for schedule in schedules]


def run_schedules(schedules: Sequence[Schedule], *, workers: int) -> Iterator[ScheduleResult]:
    batches = [schedules[at : at + BATCH] for at in range(0, len(schedules), BATCH)]
    with worker_pool(workers) as pool:
        for results in pool.map(run_batch, batches):
            yield from results


def all_schedules(*, complete: bool, stages: Iterable[Stage] = STAGES) -> list[Schedule]:
    return [schedule for stage in stages for schedule in schedules_of(stage, complete=complete)]


def find_schedule(name: str) -> Schedule:
    stages = [stage for stage in STAGES if name.startswith(f"{stage.name}: ")]
    found = [item for item in all_schedules(complete=True, stages=stages) if str(item) == name]
    if len(found) != 1:
        raise UserError(f"there is no schedule {name!r}", field="--trace", fix="use a name that a run has printed")
    return found[0]


@click.command("schedules", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--all", "complete", is_flag=True, help="Hold each call with each operation, in both ways.")
@click.option("--stage", default="", help="Only the stages whose names begin so.")
@click.option("--trace", default="", help="Run the schedule of this name and print every event.")
@click.option("--workers", type=click.IntRange(1, 256), default=2, help="Worker processes. (default: 2)")
def main(*, complete: bool, stage: str, trace: str, workers: int) -> int:
    """Hold each call of each use case until another process has finished a whole operation."""
    output = Output(as_json=False, quiet=False)
    if trace:
        return _trace(find_schedule(trace), output)
    schedules = all_schedules(complete=complete, stages=[item for item in STAGES if item.name.startswith(stage)])
    violations = missed = 0
    for result in run_schedules(schedules, workers=workers):
        missed += not result.was_held
        if result.violation:
            violations += 1
            output.say(f"{result.name}: {result.violation}", style="red")
    verdict = "FAILED" if violations or missed else "passed"
    counts = f"{violations} violations in {len(schedules)} schedules, {missed} of which never held their call"
    output.answer(f"verdict: {verdict} ({counts})", f"verdict: {verdict} ({counts})")
    return InvariantViolated.exit_code if violations or missed else EXIT_OK


def _trace(schedule: Schedule, output: Output) -> int:
    result: SimulationResult = simulate(schedule.plan, keep_trace=True)
    for line in result.lines:
        output.say(str(line))
    return InvariantViolated.exit_code if result.violation else EXIT_OK


if __name__ == "__main__":
    sys.exit(run_app(main, sys.argv[1:]))
