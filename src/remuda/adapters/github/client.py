"""Client of GitHub's REST API for self-hosted runners of a repository or an organisation."""

from __future__ import annotations

import asyncio
import json as json_module
import os
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlencode, urlsplit

from remuda.adapters.github import responses
from remuda.adapters.github.auth import Auth, StaticToken
from remuda.adapters.github.responses import ServiceAccess, translate
from remuda.domain.errors import Conflict, NotFound, RemudaError, Throttled, TimedOut, Unavailable, UserError
from remuda.domain.instance import Credential
from remuda.domain.pool_config import DEFAULT_GROUP_ID
from remuda.domain.runner_release import RunnerRelease
from remuda.http import (
    ClientResponse,
    ConnectTimeout,
    HttpConnections,
    HttpError,
    InvalidRequest,
    ReadTimeout,
    ResponseTooLong,
)
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, Ids, ServerDates, backoff_s, retry
from remuda.ports.github import Deletion, GitHubRun, GitHubRunner, JitRunner, JobList, RunList, missing_group

PER_PAGE = 100
#: Maximum number of pages read, against Link headers that never end.
MAX_PAGES = 1_000
#: Timeout in seconds of a whole call. A call that timed out is not retried here.
TIMEOUT_S = 10.0
#: GitHub permits 100 concurrent requests per credential.
CONNECTIONS = 100
#: Seconds after which an unused connection is not used again.
KEEP_ALIVE_S = 5.0
#: Attempts to read a list of runners that changes while it is read.
LIST_ATTEMPTS = 3
#: Attempts per call, and seconds before the first retry.
MAX_ATTEMPTS = 4
PAUSE_S = 0.25
#: Default of the longest rate-limit pause in seconds that the client waits for.
MAX_WAIT_S = 5.0

_LOCAL_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})
_HEADERS = {
    "Accept": "application/vnd.github+json",
    "X-GitHub-Api-Version": "2022-11-28",
    "Accept-Encoding": "gzip",
    "User-Agent": "remuda",
}
#: Responses to a registration token that has just been created.
_NOT_YET_KNOWN = frozenset({401, 403, 404})
#: Last parts of paths that are counted as separate operations.
_COUNTED = frozenset({"downloads", "installation", "jobs", "runner-groups", "runs"})


def web_url(api_url: str) -> str:
    """The URL at which runners register, for an API URL of github.com, GHES, ghe.com or a local GitHub."""
    base = api_url.rstrip("/")
    if base == "https://api.github.com":
        return "https://github.com"
    if base.endswith("/api/v3"):
        return base.removesuffix("/api/v3")
    if base.startswith("https://api."):
        return "https://" + base.removeprefix("https://api.")
    return base


