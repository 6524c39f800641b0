"""`remuda up` and `remuda down`, and runs through the command line, with real processes and jobs on the fake GitHub."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from remuda import procfs
from remuda.fake_github import install_runner, read_endpoint
from remuda.fake_github.client import FakeGitHubClient, JobStep, JobView
from tests.support.aws.servers import ROOT
from tests.support.local_backend import LIMIT_S, REPO, LocalBackend, run_local, wait_for_job

INTERRUPTED = 130


@pytest.fixture
async def backend(backend: LocalBackend) -> LocalBackend:
    await backend.up(idle_time_sec=600, release_time_sec=60)
    return backend


async def queue(github: FakeGitHubClient, run_id: str, *runs: str) -> JobView:
    steps = [JobStep(run=run) for run in runs or ("echo hello",)]
    return await github.queue_job(repo=REPO, run_id=run_id, labels=[run_id], steps=steps)


def machine_of(job: JobView) -> str:
    assert job.runner_name is not None
    return "i-" + job.runner_name.rpartition("-i-")[2]


async def test_cold_and_warm_provision_and_second_attempt_of_a_run(backend: LocalBackend) -> None:
    cold = (await backend.provision("1", 2)).document
    assert (cold["created"], cold["reused"]) == (2, 0)
    ids = {item["instance_id"] for item in cold["instances"]}
    async with backend.github() as github:
        jobs = [await queue(github, "1") for _ in range(4)]
        jobs = [await wait_for_job(github, job) for job in jobs]
        assert {job.conclusion for job in jobs} == {"success"}
        assert {machine_of(job) for job in jobs} <= ids
        for runner in await github.runners():
            assert set(runner.labels) == {"1", "1/large"}

    released = (await backend.release("1")).document
    assert set(released["released"]) == ids
    assert backend.states() == ["idle", "idle"]
    assert await backend.registrations() == []
    again = (await backend.release("1")).document
    assert (again["released"], set(again["skipped"])) == ([], ids)

    warm = (await backend.provision("1", 2, "--run-attempt", "2")).document
    assert (warm["created"], warm["reused"]) == (0, 2)
    assert {item["instance_id"] for item in warm["instances"]} == ids
    # A late release of the first attempt does not affect the second.
    late = (await backend.release("1", "--run-attempt", "1")).document
    assert (late["released"], backend.states()) == ([], ["running", "running"])
    assert len((await backend.release("1", "--run-attempt", "2")).document["released"]) == 2
    assert {item["uses"] for item in backend.records().values()} == {2}


async def test_jobs_run_on_machines_of_their_run_only(backend: LocalBackend) -> None:
    one, two = await asyncio.gather(backend.provision("run-a", 2), backend.provision("run-b", 1))
    machines = {
        run_id: {item["instance_id"] for item in done.document["instances"]}
        for run_id, done in (("run-a", one), ("run-b", two))
    }
    assert not machines["run-a"] & machines["run-b"]
    async with backend.github() as github:
        jobs = [await queue(github, run_id) for run_id in ("run-a", "run-b") * 4]
        for job in [await wait_for_job(github, job) for job in jobs]:
            assert job.conclusion == "success"
            assert machine_of(job) in machines[job.run_id]
        # The machines change runs; jobs still run on the machines of their run.
        await backend.release("run-a")
        stray = await queue(github, "run-a")
        other = (await backend.provision("run-c", 2)).document
        assert other["reused"] == 2
        job = await wait_for_job(github, await queue(github, "run-c"))
        assert machine_of(job) in machines["run-a"]
        assert (await github.job(stray.id)).status == "queued"


async def test_foreign_job_with_the_runs_label_is_refused(backend: LocalBackend, tmp_path: Path) -> None:
    """Labels are not secret, and a failed hook alone does not prevent `if: always()` steps."""
    await backend.provision("1")
    trace = tmp_path / "was-here"
    steps = [JobStep(run=f"touch {trace}"), JobStep(run=f"touch {trace}", condition="always()")]
    async with backend.github() as github:
        # Variables of the workflow cannot fake another run.
        disguise = {"GITHUB_RUN_ID": "1", "BASH_ENV": "/dev/stdin"}
        job = await github.queue_job(repo=REPO, run_id="2", labels=["1"], steps=steps, env=disguise)
        job = await wait_for_job(github, job)
        assert (job.conclusion, {step.conclusion for step in job.steps}) == ("cancelled", {"skipped"}), job.log
        assert f"Remuda refused this job: it belongs to run 2 of {REPO}, and this machine is assigned to" in job.log
        assert not trace.exists()
        own = await wait_for_job(github, await queue(github, "1"))
        assert (own.conclusion, machine_of(own)) == ("success", machine_of(job)), own.log
    assert (await backend.release("1")).code == 0
    (report,) = backend.reports().values()
    assert f"refused 1 foreign job: run 2 of {REPO}; " in report["detail"]


async def test_release_waits_for_a_running_job(backend: LocalBackend, tmp_path: Path) -> None:
    await backend.provision("1")
    gate = tmp_path / "gate"
    async with backend.github() as github:
        job = await queue(github, "1", f"while [ ! -e {gate} ]; do sleep 0.05; done", "echo finished")
        job = await wait_for_job(github, job, status="in_progress")
        await backend.until(lambda: any(item["busy"] for item in backend.reports().values()), "busy is reported")
        releasing = await backend.start("release", "--run-id", "1", "--json")
        await backend.until(lambda: backend.states() == ["releasing"], "the release begins")
        assert (await github.job(job.id)).status == "in_progress"
        gate.touch()
        done = await releasing.result()
        assert (done.code, len(done.document["released"])) == (0, 1)
        job = await github.job(job.id)
        assert (job.conclusion, "finished" in job.log) == ("success", True)


async def test_provision_interrupted_during_boot(backend: LocalBackend) -> None:
    await backend.refresh(idle_time_sec=600, boot_delay_sec=30, gone_after_sec=1)
    provisioning = await backend.start("provision", "--run-id", "1", "--instance-count", "2", "--json")
    await backend.until(lambda: backend.states() == ["created", "created"], "both are launched")
    provisioning.send_signal(signal.SIGINT)
    done = await provisioning.result()
    assert done.code == INTERRUPTED
    assert done.document["error"]["type"] == "Interrupted"
    assert set(backend.states()) <= {"terminating", "terminated"}
    assert {item["status"] for item in backend.provisions("1")} == {"released"}
    async with backend.sweeping():
        await backend.until_settled()
    assert backend.processes() == []


async def test_provision_interrupted_during_registration(backend: LocalBackend) -> None:
    """The machines return to the pool."""
    await backend.provision("0", 2)
    await backend.release("0")
    async with backend.github() as github:
        # Registrations are delayed until the fault is cleared.
        await github.set_fault("delay", operation="runner.register", seconds=25, times=None)
        provisioning = await backend.start("provision", "--run-id", "1", "--instance-count", "2", "--json")
        await backend.until(lambda: backend.states() == ["claimed", "claimed"], "both are claimed")
        provisioning.send_signal(signal.SIGTERM)
        assert (await provisioning.result()).code == INTERRUPTED
        await github.clear_faults()
    assert set(backend.states()) <= {"releasing", "idle"}
    async with backend.sweeping():
        await backend.until_settled(states=("idle",))
    assert len(backend.machines()) == 2


async def test_unsuitable_machines_stay_in_the_pool(backend: LocalBackend) -> None:
    await backend.provision("spot", 3, "--usage-class", "spot")
    await backend.release("spot")
    on_demand = (await backend.provision("1", 1)).document
    assert (on_demand["created"], on_demand["reused"], on_demand["rejected"]) == (1, 0, {"mismatch": 3})
    assert on_demand["instances"][0]["usage_class"] == "on-demand"
    other_type = (await backend.provision("2", 1, "--usage-class", "spot", "--allowed-instance-types", "m6i*")).document
    assert (other_type["created"], other_type["instances"][0]["instance_type"]) == (1, "m6i.large")
    tiers = (await backend.provision("3", 1, "--usage-class", "spot", "--tier", "untrusted")).document
    assert tiers["created"] == 1
    fits = (await backend.provision("4", 3, "--usage-class", "spot", "--allowed-instance-types", "c*")).document
    assert (fits["created"], fits["reused"]) == (0, 3)
    assert backend.pool_messages() == []


async def test_machine_is_retired_after_its_last_use(backend: LocalBackend) -> None:
    await backend.run("refresh", "--max-uses", "2", "--idle-time-sec", "600")
    await backend.provision("1")
    assert len((await backend.release("1")).document["released"]) == 1
    assert (await backend.provision("2")).document["reused"] == 1
    released = (await backend.release("2")).document
    assert (len(released["retired"]), released["released"]) == (1, [])
    async with backend.sweeping():
        await backend.until_settled()
    assert backend.pool_messages() == []


async def test_job_fails_at_once_when_the_time_of_its_run_is_up(backend: LocalBackend) -> None:
    """GitHub would find out after ten minutes that the machine is gone, but the runner reports its job before."""
    async with backend.github() as github:
        # Queued before the machine starts, because its lifetime is short.
        job = await queue(github, "1", "sleep 1000")
        await backend.provision("1", 1, "--max-runtime-min", "0.2")
        job = await wait_for_job(github, job, status="in_progress")
        async with backend.sweeping():
            await backend.until_settled()
        assert (await wait_for_job(github, job)).conclusion == "failure"
    assert backend.processes() == []
    status = (await backend.run("status", "--all")).document
    (run,), (instance,) = status["runs"], status["instances"]
    assert run["status"] == "expired"
    assert (instance["retire_reason"], instance["retire_detail"]) == ("expired", "a job was running")
    assert "run-expired" in {item["kind"] for item in status["warnings"]}


async def test_failing_script_is_reported_and_leaves_no_machine(backend: LocalBackend) -> None:
    await backend.refresh(pre_runner_script="echo no such package >&2; exit 3", gone_after_sec=1)
    failed = await backend.provision("1", 2, code=2)
    assert failed.document["error"]["field"] == "pre-runner-script"
    assert "no such package" in failed.document["error"]["message"]
    async with backend.sweeping():
        await backend.until_settled()


async def test_runner_that_is_too_old_to_register_is_reported(backend: LocalBackend) -> None:
    install_runner(backend.folder / "runner", version="2.328.0")
    failed = await backend.provision("1", code=2)
    assert failed.document["error"]["field"] == "actions-runner-version"
    assert "GitHub registers runners from 2.329.0 on" in failed.document["error"]["message"]
    async with backend.sweeping():
        await backend.until_settled()


async def test_runner_whose_version_gets_no_jobs_is_reported_and_replaced(backend: LocalBackend) -> None:
    await backend.refresh(gone_after_sec=1)
    async with backend.github() as github:
        await github.change_settings(oldest_served_version="2.337.0")
        made = await backend.provision("1")
        (name,) = [item["instance_id"] for item in made.document["instances"]]
        async with backend.sweeping():
            await backend.until_settled()
    explained = await backend.run("explain", name)
    text = json.dumps(explained.document)
    assert "GitHub refuses the runner because of its version" in text
    assert "Runner version v2.336.0 is deprecated and cannot receive messages." in text


async def test_missing_capacity_is_reported_and_leaves_no_machine(backend: LocalBackend) -> None:
    await backend.refresh(fault="partial=1", gone_after_sec=1)
    failed = await backend.provision("1", 3, code=3)
    assert "1 of 3" in failed.document["error"]["message"]
    async with backend.sweeping():
        await backend.until_settled()


async def test_used_up_budget_refuses_launches_and_says_why(backend: LocalBackend, tmp_path: Path) -> None:
    await backend.provision("1")
    (record,) = backend.records().values()
    prices = tmp_path / "prices.json"
    prices.write_text(json.dumps({"on-demand": {record["instanceType"]: 10_000}}))
    set_to = await backend.run("budget", "0.01", "--prices", str(prices), "--json")
    assert set_to.document["budget"] == 0.01
    await backend.refresh(prices=prices)
    refused = await backend.provision("2", code=3)
    assert "the budget of the pool is used up" in refused.document["error"]["message"]
    shown = (await backend.run("budget", "--prices", str(prices), "--json")).document
    assert (shown["launching"], shown["spent"] >= 0.01) == (False, True)
    assert "DOLLARS must be a number" in (await backend.run("budget", "lots", code=2)).stderr


async def test_ephemeral_machines_serve_one_job_each(backend: LocalBackend) -> None:
    await backend.provision("0")
    await backend.release("0")
    done = await backend.provision("1", 2, "--ephemeral")
    made = done.document
    assert (made["created"], made["reused"], made["ephemeral"]) == (2, 0, True)
    assert (made["tier"], made["tier_reason"]) == ("trusted", "default: no event started the run")
    ids = {item["instance_id"] for item in made["instances"]}
    async with backend.github() as github:
        runners = {runner.name: runner for runner in await github.runners()}
        assert {runner.ephemeral for runner in runners.values()} == {True}
        jobs = [await wait_for_job(github, await queue(github, "1")) for _ in range(2)]
        assert [job.conclusion for job in jobs] == ["success", "success"]
        assert {str(job.runner_name) for job in jobs} == set(runners)
    # The machines wait for their release; none has failed.
    assert await backend.registrations() == []
    await backend.until(
        lambda: not any(backend.reports()[key]["listening"] for key in ids), "the listeners end by themselves"
    )
    await backend.sweep()
    assert {backend.records()[key]["state"] for key in ids} == {"running"}
    # No record contains a just-in-time configuration.
    assert {backend.records()[key]["assignment"]["jitConfig"] for key in ids} == {""}
    released = (await backend.release("1")).document
    assert set(released["retired"]) == ids
    assert set(released["reasons"].values()) == {"ephemeral"}
    async with backend.sweeping():
        await backend.until(lambda: backend.states() == ["idle", "terminated", "terminated"], "they end")
    assert len(backend.machines()) == 1


async def job_gone_at_its_acknowledgement(_: LocalBackend, github: FakeGitHubClient) -> None:
    """A job is cancelled between its assignment and its acknowledgement."""
    await github.set_fault("delay", operation="runner.acknowledge", seconds=LIMIT_S)
    job = await queue(github, "1")
    while await github.faults():  # noqa: ASYNC110  # another process takes it
        await asyncio.sleep(0.05)
    await github.cancel_job(job.id)
    await github.clear_faults()


async def registration_removed(backend: LocalBackend, github: FakeGitHubClient) -> None:
    endpoint = read_endpoint(backend.folder / "github")
    assert endpoint is not None
    (runner,) = await github.runners()
    url = f"{endpoint.url}/repos/{REPO}/actions/runners/{runner.id}"
    async with httpx.AsyncClient(trust_env=False, headers={"authorization": f"Bearer {endpoint.token}"}) as client:
        (await client.delete(url)).raise_for_status()


async def runner_warnings(backend: LocalBackend) -> list[tuple[str, str, str]]:
    warnings = (await backend.run("status")).document["warnings"]
    kinds = {"failed-runner", "lost-instance"}
    return [(item["kind"], item["subject"], item["text"]) for item in warnings if item["kind"] in kinds]


@pytest.mark.parametrize("send_away", [job_gone_at_its_acknowledgement, registration_removed])
async def test_ephemeral_runner_that_github_sends_away_is_a_failure(
    backend: LocalBackend, send_away: Callable[[LocalBackend, FakeGitHubClient], Awaitable[None]]
) -> None:
    why = "the runner exited without a job, because GitHub has removed its registration or withdrawn its job"
    advice = "if a job still waits, cancel the run on GitHub and choose 'Re-run all jobs'"
    await backend.provision("1", 1, "--ephemeral")
    (name,) = backend.records()
    async with backend.github() as github:
        await send_away(backend, github)
        waiting = await queue(github, "1")
        await backend.until(lambda: backend.reports()[name]["signal"] == "UD_REG_FAILED", "its agent reports it")
        assert backend.reports()[name]["detail"] == why
        assert await runner_warnings(backend) == [
            ("failed-runner", name, f"its runner failed: {why}; the next refresh terminates it; {advice}")
        ]
        explained = (await backend.run("explain", "1")).document
        assert f"{name}: its runner failed: {why}; the next refresh terminates it" in explained["next"]
        assert advice in explained["next"]
        await backend.sweep()
        assert backend.states() in (["terminating"], ["terminated"])
        assert await runner_warnings(backend) == [
            ("lost-instance", "1", f"it lost its only instance; failed: {why}; {advice}")
        ]
        explained = (await backend.run("explain", "1")).document
        assert explained["title"] == "Run 1: committed (it lost its only instance)"
        assert f"its runner failed: {why} (refresh)" in [event["why"] for event in explained["events"]]
        assert advice in explained["next"]
        # The same attempt of the run can be provisioned again, with another runner name.
        await backend.provision("1", 1, "--ephemeral")
        done = await wait_for_job(github, waiting)
        assert (done.conclusion, machine_of(done) != name) == ("success", True)


async def test_ephemeral_machines_without_a_job_leave_no_registration(backend: LocalBackend) -> None:
    async with backend.github() as github:
        await github.set_fault("status", operation="jitconfig", status=403, times=1)
        await backend.provision("1", 2, "--ephemeral", code=2)
    # Its registration is removed at once, the machines by the next sweeps.
    assert await backend.registrations() == []

    await backend.provision("2", 1, "--ephemeral")
    assert len(await backend.registrations()) == 1
    # Without a credential, only a sweep can remove a just-in-time registration.
    released = (await backend.release("2")).document
    assert list(released["reasons"].values()) == ["failed"]
    async with backend.sweeping(), backend.github() as github:
        version, runners = await github.watch_runners()
        while runners:
            version, runners = await github.watch_runners(since=version, wait_s=LIMIT_S)
        await backend.until(lambda: set(backend.states()) == {"terminated"}, "the failed machine ends")

    endpoint = read_endpoint(backend.folder / "github")
    assert endpoint is not None
    backend.environment["REMUDA_GITHUB_TOKEN"] = endpoint.token
    await backend.provision("3", 1, "--ephemeral")
    released = (await backend.release("3")).document
    assert list(released["reasons"].values()) == ["ephemeral"]
    assert await backend.registrations() == []
    assert any(name.startswith("DELETE") for name in released["calls"]["github"]), released["calls"]
    async with backend.sweeping():
        await backend.until(lambda: set(backend.states()) == {"terminated"}, "all of them end")
    assert backend.machines() == []


def remuda(folder: Path, *arguments: str, **env: str) -> tuple[int, Any]:
    result = run_local(folder, *arguments, environment={**os.environ, **env})
    assert "Traceback" not in result.stderr, result.stderr
    return result.code, result.document


def processes_of(folder: Path) -> list[tuple[str, ...]]:
    lines = (procfs.command(pid) for pid in procfs.all_processes() if pid != os.getpid())
    return [words for words in lines if any(str(folder) in word for word in words)]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    state = tmp_path / "a folder with blanks"
    yield state
    remuda(state, "down")
    assert processes_of(state) == []


def test_up_applies_the_first_configuration_and_keeps_a_later_one(folder: Path):
    code, answer = remuda(folder, "up", REMUDA_MAX_USES="7")
    assert (code, answer["configured"]) == (0, True)
    assert remuda(folder, "provision", "--run-id", "1")[0] == 0
    assert remuda(folder, "refresh", "--idle-time-sec", "15m")[0] == 0
    code, answer = remuda(folder, "up")
    assert (code, answer["configured"]) == (0, False)
    settings = remuda(folder, "config", "--pool", REMUDA_IDLE_TIME_SEC="900", REMUDA_MAX_USES="3")[1]["settings"]
    assert (settings["idle-time-sec"]["value"], settings["max-uses"]["value"]) == (900, 7)
    assert settings["max-uses"]["here"] == 3
    assert [name for name, row in settings.items() if row["differs"]] == ["max-uses"]


def test_a_command_in_another_folder_says_where_the_backend_runs(folder: Path, tmp_path: Path):
    assert remuda(folder, "up")[0] == 0
    workflow = str(ROOT / "docs" / "tutorial" / "provision.yml")
    for words in (("status",), ("provision", "--run-id", "1"), ("run-workflow", workflow)):
        code, answer = remuda(tmp_path / "elsewhere", *words)
        assert code == 2
        assert "is not running" in answer["error"]["message"]
        assert f"--dir {shlex.quote(str(folder))}" in answer["error"]["fix"]


def test_concurrent_ups_start_one_backend(folder: Path):
    with ThreadPoolExecutor(3) as threads:
        outcomes = list(threads.map(lambda _: remuda(folder, "up"), range(3)))
    assert [code for code, _ in outcomes] == [0, 0, 0]
    assert sorted(len(answer["started"]) for _, answer in outcomes) == [0, 0, 2]
    assert len({answer["github_url"] for _, answer in outcomes}) == 1
    assert len(processes_of(folder)) == 2
    code, answer = remuda(folder, "down")
    assert (code, answer["left"], sorted(answer["stopped"])) == (0, [], ["github", "sweeper"])
    assert processes_of(folder) == []
    assert remuda(folder, "down")[0] == 0


def test_provision_after_down_reports_that_the_backend_is_down(folder: Path):
    remuda(folder, "up")
    remuda(folder, "refresh")
    remuda(folder, "down")
    code, answer = remuda(folder, "provision", "--run-id", "1")
    assert (code, answer["error"]["type"]) == (2, "UserError")
    assert "remuda up" in answer["error"]["fix"]
    assert remuda(folder, "status")[1]["instances"] == []


def test_purge_removes_only_files_of_the_backend(folder: Path):
    remuda(folder, "up")
    assert (folder / ".gitignore").read_text() == "*\n", "git does not offer the credentials for a commit"
    mine = folder / "mine.txt"
    mine.write_text("keep me")
    assert remuda(folder, "down", "--purge")[0] == 0
    assert [item.name for item in folder.iterdir()] == ["mine.txt"]


def test_folder_of_the_user_keeps_its_files(folder: Path):
    folder.mkdir()
    (folder / ".gitignore").write_text("build\n")
    remuda(folder, "up")
    assert remuda(folder, "down", "--purge")[0] == 0
    assert {item.name: item.read_text() for item in folder.iterdir()} == {".gitignore": "build\n"}


def test_folder_belongs_to_one_pool(folder: Path):
    """With another pool name, all machines would look orphaned and their jobs would be killed."""
    assert remuda(folder, "up", REMUDA_POOL="ci")[0] == 0
    code, provisioned = remuda(folder, "provision", "--run-id", "1")
    assert code == 0, provisioned
    assert remuda(folder, "refresh", "--sweep-only")[1]["retired"] == []
    code, answer = remuda(folder, "refresh", "--pool", "default")
    assert (code, answer["error"]["field"]) == (2, "--pool")
    assert [item["state"] for item in remuda(folder, "status")[1]["instances"]] == ["running"]
    code, answer = remuda(folder, "down")
    assert len(answer["terminated"]) == 1
    (ended,) = remuda(folder, "status", "--all")[1]["instances"]
    assert (ended["state"], ended["retire_reason"], ended["retire_detail"]) == (
        "terminated",
        "terminated-by-operator",
        "remuda down",
    )
    assert remuda(folder, "explain", "1")[1]["title"] == "Run 1: committed (it lost its only instance)"


def test_agent_killed_during_registration_leaves_one_registration(folder: Path):
    """A registration that the killed agent started must not finish later and replace the next one."""
    remuda(folder, "up")
    remuda(folder, "refresh", "--provision-timeout-sec", "60")
    endpoint = json.loads((folder / "github" / "endpoint.json").read_text())
    fault = {"kind": "delay", "operation": "runner.register", "times": 1, "seconds": 4.0}
    headers = {"authorization": f"Bearer {endpoint['token']}"}
    assert httpx.post(f"{endpoint['url']}/_admin/faults", json=fault, headers=headers).is_success
    with ThreadPoolExecutor(1) as threads:
        provisioning = threads.submit(remuda, folder, "provision", "--run-id", "7")
        configuring = wait_for_registration(folder)
        agents = [
            pid
            for pid in procfs.all_processes()
            if "agent" in procfs.command(pid)[1:4] and str(folder) in procfs.command(pid)
        ]
        assert agents
        for pid in agents:
            os.kill(pid, signal.SIGKILL)
    code, answer = provisioning.result()
    assert code == 0, answer
    assert procfs.read_process(configuring) is None
    runners = httpx.get(f"{endpoint['url']}/_admin/runners", headers=headers).json()["runners"]
    assert len(runners) == 1


def wait_for_registration(folder: Path) -> int:
    """Return the pid of a running `config.sh` on a machine in this folder."""
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        for pid in procfs.all_processes():
            words = procfs.command(pid)
            if "configure" in words and any(word.startswith(str(folder)) for word in words):
                return pid
        threading.Event().wait(0.02)
    raise AssertionError("no registration was seen")
