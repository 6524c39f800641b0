"""Runner sets through the command line: jobs without provision and release, on the local backend and on AWS servers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from remuda.fake_github.client import JobStep, JobView, RunnerView
from remuda.fake_github.state import FakeGitHubSettings
from tests.support.aws.ec2_machines import MachineStack
from tests.support.aws.stack import POOL, SCOPE
from tests.support.dashboard import Dashboard
from tests.support.demand import LABELS, MAX, DemandBackend, runner_set
from tests.support.local_backend import LIMIT_S
from tests.support.namespace_machine.requirements import unsupported_reason

INTERRUPTED = 130


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DemandBackend]:
    backend = DemandBackend(tmp_path_factory.mktemp("demand") / "state")
    asyncio.run(backend.up_with_sets(runner_set()))
    try:
        yield backend
    finally:
        asyncio.run(backend.down())


@pytest.fixture
async def backend(running: DemandBackend) -> AsyncIterator[DemandBackend]:
    """The backend of the file, which each test leaves without machines in use, registrations and open provisions."""
    yield running
    await running.configure(runner_set())
    await running.until_quiet()


async def run_workflow(backend: DemandBackend, file: str, run_id: str, *more: str, code: int = 0) -> dict[str, Any]:
    result = await backend.run("run-workflow", file, "--run-id", run_id, *more, code=code)
    document: dict[str, Any] = result.document
    return document


def is_listening(runners: Sequence[RunnerView]) -> bool:
    return [runner.state for runner in runners] == ["idle"]


async def test_burst_creates_machines_that_the_next_run_reuses(backend: DemandBackend) -> None:
    file = backend.workflow("burst", shards=MAX, step="sleep 1")
    cold = (await run_workflow(backend, file, "1"))["jobs"]
    assert {job["conclusion"] for job in cold} == {"success"}
    assert len({job["instance_id"] for job in cold}) == MAX
    assert {job["runner_set"] for job in cold} == {"large"}
    await backend.until_quiet()
    assert backend.states() == ["idle"] * MAX
    warm = (await run_workflow(backend, file, "2"))["jobs"]
    assert {job["instance_id"] for job in warm} == {job["instance_id"] for job in cold}
    await backend.until_quiet()
    assert {item["uses"] for item in backend.records().values()} == {2}


async def test_failed_jobs_are_run_again_with_a_new_attempt(backend: DemandBackend) -> None:
    step = 'test "${{ matrix.shard }}-${{ github.run_attempt }}" != 2-1'
    file = backend.workflow("flaky", shards=2, step=step)
    failed = await run_workflow(backend, file, "10", code=1)
    first = failed["jobs"]
    assert [job["conclusion"] for job in first] == ["success", "failure"]
    assert failed["fix"].startswith("run the failed jobs again: remuda run-workflow")
    assert failed["fix"].endswith("--rerun-failed")
    again = await run_workflow(backend, file, "10", "--rerun-failed")
    assert (again["run_id"], again["run_attempt"], again["conclusion"]) == ("10", 2, "success")
    assert [bool(job["job_id"]) for job in again["jobs"]] == [False, True]
    assert again["jobs"][1]["job_id"] != first[1]["job_id"]
    refused = await backend.run("run-workflow", file, "--rerun-failed", code=2)
    assert refused.document["error"]["message"] == "run 10 has no failed job"


async def test_hot_runner_listens_before_a_job_comes(backend: DemandBackend) -> None:
    await backend.configure(runner_set(windows=[{"hot": 1}]))
    (before,) = await backend.watch_runners(is_listening, "a runner listens")
    job = await backend.wait_for(await backend.queue("20"))
    assert (job.conclusion, job.runner_name) == ("success", before.name)
    (after,) = await backend.watch_runners(is_listening, "another runner listens")
    assert after.name != before.name


async def test_interrupted_run_cancels_its_job_and_the_machine_returns(backend: DemandBackend) -> None:
    file = backend.workflow("long", shards=1, step="sleep 600")
    process = await backend.start("run-workflow", file, "--run-id", "30")
    await backend.until(lambda: bool(backend.bound("30")), "the job is bound to a machine")
    (machine,) = backend.bound("30")
    process.send_signal(signal.SIGINT)
    assert (await process.result(LIMIT_S)).code == INTERRUPTED
    await backend.until_quiet()
    assert backend.records()[machine]["state"] == "idle"


async def test_job_that_no_set_serves_is_explained(backend: DemandBackend) -> None:
    file = backend.workflow("gpu", shards=1, step="echo", labels=("self-hosted", "gpu"))
    process = await backend.start("run-workflow", file, "--run-id", "40")
    line = ""
    while "no runner has label gpu" not in line:
        line = (await process.stderr.readline()).decode()
        assert line, "the command has ended"
    assert "queued for self-hosted, gpu" in line
    assert f"sets: large ({', '.join(LABELS)})" in line
    process.send_signal(signal.SIGINT)
    await process.result(LIMIT_S)


async def test_jobs_above_the_maximum_and_jobs_of_no_set_are_shown(backend: DemandBackend) -> None:
    labels = ("self-hosted", "remuda", "single")
    single = runner_set(name="single", labels=list(labels), max=1, strict=False, **{"resource-class": "large"})
    await backend.configure(runner_set(), single)
    gate = backend.folder.parent / "gate"
    first = await backend.queue("80", step=f"until test -e {gate}; do sleep 0.1; done", labels=labels)
    first = await backend.wait_for(first, "in_progress")
    waiting = [await backend.queue("81", labels=labels) for _ in range(3)]
    gpu = await backend.queue("82", labels=("self-hosted", "gpu"))

    # GitHub sends no message about these jobs.
    found = await until_shown(backend, "single", "3 wait: at max 1")
    assert (found["waiting"], found["assigned"], found["at_capacity"]) == (3, 1, True)
    assert (found["reason"], found["counts_current"]) == ("at-capacity", True)
    assert (await backend.run("explain", "set.single")).document["next"][0] == "3 wait: at max 1"
    status = await until_status(backend, lambda status: len(status["queued_jobs"]) == 4)
    why = {(job["run_id"], job["runner_set"]): job["detail"] for job in status["queued_jobs"]}
    assert why["81", "single"] == "set single is at max 1"
    assert why["82", ""].startswith("no runner has label gpu; sets: large (")
    for run_id, part in (("81", "set single is at max 1"), ("82", "no runner has label gpu")):
        explained = (await backend.run("explain", run_id)).document["next"]
        assert any(part in line for line in explained), explained
    facts = await asyncio.to_thread(page_facts, backend)
    (shown,) = [item for item in facts["sets"] if item["name"] == "single"]
    assert (shown["waiting"], shown["summary"], shown["current"]) == (3, "3 wait: at max 1", True)
    assert {job["run"] for job in facts["queued"]} == {"81", "82"}

    gate.touch()
    done = [await backend.wait_for(job) for job in (first, *waiting)]
    assert backend.wrong_runs(done) == []
    await backend.cancel(gpu)
    await until_shown(backend, "single", "no job waits")


async def until_shown(backend: DemandBackend, name: str, summary: str) -> dict[str, Any]:
    """Wait until `remuda status` says this about a set. Return the set."""

    def find(status: dict[str, Any]) -> list[dict[str, Any]]:
        return [item for item in status["runner_sets"] if (item["name"], item["summary"]) == (name, summary)]

    return find(await until_status(backend, lambda status: bool(find(status))))[0]


async def until_status(backend: DemandBackend, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async with asyncio.timeout(LIMIT_S):
        while True:
            status: dict[str, Any] = (await backend.run("status", code=None)).document
            if condition(status):
                return status


def page_facts(backend: DemandBackend) -> dict[str, Any]:
    """What the dashboard's page gets."""
    with Dashboard(backend.folder) as dashboard:
        answer = httpx.get(f"{dashboard.url.rstrip('/')}/api/snapshot", timeout=LIMIT_S, trust_env=False)
        facts: dict[str, Any] = answer.raise_for_status().json()["facts"]
        return facts


