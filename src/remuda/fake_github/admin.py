"""The admin API below `/_admin`: jobs, faults, settings, access tokens, and the internal state of runners."""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Self

import pydantic
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from remuda.fake_github.app_state import (
    ANYTHING,
    AppState,
    administrator,
    error_response,
    json_body,
    wait_of,
)
from remuda.fake_github.faults import FaultKind
from remuda.fake_github.oidc import OidcIssuer, OidcJob
from remuda.fake_github.rest import RunnersRest
from remuda.fake_github.state import (
    ApiError,
    Conclusion,
    GitHubJob,
    JobPhase,
    RegisteredRunner,
    ScaleSet,
    WorkflowRunRecord,
    settings_from,
    timestamp,
)

Handler = Callable[[Request], Awaitable[Response]]
#: Kinds and levels of permissions that an access token may have.
Permissions = dict[
    Literal["actions", "administration", "contents", "metadata", "organization_self_hosted_runners"],
    Literal["read", "write"],
]
_VERSION = r"^[0-9]+\.[0-9]+\.[0-9]+$"


class NewStep(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    id: str = ""
    name: str | None = None
    run: str = ""
    #: actions/checkout, in place of `run`.
    uses: str = ""
    inputs: dict[str, str] = pydantic.Field(default={}, alias="with")
    env: dict[str, str] = {}
    condition: str = pydantic.Field(default="", alias="if")
    shell: str = ""
    working_directory: str = pydantic.Field(default="", alias="working-directory")
    continue_on_error: str = pydantic.Field(default="", alias="continue-on-error")
    timeout_minutes: str = pydantic.Field(default="", alias="timeout-minutes")

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.run) == bool(self.uses):
            raise ValueError("a step has either run or uses")
        return self


