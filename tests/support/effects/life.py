"""The life of an instance: the real agent as `remuda agent` composes it, and a control plane that gives it work."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock

from remuda.agent import cache_volumes, sandbox_root
from remuda.agent.sandbox_root import JOB_USER_ID, JobUser
from remuda.cli import agent_ec2
from remuda.domain.errors import RemudaError, Unavailable
from remuda.domain.instance import Assignment, Credential, Instance, RetireReason, State
from remuda.domain.resources import Tier
from remuda.domain.signals import Report, Signal
from remuda.domain.timestamps import to_text
from remuda.domain.transitions import (
    Actor,
    Bind,
    Claim,
    Commit,
    End,
    Equip,
    Event,
    Extend,
    Release,
    Renew,
    RenewCredential,
    ReturnToPool,
    advance,
    create,
)
from remuda.ports.calls import CallCounter
from simulation.loop import START, SeededIds, VirtualLoop, VirtualProcess, without_gc
from simulation.memory.store import MemoryDatabase, MemoryInstanceStore
from tests.support.effects import seam
from tests.support.effects.host import BOOT_TIMER, DISK_FREE, STATE, Effect, EffectCut, ModelHost
from tests.support.effects.judge import ENDED, MARGIN_S, Judge
from tests.support.effects.programs import REGISTRATION_FILES, ModelGitHub, ModelRegistration, Programs
from tests.support.records import at, instance, instance_id, run_holder, set_holder
from tests.support.virtual_time import Killed

ID = instance_id(1)
SET = "large"
ENVIRONMENT = {"REMUDA_POOL": "test", "REMUDA_CACHE_PATHS": "/home/runner/.cache:/var/lib/things"}
RECONFIGURED = {**ENVIRONMENT, "REMUDA_CACHE_PATHS": "/var/lib/docker:/home/runner/.cache"}
#: Seconds of a restart by systemd, and of a reboot.
RESTART_S, REBOOT_S = 2.0, 20.0
POLL_S = 0.1
#: Seconds until a sweep notices a failure, and until an idle instance that nobody renews expires.
SWEEP_S, EXPIRY_S = 15.0, 20.0
#: An effect that changes nothing: whether the agent is killed before or after it, the next one finds the same.
READ = "read"
#: Seconds within which each step of an assignment must end. Thresholds are later.
STEP_S = 120.0
#: A disk in memory is ten times as fast.
MEMORY_DISK = next((folder for folder in ("/dev/shm",) if os.access(folder, os.W_OK)), None)  # noqa: S108
FAILED = frozenset(signal for signal in Signal if signal.failed)


class Work(Enum):
    """Kinds of assignments."""

    RUN = "run"
    #: A run whose runner is registered for one job, through the API.
    EPHEMERAL = "ephemeral run"
    #: A run that is released while its job runs, which gets it more time and another credential.
    BUSY = "run with a job at its release"
    #: A run whose job changes the kernel, so that the instance cannot be reset.
    DAMAGING = "run that damages the kernel"
    #: A run whose runner never connects, until the agent gives up.
    REFUSED = "run without a connection"
    SET = "set"
    #: A set whose runner is released without an answer of GitHub about its registration.
    SPENT = "set with a used-up registration"


#: Kinds that end the instance.
LAST = frozenset({Work.DAMAGING, Work.REFUSED})
OF_SETS = frozenset({Work.SET, Work.SPENT})


#: Assignments in turn: the kind, and the repository of the run or job.
Works = tuple[tuple[Work, str], ...]


class Meanwhile(Enum):
    """What happens after a cut, while there is no agent."""

    NOTHING = "continues"
    #: It releases the assignment, if it can.
    RELEASE = "releases"
    #: The next agent has other settings, as after an update.
    RECONFIGURE = "reconfigures"
    #: Each kind of read of the next agent fails once.
    UNREACHABLE = "does not answer at first"


class _GaveUp(Exception):
    """The agent has reported a failure, so that the control plane ends the instance."""


class _Failed(Exception):
    """The agent has reported the failure that this life is about."""


class _Moved(Exception):
    """The assignment was released while there was no agent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lived:
    """What became of a life."""

    outcome: str
    effects: list[Effect]
    #: By effect, the assignment and its state.
    phases: list[str]
    violations: list[str]
    #: The agent's log, for people.
    events: list[str]