@pytest.mark.parametrize("victim", ["listener", "github", "agent"])
async def test_job_survives_the_death_of(backend: DemandBackend, victim: str) -> None:
    jobs = [await backend.wait_for(await backend.queue("50", step="sleep 2"), "in_progress") for _ in range(2)]
    if victim == "agent":
        machine = "i-" + str(jobs[0].runner_name).rpartition("-i-")[2]
        os.kill(backend.agent(machine) or 0, signal.SIGKILL)
    else:
        killed = backend.kill(victim)
        if victim == "github":
            await backend.run("up")
        await backend.restarted(victim, killed)
    jobs.append(await backend.queue("51"))
    done = [await backend.wait_for(job) for job in jobs]
    assert backend.wrong_runs(done) == []
    assert {job.conclusion for job in done} == {"success"}
    assert backend.twice_used_epochs(done) == []


async def test_lost_job_is_shown_and_gets_no_other_instance(backend: DemandBackend) -> None:
    job = await backend.wait_for(await backend.queue("80", step="sleep 600"), "in_progress")
    await backend.until(lambda: bool(backend.bound("80")), "the job is bound to an instance")
    (lost,) = backend.bound("80")
    epochs = {key: item["epoch"] for key, item in backend.records().items()}
    # All at once, as by a power failure: a runner that is told to stop would end its job.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in backend.processes(lost):
            os.kill(pid, number)
    warning = await lost_instance_warning(backend)
    assert warning["text"].startswith(f"job {job.name} of run 80 at ")
    assert f"instance lost: {lost} has ended: " in warning["text"]
    (shown,) = (item for item in (await backend.run("status")).document["jobs"] if item["job_id"] == warning["subject"])
    assert (shown["lost_at"] is not None, shown["completed_at"]) == (True, None)
    explanation = (await backend.run("explain", warning["subject"])).document
    assert f"instance lost: {lost} has ended: " in explanation["title"]
    assert f"job {job.name} lost its instance" in [event["what"] for event in explanation["events"]]

    async with backend.github() as github:
        await github.change_settings(lease_s=1)
        job = await backend.wait_for(job)
        await github.change_settings(lease_s=FakeGitHubSettings().lease_s)
    assert job.conclusion == "failure"
    await backend.until_quiet()
    assert {key: item["epoch"] for key, item in backend.records().items()} == epochs
    explanation = (await backend.run("explain", warning["subject"])).document
    assert ", instance lost: " in explanation["title"]
    assert [event["why"][:14] for event in explanation["events"] if event["what"].endswith("ended: failed")] == [
        "instance lost:"
    ]


