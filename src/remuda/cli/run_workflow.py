"""`remuda run-workflow`: run a small workflow against the local GitHub."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import httpx

from remuda.adapters.system.clock import SystemClock
from remuda.cli.output import Output
from remuda.cli.run import run_async
from remuda.cli.workflow_file import MAX_BYTES, MAX_SHOWN, WorkflowJob, load_workflow, parse_workflow
from remuda.config.settings import Settings
from remuda.domain.errors import Unavailable, UserError
from remuda.domain.text import quote
from remuda.fake_github.client import FakeGitHubClient, FakeGitHubError, JobStep, JobView
from remuda.wiring.local import check_local, layout, local_endpoint

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


def run_workflow_file(settings: Settings, output: Output, *, file: str) -> int:
    check_local(settings)
    return run_async(lambda: run_workflow(settings, output, file=file))


async def run_workflow(settings: Settings, output: Output, *, file: str) -> int:
    clock = SystemClock()
    # Like GitHub's run ids: an increasing number.
    run_id = settings.run_id or str(int(clock.now().timestamp() * 1000))
    github = {
        "run_id": run_id,
        "run_attempt": str(settings.run_attempt),
        "repository": settings.github_scope if "/" in settings.github_scope else f"{settings.github_scope}/demo",
    }
    jobs = parse_workflow(_read(file), github)
    endpoint = local_endpoint(settings)
    async with FakeGitHubClient(endpoint.url, endpoint.token) as client:
        run = WorkflowRun(settings, output, client, clock, github)
        results = await run.run(jobs)
    failed = [result for result in results if result.conclusion not in {"success", "skipped"}]
    conclusion = "failure" if failed else "success"
    output.say(f"run {run_id}: {conclusion}", style="bold red" if failed else "bold green")
    output.result(
        {
            "run_id": run_id,
            "run_attempt": settings.run_attempt,
            "conclusion": conclusion,
            "jobs": [asdict(result) for result in results],
        }
    )
    return EXIT_JOB_FAILED if failed else 0


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
    ) -> None:
        self._settings = settings
        self._output = output
        self._client = client
        self._clock = clock
        self._github = github

    async def run(self, jobs: list[WorkflowJob]) -> list[WorkflowJobResult]:
        tasks: defaultdict[str, list[asyncio.Task[WorkflowJobResult]]] = defaultdict(list)
        started: dict[int, asyncio.Task[WorkflowJobResult]] = {}
        # A job's task waits for the tasks of its needs, so those are created first.
        for key in TopologicalSorter({job.key: job.needs for job in jobs}).static_order():
            for index, job in enumerate(jobs):
                if job.key == key:
                    needed = [task for need in job.needs for task in tasks[need]]
                    started[index] = asyncio.create_task(self._run_after(job, needed))
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

    async def _run_after(self, job: WorkflowJob, needed: list[asyncio.Task[WorkflowJobResult]]) -> WorkflowJobResult:
        results = [await task for task in needed]
        if not job.runs_after([result.conclusion for result in results]):
            self._say(job.name, "skipped")
            return WorkflowJobResult(name=job.name, conclusion="skipped", instance_id=None, seconds=0.0)
        return await self._run_job(job)

    async def _run_job(self, job: WorkflowJob) -> WorkflowJobResult:
        began = self._clock.monotonic()
        instance_id = None
        try:
            async with asyncio.timeout(job.timeout_s):
                if job.hosted:
                    conclusion = await self._run_hosted(job)
                else:
                    conclusion, instance_id = await self._run_queued(job)
        except TimeoutError:
            self._say(job.name, f"cancelled: it took longer than {job.timeout_s / 60:g} min")
            conclusion = "cancelled"
        seconds = round(self._clock.monotonic() - began, 3)
        return WorkflowJobResult(name=job.name, conclusion=conclusion, instance_id=instance_id, seconds=seconds)

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

    async def _run_queued(self, job: WorkflowJob) -> tuple[str, str | None]:
        try:
            queued = await self._queue(job)
            self._say(job.name, f"queued for {', '.join(job.labels)}")
            return await self._follow(job, queued)
        except (FakeGitHubError, httpx.HTTPError) as error:
            raise Unavailable(f"the local GitHub does not respond: {error}") from error

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
            )
        )
        try:
            return await asyncio.shield(queueing)
        except asyncio.CancelledError:
            with contextlib.suppress(FakeGitHubError, httpx.HTTPError):
                await self._client.cancel_job((await queueing).id)
            raise

    async def _follow(self, job: WorkflowJob, current: JobView) -> tuple[str, str | None]:
        try:
            while current.status != "completed":
                after = await self._client.job(current.id, wait_s=POLL_S, since=current.status)
                if after.status == "in_progress" and current.status == "queued":
                    self._say(job.name, f"runs on {self._instance(after) or after.runner_name}")
                current = after
        except BaseException:
            with contextlib.suppress(FakeGitHubError, httpx.HTTPError):
                await self._client.cancel_job(current.id)
            raise
        conclusion = current.conclusion or "failure"
        self._say(job.name, conclusion)
        if conclusion != "success":
            for line in current.log.splitlines()[-20:]:
                self._say(job.name, f"| {line}")
        return conclusion, self._instance(current)

    @staticmethod
    def _instance(job: JobView) -> str | None:
        """Return the instance id at the end of the runner's name."""
        found = _INSTANCE.search(job.runner_name or "")
        return found.group() if found else None

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


async def _interrupt(process: asyncio.subprocess.Process) -> None:
    """Interrupt the step's process group, and kill it after a grace period."""
    for number, grace_s in ((signal.SIGINT, STEP_GRACE_S), (signal.SIGKILL, STEP_GRACE_S)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await process.wait()
                return
