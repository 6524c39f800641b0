"""`remuda run-workflow`: run a small workflow against the local GitHub."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import httpx

from remuda.adapters.system.clock import SystemClock
from remuda.cli.advice import command_line
from remuda.cli.checkout import NO_COMMIT, Repository, find_repository, take_snapshot
from remuda.cli.hosted_job import HostedRunner, steps_of
from remuda.cli.lifecycle import LABEL_SEPARATORS
from remuda.cli.output import Output
from remuda.cli.release_job import find_missing_release
from remuda.cli.run import run_async
from remuda.cli.workflow_file import (
    MAX_BYTES,
    MAX_SHOWN,
    ResolvedJob,
    WorkflowJob,
    load_workflow,
    parse_workflow,
)
from remuda.config.settings import Settings
from remuda.domain.errors import Unavailable, UserError
from remuda.domain.pool_config import PoolConfig
from remuda.domain.reporting.job_queue import command_for_labels, describe_missing_labels
from remuda.domain.resources import split_label
from remuda.domain.runner_set import RunnerSet
from remuda.domain.text import quote, truncate
from remuda.fake_github.client import FakeGitHubClient, FakeGitHubError, JobStep, JobView
from remuda.fake_github.fake_runner.expressions import ExpressionError, Scope, is_met
from remuda.wiring.local import check_local, layout, local_endpoint, stored_config

EXIT_JOB_FAILED = 1
_INSTANCE = re.compile(r"i-[0-9a-f]{8,17}$")
#: In the log of a job that its instance has refused (agent/job-started.sh).
_REFUSED = re.compile(r"^::error::(Remuda refused this job: .*)$", re.MULTILINE)

#: Seconds of one long poll.
POLL_S = 20.0
#: Seconds for jobs with `if: always()` after the run was cancelled.
ALWAYS_JOBS_S = 60.0
EVENT_NAME = "workflow_dispatch"
#: Lines of a failed step that are shown without --verbose, and lines of a job's summary.
SHOWN_LINES = 20
SUMMARY_LINES = 40
#: Settings of one run, which a new run of the same workflow does not repeat.
RUN_SETTINGS = ("run_id", "run_attempt")
MAX_STEP_NAME = 40
#: Conclusions of jobs, the one that decides for a matrix first.
_CONCLUSIONS = ("failure", "cancelled", "success", "skipped")


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
    outputs: Mapping[str, str] = field(default_factory=dict)
    #: Markdown that its steps wrote to $GITHUB_STEP_SUMMARY.
    summary: str = ""
    #: Steps that have ended.
    steps: tuple[JobStep, ...] = ()
    #: Whether a failure of the job leaves the run successful.
    continues_on_error: bool = False
    #: Why the instance has refused the job, or empty.
    refused: str = ""

    @property
    def result(self) -> str:
        """The result for the jobs that need it."""
        return "success" if self.continues_on_error and self.conclusion == "failure" else self.conclusion

    def document(self) -> dict[str, Any]:
        steps = [
            {"name": step.name, "conclusion": step.conclusion, "outcome": step.outcome, "seconds": step.seconds}
            for step in self.steps
        ]
        return asdict(replace(self, steps=())) | {"steps": steps}


@dataclass(frozen=True, kw_only=True, slots=True)
class LastRun:
    """The results of the last attempt, for --rerun-failed."""

    run_id: str
    attempt: int
    #: By name of the job.
    conclusions: Mapping[str, str]
    outputs: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    #: The absolute path of the workflow file; empty if an older version wrote the record.
    file: str = ""


def run_workflow_file(
    settings: Settings, output: Output, *, file: str, rerun_failed: bool = False, verbose: bool = False
) -> int:
    check_local(settings)
    return run_async(
        lambda: run_workflow(settings, output, file=file, rerun_failed=rerun_failed, verbose=verbose),
        on_interrupt_message="interrupted; the jobs of the run were cancelled",
    )


async def run_workflow(
    settings: Settings, output: Output, *, file: str, rerun_failed: bool = False, verbose: bool = False
) -> int:
    clock = SystemClock()
    before = _last_run(settings, file) if rerun_failed else None
    # Like GitHub's run ids: an increasing number.
    run_id = before.run_id if before else settings.run_id or str(int(clock.now().timestamp() * 1000))
    attempt = before.attempt + 1 if before else settings.run_attempt
    document = _read(file)
    path = await asyncio.to_thread(Path(file).absolute)
    repository = await find_repository(path.parent)
    github = _github_context(settings, file, document, repository, run_id=run_id, attempt=attempt)
    jobs = parse_workflow(document, github)
    missing = find_missing_release(jobs)
    if missing is not None:
        for line in (f"warning: {missing.text}:", *missing.yaml.splitlines()):
            output.say(line, style="yellow")
    kept = kept_jobs(jobs, before) if before else set()
    endpoint = local_endpoint(settings)
    config = await stored_config(settings)
    state = layout(settings).root
    again = command_line(settings, "run-workflow", file, omitted=RUN_SETTINGS)
    output.say(f"run {run_id}, attempt {attempt}")
    async with FakeGitHubClient(endpoint.url, endpoint.token) as client:
        if before:
            await _check_rerun(jobs, before, github, client, again)
        with tempfile.TemporaryDirectory(prefix="remuda-run-", ignore_cleanup_errors=True) as folder:
            checkout: dict[str, str] = {}
            checkouts = [step for job in jobs for step in job.steps if step.uses]
            if checkouts:
                with_history = any(step.inputs.get("fetch-depth", "1") != "1" for step in checkouts)
                target = Path(folder) / "repository"
                checkout = await take_snapshot(repository, target, state=state, with_history=with_history)
                output.say_after("actions/checkout copies ", repository.summary)
            run = WorkflowRun(
                output,
                client,
                clock,
                github,
                hosted=HostedRunner(Path(folder) / "hosted", state=state),
                server=endpoint.url,
                runner_sets=config.runner_sets if config else (),
                command_for=partial(_command_for, settings, config, run_id),
                checkout=checkout,
                verbose=verbose,
                kept_outputs=before.outputs if before else {},
            )
            try:
                async with _announced(client, github) as announced:
                    results = await run.run(jobs, kept)
                    announced.conclusion = _conclusion_of(results)
            finally:
                last = LastRun(
                    run_id=run_id,
                    attempt=attempt,
                    conclusions={name: result.conclusion for name, result in run.results.items()},
                    outputs={name: result.outputs for name, result in run.results.items()},
                    file=str(path),
                )
                _save_run(settings, last)
        failed, conclusion = _failed(results), _conclusion_of(results)
        if any(result.refused for result in failed):
            advice = f"correct runs-on of the jobs that were refused, and run the whole workflow again: {again}"
        else:
            advice = await _advice(jobs, last, github, client, again) if failed else ""
    names = ", ".join(result.name for result in failed)
    why, _, command = advice.partition(": ")
    summary = f"failure of {names}; {why}:" if failed else "success"
    output.say_after(f"run {run_id}: ", summary, style="bold red" if failed else "bold green")
    if command:
        output.say_command(command)
    output.result(
        {
            "run_id": run_id,
            "run_attempt": attempt,
            "conclusion": conclusion,
            "fix": advice or None,
            "jobs": [result.document() for result in results],
            "warnings": [f"{missing.text}: {missing.yaml}"] if missing is not None else [],
        }
    )
    return EXIT_JOB_FAILED if failed else 0


def _failed(results: Sequence[WorkflowJobResult]) -> list[WorkflowJobResult]:
    return [result for result in results if result.result not in {"success", "skipped"}]


def _conclusion_of(results: Sequence[WorkflowJobResult]) -> str:
    return "failure" if _failed(results) else "success"


@dataclass(slots=True)
class _AnnouncedRun:
    """An attempt that the local GitHub knows of."""

    conclusion: str = "cancelled"


@contextlib.asynccontextmanager
async def _announced(client: FakeGitHubClient, github: Mapping[str, str]) -> AsyncIterator[_AnnouncedRun]:
    """Tell the local GitHub when the attempt begins and ends: jobs on this machine are not in its queue.

    `remuda refresh` releases runs that have ended.
    """
    announced, attempt = _AnnouncedRun(), int(github["run_attempt"])
    put = partial(
        client.put_run, repo=github["repository"], run_id=github["run_id"], run_attempt=attempt, event=EVENT_NAME
    )
    # The jobs that need the local GitHub report its failure.
    with contextlib.suppress(FakeGitHubError, httpx.HTTPError):
        await put()
    try:
        yield announced
    finally:
        with contextlib.suppress(FakeGitHubError, httpx.HTTPError):
            await put(conclusion=announced.conclusion)


def _github_context(
    settings: Settings, file: str, document: object, repository: Repository, *, run_id: str, attempt: int
) -> dict[str, str]:
    """The values of the github context that make sense on this machine."""
    name = settings.github_scope if "/" in settings.github_scope else f"{settings.github_scope}/demo"
    given = document.get("name") if isinstance(document, Mapping) else None
    actor, ref = name.partition("/")[0], f"refs/heads/{repository.branch}"
    return {
        "run_id": run_id,
        "run_attempt": str(attempt),
        "run_number": "1",
        "repository": name,
        "workflow": given if isinstance(given, str) else f".github/workflows/{Path(file).name}",
        "workflow_ref": f"{name}/.github/workflows/{Path(file).name}@{ref}",
        "sha": repository.commit or NO_COMMIT,
        "ref": ref,
        "ref_name": repository.branch,
        "ref_type": "branch",
        "head_ref": "",
        "base_ref": "",
        "event_name": EVENT_NAME,
        "actor": actor,
        "triggering_actor": actor,
    }


def _command_for(settings: Settings, config: PoolConfig | None, run_id: str, labels: Sequence[str]) -> str:
    """The command that gets a runner for a job with these labels, or an empty text."""
    words = command_for_labels(labels, config, run_id=run_id, scope=settings.github_scope) if config else ()
    return command_line(settings, *words, omitted=RUN_SETTINGS) if words else ""


# Re-runs ------------------------------------------------------------------------------------------------------------


def _last_run_file(settings: Settings) -> Path:
    return layout(settings).github / "last-run.json"


def _save_run(settings: Settings, run: LastRun) -> None:
    path = _last_run_file(settings)
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(json.dumps(asdict(run)), encoding="utf-8")
    draft.replace(path)


def _last_run(settings: Settings, file: str) -> LastRun:
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
    if run.file and run.file != str(Path(file).absolute()):
        raise UserError(
            f"the last run is one of {run.file}, not of {file}",
            field="--rerun-failed",
            fix=f"omit --rerun-failed, or run {command_line(settings, 'run-workflow', run.file, '--rerun-failed')}",
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


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockedJob:
    """A job that would wait for ever in a re-run of the failed jobs."""

    name: str
    #: Names of the jobs that provisioned its runners and would not run again.
    provisions: tuple[str, ...]


def blocked_by_provision(
    jobs: Sequence[WorkflowJob],
    last: LastRun,
    github: Mapping[str, str],
    runners: Iterable[Collection[str]],
) -> BlockedJob | None:
    """The first job of a re-run that needs runners of the run, if the provision of these runners is not repeated.

    Re-running failed jobs repeats no successful job, so it does not repeat the provision of runners that were released:
    https://docs.github.com/actions/how-tos/manage-workflow-runs/re-run-workflows-and-jobs. `runners` has the labels of
    the runners that are registered. Jobs of runner sets get new runners.
    """
    run_id, kept = last.run_id, kept_jobs(jobs, last)
    by_key = {job.key: [each for each in jobs if each.key == job.key] for job in jobs}
    outputs = {
        key: {
            "result": "success",
            "outputs": {name: text for each in found for name, text in last.outputs.get(each.name, {}).items() if text},
        }
        for key, found in by_key.items()
    }
    kept_keys = {key for key, found in by_key.items() if all(each.name in kept for each in found)}
    ancestors: dict[str, set[str]] = {}
    for key in TopologicalSorter({job.key: job.needs for job in jobs}).static_order():
        needs = by_key[key][0].needs
        ancestors[key] = set(needs).union(*(ancestors[need] for need in needs))
    for job in jobs:
        is_skipped_again = last.conclusions.get(job.name) == "skipped" and ancestors[job.key] <= kept_keys
        if job.name in kept or is_skipped_again:
            continue
        resolved = job.resolve(github, {need: outputs[need] for need in job.needs})
        wanted = {label.lower() for label in resolved.labels}
        if resolved.hosted or not any(is_label_of_run(label, run_id) for label in resolved.labels):
            continue
        if any(wanted <= {label.lower() for label in labels} for labels in runners):
            continue
        # A script of the repository may call remuda: then any job on this machine may be the provision.
        provisions = [each for each in jobs if each.provisions]
        provisions = provisions or [each for each in jobs if each.key in ancestors[job.key]]
        if all(each.name in kept for each in provisions):
            return BlockedJob(name=job.name, provisions=tuple(each.name for each in provisions))
    return None


def is_label_of_run(label: str, run_id: str) -> bool:
    """Whether only runners of a provision of this run have the label."""
    run = split_label(label)[0]
    return run == run_id or run.startswith(tuple(run_id + separator for separator in LABEL_SEPARATORS))


async def _check_rerun(
    jobs: Sequence[WorkflowJob], last: LastRun, github: Mapping[str, str], client: FakeGitHubClient, again: str
) -> None:
    blocked = blocked_by_provision(jobs, last, github, await _registered_labels(client))
    if blocked is not None:
        done = f", and {', '.join(blocked.provisions)} succeeded and is not repeated" if blocked.provisions else ""
        raise UserError(
            f"--rerun-failed cannot run {blocked.name}: it needs runners of run {last.run_id}, which has none{done}",
            field="--rerun-failed",
            fix=f"run the whole workflow again: {again}",
        )


async def _advice(
    jobs: Sequence[WorkflowJob], last: LastRun, github: Mapping[str, str], client: FakeGitHubClient, again: str
) -> str:
    """What to do after a failed run."""
    if blocked_by_provision(jobs, last, github, await _registered_labels(client)):
        return f"run the whole workflow again, because its runners were released: {again}"
    return f"run the failed jobs again: {again} --rerun-failed"


async def _registered_labels(client: FakeGitHubClient) -> list[tuple[str, ...]]:
    try:
        return [runner.labels for runner in await client.runners() if runner.online]
    except (FakeGitHubError, httpx.HTTPError) as error:
        raise Unavailable(f"the local GitHub does not respond: {str(error) or type(error).__name__}") from error


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
        output: Output,
        client: FakeGitHubClient,
        clock: SystemClock,
        github: Mapping[str, str],
        *,
        hosted: HostedRunner,
        server: str = "",
        runner_sets: Sequence[RunnerSet] = (),
        command_for: Callable[[Sequence[str]], str] = lambda _labels: "",
        checkout: Mapping[str, str] | None = None,
        verbose: bool = False,
        kept_outputs: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self._hosted = hosted
        self._server = server
        self._checkout = dict(checkout or {})
        self._verbose = verbose
        self._kept_outputs = kept_outputs or {}
        #: The command that gets a runner with these labels, or an empty text.
        self._command_for = command_for
        self._runner_sets = [item for item in runner_sets if item.covers(github["repository"])]
        #: By name of the job.
        self.results: dict[str, WorkflowJobResult] = {}
        self._by_key: defaultdict[str, list[WorkflowJobResult]] = defaultdict(list)
        self._ancestors: dict[str, frozenset[str]] = {}
        self._cancelled = False
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
                    self._ancestors[key] = frozenset(job.needs).union(*(self._ancestors[need] for need in job.needs))
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
            self._cancelled = True
            await self._run_after_cancellation(jobs, ordered)
            raise

    async def _run_after(
        self, job: WorkflowJob, needed: list[asyncio.Task[WorkflowJobResult]], *, is_kept: bool
    ) -> WorkflowJobResult:
        await asyncio.gather(*needed)
        if is_kept:
            self._say(job.name, "success in an earlier attempt")
            outputs = self._kept_outputs.get(job.name, {})
            result = _ended(job.name, "success", outputs=outputs)
        elif not self._is_due(job):
            self._say(job.name, "skipped")
            result = _ended(job.name, "skipped")
        else:
            result = await self._run_job(job)
        self._keep(job, result)
        return result

    def _keep(self, job: WorkflowJob, result: WorkflowJobResult) -> None:
        self.results[job.name] = result
        self._by_key[job.key].append(result)

    def _is_due(self, job: WorkflowJob) -> bool:
        """Evaluate the condition. As on GitHub, success() and failure() depend on all ancestors."""
        ancestors = {result.result for key in self._ancestors[job.key] for result in self._by_key[key]}
        status = {
            "always": lambda: True,
            "success": lambda: ancestors <= {"success"} and not self._cancelled,
            "failure": lambda: "failure" in ancestors,
            "cancelled": lambda: self._cancelled,
        }
        contexts = {"github": {**self._github, "job": job.key}, "needs": self._needs(job)}
        try:
            return is_met(job.condition, Scope(contexts, status))
        except ExpressionError as error:
            where = f"jobs.{job.key}.if"
            raise UserError(f"{where}: {error}", field=where, fix="correct the file") from None

    def _needs(self, job: WorkflowJob) -> dict[str, Any]:
        """The needs context: result and outputs of the jobs that the job needs. A matrix counts as one job."""
        return {
            need: {
                "result": next(
                    (each for each in _CONCLUSIONS if each in {result.result for result in self._by_key[need]}),
                    "cancelled",
                ),
                # Of a matrix, the last job that sets an output decides.
                "outputs": {
                    name: value for result in self._by_key[need] for name, value in result.outputs.items() if value
                },
            }
            for need in job.needs
        }

    async def _run_job(self, job: WorkflowJob) -> WorkflowJobResult:
        began = self._clock.monotonic()
        resolved = job.resolve(self._github, self._needs(job))
        result = _ended(job.name, "cancelled")
        try:
            async with asyncio.timeout(resolved.timeout_s):
                result = await (self._run_hosted(resolved) if resolved.hosted else self._run_queued(resolved))
        except TimeoutError:
            self._say(job.name, f"cancelled: it took longer than {resolved.timeout_s / 60:g} min")
        seconds = round(self._clock.monotonic() - began, 3)
        result = replace(result, seconds=seconds, continues_on_error=resolved.continues_on_error)
        self._show_result(result)
        return result

    def _show_result(self, result: WorkflowJobResult) -> None:
        """Show how the job ended, the last lines of its steps, and its summary."""
        self._say(result.name, f"{result.conclusion} after {result.seconds:.2f} s")
        if result.refused and not self._verbose:
            self._say_lines(result.name, [result.refused])
        for number, step in enumerate(result.steps, start=1):
            name = truncate(step.name or step.uses, MAX_STEP_NAME)
            took = f"step {number} ({name}): {step.outcome} after {step.seconds:.2f} s"
            if step.outcome == "failure" and not self._verbose:
                lines = step.tail.splitlines()
                hidden = f"; its last {SHOWN_LINES} lines (--verbose shows all):" if len(lines) > SHOWN_LINES else ":"
                self._say(result.name, f"{took}{hidden}")
                self._say_lines(result.name, lines[-SHOWN_LINES:])
            elif step.outcome != "skipped":
                self._say(result.name, took)
                # It often says what the step has done.
                self._say_lines(result.name, [] if self._verbose else step.tail.strip().splitlines()[-1:])
        if result.summary.strip():
            lines = result.summary.strip().splitlines()
            self._say(result.name, "summary:")
            self._say_lines(result.name, lines if self._verbose else lines[:SUMMARY_LINES])

    def _say_lines(self, name: str, lines: Iterable[str]) -> None:
        # Without the time: programs often begin their lines with it.
        for line in lines:
            self._output.say_after(f"{'':8} {name:<16} | ", line.rstrip())

    async def _run_after_cancellation(
        self, jobs: list[WorkflowJob], tasks: list[asyncio.Task[WorkflowJobResult]]
    ) -> None:
        """Run the jobs on this machine whose condition is met in a cancelled run, as GitHub does."""
        cancelled = [job for job, task in zip(jobs, tasks, strict=True) if task.cancelled()]
        for job in cancelled:
            self._by_key[job.key].append(_ended(job.name, "cancelled"))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ALWAYS_JOBS_S):
                for job in cancelled:
                    if self._is_due(job) and job.resolve(self._github, self._needs(job)).hosted:
                        await self._run_job(job)

    async def _run_queued(self, job: ResolvedJob) -> WorkflowJobResult:
        try:
            return await self._follow(job, await self._queue(job))
        except (FakeGitHubError, httpx.HTTPError) as error:
            raise Unavailable(f"the local GitHub does not respond: {str(error) or type(error).__name__}") from error

    async def _say_waiting(self, job: ResolvedJob, runner_set: str) -> None:
        """Say who will take the job, or why no one will."""
        if runner_set:
            self._say(job.name, f"waiting for a runner of set {runner_set}")
            return
        wanted, run_id = {label.lower() for label in job.labels}, self._github["run_id"]
        runners = await self._client.runners()
        if any(wanted <= {label.lower() for label in runner.labels} for runner in runners):
            self._say(job.name, f"queued for {', '.join(job.labels)}")
            return
        # The labels of a run's runners contain its id.
        of_run = dict.fromkeys(label for runner in runners if run_id in runner.labels for label in runner.labels)
        why = describe_missing_labels(
            job.labels, self._runner_sets, run_id=run_id, runs={run_id: list(of_run)} if of_run else {}
        )
        self._say(job.name, f"queued for {', '.join(job.labels)}, but {why}; it waits, Ctrl-C cancels the run")
        command = self._command_for(job.labels)
        if command:
            self._say(job.name, "to get a runner, run in another terminal:")
            self._output.say_command(command)

    async def _queue(self, job: ResolvedJob) -> JobView:
        """Queue the job. If interrupted, wait for the job's id in order to cancel it."""
        queueing = asyncio.ensure_future(
            self._client.queue_job(
                repo=self._github["repository"],
                run_id=self._github["run_id"],
                run_attempt=int(self._github["run_attempt"]),
                name=job.name,
                labels=job.labels,
                steps=job.job.steps,
                env=job.env,
                contexts=job.contexts,
                outputs=job.job.outputs,
                checkout=self._checkout,
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

    async def _follow(self, job: ResolvedJob, current: JobView) -> WorkflowJobResult:
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
        if self._verbose:
            self._say_lines(job.name, current.log.splitlines())
        return WorkflowJobResult(
            name=job.name,
            conclusion=current.conclusion or "failure",
            instance_id=_instance(current),
            seconds=0.0,
            job_id=current.id,
            runner_set=runner_set,
            wait_seconds=wait_s,
            outputs=current.outputs,
            summary=current.summary,
            steps=tuple(step for step in current.steps if step.outcome),
            refused=found[1] if (found := _REFUSED.search(current.log)) else "",
        )

    async def _run_hosted(self, job: ResolvedJob) -> WorkflowJobResult:
        self._say(job.name, "runs on this machine")
        message = {
            "name": job.name,
            "repo": self._github["repository"],
            "run_id": self._github["run_id"],
            "run_attempt": self._github["run_attempt"],
            "server": self._server,
            "steps": [step.document() for step in job.job.steps],
            "env": job.env,
            "variables": await self._token_variables(job),
            "contexts": job.contexts,
            "outputs": dict(job.job.outputs),
            "checkout": self._checkout,
        }
        lines = _Lines(lambda line: self._output.say_after(f"{self._lead(job.name)}| ", line))
        report = await self._hosted.run(message, lines.add if self._verbose else lambda _text: None)
        lines.end()
        return WorkflowJobResult(
            name=job.name,
            conclusion=str(report["result"]),
            instance_id=None,
            seconds=0.0,
            outputs=report.get("outputs", {}),
            summary=report.get("summary", ""),
            steps=steps_of(job.job.steps, report),
        )

    async def _token_variables(self, job: ResolvedJob) -> dict[str, str]:
        """The variables with which steps request OIDC tokens. As on GitHub, none without the permission."""
        if not job.job.may_request_tokens:
            return {}
        run_id, where = self._github["run_id"], f"jobs.{job.job.key}.permissions"
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
            raise Unavailable(f"the local GitHub does not respond: {str(error) or type(error).__name__}") from error

    def _say(self, name: str, text: str) -> None:
        self._output.say_after(self._lead(name), text)

    def _lead(self, name: str) -> str:
        return f"{self._clock.now():%H:%M:%S} {name:<16} "


def _instance(job: JobView) -> str | None:
    """Return the instance id at the end of the runner's name."""
    found = _INSTANCE.search(job.runner_name or "")
    return found.group() if found else None


def _ended(name: str, conclusion: str, *, outputs: Mapping[str, str] | None = None) -> WorkflowJobResult:
    """The result of a job that was skipped, cancelled, or successful in an earlier attempt."""
    return WorkflowJobResult(name=name, conclusion=conclusion, instance_id=None, seconds=0.0, outputs=outputs or {})


class _Lines:
    """Splits output into lines."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._rest = ""

    def add(self, text: str) -> None:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._show(line.rstrip())

    def end(self) -> None:
        if self._rest:
            self._show(self._rest.rstrip())
