"""Processes killed with SIGKILL at chosen calls, or all of a kind: the pool recovers, and nothing is left behind.

All crash points share one local backend and run in parallel, each with its own resource class, so that none claims the
instances of another.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from remuda.fake_github.client import JobStep
from tests.support.cli import CommandResult
from tests.support.local_backend import LIMIT_S, REPO, LocalBackend, wait_for_job

KILLED = -9
#: Timeout of a provision that is killed: long enough to reach its crash point, short enough to wait for.
KILLED_TIMEOUT_S = 15
#: The same for crash points after a registration. They run first, because they take longest.
REGISTERED_TIMEOUT_S = 30
#: Crash points that run in parallel.
AT_ONCE = 3
#: The first test waits for the whole results.
pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True, kw_only=True)
class CrashPoint:
    name: str
    crash: str = ""
    agent_crash: str = ""
    #: Idle instances before the run.
    idle: int = 0
    #: Requested instances.
    count: int = 1
    #: The killed command.
    command: str = "provision"
    #: Whether a job is queued for the run.
    job: bool = False
    #: States of its instances right after the kill.
    leaves: tuple[str, ...] = ()
    #: Alternative states: writes are concurrent, so the next one may have been applied as well.
    or_leaves: tuple[str, ...] | None = None
    timeout_s: float = KILLED_TIMEOUT_S

    @property
    def run_id(self) -> str:
        return f"run-{self.name}"


#: Crash points after a registration.
REGISTERED = (
    CrashPoint(name="signal", crash="store.wait_for_report:2:after", leaves=("created",)),
    CrashPoint(
        name="first-running",
        crash="store.apply:3:after",
        count=2,
        leaves=("created", "running"),
        or_leaves=("running", "running"),
    ),
    CrashPoint(name="before-commit", crash="store.replace_provision:1:before", count=2, leaves=("running", "running")),
    CrashPoint(name="delete-message", crash="pool.delete:1:after", idle=1, leaves=("claimed",)),
    CrashPoint(name="commit", crash="store.replace_provision:1:after", leaves=("running",)),
)
PROVISION = (
    *(replace(point, timeout_s=REGISTERED_TIMEOUT_S) for point in REGISTERED),
    CrashPoint(name="intent", crash="store.put_provision:1:after", leaves=()),
    CrashPoint(name="receive", crash="pool.receive:1:after", idle=1, leaves=("idle",)),
    CrashPoint(name="claim", crash="store.apply:1:after", idle=1, leaves=("claimed",)),
    CrashPoint(
        name="claim-of-two",
        crash="store.apply:1:after",
        idle=2,
        count=2,
        leaves=("claimed", "idle"),
        or_leaves=("claimed", "claimed"),
    ),
    CrashPoint(name="before-launch", crash="compute.launch:1:before", leaves=()),
    CrashPoint(name="launch", crash="compute.launch:1:after", count=2, leaves=()),
    CrashPoint(
        name="record-ids", crash="store.apply:1:after", count=2, leaves=("created",), or_leaves=("created", "created")
    ),
)
RELEASE = (
    CrashPoint(name="mark", command="release", crash="store.replace_provision:1:after", leaves=("running",)),
    CrashPoint(name="releasing", command="release", crash="store.apply:1:after", leaves=("releasing",)),
    CrashPoint(name="idle", command="release", crash="store.apply:2:after", leaves=("idle",)),
    CrashPoint(name="announce", command="release", crash="pool.send:1:after", leaves=("idle",)),
)
AGENT = (
    CrashPoint(name="register", agent_crash="runner.register:1:before"),
    CrashPoint(name="registered", agent_crash="runner.register:1:after"),
    CrashPoint(name="listening", agent_crash="runner.start:1:after", job=True),
    CrashPoint(name="job", agent_crash="store.beat?busy=True:1:after", job=True),
    CrashPoint(name="deregistered", agent_crash="runner.remove:1:after"),
    CrashPoint(name="reset", agent_crash="machine.reset:1:before"),
    CrashPoint(name="clean", agent_crash="machine.reset:1:after"),
)
#: Crash points of refresh, one after the other, on everything that the other crash points left.
REFRESH = ("store.apply:1:after", "compute.terminate:1:before", "compute.terminate:1:after", "store.apply_all:1:before")


@dataclass
class CrashResults:
    """Results by the name of the crash point."""

    backend: LocalBackend
    killed: dict[str, CommandResult] = field(default_factory=dict)
    left: dict[str, list[str]] = field(default_factory=dict)
    released: dict[str, CommandResult] = field(default_factory=dict)
    jobs: dict[str, str | None] = field(default_factory=dict)
    sweeps: dict[str, int] = field(default_factory=dict)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashResults]:
    backend = LocalBackend(tmp_path_factory.mktemp("crash") / "state")
    results = CrashResults(backend)
    with asyncio.Runner() as runner:
        try:
            runner.run(_run_all(results, tmp_path_factory.mktemp("marks")))
            yield results
        finally:
            runner.run(backend.down())


async def _run_all(results: CrashResults, marks: Path) -> None:
    points = (*PROVISION, *RELEASE, *AGENT)
    names = [point.name for point in points] + ["old"]
    classes = {name: {"cpu": 2, "mmem": 4096} for name in names}
    await results.backend.up(idle_time_sec=1800, release_time_sec=600, resource_class_config=json.dumps(classes))
    limit = asyncio.Semaphore(AT_ONCE)

    async def run(point: CrashPoint) -> None:
        async with limit:
            folder = marks / point.name
            folder.mkdir()
            await (_kill_agent if point.agent_crash else _kill_command)(results, point, folder)

    async with asyncio.TaskGroup() as group:
        for point in points:
            group.create_task(run(point))
    await results.backend.provision("run-old", 2, "--resource-class", "old", "--max-runtime-min", "0.05")
    await results.backend.until(lambda: len(results.backend.machines()) > 0, "machines")
    for crash in REFRESH:
        results.sweeps[crash] = await _sweep_until_killed(results.backend, crash)
    # Before the sweeps: the workflow can release a run whose provision died right after its commit.
    results.released["commit"] = await results.backend.release("run-commit")
    async with results.backend.sweeping():
        await results.backend.until(
            lambda: (
                not any(
                    item["status"] == "open" for point in points for item in results.backend.provisions(point.run_id)
                )
            ),
            "no provision open",
        )
        await results.backend.until_settled(states=("idle", "terminated"))
        await results.backend.until(lambda: not _stale_messages(results.backend), "no stale pool messages")
        # A sweep publishes an instance a moment after it updates the record.
        await results.backend.until(
            lambda: _announced(results.backend) == _idle(results.backend), "a pool message per idle instance"
        )
    # The last sweep may have received messages, which are then hidden for a while.
    await results.backend.until(lambda: not results.backend.hidden_pool_messages(), "no hidden pool messages")


async def _sweep_until_killed(backend: LocalBackend, crash: str) -> int:
    """Repeat sweeps, because the crash point may be reached only after machines have ended."""
    code, limit = 0, time.monotonic() + LIMIT_S
    while code != KILLED and time.monotonic() < limit:
        code = (await backend.sweep(crash=crash, code=None)).code
    return code


async def _kill_command(results: CrashResults, point: CrashPoint, _marks: Path) -> None:
    backend, name = results.backend, point.name
    if point.idle:
        await backend.provision(f"{name}-before", point.idle, "--resource-class", name)
        await backend.release(f"{name}-before")
    if point.command == "release":
        await backend.provision(point.run_id, point.count, "--resource-class", name)
        results.killed[name] = await backend.release(point.run_id, crash=point.crash, code=None)
    else:
        more = ("--resource-class", name, "--provision-timeout-sec", f"{point.timeout_s:g}")
        results.killed[name] = await backend.provision(point.run_id, point.count, *more, crash=point.crash, code=None)
    results.left[name] = backend.states(name)


async def _kill_agent(results: CrashResults, point: CrashPoint, marks: Path) -> None:
    backend, name = results.backend, point.name
    await backend.provision(point.run_id, 1, "--resource-class", name, agent_crash=point.agent_crash, once=marks)
    if point.job:
        async with backend.github() as github:
            # The job runs until the agent was killed, because a slow agent might miss a short job.
            step = JobStep(run=f'until [ "$(ls {marks})" ]; do sleep 0.1; done; echo done')
            job = await github.queue_job(repo=REPO, run_id=point.run_id, labels=[point.run_id], steps=[step])
            while job.status != "completed":
                before = job.status
                job = await github.job(job.id, wait_s=LIMIT_S, since=before)
                assert job.status != before, "the job does not end"
            results.jobs[name] = job.conclusion
    results.released[name] = await backend.release(point.run_id, code=None)
    assert _is_marked(marks), f"no agent was killed at {point.agent_crash}"


def _is_marked(folder: Path) -> bool:
    return any(folder.iterdir())


def _stale_messages(backend: LocalBackend) -> list[Any]:
    records = backend.records()
    return [
        message
        for message in backend.pool_messages()
        if (record := records.get(message["id"])) is None
        or (record["state"], record["epoch"]) != ("idle", message["epoch"])
    ]


def _idle(backend: LocalBackend) -> set[str]:
    return {key for key, item in backend.records().items() if item["state"] == "idle"}


def _announced(backend: LocalBackend) -> set[str]:
    return {message["id"] for message in backend.pool_messages()}


@pytest.mark.parametrize("point", [*PROVISION, *RELEASE], ids=lambda point: f"{point.command}-{point.name}")
def test_killed_command_is_cleaned_up(results: CrashResults, point: CrashPoint) -> None:
    assert results.killed[point.name].code == KILLED
    assert results.left[point.name] in [sorted(point.leaves), sorted(point.or_leaves or point.leaves)]
    assert set(results.backend.states(point.name)) <= {"idle", "terminated"}
    assert {item["status"] for item in results.backend.provisions(point.run_id)} <= {"released"}


@pytest.mark.parametrize("point", AGENT, ids=lambda point: f"agent-{point.name}")
def test_machine_of_a_killed_agent_returns_to_the_pool(results: CrashResults, point: CrashPoint) -> None:
    released = results.released[point.name]
    assert (released.code, len(released.document["released"])) == (0, 1), released
    assert results.backend.states(point.name) == ["idle"]
    if point.job:
        assert results.jobs[point.name] == "success"


@pytest.mark.parametrize("crash", REFRESH)
def test_killed_refresh_is_completed_by_the_next(results: CrashResults, crash: str) -> None:
    assert results.sweeps[crash] == KILLED
    assert results.backend.states("old") == ["terminated", "terminated"]


def test_run_whose_provision_died_after_its_commit_can_be_released(results: CrashResults) -> None:
    """The process died before it could report the commit; the release finds the record."""
    assert len(results.released["commit"].document["released"]) == 1


def test_idle_instances_survive_crashes_before_and_after_their_use(results: CrashResults) -> None:
    for name in ("receive", "mark", "releasing", "idle", "announce", "commit"):
        assert results.backend.states(name) == ["idle"], name


def test_nothing_unexpected_is_left(results: CrashResults) -> None:
    backend = results.backend
    idle = _idle(backend)
    assert set(backend.machines()) == idle
    assert not asyncio.run(backend.registrations())
    assert not _stale_messages(backend)
    assert _announced(backend) == idle
    for instance_id in idle:
        assert len(backend.processes(instance_id)) == 2, "a supervisor and an agent"


def test_idle_instances_serve_the_next_run(results: CrashResults) -> None:
    names = ("idle", "announce", "receive")

    async def provision() -> list[CommandResult]:
        return await asyncio.gather(
            *(results.backend.provision(f"{name}-next", 1, "--resource-class", name) for name in names)
        )

    documents = [done.document for done in asyncio.run(provision())]
    assert [document["reused"] for document in documents] == [1, 1, 1], documents


# All processes of a kind ----------------------------------------------------------------------------------------------


@pytest.fixture
async def backend(backend: LocalBackend) -> LocalBackend:
    await backend.up(idle_time_sec=600, release_time_sec=60)
    return backend


def kill(pids: list[int | None]) -> None:
    for pid in pids:
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


async def one_idle_two_running(backend: LocalBackend) -> tuple[str, set[str]]:
    await backend.provision("0", 1)
    await backend.release("0")
    (idle,) = backend.records()
    running = await backend.provision("1", 2, "--allowed-instance-types", "m*")
    return idle, {item["instance_id"] for item in running.document["instances"]}


async def test_kill_all_supervisors(backend: LocalBackend) -> None:
    """The machines lose power: agents and runners end, and the records follow."""
    await one_idle_two_running(backend)
    async with backend.github() as github:
        job = await github.queue_job(repo=REPO, run_id="1", labels=["1"], steps=[JobStep(run="sleep 1000")])
        await github.job(job.id, wait_s=LIMIT_S, since="queued")
        # The job's result is lost; GitHub frees the runner when the lease expires.
        await github.change_settings(lease_s=1.0)
    kill([backend.supervisor(instance_id) for instance_id in backend.machines()])
    async with backend.sweeping():
        await backend.until_settled()
    assert backend.processes() == []
    after = await backend.provision("2", 1)
    assert after.document["created"] == 1
    assert {message["id"] for message in backend.pool_messages()} == set()


async def test_kill_all_agents(backend: LocalBackend) -> None:
    """The supervisors restart the agents, which continue."""
    idle, running = await one_idle_two_running(backend)
    agents = {instance_id: backend.agent(instance_id) for instance_id in backend.machines()}
    assert set(agents) == {idle, *running}
    kill(list(agents.values()))
    await backend.until(
        lambda: all(backend.agent(key) not in {None, pid} for key, pid in agents.items()), "there are other agents"
    )
    async with backend.github() as github:
        job = await github.queue_job(repo=REPO, run_id="1", labels=["1"], steps=[JobStep(run="echo hello")])
        assert (await wait_for_job(github, job)).conclusion == "success"
    assert len((await backend.release("1")).document["released"]) == 2
    assert (await backend.provision("2", 3)).document["reused"] == 3


async def test_kill_the_fake_github(backend: LocalBackend) -> None:
    """`remuda up` restarts it with the same URL and the same runners."""
    await one_idle_two_running(backend)
    kill([backend.background("github")])
    await backend.until(lambda: backend.background("github") is None, "it is gone")
    swept = await backend.sweep(code=4)
    assert any("runners of" in error for error in swept.document["errors"])
    assert backend.states() == ["idle", "running", "running"]
    await backend.run("up")
    backend.kill_sweeper()
    async with backend.github() as github:
        job = await github.queue_job(repo=REPO, run_id="1", labels=["1"], steps=[JobStep(run="echo hello")])
        assert (await wait_for_job(github, job)).conclusion == "success"
    assert len((await backend.release("1")).document["released"]) == 2
    assert (await backend.sweep()).document["errors"] == []
    assert await backend.registrations() == []


async def test_kill_the_sweeper(backend: LocalBackend) -> None:
    """`remuda up` restarts it, and it completes the pending work."""
    await backend.provision("1", 1, "--max-runtime-min", "0.05")
    assert backend.background("sweeper") is None
    started = await backend.run("up")
    assert started.document["started"] == ["sweeper"]
    assert backend.background("sweeper") is not None
    await backend.until_settled()


async def test_kill_a_provision(backend: LocalBackend) -> None:
    """One warm machine is claimed and one is launched: without an owner, they return to the pool or end."""
    await backend.provision("0", 1)
    await backend.release("0")
    await backend.refresh(idle_time_sec=600, boot_delay_sec=20, gone_after_sec=1)
    arguments = ("--run-id", "1", "--instance-count", "2", "--provision-timeout-sec", "15")
    provisioning = await backend.start("provision", *arguments)
    await backend.until(lambda: backend.states() == ["claimed", "created"], "one is claimed, one is launched")
    provisioning.kill()
    await provisioning.result()
    async with backend.sweeping():
        await backend.until(lambda: backend.provisions("1")[0]["status"] == "released", "it is closed")
        await backend.until_settled(states=("idle", "terminated"))


async def test_kill_all_processes(backend: LocalBackend) -> None:
    """Like a power loss of the computer: only the state folder remains."""
    await one_idle_two_running(backend)
    kill([backend.supervisor(instance_id) for instance_id in backend.machines()])
    kill([backend.background("github")])
    await backend.until(lambda: not backend.background("github"), "GitHub is gone")
    await backend.run("up")
    async with asyncio.timeout(LIMIT_S):
        await backend.until_settled()
    assert (await backend.provision("2", 1)).document["created"] == 1
