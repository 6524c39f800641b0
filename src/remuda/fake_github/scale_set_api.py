"""The Actions service: scale sets, message sessions, messages, and the registrations of scale sets' runners.

Paths, methods, status codes and field names are those of github.com/actions/scaleset (client.go, session_client.go,
types.go). The addresses of service and messages are opaque to clients: they take them from the responses.
"""

import codecs
import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from remuda.fake_github.app_state import AppState, bearer, check_headers, check_user_agent, json_body
from remuda.fake_github.faults import SCALE_SET_PREFIX, FaultKind
from remuda.fake_github.rest import PREFIXES, encoded_jit_config
from remuda.fake_github.state import (
    MAX_LABEL_LENGTH,
    MAX_NAME_LENGTH,
    ApiError,
    GitHubJob,
    RegisteredRunner,
    ScaleSet,
    TokenKind,
    timestamp,
)

#: The version of the service that GitHub's client asks for (client.go, newActionsServiceRequest).
API_VERSION = "6.0-preview"
#: Header of a poll: the number of runners that the set may have in total.
CAPACITY_HEADER = "x-scalesetmaxcapacity"
#: The limit of GitHub's own charts (actions-runner-controller, charts/gha-runner-scale-set). The service names none.
MAX_SET_NAME_LENGTH = 45
TENANT = "/_services/actions/{tenant}"
_EXCEPTIONS = "GitHub.Actions.Runtime.WebApi."

Handler = Callable[[Request], Awaitable[Response]]


def routes(app: AppState) -> list[BaseRoute]:
    api = ScaleSetApi(app)
    sets = f"{TENANT}/_apis/runtime/runnerscalesets"
    one = f"{sets}/{{set_id:int}}"
    session = f"{one}/sessions/{{session_id}}"
    agents = f"{TENANT}/_apis/distributedtask/pools/0/agents"
    messages = f"{TENANT}/scalesets/message"
    table: list[tuple[str, str, str, Handler]] = [
        *(("POST", f"{prefix}/actions/runner-registration", "registration", api.connect) for prefix in PREFIXES),
        ("GET", f"{TENANT}/_apis/runtime/runnergroups/", "groups", api.list_groups),
        ("GET", sets, "find", api.find),
        ("POST", sets, "create", api.create),
        ("GET", one, "get", api.get),
        ("PATCH", one, "update", api.update),
        ("DELETE", one, "delete", api.delete),
        ("POST", f"{one}/sessions", "open-session", api.open_session),
        ("PATCH", session, "refresh-session", api.refresh_session),
        ("DELETE", session, "close-session", api.close_session),
        ("POST", f"{one}/acquirejobs", "acquire", api.acquire),
        ("GET", f"{one}/acquirablejobs", "acquirable", api.list_acquirable),
        ("POST", f"{one}/generatejitconfig", "jitconfig", api.register),
        ("GET", agents, "find-runner", api.find_runner),
        ("GET", f"{agents}/{{runner_id:int}}", "get-runner", api.get_runner),
        ("DELETE", f"{agents}/{{runner_id:int}}", "delete-runner", api.delete_runner),
        ("GET", messages, "poll", api.poll),
        ("DELETE", f"{messages}/{{message_id:int}}", "acknowledge", api.acknowledge),
    ]
    return [
        Route(path, api.endpoint(SCALE_SET_PREFIX + name, handler), methods=[method])
        for method, path, name, handler in table
    ]