def live(
    works: Works,
    cuts: Mapping[int, EffectCut] | None = None,
    meanwhile: Meanwhile = Meanwhile.NOTHING,
    *,
    builds_layers: bool = False,
    expires: bool = False,
    disk_free: int = DISK_FREE,
) -> Lived:
    """Let an instance live from its boot to its end. Cut effects of its agents by their number, from 1.

    An operator ends it at last. With `expires`, nobody does: its threshold passes while it is idle.
    Only with `builds_layers` are the upper layers of sandboxes filled, which half of all effects do. They are empty
    otherwise: no other effect depends on what is in them.
    """
    with without_gc(), tempfile.TemporaryDirectory(dir=MEMORY_DISK, prefix="remuda-") as folder:
        life = Life(Path(folder), works, cuts or {}, meanwhile, expires=expires)
        life.host.disk_free = disk_free
        life.run(builds_layers=builds_layers)
        lived = Lived(
            outcome=life.outcome,
            effects=life.host.effects,
            phases=life.judge.phases,
            violations=life.judge.violations,
            events=life.events,
        )
        # Here, so that the clean-up of killed agents goes unnoticed.
        del life
        seam.detach_all()
    return lived


class Life:
    def __init__(
        self, folder: Path, works: Works, cuts: Mapping[int, EffectCut], meanwhile: Meanwhile, *, expires: bool
    ) -> None:
        """Serve the assignments in turn: each is for a repository."""
        self.loop: VirtualLoop = _Loop()  # type: ignore[abstract]
        self.host = ModelHost(folder, self.loop, cuts)
        self.github = ModelGitHub()
        self.programs = Programs(self.host, self.github, self.host.power_off)
        self.judge = Judge(self.host, self.github)
        self._works = works
        self._meanwhile = meanwhile
        self._clock = _HostClock(self.host)
        self._database = MemoryDatabase()
        self._store = MemoryInstanceStore(clock=self._clock, calls=CallCounter(), database=self._database)
        self._agents = 0
        self._agent: VirtualProcess | None = None
        self._has_moved = False
        self._expires = expires
        #: Kinds of reads that have failed since the cut.
        self._missed: set[str] = set()
        self.outcome = ""
        self.events: list[str] = []
        self.host.on_reboot = self._rebooted
        _furnish(self.host)

    def run(self, *, builds_layers: bool) -> None:
        with self._composed(), contextlib.nullcontext() if builds_layers else _without_layers():
            self.loop.run(self._live())

    # The agent

    def _start_agent(self) -> None:
        if self.host.off:
            return
        self._agents += 1
        self._agent = process = VirtualProcess(self.loop, f"agent {self._agents}")
        seam.attach(process, self.host)
        process.on_end = lambda: self._agent_ended(process)
        environment = ENVIRONMENT
        if self._meanwhile is Meanwhile.RECONFIGURE and self.host.was_cut:
            environment = RECONFIGURED
        process.start(agent_ec2.run(environment, clock=self._clock, event_log=self))  # type: ignore[arg-type]

    def _agent_ended(self, process: VirtualProcess) -> None:
        task = process.task
        if not process.dead and task is not None and task.done():
            error = task.exception()
            self.record("agent-ended", repr(error))
            if error is not None and not isinstance(error, RemudaError | OSError | Killed):
                self.judge.violate(f"the agent fails with {error!r}")
        # What else it was doing ends with it.
        process.dead, process.runnable = True, False
        if self._agent is process and not self.host.off:
            self._agent = None
            self.loop.call_later(RESTART_S, self._start_again, context=self.loop.outside.copy())

    def _start_again(self) -> None:
        if self._agent is None:
            self._start_agent()

    def _rebooted(self) -> None:
        def booted() -> None:
            self.judge.rebooted()
            self._start_again()

        self._agent = SimpleNamespace()  # type: ignore[assignment]  # no agent starts before
        self.loop.call_later(REBOOT_S, booted, context=self.loop.outside.copy())
        self.loop.call_later(REBOOT_S - 0.1, self._forget_agent, context=self.loop.outside.copy())

    def _forget_agent(self) -> None:
        self._agent = None

    def record(self, action: str, why: str = "", **facts: Any) -> None:
        """The event log of the agent."""
        self.events.append(f"{self.host.now():7.2f} {action} {why} {facts.get('step', '')}")

    @contextlib.contextmanager
    def _composed(self) -> Iterator[None]:
        """Let `remuda agent` get the fakes of this life in place of AWS and the metadata service."""

        async def prefix(*_: object) -> str:
            return ""

        class Ec2Calls:
            def __init__(self, **_: object) -> None:
                pass

            async def call(_self, operation: str, **_: object) -> None:  # noqa: N805
                if self.host.effect("ec2", operation):
                    raise Unavailable("EC2 does not answer")
                self.host.loop.outside.copy().run(self.host.power_off, operation)

        replaced = {
            "AwsClients": _Clients,
            "Imds": _Imds,
            "own_key_prefix": prefix,
            "Ec2Calls": Ec2Calls,
            "SystemIds": lambda: SeededIds(jitter=1.0),
            "DynamoInstanceStore": lambda **_: _AgentStore(self),
        }
        with contextlib.ExitStack() as stack:
            for name, value in replaced.items():
                stack.enter_context(mock.patch.object(agent_ec2, name, value))
            yield

    # The control plane

    async def _live(self) -> None:
        self._start_agent()
        try:
            for number, (work, repository) in enumerate(self._works):
                with contextlib.suppress(_Moved):
                    await (self._serve_set if work in OF_SETS else self._serve_run)(number, repository, work)
                await self._release(work)
            # A new threshold of an idle instance.
            await asyncio.sleep(1)
            until_s = EXPIRY_S if self._expires else 900
            await self._apply(Renew(until=at(self._clock.monotonic() + until_s)), Actor.SCALE_DOWN)
            await asyncio.sleep(1)
            self.outcome = "served"
        except _Failed:
            # Until a sweep notices it, the agent must stay as it is, also one that has restarted.
            noticed_at = self.loop.time() + SWEEP_S
            with contextlib.suppress(_GaveUp):
                await self._until(lambda: self.loop.time() >= noticed_at, "the sweep", may_fail=False)
            self.outcome = "served"
        except _GaveUp as reason:
            self.outcome = f"gave up: {reason}"
        if not self.host.off and not self._expires:
            await self._apply(End(reason=RetireReason.TERMINATED_BY_OPERATOR), Actor.OPERATOR)
        with contextlib.suppress(_GaveUp):
            await self._until(lambda: bool(self.host.off), "the end of the instance", may_fail=False)

    async def _serve_run(self, number: int, repository: str, work: Work) -> None:
        assigned = self._assignment(number + 1, repository)
        registration, removal = f"registration-token-{number}", f"removal-token-{number}"
        self.judge.tokens[assigned.runner_name] = (registration, removal)
        credential = Credential(token=registration, expires_at=at(36_000))
        assigned = replace(assigned, credential=credential)
        if work is Work.EPHEMERAL:
            name = assigned.runner_name
            self.github.registrations[name] = ModelRegistration(name, just_in_time=True)
            assigned = replace(assigned, credential=None, jit_config=f"configuration of {name}", runner_id=7 + number)
        elif work is Work.REFUSED:
            self.github.refused.add(assigned.runner_name)
        run_id = f"run-{number}"
        if number:
            await self._claim(assigned, holder=run_holder(run_id, "p-2"), repository=repository)
        else:
            await self._create(assigned, holder=run_holder(run_id), repository=repository)
        await self._until(lambda: self._signalled(Signal.UD_REG_OK), "the registration")
        commit = Commit(claim=self._record.claim, report=self._report, max_runtime_s=1_800)
        await self._apply(commit, Actor.PROVISION)
        if work is Work.REFUSED:
            await self._until(lambda: self._signalled(Signal.UD_REG_FAILED), "the failure", may_fail=False)
            raise _Failed
        await self._serve_job(assigned, repository, work)

    async def _serve_set(self, number: int, repository: str, work: Work) -> None:
        assigned = self._assignment(number + 1, repository)
        # A runner of a set accepts jobs of several repositories.
        self.judge.holders[assigned.runner_name] = ""
        bare = replace(assigned, repository="")
        if number:
            await self._claim(bare, holder=set_holder(SET, provision_id="p-2"))
        else:
            await self._create(bare, holder=set_holder(SET))
        await self._until(lambda: self._signalled(Signal.UD_OK), "the boot")
        self.github.registrations[assigned.runner_name] = ModelRegistration(assigned.runner_name, just_in_time=True)
        equip = Equip(
            claim=self._record.claim,
            report=self._report,
            jit_config=f"configuration of {assigned.runner_name}",
            runner_id=7 + number,
            listening_time_s=900,
            max_runtime_s=1_800,
        )
        await self._apply(equip, Actor.LISTENER)
        await self._serve_job(assigned, repository, work)

    async def _serve_job(self, assigned: Assignment, repository: str, work: Work) -> None:
        name = assigned.runner_name
        await self._until(lambda: self._is_online(name), "the listener")
        await asyncio.sleep(0.5)
        job = self.github.queue(self.judge.holders[name] or repository, damages=work is Work.DAMAGING)
        await self._until(lambda: job.process is not None, "the job's start")
        if work is Work.BUSY:
            await self._release_during_job(name)
        if work in OF_SETS:
            bind = Bind(
                runner_name=name,
                run_id="77",
                repository=repository,
                tier=Tier.TRUSTED,
                set_tier=Tier.TRUSTED,
                max_runtime_s=1_800,
                margin_s=MARGIN_S,
            )
            await self._apply(bind, Actor.LISTENER)
        await self._until(lambda: job.ended or job.process is None or not job.process.alive, "the job's end")
        if not job.ended and not self.host.was_cut:
            self.judge.violate("the job did not end by itself")
        await asyncio.sleep(0.5)

    async def _release_during_job(self, name: str) -> None:
        await self._begin_release()
        await self._until(lambda: self._report is not None and self._report.busy, "the heartbeat of a running job")
        if (report := self._report) is not None and report.busy:
            await self._apply(Extend(report=report, extension_s=900, margin_s=MARGIN_S), Actor.RELEASE)
        registration, removal = self.judge.tokens[name]
        fresh = Credential(token=f"{removal}-renewed", expires_at=at(36_000))
        self.judge.tokens[name] = (registration, fresh.token)
        await self._apply(RenewCredential(credential=fresh), Actor.RELEASE)

    async def _release(self, work: Work) -> None:
        record = self._record
        if record.state in {State.CLAIMED, State.RUNNING}:
            await self._begin_release(is_deregistered=work is not Work.SPENT)
        if record.state is State.CREATED:
            raise _GaveUp("released before it was ready")
        if work is Work.DAMAGING and self.host.kernel != self.judge.kernel:
            failed = Signal.UD_REMOVE_REG_REMOVE_RUN_FAILED
            await self._until(lambda: self._signalled(failed), "the failed reset", may_fail=False)
            raise _Failed
        await self._until(lambda: self._signalled(Signal.UD_REMOVE_REG_REMOVE_RUN_OK), "the reset")
        await self._apply(
            ReturnToPool(report=self._report, idle_time_s=EXPIRY_S if self._expires else 600), Actor.RELEASE
        )
        # Idle until the agent has seen it, and has prepared the next sandbox.
        await asyncio.sleep(1.5)

    async def _begin_release(self, *, is_deregistered: bool = True) -> None:
        record = self._record
        assert record.assignment is not None
        name = record.assignment.runner_name
        # A job that no one has taken is cancelled.
        self.github.waiting.clear()
        if record.runner_set:
            self.github.registrations.pop(name, None)
            release = Release(release_time_s=300, credential=None, deregistered=is_deregistered)
            await self._apply(release, Actor.LISTENER)
        else:
            if record.uses:
                # A sweep has removed it as stale: GitHub answers the agent that there is none.
                self.github.registrations.pop(name, None)
            credential = Credential(token=self.judge.tokens[name][1], expires_at=at(36_000))
            await self._apply(Release(release_time_s=300, credential=credential), Actor.RELEASE)

    async def _until(self, holds: Callable[[], bool], what: str, *, may_fail: bool = True) -> None:
        give_up_at = self.loop.time() + STEP_S
        while not holds():
            armed = self.host.armed
            if armed is not None and armed <= self.host.now():
                self.host.power_off("the dead-man timer")
            if self.host.off:
                raise _GaveUp(f"waiting for {what}: {self.host.off}")
            if self._meanwhile is Meanwhile.RELEASE and self.host.was_cut and not self._has_moved:
                self._has_moved = True
                if self._record.state in {State.CLAIMED, State.RUNNING}:
                    await self._begin_release()
                    raise _Moved
            report = self._report
            if may_fail and report is not None and report.epoch == self._record.epoch and report.signal in FAILED:
                raise _GaveUp(f"waiting for {what}: {report.signal}: {report.detail}")
            if self.loop.time() > give_up_at:
                self.judge.violate(f"the agent is stuck: {what} does not come within {STEP_S:g} s")
                raise _GaveUp(f"stuck waiting for {what}")
            await self.loop.sleep(POLL_S)

    def misses(self, read: str) -> bool:
        """Whether a read of the agent fails: the first of its kind after the cut."""
        fails = self._meanwhile is Meanwhile.UNREACHABLE and self.host.was_cut and read not in self._missed
        if fails:
            self._missed.add(read)
        return fails

    def _is_online(self, name: str) -> bool:
        found = self.github.registrations.get(name)
        return found is not None and found.online

    def _assignment(self, epoch: int, repository: str) -> Assignment:
        name = f"remuda-test-{epoch}-{ID}"
        self.judge.holders[name] = f"{repository.replace('/', '-')}-{Tier.TRUSTED}"
        return Assignment(
            url=f"https://github.com/{repository}",
            runner_name=name,
            labels=(f"label-{epoch}", "large"),
            repository=repository,
            tier=Tier.TRUSTED,
        )

    async def _create(self, assigned: Assignment, **given: Any) -> None:
        record = instance(
            state=State.CREATED,
            claim="p-1/a",
            threshold=at(self._clock.monotonic() + 300),
            assignment=assigned,
            tier=Tier.TRUSTED,
            **given,
        )
        await self._store.apply(create(record, by=Actor.PROVISION, why="a test"))
        self.judge.record = self._record

    async def _claim(self, assigned: Assignment, **given: Any) -> None:
        claim = Claim(
            claim="p-2/a",
            scope="octo",
            tier=Tier.TRUSTED,
            threshold=at(self._clock.monotonic() + 300),
            assignment=assigned,
            margin_s=MARGIN_S,
            **given,
        )
        await self._apply(claim, Actor.PROVISION)

    async def _apply(self, event: Event, by: Actor) -> None:
        if self._record.state not in ENDED:
            await self._store.apply(advance(self._record, event, by=by, now=self._clock.now(), why="a test"))
            self.judge.record = self._record

    @property
    def _record(self) -> Instance:
        return self._database.instances[ID]

    @property
    def _report(self) -> Report | None:
        return self._database.reports.get(ID)

    def _signalled(self, signal: Signal) -> bool:
        report = self._report
        return report is not None and (report.epoch, report.signal) == (self._record.epoch, signal)


