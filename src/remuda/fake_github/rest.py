"""GitHub's REST API for self-hosted runners of repositories and organizations, and for GitHub Apps."""

import base64
import hashlib
import json
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from remuda.fake_github.app_state import AppState, bearer, check_headers, json_body
from remuda.fake_github.fake_runner.credentials import key_parameters
from remuda.fake_github.faults import FaultKind, Snapshot
from remuda.fake_github.oidc import number_of
from remuda.fake_github.registry import DEFAULT_GROUP_ID
from remuda.fake_github.state import READ_ONLY_LABELS, ApiError, RegisteredRunner, TokenKind, timestamp

MAX_PER_PAGE = 100
DEFAULT_PER_PAGE = 30
HOUR_S = 3600
#: Systems and architectures of the runner's packages.
PACKAGES = (
    ("osx", "x64"),
    ("osx", "arm64"),
    ("linux", "x64"),
    ("linux", "arm"),
    ("linux", "arm64"),
    ("windows", "x64"),
    ("windows", "arm64"),
)
SCOPES = ("/repos/{owner}/{repo}", "/orgs/{org}")
#: GitHub Enterprise Server has the same API below the second prefix.
PREFIXES = ("", "/api/v3")

Handler = Callable[[Request, str, dict[str, Any]], Response]


class Permission(NamedTuple):
    """The kind of permission that an operation needs in a repository and in an organization.

    https://docs.github.com/rest/authentication/permissions-required-for-fine-grained-personal-access-tokens; GET needs
    read, other methods write. Empty: none but access to the scope.
    """

    repository: str = ""
    organization: str = ""


RUNNERS = Permission("administration", "organization_self_hosted_runners")
ACTIONS = Permission("actions")
#: Every token with access to a repository may read its metadata.
METADATA = Permission()
#: GitHub's limit for the lifetime of an App's JSON web token, and the tolerated clock difference, in seconds.
MAX_LIFETIME_S = 600
LEEWAY_S = 5


def routes(app: AppState) -> list[BaseRoute]:
    rest = RunnersRest(app)
    operations: list[tuple[str, str, str, Handler]] = [
        ("POST", "/registration-token", "registration-token", rest.registration_token),
        ("POST", "/remove-token", "remove-token", rest.remove_token),
        ("POST", "/generate-jitconfig", "jitconfig", rest.jitconfig),
        ("GET", "", "list", rest.list_runners),
        ("GET", "/downloads", "downloads", rest.downloads),
        ("GET", "/{runner_id}", "get", rest.get_runner),
        ("DELETE", "/{runner_id}", "delete", rest.delete_runner),
    ]
    groups = rest.endpoint("runner-groups", rest.list_groups)
    described = rest.endpoint("describe", rest.describe, needs=METADATA)
    return [
        *(Route(f"{prefix}{scope}", described, methods=["GET"]) for prefix in PREFIXES for scope in SCOPES),
        *(Route(f"{prefix}/orgs/{{org}}/actions/runner-groups", groups, methods=["GET"]) for prefix in PREFIXES),
        *(
            Route(f"{prefix}{scope}/actions/runners{path}", rest.endpoint(name, answer), methods=[method])
            for prefix in PREFIXES
            for scope in SCOPES
            for method, path, name, answer in operations
        ),
    ]


