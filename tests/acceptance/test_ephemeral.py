"""Machines for one job each through the command line: real processes, real jobs, the local GitHub."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from remuda.githubsim.client import SimClient, SimJob, SimStep
from remuda.githubsim.endpoint import read_endpoint
from support.localbackend import LIMIT_S, REPO, LocalBackend


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[LocalBackend]:
    backend = LocalBackend(tmp_path / "state")
    await backend.up("--idle-time-sec", "600", "--release-time-sec", "60")
    try:
        yield backend
    finally:
        await backend.down()


async def served(github: SimClient, run_id: str) -> SimJob:
    job = await github.queue_job(repo=REPO, run_id=run_id, labels=[run_id], steps=[SimStep(run="echo hello")])
    while job.status != "completed":
        before = job.status
        job = await github.job(job.id, wait_s=LIMIT_S, since=before)
        assert job.status != before, f"job {job.id} stays {before}"
    return job


async def test_one_job_one_machine(backend: LocalBackend) -> None:
    await backend.provision("0")
    await backend.release("0")
    done = await backend.provision("1", 2, "--ephemeral")
    made = done.document
    assert (made["created"], made["reused"], made["ephemeral"]) == (2, 0, True)
    assert (made["tier"], made["tier_reason"]) == ("trusted", "by default: no event started it")
    ids = {item["instance_id"] for item in made["instances"]}
    async with backend.github() as github:
        runners = {runner.name: runner for runner in await github.runners()}
        assert {runner.ephemeral for runner in runners.values()} == {True}
        jobs = [await served(github, "1") for _ in range(2)]
        assert [job.conclusion for job in jobs] == ["success", "success"]
        assert {str(job.runner_name) for job in jobs} == set(runners)
    # They have served, and wait for their release: none of them has failed.
    assert await backend.registrations() == []
    await backend.until(
        lambda: not any(backend.reports()[key]["listening"] for key in ids), "the listeners end by themselves"
    )
    await backend.sweep()
    assert {backend.records()[key]["state"] for key in ids} == {"running"}
    # No record keeps what they were registered with.
    assert {backend.records()[key]["assignment"]["jitConfig"] for key in ids} == {""}
    released = (await backend.release("1")).document
    assert set(released["retired"]) == ids
    assert set(released["reasons"].values()) == {"ephemeral: for one job"}
    async with backend.sweeping():
        await backend.until(lambda: backend.states() == ["idle", "terminated", "terminated"], "they end")
    assert len(backend.machines()) == 1


async def test_without_a_job_no_registration_is_left(backend: LocalBackend) -> None:
    async with backend.github() as github:
        await github.set_fault("status", operation="jitconfig", status=403, times=1)
        await backend.provision("1", 2, "--ephemeral", code=2)
    # The one that was made is gone at once; the machines, which nobody waits for, with the next sweeps.
    assert await backend.registrations() == []

    await backend.provision("2", 1, "--ephemeral")
    assert len(await backend.registrations()) == 1
    released = (await backend.release("2")).document
    assert list(released["reasons"].values()) == ["ephemeral: for one job"]
    assert await backend.registrations() == []

    endpoint = read_endpoint(backend.folder / "github")
    assert endpoint is not None
    backend.environment["REMUDA_GITHUB_TOKEN"] = endpoint.token
    await backend.provision("3", 1, "--ephemeral")
    released = (await backend.release("3")).document
    assert list(released["reasons"].values()) == ["ephemeral: for one job"]
    assert await backend.registrations() == []
    assert any(name.startswith("DELETE") for name in released["calls"]["github"]), released["calls"]
    async with backend.sweeping():
        await backend.until(lambda: set(backend.states()) == {"terminated"}, "all of them end")
    assert backend.machines() == []
