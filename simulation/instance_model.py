"""Model of one instance as a value, and every step that it can take.

The real transition table, guards, verdicts and decisions of agents and sweeps make each step. Names are relative: a
record belongs to `own`, and any other run is `other`. Times are constants, because what the clock allows at one time it
allows at any time; a threshold that has passed is a flag.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from remuda.agent.decide import MAX_FAILED_REMOVALS, AgentAction, Observation, next_step
from remuda.domain.decide import next_step as decisions
from remuda.domain.errors import IllegalTransition
from remuda.domain.holder import RunHolder
from remuda.domain.instance import (
    ABSORBING,
    ASSIGNED,
    Assignment,
    Credential,
    Instance,
    RetireReason,
    State,
    decide_retirement,
)
from remuda.domain.pool_config import parse_runner_name, runner_name
from remuda.domain.resources import Tier, UsageClass
from remuda.domain.signals import Report, Signal, Verdict, registration_verdict
from remuda.domain.thresholds import Lifetimes
from remuda.domain.transitions import (
    Actor,
    Change,
    Confirm,
    End,
    Event,
    Quarantine,
    Release,
    Renew,
    Retire,
    WriteCondition,
    advance,
    tombstone,
)
from remuda.ports.machine import RunnerState, ScriptStatus
from simulation.invariants import STATE_ORDER, transition_violations

NOW = datetime(2026, 1, 5, 8, 0, tzinfo=UTC)
LATER = NOW + timedelta(days=1)
POOL = "all"
LIFETIMES = Lifetimes()
ID = "i-00000000000000001"
REMOVAL = Credential(token="removal", expires_at=LATER)  # noqa: S106 - not a secret
REGISTRATION = Credential(token="registration", expires_at=LATER)  # noqa: S106
DEADLINE = NOW + timedelta(seconds=LIFETIMES.provision_timeout_s)
QUARANTINED_UNTIL = NOW + timedelta(hours=12)

#: Incidents, each with a budget of one per search.
CRASH, EXPIRY, LOST_ANSWER, OPERATOR = 1, 2, 4, 8
INCIDENTS = {CRASH: "crash", EXPIRY: "expiry", LOST_ANSWER: "lost answer", OPERATOR: "operator"}

OWN, OTHER = "own", "other"

_REMOVAL_SIGNALS = frozenset({Signal.UD_REMOVE_REG_FAILED, Signal.UD_REMOVE_REG_REMOVE_RUN_FAILED})


_SWEEP = (Actor.REFRESH,)
_RELEASE_OR_SWEEP = (Actor.REFRESH, Actor.RELEASE)
_OPERATOR = (Actor.OPERATOR,)
#: Text, actors (the table must allow the event to each of them), event, time and cost.
_PossibleEvent = tuple[str, tuple[Actor, ...], Event, datetime, int]


_UNTIL = {
    State.RELEASING: NOW + timedelta(seconds=LIFETIMES.release_time_s),
    State.IDLE: NOW + timedelta(seconds=LIFETIMES.idle_time_s),
}


class ModelViolation(Exception):
    """A step violates an invariant."""


class PendingAction(NamedTuple):
    """A step that an agent has decided to take."""

    action: AgentAction
    #: Epoch of the record, and epoch in the runner name that is registered.
    epoch: int
    runner_epoch: int
    signal: Signal | None


_NOTHING = PendingAction(action=AgentAction.WAIT, epoch=0, runner_epoch=0, signal=None)


class AgentModel(NamedTuple):
    """State of a machine and of its agent."""

    #: Epoch that it is registered for, or 0.
    configured: int = 0
    listening: bool = False
    #: Whether the listener exited with a terminal exit code.
    ended: bool = False
    job: bool = False
    dirty: bool = False
    #: Epoch and signal that this agent process has sent last.
    memory: tuple[int, Signal] | None = None
    #: Decided by a record that has changed since.
    pending_action: PendingAction | None = None
    alive: bool = True


DEAD = AgentModel(alive=False)


class PendingWrite(NamedTuple):
    """A write that a process has decided on, with its evidence. Equal if the effect is the same."""

    text: str
    by: Actor
    condition: WriteCondition
    sets: tuple[tuple[str, Any], ...]
    last_signal: tuple[int, Signal | None]
    cost: int = 0

    @property
    def moves_time_only(self) -> bool:
        """Whether it changes the threshold alone. A delayed one leads to no new state."""
        return all(name == "threshold" for name, _ in self.sets)

    def applied_to(self, record: Instance | None) -> Instance:
        sets = dict(self.sets)
        return Instance(**sets) if record is None else replace(record, **sets)


class InstanceState(NamedTuple):
    record: Instance | None = None
    #: Whether the machine was launched.
    launched: bool = False
    last_signal: tuple[int, Signal | None] = (0, None)
    agent: AgentModel = AgentModel()
    #: Whether the threshold has passed by every clock.
    expired: bool = False
    #: Decided by a state that has changed since.
    pending: PendingWrite | None = None

    @property
    def state(self) -> State | None:
        return self.record.state if self.record is not None else None

    @property
    def report(self) -> Report:
        epoch, signal = self.last_signal
        return Report(
            instance_id=ID, epoch=epoch, signal=signal, beat=1, beat_at=NOW, busy=self.agent.job, listening=False
        )


ABSENT = InstanceState()


class ModelStep(NamedTuple):
    """One step of an instance. `violation` is empty if it violates nothing."""

    text: str
    after: InstanceState
    cost: int = 0
    violation: str = ""


def assignment(epoch: int) -> Assignment:
    return Assignment(
        url="https://github.com/o/r",
        runner_name=runner_name(POOL, epoch, ID),
        labels=("large",),
        credential=REGISTRATION,
    )


def holder_of(who: str) -> RunHolder:
    return RunHolder(run_id=who, attempt=1, provision_id=who)


def new_record(who: str) -> Instance:
    return Instance(
        instance_id=ID,
        state=State.CREATED,
        epoch=1,
        threshold=DEADLINE,
        resource_class="large",
        instance_type="c6i.large",
        usage_class=UsageClass.ON_DEMAND,
        cpu=2,
        memory_mib=4_096,
        created_at=NOW,
        holder=holder_of(who),
        claim=f"{who}/w1",
        scope="o/r",
        tier=Tier.TRUSTED,
        assignment=assignment(1),
    )


def buried(record: Instance) -> Instance:
    """The tombstone of a machine that was launched for this record."""
    return replace(
        record, state=State.TERMINATING, threshold=NOW, holder=None, last_holder=record.holder, assignment=None
    )


def owned_by(record: Instance, who: str) -> Instance:
    """The same record with another holder, now or last."""
    _, _, worker = record.claim.partition("/")
    held, last = (holder_of(who), None) if record.holder is not None else (None, holder_of(who))
    return replace(record, claim=f"{who}/{worker}", holder=held, last_holder=last)


def write_of(
    change: Change, text: str, by: Actor, last_signal: tuple[int, Signal | None] = (0, None), cost: int = 0
) -> PendingWrite:
    return PendingWrite(
        text=text,
        by=by,
        condition=change.condition,
        sets=tuple(change.sets.items()),
        last_signal=last_signal,
        cost=cost,
    )


class InstanceModel:
    """The steps of an instance by the real code, with cached answers."""

    def __init__(self, *, stale: bool = True) -> None:
        self._stale = stale
        self._writes: dict[tuple[InstanceState, bool], list[PendingWrite]] = {}
        self._decisions: dict[InstanceState, PendingAction] = {}
        self._checked: set[InstanceState] = set()
        self._futures: dict[Instance, tuple[Instance, ...]] = {}
        self._applicable: dict[tuple[WriteCondition, Instance], bool] = {}

    def steps(self, state: InstanceState, *, released: bool) -> list[ModelStep]:
        """All steps except those of runs. `released` says whether its run was released."""
        try:
            self._decision(state)
            self._decided_writes(state, released=released)
        except ModelViolation as violation:
            return [ModelStep("continues", state, 0, str(violation))]
        found: list[ModelStep] = []
        makers = (self._by_control_plane(state, released=released), self._by_agent(state), self._by_world(state))
        for maker in makers:
            for step in _catching(maker):
                if step.violation:
                    found.append(step)
                else:
                    found += self.with_pending(state, step, was_released=released, is_released=released)
        return [step for step in found if step.violation or step.after != state]

    def with_pending(
        self, state: InstanceState, step: ModelStep, *, was_released: bool, is_released: bool
    ) -> list[ModelStep]:
        """A step, alone and combined with the writes and actions that were decided just before it."""
        text, raw, cost, _ = step
        try:
            pending = raw.pending if raw.pending and self._may_apply(raw.pending, raw.record) else None
            after = self.normalized(raw._replace(pending=pending))
            fresh = self._decided_writes(after, released=is_released)
            if pending in fresh:
                after = after._replace(pending=None)
            found = [ModelStep(text, after, cost)]
            if not self._stale or after.record is None:
                return found
            for write in self._decided_writes(state, released=was_released):
                if write.cost & cost or write in fresh or write == pending or write.moves_time_only:
                    continue
                if self._may_apply(write, raw.record):
                    late = f"{text}; {write.text} is pending"
                    found.append(ModelStep(late, after._replace(pending=write), cost | write.cost))
            found += [
                ModelStep(f"{step.text}; the agent is about to {pending_action.action.value}", left, step.cost)
                for step in found
                if (pending_action := self._outdated_action(state, step.after)) is not None
                for left in [step.after._replace(agent=step.after.agent._replace(pending_action=pending_action))]
            ]
        except ModelViolation as violation:
            return [ModelStep(text, state, cost, str(violation))]
        return found

    # Writes of the control plane and of operators

    def _by_control_plane(self, state: InstanceState, *, released: bool) -> Iterator[ModelStep]:
        writes = self._decided_writes(state, released=released)
        pending = [state.pending._replace(cost=0)] if state.pending else []
        for write in writes + pending:
            if not write.condition.is_met_by(state.record):
                continue
            try:
                after = self.written(state, write, released=released)
            except ModelViolation as violation:
                yield ModelStep(write.text, state, write.cost, str(violation))
                continue
            if write in pending:
                yield ModelStep(f"{write.text}, late", after._replace(pending=None))
            else:
                yield ModelStep(write.text, after, write.cost)

    def _decided_writes(self, state: InstanceState, *, released: bool) -> list[PendingWrite]:
        """Writes that a sweep, a release or an operator decides on by this state."""
        key = (state._replace(pending=None), released)
        known = self._writes.get(key)
        if known is None:
            known = self._writes[key] = list(self._decide(state, released=released))
        return known

    def _decide(self, state: InstanceState, *, released: bool) -> Iterator[PendingWrite]:
        record = state.record
        if record is None:
            if state.launched:
                change = tombstone(buried(new_record(OWN)), by=Actor.REFRESH, now=NOW, why="")
                yield write_of(change, "a sweep writes a tombstone", Actor.REFRESH)
            return
        for text, actors, event, now, cost in self._events(state, record, released=released):
            try:
                changes = [advance(record, event, by=by, now=now, why="") for by in actors]
            except IllegalTransition as illegal:
                raise ModelViolation(f"S10: {illegal}") from illegal
            # Only ends depend on the report; the other writes are the same for every report.
            last_signal = state.last_signal if isinstance(event, End) and event.report is not None else (0, None)
            yield write_of(changes[0], text, actors[0], last_signal, cost)

    def _events(self, state: InstanceState, record: Instance, *, released: bool) -> Iterator[_PossibleEvent]:
        if record.state is State.TERMINATING:
            yield "a sweep confirms its end", _SWEEP, Confirm(keep_records_s=1.0), NOW, 0
        if record.state in ABSORBING:
            return
        if released and record.state in ASSIGNED:
            event: Event = Release(release_time_s=LIFETIMES.release_time_s, credential=REMOVAL)
            if record.state is State.CREATED:
                event = End(reason=RetireReason.RELEASED)
            yield "a release or a sweep releases it", _RELEASE_OR_SWEEP, event, NOW, 0
        if record.state is State.RELEASING:
            upcoming = decisions.next_step(record, state.report, decisions.PoolPolicy(lifetimes=LIFETIMES), now=NOW)
            if isinstance(upcoming, decisions.Write):
                name = type(upcoming.event).__name__.lower()
                yield f"a release or a sweep advances it ({name})", _RELEASE_OR_SWEEP, upcoming.event, NOW, 0
        if record.state is State.RUNNING and registration_verdict(state.report, record.epoch) is Verdict.FAILED:
            yield (
                "a sweep ends it: its runner failed",
                _SWEEP,
                End(reason=RetireReason.FAILED, report=state.report),
                NOW,
                0,
            )
        if record.state is State.IDLE:
            yield from self._events_of_idle(record)
        if state.expired:
            end = End(reason=RetireReason.EXPIRED, margin_s=LIFETIMES.margin_s)
            yield "a sweep ends it: expired", _SWEEP, end, _after_threshold(record), 0
        if not state.agent.alive:
            yield "a sweep ends it: gone", _SWEEP, End(reason=RetireReason.GONE), NOW, 0
        if record.retire_reason is None:
            drain = Retire(reason=RetireReason.DRAINED)
            yield "an operator drains it", (Actor.OPERATOR, Actor.REFRESH), drain, NOW, OPERATOR
        quarantine = Quarantine(until=QUARANTINED_UNTIL)
        yield "an operator puts it into quarantine", _OPERATOR, quarantine, NOW, OPERATOR
        termination = End(reason=RetireReason.TERMINATED_BY_OPERATOR)
        yield "an operator ends it", _OPERATOR, termination, NOW, OPERATOR

    @staticmethod
    def _events_of_idle(record: Instance) -> Iterator[_PossibleEvent]:
        due = decide_retirement(record, now=NOW, max_age_s=LIFETIMES.max_age_s, max_uses=LIFETIMES.max_uses)
        if due is not None:
            yield "a sweep ends it: retired", _SWEEP, End(reason=due.reason, detail=due.detail), NOW, 0
        # After its threshold, by a slow clock.
        at = record.threshold - timedelta(seconds=1)
        renewal = Renew(until=at + timedelta(seconds=LIFETIMES.idle_time_s))
        yield "scale-down renews it", (Actor.SCALE_DOWN,), renewal, at, 0

    def written(
        self, state: InstanceState, write: PendingWrite, *, released: bool, by_owner: bool = False
    ) -> InstanceState:
        """The state after a write that its guard admits, checked."""
        after = write.applied_to(state.record)
        _check_write(state, write, after, released=released, by_owner=by_owner)
        before = state.record
        kept = before is not None and after.state is before.state and after.threshold <= before.threshold
        return state._replace(record=after, launched=True, expired=state.expired and kept)

    def _may_apply(self, write: PendingWrite, record: Instance | None) -> bool:
        """Whether the guard may admit the write now or for any later version of the record."""
        if record is None:
            return write.condition.is_met_by(None)
        if write.condition.threshold_at_or_before is not None and not write.condition.is_met_by(record):
            # The threshold was moved and never moves back.
            return False
        key = (write.condition, record)
        known = self._applicable.get(key)
        if known is None:
            futures = self._futures.get(record)
            if futures is None:
                futures = self._futures[record] = tuple(_futures(record))
            known = self._applicable[key] = any(map(write.condition.is_met_by, futures))
        return known

    # Machines

    def _by_agent(self, state: InstanceState) -> Iterator[ModelStep]:
        agent, record = state.agent, state.record
        if not agent.alive or record is None or record.state in ABSORBING:
            return
        if agent.pending_action is not None:
            yield from _performed(state._replace(agent=agent._replace(pending_action=None)), agent.pending_action)
            return
        yield from _performed(state, self._decision(state))
        if state.expired:
            step = next_step(_observation(state, now=_after_threshold(record)))
            if step.action is AgentAction.END:
                yield ModelStep("its agent ends it: expired", state._replace(agent=DEAD))
        if self._decision(state).action is AgentAction.REMOVE:
            given_up = next_step(_observation(state, failed_removals=MAX_FAILED_REMOVALS))
            if given_up.action is AgentAction.SIGNAL and given_up.signal is not None:
                text = f"its agent cannot deregister: {given_up.signal}"
                yield ModelStep(text, _signalled(state, record.epoch, given_up.signal))

    def _decision(self, state: InstanceState) -> PendingAction:
        if (
            state.record is None
            or state.state in ABSORBING
            or not state.agent.alive
            or state.agent.pending_action is not None
        ):
            return _NOTHING
        key = state._replace(pending=None)
        known = self._decisions.get(key)
        if known is None:
            known = self._decisions[key] = _decided(state)
        return known

    def _outdated_action(self, before: InstanceState, after: InstanceState) -> PendingAction | None:
        """The action that its agent decided on before the record changed, if it would decide otherwise now."""
        agent = before.agent
        if before.record is None or agent.pending_action is not None or agent != after.agent or not agent.alive:
            return None
        if before.record == after.record or before.state in ABSORBING:
            return None
        pending_action = self._decision(before)
        if pending_action.action in {AgentAction.WAIT, AgentAction.END} or self._decision(after) == pending_action:
            return None
        return pending_action

    @staticmethod
    def _by_world(state: InstanceState) -> Iterator[ModelStep]:
        agent, record = state.agent, state.record
        if record is None or record.state in ABSORBING:
            return
        if not state.expired:
            yield ModelStep("its threshold passes", state._replace(expired=True), EXPIRY)
        if not agent.alive:
            return
        yield ModelStep("its machine disappears", state._replace(agent=DEAD), CRASH)
        yield ModelStep(
            "its agent restarts", state._replace(agent=agent._replace(memory=None, pending_action=None)), CRASH
        )
        if agent.listening:
            gone = agent._replace(listening=False, job=False, ended=True)
            yield ModelStep("its runner exits", state._replace(agent=gone), CRASH)
        if agent.job:
            yield ModelStep("its job ends", state._replace(agent=agent._replace(job=False)))
        elif agent.listening and agent.configured:
            if record.epoch != agent.configured or record.state not in {State.RUNNING, State.RELEASING}:
                raise ModelViolation(f"S2: a job may start while it is {record.state} at epoch {record.epoch}, {agent}")
            yield ModelStep("a job starts on it", state._replace(agent=agent._replace(job=True, dirty=True)))

    # Normalization

    def normalized(self, state: InstanceState) -> InstanceState:
        """The state without fields that nothing reads, checked."""
        record = state.record
        if record is None:
            return state
        if record.state in ABSORBING:
            return self._ended(state, record)
        record = replace(record, announced_at=None, uses=0)
        if record.state in _UNTIL and record.quarantined_until is None:
            # Renewals and extensions move it, but it may pass at any time anyway.
            record = replace(record, threshold=_UNTIL[record.state])
        state = state._replace(record=record)
        if state not in self._checked:
            _check_state(state, record)
            self._checked.add(state)
        return state

    @staticmethod
    def _ended(state: InstanceState, record: Instance) -> InstanceState:
        """A terminating instance: nothing reads its report, and its agent must end it."""
        agent = state.agent._replace(pending_action=None)
        if agent.alive and next_step(_observation(state._replace(agent=agent))).action is not AgentAction.END:
            raise ModelViolation(f"L1: its agent continues while it is {record.state}")
        if record.assignment is not None:
            raise ModelViolation(f"S12: {record.state} with a credential")
        if record.state is State.TERMINATING:
            change = advance(record, Confirm(keep_records_s=1.0), by=Actor.REFRESH, now=NOW, why="")
            if not change.condition.is_met_by(record):
                raise ModelViolation("L1: no sweep can confirm its end")
        plain = replace(
            record,
            threshold=NOW,
            retire_reason=RetireReason.EXPIRED,
            quarantined_until=None,
            run_deadline=None,
            announced_at=None,
            forget_at=None,
            uses=0,
        )
        return InstanceState(record=plain, launched=True, agent=DEAD, pending=state.pending)


def _catching(steps: Iterator[ModelStep]) -> Iterator[ModelStep]:
    try:
        yield from steps
    except ModelViolation as violation:
        yield ModelStep("continues", ABSENT, 0, str(violation))


def _after_threshold(record: Instance) -> datetime:
    return record.threshold + timedelta(seconds=LIFETIMES.margin_s + 1)


def _futures(record: Instance) -> Iterator[Instance]:
    """Every later version of a record, as far as guards distinguish them."""
    here = STATE_ORDER[record.state]
    for epoch in range(record.epoch, record.epoch + 3):
        for state, order in STATE_ORDER.items():
            if epoch == record.epoch and order < here:
                continue
            later = replace(record, state=state, epoch=epoch)
            yield later
            if (state, epoch) != (record.state, record.epoch):
                yield replace(later, threshold=NOW)
                yield replace(later, threshold=LATER)
                yield replace(owned_by(later, OTHER), claim=f"{OTHER}/w{epoch}", threshold=LATER)


def _observation(state: InstanceState, *, now: datetime = NOW, failed_removals: int = 0) -> Observation:
    agent, record = state.agent, state.record
    memory = agent.memory
    return Observation(
        record=record,
        runner=RunnerState(
            registered_as=runner_name(POOL, agent.configured, ID) if agent.configured else "",
            listening=agent.listening,
            busy=agent.job,
            exit_code=1 if agent.ended else None,
        ),
        script=ScriptStatus.OK,
        now=now,
        margin_s=LIFETIMES.margin_s,
        signalled=memory[1] if memory is not None and record is not None and memory[0] == record.epoch else None,
        failed_removals=failed_removals,
    )


def _decided(state: InstanceState) -> PendingAction:
    record, agent = state.record, state.agent
    step = next_step(_observation(state))
    if record is None:
        return _NOTHING
    if step.action is AgentAction.START and (record.state is not State.RUNNING or agent.configured != record.epoch):
        raise ModelViolation(
            f"S2: its runner starts at epoch {agent.configured} while it is {record.state} at {record.epoch}"
        )
    if step.action is AgentAction.END:
        raise ModelViolation(f"S6: its agent ends it while it is {record.state}, before its time")
    parsed = parse_runner_name(POOL, record.assignment.runner_name) if record.assignment else None
    return PendingAction(
        action=step.action, epoch=record.epoch, runner_epoch=parsed[0] if parsed else 0, signal=step.signal
    )


def _performed(state: InstanceState, pending_action: PendingAction) -> Iterator[ModelStep]:
    """The results of an action that the agent has decided on."""
    agent = state.agent
    text = f"its agent: {pending_action.action.value}"
    match pending_action.action:
        case AgentAction.REGISTER:
            made = state._replace(agent=agent._replace(configured=pending_action.runner_epoch))
            yield ModelStep(text, _signalled(made, pending_action.epoch, Signal.UD_REG_OK))
            yield ModelStep(f"{text}, fails", _signalled(state, pending_action.epoch, Signal.UD_REG_FAILED))
            yield ModelStep(f"{text}, then crashes", _without_memory(made), CRASH)
        case AgentAction.START:
            yield ModelStep(text, state._replace(agent=agent._replace(listening=True, ended=False)))
        case AgentAction.REMOVE:
            yield ModelStep(text, state if agent.job else state._replace(agent=agent._replace(configured=0)))
        case AgentAction.STOP:
            if agent.job:
                raise ModelViolation("S6: its runner is stopped while a job runs")
            yield ModelStep(text, state._replace(agent=agent._replace(listening=False)))
        case AgentAction.RESET:
            if agent.job:
                raise ModelViolation("S6: it is reset while a job runs")
            clean = state._replace(agent=agent._replace(dirty=False, ended=False))
            yield ModelStep(text, _signalled(clean, pending_action.epoch, Signal.UD_REMOVE_REG_REMOVE_RUN_OK))
            failed = _signalled(state, pending_action.epoch, Signal.UD_REMOVE_REG_REMOVE_RUN_FAILED)
            yield ModelStep(f"{text}, fails", failed)
            yield ModelStep(f"{text}, then crashes", _without_memory(clean), CRASH)
        case AgentAction.SIGNAL if pending_action.signal is not None:
            yield ModelStep(
                f"{text} {pending_action.signal}", _signalled(state, pending_action.epoch, pending_action.signal)
            )
        case _:
            return


def _signalled(state: InstanceState, epoch: int, signal: Signal) -> InstanceState:
    last_signal = (epoch, signal) if state.report.may_become(epoch, signal) else state.last_signal
    return state._replace(last_signal=last_signal, agent=state.agent._replace(memory=(epoch, signal)))


def _without_memory(state: InstanceState) -> InstanceState:
    return state._replace(agent=state.agent._replace(memory=None))


# Invariants


def _check_state(state: InstanceState, record: Instance) -> None:
    """Check a state."""
    agent, held = state.agent, record.assignment
    if agent.alive and record.state is State.IDLE:
        if agent.listening or agent.configured or agent.dirty or agent.job:
            raise ModelViolation(f"S3: idle with {agent}")
        if agent.pending_action is not None and agent.pending_action.action in {
            AgentAction.REGISTER,
            AgentAction.START,
        }:
            raise ModelViolation(f"S3: idle while its agent is about to {agent.pending_action.action.value}")
    if agent.listening and record.state in {State.CREATED, State.CLAIMED}:
        raise ModelViolation(f"S2: it listens while it is {record.state}")
    if record.state is State.RUNNING and held is not None and held.credential is not None:
        raise ModelViolation("S12: running with a credential")
    if record.state is State.IDLE and held is not None:
        raise ModelViolation("S12: idle with an assignment")
    end = End(reason=RetireReason.EXPIRED, margin_s=LIFETIMES.margin_s)
    try:
        change = advance(record, end, by=Actor.REFRESH, now=_after_threshold(record), why="")
    except IllegalTransition as illegal:
        raise ModelViolation(f"L1: no sweep can end it by its threshold: {illegal}") from illegal
    if not change.condition.is_met_by(record):
        raise ModelViolation(f"L1: no sweep can end it by its threshold: {record.state}")


def _check_write(state: InstanceState, write: PendingWrite, after: Instance, *, released: bool, by_owner: bool) -> None:
    """Check a write against the true state, not against what its writer knew."""
    before = state.record
    if before is None:
        return
    for invariant, text in transition_violations(before, after):
        raise ModelViolation(f"{invariant}: {text}")
    claimed = after.state is State.CLAIMED and before.state is not State.CLAIMED
    if claimed and before.retire_reason:
        raise ModelViolation(f"S2: it was claimed although it is {before.retire_text}")
    if after.tier is not before.tier:
        raise ModelViolation(f"S11: its tier was {before.tier} and became {after.tier}")
    if after.state is State.RUNNING and before.state is not State.RUNNING:
        _check_commit(state, after, by_owner=by_owner)
    if after.state is State.RELEASING and before.state in ASSIGNED and not (released or by_owner):
        raise ModelViolation("S6: released although its run was not")
    if after.state is State.TERMINATING and before.state is not State.TERMINATING:
        _check_end(state, write, before, released=released, by_owner=by_owner)


def _check_commit(state: InstanceState, after: Instance, *, by_owner: bool) -> None:
    if not by_owner:
        raise ModelViolation("S1: it was committed by a run that does not own it")
    if state.last_signal != (after.epoch, Signal.UD_REG_OK):
        raise ModelViolation(f"S4: running on {state.last_signal}")
    if state.agent.alive and state.agent.configured != after.epoch:
        raise ModelViolation(f"S4: it runs at epoch {after.epoch} and is registered for {state.agent.configured}")


def _check_end(state: InstanceState, write: PendingWrite, before: Instance, *, released: bool, by_owner: bool) -> None:
    epoch, signal = write.last_signal
    last_signal = signal if epoch == before.epoch else None
    allowed = state.expired or not state.agent.alive or write.by is Actor.OPERATOR
    if before.state in {State.CREATED, State.CLAIMED}:
        allowed = allowed or by_owner or (released and before.state is State.CREATED)
    elif before.state is State.RUNNING:
        allowed = allowed or last_signal is Signal.UD_REG_FAILED
    elif before.state is State.RELEASING:
        clean = last_signal is Signal.UD_REMOVE_REG_REMOVE_RUN_OK
        allowed = allowed or last_signal in _REMOVAL_SIGNALS or (clean and bool(before.retire_reason))
    else:
        allowed = allowed or bool(before.retire_reason)
    if not allowed:
        raise ModelViolation(f"S6: it was ended while {before.state}, by {write.text} and {write.last_signal}")
