"""Runner scale sets as the source of demand: client of GitHub's Actions service.

Requests, status codes and tokens follow github.com/actions/scaleset (client.go, session_client.go): a registration
token is exchanged for the service's address and an admin token; a message session has its own token.
"""

from __future__ import annotations

import asyncio
import json as json_module
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit

from remuda import __version__
from remuda.adapters.github import scale_set_responses as parsing
from remuda.adapters.github.client import MAX_ATTEMPTS, MAX_WAIT_S, PAUSE_S, GitHubClient, open_connections
from remuda.adapters.github.responses import ServiceAccess, decompress, parse_id, too_long
from remuda.adapters.github.scale_set_responses import JobStillRunning, SessionAccess, translate_service
from remuda.domain.demand import DemandMessage, DemandStatistics
from remuda.domain.errors import Conflict, NotFound, RemudaError, Throttled, TimedOut, Unavailable, UserError
from remuda.domain.pool_config import DEFAULT_GROUP_ID
from remuda.domain.runner_set import FIELD, RunnerSet
from remuda.http import ClientResponse, ConnectTimeout, HttpConnections, HttpError, ReadTimeout, ResponseTooLong
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, Ids, backoff_s, retry
from remuda.ports.event_log import EventLog, SilentEventLog
from remuda.ports.github import Deletion, JitRunner

#: Counted apart from GitHub's API: the Actions service has its own limits.
SERVICE = "scale-sets"
API_VERSION = "6.0-preview"
CAPACITY_HEADER = "X-ScaleSetMaxCapacity"
#: Timeout in seconds of a whole call, and of one that waits for a message: GitHub answers after about 50 s.
TIMEOUT_S = 20.0
POLL_TIMEOUT_S = 90.0
#: An admin token is replaced if it expires within this many seconds.
RENEW_BEFORE_S = 60.0
#: One poll per set, and the calls beside them.
CONNECTIONS = 200
WORK_FOLDER = "_work"

_SETS = "_apis/runtime/runnerscalesets"
_AGENTS = "_apis/distributedtask/pools/0/agents"


@dataclass(slots=True)
class _Scope:
    """Cached access of one scope. The lock prevents concurrent renewals."""

    access: ServiceAccess | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class _Call(NamedTuple):
    method: str
    url: str
    #: What it is, for errors and call counts: no address, no query.
    operation: str
    scale_set_id: int = 0
    json: Any = None
    headers: Mapping[str, str] = {}
    #: Safe to send again if it is unknown whether GitHub received it.
    idempotent: bool = True
    timeout_s: float = 0.0