def _without_layers() -> AbstractContextManager[object]:
    def build(layer: Path, **_: object) -> JobUser:
        layer.mkdir()
        return JobUser(uid=JOB_USER_ID, gid=JOB_USER_ID)

    return mock.patch.object(sandbox_root, "build_layer", build)


class _HostClock:
    """The clocks of the host. They go on while a thread blocks, other than the time of the loop."""

    def __init__(self, host: ModelHost) -> None:
        self._host = host

    def now(self) -> datetime:
        return START + timedelta(seconds=self._host.now())

    def monotonic(self) -> float:
        return self._host.now()

    async def sleep(self, seconds: float) -> None:
        await self._host.loop.sleep(seconds)


class _Loop(VirtualLoop):
    async def sock_recv(self, sock: Any, _size: int) -> bytes:
        message: bytes = await sock.messages.get()
        return message


class _AgentStore:
    """The store as an agent reaches it. Its writes are effects, too."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def __getattr__(self, name: str) -> Any:
        return getattr(self._life._store, name)

    async def get(self, instance_id: str) -> Instance | None:
        self._life.judge.reads()
        self._read("record")
        return await self._life._store.get(instance_id)

    async def get_report(self, instance_id: str) -> Report | None:
        self._read("report")
        return await self._life._store.get_report(instance_id)

    async def wait_for_control(self, instance_id: str, since: Instance | None, timeout_s: float, **named: Any) -> Any:
        self._life.judge.waits(since)
        self._read("changes")
        return await self._life._store.wait_for_control(instance_id, since, timeout_s, **named)

    def _read(self, what: str) -> None:
        if self._life.host.effect(READ, what) or self._life.misses(what):
            raise Unavailable("the store does not answer")

    async def write_signal(self, instance_id: str, *, epoch: int, signal: Signal, **named: Any) -> None:
        life = self._life
        if life.host.effect("signal", signal):
            raise Unavailable("the store does not answer")
        life.judge.signals(signal, f"remuda-test-{epoch}-{ID}")
        await life._store.write_signal(instance_id, epoch=epoch, signal=signal, **named)
        life.judge.signalled(signal, f"remuda-test-{epoch}-{ID}")

    async def beat(self, instance_id: str, **named: Any) -> None:
        if self._life.host.effect("beat", ""):
            raise Unavailable("the store does not answer")
        await self._life._store.beat(instance_id, **named)


#: The cache volume of the first assignment's repository.
VOLUME = cache_volumes._name(Assignment(url="", runner_name="", labels=(), repository="octo/first", tier=Tier.TRUSTED))


class _Clients:
    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def service(self, *_: object) -> None:
        pass

    async def dynamodb(self) -> None:
        pass


METADATA = {
    "instance-id": ID,
    "tags/instance/remuda:margin-s": str(MARGIN_S),
    "tags/instance/remuda:pool": "test",
    "instance-life-cycle": "on-demand",
}


class _Imds:
    def __init__(self, **_: object) -> None:
        pass

    async def get(self, path: str) -> str:
        return METADATA[path]

    async def close(self) -> None:
        pass


def _furnish(host: ModelHost) -> None:
    """What the bootstrap leaves on an instance whose image was made from another instance."""
    host.put(f"{STATE}/instance-id", f"{instance_id(2)}\n")
    host.put(f"{STATE}/state.json", json.dumps({"script": "ok", "threshold": to_text(at(-10_000))}))
    for folder in ("registration/root", "sandboxes", f"caches/{VOLUME}/home%runner%.cache"):
        Path(host.real(f"{STATE}/{folder}")).mkdir(parents=True)
    for name in REGISTRATION_FILES:
        host.put(f"{STATE}/registration/root/{name}", json.dumps({"agentName": "remuda-test-1-of-the-image"}))
    host.put(f"{STATE}/caches/{VOLUME}/home%runner%.cache/marker", "another instance")
    host.put(f"{STATE}/sandboxes/number", "7")
    host.put(f"{STATE}/dead-man", f"{BOOT_TIMER}\n")
    host.put(f"{STATE}/pre-runner.sh", "true\n")
    host.put(f"{STATE}/job-image/etc/passwd", "root:x:0:0::/root:/bin/sh\n")
    host.put(f"{STATE}/job-image/etc/group", "root:x:0:\ndocker:x:5:\n")
    host.put("/opt/remuda/runner/.env", "LANG=C.UTF-8\n")
