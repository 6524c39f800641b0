"""The life of one instance as a value, and every step that it can take.

The real transition table, guards, verdicts and decisions of agents and sweeps make each step; this module only asks
them, once for each question. Names are relative: a record belongs to `own`, whichever run that is, and any other run is
`other`. Times are constants: what time allows at some time is allowed at any time, and a threshold that has passed is
a flag.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from remuda.agent.decide import MAX_REMOVALS, AgentAction, Observation, next_step
from remuda.domain.errors import IllegalTransition
from remuda.domain.instance import ABSORBING, ASSIGNED, Assignment, Credential, Instance, State, retirement
from remuda.domain.pool_config import parse_runner_name, runner_name
from remuda.domain.release_policy import next_for_releasing
from remuda.domain.resources import Tier, UsageClass
from remuda.domain.signals import Report, Signal, Verdict, registration_verdict
from remuda.domain.thresholds import Lifetimes
from remuda.domain.transitions import (
    Actor,
    Cause,
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
from remuda.ports.machine import ScriptStatus
from remuda.ports.runner import RunnerState

NOW = datetime(2026, 1, 5, 8, 0, tzinfo=UTC)
LATER = NOW + timedelta(days=1)
POOL = "all"
LIFETIMES = Lifetimes()
ID = "i-00000000000000001"
REMOVAL = Credential(token="removal", expires_at=LATER)  # noqa: S106 - of no world
REGISTRATION = Credential(token="registration", expires_at=LATER)  # noqa: S106
DEADLINE = NOW + timedelta(seconds=LIFETIMES.provision_timeout_s)
HELD_UNTIL = NOW + timedelta(hours=12)

#: What happens seldom, each by its own budget.
CRASH, EXPIRY, LOST, OPERATOR = 1, 2, 4, 8
MISHAPS = {CRASH: "crash", EXPIRY: "expiry", LOST: "lost answer", OPERATOR: "operator"}

OWN, OTHER = "own", "other"

#: Within an epoch, states come in this order only.
_ORDER = {
    State.CREATED: 0,
    State.CLAIMED: 0,
    State.RUNNING: 1,
    State.RELEASING: 2,
    State.IDLE: 3,
    State.TERMINATING: 4,
    State.TERMINATED: 5,
}
_REMOVAL_SIGNALS = frozenset({Signal.UD_REMOVE_REG_FAILED, Signal.UD_REMOVE_REG_REMOVE_RUN_FAILED})


_SWEEP = (Actor.REFRESH,)
_RELEASE_OR_SWEEP = (Actor.REFRESH, Actor.RELEASE)
_OPERATOR = (Actor.OPERATOR,)
#: What, by whom (the table must allow it to each of them), the event, when, and its cost.
_Due = tuple[str, tuple[Actor, ...], Event, datetime, int]


_UNTIL = {
    State.RELEASING: NOW + timedelta(seconds=LIFETIMES.release_time_s),
    State.IDLE: NOW + timedelta(seconds=LIFETIMES.idle_time_s),
}


class Broken(Exception):
    """A step led to what must not be."""


class Doing(NamedTuple):
    """A step that an agent has decided on."""

    do: AgentAction
    #: The assignment that it is for, and that of the name it registers.
    epoch: int
    named: int
    signal: Signal | None


_NOTHING = Doing(do=AgentAction.WAIT, epoch=0, named=0, signal=None)


class Agent(NamedTuple):
    """What is on a machine, and what its agent is about."""

    #: The epoch that it is registered for, or 0.
    configured: int = 0
    listening: bool = False
    #: The listener ended for good.
    ended: bool = False
    job: bool = False
    dirty: bool = False
    #: What this process knows to have signalled: epoch and signal.
    memory: tuple[int, Signal] | None = None
    #: Decided upon by a record that has changed since.
    doing: Doing | None = None
    alive: bool = True


DEAD = Agent(alive=False)


class Write(NamedTuple):
    """A write that somebody has decided on, with the evidence of that time. Equal where it would do the same."""

    text: str
    by: Actor
    guard: WriteCondition
    sets: tuple[tuple[str, Any], ...]
    told: tuple[int, Signal | None]
    cost: int = 0

    @property
    def moves_time_only(self) -> bool:
        """Late, it leads to nothing new: to what was before time ran out."""
        return all(name == "threshold" for name, _ in self.sets)

    def applied_to(self, record: Instance | None) -> Instance:
        sets = dict(self.sets)
        return Instance(**sets) if record is None else replace(record, **sets)


class Life(NamedTuple):
    record: Instance | None = None
    #: EC2 has it.
    launched: bool = False
    told: tuple[int, Signal | None] = (0, None)
    agent: Agent = Agent()
    #: The threshold has passed for everybody.
    late: bool = False
    #: Decided upon by what has changed since.
    pending: Write | None = None

    @property
    def state(self) -> State | None:
        return self.record.state if self.record is not None else None

    @property
    def report(self) -> Report:
        epoch, signal = self.told
        return Report(
            instance_id=ID, epoch=epoch, signal=signal, beat=1, beat_at=NOW, busy=self.agent.job, listening=False
        )


UNBORN = Life()


class Step(NamedTuple):
    """One step of a life. `broken` says what must not be, where it is that."""

    text: str
    after: Life
    cost: int = 0
    broken: str = ""


def assignment(epoch: int) -> Assignment:
    return Assignment(
        url="https://github.com/o/r",
        runner_name=runner_name(POOL, epoch, ID),
        labels=("large",),
        credential=REGISTRATION,
    )


def born(who: str) -> Instance:
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
        run_id=who,
        owner=f"{who}/w1",
        provision_id=who,
        scope="o/r",
        tier=Tier.TRUSTED,
        assignment=assignment(1),
    )


def named(record: Instance, who: str) -> Instance:
    """The same record as one of `who`."""
    _, _, worker = record.owner.partition("/")
    return replace(
        record, owner=f"{who}/{worker}", provision_id=who, run_id=who if record.run_id else "", last_run_id=""
    )


def write_of(change: Change, text: str, by: Actor, told: tuple[int, Signal | None] = (0, None), cost: int = 0) -> Write:
    return Write(text=text, by=by, guard=change.guard, sets=tuple(change.sets.items()), told=told, cost=cost)


class Lives:
    """Asks the real code, and remembers its answers. One for each search: the code may have been patched meanwhile."""

    def __init__(self, *, stale: bool = True) -> None:
        self._stale = stale
        self._writes: dict[tuple[Life, bool], list[Write]] = {}
        self._decisions: dict[Life, Doing] = {}
        self._judged: set[Life] = set()
        self._futures: dict[Instance, tuple[Instance, ...]] = {}
        self._hopes: dict[tuple[WriteCondition, Instance], bool] = {}

    def steps(self, life: Life, *, released: bool) -> list[Step]:
        """All but those of runs. `released`: the run that it belongs to was."""
        try:
            self._decision(life)
            self._fresh(life, released=released)
        except Broken as broken:
            return [Step("goes on", life, 0, str(broken))]
        found: list[Step] = []
        makers = (self._by_control_plane(life, released=released), self._by_agent(life), self._by_world(life))
        for maker in makers:
            for step in _caught(maker):
                if step.broken:
                    found.append(step)
                else:
                    found += self.following(life, step, was_released=released, is_released=released)
        return [step for step in found if step.broken or step.after != life]

    def following(self, life: Life, step: Step, *, was_released: bool, is_released: bool) -> list[Step]:
        """A step as it is, and with what others had decided on just before it and will do all the same."""
        text, raw, cost, _ = step
        try:
            pending = raw.pending if raw.pending and self._hopeful(raw.pending, raw.record) else None
            after = self.settled(raw._replace(pending=pending))
            fresh = self._fresh(after, released=is_released)
            if pending in fresh:
                after = after._replace(pending=None)
            found = [Step(text, after, cost)]
            if not self._stale or after.record is None:
                return found
            for write in self._fresh(life, released=was_released):
                if write.cost & cost or write in fresh or write == pending or write.moves_time_only:
                    continue
                if self._hopeful(write, raw.record):
                    late = f"{text}; {write.text} is under way"
                    found.append(Step(late, after._replace(pending=write), cost | write.cost))
            found += [
                Step(f"{step.text}; the agent is about to {doing.do.value}", left, step.cost)
                for step in found
                if (doing := self._left_behind(life, step.after)) is not None
                for left in [step.after._replace(agent=step.after.agent._replace(doing=doing))]
            ]
        except Broken as broken:
            return [Step(text, life, cost, str(broken))]
        return found

    # Writes of the control plane and of operators

    def _by_control_plane(self, life: Life, *, released: bool) -> Iterator[Step]:
        writes = self._fresh(life, released=released)
        pending = [life.pending._replace(cost=0)] if life.pending else []
        for write in writes + pending:
            if not write.guard.admits(life.record):
                continue
            try:
                after = self.written(life, write, released=released)
            except Broken as broken:
                yield Step(write.text, life, write.cost, str(broken))
                continue
            if write in pending:
                yield Step(f"{write.text}, late", after._replace(pending=None))
            else:
                yield Step(write.text, after, write.cost)

    def _fresh(self, life: Life, *, released: bool) -> list[Write]:
        """What a sweep, a release or an operator who reads it now would write."""
        key = (life._replace(pending=None), released)
        known = self._writes.get(key)
        if known is None:
            known = self._writes[key] = list(self._decide(life, released=released))
        return known

    def _decide(self, life: Life, *, released: bool) -> Iterator[Write]:
        record = life.record
        if record is None:
            if life.launched:
                stone = replace(born(OWN), state=State.TERMINATING, threshold=NOW, run_id="", assignment=None)
                change = tombstone(stone, by=Actor.REFRESH, now=NOW, why="")
                yield write_of(change, "a sweep buries it", Actor.REFRESH)
            return
        for text, actors, event, now, cost in self._events(life, record, released=released):
            try:
                changes = [advance(record, event, by=by, now=now, why="") for by in actors]
            except IllegalTransition as illegal:
                raise Broken(f"S10: {illegal}") from illegal
            # Evidence is what tells one end from another; the other writes are the same whatever was reported.
            told = life.told if isinstance(event, End) and event.report is not None else (0, None)
            yield write_of(changes[0], text, actors[0], told, cost)

    def _events(self, life: Life, record: Instance, *, released: bool) -> Iterator[_Due]:
        if record.state is State.TERMINATING:
            yield "a sweep confirms its end", _SWEEP, Confirm(keep_records_s=1.0), NOW, 0
        if record.state in ABSORBING:
            return
        if released and record.state in ASSIGNED:
            event: Event = Release(release_time_s=LIFETIMES.release_time_s, credential=REMOVAL)
            if record.state is State.CREATED:
                event = End(cause=Cause.RELEASED)
            yield "a release or a sweep takes it back", _RELEASE_OR_SWEEP, event, NOW, 0
        if record.state is State.RELEASING:
            upcoming = next_for_releasing(record, life.report, now=NOW, lifetimes=LIFETIMES)
            if upcoming is not None:
                name = type(upcoming.event).__name__.lower()
                yield f"a release or a sweep settles it ({name})", _RELEASE_OR_SWEEP, upcoming.event, NOW, 0
        if record.state is State.RUNNING and registration_verdict(life.report, record.epoch) is Verdict.FAILED:
            yield "a sweep ends it: its runner failed", _SWEEP, End(cause=Cause.FAILED, report=life.report), NOW, 0
        if record.state is State.IDLE:
            yield from self._events_of_idle(record)
        if life.late:
            end = End(cause=Cause.EXPIRED, margin_s=LIFETIMES.margin_s)
            yield "a sweep ends it: expired", _SWEEP, end, _late(record), 0
        if not life.agent.alive:
            yield "a sweep ends it: gone", _SWEEP, End(cause=Cause.GONE), NOW, 0
        if not record.retire:
            yield "an operator drains it", (Actor.OPERATOR, Actor.REFRESH), Retire(reason="drained"), NOW, OPERATOR
        quarantine = Quarantine(reason="quarantined", until=HELD_UNTIL)
        yield "an operator puts it into quarantine", _OPERATOR, quarantine, NOW, OPERATOR
        yield "an operator ends it", _OPERATOR, End(cause=Cause.ORDERED, reason="ordered"), NOW, OPERATOR

    @staticmethod
    def _events_of_idle(record: Instance) -> Iterator[_Due]:
        reason = retirement(record, now=NOW, max_age_s=LIFETIMES.max_age_s, max_uses=LIFETIMES.max_uses + 1)
        if reason:
            yield "a sweep ends it: retired", _SWEEP, End(cause=Cause.RETIRED, reason=reason), NOW, 0
        # If its time is up, then by a clock that is slow.
        at = record.threshold - timedelta(seconds=1)
        renewal = Renew(until=at + timedelta(seconds=LIFETIMES.idle_time_s))
        yield "scale-down renews its time", (Actor.SCALE_DOWN,), renewal, at, 0

    def written(self, life: Life, write: Write, *, released: bool, by_owner: bool = False) -> Life:
        """Its record after a write that its guard admits; judged."""
        after = write.applied_to(life.record)
        _judge_write(life, write, after, released=released, by_owner=by_owner)
        before = life.record
        kept = before is not None and after.state is before.state and after.threshold <= before.threshold
        return life._replace(record=after, launched=True, late=life.late and kept)

    def _hopeful(self, write: Write, record: Instance | None) -> bool:
        """Whether the real guard may ever admit it: asked with all that the record can still become."""
        if record is None:
            return write.guard.admits(None)
        if write.guard.threshold_at_or_before is not None and not write.guard.admits(record):
            # Its time was moved, and moves no further back.
            return False
        key = (write.guard, record)
        known = self._hopes.get(key)
        if known is None:
            futures = self._futures.get(record)
            if futures is None:
                futures = self._futures[record] = tuple(_futures(record))
            known = self._hopes[key] = any(map(write.guard.admits, futures))
        return known

    # Machines

    def _by_agent(self, life: Life) -> Iterator[Step]:
        agent, record = life.agent, life.record
        if not agent.alive or record is None or record.state in ABSORBING:
            return
        if agent.doing is not None:
            yield from _done(life._replace(agent=agent._replace(doing=None)), agent.doing)
            return
        yield from _done(life, self._decision(life))
        if life.late:
            step = next_step(_view(life, now=_late(record)))
            if step.action is AgentAction.END:
                yield Step("its agent ends it: its time is up", life._replace(agent=DEAD))
        if self._decision(life).do is AgentAction.REMOVE:
            given_up = next_step(_view(life, removals=MAX_REMOVALS))
            if given_up.action is AgentAction.SIGNAL and given_up.signal is not None:
                text = f"its agent cannot deregister: {given_up.signal}"
                yield Step(text, _signalled(life, record.epoch, given_up.signal))

    def _decision(self, life: Life) -> Doing:
        if life.record is None or life.state in ABSORBING or not life.agent.alive or life.agent.doing is not None:
            return _NOTHING
        key = life._replace(pending=None)
        known = self._decisions.get(key)
        if known is None:
            known = self._decisions[key] = _decided(life)
        return known

    def _left_behind(self, before: Life, after: Life) -> Doing | None:
        """What its agent had decided on just before the record changed, where it would not decide so any more."""
        agent = before.agent
        if before.record is None or agent.doing is not None or agent != after.agent or not agent.alive:
            return None
        if before.record == after.record or before.state in ABSORBING:
            return None
        doing = self._decision(before)
        if doing.do in {AgentAction.WAIT, AgentAction.END} or self._decision(after) == doing:
            return None
        return doing

    @staticmethod
    def _by_world(life: Life) -> Iterator[Step]:
        agent, record = life.agent, life.record
        if record is None or record.state in ABSORBING:
            return
        if not life.late:
            yield Step("its time runs out", life._replace(late=True), EXPIRY)
        if not agent.alive:
            return
        yield Step("its machine is gone", life._replace(agent=DEAD), CRASH)
        yield Step("its agent is started again", life._replace(agent=agent._replace(memory=None, doing=None)), CRASH)
        if agent.listening:
            gone = agent._replace(listening=False, job=False, ended=True)
            yield Step("its runner ends for good", life._replace(agent=gone), CRASH)
        if agent.job:
            yield Step("its job ends", life._replace(agent=agent._replace(job=False)))
        elif agent.listening and agent.configured:
            if record.epoch != agent.configured or record.state not in {State.RUNNING, State.RELEASING}:
                raise Broken(f"S2: a job may start while it is {record.state} at epoch {record.epoch}, {agent}")
            yield Step("a job starts on it", life._replace(agent=agent._replace(job=True, dirty=True)))

    # What is left of a life

    def settled(self, life: Life) -> Life:
        """Without what nobody reads any more; judged."""
        record = life.record
        if record is None:
            return life
        if record.state in ABSORBING:
            return self._ended(life, record)
        record = replace(record, last_run_id="", announced_at=None, uses=0)
        if record.state in _UNTIL and record.quarantined_until is None:
            # Renewals and extensions move it; time may run out at any time all the same.
            record = replace(record, threshold=_UNTIL[record.state])
        life = life._replace(record=record)
        if life not in self._judged:
            _judge(life, record)
            self._judged.add(life)
        return life

    @staticmethod
    def _ended(life: Life, record: Instance) -> Life:
        """Nobody reads its report any more, and its agent does nothing but end it: that is asked here."""
        agent = life.agent._replace(doing=None)
        if agent.alive and next_step(_view(life._replace(agent=agent))).action is not AgentAction.END:
            raise Broken(f"L1: its agent lives on while it is {record.state}")
        if record.assignment is not None:
            raise Broken(f"S12: {record.state}, and it has a credential")
        if record.state is State.TERMINATING:
            change = advance(record, Confirm(keep_records_s=1.0), by=Actor.REFRESH, now=NOW, why="")
            if not change.guard.admits(record):
                raise Broken("L1: no sweep can confirm its end")
        plain = replace(
            record,
            threshold=NOW,
            last_run_id="",
            retire="ended",
            quarantined_until=None,
            run_deadline=None,
            announced_at=None,
            forget_at=None,
            uses=0,
        )
        return Life(record=plain, launched=True, agent=DEAD, pending=life.pending)


def _caught(steps: Iterator[Step]) -> Iterator[Step]:
    try:
        yield from steps
    except Broken as broken:
        yield Step("goes on", UNBORN, 0, str(broken))


def _late(record: Instance) -> datetime:
    return record.threshold + timedelta(seconds=LIFETIMES.margin_s + 1)


def _futures(record: Instance) -> Iterator[Instance]:
    """Every record that may follow this one, as far as a guard can tell."""
    here = _ORDER[record.state]
    for epoch in range(record.epoch, record.epoch + 3):
        for state, order in _ORDER.items():
            if epoch == record.epoch and order < here:
                continue
            later = replace(record, state=state, epoch=epoch)
            yield later
            if (state, epoch) != (record.state, record.epoch):
                yield replace(later, threshold=NOW)
                yield replace(later, threshold=LATER)
                yield replace(later, owner=f"{OTHER}/w{epoch}", provision_id=OTHER, threshold=LATER)


def _view(life: Life, *, now: datetime = NOW, removals: int = 0) -> Observation:
    agent, record = life.agent, life.record
    memory = agent.memory
    return Observation(
        record=record,
        runner=RunnerState(
            configured_as=runner_name(POOL, agent.configured, ID) if agent.configured else "",
            listening=agent.listening,
            busy=agent.job,
            exit_code=1 if agent.ended else None,
        ),
        script=ScriptStatus.OK,
        now=now,
        margin_s=LIFETIMES.margin_s,
        signalled=memory[1] if memory is not None and record is not None and memory[0] == record.epoch else None,
        removals=removals,
    )


def _decided(life: Life) -> Doing:
    record, agent = life.record, life.agent
    step = next_step(_view(life))
    if record is None:
        return _NOTHING
    if step.action is AgentAction.START and (record.state is not State.RUNNING or agent.configured != record.epoch):
        raise Broken(f"S2: its runner starts at epoch {agent.configured} while it is {record.state} at {record.epoch}")
    if step.action is AgentAction.END:
        raise Broken(f"S6: its agent ends it while it is {record.state}, before its time")
    parsed = parse_runner_name(POOL, record.assignment.runner_name) if record.assignment else None
    return Doing(do=step.action, epoch=record.epoch, named=parsed[0] if parsed else 0, signal=step.signal)


def _done(life: Life, doing: Doing) -> Iterator[Step]:
    """What comes of a step that its agent has decided on."""
    agent = life.agent
    text = f"its agent: {doing.do.value}"
    match doing.do:
        case AgentAction.CONFIGURE:
            made = life._replace(agent=agent._replace(configured=doing.named))
            yield Step(text, _signalled(made, doing.epoch, Signal.UD_REG_OK))
            yield Step(f"{text}, in vain", _signalled(life, doing.epoch, Signal.UD_REG_FAILED))
            yield Step(f"{text}, and dies", _forgetful(made), CRASH)
        case AgentAction.START:
            yield Step(text, life._replace(agent=agent._replace(listening=True, ended=False)))
        case AgentAction.REMOVE:
            yield Step(text, life if agent.job else life._replace(agent=agent._replace(configured=0)))
        case AgentAction.STOP:
            if agent.job:
                raise Broken("S6: its runner is stopped while a job runs")
            yield Step(text, life._replace(agent=agent._replace(listening=False)))
        case AgentAction.RESET:
            if agent.job:
                raise Broken("S6: it is reset while a job runs")
            clean = life._replace(agent=agent._replace(dirty=False, ended=False))
            yield Step(text, _signalled(clean, doing.epoch, Signal.UD_REMOVE_REG_REMOVE_RUN_OK))
            failed = _signalled(life, doing.epoch, Signal.UD_REMOVE_REG_REMOVE_RUN_FAILED)
            yield Step(f"{text}, in vain", failed)
            yield Step(f"{text}, and dies", _forgetful(clean), CRASH)
        case AgentAction.SIGNAL if doing.signal is not None:
            yield Step(f"{text} {doing.signal}", _signalled(life, doing.epoch, doing.signal))
        case _:
            return


def _signalled(life: Life, epoch: int, signal: Signal) -> Life:
    told = (epoch, signal) if life.report.may_become(epoch, signal) else life.told
    return life._replace(told=told, agent=life.agent._replace(memory=(epoch, signal)))


def _forgetful(life: Life) -> Life:
    return life._replace(agent=life.agent._replace(memory=None))


# The judge


def _judge(life: Life, record: Instance) -> None:
    """What must hold of a life by itself."""
    agent, held = life.agent, record.assignment
    if agent.alive and record.state is State.IDLE:
        if agent.listening or agent.configured or agent.dirty or agent.job:
            raise Broken(f"S3: it is idle, and {agent}")
        if agent.doing is not None and agent.doing.do in {AgentAction.CONFIGURE, AgentAction.START}:
            raise Broken(f"S3: it is idle, and its agent is about to {agent.doing.do.value}")
    if agent.listening and record.state in {State.CREATED, State.CLAIMED}:
        raise Broken(f"S2: it listens while it is {record.state}")
    if record.state is State.RUNNING and held is not None and held.credential is not None:
        raise Broken("S12: it runs, and has a credential")
    if record.state is State.IDLE and held is not None:
        raise Broken("S12: it is idle, and has an assignment")
    end = End(cause=Cause.EXPIRED, margin_s=LIFETIMES.margin_s)
    try:
        change = advance(record, end, by=Actor.REFRESH, now=_late(record), why="")
    except IllegalTransition as illegal:
        raise Broken(f"L1: no sweep can end it by its threshold: {illegal}") from illegal
    if not change.guard.admits(record):
        raise Broken(f"L1: no sweep can end it by its threshold: {record.state}")


def _judge_write(life: Life, write: Write, after: Instance, *, released: bool, by_owner: bool) -> None:
    """What must hold of a write, by what is true and not by what its writer thought."""
    before = life.record
    if before is None:
        return
    if before.state in ABSORBING and after.state not in ABSORBING:
        raise Broken(f"S5: it was {before.state} and became {after.state}")
    if (after.epoch, _ORDER[after.state]) < (before.epoch, _ORDER[before.state]):
        raise Broken(f"S5: it was {before.state} at {before.epoch} and became {after.state} at {after.epoch}")
    claimed = after.state is State.CLAIMED and before.state is not State.CLAIMED
    if claimed and before.state is not State.IDLE:
        raise Broken(f"S1: it was claimed while it was {before.state}")
    if after.epoch != before.epoch + claimed or (after.owner != before.owner and not claimed):
        raise Broken(f"S1: at epoch {before.epoch} of {before.owner} it became {after.epoch} of {after.owner}")
    if claimed and before.retire:
        raise Broken(f"S2: it was claimed although it is {before.retire}")
    if after.tier is not before.tier:
        raise Broken(f"S11: its tier was {before.tier} and became {after.tier}")
    if after.state is State.TERMINATED and before.state is not State.TERMINATING:
        raise Broken(f"S9: it was {before.state} and became {after.state}")
    if after.state is State.RUNNING and before.state is not State.RUNNING:
        _judge_commit(life, after, by_owner=by_owner)
    if after.state is State.RELEASING and before.state in ASSIGNED and not (released or by_owner):
        raise Broken("S6: it was taken from a run that nobody released")
    if after.state is State.TERMINATING and before.state is not State.TERMINATING:
        _judge_end(life, write, before, released=released, by_owner=by_owner)


def _judge_commit(life: Life, after: Instance, *, by_owner: bool) -> None:
    if not by_owner:
        raise Broken("S1: it was committed by a run that does not own it")
    if life.told != (after.epoch, Signal.UD_REG_OK):
        raise Broken(f"S4: it runs by {life.told}")
    if life.agent.alive and life.agent.configured != after.epoch:
        raise Broken(f"S4: it runs at epoch {after.epoch} and is registered for {life.agent.configured}")


def _judge_end(life: Life, write: Write, before: Instance, *, released: bool, by_owner: bool) -> None:
    epoch, signal = write.told
    told = signal if epoch == before.epoch else None
    just = life.late or not life.agent.alive or write.by is Actor.OPERATOR
    if before.state in {State.CREATED, State.CLAIMED}:
        just = just or by_owner or (released and before.state is State.CREATED)
    elif before.state is State.RUNNING:
        just = just or told is Signal.UD_REG_FAILED
    elif before.state is State.RELEASING:
        clean = told is Signal.UD_REMOVE_REG_REMOVE_RUN_OK
        just = just or told in _REMOVAL_SIGNALS or (clean and bool(before.retire))
    else:
        just = just or bool(before.retire)
    if not just:
        raise Broken(f"S6: it was ended while {before.state}, by {write.text} and {write.told}")
