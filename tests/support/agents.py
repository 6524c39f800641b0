"""Fakes of the agent's ports, and a fixture with one agent and its control plane in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any

from remuda.agent.loop import Agent
from remuda.domain.errors import Unavailable
from remuda.domain.instance import Assignment, Credential, Instance, State
from remuda.domain.resources import Tier
from remuda.domain.signals import Report, Signal
from remuda.domain.transitions import Actor, Bind, Claim, Commit, Equip, Event, Release, ReturnToPool, advance, create
from remuda.ports.calls import CallCounter
from remuda.ports.machine import AgentState, Identity, RemovalStatus, RunnerState, StepResult
from remuda.ports.store import InstanceStore
from simulation.loop import SeededIds, VirtualClock
from simulation.memory.store import MemoryDatabase, MemoryInstanceStore
from tests.support.records import assignment, at, instance, instance_id, run_holder, set_holder
from tests.support.virtual_time import until

ID = instance_id(1)
MARGIN_S = 1.0
#: Name of the runner set.
SET = "large"
IDENTITY = Identity(instance_id=ID, pool="test", margin_s=MARGIN_S)


class RecordingMachine:
    """A machine that records calls in `log`, which it shares with the runner. Its state survives the agent."""

    def __init__(self, log: list[str], identity: Identity = IDENTITY) -> None:
        self.log = log
        self._identity = identity
        self.memory = AgentState()
        self.armed: list[datetime] = []
        self.ended: list[str] = []
        self.notice = ""
        self.script = StepResult(ok=True)
        self.reset_outcome = StepResult(ok=True)
        #: Seconds that the script and a reset take.
        self.script_s = self.reset_s = 0.0

    async def identity(self) -> Identity:
        return self._identity

    def load(self) -> AgentState:
        return self.memory

    def save(self, state: AgentState) -> None:
        self.memory = state

    def set_dead_man_timer(self, at: datetime) -> None:
        self.armed.append(at)

    async def spot_notice(self) -> str:
        return self.notice

    async def run_script(self, timeout_s: float) -> StepResult:  # noqa: ARG002 - the port's
        self.log.append("script")
        await asyncio.sleep(self.script_s)
        return self.script

    async def reset(self) -> StepResult:
        self.log.append("reset")
        await asyncio.sleep(self.reset_s)
        return self.reset_outcome

    async def end(self, reason: str) -> None:
        self.ended.append(reason)


class RecordingRunner:
    """A runner whose registration and listener survive the agent. Tests set `busy` for a job."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.current = RunnerState()
        self.configured: list[Assignment] = []
        self.configure_outcome = StepResult(ok=True)
        #: Results of the next removals; later ones succeed.
        self.removals: list[RemovalStatus] = []
        #: Exit codes of the next listeners, which end at once; later ones keep running.
        self.exits: list[int] = []
        self.removed_with: list[Credential | None] = []
        self.started: list[Assignment] = []
        self.turned_away = ""
        self._changed = asyncio.Event()

    def state(self) -> RunnerState:
        return self.current

    def become(self, **changed: Any) -> None:
        self.current = replace(self.current, **changed)
        self._changed.set()
        self._changed = asyncio.Event()

    async def register(self, assignment: Assignment) -> StepResult:
        self.log.append(f"register {assignment.runner_name}")
        self.configured.append(assignment)
        if self.configure_outcome.ok:
            self.become(
                registered_as=assignment.runner_name,
                exit_code=None,
                had_job=False,
                saw_job=False,
                spent=False,
                unused=False,
            )
        return self.configure_outcome

    async def start(self, assignment: Assignment) -> None:
        self.log.append("start")
        self.started.append(assignment)
        if self.exits:
            self.become(listening=False, exit_code=self.exits.pop(0))
        else:
            self.become(listening=True, exit_code=None)

    def finish_only_job(self) -> None:
        """The listener of a just-in-time registration exits after its job."""
        self.become(listening=False, busy=False, exit_code=0, had_job=True, saw_job=True, spent=True)

    def refused(self) -> str:
        return self.turned_away

    async def remove(self, assignment: Assignment) -> tuple[RemovalStatus, str]:
        removal = self.removals.pop(0) if self.removals else RemovalStatus.REMOVED
        self.log.append(f"remove {removal.name}")
        self.removed_with.append(assignment.credential)
        if removal is RemovalStatus.REMOVED:
            self.become(registered_as="")
        return removal, ""

    async def stop(self) -> None:
        self.log.append("stop")
        self.become(listening=False, busy=False)

    async def wait_for_change(self, since: RunnerState, timeout_s: float) -> RunnerState:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.current == since:
                    await self._changed.wait()
        return self.current