class ScaleSetApi:
    def __init__(self, app: AppState) -> None:
        self._app = app
        self._core = app.core
        self._sets = app.core.scale_sets

    def endpoint(self, operation: str, handler: Handler) -> Handler:
        async def handle(request: Request) -> Response:
            response = await self._app.respond(operation, lambda: self._handle(request, handler), refuse=self._refuse)
            response.headers["ActivityId"] = self._core.clock.token("")
            return response

        return handle

    async def _handle(self, request: Request, handler: Handler) -> Response:
        # GitHub's client sends it with every request (common_client.go, setUserAgent; session_client.go).
        check_user_agent(request)
        return await handler(request)

    # Access

    async def connect(self, request: Request) -> Response:
        """Exchange a registration token for the address and the token of the service."""
        check_headers(request)
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        body = await json_body(request)
        scope = urlsplit(str(body.get("url", ""))).path.strip("/")
        if scheme.lower() != "remoteauth" or not scope or not self._core.registry.knows(scope):
            raise ApiError(404, "Not Found")
        if body.get("runner_event") != "register":
            raise ApiError(422, "Invalid request.\n\n'runner_event' must be register.")
        try:
            self._core.registry.check_registration_token(token, scope)
        except ApiError:
            # GitHub does not tell whether the token or the scope is unknown.
            raise ApiError(404, "Not Found") from None
        life_s = self._core.state.settings.admin_token_life_s
        admin = self._core.registry.issue_service(TokenKind.ADMIN, scope, life_s=life_s)
        url = str(request.base_url).rstrip("/") + TENANT.format(tenant=_tenant(scope)) + "/"
        return JSONResponse({"url": url, "token": admin.value, "token_schema": "OAuthAccessToken"})

    def _scope(self, request: Request, token: str, kind: TokenKind = TokenKind.ADMIN) -> str:
        scope = self._core.registry.service_scopes(token, kind)[0]
        if _tenant(scope) != request.path_params["tenant"]:
            raise ApiError(401, "The token belongs to another tenant.")
        return scope

    def _admin(self, request: Request) -> str:
        """Return the scope of a call with the admin token."""
        scope = self._scope(request, bearer(request))
        _check_version(request, request.query_params.get("api-version", ""))
        return scope

    def _set(self, request: Request) -> ScaleSet:
        return self._sets.get(self._admin(request), int(request.path_params["set_id"]))

    def _queue(self, request: Request) -> ScaleSet:
        """Return the set of a call with the token of its session."""
        token = bearer(request)
        scope = self._scope(request, token, TokenKind.QUEUE)
        _, set_id, session_id = self._core.registry.service_scopes(token, TokenKind.QUEUE)
        return self._sets.in_session(scope, int(set_id), session_id)

    # Scale sets

    async def list_groups(self, request: Request) -> Response:
        scope, name = self._admin(request), request.query_params.get("groupName", "")
        groups = [
            {"id": group_id, "name": known, "size": 0, "isDefaultGroup": group_id == 1}
            for known, group_id in self._core.registry.groups(scope).items()
            if not name or known.lower() == name.lower()
        ]
        return self._answer(_list(groups))

    async def find(self, request: Request) -> Response:
        scope, group = self._admin(request), request.query_params.get("runnerGroupId")
        found = self._sets.find(
            scope, group_id=None if group is None else _number(group), name=request.query_params.get("name")
        )
        return self._answer(_list([self._document(request, each) for each in found]))

    async def create(self, request: Request) -> Response:
        scope = self._admin(request)
        body = await _document(request)
        name, labels = _set_name(body), _labels(body)
        scale_set = self._sets.create(
            scope=scope,
            name=name,
            group_id=self._group_id(scope, body.get("runnerGroupId", 1)),
            labels=labels,
            disable_update=_disable_update(body),
        )
        return self._answer(self._document(request, scale_set))

    async def get(self, request: Request) -> Response:
        scale_set = self._set(request)
        return self._answer({**self._document(request, scale_set), "statistics": self._sets.statistics(scale_set)})

    async def update(self, request: Request) -> Response:
        scale_set = self._set(request)
        body = await _document(request)
        self._sets.update(
            scale_set,
            name=_set_name(body) if "name" in body else scale_set.name,
            group_id=self._group_id(scale_set.scope, body.get("runnerGroupId", scale_set.group_id)),
            disable_update=_disable_update(body) if "RunnerSetting" in body else scale_set.disable_update,
        )
        return self._answer(self._document(request, scale_set))

    async def delete(self, request: Request) -> Response:
        self._sets.delete(self._set(request))
        return Response(status_code=204)

    def _group_id(self, scope: str, group_id: Any) -> int:
        if group_id not in self._core.registry.groups(scope).values():
            raise ApiError(
                404, f"The runner group {group_id} does not exist.", type_name="RunnerGroupNotFoundException"
            )
        return int(group_id)

    def _document(self, request: Request, scale_set: ScaleSet) -> dict[str, Any]:
        if self._core.state.settings.only_needed_fields:
            return {"id": scale_set.id, "name": scale_set.name}
        groups = self._core.registry.groups(scale_set.scope)
        path = TENANT.format(tenant=_tenant(scale_set.scope))
        url = f"{str(request.base_url).rstrip('/')}{path}/_apis/runtime/runnerscalesets/{scale_set.id}"
        return {
            "id": scale_set.id,
            "name": scale_set.name,
            "runnerGroupId": scale_set.group_id,
            "runnerGroupName": next(name for name, number in groups.items() if number == scale_set.group_id),
            "labels": [{"type": "System", "name": label} for label in scale_set.labels],
            "RunnerSetting": {"disableUpdate": scale_set.disable_update},
            "createdOn": timestamp(scale_set.created_at),
            "runnerJitConfigUrl": f"{url}/generatejitconfig",
        }

    # Sessions and messages

    async def open_session(self, request: Request) -> Response:
        scale_set = self._set(request)
        owner = _text(await _document(request), "ownerName")
        self._sets.open_session(scale_set, owner)
        return self._session(request, scale_set)

    async def refresh_session(self, request: Request) -> Response:
        return self._session(request, self._in_session(request))

    async def close_session(self, request: Request) -> Response:
        self._sets.close_session(self._in_session(request))
        return Response(status_code=204)

    def _in_session(self, request: Request) -> ScaleSet:
        scope = self._admin(request)
        return self._sets.in_session(scope, int(request.path_params["set_id"]), str(request.path_params["session_id"]))

    def _session(self, request: Request, scale_set: ScaleSet) -> Response:
        life_s = self._core.state.settings.queue_token_life_s
        token = self._core.registry.issue_service(
            TokenKind.QUEUE, scale_set.scope, str(scale_set.id), scale_set.session_id, life_s=life_s
        )
        path = TENANT.format(tenant=_tenant(scale_set.scope))
        return self._answer(
            {
                "sessionId": scale_set.session_id,
                "ownerName": scale_set.session_owner,
                "runnerScaleSet": self._document(request, scale_set),
                "messageQueueUrl": f"{str(request.base_url).rstrip('/')}{path}/scalesets/message?set={scale_set.id}",
                "messageQueueAccessToken": token.value,
                "statistics": self._sets.statistics(scale_set),
            }
        )

    async def poll(self, request: Request) -> Response:
        """Answer with the next message as soon as there is one, or with 202 when the time is over."""
        scale_set = self._queue(request)
        accepted = request.headers.get("accept", "").replace(" ", "").split(";")
        versions = [part.removeprefix("api-version=") for part in accepted if part.startswith("api-version=")]
        _check_version(request, versions[0] if versions else "")
        last_id = _number(request.query_params.get("lastMessageId", "0"))
        # GitHub's client sends it with every poll (session_client.go, getMessage). Clients of before
        # actions-runner-controller#3431 do not, and GitHub may still serve them, with jobs beyond their capacity.
        self._sets.announce(scale_set, _number(request.headers.get(CAPACITY_HEADER, "")))
        self._app.commit_changes()
        session = self._sets.poll_begins(scale_set)
        try:
            await self._app.until(
                lambda: scale_set.session_id != session or self._sets.has_message(scale_set, last_id),
                key=f"scale-set:{scale_set.id}",
                timeout_s=self._core.state.settings.message_poll_s,
                request=request,
            )
        finally:
            self._sets.poll_ends(scale_set, session)
            self._app.touch_timer()
        # The session may have ended meanwhile. A token that has expired stays valid for the poll that it began.
        self._sets.in_session(scale_set.scope, scale_set.id, session)
        fault = self._app.faults.take(FaultKind.BAD_MESSAGE, "poll")
        if fault is not None:
            # actions-runner-controller#4470: 200 without a body.
            return Response(fault.message or "", media_type="application/json")
        message = self._sets.next_message(scale_set, last_id)
        return Response(status_code=202) if message is None else self._answer(message)

    async def acknowledge(self, request: Request) -> Response:
        self._sets.acknowledge(self._queue(request), int(request.path_params["message_id"]))
        return Response(status_code=204)

    async def acquire(self, request: Request) -> Response:
        scale_set = self._queue(request)
        _check_version(request, request.query_params.get("api-version", ""))
        if scale_set.id != int(request.path_params["set_id"]):
            raise ApiError(401, "The token belongs to another set.")
        try:
            wanted = json.loads(await request.body())
        except ValueError:
            wanted = None
        if not isinstance(wanted, list) or not all(type(number) is int for number in wanted):
            raise ApiError(400, "The body must be a list of request ids.", type_name="VssPropertyValidationException")
        return self._answer(_list(self._sets.acquire(scale_set, wanted)))

    async def list_acquirable(self, request: Request) -> Response:
        jobs = self._sets.available(self._set(request))
        return self._answer(_list([_acquirable(job) for job in jobs])) if jobs else Response(status_code=204)

    # Runners

    async def register(self, request: Request) -> Response:
        scale_set = self._set(request)
        body = await _document(request)
        name = _text(body, "name")
        if len(name) > MAX_NAME_LENGTH:
            raise ApiError(
                400, f"The name must have 1 to {MAX_NAME_LENGTH} characters.", type_name="InvalidTaskAgentNameException"
            )
        runner = self._core.registry.register_for_set(scale_set, name)
        config = encoded_jit_config(
            runner,
            server_url=str(request.base_url).rstrip("/"),
            work=str(body.get("workFolder") or "_work"),
            disable_update=scale_set.disable_update,
        )
        return self._answer({"runner": _reference(runner), "encodedJITConfig": config})

    async def find_runner(self, request: Request) -> Response:
        scope, name = self._admin(request), request.query_params.get("agentName")
        found = [
            _reference(runner)
            for runner in self._core.registry.of(scope)
            if name is None or runner.name.lower() == name.lower()
        ]
        return self._answer(_list(found))

    async def get_runner(self, request: Request) -> Response:
        runner = self._runner(request)
        if runner is None:
            number = request.path_params["runner_id"]
            raise ApiError(404, f"No agent found with identifier {number}.", type_name="AgentNotFoundException")
        return self._answer(_reference(runner))

    async def delete_runner(self, request: Request) -> Response:
        """Delete a runner unless it has a job. One that does not exist counts as deleted."""
        runner = self._runner(request)
        if runner is not None:
            operation = f"{SCALE_SET_PREFIX}delete-runner"
            if runner.online and self._app.faults.take(FaultKind.JOB_ON_DELETE, operation, runner=runner.name):
                self._core.give_job(runner)
            if runner.job_id is not None:
                raise ApiError(400, f"The agent {runner.name} is running a job.", type_name="JobStillRunningException")
            self._core.state.drop_runner(runner)
        return Response(status_code=204)

    def _runner(self, request: Request) -> RegisteredRunner | None:
        scope = self._admin(request)
        runner = self._core.state.runners.get(int(request.path_params["runner_id"]))
        return runner if runner is not None and runner.scope.lower() == scope.lower() else None

    # Responses

    def _answer(self, document: Any) -> Response:
        mark = codecs.BOM_UTF8 if self._core.state.settings.byte_order_mark else b""
        return Response(mark + json.dumps(document).encode(), media_type="application/json; charset=utf-8")

    def _refuse(self, problem: ApiError) -> Response:
        """Errors have the name of an exception, or are plain text."""
        if not problem.type_name:
            return PlainTextResponse(problem.message, status_code=problem.status)
        document = {
            "$id": "1",
            "innerException": None,
            "message": problem.message,
            "typeName": f"{_EXCEPTIONS}{problem.type_name}, GitHub.Actions.Runtime.WebApi",
            "typeKey": problem.type_name,
            "errorCode": 0,
            "eventId": 3000,
        }
        response = self._answer(document)
        response.status_code = problem.status
        return response