async def lost_instance_warning(backend: DemandBackend) -> dict[str, str]:
    async with asyncio.timeout(LIMIT_S):
        while True:
            warnings: list[dict[str, str]] = (await backend.run("status")).document["warnings"]
            if found := [item for item in warnings if item["kind"] == "lost-instance"]:
                return found[0]


async def test_removed_set_is_drained_and_deleted(backend: DemandBackend) -> None:
    job = await backend.wait_for(await backend.queue("60", step="sleep 2"), "in_progress")
    await backend.configure()
    assert (await backend.wait_for(job)).conclusion == "success"
    await backend.watch_scale_sets(lambda found: not found, "the set is deleted")
    await backend.until(lambda: not (backend.folder / "listener.json").exists(), "the listener is stopped")
    # With the set, it is started again.
    await backend.configure(runner_set())
    assert (await backend.wait_for(await backend.queue("61"))).conclusion == "success"


async def test_stopped_listener_ends_its_session_and_status_reports_it(backend: DemandBackend) -> None:
    await backend.watch_scale_sets(lambda found: any(item.session_owner for item in found), "a session is open")
    killed = backend.kill("listener", signal.SIGTERM)
    await backend.watch_scale_sets(lambda found: not any(item.session_owner for item in found), "it is closed")
    assert "the listener is not running; run remuda up --dir" in (await backend.run("status")).stderr
    assert "listener" in (await backend.run("up")).document["started"]
    await backend.restarted("listener", killed)
    assert (await backend.wait_for(await backend.queue("70"))).conclusion == "success"


