"""Exhaustive search of a small runner set: every order of events of two machines and two jobs.

As in `exhaustive`, the steps come from the real transition table, the decisions about a set's supply, those of agents
and of releases. GitHub registers, gives and starts jobs and tells about them. The listener may be killed after any of
its steps, agents restart, machines disappear, and messages get lost. Besides the invariants, the search checks that
every job can still be served from every state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import IntEnum
from functools import partial
from itertools import permutations, product
from typing import NamedTuple

from remuda.agent.decide import AgentAction, Observation, next_step
from remuda.domain.decide import next_step as decisions
from remuda.domain.demand import DemandStatistics
from remuda.domain.errors import IllegalTransition
from remuda.domain.holder import SetHolder, StartedJob
from remuda.domain.instance import ABSORBING, ASSIGNED, Assignment, Instance, RetireReason, State
from remuda.domain.pool_config import runner_name
from remuda.domain.resources import Tier
from remuda.domain.runner_set import CapacityWindow, RunnerSet
from remuda.domain.signals import Report, Signal, Verdict, boot_verdict, registration_verdict
from remuda.domain.supply import MachineStep, SetMachine, decide_supply
from remuda.domain.transitions import (
    Actor,
    Bind,
    Change,
    Claim,
    End,
    Equip,
    Event,
    ListenOn,
    Release,
    Retire,
    advance,
    create,
    presumed_idle,
    tombstone,
)
from remuda.ports.machine import RunnerState, ScriptStatus
from simulation.instance_model import (
    DEADLINE,
    ID,
    LIFETIMES,
    NOW,
    POOL,
    ModelViolation,
    PendingWrite,
    buried,
    new_record,
    write_of,
)
from simulation.invariants import STATE_ORDER, transition_violations

SET = RunnerSet(name="set", labels=("set",), resource_class="large", scope="o/r", max=2)
#: The run of the set's jobs.
RUN = "7"
HOLDER = SetHolder(name=SET.name, provision_id="own")
#: The last holder of an instance that nobody holds: nothing distinguishes what it was held for.
SERVED = replace(HOLDER, job=StartedJob(run_id=RUN))
LONG_AGO = NOW - timedelta(hours=1)

#: Incidents, each with a budget of one per search.
CRASH, LOST_EVENT = 1, 2
#: Bits of a state's number: of each machine, of the waiting jobs and the budget together, and of the budget.
_BITS = 16
_MASK = (1 << _BITS) - 1
_REST = 4
_REST_MASK = (1 << _REST) - 1
_BUDGETS = 2
_BUDGET_MASK = (1 << _BUDGETS) - 1


class Acquisition(IntEnum):
    """Progress of the listener with a machine that it acquires or withdraws."""

    NONE = 0
    LAUNCHED = 1
    #: The record is created or claimed.
    HOLDS = 2
    #: GitHub has registered its runner.
    REGISTERED = 3
    #: GitHub has removed its registration, so that it can be released.
    WITHDRAWN = 4


class SetAgent(NamedTuple):
    """State of a machine and of its agent."""

    #: Epoch of the just-in-time configuration on its disk, or 0.
    configured: int = 0
    listening: bool = False
    job: bool = False
    spent: bool = False
    #: Whether the listener exited because its registration was gone.
    unused: bool = False
    dirty: bool = False
    #: Epoch and signal that this agent process has sent last.
    memory: tuple[int, Signal] | None = None
    alive: bool = True


class MachineModel(NamedTuple):
    record: Instance | None = None
    launched: bool = False
    signal: tuple[int, Signal | None] = (0, None)
    #: Last heartbeat: busy, listening, spent epoch.
    beat: tuple[bool, bool, int] = (False, False, 0)
    agent: SetAgent = SetAgent()
    #: GitHub: epoch of the registered runner name or 0, and whether it was given a job that has not started.
    registered: int = 0
    taken: bool = False
    #: Last epoch in which a job started, and whether that job is not recorded yet.
    served: int = 0
    unrecorded_job: bool = False
    #: Whether the event about the job that started in this epoch is under way.
    has_event: bool = False
    acquisition: Acquisition = Acquisition.NONE
    #: Decided by a state that has changed since.
    pending: PendingWrite | None = None

    @property
    def online(self) -> bool:
        agent = self.agent
        return agent.alive and agent.listening and bool(self.registered) and self.registered == agent.configured

    @property
    def report(self) -> Report:
        return _report(self.signal, self.beat)


class _SupplyView(NamedTuple):
    """The part of one machine's state that the decision about the supply depends on."""

    #: None unless it is assigned to the set.
    record: Instance | None
    signal: tuple[int, Signal | None]
    beat: tuple[bool, bool, int]
    has_job: bool
    #: Whether it is launched and has no record yet.
    is_coming: bool
    #: Whether it may have been silent for long: its agent has nothing to do any more.
    is_silent: bool