class _Request(NamedTuple):
    method: str
    path: str
    params: Mapping[str, str] | None
    json: Any
    #: Safe to send again if it is unknown whether GitHub received it.
    idempotent: bool
    #: Status codes that are results, not errors.
    accept: frozenset[int] = frozenset()
    #: Scheme of the authorization.
    scheme: str = "Bearer"
    etag: str = ""

    @property
    def what(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def name(self) -> str:
        """Name of the operation in the call counts."""
        last = self.path.rsplit("/", 1)[-1]
        if "/actions/runs/" in self.path and last.isdecimal():
            return f"{self.method} run"
        return f"{self.method} {last if self.method == 'POST' or last in _COUNTED else 'runners'}"


class _RunnerList(NamedTuple):
    runners: Mapping[int, GitHubRunner]
    #: `total_count` of each page.
    totals: Sequence[int]

    @property
    def is_complete(self) -> bool:
        """False if runners were added or removed between two pages: a removal shifts the rest, so one may be missed."""
        return set(self.totals) == {len(self.runners)}


class GitHubClient:
    def __init__(
        self,
        *,
        api_url: str,
        clock: Clock,
        ids: Ids,
        calls: CallCounter,
        token: str = "",
        auth: Auth | None = None,
        max_wait_s: float = MAX_WAIT_S,
        dates: ServerDates | None = None,
    ) -> None:
        """Pass a `token`, or an `auth` that has one per scope. If GitHub's rate limit demands a pause longer than
        `max_wait_s`, the call raises `Throttled`. `dates` observes the time of GitHub's answers.
        """
        self._dates = dates
        self._max_wait_s = max_wait_s
        self._auth = auth or StaticToken(token)
        self._clock = clock
        self._ids = ids
        self._calls = calls
        self._api_url = api_url
        self._http = open_connections(api_url)
        self._base = self._http.path.rstrip("/")

    async def close(self) -> None:
        await self._http.close()

    async def registration_token(self, scope: str) -> Credential:
        return await self._token(scope, "registration-token")

    async def removal_token(self, scope: str) -> Credential:
        return await self._token(scope, "remove-token")

    async def _token(self, scope: str, kind: str) -> Credential:
        return responses.parse_credential(await self._token_response(scope, kind), kind)

    async def _token_response(self, scope: str, kind: str) -> dict[str, Any]:
        # Idempotent: an extra token does no harm.
        with _scope_must_exist(scope):
            return responses.json_object(await self._call(scope, "POST", f"{_runners(scope)}/{kind}", idempotent=True))

    @property
    def is_local(self) -> bool:
        """Whether the API is reached without encryption, as that of a local GitHub is."""
        return urlsplit(self._api_url).scheme == "http"

    async def actions_service(self, scope: str) -> ServiceAccess:
        """Address and admin token of the Actions service, which serves runner scale sets.

        github.com/actions/scaleset, client.go, getActionsServiceAdminConnection. A new registration token may be
        rejected for a moment (actions-runner-controller#3377).
        """
        # Used at once, so its expiry does not matter. GitHub's client does not need one either (client.go,
        # registrationToken).
        answer = await self._token_response(scope, "registration-token")
        token = responses.parse_token(answer.get("token"), "registration-token")
        body = {"url": f"{web_url(self._api_url)}/{scope}", "runner_event": "register"}
        request = _Request("POST", "/actions/runner-registration", None, body, idempotent=True, scheme="RemoteAuth")
        for attempt in range(1, MAX_ATTEMPTS + 1):
            # 404: GitHub's answer to a token or scope that it does not know.
            is_last = attempt == MAX_ATTEMPTS
            with _scope_must_exist(scope):
                response = await self._send(request, token, accept=frozenset() if is_last else _NOT_YET_KNOWN)
            if response.is_success:
                break
            await self._clock.sleep(backoff_s(attempt, first_s=PAUSE_S, ids=self._ids))
        return responses.parse_service_access(
            responses.json_object(response), now=self._clock.now(), is_local=self.is_local
        )

    async def jit_config(
        self, scope: str, *, name: str, labels: Sequence[str], group_id: int = DEFAULT_GROUP_ID
    ) -> JitRunner:
        body = {"name": name, "runner_group_id": group_id, "labels": list(labels)}
        try:
            return await self._request_jit_config(scope, body)
        except Throttled:
            raise
        except Unavailable:
            return await self._retry_jit_config(scope, body)

    async def runner_group_id(self, scope: str, name: str) -> int:
        groups: dict[str, int] = {}
        for page in range(1, MAX_PAGES + 1):
            params = {"per_page": str(PER_PAGE), "page": str(page)}
            with _scope_must_exist(scope):
                response = await self._call(
                    scope, "GET", f"/orgs/{scope}/actions/runner-groups", params=params, idempotent=True
                )
            groups |= responses.parse_runner_groups(responses.json_object(response))
            if 'rel="next"' not in response.headers.get("link", ""):
                break
        # Like the runner, which compares names without regard to case.
        for known, group_id in groups.items():
            if known.lower() == name.lower():
                return group_id
        raise missing_group(scope, name, groups)

    async def _request_jit_config(self, scope: str, body: Mapping[str, Any]) -> JitRunner:
        with _scope_must_exist(scope):
            response = await self._call(scope, "POST", f"{_runners(scope)}/generate-jitconfig", json=body)
        return responses.parse_jit_runner(responses.json_object(response))

    async def _retry_jit_config(self, scope: str, body: Mapping[str, Any]) -> JitRunner:
        """Retry after a response that was lost, or that cannot be read.

        If a runner with this name exists now, the lost call created it, and its configuration cannot be read again. The
        runner is deleted and created once more. Names are never reused, so it cannot belong to another process.
        """
        await self._clock.sleep(backoff_s(1, first_s=PAUSE_S, ids=self._ids))
        try:
            return await self._request_jit_config(scope, body)
        except Conflict as conflict:
            named = await self._list(scope, {"name": str(body["name"])})
            for runner in named.runners.values():
                if runner.name != body["name"]:
                    continue
                if await self.delete_runner(scope, runner.runner_id) is Deletion.BUSY:
                    raise Conflict(f"{conflict.message}; it runs a job") from conflict
        return await self._request_jit_config(scope, body)

    async def immutable_name(self, scope: str) -> str:
        """The scope with ids, as the subjects of OIDC tokens have it: `acme@1234/app@5678`, or `acme@1234/*`.

        https://docs.github.com/rest/repos/repos#get-a-repository and
        https://docs.github.com/rest/orgs/orgs#get-an-organization
        """
        path = f"/repos/{scope}" if "/" in scope else f"/orgs/{scope}"
        with _scope_must_exist(scope):
            response = await self._call(scope, "GET", path, idempotent=True)
        return responses.parse_immutable_name(responses.json_object(response))

    async def runner_downloads(self, scope: str) -> RunnerRelease:
        """https://docs.github.com/rest/actions/self-hosted-runners#list-runner-applications-for-a-repository.

        Needs the permission to read the scope's runners.
        """
        with _scope_must_exist(scope):
            response = await self._call(scope, "GET", f"{_runners(scope)}/downloads", idempotent=True)
        return responses.parse_runner_downloads(response)

    async def list_runners(self, scope: str) -> Sequence[GitHubRunner]:
        """All runners of a scope. An incomplete list is read again.

        If the list keeps changing, the union of all attempts is returned: a runner too many does less harm than a
        missing one.
        """
        seen: dict[int, GitHubRunner] = {}
        for _ in range(LIST_ATTEMPTS):
            listed = await self._list(scope, {})
            if listed.is_complete:
                return list(listed.runners.values())
            seen.update(listed.runners)
        if len(set(listed.totals)) > 1 and len(seen) >= listed.totals[-1]:
            return list(seen.values())
        raise Unavailable(
            f"GitHub's list of runners of {scope} is incomplete: {len(listed.runners)} of {listed.totals[-1]}"
        )

    async def _list(self, scope: str, filters: Mapping[str, str]) -> _RunnerList:
        runners: dict[int, GitHubRunner] = {}
        totals: list[int] = []
        for page in range(1, MAX_PAGES + 1):
            params = {**filters, "per_page": str(PER_PAGE), "page": str(page)}
            with _scope_must_exist(scope):
                response = await self._call(scope, "GET", _runners(scope), params=params, idempotent=True)
            found, total = responses.parse_runner_page(responses.json_object(response))
            totals.append(total)
            before = len(runners)
            runners.update((runner.runner_id, runner) for runner in found)
            # A page without new runners is the last one, even if its Link header names a next page.
            if 'rel="next"' not in response.headers.get("link", "") or len(runners) == before:
                break
        return _RunnerList(runners, totals)

    async def first_runner_response(self, scope: str) -> ClientResponse:
        """The response with at most one runner of a scope, for checks of access and headers."""
        with _scope_must_exist(scope):
            return await self._call(scope, "GET", _runners(scope), params={"per_page": "1"}, idempotent=True)

    @property
    def credential_description(self) -> str:
        return self._auth.description

    async def get_runner(self, scope: str, runner_id: int) -> GitHubRunner | None:
        try:
            response = await self._call(scope, "GET", f"{_runners(scope)}/{runner_id}", idempotent=True)
        except NotFound:
            return None
        return responses.parse_runner(responses.json_object(response))

    async def delete_runner(self, scope: str, runner_id: int) -> Deletion:
        try:
            response = await self._call(
                scope, "DELETE", f"{_runners(scope)}/{runner_id}", idempotent=True, accept={422}
            )
        except NotFound:
            return Deletion.GONE
        return Deletion.BUSY if response.status == 422 else Deletion.DELETED

    async def list_runs(self, scope: str, repository: str, *, status: str, etag: str = "") -> RunList | None:
        """https://docs.github.com/rest/actions/workflow-runs#list-workflow-runs-for-a-repository.

        https://docs.github.com/rest/using-the-rest-api/best-practices-for-using-the-rest-api: a 304 response to an
        authorised request does not count for the primary rate limit.
        """
        params = {**({"status": status} if status else {}), "per_page": str(PER_PAGE)}
        with _actions_must_be_readable(repository):
            response = await self._call(
                scope,
                "GET",
                f"/repos/{repository}/actions/runs",
                params=params,
                idempotent=True,
                accept={304},
                etag=etag,
            )
        return None if response.status == 304 else responses.parse_runs(response)

    async def list_jobs(self, scope: str, repository: str, run_id: int, *, etag: str = "") -> JobList | None:
        """https://docs.github.com/rest/actions/workflow-jobs#list-jobs-for-a-workflow-run."""
        params = {"filter": "latest", "per_page": str(PER_PAGE)}
        path = f"/repos/{repository}/actions/runs/{run_id}/jobs"
        try:
            with _actions_must_be_readable(repository):
                response = await self._call(scope, "GET", path, params=params, idempotent=True, accept={304}, etag=etag)
        except NotFound:
            return JobList()
        return None if response.status == 304 else responses.parse_jobs(response)

    async def get_run(self, scope: str, repository: str, run_id: int, *, etag: str = "") -> GitHubRun | None:
        """https://docs.github.com/rest/actions/workflow-runs#get-a-workflow-run."""
        path = f"/repos/{repository}/actions/runs/{run_id}"
        with _actions_must_be_readable(repository):
            response = await self._call(scope, "GET", path, idempotent=True, accept={304}, etag=etag)
        return None if response.status == 304 else responses.parse_run(response)

    async def rerun_failed_jobs(self, scope: str, repository: str, run_id: int) -> None:
        """https://docs.github.com/rest/actions/workflow-runs#re-run-failed-jobs-from-a-workflow-run.

        GitHub answers 403 without the permission, and for a run that is not completed or too old.
        """
        path = f"/repos/{repository}/actions/runs/{run_id}/rerun-failed-jobs"
        try:
            await self._call(scope, "POST", path)
        except UserError as error:
            error.fix = f"grant the credential the permission Actions: write on {repository}"
            raise

    async def _call(
        self,
        scope: str,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        json: Any = None,
        idempotent: bool = False,
        accept: frozenset[int] | set[int] = frozenset(),
        etag: str = "",
    ) -> ClientResponse:
        """Call with the scope's token. If GitHub rejects it, retry once with a new one."""
        token = await self._auth.token(scope, self._call_as_app)
        request = _Request(method, path, params, json, idempotent, frozenset(accept), etag=etag)
        response = await self._send(request, token, accept={401})
        if response.status == 401 and self._auth.invalidate(scope, token):
            token = await self._auth.token(scope, self._call_as_app)
            response = await self._send(request, token, accept={401})
        if response.status == 401:
            raise translate(response, request.what, self._clock.now(), credential=token)
        return response

    async def _call_as_app(self, method: str, path: str, *, bearer: str) -> dict[str, Any]:
        # Idempotent: an extra token does no harm.
        return responses.json_object(await self._send(_Request(method, path, None, None, idempotent=True), bearer))

    async def _send(self, request: _Request, token: str, accept: AbstractSet[int] = frozenset()) -> ClientResponse:
        """Send a request and retry temporary failures."""

        def pause_s(error: RemudaError, attempt: int) -> float | None:
            if isinstance(error, Throttled):
                # GitHub does not carry out a throttled call, so a retry is always safe.
                return error.retry_after_s if error.retry_after_s <= self._max_wait_s else None
            is_safe = request.idempotent and type(error) is Unavailable
            return backoff_s(attempt, first_s=PAUSE_S, ids=self._ids) if is_safe else None

        async def send_once() -> ClientResponse:
            return await self._send_once(request, token, accept)

        return await retry(send_once, attempts=MAX_ATTEMPTS, pause_s=pause_s, clock=self._clock)

    async def _send_once(self, request: _Request, token: str, accept: AbstractSet[int]) -> ClientResponse:
        self._calls.add("github", request.name)
        try:
            response = await self._receive(request, token)
        except RemudaError:
            self._calls.fail("github", request.name)
            raise
        status = response.status
        # 404 and accepted codes do not count as failures. A rejected credential does, even if a new token works.
        if not (response.is_success or status in request.accept | {404}):
            self._calls.fail("github", request.name)
        if response.is_success:
            return response
        error = translate(response, request.what, self._clock.now(), credential=token)
        # GitHub limits calls with 403, too, which may also be a result.
        if status in request.accept | accept and not isinstance(error, Throttled):
            return response
        raise error

    async def _receive(self, request: _Request, token: str) -> ClientResponse:
        headers = {**_HEADERS, "Authorization": f"{request.scheme} {token}"}
        if request.etag:
            headers["If-None-Match"] = request.etag
        query = f"?{urlencode(request.params)}" if request.params else ""
        body = b""
        if request.json is not None:
            headers["Content-Type"] = "application/json"
            body = json_module.dumps(request.json).encode()
        try:
            async with asyncio.timeout(TIMEOUT_S):
                response = await self._http.request(
                    request.method, f"{self._base}{request.path}{query}", headers=headers, body=body
                )
        except (TimeoutError, ConnectTimeout, ReadTimeout):
            raise TimedOut(f"GitHub did not respond within {TIMEOUT_S:g} s ({request.what})") from None
        except ResponseTooLong:
            raise responses.too_long() from None
        except InvalidRequest:
            raise UserError(
                f"GitHub cannot be called ({request.what}): the credential or the path has an invalid character",
                field="github-token",
                fix="set REMUDA_GITHUB_TOKEN to the token alone, without a line break",
            ) from None
        except HttpError as error:
            raise Unavailable(f"GitHub cannot be reached ({request.what}): {type(error).__name__}") from None
        if self._dates is not None:
            self._dates.observe("GitHub", response.headers.get("date", ""))
        return responses.decompress(response)


@contextmanager
def _actions_must_be_readable(repository: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        error.fix = f"grant the credential the permission to read Actions of {repository}"
        raise


@contextmanager
def _scope_must_exist(scope: str) -> Iterator[None]:
    """Translate 404 for a whole scope. GitHub does not say whether it is missing or the credential has no access."""
    try:
        yield
    except NotFound as error:
        raise UserError(
            error.message,
            field="github-scope",
            fix=f"check that {scope} exists and that the credential may administer its runners",
        ) from error


def open_connections(url: str, *, connections: int = CONNECTIONS) -> HttpConnections:
    """Connections to GitHub's API, or to another service of GitHub."""
    try:
        return HttpConnections(
            url,
            connect_timeout_s=TIMEOUT_S,
            timeout_s=TIMEOUT_S,
            connections=connections,
            max_body=responses.MAX_BODY,
            ca_bundle=os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR", ""),
            # A local GitHub is not reachable through a proxy.
            use_proxy=urlsplit(url).hostname not in _LOCAL_HOSTS,
            keep_alive_s=KEEP_ALIVE_S,
        )
    except ValueError as error:
        raise UserError(
            f"GitHub cannot be called: {error}",
            field="github-api-url",
            fix="check REMUDA_GITHUB_API_URL and HTTPS_PROXY",
        ) from None


def _runners(scope: str) -> str:
    return f"/repos/{scope}/actions/runners" if "/" in scope else f"/orgs/{scope}/actions/runners"
