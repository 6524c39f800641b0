"""The agent of a machine of a runner set, as real processes: one registration per job, kills, no credential left."""

# The tests wait for other processes.
# ruff: noqa: ASYNC110

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from remuda import procfs
from remuda.adapters.local import folder as files
from remuda.adapters.local.compute import LocalCompute
from remuda.adapters.local.layout import LocalLayout
from remuda.adapters.sqlite.store import SqliteInstanceStore
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.domain.holder import set_subject
from remuda.domain.instance import Actor, Assignment, Instance, State
from remuda.domain.resources import Tier, UsageClass
from remuda.domain.signals import Report, Signal
from remuda.domain.transitions import (
    Bind,
    Claim,
    End,
    Equip,
    Event,
    Release,
    RetireReason,
    ReturnToPool,
    advance,
    create,
)
from remuda.fake_github import install_runner
from remuda.fake_github.client import FakeGitHubClient, JobStep
from remuda.ports.calls import CallCounter
from remuda.ports.compute import MachineState
from tests.support.aws.servers import fake_github
from tests.support.records import launch_request, set_holder

LONG_S = 90.0
SET = "large"
LABELS = ("self-hosted", "large")
CLAIM = "p-1/a"
CLEAN = Signal.UD_REMOVE_REG_REMOVE_RUN_OK


class GitHubWithJit(FakeGitHubClient):
    @property
    def repository(self) -> str:
        return str(self._http.base_url.join("/o/r"))

    async def register(self, name: str) -> tuple[int, str]:
        body = {"name": name, "runner_group_id": 1, "labels": list(LABELS)}
        answer = (await self._http.post("/repos/o/r/actions/runners/generate-jitconfig", json=body)).raise_for_status()
        return answer.json()["runner"]["id"], answer.json()["encoded_jit_config"]

    async def unregister(self, runner_id: int) -> None:
        (await self._http.delete(f"/repos/o/r/actions/runners/{runner_id}")).raise_for_status()


