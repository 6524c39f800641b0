"""The API of the fake runner: registration, sessions, messages, jobs.

This JSON protocol is not GitHub's, which is not public. A runner authenticates with the secret of its registration.
Status codes: 401 bad token, 403 version deprecated, 404 not found, 409 conflict, 410 registration deleted, 422 rejected
(busy, bad input).
"""

import re
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from remuda.fake_github.app_state import AppState, bearer, json_body, wait_of
from remuda.fake_github.rest import runner_files
from remuda.fake_github.state import ApiError, Conclusion, GitHubJob, JobPhase, RegisteredRunner, is_older

#: Renewals per lease of a job, and per liveness time of a session.
RENEWALS_PER_PERIOD = 4
MIN_RENEW_S = 0.2
#: Runner.Common/HostContext.cs, UserAgents.
_USER_AGENT = re.compile(r"GitHubActionsRunner-[a-z0-9-]+/([0-9.]+)")

Handler = Callable[[Request], Awaitable[Response]]


def routes(app: AppState) -> list[BaseRoute]:
    api = RunnerApi(app)
    session = "/_runner/sessions/{session}"
    job = session + "/jobs/{job_id:int}"
    table: list[tuple[str, str, str, Handler]] = [
        ("POST", "/_runner/register", "runner.register", api.register),
        ("POST", "/_runner/remove", "runner.remove", api.remove),
        ("POST", "/_runner/sessions", "runner.session", api.open_session),
        ("DELETE", session, "runner.close", api.close_session),
        ("GET", session + "/message", "runner.message", api.message),
        ("POST", job + "/acknowledge", "runner.acknowledge", api.acknowledge),
        ("POST", job + "/renew", "runner.renew", api.renew),
        ("POST", job + "/complete", "runner.complete", api.complete),
    ]
    return [Route(path, api.endpoint(name, handler), methods=[method]) for method, path, name, handler in table]


