"""`remuda demo`: a tour of the pool's lifecycle on this machine that verifies its own results.

It runs the same commands as a user, against the same backend that `remuda up` starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from remuda.cli.demo.environment import BOOT_S, SCOPE, SET_CLASS, DemoEnvironment, ScaleDownDecisions, launch_fleet
from remuda.cli.demo.report import (
    DemoCheck,
    DemoProvision,
    DemoRelease,
    DemoReport,
    DemoSetRun,
    foreign_jobs,
    live_instances,
    retirements,
    show_report,
)
from remuda.cli.output import Output
from remuda.cli.run import run_async
from remuda.config.settings import Settings
from remuda.domain.errors import Unavailable, UserError
from remuda.domain.instance import State
from remuda.domain.pool_config import parse_runner_name
from remuda.fake_github.client import FakeGitHubClient, JobStep
from remuda.fake_github.state import FakeGitHubSettings
from remuda.wiring.local import check_local

#: Idle time in seconds. Long enough for the whole demo, even on a busy machine.
IDLE_S = 900.0
#: Idle time in seconds for the instance that terminates itself.
SHORT_IDLE_S = 2.0
#: Seconds after which the local GitHub gives up a job of a lost runner.
LEASE_S = 3.0
#: Reasons of an instance that terminated itself: its agent saw the deadline, or else the dead-man timer fired.
SELF_TERMINATED = ("threshold of state idle passed", "the dead-man timer expired")


def run_demo(settings: Settings, output: Output, *, dashboard: bool, keep: bool, verbose: bool) -> int:
    if keep and not dashboard:
        raise UserError("--keep requires --dashboard", field="--keep", fix="add --dashboard, or omit --keep")
    check_local(settings)
    folder = settings.dir if settings.given("dir") else None
    return run_async(lambda: run_local_demo(output, folder, dashboard=dashboard, keep=keep, verbose=verbose))


async def run_local_demo(
    output: Output, folder: Path | None, *, dashboard: bool = False, keep: bool = False, verbose: bool = False
) -> int:
    root = folder or Path(tempfile.mkdtemp(prefix="remuda-demo-"))
    demo = LocalDemo(output, root, verbose=verbose)
    try:
        async with demo.environment.live_page() if dashboard else contextlib.nullcontext():
            with demo.environment.live_progress():
                try:
                    report = await demo.run()
                    page = await demo.write_report_page(_report_page(folder))
                finally:
                    await asyncio.shield(demo.clean_up())
            show_report(output, report, verbose=verbose)
            output.say(f"usage report: {page}", style="bold")
            output.result({**report.document(), "report_page": str(page)})
            if dashboard and (keep or (sys.stdin.isatty() and sys.stdout.isatty())):
                await demo.environment.keep_page_open()
    finally:
        if folder is None:
            shutil.rmtree(root, ignore_errors=True)
    return 0 if report.passed else 1


def _report_page(folder: Path | None) -> Path:
    """Path of the report, which is kept after the demo's other files are deleted."""
    if folder is not None:
        return folder / "report.html"
    handle, name = tempfile.mkstemp(prefix="remuda-report-", suffix=".html")
    os.close(handle)
    return Path(name)