class FlakyStore:
    """A store whose calls tests let fail."""

    def __init__(self, inner: InstanceStore) -> None:
        self._inner = inner
        self.down = False
        #: Whether a call fails, by its name.
        self.fails: Callable[[str], bool] = lambda _name: False
        #: Whether a call is executed, but then reported as failed.
        self.loses_answer: Callable[[str], bool] = lambda _name: False

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._inner, name)

        async def guarded(*given: Any, **named: Any) -> Any:
            if self.down or self.fails(name):
                raise Unavailable("the store cannot be reached")
            result = await call(*given, **named)
            if self.down or self.loses_answer(name):
                raise Unavailable("the response was lost")
            return result

        return guarded


class RecordingEventLog:
    def __init__(self) -> None:
        self.notes: list[tuple[str, str, dict[str, Any]]] = []

    def record(self, action: str, why: str = "", **facts: Any) -> None:
        self.notes.append((action, why, facts))


class AgentFixture:
    """One machine with its agent, and the control plane operations that a test calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.clock = VirtualClock()
        self.database = MemoryDatabase()
        self.control = MemoryInstanceStore(clock=self.clock, calls=CallCounter(), database=self.database)
        self.store = FlakyStore(self.control)
        self.machine = RecordingMachine(self.log)
        self.runner = RecordingRunner(self.log)
        self.event_log = RecordingEventLog()
        self.task: asyncio.Task[str] | None = None

    # The agent

    def start(self) -> asyncio.Task[str]:
        agent = Agent(
            store=self.store,
            machine=self.machine,
            runner=self.runner,
            clock=self.clock,
            ids=SeededIds(jitter=1.0),
            event_log=self.event_log,
            version="1",
        )
        self.task = asyncio.create_task(agent.run())
        return self.task

    async def crash(self) -> None:
        """End the agent without changing machine and listener."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
            self.task = None

    @property
    def agent_runs(self) -> bool:
        return self.task is not None and not self.task.done()

    async def ended(self) -> str:
        """Wait for the agent's end, and return its reason."""
        assert self.task is not None
        return await self.task

    def kill_after(self, steps: int) -> asyncio.Task[None]:
        """Kill the agent after this many steps of machine and runner. The task ends when it has been restarted."""
        died, fixture = asyncio.Event(), self

        class Log(list[str]):
            def append(self, item: str) -> None:
                super().append(item)
                if len(self) == steps and not died.is_set():
                    died.set()
                    asyncio.get_running_loop().call_soon(lambda: fixture.task and fixture.task.cancel())

        self.log = self.machine.log = self.runner.log = Log()

        async def restart_later() -> None:
            await died.wait()
            await asyncio.sleep(3)
            await self.restart()

        return asyncio.create_task(restart_later())

    async def restart(self) -> None:
        await self.crash()
        self.start()

    # The store

    @property
    def record(self) -> Instance:
        return self.database.instances[ID]

    @property
    def report(self) -> Report:
        return self.database.reports.get(ID) or Report(instance_id=ID)

    def signalled(self, signal: Signal, epoch: int = 1) -> bool:
        return (self.report.epoch, self.report.signal) == (epoch, signal)

    # The control plane

    async def apply(self, event: Event, by: Actor) -> Instance:
        return await self.control.apply(advance(self.record, event, by=by, now=self.clock.now(), why="a test"))

    async def create(self, **changed: Any) -> None:
        record = instance(
            state=State.CREATED,
            claim="p-1/a",
            threshold=at(self.clock.monotonic() + 300),
            **{"holder": run_holder(), "assignment": assignment(1), **changed},
        )
        await self.control.apply(create(record, by=Actor.PROVISION, why="a test"))

    async def claim(self) -> None:
        event = Claim(
            holder=run_holder("1235", "p-2"),
            claim="p-2/a",
            scope="octo/repo",
            tier=self.record.tier,
            threshold=at(self.clock.monotonic() + 300),
            assignment=assignment(self.record.epoch + 1),
            margin_s=MARGIN_S,
        )
        await self.apply(event, Actor.PROVISION)

    async def commit(self, max_runtime_s: float = 1_800.0) -> None:
        event = Commit(claim=self.record.claim, report=self.report, max_runtime_s=max_runtime_s)
        await self.apply(event, Actor.PROVISION)

    async def release(self, release_time_s: float = 300.0) -> None:
        credential = Credential(token="removal-t0ken", expires_at=at(self.clock.monotonic() + 3_600))
        await self.apply(Release(release_time_s=release_time_s, credential=credential), Actor.RELEASE)

    async def pool(self) -> None:
        await self.apply(ReturnToPool(report=self.report, idle_time_s=420.0), Actor.RELEASE)

    # Runner sets

    async def create_in_set(self) -> None:
        await self.create(holder=set_holder(SET), assignment=self._bare(1))

    async def claim_for_set(self) -> None:
        event = Claim(
            holder=set_holder(SET, provision_id="p-2"),
            claim="p-2/a",
            scope="octo/repo",
            tier=self.record.tier,
            threshold=at(self.clock.monotonic() + 300),
            assignment=self._bare(self.record.epoch + 1),
            margin_s=MARGIN_S,
        )
        await self.apply(event, Actor.LISTENER)

    def _bare(self, epoch: int) -> Assignment:
        return replace(assignment(epoch), credential=None, labels=("self-hosted", "large"))

    async def equip(self, listening_time_s: float = 900.0, max_runtime_s: float = 1_800.0) -> None:
        event = Equip(
            claim=self.record.claim,
            report=self.report,
            jit_config=f"configuration-{self.record.epoch}",
            runner_id=6 + self.record.epoch,
            listening_time_s=listening_time_s,
            max_runtime_s=max_runtime_s,
        )
        await self.apply(event, Actor.LISTENER)

    async def bind(self, run_id: str = "77") -> None:
        assert self.record.assignment is not None
        event = Bind(
            runner_name=self.record.assignment.runner_name,
            run_id=run_id,
            repository="octo/repo",
            tier=Tier.TRUSTED,
            set_tier=Tier.TRUSTED,
            max_runtime_s=1_800.0,
            margin_s=MARGIN_S,
        )
        await self.apply(event, Actor.LISTENER)

    async def release_from_set(self) -> None:
        await self.apply(Release(release_time_s=300.0, credential=None, deregistered=True), Actor.LISTENER)

    async def serve(self, max_runtime_s: float = 1_800.0) -> None:
        """Start the agent, and wait until its listener accepts jobs of the first run."""
        self.start()
        await self.create()
        await until(lambda: self.signalled(Signal.UD_REG_OK))
        await self.commit(max_runtime_s)
        await until(lambda: self.runner.current.listening)

    async def return_to_pool(self, release_time_s: float = 300.0) -> None:
        await self.release(release_time_s)
        await until(lambda: self.signalled(Signal.UD_REMOVE_REG_REMOVE_RUN_OK, self.record.epoch))
        await self.pool()