def _reference(runner: RegisteredRunner) -> dict[str, Any]:
    return {
        "id": runner.id,
        "name": runner.name,
        "runnerScaleSetId": runner.scale_set_id,
        "ephemeral": runner.ephemeral,
        "status": "online" if runner.online else "offline",
        "createdOn": timestamp(runner.created_at),
    }


def _acquirable(job: GitHubJob) -> dict[str, Any]:
    """actions-runner-controller, github/actions/types.go, AcquirableJob."""
    owner, _, repository = job.repo.partition("/")
    return {
        "acquireJobUrl": "",
        "messageType": "",
        "runnerRequestId": job.id,
        "repositoryName": repository,
        "ownerName": owner,
        "jobWorkflowRef": job.workflow,
        "eventName": job.event,
        "requestLabels": list(job.labels),
    }


def _list(values: list[Any]) -> dict[str, Any]:
    return {"count": len(values), "value": values}


def _tenant(scope: str) -> str:
    return scope.lower().encode().hex()


def _check_version(request: Request, version: str) -> None:
    """Exceptions and messages: actions/runner, Sdk/WebApi/WebApi/Exceptions/VssApiResourceExceptions.cs."""
    if not version:
        raise ApiError(
            400,
            f'No api-version was supplied for the "{request.method}" request. The version must be supplied either as '
            'part of the Accept header (e.g. "application/json; api-version=1.0") or as a query parameter (e.g. '
            '"?api-version=1.0").',
            type_name="VssVersionNotSpecifiedException",
        )
    number, preview, _ = version.partition("-preview")
    if not preview:
        raise ApiError(
            400,
            f'The requested version "{number}" of the resource is under preview. The -preview flag must be supplied in '
            f'the api-version for such requests. For example: "{number}-preview"',
            type_name="VssInvalidPreviewVersionException",
        )
    if version != API_VERSION:
        raise ApiError(
            400,
            f"The requested REST API version of {number} is out of range for this server. The latest REST API version "
            f"this server supports is {API_VERSION.removesuffix('-preview')}.",
            type_name="VssVersionOutOfRangeException",
        )


