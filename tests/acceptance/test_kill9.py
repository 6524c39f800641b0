"""kill -9 of all processes of a kind. Afterwards the pool recovers and leaves no machine or process behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from remuda.fake_github.client import JobStep
from tests.support.local_backend import LIMIT_S, REPO, LocalBackend


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[LocalBackend]:
    backend = LocalBackend(tmp_path / "state")
    await backend.up(idle_time_sec=600, release_time_sec=60)
    try:
        yield backend
    finally:
        await backend.down()


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
        while job.status != "completed":
            before = job.status
            job = await github.job(job.id, wait_s=LIMIT_S, since=before)
            assert job.status != before
        assert job.conclusion == "success"
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
        while job.status != "completed":
            before = job.status
            job = await github.job(job.id, wait_s=LIMIT_S, since=before)
            assert job.status != before
        assert job.conclusion == "success"
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