class ScaleSetSource:
    """Implements `DemandSource`. The GitHub client stays open when the source is closed."""

    def __init__(
        self, *, github: GitHubClient, clock: Clock, ids: Ids, calls: CallCounter, event_log: EventLog | None = None
    ) -> None:
        self._github = github
        self._clock = clock
        self._ids = ids
        self._calls = calls
        self._event_log = event_log or SilentEventLog()
        self._scopes: dict[str, _Scope] = {}
        self._origins: dict[str, HttpConnections] = {}

    async def close(self) -> None:
        await asyncio.gather(*(origin.close() for origin in self._origins.values()))

    # Scale sets

    async def find_set(self, runner_set: RunnerSet) -> int | None:
        found = await self._find(runner_set, await self._group_id(runner_set))
        return _checked_id(found, runner_set) if found else None

    async def create_set(self, runner_set: RunnerSet) -> int:
        group_id = await self._group_id(runner_set)
        try:
            created = await self._create(runner_set, group_id)
        except Conflict:
            # Created by a lost request, or by another process.
            found = await self._find(runner_set, group_id)
            if found is None:
                why = f"GitHub says that runner set {runner_set.name!r} exists, but does not list it"
                raise Unavailable(why) from None
            created = found
        return _checked_id(created, runner_set)

    async def delete_set(self, runner_set: RunnerSet) -> bool:
        found = await self._find(runner_set, await self._group_id(runner_set))
        if found is None:
            return False
        try:
            await self._call(runner_set, "DELETE", f"{_SETS}/{found.scale_set_id}", "runnerscalesets")
        except NotFound:
            return False
        return True

    async def count_jobs(self, runner_set: RunnerSet, scale_set_id: int) -> DemandStatistics | None:
        """The set with its statistics (actions/scaleset: client.go, GetRunnerScaleSetByID; types.go)."""
        path = f"{_SETS}/{scale_set_id}"
        response = await self._call(runner_set, "GET", path, "runnerscalesets", scale_set_id=scale_set_id)
        return parsing.parse_statistics(parsing.parse_object(response).get("statistics"))

    async def _find(self, runner_set: RunnerSet, group_id: int) -> parsing.ScaleSetDescription | None:
        params = {"runnerGroupId": str(group_id), "name": runner_set.name}
        response = await self._call(runner_set, "GET", _SETS, "runnerscalesets", params=params)
        named = [
            each
            for each in parsing.parse_list(response)
            if isinstance(each, dict) and str(each.get("name", "")).lower() == runner_set.name.lower()
        ]
        return parsing.parse_scale_set(named[0]) if named else None

    async def _create(self, runner_set: RunnerSet, group_id: int) -> parsing.ScaleSetDescription:
        body = {
            "name": runner_set.name,
            "runnerGroupId": group_id,
            "labels": [{"name": label, "type": "System"} for label in runner_set.labels],
            # Machines have the runner's version of their image or pool.
            "RunnerSetting": {"disableUpdate": True},
        }
        # Sent again after a lost response: then it is a conflict.
        response = await self._call(runner_set, "POST", _SETS, "runnerscalesets", json=body)
        return parsing.parse_scale_set(parsing.parse_object(response))

    async def _group_id(self, runner_set: RunnerSet) -> int:
        """The id of the set's runner group now: a group may be deleted, renamed and created again."""
        if not runner_set.runner_group:
            return DEFAULT_GROUP_ID
        params = {"groupName": runner_set.runner_group}
        response = await self._call(runner_set, "GET", "_apis/runtime/runnergroups/", "runnergroups", params=params)
        groups = [each for each in parsing.parse_list(response) if isinstance(each, dict)]
        named = [each for each in groups if str(each.get("name", "")).lower() == runner_set.runner_group.lower()]
        if not named:
            raise UserError(
                f"{runner_set.scope} has no runner group {runner_set.runner_group!r}",
                field=FIELD,
                fix=f"create the group, or remove runner-group of the set {runner_set.name!r}",
            )
        return parse_id(named[0], "runner group")

    # Sessions

    async def open_session(
        self, runner_set: RunnerSet, scale_set_id: int, *, owner: str, session_id: str = ""
    ) -> ScaleSetSession:
        access = await self._take_over(runner_set, scale_set_id, session_id)
        if access is None:
            # A session of a lost request ends by inactivity; until then it is a conflict.
            response = await self._call(
                runner_set,
                "POST",
                f"{_SETS}/{scale_set_id}/sessions",
                "sessions",
                json={"ownerName": owner},
                scale_set_id=scale_set_id,
                idempotent=False,
            )
            access = self._parse_session(response)
        session = ScaleSetSession(self, runner_set, scale_set_id, access, self._event_log)
        if session.statistics and session.statistics.available:
            await session.offer_again()
        return session

    async def _take_over(self, runner_set: RunnerSet, scale_set_id: int, session_id: str) -> SessionAccess | None:
        if not parsing.is_session_id(session_id):
            return None
        try:
            return await self.refresh_session(runner_set, scale_set_id, session_id)
        except (Throttled, TimedOut):
            raise
        except RemudaError as error:
            # GitHub has several answers to a session that has ended. If this one has not, a new one is a conflict.
            self._event_log.record("session-not-continued", error.message, runner_set=runner_set.name)
            return None

    async def refresh_session(self, runner_set: RunnerSet, scale_set_id: int, session_id: str) -> SessionAccess:
        """Renew the token of a session. Raises `NotFound` if the session or the set does not exist."""
        path = f"{_SETS}/{scale_set_id}/sessions/{session_id}"
        return self._parse_session(await self._call(runner_set, "PATCH", path, "sessions", scale_set_id=scale_set_id))

    async def delete_session(self, runner_set: RunnerSet, scale_set_id: int, session_id: str) -> None:
        path = f"{_SETS}/{scale_set_id}/sessions/{session_id}"
        try:
            await self._call(runner_set, "DELETE", path, "sessions", scale_set_id=scale_set_id)
        except NotFound:
            return

    async def acquirable_jobs(self, runner_set: RunnerSet, scale_set_id: int) -> list[Any]:
        path = f"{_SETS}/{scale_set_id}/acquirablejobs"
        response = await self._call(runner_set, "GET", path, "acquirablejobs", scale_set_id=scale_set_id)
        return [] if response.status == 204 else parsing.parse_list(response)

    def _parse_session(self, response: ClientResponse) -> SessionAccess:
        return parsing.parse_session(parsing.parse_object(response), is_local=self._github.is_local)

    # Runners

    async def register(self, runner_set: RunnerSet, scale_set_id: int, *, name: str) -> JitRunner:
        try:
            return await self._register(runner_set, scale_set_id, name)
        except Throttled:
            raise
        except Unavailable:
            # The response may be lost. If the runner exists now, its configuration cannot be read again: it is removed
            # and registered once more. Names are never reused, so it cannot belong to another process.
            await self._clock.sleep(backoff_s(1, first_s=PAUSE_S, ids=self._ids))
        try:
            return await self._register(runner_set, scale_set_id, name)
        except Conflict as conflict:
            runner_id = await self.find_runner(runner_set, name=name)
            if runner_id is not None and await self.deregister(runner_set, runner_id) is Deletion.BUSY:
                raise Conflict(f"{conflict.message}; it runs a job") from conflict
        return await self._register(runner_set, scale_set_id, name)

    async def _register(self, runner_set: RunnerSet, scale_set_id: int, name: str) -> JitRunner:
        response = await self._call(
            runner_set,
            "POST",
            f"{_SETS}/{scale_set_id}/generatejitconfig",
            "generatejitconfig",
            json={"name": name, "workFolder": WORK_FOLDER},
            scale_set_id=scale_set_id,
            idempotent=False,
        )
        return parsing.parse_jit_runner(parsing.parse_object(response))

    async def find_runner(self, runner_set: RunnerSet, *, name: str) -> int | None:
        response = await self._call(runner_set, "GET", _AGENTS, "agents", params={"agentName": name})
        for each in parsing.parse_list(response):
            if isinstance(each, dict) and str(each.get("name", "")).lower() == name.lower():
                return parse_id(each, "runner")
        return None

    async def deregister(self, runner_set: RunnerSet, runner_id: int) -> Deletion:
        # DELETE is answered with 204 for a runner that is gone, too, for example after a job that no one has noticed.
        try:
            await self._call(runner_set, "GET", f"{_AGENTS}/{runner_id}", "agents")
            await self._call(runner_set, "DELETE", f"{_AGENTS}/{runner_id}", "agents")
        except JobStillRunning:
            return Deletion.BUSY
        except NotFound:
            return Deletion.GONE
        return Deletion.DELETED

    # Calls

    async def _call(
        self,
        runner_set: RunnerSet,
        method: str,
        path: str,
        operation: str,
        *,
        params: Mapping[str, str] | None = None,
        json: Any = None,
        scale_set_id: int = 0,
        idempotent: bool = True,
    ) -> ClientResponse:
        """Call the service with the admin token. If GitHub rejects it, retry once with a new one."""
        for is_last in (False, True):
            access = await self._access(runner_set.scope)
            call = _Call(
                method,
                _joined(access.url, path, {**(params or {}), "api-version": API_VERSION}),
                operation,
                scale_set_id=scale_set_id,
                json=json,
                headers={"Content-Type": "application/json"},
                idempotent=idempotent,
            )
            token = access.credential.token
            response = await self.send(call, token, accept=frozenset() if is_last else {401})
            if response.status != 401:
                break
            self._forget(runner_set.scope, token)
        return response

    async def service_url(self, runner_set: RunnerSet, path: str) -> str:
        access = await self._access(runner_set.scope)
        return _joined(access.url, path, {"api-version": API_VERSION})

    async def _access(self, scope: str) -> ServiceAccess:
        cached = self._scopes.setdefault(scope.lower(), _Scope())
        async with cached.lock:
            now = self._clock.now()
            access = cached.access
            if access is None or (access.credential.expires_at - now).total_seconds() < RENEW_BEFORE_S:
                access = cached.access = await self._github.actions_service(scope)
            return access

    def _forget(self, scope: str, token: str) -> None:
        cached = self._scopes[scope.lower()]
        # Another call may already have replaced the token.
        if cached.access is not None and cached.access.credential.token == token:
            cached.access = None

    async def send(self, call: _Call, token: str, *, accept: AbstractSet[int] = frozenset()) -> ClientResponse:
        """Send a call and retry temporary failures. `accept` are status codes that are results."""

        def pause_s(error: RemudaError, attempt: int) -> float | None:
            if isinstance(error, Throttled):
                return error.retry_after_s if error.retry_after_s <= MAX_WAIT_S else None
            is_safe = call.idempotent and type(error) is Unavailable
            return backoff_s(attempt, first_s=PAUSE_S, ids=self._ids) if is_safe else None

        async def send_once() -> ClientResponse:
            return await self._send_once(call, token, accept)

        return await retry(send_once, attempts=MAX_ATTEMPTS, pause_s=pause_s, clock=self._clock)

    async def _send_once(self, call: _Call, token: str, accept: AbstractSet[int]) -> ClientResponse:
        what = f"{call.method} {call.operation}"
        with self._calls.counted(SERVICE, what):
            response = await self._receive(call, token, what)
            if not response.is_success and response.status not in accept:
                raise translate_service(response, what, self._clock.now(), credential=token)
        return response

    async def _receive(self, call: _Call, token: str, what: str) -> ClientResponse:
        parts = urlsplit(call.url)
        target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
        headers = {**call.headers, "Authorization": f"Bearer {token}", "User-Agent": _user_agent(call.scale_set_id)}
        body = b"" if call.json is None else json_module.dumps(call.json).encode()
        timeout_s = call.timeout_s or TIMEOUT_S
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._origin(call.url).request(
                    call.method, target, headers=headers, body=body, timeout_s=timeout_s
                )
        except (TimeoutError, ConnectTimeout, ReadTimeout):
            raise TimedOut(f"GitHub did not respond within {timeout_s:g} s ({what})") from None
        except ResponseTooLong:
            raise too_long() from None
        except HttpError as error:
            raise Unavailable(f"GitHub cannot be reached ({what}): {type(error).__name__}") from None
        return decompress(response)

    def _origin(self, url: str) -> HttpConnections:
        parts = urlsplit(url)
        origin = f"{parts.scheme}://{parts.netloc}"
        if origin not in self._origins:
            self._origins[origin] = open_connections(origin, connections=CONNECTIONS)
        return self._origins[origin]