class Orders(NamedTuple):
    """Steps for one machine that the decision about the supply asks for."""

    bind: bool = False
    release: bool = False
    end: bool = False
    renew: bool = False
    withdraw: bool = False
    #: Whether the set needs another runner.
    acquire: bool = False


class DemandStep(NamedTuple):
    """One step of one machine, or of the listener."""

    text: str
    #: Number of the machine after it.
    after: int
    #: Added to the number of waiting jobs and incidents that are left.
    change: int = 0
    violation: str = ""
    #: Whether it is an incident.
    is_incident: bool = False


#: A step of one machine before its result is numbered: text, machine, change of the waiting jobs, incident.
_RawStep = tuple[str, MachineModel, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class DemandBounds:
    machines: int = 2
    jobs: int = 2
    crash: bool = True
    lost_event: bool = False
    #: Times that a machine is used before it is replaced.
    uses: int = 3
    #: Whether writes that were decided by an earlier state may come late.
    stale: bool = True

    def __str__(self) -> str:
        plural = "s" if self.machines > 1 else ""
        incidents = [name for name, on in (("one crash", self.crash), ("one lost event", self.lost_event)) if on]
        late = "" if self.stale else ", no late writes"
        what = ", ".join(incidents) or "no incident"
        return f"{self.machines} machine{plural} of a set for {self.uses} uses, {self.jobs} jobs, {what}{late}"


class DemandModel:
    """The steps of a set, its listener, machines and jobs, on numbers.

    The number of a state consists of the numbers of its machines, the waiting jobs and the incidents that are left.
    Jobs differ by nothing but their runner, and machines are interchangeable: the lower number comes first.
    """

    def __init__(self, bounds: DemandBounds) -> None:
        self._bounds = bounds
        # Number 0 stands for no machine.
        self._machines: list[MachineModel] = [MachineModel()]
        self._numbers: dict[MachineModel, int] = {}
        #: Number of the view of each machine, and views by number.
        self._views: list[int] = [0]
        self._view_numbers: dict[_SupplyView, int] = {}
        self._view_of: list[_SupplyView] = []
        #: The answers of the real code, which depend on their arguments only.
        self._plans: dict[int, tuple[int, int]] = {}
        self._orders: dict[Orders, int] = {}
        self._steps_of: dict[int, list[DemandStep]] = {}
        self._killed: dict[tuple[int, bool], int] = {}

    def first(self) -> int:
        bounds = self._bounds
        machine = self._number(MachineModel())
        budget = CRASH * bounds.crash | LOST_EVENT * bounds.lost_event
        other = machine if bounds.machines > 1 else 0
        return (other << _BITS | machine) << _REST | bounds.jobs << _BUDGETS | budget

    def is_served(self, state: int) -> bool:
        pair, rest = state >> _REST, state & _REST_MASK
        machines = self._machines[pair >> _BITS], self._machines[pair & _MASK]
        return not rest >> _BUDGETS and not any(item.taken or item.agent.job for item in machines)

    def _number(self, machine: MachineModel) -> int:
        number = self._numbers.get(machine)
        if number is None:
            number = self._numbers[machine] = len(self._machines)
            if number > _MASK:
                raise OverflowError(f"more than {_MASK} states of a machine: raise _BITS")
            self._machines.append(machine)
            self._views.append(self._number_view(machine))
        return number

    def _number_view(self, machine: MachineModel) -> int:
        record = machine.record
        is_set = record is not None and bool(record.runner_set) and record.state in ASSIGNED
        view = _SupplyView(
            record=record if is_set else None,
            signal=machine.signal if is_set else (0, None),
            beat=machine.beat if is_set else (False, False, 0),
            has_job=machine.taken or machine.agent.job,
            is_coming=record is None and machine.acquisition is Acquisition.LAUNCHED,
            is_silent=is_set and not machine.beat[1] and not self._has_agent_steps(machine),
        )
        number = self._view_numbers.get(view)
        if number is None:
            number = self._view_numbers[view] = len(self._view_of)
            self._view_of.append(view)
        return number

    def _has_agent_steps(self, machine: MachineModel) -> bool:
        try:
            return any(_normalized(after) != machine for _, after, _, _ in self._by_agent(machine))
        except ModelViolation:
            return True

    def steps(self, state: int) -> Iterator[tuple[int, DemandStep]]:
        """Every step of a state, with the number of the state after it. The hot path, so it works on numbers only."""
        pair, rest = state >> _REST, state & _REST_MASK
        zero, one = pair >> _BITS, pair & _MASK
        waiting = rest >> _BUDGETS
        question = (self._views[zero] << _BITS | self._views[one]) << _REST | waiting
        orders = self._plans.get(question)
        if orders is None:
            orders = self._plans[question] = self._decide_orders(zero, one, waiting)
        for machine, other, order in ((zero, one, orders[0]), (one, zero, orders[1])):
            if not machine:
                continue
            key = (order << _BITS | machine) << _REST | rest
            steps = self._steps_of.get(key)
            if steps is None:
                steps = self._steps_of[key] = list(self._find_steps(machine, order, rest))
            for step in steps:
                after = step.after
                moved = after << _BITS | other if after < other else other << _BITS | after
                yield moved << _REST | rest + step.change, step
        if rest & CRASH:
            yield from self._kill(zero, one, rest)

    def _kill(self, zero: int, one: int, rest: int) -> Iterator[tuple[int, DemandStep]]:
        """The listener loses what it was doing, and perhaps messages that it has acknowledged."""
        for text, is_kept in (("the listener is killed", True), ("the listener is killed with its messages", False)):
            pair = sorted(self._after_kill(number, keeps_events=is_kept) if number else 0 for number in (zero, one))
            if pair != [zero, one]:
                killed = (pair[0] << _BITS | pair[1]) << _REST | rest - CRASH
                yield killed, DemandStep(text, 0, -CRASH, is_incident=True)

    def _after_kill(self, number: int, *, keeps_events: bool) -> int:
        known = self._killed.get((number, keeps_events))
        if known is None:
            machine = self._machines[number]
            machine = machine._replace(acquisition=Acquisition.NONE, has_event=machine.has_event and keeps_events)
            known = self._killed[number, keeps_events] = self._number(machine)
        return known

    def _decide_orders(self, zero: int, one: int, waiting: int) -> tuple[int, int]:
        views = [self._view_of[self._views[number]] for number in (zero, one) if number]
        found = _orders(views, waiting)
        first, *others = [self._orders.setdefault(orders, len(self._orders)) for orders in found]
        return (first, others[0]) if others else (0, first)

    def _find_steps(self, number: int, order: int, rest: int) -> Iterator[DemandStep]:
        machine, orders = self._machines[number], tuple(self._orders)[order]
        found: dict[tuple[int, int], DemandStep] = {}
        try:
            decided = list(self._decide(machine, orders))
            makers = (
                self._by_writes(machine, decided),
                self._by_listener(machine, orders),
                self._by_agent(machine),
                self._by_github(machine, has_waiting=rest >> _BUDGETS > 0),
                self._by_incidents(machine, rest & _BUDGET_MASK),
            )
            for maker in makers:
                for text, raw, waiting, cost in maker:
                    change = (waiting << _BUDGETS) - cost
                    for machine_after in self._with_pending(machine, raw, decided):
                        after = self._number(machine_after)
                        # An incident without an effect leaves a state that can do nothing more than this one.
                        if after != number or waiting:
                            step = DemandStep(text, after, change, is_incident=cost > 0)
                            found.setdefault((after, change), step)
        except ModelViolation as violation:
            yield DemandStep("continues", number, violation=str(violation))
        yield from found.values()

    def _with_pending(
        self, machine: MachineModel, raw: MachineModel, decided: list[PendingWrite]
    ) -> Iterator[MachineModel]:
        """The machine after a step, alone and with a write that was decided before the step."""
        kept = raw.pending if raw.pending is not None and _may_apply(raw.pending, raw.record) else None
        after = _normalized(raw._replace(pending=kept))
        yield after
        if not self._bounds.stale or kept is not None or machine.pending is not None or raw.record == machine.record:
            return
        # A write that would be decided on now as well is no late one.
        fresh = list(self._decide(after, Orders()))
        for write in decided:
            if write not in fresh and _may_apply(write, after.record):
                yield after._replace(pending=write)

    # Writes that the listener and sweeps decide on

    def _decide(self, machine: MachineModel, orders: Orders) -> Iterator[PendingWrite]:
        record = machine.record
        if record is None:
            if machine.launched and machine.acquisition is Acquisition.NONE:
                stone = buried(new_record("x"))
                yield write_of(tombstone(stone, by=Actor.REFRESH, now=NOW, why=""), "a sweep buries it", Actor.REFRESH)
            return
        for text, by, event in self._events(machine, record, orders):
            try:
                # An idle machine expires at any time.
                is_expiry = isinstance(event, End) and event.reason is RetireReason.EXPIRED
                late = record.threshold + timedelta(seconds=LIFETIMES.margin_s + 1)
                change = advance(record, event, by=by, now=late if is_expiry else NOW, why="")
            except IllegalTransition as illegal:
                raise ModelViolation(f"S10: {illegal}") from illegal
            yield write_of(change, text, by, machine.signal if isinstance(event, End) else (0, None))

    def _events(self, machine: MachineModel, record: Instance, orders: Orders) -> Iterator[tuple[str, Actor, Event]]:
        report = machine.report
        if record.state in ABSORBING:
            return
        if record.state is State.RELEASING:
            upcoming = decisions.next_step(record, report, decisions.PoolPolicy(lifetimes=LIFETIMES), now=NOW)
            if isinstance(upcoming, decisions.Write):
                yield f"its release advances ({type(upcoming.event).__name__.lower()})", Actor.LISTENER, upcoming.event
        if record.state is State.IDLE:
            end = End(reason=RetireReason.EXPIRED, margin_s=LIFETIMES.margin_s)
            yield "a sweep ends it: not used", Actor.REFRESH, end
        if not machine.agent.alive:
            yield "a sweep ends it: gone", Actor.REFRESH, End(reason=RetireReason.GONE)
        if record.state in {State.CREATED, State.CLAIMED}:
            end = End(reason=RetireReason.EXPIRED, margin_s=LIFETIMES.margin_s)
            yield "a sweep ends it: its time is up", Actor.REFRESH, end
        if record.state is not State.RUNNING or not record.runner_set:
            return
        if machine.has_event and machine.served == record.epoch and not record.is_bound:
            name = record.assignment.runner_name if record.assignment else ""
            yield "the listener binds it", Actor.LISTENER, _bind(runner_name=name, run_id=RUN, tier=Tier.TRUSTED)
        if orders.release:
            yield "the listener releases it", Actor.LISTENER, _release_of(record)
        if orders.bind:
            yield "the listener binds it late", Actor.LISTENER, _bind(report=report)
        if orders.renew:
            event = ListenOn(report=report, listening_time_s=1_000.0, max_runtime_s=LIFETIMES.max_runtime_s)
            yield "the listener renews it", Actor.LISTENER, event
        if orders.end and registration_verdict(report, record.epoch) is Verdict.FAILED:
            yield "the listener ends it: failed", Actor.LISTENER, End(reason=RetireReason.FAILED, report=report)

    def _by_writes(self, machine: MachineModel, decided: list[PendingWrite]) -> Iterator[_RawStep]:
        pending = [machine.pending] if machine.pending is not None else []
        for write in [*decided, *pending]:
            if not write.condition.is_met_by(machine.record):
                continue
            after = _written(machine, write)
            if write in pending:
                yield f"{write.text}, late", after._replace(pending=None), 0, 0
            else:
                yield write.text, after, 0, 0

    # Steps of the listener with more than one write or call

    def _by_listener(self, machine: MachineModel, orders: Orders) -> Iterator[_RawStep]:
        record = machine.record
        if machine.acquisition is not Acquisition.NONE:
            yield from self._continue(machine)
            return
        if orders.acquire:
            yield from self._acquire(machine)
        if orders.withdraw and not machine.taken and not machine.agent.job:
            # GitHub refuses while it has a job.
            gone = machine._replace(registered=0, acquisition=Acquisition.WITHDRAWN)
            if not machine.registered and record is not None and record.retire_reason is None:
                retire = Retire(reason=RetireReason.UNTRUSTED_JOB)
                change = advance(record, retire, by=Actor.LISTENER, now=NOW, why="")
                gone = _written(gone, write_of(change, "retire", Actor.LISTENER))
            yield "GitHub removes its registration for the listener", gone, 0, 0

    def _acquire(self, machine: MachineModel) -> Iterator[_RawStep]:
        record = machine.record
        if record is None:
            if not machine.launched:
                launched = machine._replace(launched=True, acquisition=Acquisition.LAUNCHED)
                yield "the listener launches it", launched, 0, 0
            return
        if record.state is not State.IDLE or record.epoch >= self._bounds.uses:
            return
        change = _claim(record.epoch)
        if change.condition.is_met_by(record):
            claimed = _written(machine, write_of(change, "claim", Actor.LISTENER))
            yield "the listener claims it", claimed._replace(acquisition=Acquisition.HOLDS), 0, 0

    def _continue(self, machine: MachineModel) -> Iterator[_RawStep]:
        record = machine.record
        match machine.acquisition:
            case Acquisition.LAUNCHED:
                made = create(_new_record(), by=Actor.LISTENER, why="")
                if made.condition.is_met_by(record):
                    created = _written(machine, write_of(made, "record", Actor.LISTENER))
                    yield "the listener records it", created._replace(acquisition=Acquisition.HOLDS), 0, 0
                else:
                    yield "the listener finds a tombstone", machine._replace(acquisition=Acquisition.NONE), 0, 0
            case Acquisition.HOLDS if record is not None:
                booted = record.state is State.CLAIMED or boot_verdict(machine.report, record.epoch) is Verdict.OK
                if record.state in {State.CREATED, State.CLAIMED} and booted:
                    yield from self._register(machine, record)
                yield "the listener gives up", _given_back(machine), 0, 0
            case Acquisition.REGISTERED if record is not None:
                equip = Equip(
                    claim=record.claim,
                    report=machine.report,
                    jit_config="jit",
                    runner_id=record.epoch,
                    listening_time_s=1_000.0,
                    max_runtime_s=LIFETIMES.max_runtime_s,
                )
                if record.state in {State.CREATED, State.CLAIMED}:
                    change = advance(record, equip, by=Actor.LISTENER, now=NOW, why="")
                    equipped = _written(machine, write_of(change, "equip", Actor.LISTENER))
                    yield "the listener equips it", equipped._replace(acquisition=Acquisition.NONE), 0, 0
                yield "the listener gives up", _given_back(machine), 0, 0
            case Acquisition.WITHDRAWN if record is not None and record.state is not State.CREATED:
                yield "the listener releases it", _given_back(machine), 0, 0
            case _:
                yield "the listener stops", machine._replace(acquisition=Acquisition.NONE), 0, 0

    @staticmethod
    def _register(machine: MachineModel, record: Instance) -> Iterator[_RawStep]:
        # A name that exists is removed first, unless it has a job.
        if machine.registered == record.epoch and (machine.taken or machine.agent.job):
            return
        registered = machine._replace(registered=record.epoch, acquisition=Acquisition.REGISTERED)
        yield "GitHub registers it", registered, 0, 0

    # Agents

    def _by_agent(self, machine: MachineModel) -> Iterator[_RawStep]:
        agent, record = machine.agent, machine.record
        if not agent.alive or not machine.launched:
            return
        beat = (agent.job, agent.listening, agent.configured if agent.spent else 0)
        yield "its agent beats", machine._replace(beat=beat), 0, 0
        if record is None:
            return
        step = next_step(_observation(machine, record))
        text = f"its agent: {step.action.value}"
        if step.action is AgentAction.END:
            if record.state not in ABSORBING:
                raise ModelViolation(f"S6: its agent ends it while it is {record.state}, before its time")
            yield text, machine._replace(agent=SetAgent(alive=False)), int(machine.taken), 0
        elif step.action is AgentAction.SIGNAL and step.signal is not None:
            yield f"{text} {step.signal}", _signalled(machine, record.epoch, step.signal), 0, 0
        else:
            for result, after in _performed(machine, record, step.action):
                yield f"{text}{result}", after, 0, 0

    # GitHub and incidents

    @staticmethod
    def _by_github(machine: MachineModel, *, has_waiting: bool) -> Iterator[_RawStep]:
        agent, record = machine.agent, machine.record
        if machine.online and not agent.job and not machine.taken and has_waiting:
            yield "GitHub gives it a job", machine._replace(taken=True), -1, 0
        if machine.taken and machine.online:
            if (
                record is None
                or record.epoch != agent.configured
                or record.state
                not in {
                    State.RUNNING,
                    State.RELEASING,
                }
            ):
                raise ModelViolation(f"S2: a job starts while it is {record and record.state}")
            if machine.served == agent.configured:
                raise ModelViolation(f"D4: a second job starts at epoch {agent.configured}")
            started = machine._replace(
                taken=False,
                agent=agent._replace(job=True, dirty=True),
                served=agent.configured,
                unrecorded_job=True,
                has_event=True,
            )
            yield "its job starts", started, 0, 0
        if agent.job:
            spent = agent._replace(job=False, listening=False, spent=True)
            yield "its job ends", machine._replace(agent=spent, registered=0), 0, 0
        if agent.listening and not agent.job and machine.registered != agent.configured:
            exited = agent._replace(listening=False, unused=True)
            yield "its runner exits: the registration is gone", machine._replace(agent=exited), 0, 0

    @staticmethod
    def _by_incidents(machine: MachineModel, budget: int) -> Iterator[_RawStep]:
        agent = machine.agent
        if budget & LOST_EVENT and machine.has_event:
            yield "GitHub does not send its event", machine._replace(has_event=False), 0, LOST_EVENT
        if not budget & CRASH or not agent.alive or not machine.launched:
            return
        # A job that has not started goes to another runner.
        off = machine._replace(agent=SetAgent(alive=False), taken=False, beat=machine.beat)
        yield "it disappears", off, int(machine.taken), CRASH
        yield "its agent restarts", machine._replace(agent=agent._replace(memory=None)), 0, CRASH
        if agent.listening and not agent.job:
            exited = agent._replace(listening=False)
            yield "its runner exits", machine._replace(agent=exited, taken=False), int(machine.taken), CRASH


def _performed(machine: MachineModel, record: Instance, action: AgentAction) -> Iterator[tuple[str, MachineModel]]:
    """The results of an action of the agent."""
    agent = machine.agent
    if agent.job and action in {AgentAction.STOP, AgentAction.RESET}:
        raise ModelViolation(f"S6: its agent is about to {action.value} while a job runs")
    match action:
        case AgentAction.REGISTER:
            if record.assignment is None or not record.assignment.jit_config:
                raise ModelViolation("S4: its agent registers without a configuration")
            made = machine._replace(agent=agent._replace(configured=record.epoch))
            yield "", _signalled(made, record.epoch, Signal.UD_REG_OK)
            yield ", fails", _signalled(machine, record.epoch, Signal.UD_REG_FAILED)
        case AgentAction.START:
            if record.state is not State.RUNNING or agent.configured != record.epoch:
                raise ModelViolation(f"S2: its runner starts while it is {record.state}")
            if agent.spent:
                raise ModelViolation("S14: its runner starts again after its only job")
            exists = machine.registered == agent.configured
            yield "", machine._replace(agent=agent._replace(listening=exists, unused=not exists))
        case AgentAction.REMOVE if not agent.job:
            yield "", machine._replace(agent=agent._replace(configured=0, spent=False, unused=False))
        case AgentAction.STOP:
            yield "", machine._replace(agent=agent._replace(listening=False))
        case AgentAction.RESET:
            clean = machine._replace(agent=agent._replace(dirty=False, unused=False, spent=False))
            yield "", _signalled(clean, record.epoch, Signal.UD_REMOVE_REG_REMOVE_RUN_OK)
            yield ", fails", _signalled(machine, record.epoch, Signal.UD_REMOVE_REG_REMOVE_RUN_FAILED)
        case _:
            return


def _orders(views: Sequence[_SupplyView], waiting: int) -> list[Orders]:
    """The real decision about the supply, for each machine: what it wants of it now, or after some time."""
    times = [(NOW, LONG_AGO) if view.is_silent else (NOW,) for view in views]
    # The ids decide between machines that are equal otherwise, and either may have the lower one.
    names = permutations(f"{ID}{at}" for at in range(len(views)))
    plans = [_orders_at(views, waiting, *given) for given in product(names, product(*times))]
    # Each order allows a different step, so that the steps of all plans are those of the united orders.
    return [Orders(*map(any, zip(*orders, strict=True))) for orders in zip(*plans, strict=True)]


def _orders_at(
    views: Sequence[_SupplyView], waiting: int, names: Sequence[str], silent_since: Sequence[datetime]
) -> list[Orders]:
    machines = [
        SetMachine(
            instance=replace(view.record, instance_id=names[at]),
            report=_report(view.signal, view.beat),
            silent_since=None if view.beat[1] else silent_since[at],
            spent_since=LONG_AGO,
            surplus_since=LONG_AGO,
        )
        for at, view in enumerate(views)
        if view.record is not None
    ]
    plan = decide_supply(
        SET,
        CapacityWindow(),
        DemandStatistics(assigned=waiting + sum(view.has_job for view in views)),
        machines,
        waiting_jobs=waiting,
        acquiring=sum(view.is_coming for view in views),
        lifetimes=LIFETIMES,
        now=NOW,
    )
    found = []
    for name in names:
        of_machine = partial(_concerns, name)
        found.append(
            Orders(
                bind=of_machine(plan.bind),
                release=of_machine(plan.release),
                end=of_machine(plan.end),
                renew=of_machine(plan.renew),
                withdraw=of_machine(plan.withdraw),
                acquire=plan.deficit > 0,
            )
        )
    return found


def _concerns(instance_id: str, steps: Sequence[MachineStep]) -> bool:
    return any(step.machine.instance.instance_id == instance_id for step in steps)


def _report(signal: tuple[int, Signal | None], beat: tuple[bool, bool, int]) -> Report:
    busy, listening, spent_epoch = beat
    return Report(
        instance_id=ID,
        epoch=signal[0],
        signal=signal[1],
        beat=1,
        beat_at=NOW,
        busy=busy,
        listening=listening,
        spent_epoch=spent_epoch,
    )


def _assignment(epoch: int) -> Assignment:
    return Assignment(url="https://github.com/o/r", runner_name=runner_name(POOL, epoch, ID), labels=("set",))


def _new_record() -> Instance:
    return replace(new_record("own"), holder=HOLDER, assignment=_assignment(1))


def _claim(epoch: int) -> Change:
    message = replace(_new_record(), state=State.IDLE, epoch=epoch).message()
    event = Claim(
        holder=HOLDER,
        claim=f"own/w{epoch + 1}",
        scope="o/r",
        tier=Tier.TRUSTED,
        threshold=DEADLINE,
        assignment=_assignment(epoch + 1),
        margin_s=LIFETIMES.margin_s,
    )
    return advance(presumed_idle(message, now=NOW), event, by=Actor.LISTENER, now=NOW, why="")


def _bind(
    *, runner_name: str = "", run_id: str = "", tier: Tier = Tier.UNTRUSTED, report: Report | None = None
) -> Bind:
    return Bind(
        runner_name=runner_name,
        report=report,
        run_id=run_id,
        tier=tier,
        set_tier=SET.trust,
        max_runtime_s=LIFETIMES.max_runtime_s,
        margin_s=LIFETIMES.margin_s,
    )


def _release_of(record: Instance, *, claim: str | None = None) -> Event:
    if record.state is State.CREATED:
        return End(reason=RetireReason.RELEASED, claim=claim)
    return Release(release_time_s=LIFETIMES.release_time_s, credential=None, deregistered=True, claim=claim)


def _given_back(machine: MachineModel) -> MachineModel:
    """One conditional write gives the machine back. A listening runner leaves only after its registration is gone."""
    record = machine.record
    done = machine._replace(acquisition=Acquisition.NONE)
    held = {State.CREATED, State.CLAIMED}
    if machine.acquisition is Acquisition.WITHDRAWN:
        held = {State.CLAIMED, State.RUNNING}
    if record is None or record.state not in held:
        return done
    event = _release_of(record, claim=record.claim)
    change = advance(record, event, by=Actor.LISTENER, now=NOW, why="")
    return _written(done, write_of(change, "give back", Actor.LISTENER))


def _signalled(machine: MachineModel, epoch: int, signal: Signal) -> MachineModel:
    if machine.report.may_become(epoch, signal):
        return machine._replace(signal=(epoch, signal), agent=machine.agent._replace(memory=(epoch, signal)))
    # The agent learns of the signal that it sent before it was restarted.
    stored_epoch, stored = machine.signal
    memory = (epoch, stored) if stored_epoch == epoch and stored is not None else (epoch, signal)
    return machine._replace(agent=machine.agent._replace(memory=memory))


def _observation(machine: MachineModel, record: Instance) -> Observation:
    agent = machine.agent
    memory = agent.memory
    return Observation(
        record=record,
        runner=RunnerState(
            registered_as=runner_name(POOL, agent.configured, ID) if agent.configured else "",
            listening=agent.listening,
            busy=agent.job,
            exit_code=0 if agent.spent or agent.unused else None,
            had_job=agent.job or agent.spent,
            saw_job=agent.job or agent.spent,
            spent=agent.spent or agent.unused,
            unused=agent.unused,
        ),
        script=ScriptStatus.OK,
        now=NOW,
        margin_s=LIFETIMES.margin_s,
        signalled=memory[1] if memory is not None and memory[0] == record.epoch else None,
    )


def _may_apply(write: PendingWrite, record: Instance | None) -> bool:
    if record is None or write.condition.state is None:
        return record is None and write.condition.state is None
    here = (record.epoch, STATE_ORDER[record.state])
    return (write.condition.epoch, STATE_ORDER[write.condition.state]) >= here


def _normalized(machine: MachineModel) -> MachineModel:
    """The machine without what nothing reads, checked."""
    record, agent = machine.record, machine.agent
    if record is None:
        return machine
    if record.state in ABSORBING:
        if agent.alive and (agent.job or machine.taken):
            # Only its agent, or a sweep, may end it.
            return machine
        # The listener may launch another one in its place.
        return MachineModel()
    if agent.alive and record.state is State.IDLE:
        if agent.listening or agent.configured or agent.dirty or agent.job or machine.taken:
            raise ModelViolation(f"S3: idle with {agent}")
        if machine.unrecorded_job and record.retire_reason is None:
            raise ModelViolation("S11: pooled for trusted jobs after an unknown job")
    if agent.listening and record.state in {State.CREATED, State.CLAIMED}:
        raise ModelViolation(f"S2: it listens while it is {record.state}")
    if record.state is State.IDLE and record.assignment is not None:
        raise ModelViolation("S12: idle with an assignment")
    return _without_unread(machine, record)


def _without_unread(machine: MachineModel, record: Instance) -> MachineModel:
    """The machine without values that nothing reads before they are overwritten."""
    agent, epoch = machine.agent, record.epoch
    is_running = record.state is State.RUNNING
    is_over = record.state in {State.RELEASING, State.IDLE}
    last_holder = None if record.last_holder is None else SERVED
    record = replace(record, last_holder=last_holder, announced_at=None, uses=0, retire_detail="")
    busy, listening, spent_epoch = machine.beat
    if is_over and record.retire_reason is not None:
        # It is never claimed again.
        listening = False
    return machine._replace(
        record=record,
        # Verdicts and agents compare the epoch of a signal; a new one replaces it whatever it was.
        signal=machine.signal if machine.signal[0] == epoch else (0, None),
        agent=agent if agent.memory is None or agent.memory[0] == epoch else agent._replace(memory=None),
        # Only a running machine is asked whether it is spent.
        beat=(busy, listening, spent_epoch if is_running and spent_epoch == epoch else 0),
        # The next claim has its own registration.
        registered=machine.registered if machine.registered in {epoch, agent.configured} else 0,
        # The event is read until the machine is bound or released, for this epoch only.
        has_event=machine.has_event and is_running and machine.served == epoch and not record.is_bound,
        served=machine.served if machine.served in {epoch, agent.configured} else 0,
    )


def _written(machine: MachineModel, write: PendingWrite) -> MachineModel:
    """The machine after a write that its condition admits, checked against the true state."""
    before, agent = machine.record, machine.agent
    after = write.applied_to(before)
    if before is not None:
        for invariant, text in transition_violations(before, after):
            raise ModelViolation(f"{invariant}: {text}")
        has_job = agent.alive and (agent.job or machine.taken)
        if before.state is State.RUNNING and after.state is State.RELEASING and (has_job or machine.online):
            raise ModelViolation(f"D2: {write.text} while it has, or may get, a job")
        if before.state is State.RUNNING and after.state is State.TERMINATING and has_job:
            raise ModelViolation(f"D2: {write.text} while it has a job")
    bound = before is not None and before.holder != after.holder and after.state is State.RUNNING
    if bound and machine.served != after.epoch:
        raise ModelViolation("S2: bound, but no job has started in this epoch")
    if bound and after.run_id != RUN and after.tier is Tier.TRUSTED:
        raise ModelViolation("S11: an unknown job counts as trusted")
    if bound and after.assignment is not None and after.assignment.jit_config:
        raise ModelViolation("S12: bound with its just-in-time configuration")
    return machine._replace(record=after, launched=True, unrecorded_job=machine.unrecorded_job and not bound)