class RunnerApi:
    def __init__(self, app: AppState) -> None:
        self._app = app
        self._core = app.core

    def endpoint(self, operation: str, handler: Handler) -> Handler:
        async def handle(request: Request) -> Response:
            return await self._app.respond(operation, lambda: handler(request))

        return handle

    async def register(self, request: Request) -> Response:
        body = await json_body(request)
        url = urlsplit(str(body.get("url", "")))
        scope = _scope_of(url.path)
        if not self._core.registry.knows(scope):
            raise ApiError(404, "Not Found")
        settings = self._core.state.settings
        self._check_version(request)
        runner = self._core.registry.register(
            scope=scope,
            token=str(body.get("token", "")),
            name=str(body.get("name", "")),
            labels=tuple(str(label) for label in body.get("labels", ())),
            default_labels=bool(body.get("default_labels", True)),
            ephemeral=bool(body.get("ephemeral", False)),
            replace=bool(body.get("replace", False)),
            group=str(body.get("group") or ""),
            disable_update=settings.supports_disable_update and bool(body.get("disable_update")),
        )
        files = runner_files(runner, server_url=f"{url.scheme}://{url.netloc}", work=str(body.get("work") or "_work"))
        if settings.use_runner_admin_flow:
            files[".runner"]["useRunnerAdminFlow"] = True
        return JSONResponse({"files": files, "disable_update": runner.disable_update}, status_code=201)

    def _check_version(self, request: Request) -> None:
        """Refuse to register an old runner, with GitHub's status and text (cert-manager/aws-privateca-issuer#478)."""
        found = _USER_AGENT.fullmatch(request.headers.get("user-agent", ""))
        minimum = self._core.state.settings.minimum_runner_version
        if found and is_older(found[1], minimum):
            raise ApiError(
                404,
                "ERROR: Your runner version is out of date and can no longer register with GitHub.\n"
                f"The minimum runner version required to register with GitHub Actions is now {minimum}.",
            )

    async def remove(self, request: Request) -> Response:
        body = await json_body(request)
        scope = _scope_of(urlsplit(str(body.get("url", ""))).path)
        self._core.registry.remove(
            scope=scope, token=str(body.get("token", "")), runner_id=int(body.get("runner_id", 0))
        )
        return Response(status_code=204)

    async def open_session(self, request: Request) -> Response:
        """Open a session. With `wait`, wait that long for the end of an existing session before the conflict."""
        body = await json_body(request)
        secret = bearer(request)
        runner = self._core.registry.runner_of(secret)
        await self._app.until(
            lambda: self._core.registry.runner_of(secret).session is None,
            key=f"runner:{runner.id}",
            timeout_s=wait_of(request),
            request=request,
        )
        runner = self._core.registry.runner_of(secret)
        session = self._core.registry.open_session(runner, version=str(body.get("version", "")))
        settings = self._core.state.settings
        period = min(settings.lease_s, settings.liveness_s)
        return JSONResponse(
            {"session": session, "renew_s": max(MIN_RENEW_S, period / RENEWALS_PER_PERIOD)}, status_code=201
        )

    async def close_session(self, request: Request) -> Response:
        self._core.registry.close_session(self._in_session(request))
        return Response(status_code=204)

    async def message(self, request: Request) -> Response:
        """Answers as soon as there is a job to start or to cancel, or an update; 204 when the time is over."""
        runner, session = self._in_session(request), str(request.path_params["session"])
        if runner.deprecated:
            # Sdk/RSWebApi/Contracts/BrokerError.cs. GitHub refuses old versions here, not at the session.
            problem = f"Runner version v{runner.version} is deprecated and cannot receive messages."
            return _broker_error(403, "RunnerVersionTooOld", problem)
        self._core.registry.poll_begins(session)
        try:
            await self._app.until(
                lambda: self._message(self._in_session(request)) is not None,
                key=f"runner:{runner.id}",
                timeout_s=wait_of(request),
                request=request,
            )
            message = self._message(self._in_session(request))
        finally:
            self._core.registry.poll_ends(runner, session)
            self._app.touch_timer()
        return Response(status_code=204) if message is None else JSONResponse(message)

    def _message(self, runner: RegisteredRunner) -> dict[str, Any] | None:
        job = self._core.queue.message_for(runner)
        if job is not None:
            return _job_message(job)
        version = self._core.state.settings.update_runners_to
        if version and runner.version != version and not runner.disable_update and runner.job_id is None:
            return {"type": "update", "version": version}
        return None

    async def acknowledge(self, request: Request) -> Response:
        runner = self._in_session(request)
        try:
            self._core.queue.acknowledge(runner, _job_id(request))
        except ApiError:
            # Sdk/RSWebApi/Contracts/BrokerError.cs; the status and the text are those of a test,
            # Test/L0/Sdk/RSWebApi/BrokerHttpClientL0.cs.
            return _broker_error(404, "AcknowledgeJobNotFound", "Assigned job no longer exists")
        return JSONResponse({})

    async def renew(self, request: Request) -> Response:
        body = await json_body(request)
        runner = self._runner_of_job(request)
        self._core.queue.append_output(runner, _job_id(request), str(body.get("output", "")))
        job = self._core.queue.renew(runner, _job_id(request))
        return JSONResponse({"cancel": job.cancel_requested})

    async def complete(self, request: Request) -> Response:
        body = await json_body(request)
        try:
            conclusion = Conclusion(body.get("conclusion", ""))
        except ValueError as problem:
            raise ApiError(422, "The conclusion must be success, failure or cancelled.") from problem
        self._core.queue.complete(
            self._runner_of_job(request),
            _job_id(request),
            conclusion,
            output=str(body.get("output", "")),
            steps=list(body.get("steps", ())),
            outputs=dict(body.get("outputs") or {}),
            summary=str(body.get("summary", "")),
        )
        return JSONResponse({})

    def _runner_of_job(self, request: Request) -> RegisteredRunner:
        """Return the runner. As on GitHub, reports about a running job are accepted without a valid session, which may
        have expired while the machine was suspended.
        """
        runner = self._core.registry.runner_of(bearer(request))
        return self._in_session(request) if runner.session == request.path_params["session"] else runner

    def _in_session(self, request: Request) -> RegisteredRunner:
        return self._core.registry.in_session(bearer(request), str(request.path_params["session"]))


def _broker_error(status: int, kind: str, message: str) -> JSONResponse:
    error = {"source": "actions-broker-listener", "errorKind": kind, "statusCode": status, "errorMessage": message}
    return JSONResponse(error, status_code=status)


def _job_message(job: GitHubJob) -> dict[str, Any]:
    if job.phase is not JobPhase.ASSIGNED:
        return {"type": "cancel", "job_id": job.id}
    return {
        "type": "job",
        "job_id": job.id,
        "job": {
            "id": job.id,
            "name": job.name,
            "repo": job.repo,
            "run_id": job.run_id,
            "event": job.event,
            "run_attempt": job.run_attempt,
            "steps": job.steps,
            "env": job.env,
            "contexts": job.contexts,
            "outputs": job.output_expressions,
            "checkout": job.checkout,
        },
    }


def _job_id(request: Request) -> int:
    return int(request.path_params["job_id"])


def _scope_of(path: str) -> str:
    parts = [part for part in path.split("/") if part]
    if len(parts) not in {1, 2}:
        raise ApiError(404, "Not Found")
    return "/".join(parts)
