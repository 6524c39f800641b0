"""Every order of events in a small world: two instances, three runs, messages that come again, one crash.

A breadth-first search over the real transition table and the real decisions of agents and sweeps (`advance`,
`next_step`, `next_for_releasing`, `made_by`), without an event loop: a state is a value, an action makes another. What
time allows at some time is allowed at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from remuda.agent.lifecycle import Do, View, next_step
from remuda.controlplane.context import made_by
from remuda.domain.errors import IllegalTransition
from remuda.domain.instance import ABSORBING, ASSIGNED, Assignment, Credential, Instance, State
from remuda.domain.pool_config import parse_runner_name, runner_name
from remuda.domain.releasing import next_for_releasing
from remuda.domain.resources import Tier, UsageClass
from remuda.domain.signals import Report, Signal, Verdict, registration_verdict
from remuda.domain.thresholds import Lifetimes
from remuda.domain.transitions import (
    Actor,
    Cause,
    Change,
    Claim,
    Commit,
    Confirm,
    End,
    Event,
    Release,
    advance,
    create,
    presumed,
)
from remuda.ports.machine import Script
from remuda.ports.runner import RunnerState

NOW = datetime(2026, 1, 5, 8, 0, tzinfo=UTC)
LATER = NOW + timedelta(days=1)
POOL = "all"
LIFETIMES = Lifetimes()
REMOVAL = Credential(token="removal", expires_at=LATER)  # noqa: S106 - of no world
REGISTRATION = Credential(token="registration", expires_at=LATER)  # noqa: S106


@dataclass(frozen=True, slots=True)
class Agent:
    """What is on a machine, and what its agent is about."""

    #: The epoch that it is registered for, or 0.
    configured: int = 0
    #: The epoch that it is being registered for: that takes long, and the record may move meanwhile.
    configuring: int = 0
    listening: bool = False
    job: bool = False
    dirty: bool = False
    #: It was started again, and does not know what it signalled.
    forgetful: bool = False
    alive: bool = True


@dataclass(frozen=True, slots=True)
class Run:
    """A run's provision: its record, and what its process believes."""

    status: str = "none"
    #: The record that it claimed or created, as it knows it.
    held: Instance | None = None
    #: A claim whose answer was lost: instance and epoch of the message.
    unsure: tuple[int, int] | None = None
    #: Its process is dead, or done.
    over: bool = False


@dataclass(frozen=True, slots=True)
class Scene:
    records: tuple[Instance | None, ...]
    agents: tuple[Agent, ...]
    reports: tuple[tuple[int, Signal | None], ...]
    runs: tuple[Run, ...]
    #: What a sweep has read and not yet acted on.
    looked: tuple[int, Instance, tuple[int, Signal | None]] | None = None
    #: How many of crash, expiry and lost answer may still happen.
    mishaps: int = 1


@dataclass(kw_only=True, slots=True)
class Search:
    """What a search came to."""

    states: int = 0
    actions: int = 0
    depth: int = 0
    #: False where a limit ended it.
    complete: bool = True
    #: The first violation, and the actions that lead to it.
    violation: str = ""
    path: list[str] = field(default_factory=list)