class NewJob(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", coerce_numbers_to_str=True)
    repo: str = pydantic.Field(pattern=r"^[^/\s]+/[^/\s]+$")
    run_id: str
    run_attempt: int = 1
    name: str = "job"
    labels: list[str] = pydantic.Field(min_length=1)
    steps: list[NewStep] = []
    env: dict[str, str] = {}
    event: str = "push"
    #: Path and ref of the workflow.
    workflow: str = ""
    #: Repository of the run's commit; empty for `repo`.
    head_repo: str = pydantic.Field(default="", pattern=r"^([^/\s]+/[^/\s]+)?$")
    #: Contexts of the expressions in its steps and outputs: github, needs, matrix, strategy.
    contexts: dict[str, dict[str, Any]] = {}
    #: Expressions of the outputs by name.
    outputs: dict[str, str] = {}
    #: The snapshot that actions/checkout copies: its `kind` and `path`.
    checkout: dict[str, str] = {}


class NewRun(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", coerce_numbers_to_str=True)
    repo: str = pydantic.Field(pattern=r"^[^/\s]+/[^/\s]+$")
    run_id: str
    run_attempt: int = pydantic.Field(default=1, ge=1)
    event: str = "push"
    #: None while the attempt goes on.
    conclusion: Conclusion | None = None


class NewSession(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    owner: str = "another"


class NewToken(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    scopes: list[str] = []
    permissions: Permissions | None = None


class NewSettings(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    token_life_s: float = 0
    id_token_life_s: float = 0
    lease_s: float = 0
    liveness_s: float = 0
    pickup_s: float = 0
    known_scopes: list[str] | None = None
    rate_limit: int = 0
    enforce_rate_limit: bool = False
    app_id: str = ""
    app_key: str = ""
    app_owners: list[str] = []
    app_permissions: Permissions | None = None
    runner_groups: list[str] = []
    supports_disable_update: bool = True
    update_runners_to: str = ""
    use_runner_admin_flow: bool = False
    newest_runner_version: str = pydantic.Field(default="", pattern=_VERSION)
    minimum_runner_version: str = pydantic.Field(default="", pattern=_VERSION)
    oldest_served_version: str = pydantic.Field(default="", pattern=_VERSION)
    admin_token_life_s: float = 0
    queue_token_life_s: float = 0
    message_poll_s: float = 0
    message_session_s: float = 0
    session_loses_messages: bool = False
    assignment_life_s: float = 0
    reassignment_delay_s: float = 0
    scale_set_life_s: float = 0
    zero_capacity_trap: bool = True
    jobs_must_be_acquired: bool = False
    byte_order_mark: bool = True
    only_needed_fields: bool = False


def routes(app: AppState, issuer: OidcIssuer) -> list[BaseRoute]:
    api = AdminApi(app, issuer)
    table: list[tuple[str, str, Handler]] = [
        ("POST", "/_admin/jobs", api.queue_job),
        ("GET", "/_admin/jobs", api.list_jobs),
        ("GET", "/_admin/jobs/{job_id:int}", api.get_job),
        ("POST", "/_admin/jobs/{job_id:int}/cancel", api.cancel_job),
        ("POST", "/_admin/runs", api.put_run),
        ("GET", "/_admin/runners", api.list_runners),
        ("GET", "/_admin/scale-sets", api.list_scale_sets),
        ("DELETE", "/_admin/scale-sets/{set_id:int}", api.delete_scale_set),
        ("POST", "/_admin/scale-sets/{set_id:int}/session", api.open_session),
        ("DELETE", "/_admin/scale-sets/{set_id:int}/session", api.end_session),
        ("POST", "/_admin/faults", api.add_fault),
        ("GET", "/_admin/faults", api.list_faults),
        ("DELETE", "/_admin/faults", api.clear_faults),
        ("GET", "/_admin/settings", api.get_settings),
        ("PATCH", "/_admin/settings", api.change_settings),
        ("POST", "/_admin/tokens", api.issue_token),
        ("POST", "/_admin/oidc-jobs", api.permit_id_tokens),
    ]
    return [Route(path, api.endpoint(handler), methods=[method]) for method, path, handler in table]


class AdminApi:
    def __init__(self, app: AppState, issuer: OidcIssuer) -> None:
        self._app = app
        self._core = app.core
        self._issuer = issuer

    def endpoint(self, handler: Handler) -> Handler:
        async def handle(request: Request) -> Response:
            try:
                administrator(self._app, request)
                response = await handler(request)
            except ApiError as problem:
                response = error_response(problem.status, problem.message)
            except pydantic.ValidationError as problem:
                response = error_response(422, str(problem))
            self._app.commit_changes()
            return response

        return handle

    async def queue_job(self, request: Request) -> Response:
        new = NewJob.model_validate(await json_body(request))
        job = self._core.queue.add(
            repo=new.repo,
            run_id=new.run_id,
            run_attempt=new.run_attempt,
            name=new.name,
            labels=tuple(new.labels),
            steps=[step.model_dump(by_alias=True) for step in new.steps],
            env=new.env,
            event=new.event,
            workflow=new.workflow,
            head_repo=new.head_repo,
            contexts=new.contexts,
            output_expressions=new.outputs,
            checkout=new.checkout,
        )
        return JSONResponse(job_document(job), status_code=201)

    async def list_jobs(self, request: Request) -> Response:
        run_id, repo = request.query_params.get("run_id"), request.query_params.get("repo")
        jobs = [
            job_document(job)
            for job in self._core.state.jobs.values()
            if (run_id is None or job.run_id == run_id) and (repo is None or job.repo.lower() == repo.lower())
        ]
        return JSONResponse({"total_count": len(jobs), "jobs": jobs})

    async def get_job(self, request: Request) -> Response:
        """Return the job. With `wait` and `since`, answer as soon as its status differs from `since`.

        With `since_scale_set`, also answer as soon as it is assigned to another scale set.
        """
        job = self._core.queue.get(int(request.path_params["job_id"]))
        since = request.query_params.get("since", job.status)
        scale_set = request.query_params.get("since_scale_set")
        await self._app.until(
            lambda: (
                job.status != since
                or job.phase is JobPhase.COMPLETED
                or (scale_set is not None and str(job.scale_set_id) != scale_set)
            ),
            key=f"job:{job.id}",
            timeout_s=wait_of(request),
            request=request,
        )
        return JSONResponse(job_document(job))

    async def cancel_job(self, request: Request) -> Response:
        job = self._core.queue.cancel(int(request.path_params["job_id"]))
        return JSONResponse(job_document(job), status_code=202)

    async def put_run(self, request: Request) -> Response:
        """Begin an attempt of a workflow run, or end it with its conclusion."""
        new = NewRun.model_validate(await json_body(request))
        run = WorkflowRunRecord(
            repo=new.repo,
            run_id=new.run_id,
            attempt=new.run_attempt,
            event=new.event,
            created_at=self._core.clock.now(),
            conclusion=new.conclusion,
        )
        if (before := self._core.state.workflow_runs.get(run.key)) is not None:
            run.created_at = before.created_at
        self._core.state.put_run(run)
        return Response(status_code=204)

    async def list_runners(self, request: Request) -> Response:
        """Return the runners. With `wait` and `since`, answer as soon as the state's version differs from `since`."""
        state = self._core.state
        since = request.query_params.get("since")
        if since is not None:
            await self._app.until(
                lambda: str(state.version) != since, key=ANYTHING, timeout_s=wait_of(request), request=request
            )
        runners = [self._runner_document(runner) for runner in state]
        return JSONResponse({"version": state.version, "runners": runners})

    async def list_scale_sets(self, request: Request) -> Response:
        """Return the scale sets. `wait` and `since` are those of `list_runners`."""
        state = self._core.state
        since = request.query_params.get("since")
        if since is not None:
            await self._app.until(
                lambda: str(state.version) != since, key=ANYTHING, timeout_s=wait_of(request), request=request
            )
        sets = [self._scale_set_document(each) for each in state.scale_sets.values()]
        return JSONResponse({"version": state.version, "scale_sets": sets})

    async def delete_scale_set(self, request: Request) -> Response:
        """Delete a set as GitHub itself does, without a request of its owner."""
        self._core.scale_sets.delete(self._scale_set(request), forced=True)
        return Response(status_code=204)

    async def open_session(self, request: Request) -> Response:
        """Open a session of another process, which never polls. It ends by inactivity."""
        scale_set, new = self._scale_set(request), NewSession.model_validate(await json_body(request))
        self._core.scale_sets.open_session(scale_set, new.owner)
        return JSONResponse(self._scale_set_document(scale_set), status_code=201)

    async def end_session(self, request: Request) -> Response:
        self._core.scale_sets.close_session(self._scale_set(request))
        return Response(status_code=204)

    def _scale_set(self, request: Request) -> ScaleSet:
        found = self._core.state.scale_sets.get(int(request.path_params["set_id"]))
        if found is None:
            raise ApiError(404, "Not Found")
        return found

    def _scale_set_document(self, scale_set: ScaleSet) -> dict[str, Any]:
        jobs = [job for job in self._core.queue.unfinished if job.scale_set_id == scale_set.id]
        return {
            "id": scale_set.id,
            "scope": scale_set.scope,
            "name": scale_set.name,
            "labels": list(scale_set.labels),
            "session_owner": scale_set.session_owner,
            "capacity": scale_set.capacity,
            "assigned": len(jobs),
            "runners": len(self._core.scale_sets.runners(scale_set)),
            "unacknowledged": len(scale_set.messages),
        }

    async def add_fault(self, request: Request) -> Response:
        fault = self._app.faults.add(await json_body(request))
        if fault.kind is FaultKind.STALE_LIST:
            self._app.faults.snapshot = RunnersRest(self._app).take_snapshot()
        return JSONResponse(fault.document(), status_code=201)

    async def list_faults(self, _request: Request) -> Response:
        return JSONResponse({"faults": [fault.document() for fault in self._app.faults.all()]})

    async def clear_faults(self, _request: Request) -> Response:
        self._app.clear_faults()
        return Response(status_code=204)

    async def get_settings(self, _request: Request) -> Response:
        return JSONResponse(dataclasses.asdict(self._core.state.settings))

    async def change_settings(self, request: Request) -> Response:
        wanted = NewSettings.model_validate(await json_body(request)).model_dump(exclude_unset=True)
        current = dataclasses.asdict(self._core.state.settings)
        self._core.state.change_settings(settings_from({**current, **wanted}))
        self._core.queue.extend_leases(self._core.state.settings.lease_s - current["lease_s"])
        return JSONResponse(dataclasses.asdict(self._core.state.settings))

    async def issue_token(self, request: Request) -> Response:
        """Issue an access token with fewer rights than the administrator's."""
        new = NewToken.model_validate(await json_body(request))
        permissions = (
            None if new.permissions is None else {str(kind): str(new.permissions[kind]) for kind in new.permissions}
        )
        token = self._core.registry.issue_access(scopes=tuple(new.scopes), permissions=permissions)
        return JSONResponse({"token": token.value}, status_code=201)

    async def permit_id_tokens(self, request: Request) -> Response:
        """Return the variables of a job with the permission `id-token: write`."""
        job = OidcJob.model_validate(await json_body(request))
        return JSONResponse(self._issuer.permit(job, str(request.base_url).rstrip("/")), status_code=201)

    def _runner_document(self, runner: RegisteredRunner) -> dict[str, Any]:
        job = self._core.state.jobs.get(runner.job_id or 0)
        return {
            "id": runner.id,
            "scope": runner.scope,
            "name": runner.name,
            "labels": list(runner.labels),
            "ephemeral": runner.ephemeral,
            "online": runner.online,
            "busy": self._core.registry.busy(runner),
            "state": _runner_state(runner, job),
            "job_id": runner.job_id,
            "version": runner.version,
            "scale_set_id": runner.scale_set_id,
            "created_at": timestamp(runner.created_at),
        }


def job_document(job: GitHubJob) -> dict[str, Any]:
    """Serialize a job without `env`, which may hold secrets."""
    return {
        "id": job.id,
        "run_id": job.run_id,
        "run_attempt": job.run_attempt,
        "repo": job.repo,
        "name": job.name,
        "labels": list(job.labels),
        "status": job.status,
        "conclusion": job.conclusion,
        "runner_id": job.runner_id,
        "runner_name": job.runner_name,
        "event": job.event,
        "scale_set_id": job.scale_set_id,
        "message_job_id": job.message_job_id,
        "lapses": job.lapses,
        "created_at": timestamp(job.created_at),
        "started_at": timestamp(job.started_at),
        "completed_at": timestamp(job.completed_at),
        "log": job.log,
        "steps": [
            {"name": step.get("name"), "run": step["run"], "conclusion": step.get("conclusion")}
            | (step.get("result") or {})
            for step in job.steps
        ],
        "outputs": job.outputs,
        "summary": job.summary,
    }


def _runner_state(runner: RegisteredRunner, job: GitHubJob | None) -> str:
    if job is not None:
        return "assigned" if job.phase is JobPhase.ASSIGNED else "busy"
    if runner.online:
        return "idle"
    return "registered" if runner.version is None else "offline"
