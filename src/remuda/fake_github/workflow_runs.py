"""GitHub's REST API for workflow runs: their state, and running jobs again."""

import hashlib
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from remuda.fake_github.app_state import AppState
from remuda.fake_github.oidc import number_of
from remuda.fake_github.rest import ACTIONS, PREFIXES, RunnersRest, page_response
from remuda.fake_github.state import ApiError, Conclusion, GitHubJob, JobPhase, WorkflowRunRecord, timestamp


def routes(app: AppState) -> list[BaseRoute]:
    """https://docs.github.com/rest/actions/workflow-runs."""
    rest = WorkflowRunsRest(app)
    repository = "/repos/{owner}/{repo}/actions"
    table = [
        ("GET", f"{repository}/runs", "runs", rest.list_runs),
        ("GET", f"{repository}/runs/{{run_id:int}}", "run", rest.get_run),
        ("GET", f"{repository}/runs/{{run_id:int}}/jobs", "run-jobs", rest.list_jobs),
        ("POST", f"{repository}/runs/{{run_id:int}}/rerun-failed-jobs", "rerun-failed-jobs", rest.rerun_failed_jobs),
        ("POST", f"{repository}/jobs/{{job_id:int}}/rerun", "rerun-job", rest.rerun_job),
    ]
    return [
        Route(f"{prefix}{path}", rest.endpoint(operation, answer, needs=ACTIONS), methods=[method])
        for prefix in PREFIXES
        for method, path, operation, answer in table
    ]


class WorkflowRunsRest(RunnersRest):
    def list_runs(self, request: Request, scope: str, _body: dict[str, Any]) -> Response:
        """List the runs in a status, newest first, with an ETag."""
        known: tuple[GitHubJob | WorkflowRunRecord, ...] = (
            *self._core.state.jobs.values(),
            *self._core.state.workflow_runs.values(),
        )
        of_repo = [each.run_id for each in known if each.repo.lower() == scope.lower()]
        run_ids = {int(run_id) for run_id in of_repo if run_id.isdecimal() and int(run_id) > 0}
        runs = [self._run_document(scope, run_id) for run_id in sorted(run_ids, reverse=True)]
        if status := request.query_params.get("status"):
            runs = [run for run in runs if status in {run["status"], run["conclusion"]}]
        return self._unless_unchanged(request, page_response(request, "workflow_runs", runs))

    def get_run(self, request: Request, scope: str, _body: dict[str, Any]) -> Response:
        document = self._run_document(scope, int(request.path_params["run_id"]))
        return self._unless_unchanged(request, JSONResponse(document))

    def _run_document(self, repo: str, run_id: int) -> dict[str, Any]:
        begun = self._core.state.workflow_runs.get(f"{repo.lower()}/{run_id}")
        try:
            jobs = self._jobs(repo, str(run_id))
        except ApiError:
            if begun is None:
                raise
            jobs = []
        return _run_document(repo, run_id, jobs, begun)

    def list_jobs(self, request: Request, scope: str, _body: dict[str, Any]) -> Response:
        """List the jobs of the latest attempt, with an ETag."""
        jobs = self._jobs(scope, str(request.path_params["run_id"]))
        document = {"total_count": len(jobs), "jobs": [_job_document(job) for job in jobs]}
        return self._unless_unchanged(request, JSONResponse(document))

    def _unless_unchanged(self, request: Request, response: Response) -> Response:
        """Answer 304 if the client has this response. GitHub does not count such a request."""
        response.headers["etag"] = f'W/"{hashlib.sha256(response.body).hexdigest()}"'
        if request.headers.get("if-none-match") != response.headers["etag"]:
            return response
        self.uncount(request)
        return Response(status_code=304, headers={"etag": response.headers["etag"]})

    def rerun_failed_jobs(self, request: Request, scope: str, _body: dict[str, Any]) -> Response:
        jobs = self._jobs(scope, str(request.path_params["run_id"]))
        failed = [job for job in jobs if job.conclusion in {Conclusion.FAILURE, Conclusion.CANCELLED}]
        if not failed:
            raise ApiError(403, "This workflow run cannot be retried: it has no failed jobs.")
        return self._rerun(jobs, failed)

    def rerun_job(self, request: Request, scope: str, _body: dict[str, Any]) -> Response:
        job = self._core.state.jobs.get(int(request.path_params["job_id"]))
        if job is None or job.repo.lower() != scope.lower():
            raise ApiError(404, "Not Found")
        jobs = self._jobs(scope, job.run_id)
        if job not in jobs:
            raise ApiError(403, "The job is not part of the latest attempt of its workflow run.")
        return self._rerun(jobs, [job])

    def _jobs(self, repo: str, run_id: str) -> list[GitHubJob]:
        """Return the latest job of each name of a run, in the order of their first attempt."""
        latest: dict[str, GitHubJob] = {}
        for job in sorted(self._core.state.jobs.values(), key=lambda job: job.id):
            if job.run_id == run_id and job.repo.lower() == repo.lower():
                latest[_name(job, latest)] = job
        if not latest:
            raise ApiError(404, "Not Found")
        return list(latest.values())

    def _rerun(self, jobs: list[GitHubJob], chosen: list[GitHubJob]) -> Response:
        """Queue jobs again as part of a new attempt, with new ids."""
        if any(job.phase is not JobPhase.COMPLETED for job in jobs):
            raise ApiError(403, "This workflow run is already running.")
        attempt = max(job.run_attempt for job in jobs) + 1
        for job in chosen:
            steps = [{**step, "conclusion": None, "result": None} for step in job.steps]
            self._core.queue.add(
                repo=job.repo,
                run_id=job.run_id,
                run_attempt=attempt,
                name=job.name,
                labels=job.labels,
                steps=steps,
                env=job.env,
                event=job.event,
                workflow=job.workflow,
                head_repo=job.head_repo,
                contexts=_next_attempt(job, attempt),
                output_expressions=job.output_expressions,
                checkout=job.checkout,
            )
        return JSONResponse({}, status_code=201)