@dataclass(kw_only=True)
class MachineOfSet:
    """One machine with the product's own agent. The test is its control plane."""

    root: Path
    store: SqliteInstanceStore
    compute: LocalCompute
    github: GitHubWithJit
    instance_id: str = ""

    @property
    def folder(self) -> Path:
        return LocalLayout(self.root).instances / self.instance_id

    async def launch(self) -> None:
        await self.compute.prepare({})
        result = await self.compute.launch(launch_request("token", first_life_s=600.0))
        self.instance_id = result.instances[0].instance_id
        now = SystemClock().now()
        record = Instance(
            instance_id=self.instance_id,
            state=State.CREATED,
            epoch=1,
            threshold=now + timedelta(seconds=600),
            resource_class="large",
            instance_type="local",
            usage_class=UsageClass.ON_DEMAND,
            cpu=2,
            memory_mib=4_096,
            created_at=now,
            holder=set_holder(SET),
            claim=CLAIM,
            scope="o/r",
            assignment=self.assignment(1),
        )
        await self.store.apply(create(record, by=Actor.LISTENER, why="a test"))

    def assignment(self, epoch: int) -> Assignment:
        name = f"remuda-test-{epoch}-{self.instance_id}"
        return Assignment(url=self.github.repository, runner_name=name, labels=LABELS)

    async def record(self) -> Instance:
        found = await self.store.get(self.instance_id)
        assert found is not None
        return found

    async def apply(self, event: Event) -> Instance:
        record = await self.record()
        now = SystemClock().now()
        return await self.store.apply(advance(record, event, by=Actor.LISTENER, now=now, why="a test"))

    async def report(self, wanted: Callable[[Report], bool]) -> Report:
        """Wait for such a report."""
        found: Report | None = None
        async with asyncio.timeout(LONG_S):
            while found is None or not wanted(found):
                found = await self.store.wait_for_report(self.instance_id, found, LONG_S)
        return found

    async def signal(self, signal_: Signal, epoch: int) -> Report:
        return await self.report(lambda report: (report.signal, report.epoch) == (signal_, epoch))

    async def kill_agent(self) -> None:
        """Kill the agent. Return when the next one beats."""
        supervisor = files.supervisor(str(self.folder))
        assert supervisor is not None
        agents = [each.pid for each in procfs.descendants(supervisor[0]) if "agent" in procfs.command(each.pid)]
        assert agents, "it runs"
        for pid in agents:
            os.kill(pid, signal.SIGKILL)
        before = (await self.store.get_report(self.instance_id)) or Report(instance_id=self.instance_id)
        await self.report(lambda report: report.beat > before.beat)

    async def claim(self) -> int:
        record = await self.record()
        epoch = record.epoch + 1
        await self.apply(
            Claim(
                holder=set_holder(SET),
                claim=CLAIM,
                scope="o/r",
                tier=Tier.TRUSTED,
                threshold=SystemClock().now() + timedelta(seconds=600),
                assignment=self.assignment(epoch),
                margin_s=1.0,
            )
        )
        await self.signal(Signal.UD_OK, epoch)
        return epoch

    async def equip(self, jit_config: str = "") -> tuple[int, str]:
        record = await self.record()
        assert record.assignment is not None
        runner_id, config = await self.github.register(record.assignment.runner_name)
        await self.apply(
            Equip(
                claim=CLAIM,
                report=await self.store.get_report(self.instance_id),
                jit_config=jit_config or config,
                runner_id=runner_id,
                listening_time_s=600.0,
                max_runtime_s=600.0,
            )
        )
        return runner_id, config

    async def queue(self, run_id: str, *commands: str) -> Any:
        steps = [JobStep(run=each) for each in commands]
        return await self.github.queue_job(repo="o/r", run_id=run_id, labels=list(LABELS), steps=steps)

    async def bind(self, run_id: str) -> None:
        record = await self.record()
        assert record.assignment is not None
        await self.apply(
            Bind(
                runner_name=record.assignment.runner_name,
                run_id=run_id,
                repository="o/r",
                tier=Tier.TRUSTED,
                set_tier=Tier.TRUSTED,
                max_runtime_s=600.0,
                margin_s=1.0,
            )
        )

    async def release(self, *, kill: bool = False) -> None:
        epoch = (await self.record()).epoch
        await self.apply(Release(release_time_s=300.0, credential=None, deregistered=True))
        if kill:
            await self.kill_agent()
        report = await self.signal(CLEAN, epoch)
        await self.apply(ReturnToPool(report=report, idle_time_s=600.0))

    async def remuda(self, *arguments: str) -> str:
        """Output of a command about this pool, whatever its result."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "remuda", *arguments, "--json", "--dir", str(self.root)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        return output.decode()

    def processes(self) -> list[str]:
        """Command lines of all processes of the machine."""
        supervisor = files.supervisor(str(self.folder))
        assert supervisor is not None
        return [" ".join(procfs.command(each.pid)) for each in procfs.descendants(supervisor[0])]

    async def has_ended(self) -> bool:
        view = (await self.compute.describe([self.instance_id]))[self.instance_id]
        return view.state is MachineState.TERMINATED

    def files_with(self, text: str) -> list[Path]:
        """Files of the machine that contain the text."""
        return [
            path.relative_to(self.folder)
            for path in self.folder.rglob("*")
            if path.is_file() and not path.is_symlink() and text.encode() in path.read_bytes()
        ]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LONG_S):
        while not await condition():
            await asyncio.sleep(0.02)


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[MachineOfSet]:
    # A short path, because socket paths are limited in length.
    root = Path(tempfile.mkdtemp(prefix="remuda-"))
    places = LocalLayout(root)
    install_runner(places.runner)
    store = SqliteInstanceStore(path=places.database, clock=SystemClock(), ids=SystemIds(), calls=CallCounter())
    await store.prepare()
    compute = LocalCompute(
        root=places.instances,
        pool="test",
        runner_source=places.runner,
        agent_command=[sys.executable, "-m", "remuda", "agent", "--dir", str(root)],
        clock=SystemClock(),
        ids=SystemIds(),
        calls=CallCounter(),
        environment={"PATH": os.environ["PATH"]},
    )
    with fake_github(tmp_path / "github") as endpoint:
        async with GitHubWithJit(endpoint.url, endpoint.token) as github:
            made = MachineOfSet(root=root, store=store, compute=compute, github=github)
            await made.launch()
            yield made
            await compute.terminate([made.instance_id])
            await until(made.has_ended)
    await store.close()
    shutil.rmtree(root)


async def test_each_job_has_a_registration_of_its_own(machine: MachineOfSet) -> None:
    """Two jobs with a reset between them. The agent is killed in every state."""
    await machine.signal(Signal.UD_OK, 1)
    await machine.kill_agent()
    _, config = await machine.equip()
    await machine.report(lambda report: report.listening and report.signal is Signal.UD_REG_OK)
    await machine.kill_agent()
    await machine.report(lambda report: report.listening)
    assert machine.files_with(config) == [], "the configuration is nowhere on the machine's disk before its job"
    record = await machine.record()
    assert record.assignment is not None
    assert record.assignment.jit_config == config, "the record has it until the job is known"
    for command in (("status",), ("explain", machine.instance_id), ("explain", set_subject(SET)), ("report",)):
        shown = await machine.remuda(*command)
        assert config not in shown
        assert config[:40] not in shown
    assert not [each for each in machine.processes() if config in each]

    job = await machine.queue("71", "env; touch $HOME/left-behind; mkfifo $HOME/go; read x < $HOME/go")
    await machine.report(lambda report: report.busy)
    await machine.kill_agent()
    await machine.report(lambda report: report.busy)
    await machine.bind("71")
    record = await machine.record()
    assert record.assignment is not None
    assert record.assignment.jit_config == ""
    go = machine.folder / "home" / "go"
    await until(lambda: asyncio.to_thread(go.exists))
    await asyncio.to_thread(go.write_text, "on\n")
    report = await machine.report(lambda report: report.spent_epoch == 1)
    assert (report.busy, report.listening, report.signal) == (False, False, Signal.UD_REG_OK)
    await machine.kill_agent()
    await machine.report(lambda report: report.spent_epoch == 1)
    done = await machine.github.job(job.id)
    assert done.conclusion == "success", done.log
    assert config not in done.log
    assert await machine.github.runners() == []

    await machine.release(kill=True)
    assert not (machine.folder / "home" / "left-behind").exists()
    assert await machine.claim() == 2
    _, second = await machine.equip()
    assert second != config
    await machine.report(lambda report: report.listening)
    job = await machine.queue("72", "pwd")
    await machine.report(lambda report: report.spent_epoch == 2)
    done = await machine.github.job(job.id)
    assert done.conclusion == "success"
    assert f"{machine.folder}/work/r/r\n" in done.log, "the work folder of all registrations"
    await machine.bind("72")
    await machine.release()
    record = await machine.record()
    assert (record.state, record.uses, record.assignment) == (State.IDLE, 2, None)
    assert machine.files_with(config) == machine.files_with(second) == []


def no_faults(github: GitHubWithJit) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        return not await github.faults()

    return check


async def test_registrations_that_never_get_a_job(machine: MachineOfSet) -> None:
    await machine.signal(Signal.UD_OK, 1)
    runner_id, _ = await machine.equip()
    await machine.report(lambda report: report.listening)
    await machine.github.unregister(runner_id)
    report = await machine.report(lambda report: not report.listening)
    await machine.report(lambda later: later.beat > report.beat + 1)
    report = await machine.report(lambda _: True)
    assert (report.signal, report.spent_epoch) == (Signal.UD_REG_OK, 0), "unused, not failed, and no job"
    await machine.release()

    assert await machine.claim() == 2
    runner_id, _ = await machine.equip()
    await machine.report(lambda report: report.listening)
    await machine.github.set_fault("delay", operation="runner.acknowledge", seconds=LONG_S)
    job = await machine.queue("73", "true")
    await until(no_faults(machine.github))
    await machine.github.cancel_job(job.id)
    await machine.github.clear_faults()
    report = await machine.report(lambda report: not report.listening)
    await machine.report(lambda later: later.beat > report.beat + 1)
    report = await machine.report(lambda _: True)
    assert (report.signal, report.spent_epoch) == (Signal.UD_REG_OK, 0), "it has not served the job that was withdrawn"
    await machine.github.unregister(runner_id)
    await machine.release()

    assert await machine.claim() == 3
    await machine.equip(jit_config="bm90IGEgY29uZmlndXJhdGlvbg==")
    report = await machine.signal(Signal.UD_REG_FAILED, 3)
    assert "exited" in report.detail
    await machine.apply(End(reason=RetireReason.FAILED, report=report))