class LocalDemo:
    """The chapters of the demo and the results collected so far."""

    def __init__(self, output: Output, root: Path, *, verbose: bool) -> None:
        self.environment = DemoEnvironment(output, root, verbose=verbose)
        self._output = output
        self._began = self.environment.clock.monotonic()
        self._provisions: list[DemoProvision] = []
        self._releases: list[DemoRelease] = []
        self._checks: list[DemoCheck] = []
        self._set_runs: list[DemoSetRun] = []
        self._down = False

    async def run(self) -> DemoReport:
        environment = self.environment
        environment.title(f"Start: a local GitHub and periodic sweeps; instances take {BOOT_S:g} s to boot here")
        await environment.remuda("up")
        await environment.refresh(idle_s=IDLE_S)
        await self._serve_set()
        await self._cold_provision()
        await self._warm_provision()
        await self._crash_during_release()
        await self._self_termination()
        await self._scale_down()
        return await self._down_and_report()

    async def write_report_page(self, page: Path) -> Path:
        await self.environment.remuda("report", "--html", str(page))
        return page

    async def clean_up(self) -> None:
        """Stop the backend, also after Ctrl-C."""
        if not self._down:
            self._down = True
            with contextlib.suppress(Unavailable):
                await self.environment.remuda("down")

    # Chapters ---------------------------------------------------------------------------------------------------

    async def _cold_provision(self) -> None:
        self.environment.title("Provision, cold: a workflow with three jobs creates three instances")
        jobs = await self._workflow("cold", run_id="1001", count=3)
        cold = self._provisions[-1]
        self._check("the first run creates three runners", passed=(cold.reused, cold.created) == (0, 3))
        self._check("its three jobs succeed on three instances", passed=_successful_instances(jobs) == 3)
        self.environment.outcome(cold.describe())

    async def _warm_provision(self) -> None:
        self.environment.title("Provision, two at once: they need five runners; the pool has three")
        await asyncio.gather(
            self._workflow("left", run_id="1002", count=2, at_once_with=["1003"]),
            self._workflow("right", run_id="1003", count=3, at_once_with=["1002"]),
        )
        reused = sum(item.reused for item in self._provisions[-2:])
        created = sum(item.created for item in self._provisions[-2:])
        self._check("two concurrent runs reuse three runners and create two", passed=(reused, created) == (3, 2))
        for item in self._provisions[-2:]:
            self.environment.outcome(item.describe())
        self.environment.title("Provision, warm: all runners come from the pool")
        await self._workflow("warm", run_id="1004", count=3)
        warm = self._provisions[-1]
        self._check("a run on a warm pool creates no runner", passed=(warm.reused, warm.created) == (3, 0))
        self.environment.outcome(warm.describe())

    async def _serve_set(self) -> None:
        environment = self.environment
        environment.title("Runner set, cold: three jobs ask for it by label; it gets instances for them")
        await environment.refresh(idle_s=IDLE_S, runner_sets=[_runner_set()])
        file = environment.set_workflow("burst", count=3, step="sleep 0.5")
        cold = await self._run_on_set("cold", file, run_id="1011")
        self._check("three jobs of a runner set get three instances", passed=_successful_instances(cold) == 3)
        environment.outcome(self._set_runs[-1].describe())
        await environment.wait_until(lambda: self._idle(3), "the instances to return to the pool")
        environment.title("Runner set, warm: the same jobs again; one fails and is run again")
        step = 'test "${{ matrix.shard }}-${{ github.run_attempt }}" != 2-1'
        file = environment.set_workflow("again", count=3, step=step)
        first = await self._run_on_set("warm", file, run_id="1012")
        self._check(
            "the jobs reuse these instances",
            passed={job["instance_id"] for job in first} <= {job["instance_id"] for job in cold},
        )
        second = await self._run_on_set("warm", file, "--rerun-failed", run_id="1012")
        reran = [job for job in second if job["job_id"]]
        self._check(
            "a re-run of failed jobs runs one job, which succeeds",
            passed=[job["conclusion"] for job in reran] == ["success"]
            and reran[0]["job_id"] not in {job["job_id"] for job in first},
        )
        for item in self._set_runs[-2:]:
            environment.outcome(item.describe())
        await self._hot_start()
        await self._cancelled_job()

    async def _hot_start(self) -> None:
        environment = self.environment
        environment.title("Runner set, hot: one runner listens before there is a job")
        await environment.refresh(idle_s=IDLE_S, runner_sets=[_runner_set(windows=[{"hot": 1}])])
        await environment.wait_until(self._is_listening, "a runner to listen")
        listening = await self._listening()
        file = environment.set_workflow("hot", count=1, step="sleep 0.5")
        (job,) = await self._run_on_set("hot", file, run_id="1013")
        self._check(
            "a job runs on the runner that listened before", passed=[job["instance_id"]] == listening, detail=str(job)
        )
        environment.outcome(self._set_runs[-1].describe())

    async def _cancelled_job(self) -> None:
        environment = self.environment
        environment.title("Runner set, cancelled: a run is cancelled while its job runs")
        await environment.refresh(idle_s=IDLE_S, runner_sets=[_runner_set()])
        file = environment.set_workflow("cancelled", count=1, step="sleep 600")
        run = asyncio.create_task(environment.remuda("run-workflow", file, "--run-id", "1014"))
        async with environment.github() as github:
            await environment.wait_until(lambda: _run_started(github, "1014"), "the job to start")
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)
            await environment.wait_until(lambda: _run_completed(github, "1014"), "the job to end")
            (job,) = await github.jobs(run_id="1014")
        await environment.wait_until(lambda: self._idle(3), "the instances to return to the pool")
        self._check("a cancelled job's instance returns to the pool", passed=job.conclusion == "cancelled")
        environment.outcome(f"run 1014: {job.conclusion}; its instance is clean and back in the pool")

    async def _run_on_set(self, kind: str, file: str, *more: str, run_id: str) -> list[dict[str, Any]]:
        result = await self.environment.json("run-workflow", file, "--run-id", run_id, *more, ok={0, 1})
        self._set_runs.append(DemoSetRun.parse(kind, run_id, result["jobs"]))
        jobs: list[dict[str, Any]] = result["jobs"]
        return jobs

    async def _idle(self, count: int) -> bool:
        """Whether at least this many instances of the runner set are idle, and none is in use."""
        records = [record for record, _ in (await self.environment.histories()).values()]
        states = [record.state for record in records if record.resource_class == SET_CLASS]
        return states.count(State.IDLE) >= count and set(states) <= {State.IDLE, State.TERMINATED}

    async def _listening(self) -> list[str]:
        """Ids of the instances whose runner of the set waits for a job."""
        async with self.environment.github() as github:
            runners = [runner for runner in await github.runners() if runner.scale_set_id and runner.state == "idle"]
        parsed = (parse_runner_name(self.environment.settings.pool, runner.name) for runner in runners)
        return [instance_id for _, instance_id in filter(None, parsed)]

    async def _is_listening(self) -> bool:
        return bool(await self._listening())

    async def _scale_down(self) -> None:
        environment = self.environment
        environment.title("Scale-down: four instances of another fleet, found by their tags")
        fleet = await launch_fleet(environment.settings, SCOPE)
        environment.log(f"{fleet.unregistered} never registers; {fleet.mistagged} is tagged as an orphan by mistake")
        limits = ("--minimum-running-time-in-minutes", "0", "--runner-boot-time-in-minutes", "0")
        keep_two = ("--idle-config", json.dumps([{"cron": "* * * * *", "idleCount": 2}]))
        shown = await environment.remuda("scale-down", "--dry-run", *limits, *keep_two)
        if environment.verbose:
            self._output.say(*shown.splitlines())
        first = ScaleDownDecisions.parse(await environment.json("scale-down", *limits, *keep_two))
        second = ScaleDownDecisions.parse(await environment.json("scale-down", *limits, *keep_two))
        orphan = [fleet.unregistered]
        cycles = [*first.final_actions(orphan), *second.final_actions(orphan)]
        reasons = [cycle.reasons.get(fleet.unregistered, "") for cycle in (first, second)]
        self._check(
            "an instance that never registers is marked as an orphan and terminated one cycle later",
            passed=cycles == ["mark-orphan", "terminate"],
            detail="; ".join(f"{action}: {reason}" for action, reason in zip(cycles, reasons, strict=True)),
        )
        self._check(
            "a registered instance loses a wrong orphan tag and is kept",
            passed=first.actions.get(fleet.mistagged) == ("unmark-orphan", "keep"),
            detail=first.reasons.get(fleet.mistagged, ""),
        )
        self._check(
            "an idle quota of two keeps two of three and terminates the oldest",
            passed=first.final_actions(fleet.registered) == ["terminate", "keep", "keep"],
            detail=", ".join(first.final_actions(fleet.registered)),
        )
        pool = set(first.actions) - fleet.all_ids
        self._check(
            "instances with records are kept",
            passed=bool(pool) and all(first.actions[name] == ("keep",) for name in pool),
        )
        await environment.json("scale-down", *limits)
        stopped = [await environment.is_stopped(name) for name in fleet.all_ids]
        self._check("without a quota the remaining instances are terminated", passed=all(stopped))
        environment.outcome("an orphan ended after two cycles; a quota of two kept two of three")

    async def _crash_during_release(self) -> None:
        environment = self.environment
        environment.title("Crash: an instance loses power while its run is released")
        run_id = "1005"
        provisioned = await environment.json("provision", "--run-id", run_id, "--instance-count", "1")
        self._provisions.append(DemoProvision.parse("crash", provisioned))
        instance_id = str(provisioned["instances"][0]["instance_id"])
        async with environment.github() as github:
            slow = JobStep(run="sleep 600")
            job = await github.queue_job(repo=SCOPE, run_id=run_id, labels=[run_id], name="slow", steps=[slow])
            await environment.wait_until(lambda: _job_started(github, job.id), "a job to start")
        release = asyncio.create_task(environment.json("release", "--run-id", run_id, ok={0, 4}))
        await environment.wait_until(
            lambda: environment.is_in_state(instance_id, State.RELEASING), "the release to begin"
        )
        environment.kill_instance(instance_id)
        async with environment.github() as github:
            # GitHub keeps a lost runner busy for ten minutes. The lease is shortened for this job only.
            await github.change_settings(lease_s=LEASE_S)
            await environment.wait_until(lambda: _job_completed(github, job.id), "GitHub to give up the job")
            await github.change_settings(lease_s=FakeGitHubSettings().lease_s)
        await environment.wait_until(
            lambda: environment.is_in_state(instance_id, State.TERMINATED), "refresh to retire the instance"
        )
        released = await release
        await environment.json("refresh", "--sweep-only")
        self._check(
            "an instance that crashes during release is retired, not pooled",
            passed=not released["released"] and await environment.is_in_state(instance_id, State.TERMINATED),
        )
        environment.outcome(f"{instance_id} was killed with a job on it; the sweeps retired it")

    async def _self_termination(self) -> None:
        environment = self.environment
        environment.title(f"Expiry: no control plane runs, and an instance's idle time of {SHORT_IDLE_S:g} s is up")
        await environment.refresh(idle_s=SHORT_IDLE_S)
        await environment.stop_sweeper()
        environment.log("periodic refresh stopped")
        await self._workflow("last", run_id="1006", count=1)
        instance_id = self._releases[-1].instance_ids[0]
        await environment.wait_until(lambda: environment.is_stopped(instance_id), "the instance to terminate itself")
        reason = environment.stop_reason(instance_id)
        environment.log(f"{instance_id} terminated: {reason}")
        record = await environment.record(instance_id)
        self._check(
            "an idle instance terminates itself when its time is up, without a control plane",
            passed=record is not None
            and record.state is State.IDLE
            and any(text in reason for text in SELF_TERMINATED),
            detail=reason,
        )
        environment.outcome(f"{instance_id} ended itself: {reason}")
        # Starts the periodic refresh again.
        await environment.remuda("up")

    async def _down_and_report(self) -> DemoReport:
        environment = self.environment
        environment.title("End: the backend is stopped, and nothing is left")
        await environment.refresh(idle_s=SHORT_IDLE_S)
        if environment.verbose:
            self._output.say(*(f"  {line}" for line in (await environment.remuda("status")).splitlines()))
        histories = await environment.histories()
        async with environment.github() as github:
            foreign = foreign_jobs(await github.jobs(), histories, pool=environment.settings.pool)
            registrations = [runner.name for runner in await github.runners()]
        retired = retirements(histories, environment.stop_reason)
        down = await environment.json("down")
        self._down = True
        live = live_instances(await environment.histories())
        leaked = environment.leaked_processes()
        jobs_ok = all(item.jobs_ok for item in self._provisions)
        self._check("no job ran on an instance of another run", passed=not foreign, detail=", ".join(foreign))
        self._check("every job started on a clean instance", passed=jobs_ok)
        self._check("0 processes left", passed=not leaked and not down["left"], detail=", ".join(map(str, leaked)))
        self._check("0 live instances recorded", passed=not live, detail=", ".join(live))
        self._check("0 runners registered on GitHub", passed=not registrations, detail=", ".join(registrations))
        environment.outcome(
            f"{len(leaked)} processes, {len(live)} instances, {len(registrations)} registrations left; "
            f"{len(foreign)} jobs on foreign instances"
        )
        return DemoReport(
            provisions=tuple(sorted(self._provisions, key=lambda item: item.run_id)),
            releases=tuple(sorted(self._releases, key=lambda item: item.run_id)),
            retired=tuple(retired),
            checks=tuple(self._checks),
            leaked_processes=len(leaked),
            foreign_jobs=len(foreign),
            seconds=round(environment.clock.monotonic() - self._began, 1),
            set_runs=tuple(self._set_runs),
        )

    # Results ----------------------------------------------------------------------------------------------------

    async def _workflow(
        self, name: str, *, run_id: str, count: int, at_once_with: Sequence[str] = ()
    ) -> list[dict[str, Any]]:
        provision, release, jobs = await self.environment.workflow(
            name, run_id=run_id, count=count, at_once_with=at_once_with
        )
        self._provisions.append(provision)
        self._releases.append(release)
        return jobs

    def _check(self, text: str, *, passed: bool, detail: str = "") -> None:
        check = DemoCheck(text=text, passed=passed, detail=detail)
        self._checks.append(check)
        if not passed and not self.environment.verbose:
            self._output.say(f"  {check.line}", style="bold red")


def _runner_set(**more: Any) -> dict[str, Any]:
    labels = ["self-hosted", "remuda", "demo"]
    return {"name": "demo", "labels": labels, "resource-class": SET_CLASS, "max": 4, **more}


async def _run_started(github: FakeGitHubClient, run_id: str) -> bool:
    return any(job.status == "in_progress" for job in await github.jobs(run_id=run_id))


async def _run_completed(github: FakeGitHubClient, run_id: str) -> bool:
    return all(job.status == "completed" for job in await github.jobs(run_id=run_id))


def _successful_instances(jobs: list[dict[str, Any]]) -> int:
    return len({job["instance_id"] for job in jobs if job["conclusion"] == "success"})


async def _job_started(github: FakeGitHubClient, job_id: int) -> bool:
    return (await github.job(job_id)).status != "queued"


async def _job_completed(github: FakeGitHubClient, job_id: int) -> bool:
    return (await github.job(job_id)).status == "completed"