class Broken(Exception):
    """An action led to what must not be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    instances: int = 2
    runs: int = 3
    max_epoch: int = 2
    #: A sweep may act on what it read a while ago.
    stale: bool = True
    #: Jobs come and go on runners that listen.
    jobs: bool = True
    #: Crashes, expiries and lost answers, all together.
    mishaps: int = 1


def explore(bounds: Bounds | None = None, *, limit: int | None = None) -> Search:
    """All states within the bounds, the nearest first."""
    bounds = bounds or Bounds()
    first = Scene(
        records=(None,) * bounds.instances,
        agents=(Agent(),) * bounds.instances,
        reports=((0, None),) * bounds.instances,
        runs=(Run(),) * bounds.runs,
        mishaps=bounds.mishaps,
    )
    search = Search()
    # By their hashes: whole scenes would not fit into memory. Each with the one that it came from.
    came_from: dict[int, int] = {hash(first): 0}
    queue = deque([(first, 0)])
    while queue:
        scene, depth = queue.popleft()
        search.depth = max(search.depth, depth)
        try:
            for _, following in _Actions(scene, bounds).all():
                search.actions += 1
                name = hash(following)
                if name not in came_from:
                    came_from[name] = hash(scene)
                    _judge(following)
                    queue.append((following, depth + 1))
        except Broken as broken:
            search.violation = str(broken)
            search.path = _path(came_from, first, scene, bounds)
            break
        if limit is not None and len(came_from) >= limit:
            search.complete = not queue
            break
    search.states = len(came_from)
    return search


def _path(came_from: dict[int, int], first: Scene, last: Scene, bounds: Bounds) -> list[str]:
    """The actions that lead to a scene, found by going the way again."""
    way = [hash(last)]
    while way[-1] != hash(first):
        way.append(came_from[way[-1]])
    names: list[str] = []
    at = first
    for goal in way[-2::-1]:
        name, at = next((name, scene) for name, scene in _Actions(at, bounds).all() if hash(scene) == goal)
        names.append(name)
    return names


def _judge(scene: Scene) -> None:
    """What must hold of a state by itself. The steps between them are judged as they are taken."""
    for number, record in enumerate(scene.records):
        agent = scene.agents[number]
        if record is None or not agent.alive:
            continue
        if record.state is State.IDLE and (agent.listening or agent.configured or agent.dirty or agent.job):
            raise Broken(f"S3: instance {number} is idle, and {agent}")
        if agent.listening and record.state in {State.CREATED, State.CLAIMED, State.IDLE}:
            raise Broken(f"S2: instance {number} listens while it is {record.state}")
    believers: dict[str, int] = {}
    for number, run in enumerate(scene.runs):
        if run.held is not None and not run.over:
            key = f"{run.held.instance_id}/{run.held.epoch}"
            if believers.setdefault(key, number) != number:
                raise Broken(f"S1: runs {believers[key]} and {number} both hold {key}")


def _report(number: int, told: tuple[int, Signal | None]) -> Report:
    return Report(instance_id=_id(number), epoch=told[0], signal=told[1], beat=1, beat_at=NOW)


def _id(number: int) -> str:
    return f"i-{number + 1:017x}"


def _number(instance_id: str) -> int:
    return int(instance_id.removeprefix("i-"), 16) - 1


def _put(items: tuple[object, ...], at: int, item: object) -> tuple:  # type: ignore[type-arg]
    return (*items[:at], item, *items[at + 1 :])


class _Actions:
    def __init__(self, scene: Scene, bounds: Bounds) -> None:
        self._scene = scene
        self._bounds = bounds

    def all(self) -> Iterator[tuple[str, Scene]]:
        fresh = True
        for number, run in enumerate(self._scene.runs):
            if run.status == "none":
                # Runs that have not begun are alike.
                if fresh:
                    yield f"run {number} begins", self._with_run(number, replace(run, status="open"))
                fresh = False
                continue
            yield from self._provision(number, run)
            yield from self._release(number, run)
        for number in range(self._bounds.instances):
            yield from self._sweep(number)
            yield from self._machine(number)
        yield from self._act_on_look()

    # Provisions

    def _provision(self, number: int, run: Run) -> Iterator[tuple[str, Scene]]:
        scene = self._scene
        if run.over:
            return
        if scene.mishaps:
            yield (
                f"run {number} crashes",
                replace(self._with_run(number, replace(run, over=True)), mishaps=scene.mishaps - 1),
            )
        if run.held is None and run.unsure is None:
            yield from self._take(number, run)
        if run.unsure is not None:
            yield from self._ask_again(number, run, run.unsure)
        if run.held is not None:
            yield from self._go_on(number, run, run.held)

    def _take(self, number: int, run: Run) -> Iterator[tuple[str, Scene]]:
        scene = self._scene
        for at, record in enumerate(scene.records):
            if record is None:
                born = self._born(number, at)
                change = create(born, by=Actor.PROVISION, why="")
                yield f"run {number} creates {at}", self._hold(self._apply(at, change), number, born)
                break
        for at, epoch in self._messages():
            change = self._claim(number, at, epoch)
            if change.guard.admits(scene.records[at]):
                after = self._apply(at, change)
                claimed = after.records[at]
                yield f"run {number} claims {at}", self._hold(after, number, claimed)
                if scene.mishaps:
                    unsure = replace(run, unsure=(at, epoch))
                    lost = replace(self._with_run(number, unsure, after), mishaps=scene.mishaps - 1)
                    yield f"run {number} claims {at}, answer lost", lost
            elif (current := scene.records[at]) is not None and made_by(change, current):
                raise Broken(f"S1: run {number} takes another's claim of {at} for its own")

    def _ask_again(self, number: int, run: Run, unsure: tuple[int, int]) -> Iterator[tuple[str, Scene]]:
        at, epoch = unsure
        change = self._claim(number, at, epoch)
        current = self._scene.records[at]
        if change.guard.admits(current):
            after = self._apply(at, change)
            yield f"run {number} claims {at} again", self._hold(after, number, after.records[at])
        elif current is not None and made_by(change, current):
            if current.provision_id != f"p-{number}":
                raise Broken(f"S1: run {number} adopts the claim of {current.provision_id}")
            yield f"run {number} finds its claim of {at}", self._hold(self._scene, number, current)
        else:
            yield f"run {number} has lost {at}", self._with_run(number, replace(run, unsure=None))

    def _go_on(self, number: int, run: Run, held: Instance) -> Iterator[tuple[str, Scene]]:
        at = _number(held.instance_id)
        report = _report(at, self._scene.reports[at])
        if held.state in {State.CREATED, State.CLAIMED} and registration_verdict(report, held.epoch) is Verdict.OK:
            event = Commit(owner=held.owner, report=report, max_runtime_s=1_800.0)
            after = self._try(at, held, event, Actor.PROVISION)
            if after is not None:
                yield f"run {number} commits {at}", self._hold(after, number, after.records[at])
        if held.state is State.RUNNING and run.status == "open":
            done = replace(run, status="committed", over=True)
            yield f"run {number} succeeds", self._with_run(number, done)
        back: Event = Release(release_time_s=300.0, credential=REMOVAL, owner=held.owner)
        if held.state is State.CREATED:
            back = End(cause=Cause.RELEASED, owner=held.owner)
        after = self._try(at, held, back, Actor.PROVISION) or self._scene
        gone = replace(after.runs[number], status="released", held=None, over=True)
        yield f"run {number} rolls back", self._with_run(number, gone, after)

    def _release(self, number: int, run: Run) -> Iterator[tuple[str, Scene]]:
        if run.status in {"open", "committed"}:
            yield f"run {number} is released", self._with_run(number, replace(run, status="released"))

    def _messages(self) -> Iterator[tuple[int, int]]:
        """Whatever was idle once was announced, and each hint may come at any time, any number of times."""
        for at, record in enumerate(self._scene.records):
            if record is not None:
                latest = record.epoch if record.state is State.IDLE else record.epoch - 1
                yield from ((at, epoch) for epoch in range(1, min(latest, self._bounds.max_epoch - 1) + 1))

    # Sweeps and releases: what they read may be old when they act

    def _sweep(self, number: int) -> Iterator[tuple[str, Scene]]:
        scene = self._scene
        record = scene.records[number]
        if record is None or record.state is State.TERMINATED:
            return
        look = (number, record, scene.reports[number])
        report = _report(number, scene.reports[number])
        due = any(self._events(record, report)) or (scene.mishaps and record.state not in ABSORBING)
        if not self._bounds.stale and due:
            yield from _Actions(replace(scene, looked=look), self._bounds)._act_on_look()  # noqa: SLF001 - its own
        elif scene.looked is None and due:
            yield f"a sweep looks at {number}", replace(scene, looked=look)

    def _act_on_look(self) -> Iterator[tuple[str, Scene]]:
        scene = self._scene
        if scene.looked is None:
            return
        number, record, told = scene.looked
        blind = replace(scene, looked=None)
        yield "the sweep lets it be", blind
        for why, event in self._events(record, _report(number, told)):
            after = self._try(number, record, event, Actor.REFRESH, blind)
            if after is not None:
                yield f"the sweep: {number} {why}", after
        if scene.mishaps and record.state not in ABSORBING:
            late = record.threshold + timedelta(seconds=LIFETIMES.margin_s + 1)
            event = End(cause=Cause.EXPIRED, margin_s=LIFETIMES.margin_s)
            after = self._try(number, record, event, Actor.REFRESH, blind, now=late)
            if after is not None:
                yield f"the sweep: {number} expires", replace(after, mishaps=scene.mishaps - 1)

    def _events(self, record: Instance, report: Report) -> Iterator[tuple[str, Event]]:
        owner = self._scene.runs[int(record.provision_id.removeprefix("p-"))]
        if record.state in ASSIGNED and owner.status == "released":
            if record.state is State.CREATED:
                yield "is ended: released", End(cause=Cause.RELEASED)
            else:
                yield "is taken back", Release(release_time_s=300.0, credential=REMOVAL)
        if record.state is State.RELEASING:
            upcoming = next_for_releasing(record, report, now=NOW, lifetimes=LIFETIMES)
            if upcoming is not None:
                yield "is settled", upcoming.event
        if record.state is State.RUNNING and registration_verdict(report, record.epoch) is Verdict.FAILED:
            yield "is ended: its runner failed", End(cause=Cause.FAILED, report=report)
        if record.state is State.TERMINATING:
            yield "is confirmed", Confirm(keep_records_s=1.0)

    # Machines

    def _machine(self, number: int) -> Iterator[tuple[str, Scene]]:
        scene, agent, record = self._scene, self._scene.agents[number], self._scene.records[number]
        if not agent.alive or record is None:
            return
        if agent.configuring:
            yield from self._configured(number, agent)
        else:
            for name, after in self._step(number, agent, record):
                yield name, self._and_on(number, after)
        if scene.mishaps:
            restarted = replace(agent, configuring=0, forgetful=True)
            yield (
                f"agent {number} is started again",
                replace(self._with_agent(number, restarted), mishaps=scene.mishaps - 1),
            )
        if not self._bounds.jobs:
            return
        if agent.job:
            yield f"the job on {number} ends", self._with_agent(number, replace(agent, job=False))
        elif agent.listening and agent.configured:
            if record.epoch != agent.configured or record.state in {State.IDLE, State.CREATED, State.CLAIMED}:
                raise Broken(f"S2: a job may start on {number}: {agent}, {record}")
            yield f"a job starts on {number}", self._with_agent(number, replace(agent, job=True, dirty=True))

    def _and_on(self, number: int, scene: Scene) -> Scene:
        """What an agent does next on its own, and nobody else can see, is done at once: fewer states, no fewer ends."""
        while True:
            agent, record = scene.agents[number], scene.records[number]
            if record is None or record.state is not State.RELEASING or agent.configuring or not agent.alive:
                return scene
            following = _Actions(scene, self._bounds)._step(number, agent, record)  # noqa: SLF001 - its own
            steps = list(following)
            if len(steps) != 1:
                return scene
            scene = steps[0][1]

    def _configured(self, number: int, agent: Agent) -> Iterator[tuple[str, Scene]]:
        epoch = agent.configuring
        made = replace(agent, configured=epoch, configuring=0)
        yield f"agent {number} is registered", self._signal(number, made, epoch, Signal.UD_REG_OK)
        in_vain = replace(agent, configuring=0)
        yield f"agent {number} is not registered", self._signal(number, in_vain, epoch, Signal.UD_REG_FAILED)
        if self._scene.mishaps:
            cut = self._with_agent(number, replace(made, forgetful=True))
            yield f"agent {number} is registered and dies", replace(cut, mishaps=self._scene.mishaps - 1)

    def _step(self, number: int, agent: Agent, record: Instance) -> Iterator[tuple[str, Scene]]:
        epoch, signal = self._scene.reports[number]
        view = View(
            record=record,
            runner=RunnerState(
                configured_as=runner_name(POOL, agent.configured, _id(number)) if agent.configured else "",
                listening=agent.listening,
                busy=agent.job,
            ),
            script=Script.OK,
            now=NOW,
            margin_s=LIFETIMES.margin_s,
            signalled=signal if epoch == record.epoch and not agent.forgetful else None,
        )
        step = next_step(view)
        name = f"agent {number}: {step.do.value}"
        match step.do:
            case Do.CONFIGURE if record.assignment is not None:
                parsed = parse_runner_name(POOL, record.assignment.runner_name)
                yield name, self._with_agent(number, replace(agent, configuring=parsed[0] if parsed else 0))
            case Do.START:
                if record.state is not State.RUNNING or agent.configured != record.epoch:
                    raise Broken(f"S2: the runner of {number} starts at epoch {agent.configured}: {record}")
                yield name, self._with_agent(number, replace(agent, listening=True))
            case Do.REMOVE if not agent.job:
                yield name, self._with_agent(number, replace(agent, configured=0))
            case Do.STOP:
                if agent.job:
                    raise Broken(f"S6: the runner of {number} is stopped while a job runs")
                yield name, self._with_agent(number, replace(agent, listening=False))
            case Do.RESET:
                clean = replace(agent, dirty=False)
                yield name, self._signal(number, clean, record.epoch, Signal.UD_REMOVE_REG_REMOVE_RUN_OK)
                failed = Signal.UD_REMOVE_REG_REMOVE_RUN_FAILED
                yield f"{name}, in vain", self._signal(number, agent, record.epoch, failed)
            case Do.SIGNAL if step.signal is not None:
                yield f"{name} {step.signal}", self._signal(number, agent, record.epoch, step.signal)
            case Do.END:
                if record.state not in ABSORBING:
                    raise Broken(f"S6: {number} ends itself while {record.state}")
                yield name, self._with_agent(number, replace(agent, alive=False))
            case _:
                return

    # Small steps

    def _signal(self, number: int, agent: Agent, epoch: int, signal: Signal) -> Scene:
        scene = self._with_agent(number, replace(agent, forgetful=False))
        if not _report(number, scene.reports[number]).may_become(epoch, signal):
            return scene
        return replace(scene, reports=_put(scene.reports, number, (epoch, signal)))

    def _born(self, run: int, at: int) -> Instance:
        return Instance(
            instance_id=_id(at),
            state=State.CREATED,
            epoch=1,
            threshold=NOW + timedelta(seconds=300),
            resource_class="large",
            instance_type="c6i.large",
            usage_class=UsageClass.ON_DEMAND,
            cpu=2,
            mmem=4_096,
            created_at=NOW,
            run_id=str(run),
            owner=f"p-{run}/launch",
            provision_id=f"p-{run}",
            tier=Tier.TRUSTED,
            assignment=self._assignment(at, 1),
        )

    @staticmethod
    def _assignment(at: int, epoch: int) -> Assignment:
        return Assignment(
            url="https://github.com/o/r",
            runner_name=runner_name(POOL, epoch, _id(at)),
            labels=("large",),
            credential=REGISTRATION,
        )

    def _claim(self, run: int, at: int, epoch: int) -> Change:
        hint = replace(self._born(run, at), state=State.IDLE, epoch=epoch).message()
        event = Claim(
            run_id=str(run),
            owner=f"p-{run}/w",
            provision_id=f"p-{run}",
            scope="o/r",
            tier=Tier.TRUSTED,
            threshold=NOW + timedelta(seconds=300),
            assignment=self._assignment(at, epoch + 1),
            margin_s=LIFETIMES.margin_s,
        )
        return advance(presumed(hint, now=NOW), event, by=Actor.PROVISION, now=NOW, why="")

    def _try(
        self,
        at: int,
        known: Instance,
        event: Event,
        by: Actor,
        scene: Scene | None = None,
        *,
        now: datetime = NOW,
    ) -> Scene | None:
        """The write, from what the writer knows; None where it is refused."""
        scene = scene or self._scene
        try:
            change = advance(known, event, by=by, now=now, why="")
        except IllegalTransition as illegal:
            raise Broken(f"S10: {illegal}") from illegal
        return self._apply(at, change, scene) if change.guard.admits(scene.records[at]) else None

    def _apply(self, at: int, change: Change, scene: Scene | None = None) -> Scene:
        scene = scene or self._scene
        before = scene.records[at]
        after = change.applied_to(before)
        self._judge_step(scene, at, before, after)
        agents = scene.agents
        if after.state is State.TERMINATED:
            agents = _put(agents, at, replace(agents[at], alive=False))
        return replace(scene, records=_put(scene.records, at, after), agents=agents)

    @staticmethod
    def _judge_step(scene: Scene, at: int, before: Instance | None, after: Instance) -> None:
        if before is None:
            return
        if before.state in ABSORBING and after.state not in ABSORBING:
            raise Broken(f"S5: {at} was {before.state} and became {after.state}")
        claimed = (before.state, after.state) == (State.IDLE, State.CLAIMED)
        if after.epoch != before.epoch + claimed or (after.owner != before.owner and not claimed):
            raise Broken(f"S1: {at} at epoch {before.epoch} of {before.owner} became {after.epoch} of {after.owner}")
        told = scene.reports[at]
        if after.state is State.RUNNING and told != (after.epoch, Signal.UD_REG_OK):
            raise Broken(f"S4: {at} runs by {told}")
        ended = after.state is State.TERMINATING and before.state is State.RUNNING
        if ended and after.retire != Cause.EXPIRED.value and told != (before.epoch, Signal.UD_REG_FAILED):
            raise Broken(f"S6: {at} was ended while running, by {told}")

    def _hold(self, scene: Scene, number: int, held: Instance | None) -> Scene:
        return self._with_run(number, replace(scene.runs[number], held=held, unsure=None), scene)

    def _with_run(self, number: int, run: Run, scene: Scene | None = None) -> Scene:
        scene = scene or self._scene
        return replace(scene, runs=_put(scene.runs, number, run))

    def _with_agent(self, number: int, agent: Agent) -> Scene:
        return replace(self._scene, agents=_put(self._scene.agents, number, agent))