class RunnersRest:
    def __init__(self, app: AppState) -> None:
        self._app = app
        self._core = app.core
        self._used: dict[tuple[str, int], int] = {}

    def endpoint(self, operation: str, answer: Handler, *, needs: Permission = RUNNERS) -> Callable[[Request], Any]:
        async def handle(request: Request) -> Response:
            response = await self._app.respond(operation, lambda: self._answer(request, answer, needs))
            self._add_headers(request, response)
            return response

        return handle

    async def _answer(self, request: Request, answer: Handler, needs: Permission) -> Response:
        check_headers(request)
        token = self._core.registry.access(bearer(request))
        self._count(token.value)
        scope = _scope(request)
        kind = needs.repository if "/" in scope else needs.organization
        write = request.method not in {"GET", "HEAD"}
        self._core.registry.check_access(token, scope, permission=kind, write=write)
        return answer(request, scope, await json_body(request))

    # Operations

    def describe(self, _request: Request, scope: str, _body: dict[str, Any]) -> Response:
        """The repository or organization, with the ids of its OIDC tokens and without most of GitHub's fields."""
        owner, _, name = scope.partition("/")
        account = {"login": owner, "id": int(number_of(owner))}
        if not name:
            return JSONResponse(account)
        return JSONResponse({"id": int(number_of(scope)), "name": name, "full_name": scope, "owner": account})

    def registration_token(self, _request: Request, scope: str, _body: dict[str, Any]) -> Response:
        return self._token(TokenKind.REGISTRATION, scope)

    def remove_token(self, _request: Request, scope: str, _body: dict[str, Any]) -> Response:
        return self._token(TokenKind.REMOVAL, scope)

    def _token(self, kind: TokenKind, scope: str) -> Response:
        token = self._core.registry.issue(kind, scope)
        document = {"token": token.value, "expires_at": timestamp(token.expires_at)}
        if self._core.state.settings.only_needed_fields:
            del document["expires_at"]
        return JSONResponse(document, status_code=201)

    def jitconfig(self, request: Request, scope: str, body: dict[str, Any]) -> Response:
        name, group, labels = body.get("name"), body.get("runner_group_id"), body.get("labels")
        if not isinstance(name, str):
            raise ApiError(422, "Invalid request.\n\nFor 'properties/name', nil is not a string.")
        if not isinstance(group, int) or isinstance(group, bool):
            raise ApiError(422, "Invalid request.\n\nFor 'properties/runner_group_id', nil is not an integer.")
        if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
            raise ApiError(422, "Invalid request.\n\nFor 'properties/labels', not an array of strings.")
        runner = self._core.registry.register_jit(scope=scope, name=name, labels=tuple(labels), group_id=group)
        config = encoded_jit_config(
            runner,
            server_url=str(request.base_url).rstrip("/"),
            work=str(body.get("work_folder") or "_work"),
            disable_update=True,
        )
        return JSONResponse({"runner": self.document(runner), "encoded_jit_config": config}, status_code=201)

    def list_groups(self, request: Request, scope: str, _body: dict[str, Any]) -> Response:
        groups = [_group(scope, name, group_id) for name, group_id in self._core.registry.groups(scope).items()]
        return page_response(request, "runner_groups", groups)

    def downloads(self, _request: Request, _scope: str, _body: dict[str, Any]) -> Response:
        """Like GitHub, list packages for all systems, which other clients ignore."""
        version = self._core.state.settings.newest_runner_version
        return JSONResponse([package_document(version, system, name) for system, name in PACKAGES])

    def list_runners(self, request: Request, scope: str, _body: dict[str, Any]) -> Response:
        runners = self._listed(scope)
        if name := request.query_params.get("name"):
            runners = [runner for runner in runners if runner["name"] == name]
        return page_response(
            request, "runners", runners, short=self._app.faults.take(FaultKind.SHORT_LIST, "list") is not None
        )

    def get_runner(self, request: Request, scope: str, _body: dict[str, Any]) -> Response:
        runner = self._core.registry.get(scope, _runner_id(request))
        return JSONResponse(self._distorted(self.document(runner), "get"))

    def delete_runner(self, request: Request, scope: str, _body: dict[str, Any]) -> Response:
        runner = self._core.registry.get(scope, _runner_id(request))
        self._apply_job_on_delete(runner)
        self._core.registry.delete(scope, runner.id)
        return Response(status_code=204)

    # Runner documents

    def document(self, runner: RegisteredRunner) -> dict[str, Any]:
        return {
            "id": runner.id,
            "runner_group_id": runner.group_id,
            "name": runner.name,
            "os": runner.os,
            "status": "online" if runner.online else "offline",
            "busy": self._core.registry.busy(runner),
            "ephemeral": runner.ephemeral,
            "version": runner.version,
            "labels": [self._label(name) for name in runner.labels],
        }

    def _label(self, name: str) -> dict[str, Any]:
        kind = "read-only" if name.lower() in READ_ONLY_LABELS else "custom"
        return {"id": self._core.state.label_id(name), "name": name, "type": kind}

    def _listed(self, scope: str) -> list[dict[str, Any]]:
        fault = self._app.faults.take(FaultKind.STALE_LIST, "list")
        if fault is None:
            runners = [self.document(runner) for runner in self._core.registry.of(scope)]
        else:
            runners = self._snapshot(fault.seconds or 0.0).runners.get(scope.lower(), [])
        return [self._distorted(runner, "list") for runner in runners]

    def _snapshot(self, max_age_s: float) -> Snapshot:
        snapshot = self._app.faults.snapshot
        if snapshot is None or self._core.clock.now() - snapshot.taken_at > max_age_s:
            snapshot = self._app.faults.snapshot = self.take_snapshot()
        return snapshot

    def take_snapshot(self) -> Snapshot:
        runners: dict[str, list[dict[str, Any]]] = {}
        for runner in self._core.state:
            runners.setdefault(runner.scope.lower(), []).append(self.document(runner))
        return Snapshot(taken_at=self._core.clock.now(), runners=runners)

    def _distorted(self, document: dict[str, Any], operation: str) -> dict[str, Any]:
        name, faults = document["name"], self._app.faults
        if faults.take(FaultKind.WRONG_BUSY, operation, runner=name):
            document = {**document, "busy": not document["busy"]}
        if document["status"] == "online" and faults.take(FaultKind.TRANSIENT_OFFLINE, operation, runner=name):
            document = {**document, "status": "offline"}
        return document

    def _apply_job_on_delete(self, runner: RegisteredRunner) -> None:
        if runner.online and self._app.faults.take(FaultKind.JOB_ON_DELETE, "delete", runner=runner.name):
            self._core.give_job(runner)

    # Rate limit

    def _count(self, token: str) -> None:
        hour = int(self._core.clock.now()) // HOUR_S
        for old in [key for key in self._used if key[1] != hour]:
            del self._used[old]
        self._used[token, hour] = self._used.get((token, hour), 0) + 1
        settings = self._core.state.settings
        if settings.enforce_rate_limit and self._used[token, hour] > settings.rate_limit:
            raise ApiError(403, "API rate limit exceeded for user.")

    def uncount(self, request: Request) -> None:
        """Undo the count of a request that GitHub does not count."""
        hour = int(self._core.clock.now()) // HOUR_S
        key = bearer(request), hour
        self._used[key] = max(0, self._used.get(key, 0) - 1)

    def _add_headers(self, request: Request, response: Response) -> None:
        now = int(self._core.clock.now())
        limit = self._core.state.settings.rate_limit
        value = request.headers.get("authorization", "").partition(" ")[2].strip()
        used = self._used.get((value, now // HOUR_S), 0)
        response.headers["x-ratelimit-limit"] = str(limit)
        response.headers["x-ratelimit-remaining"] = str(max(0, limit - used))
        response.headers["x-ratelimit-used"] = str(used)
        response.headers["x-ratelimit-reset"] = str((now // HOUR_S + 1) * HOUR_S)
        response.headers["x-ratelimit-resource"] = "core"
        response.headers["x-github-request-id"] = self._core.clock.token("").upper()


def page_response(request: Request, key: str, documents: list[dict[str, Any]], *, short: bool = False) -> Response:
    """Respond with the requested page of a list. A `short` page lacks its last document."""
    per_page = min(_positive(request, "per_page", DEFAULT_PER_PAGE), MAX_PER_PAGE)
    page = _positive(request, "page", 1)
    shown = documents[(page - 1) * per_page : page * per_page]
    response = JSONResponse({"total_count": len(documents), key: shown[:-1] if short else shown})
    if link := _link(request, page=page, last=max(1, -(-len(documents) // per_page))):
        response.headers["link"] = link
    return response


def package_document(version: str, system: str, architecture: str) -> dict[str, str]:
    short = {"windows": "win"}.get(system, system)
    filename = f"actions-runner-{short}-{architecture}-{version}.{'zip' if system == 'windows' else 'tar.gz'}"
    return {
        "os": system,
        "architecture": architecture,
        "download_url": f"https://github.com/actions/runner/releases/download/v{version}/{filename}",
        "filename": filename,
        "sha256_checksum": hashlib.sha256(filename.encode()).hexdigest(),
    }


def runner_files(runner: RegisteredRunner, *, server_url: str, work: str) -> dict[str, dict[str, Any]]:
    """Return the files that `config.sh` writes.

    actions/runner: Runner.Common/ConfigurationStore.cs, RunnerSettings; Runner.Listener/Configuration,
    ConfigurationManager.cs and IRSAKeyManager.cs. The runner's serializer writes keys in camel case.
    """
    return {
        ".runner": {
            "agentId": runner.id,
            "agentName": runner.name,
            "poolId": runner.group_id,
            "poolName": "Default",
            "disableUpdate": True,
            "ephemeral": runner.ephemeral,
            "serverUrl": server_url,
            "gitHubUrl": f"{server_url}/{runner.scope}",
            "workFolder": work,
            "useV2Flow": True,
            "serverUrlV2": server_url,
        },
        ".credentials": {
            "scheme": "OAuth",
            "data": {
                "clientId": _client_id(runner),
                "authorizationUrl": f"{server_url}/_apis/oauth2/token",
                "requireFipsCryptography": "True",
            },
        },
        ".credentials_rsaparams": key_parameters(runner.secret),
    }


def encoded_jit_config(runner: RegisteredRunner, *, server_url: str, work: str, disable_update: bool) -> str:
    """Return the files of a just-in-time registration: base64 of JSON, in which each file is base64 again.

    actions/runner, Runner.Listener/Runner.cs, ExecuteCommand. The service names keys in Pascal case and gives texts for
    numbers and truth values (ChristopherHX/github-act-runner, runnerconfiguration/compat: it reads them from GitHub).
    There is no GitHubUrl (ConfigurationStore.cs, IsHostedServer).
    """
    files = {
        ".runner": {
            "AgentId": str(runner.id),
            "AgentName": runner.name,
            "DisableUpdate": str(disable_update),
            "Ephemeral": str(runner.ephemeral),
            "PoolId": str(runner.group_id),
            "PoolName": "Default",
            "ServerUrl": server_url,
            "ServerUrlV2": server_url,
            "UseV2Flow": "True",
            "WorkFolder": work,
        },
        ".credentials": {
            "Scheme": "OAuth",
            "Data": {
                "ClientId": _client_id(runner),
                "AuthorizationUrl": f"{server_url}/_apis/oauth2/token",
                "RequireFipsCryptography": "True",
            },
        },
        ".credentials_rsaparams": key_parameters(runner.secret),
    }
    return _b64(json.dumps({name: _b64(json.dumps(content)) for name, content in files.items()}))


def _client_id(runner: RegisteredRunner) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"runner-{runner.id}"))


def _group(scope: str, name: str, group_id: int) -> dict[str, Any]:
    return {
        "id": group_id,
        "name": name,
        "visibility": "all",
        "default": group_id == DEFAULT_GROUP_ID,
        "runners_url": f"https://api.github.com/orgs/{scope}/actions/runner-groups/{group_id}/runners",
        "inherited": False,
        "allows_public_repositories": False,
        "restricted_to_workflows": False,
        "selected_workflows": [],
    }


def _scope(request: Request) -> str:
    path = request.path_params
    return str(path["org"]) if "org" in path else f"{path['owner']}/{path['repo']}"


def _runner_id(request: Request) -> int:
    value = str(request.path_params["runner_id"])
    if not value.isdecimal():
        raise ApiError(404, "Not Found")
    return int(value)


def _positive(request: Request, name: str, default: int) -> int:
    value = request.query_params.get(name, "")
    return max(1, int(value)) if value.isdecimal() else default


def _link(request: Request, *, page: int, last: int) -> str:
    relations: list[tuple[str, int]] = []
    if page > 1:
        relations += [("prev", min(page - 1, last)), ("first", 1)]
    if page < last:
        relations = [("next", page + 1), ("last", last), *relations]
    return ", ".join(
        f'<{request.url.include_query_params(page=number)}>; rel="{relation}"' for relation, number in relations
    )


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def app_routes(app: AppState) -> list[BaseRoute]:
    api = AppsRest(app)
    table: list[tuple[str, str, str, Handler]] = [
        *(("GET", f"{scope}/installation", "installation", api.installation) for scope in SCOPES),
        ("POST", "/app/installations/{installation_id:int}/access_tokens", "installation-token", api.access_token),
    ]
    return [
        Route(f"{prefix}{path}", api.endpoint(operation, answer), methods=[method])
        for prefix in PREFIXES
        for method, path, operation, answer in table
    ]


class AppsRest:
    def __init__(self, app: AppState) -> None:
        self._app = app
        self._core = app.core

    def endpoint(self, operation: str, answer: Handler) -> Any:
        async def handle(request: Request) -> Response:
            return await self._app.respond(operation, lambda: self._answer(request, answer))

        return handle

    async def _answer(self, request: Request, answer: Handler) -> Response:
        check_headers(request)
        self._check_app(bearer(request))
        return answer(request, "", {})

    def installation(self, request: Request, _scope: str, _body: dict[str, Any]) -> Response:
        owner = str(request.path_params.get("org") or request.path_params["owner"])
        owners = [name.lower() for name in self._core.state.settings.app_owners]
        if owner.lower() not in owners:
            raise ApiError(404, "Not Found")
        number = owners.index(owner.lower()) + 1
        app = self._core.state.settings.app_id
        return JSONResponse({"id": number, "account": {"login": owner}, "app_id": int(app) if app.isdecimal() else 0})

    def access_token(self, request: Request, _scope: str, _body: dict[str, Any]) -> Response:
        number, owners = int(request.path_params["installation_id"]), self._core.state.settings.app_owners
        if not 1 <= number <= len(owners):
            raise ApiError(404, "Not Found")
        token = self._core.registry.issue_installation(owners[number - 1])
        return JSONResponse({"token": token.value, "expires_at": timestamp(token.expires_at)}, status_code=201)

    def _check_app(self, token: str) -> None:
        import jwt  # noqa: PLC0415 - an optional dependency that the demo does not need

        settings = self._core.state.settings
        undecodable = ApiError(401, "A JSON web token could not be decoded")
        if not settings.app_id or not settings.app_key:
            raise undecodable
        try:
            # Times are checked below, with the injected clock.
            claims = jwt.decode(
                token, settings.app_key, algorithms=["RS256"], options={"verify_exp": False, "verify_iat": False}
            )
            issued, expires = int(claims["iat"]), int(claims["exp"])
        except (jwt.PyJWTError, KeyError, TypeError, ValueError):
            raise undecodable from None
        now = self._core.clock.now()
        if str(claims.get("iss")) != settings.app_id:
            raise undecodable
        if issued > now + LEEWAY_S:
            raise ApiError(401, "'Issued at' claim ('iat') must be an Integer representing a time in the past")
        if expires <= now:
            raise ApiError(401, "'Expiration time' claim ('exp') is in the past")
        if expires - now > MAX_LIFETIME_S:
            raise ApiError(401, "'Expiration time' claim ('exp') is too far in the future")