class ScaleSetSession:
    """Implements `DemandSession`."""

    def __init__(
        self,
        source: ScaleSetSource,
        runner_set: RunnerSet,
        scale_set_id: int,
        access: SessionAccess,
        event_log: EventLog,
    ) -> None:
        self._source = source
        self._set = runner_set
        self._id = scale_set_id
        self._access = access
        self._event_log = event_log
        self._statistics = access.statistics
        self._latest = access.statistics or DemandStatistics()
        self._refreshing = asyncio.Lock()
        #: Jobs that were offered before this session, and the id of the message with which they were returned.
        self._offers: list[Any] = []
        self._offers_id: int | None = None

    @property
    def session_id(self) -> str:
        return self._access.session_id

    @property
    def statistics(self) -> DemandStatistics | None:
        return self._statistics

    async def offer_again(self) -> None:
        """Ask for the jobs that can be acquired: messages about them may be acknowledged already.

        Older versions of actions-runner-controller do this, too, when they open a session.
        """
        self._offers = await self._source.acquirable_jobs(self._set, self._id)

    async def receive(self, *, last_message_id: int, capacity: int) -> DemandMessage | None:
        if capacity < 1:
            # GitHub never delivers a job that was queued while the capacity was 0.
            raise ValueError(f"the capacity of a runner set must be above 0, got {capacity}")
        problems: Sequence[str]
        if self._offers:
            message, problems = self._earlier_offers(last_message_id)
        else:
            headers = {"Accept": f"application/json; api-version={API_VERSION}", CAPACITY_HEADER: str(capacity)}
            params = {"lastMessageId": str(last_message_id)} if last_message_id > 0 else {}
            response = await self._queue_call(
                "GET", "message", params=params, headers=headers, timeout_s=POLL_TIMEOUT_S
            )
            if response.status == 202:
                return None
            # An empty body with status 200 occurs (actions-runner-controller#4470): parsing it raises `Unavailable`.
            message, problems = parsing.parse_message(parsing.parse_object(response), statistics=self._latest)
        self._latest = message.statistics
        for problem in problems:
            self._event_log.record("message-ignored", problem, runner_set=self._set.name, message_id=message.message_id)
        return message

    def _earlier_offers(self, message_id: int) -> tuple[DemandMessage, Sequence[str]]:
        problems: list[str] = []
        events = parsing.parse_events(self._offers, problems, default_type="JobAvailable")
        self._offers, self._offers_id = [], message_id
        return DemandMessage(message_id=message_id, statistics=self._latest, events=events), problems

    async def acknowledge(self, message_id: int) -> None:
        if message_id == self._offers_id:
            self._offers_id = None
            return
        try:
            await self._queue_call("DELETE", "message", suffix=f"/{message_id}")
        except NotFound:
            return  # the session is gone; the next poll says so

    async def acquire(self, request_ids: Collection[int]) -> Sequence[int]:
        wanted = sorted(request_ids)
        if not wanted:
            return ()
        url = await self._source.service_url(self._set, f"{_SETS}/{self._id}/acquirejobs")
        response = await self._queue_call(
            "POST", "acquirejobs", url=url, json=wanted, headers={"Content-Type": "application/json"}
        )
        return [number for number in parsing.parse_request_ids(response) if number in wanted]

    async def close(self) -> None:
        await self._source.delete_session(self._set, self._id, self._access.session_id)

    async def _queue_call(
        self,
        method: str,
        operation: str,
        *,
        url: str = "",
        suffix: str = "",
        params: Mapping[str, str] | None = None,
        json: Any = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 0.0,
    ) -> ClientResponse:
        """Call with the session's token. If it has expired, renew it and retry once."""
        for is_last in (False, True):
            access = self._access
            call = _Call(
                method,
                url or _joined(access.queue_url, suffix, params or {}),
                operation,
                scale_set_id=self._id,
                json=json,
                headers=headers or {},
                timeout_s=timeout_s,
            )
            response = await self._source.send(call, access.token, accept={401})
            if response.status != 401:
                return response
            if not is_last:
                await self._refresh(access)
        raise Unavailable(f"GitHub rejects the new token of the message session ({method} {operation})")

    async def _refresh(self, rejected: SessionAccess) -> None:
        async with self._refreshing:
            # Another call may already have renewed it.
            if self._access is rejected:
                self._access = await self._source.refresh_session(self._set, self._id, rejected.session_id)


