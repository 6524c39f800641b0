"""`remuda run-workflow`: run a small workflow against the local GitHub."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from graphlib import TopologicalSorter
from pathlib import Path

import httpx

from remuda.adapters.system.clock import SystemClock
from remuda.cli.output import Output
from remuda.cli.run import run_async
from remuda.cli.workflow_file import MAX_BYTES, MAX_SHOWN, WorkflowJob, load_workflow, parse_workflow
from remuda.config.settings import Settings
from remuda.domain.errors import Unavailable, UserError
from remuda.domain.runner_set import RunnerSet
from remuda.domain.text import quote
from remuda.fake_github.client import FakeGitHubClient, FakeGitHubError, JobStep, JobView
from remuda.wiring.local import check_local, layout, local_endpoint, stored_config

EXIT_JOB_FAILED = 1
_INSTANCE = re.compile(r"i-[0-9a-f]{8,17}$")

#: Seconds of one long poll.
POLL_S = 20.0
#: Seconds for jobs with `if: always()` after the run was cancelled.
ALWAYS_JOBS_S = 60.0
#: Seconds between the signals to an interrupted step, as on GitHub.
STEP_GRACE_S = 7.5
#: Seconds to wait for remaining output after a step has exited.
LAST_OUTPUT_S = 0.5
CHUNK_BYTES = 64 * 1024
EVENT_NAME = "workflow_dispatch"
#: Prefix of the variables with which steps request OIDC tokens.
OIDC_VARIABLES = "ACTIONS_ID_TOKEN_"


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkflowJobResult:
    name: str
    conclusion: str
    instance_id: str | None
    seconds: float
    #: GitHub's id; None for jobs on this machine and skipped ones.
    job_id: int | None = None
    #: The runner set that serves the job, or empty.
    runner_set: str = ""
    #: Seconds until a runner started the job; None if none did.
    wait_seconds: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LastRun:
    """The results of the last attempt, for --rerun-failed."""

    run_id: str
    attempt: int
    #: By name of the job.
    conclusions: Mapping[str, str]


def run_workflow_file(settings: Settings, output: Output, *, file: str, rerun_failed: bool) -> int:
    check_local(settings)
    return run_async(
        lambda: run_workflow(settings, output, file=file, rerun_failed=rerun_failed),
        on_interrupt_message="interrupted; the jobs of the run were cancelled",
    )


async def run_workflow(settings: Settings, output: Output, *, file: str, rerun_failed: bool = False) -> int:
    clock = SystemClock()
    before = _last_run(settings) if rerun_failed else None
    # Like GitHub's run ids: an increasing number.
    run_id = before.run_id if before else settings.run_id or str(int(clock.now().timestamp() * 1000))
    attempt = before.attempt + 1 if before else settings.run_attempt
    repository = settings.github_scope if "/" in settings.github_scope else f"{settings.github_scope}/demo"
    github = {
        "run_id": run_id,
        "run_attempt": str(attempt),
        "repository": repository,
        "workflow_ref": f"{repository}/.github/workflows/{Path(file).name}@refs/heads/main",
    }
    jobs = parse_workflow(_read(file), github)
    kept = kept_jobs(jobs, before) if before else set()
    endpoint = local_endpoint(settings)
    config = await stored_config(settings)
    async with FakeGitHubClient(endpoint.url, endpoint.token) as client:
        run = WorkflowRun(settings, output, client, clock, github, runner_sets=config.runner_sets if config else ())
        try:
            results = await run.run(jobs, kept)
        finally:
            _save_run(settings, LastRun(run_id=run_id, attempt=attempt, conclusions={**run.conclusions}))
    failed = [result for result in results if result.conclusion not in {"success", "skipped"}]
    conclusion = "failure" if failed else "success"
    output.say(f"run {run_id}: {conclusion}", style="bold red" if failed else "bold green")
    output.result(
        {
            "run_id": run_id,
            "run_attempt": attempt,
            "conclusion": conclusion,
            "jobs": [asdict(result) for result in results],
        }
    )
    return EXIT_JOB_FAILED if failed else 0


# Re-runs ------------------------------------------------------------------------------------------------------------


def _last_run_file(settings: Settings) -> Path:
    return layout(settings).github / "last-run.json"


def _save_run(settings: Settings, run: LastRun) -> None:
    path = _last_run_file(settings)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(asdict(run)), encoding="utf-8")
    draft.replace(path)


def _last_run(settings: Settings) -> LastRun:
    """Read the last run. Attempts are counted, as on GitHub."""
    try:
        run = LastRun(**json.loads(_last_run_file(settings).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise UserError(
            f"there is no run in {settings.dir} to run again",
            field="--rerun-failed",
            fix="run the workflow without --rerun-failed first",
        ) from None
    if settings.given("run_id") and settings.run_id != run.run_id:
        raise UserError(
            f"the last run is {run.run_id}, not {quote(settings.run_id, MAX_SHOWN)}",
            field=settings.shown("run_id"),
            fix="omit it: --rerun-failed continues the last run",
        )
    return run


def kept_jobs(jobs: Sequence[WorkflowJob], before: LastRun) -> set[str]:
    """Names of the jobs whose result stays: as on GitHub, a job runs again if it or one that it needs failed."""
    kept: set[str] = set()
    for key in TopologicalSorter({job.key: job.needs for job in jobs}).static_order():
        for job in jobs:
            needed = [each.name for each in jobs if each.key in job.needs]
            if job.key == key and before.conclusions.get(job.name) == "success" and kept.issuperset(needed):
                kept.add(job.name)
    if len(kept) == len(jobs):
        raise UserError(f"run {before.run_id} has no failed job", field="--rerun-failed", fix="omit --rerun-failed")
    return kept


def _read(file: str) -> object:
    try:
        with Path(file).open("rb") as opened:
            text = opened.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"{file} cannot be read: {reason}", field="FILE", fix="name a workflow file") from None
    try:
        return load_workflow(text)
    except ValueError as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{file} is not valid YAML: {reason}", field="FILE", fix="correct the file") from None


class WorkflowRun:
    def __init__(
        self,
        settings: Settings,
        output: Output,
        client: FakeGitHubClient,
        clock: SystemClock,
        github: Mapping[str, str],
        *,
        runner_sets: Sequence[RunnerSet] = (),
    ) -> None:
        self._settings = settings
        self._runner_sets = [item for item in runner_sets if item.covers(github["repository"])]
        #: By name of the job.
        self.conclusions: dict[str, str] = {}
        self._output = output
        self._client = client
        self._clock = clock
        self._github = github

    async def run(self, jobs: list[WorkflowJob], kept: Collection[str] = ()) -> list[WorkflowJobResult]:
        """Run the jobs. Those of `kept` have succeeded in an earlier attempt."""
        tasks: defaultdict[str, list[asyncio.Task[WorkflowJobResult]]] = defaultdict(list)
        started: dict[int, asyncio.Task[WorkflowJobResult]] = {}
        # A job's task waits for the tasks of its needs, so those are created first.
        for key in TopologicalSorter({job.key: job.needs for job in jobs}).static_order():
            for index, job in enumerate(jobs):
                if job.key == key:
                    needed = [task for need in job.needs for task in tasks[need]]
                    started[index] = asyncio.create_task(self._run_after(job, needed, is_kept=job.name in kept))
                    tasks[key].append(started[index])
        ordered = [started[index] for index in range(len(jobs))]
        try:
            return list(await asyncio.gather(*ordered))
        except BaseException:
            for task in ordered:
                # Cancel once only: a second cancellation would interrupt the task's own cleanup.
                if not task.cancelling():
                    task.cancel()
            await asyncio.gather(*ordered, return_exceptions=True)
            await self._run_always_jobs(jobs, ordered)
            raise

    async def _run_after(
        self, job: WorkflowJob, needed: list[asyncio.Task[WorkflowJobResult]], *, is_kept: bool
    ) -> WorkflowJobResult:
        results = [await task for task in needed]
        if is_kept:
            self._say(job.name, "success in an earlier attempt")
            result = WorkflowJobResult(name=job.name, conclusion="success", instance_id=None, seconds=0.0)
        elif not job.runs_after([result.conclusion for result in results]):
            self._say(job.name, "skipped")
            result = WorkflowJobResult(name=job.name, conclusion="skipped", instance_id=None, seconds=0.0)
        else:
            result = await self._run_job(job)
        self.conclusions[job.name] = result.conclusion
        return result

    async def _run_job(self, job: WorkflowJob) -> WorkflowJobResult:
        began = self._clock.monotonic()
        result = WorkflowJobResult(name=job.name, conclusion="cancelled", instance_id=None, seconds=0.0)
        try:
            async with asyncio.timeout(job.timeout_s):
                if job.hosted:
                    result = replace(result, conclusion=await self._run_hosted(job))
                else:
                    result = await self._run_queued(job)
        except TimeoutError:
            self._say(job.name, f"cancelled: it took longer than {job.timeout_s / 60:g} min")
        return replace(result, seconds=round(self._clock.monotonic() - began, 3))

    async def _run_always_jobs(self, jobs: list[WorkflowJob], tasks: list[asyncio.Task[WorkflowJobResult]]) -> None:
        """Run the jobs with `if: always()` that have not run, as GitHub does after a cancellation."""
        left = [
            job
            for job, task in zip(jobs, tasks, strict=True)
            if job.hosted and job.condition == "always()" and task.cancelled()
        ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ALWAYS_JOBS_S):
                for job in left:
                    await self._run_job(job)

    async def _run_queued(self, job: WorkflowJob) -> WorkflowJobResult:
        try:
            return await self._follow(job, await self._queue(job))
        except (FakeGitHubError, httpx.HTTPError) as error:
            raise Unavailable(f"the local GitHub does not respond: {error}") from error

    async def _say_waiting(self, job: WorkflowJob, runner_set: str) -> None:
        """Say who will take the job, or why nobody will."""
        if runner_set:
            self._say(job.name, f"waiting for a runner of set {runner_set}")
            return
        wanted = {label.lower() for label in job.labels}
        if any(wanted <= {label.lower() for label in runner.labels} for runner in await self._client.runners()):
            self._say(job.name, f"queued for {', '.join(job.labels)}")
            return
        sets = "; ".join(f"{item.name} has {', '.join(item.labels)}" for item in self._runner_sets)
        known = f"the runner sets are: {sets}" if sets else "no runner sets are configured"
        self._say(
            job.name,
            f"queued for {', '.join(job.labels)}: no runner has these labels, and no runner set serves them ({known})",
        )

    async def _queue(self, job: WorkflowJob) -> JobView:
        """Queue the job. If interrupted, wait for the job's id in order to cancel it."""
        queueing = asyncio.ensure_future(
            self._client.queue_job(
                repo=self._github["repository"],
                run_id=self._github["run_id"],
                run_attempt=int(self._github["run_attempt"]),
                name=job.name,
                labels=job.labels,
                steps=[JobStep(run=step.run, name=step.name or None, env=step.env) for step in job.steps],
                env=job.env,
                event=EVENT_NAME,
                workflow=self._github["workflow_ref"],
            )
        )
        try:
            return await asyncio.shield(queueing)
        except asyncio.CancelledError:
            with contextlib.suppress(FakeGitHubError, httpx.HTTPError):
                await self._client.cancel_job((await queueing).id)
            raise

    async def _follow(self, job: WorkflowJob, current: JobView) -> WorkflowJobResult:
        began, wait_s, assigned_to = self._clock.monotonic(), None, 0
        runner_set = next((item.name for item in self._runner_sets if item.serves(job.labels)), "")
        try:
            await self._say_waiting(job, runner_set)
            while True:
                after_s = self._clock.monotonic() - began
                if current.scale_set_id != assigned_to:
                    assigned_to = current.scale_set_id
                    # GitHub takes the job back if no runner of the set starts it in time.
                    self._say(job.name, f"{'assigned' if assigned_to else 'waiting again'} after {after_s:.2f} s")
                if current.started_at and wait_s is None:
                    wait_s = round(after_s, 3)
                    self._say(job.name, f"started after {after_s:.2f} s on {_instance(current) or current.runner_name}")
                if current.status == "completed":
                    break
                current = await self._client.job(
                    current.id, wait_s=POLL_S, since=current.status, since_scale_set=assigned_to
                )
        except BaseException:
            with contextlib.suppress(FakeGitHubError, httpx.HTTPError):
                await self._client.cancel_job(current.id)
            raise
        conclusion = current.conclusion or "failure"
        self._say(job.name, f"{conclusion} after {self._clock.monotonic() - began:.2f} s")
        if conclusion != "success":
            for line in current.log.splitlines()[-20:]:
                self._say(job.name, f"| {line}")
        return WorkflowJobResult(
            name=job.name,
            conclusion=conclusion,
            instance_id=_instance(current),
            seconds=0.0,
            job_id=current.id,
            runner_set=runner_set,
            wait_seconds=wait_s,
        )

    async def _run_hosted(self, job: WorkflowJob) -> str:
        self._say(job.name, "runs on this machine")
        token_variables = await self._token_variables(job)
        for step in job.steps:
            code = await self._run_step(job, step.run, {**job.env, **step.env, **token_variables})
            if code != 0:
                self._say(job.name, f"failure: a step ended with exit code {code}")
                return "failure"
        self._say(job.name, "success")
        return "success"

    async def _token_variables(self, job: WorkflowJob) -> dict[str, str]:
        """The variables with which steps request OIDC tokens. As on GitHub, none without the permission."""
        if not job.may_request_tokens:
            return {}
        run_id, where = self._github["run_id"], f"jobs.{job.key}.permissions"
        if importlib.util.find_spec("jwt") is None or importlib.util.find_spec("cryptography") is None:
            message = "id-token: write requires PyJWT, which is not installed"
            raise UserError(message, field=where, fix="run pip install 'remuda[github-app]'")
        if not run_id.isdecimal():
            message = f"id-token: write requires a run id as on GitHub, got {quote(run_id, MAX_SHOWN)}"
            raise UserError(message, field="run-id", fix="use a number")
        try:
            return await self._client.permit_id_tokens(
                repository=self._github["repository"],
                run_id=run_id,
                run_attempt=self._github["run_attempt"],
                event_name=EVENT_NAME,
                environment=job.environment,
            )
        except (FakeGitHubError, httpx.HTTPError) as error:
            raise Unavailable(f"the local GitHub does not respond: {error}") from error

    async def _run_step(self, job: WorkflowJob, script: str, env: Mapping[str, str]) -> int:
        # As a file, like on GitHub: other users can read command lines.
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", errors="replace", suffix=".sh") as file:
            file.write(script)
            file.flush()
            return await self._run_script(job, file.name, env)

    async def _run_script(self, job: WorkflowJob, script: str, env: Mapping[str, str]) -> int:
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-e",
            script,
            env={**self._environment(job), **env},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        output = asyncio.create_task(self._show_output(job, process.stdout))
        try:
            code = await process.wait()
            # A background process of the step may keep the pipe open, so the wait is limited.
            await asyncio.wait({output}, timeout=LAST_OUTPUT_S)
        except BaseException:
            await _interrupt(process)
            raise
        finally:
            output.cancel()
            await asyncio.gather(output, return_exceptions=True)
        return code

    async def _show_output(self, job: WorkflowJob, stream: asyncio.StreamReader | None) -> None:
        rest = b""
        while stream is not None and (chunk := await stream.read(CHUNK_BYTES)):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > CHUNK_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._say(job.name, line.decode(errors="replace").rstrip())
        if rest:
            self._say(job.name, rest.decode(errors="replace").rstrip())

    def _environment(self, job: WorkflowJob) -> dict[str, str]:
        # Steps that call remuda use this installation and this state folder.
        here = str(Path(sys.executable).parent)
        return {
            # If this command is itself a step on GitHub, its permission is not that of the jobs.
            **{name: value for name, value in os.environ.items() if not name.startswith(OIDC_VARIABLES)},
            "PATH": f"{here}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "REMUDA_DIR": str(layout(self._settings).root),
            "GITHUB_ACTIONS": "true",
            "CI": "true",
            "GITHUB_RUN_ID": self._github["run_id"],
            "GITHUB_RUN_ATTEMPT": self._github["run_attempt"],
            "GITHUB_REPOSITORY": self._github["repository"],
            "GITHUB_EVENT_NAME": EVENT_NAME,
            "GITHUB_JOB": job.key,
        }

    def _say(self, name: str, text: str) -> None:
        self._output.say(f"{self._clock.now():%H:%M:%S} {name:<16} {text}")


def _instance(job: JobView) -> str | None:
    """Return the instance id at the end of the runner's name."""
    found = _INSTANCE.search(job.runner_name or "")
    return found.group() if found else None


async def _interrupt(process: asyncio.subprocess.Process) -> None:
    """Interrupt the step's process group, and kill it after a grace period."""
    for number, grace_s in ((signal.SIGINT, STEP_GRACE_S), (signal.SIGKILL, STEP_GRACE_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await process.wait()
                return