def _next_attempt(job: GitHubJob, attempt: int) -> dict[str, Any]:
    """The contexts of a job that runs again."""
    github = job.contexts.get("github")
    return {**job.contexts, "github": {**github, "run_attempt": str(attempt)}} if github else job.contexts


def _name(job: GitHubJob, latest: dict[str, GitHubJob]) -> str:
    """The key of a job in a run. Jobs of one attempt may have the same name."""
    key, number = job.name, 1
    while key in latest and latest[key].run_attempt >= job.run_attempt:
        number += 1
        key = f"{job.name} {number}"
    return key


def _run_document(repo: str, run_id: int, jobs: list[GitHubJob], begun: WorkflowRunRecord | None) -> dict[str, Any]:
    """A run, without most of GitHub's fields. Its jobs decide, unless somebody has begun it explicitly."""
    attempt = max([job.run_attempt for job in jobs] + ([begun.attempt] if begun is not None else []))
    status, conclusion = _state_of(jobs)
    if begun is not None and begun.attempt == attempt:
        status, conclusion = ("in_progress", None) if begun.conclusion is None else ("completed", begun.conclusion)
    first = jobs[0] if jobs else None
    return {
        "id": run_id,
        "event": first.event if first else begun.event if begun else "",
        "status": status,
        "conclusion": conclusion,
        "run_attempt": attempt,
        "created_at": timestamp(min([job.created_at for job in jobs] + ([begun.created_at] if begun else []))),
        "repository": _repository(repo),
        "head_repository": _repository((first.head_repo if first else "") or repo),
    }


def _state_of(jobs: list[GitHubJob]) -> tuple[str, Conclusion | None]:
    """Status and conclusion of a run that has these jobs."""
    if all(job.phase is JobPhase.COMPLETED for job in jobs):
        ends = [job.conclusion for job in jobs if job.conclusion is not None]
        order = (Conclusion.FAILURE, Conclusion.CANCELLED, Conclusion.SUCCESS)
        return "completed", next((each for each in order if each in ends), Conclusion.SUCCESS)
    if any(job.phase in {JobPhase.IN_PROGRESS, JobPhase.COMPLETED} for job in jobs):
        return "in_progress", None
    return "queued", None


def _repository(name: str) -> dict[str, Any]:
    owner = name.partition("/")[0]
    return {
        "id": int(number_of(name)),
        "full_name": name,
        "owner": {"login": owner, "id": int(number_of(owner))},
    }


def _job_document(job: GitHubJob) -> dict[str, Any]:
    return {
        "id": job.id,
        "run_id": int(job.run_id),
        "run_attempt": job.run_attempt,
        "name": job.name,
        "status": job.status,
        "conclusion": job.conclusion,
        "labels": list(job.labels),
        "runner_id": job.runner_id,
        "runner_name": job.runner_name,
        "created_at": timestamp(job.created_at),
        "started_at": timestamp(job.started_at),
        "completed_at": timestamp(job.completed_at),
    }