def _checked_id(found: parsing.ScaleSetDescription, runner_set: RunnerSet) -> int:
    """The id of the set. Raises `UserError` if GitHub lists labels other than the configured ones.

    GitHub's client never reads the labels of a response, and its tests answer without them (actions/scaleset,
    client_test.go, TestGetRunnerScaleSet). Labels that are not listed are unknown, not wrong.
    """
    if found.labels is None:
        return found.scale_set_id
    given, wanted = ({label.lower() for label in labels} for labels in (found.labels, runner_set.labels))
    if given != wanted:
        raise UserError(
            f"runner set {runner_set.name!r} has the labels {', '.join(found.labels)} on GitHub, "
            f"but {', '.join(runner_set.labels)} are configured",
            field=FIELD,
            # GitHub Enterprise Server before 3.21 ignores all but one label unless a feature is enabled.
            fix="GitHub does not change labels: give the set another name, or configure the labels that it has",
        )
    return found.scale_set_id


def _joined(base: str, path: str, params: Mapping[str, str]) -> str:
    """The address with a longer path and more parameters. A path without a slash is below the address."""
    parts = urlsplit(base)
    whole = f"{parts.path.rstrip('/')}/{path}" if path and not path.startswith("/") else f"{parts.path}{path}"
    query = urlencode([*parse_qsl(parts.query, keep_blank_values=True), *params.items()])
    return parts._replace(path=whole, query=query, fragment="").geturl()


def _user_agent(scale_set_id: int) -> str:
    """GitHub's client sends a JSON object (common_client.go, setUserAgent)."""
    return json_module.dumps(
        {
            "system": "remuda",
            "version": __version__,
            "commit_sha": "unknown",
            "scale_set_id": scale_set_id,
            "subsystem": "listener",
            "build_version": __version__,
            "build_commit_sha": "unknown",
            "kind": "scaleset",
        }
    )