def test_invalid_sets_are_rejected(running: DemandBackend) -> None:
    bad = {"REMUDA_RUNNER_SETS": json.dumps([runner_set(**{"resource-class": "huge"})])}
    result = asyncio.run(running.run("refresh", code=2, settings={"runner_sets": bad["REMUDA_RUNNER_SETS"]}))
    error = result.document["error"]
    assert error["field"] == "REMUDA_RUNNER_SETS"
    assert "resource-class of 'large' is 'huge'" in error["message"]


# AWS ------------------------------------------------------------------------------------------------------------------

AWS_SETTINGS = {"REMUDA_RUNNER_SETS": json.dumps([runner_set(max=2)]), "REMUDA_MARGIN_SEC": "0.5"}


@asynccontextmanager
async def listening(stack: MachineStack) -> AsyncIterator[None]:
    """Run the installed command, as the service on the listener's instance does."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "remuda", "listen", "--pool", POOL),
        env=stack.stack.environment(),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    reading = asyncio.create_task(process.communicate())
    try:
        yield
        assert process.returncode is None, (await reading)[1].decode()
    finally:
        if process.returncode is None:
            process.terminate()
        _, log = await reading
        sys.stderr.write(log.decode())


async def run_jobs(stack: MachineStack, run_id: str, *steps: str) -> list[JobView]:
    async with stack.github() as github:
        for step in steps:
            await github.queue_job(repo=SCOPE, run_id=run_id, labels=LABELS, name=step, steps=[JobStep(run=step)])
        return await finish_jobs(stack, run_id)


async def finish_jobs(stack: MachineStack, run_id: str) -> list[JobView]:
    async with stack.github() as github, asyncio.timeout(LIMIT_S):
        jobs = await github.jobs(run_id=run_id)
        while waiting := [job for job in jobs if job.status != "completed"]:
            await github.job(waiting[0].id, wait_s=5, since=waiting[0].status)
            jobs = await github.jobs(run_id=run_id)
        return jobs


def machines_of(jobs: Sequence[JobView]) -> set[str]:
    return {"i-" + str(job.runner_name).rpartition("-i-")[2] for job in jobs}


async def until_idle(stack: MachineStack, machines: set[str]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while True:
            found = (await stack.remuda("status"))["instances"]
            if {item["instance_id"] for item in found if item["state"] == "idle"} == machines:
                return


@pytest.mark.timeout(600)
@pytest.mark.namespaces
@pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason())
async def test_burst_reuse_and_rerun_on_aws(machine_stack: MachineStack) -> None:
    await machine_stack.refresh(**AWS_SETTINGS)
    async with machine_stack.booting(), listening(machine_stack):
        cold = await run_jobs(machine_stack, "1", "sleep 2", "sleep 2 ")
        assert {job.conclusion for job in cold} == {"success"}, machine_stack.consoles()
        machines = machines_of(cold)
        assert machines == set(machine_stack.machines)
        assert len(machines) == 2
        await until_idle(machine_stack, machines)

        failing = 'test "$GITHUB_RUN_ATTEMPT" != 1'
        first = await run_jobs(machine_stack, "2", "true", failing)
        assert {job.name: job.conclusion for job in first} == {"true": "success", failing: "failure"}
        async with machine_stack.github() as github:
            await github.rerun_failed_jobs(repo=SCOPE, run_id="2")
        (again,) = [job for job in await finish_jobs(machine_stack, "2") if job.run_attempt == 2]
        assert (again.name, again.conclusion) == (failing, "success"), again.log
        assert machines_of([*first, again]) <= machines, "all jobs reuse the machines"
        await until_idle(machine_stack, machines)
        async with machine_stack.github() as github:
            assert await github.runners() == []
    async with machine_stack.github() as github:
        assert [item.session_owner for item in await github.scale_sets()] == [""]