async def _document(request: Request) -> dict[str, Any]:
    if not request.headers.get("content-type", "").startswith("application/json"):
        raise ApiError(415, "Unsupported Media Type")
    return await json_body(request)


def _text(body: dict[str, Any], field: str) -> str:
    value = body.get(field)
    if not isinstance(value, str) or not value.strip():
        raise ApiError(400, f"The property {field} is missing.", type_name="VssPropertyValidationException")
    return value


def _set_name(body: dict[str, Any]) -> str:
    name = _text(body, "name")
    if len(name) > MAX_SET_NAME_LENGTH:
        raise ApiError(
            400,
            f"The name must have 1 to {MAX_SET_NAME_LENGTH} characters.",
            type_name="VssPropertyValidationException",
        )
    return name


def _labels(body: dict[str, Any]) -> tuple[str, ...]:
    labels = body.get("labels")
    names = [label.get("name") for label in labels if isinstance(label, dict)] if isinstance(labels, list) else []
    valid = all(isinstance(name, str) and 0 < len(name) <= MAX_LABEL_LENGTH for name in names)
    if not names or len(names) != len(labels or ()) or not valid:
        raise ApiError(400, "The property labels is invalid.", type_name="VssPropertyValidationException")
    return tuple(str(name) for name in names)


def _disable_update(body: dict[str, Any]) -> bool:
    setting = body.get("RunnerSetting")
    return isinstance(setting, dict) and bool(setting.get("disableUpdate"))


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ApiError(400, f"{text!r} is not a number.", type_name="VssPropertyValidationException")
    return int(text)
