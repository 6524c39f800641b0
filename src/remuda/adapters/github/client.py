"""GitHub's REST for self-hosted runners, of a repository or an organisation."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any, NamedTuple

import httpx

from remuda.adapters.github import answers
from remuda.adapters.github.auth import Auth, StaticToken
from remuda.adapters.github.errors import translate
from remuda.domain.errors import Conflict, NotFound, RemudaError, Throttled, TimedOut, Unavailable, UserError
from remuda.domain.instance import Credential
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, Ids
from remuda.ports.github import Deletion, GitHubRunner, JitRunner

PER_PAGE = 100
#: No list is longer than this; a Link header that goes round in circles ends here.
MAX_PAGES = 1_000
#: For a whole call, not for each byte of it. What got no answer in that time is not repeated here.
TIMEOUT_S = 10.0
#: How often a list is read that changes, or does not hold what it says.
LIST_TRIES = 3
#: For calls that may be repeated: how often, and the first pause.
TRIES = 4
PAUSE_S = 0.25
#: The longest wait that GitHub may ask for and that is waited here, unless told otherwise.
MAX_WAIT_S = 5.0

_LOCAL_HOSTS = frozenset({"127.0.0.1", "::1", "localhost"})
_HEADERS = {
    "Accept": "application/vnd.github+json",
    "X-GitHub-Api-Version": "2022-11-28",
    "User-Agent": "remuda",
}


def web_url(api_url: str) -> str:
    """Where runners register, for an API base: github.com, a GHES host, a ghe.com tenant, or a local GitHub."""
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
    #: It may be sent again where it is not known whether it arrived.
    repeat: bool
    #: Codes that are answers too.
    accept: frozenset[int] = frozenset()

    @property
    def what(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def name(self) -> str:
        """For the count of calls."""
        last = self.path.rsplit("/", 1)[-1]
        return f"{self.method} {last if self.method == 'POST' or last == 'installation' else 'runners'}"


class _Listed(NamedTuple):
    runners: Mapping[int, GitHubRunner]
    #: How many there are, as each page says.
    totals: Sequence[int]

    @property
    def is_whole(self) -> bool:
        """Between two pages a removal moves the rest up: one of them would be on neither."""
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
    ) -> None:
        """With a token, or with an `auth` that has one for each scope. `max_wait_s` is the longest wait that GitHub may
        ask for: what wants more is the caller's to try later.
        """
        self._max_wait_s = max_wait_s
        self._auth = auth or StaticToken(token)
        self._clock = clock
        self._ids = ids
        self._calls = calls
        self._client = httpx.AsyncClient(
            base_url=api_url.rstrip("/"),
            headers=_HEADERS,
            timeout=TIMEOUT_S,
            follow_redirects=False,
            # A local GitHub is on this machine: no proxy knows it.
            trust_env=not _is_local(api_url),
            verify=_authorities(api_url),
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def registration_token(self, scope: str) -> Credential:
        return await self._token(scope, "registration-token")

    async def removal_token(self, scope: str) -> Credential:
        return await self._token(scope, "remove-token")

    async def _token(self, scope: str, kind: str) -> Credential:
        # Minting twice does no harm: it may be repeated.
        with _needs(scope):
            response = await self._call(scope, "POST", f"{_runners(scope)}/{kind}", repeat=True)
        return answers.credential(answers.fields(response), kind)

    async def jit_config(self, scope: str, *, name: str, labels: Sequence[str]) -> JitRunner:
        body = {"name": name, "runner_group_id": 1, "labels": list(labels)}
        try:
            response = await self._ask_for_jit(scope, body)
        except Throttled:
            raise
        except Unavailable:
            response = await self._ask_for_jit_again(scope, body)
        return answers.jit_runner(answers.fields(response))

    async def _ask_for_jit(self, scope: str, body: Mapping[str, Any]) -> httpx.Response:
        with _needs(scope):
            return await self._call(scope, "POST", f"{_runners(scope)}/generate-jitconfig", json=body)

    async def _ask_for_jit_again(self, scope: str, body: Mapping[str, Any]) -> httpx.Response:
        """An answer was lost. Where the name exists now, that is what the lost call made, and its configuration is lost
        with the answer: it is removed and made anew, once. Names are never used twice, so it is nobody else's.
        """
        await self._clock.sleep(PAUSE_S * (0.5 + self._ids.jitter()))
        try:
            return await self._ask_for_jit(scope, body)
        except Conflict as conflict:
            named = await self._list(scope, {"name": str(body["name"])})
            for runner in named.runners.values():
                if runner.name != body["name"]:
                    continue
                if await self.delete_runner(scope, runner.runner_id) is Deletion.BUSY:
                    raise Conflict(f"{conflict.message}; it runs a job") from conflict
        return await self._ask_for_jit(scope, body)

    async def list_runners(self, scope: str) -> Sequence[GitHubRunner]:
        """A list that does not hold as many as GitHub says is read again. Where runners come and go all the time, what
        any of the readings saw stands: one that is gone does less harm than one that is missing.
        """
        seen: dict[int, GitHubRunner] = {}
        for _ in range(LIST_TRIES):
            listed = await self._list(scope, {})
            if listed.is_whole:
                return list(listed.runners.values())
            seen.update(listed.runners)
        if len(set(listed.totals)) > 1 and len(seen) >= listed.totals[-1]:
            return list(seen.values())
        raise Unavailable(
            f"GitHub's list of the runners of {scope} is not complete: {len(listed.runners)} of {listed.totals[-1]}"
        )

    async def _list(self, scope: str, only: Mapping[str, str]) -> _Listed:
        runners: dict[int, GitHubRunner] = {}
        totals: list[int] = []
        for page in range(1, MAX_PAGES + 1):
            params = {**only, "per_page": str(PER_PAGE), "page": str(page)}
            with _needs(scope):
                response = await self._call(scope, "GET", _runners(scope), params=params, repeat=True)
            found, total = answers.page(answers.fields(response))
            totals.append(total)
            before = len(runners)
            runners.update((runner.runner_id, runner) for runner in found)
            # A page that brings nothing new is the last one, whatever it says of a next.
            if 'rel="next"' not in response.headers.get("link", "") or len(runners) == before:
                break
        return _Listed(runners, totals)

    async def peek(self, scope: str) -> httpx.Response:
        """The first runner of a scope, if there is one, with GitHub's own headers."""
        with _needs(scope):
            return await self._call(scope, "GET", _runners(scope), params={"per_page": "1"}, repeat=True)

    @property
    def credential_kind(self) -> str:
        return self._auth.kind

    async def get_runner(self, scope: str, runner_id: int) -> GitHubRunner | None:
        try:
            response = await self._call(scope, "GET", f"{_runners(scope)}/{runner_id}", repeat=True)
        except NotFound:
            return None
        return answers.runner(answers.fields(response))

    async def delete_runner(self, scope: str, runner_id: int) -> Deletion:
        try:
            response = await self._call(scope, "DELETE", f"{_runners(scope)}/{runner_id}", repeat=True, accept={422})
        except NotFound:
            return Deletion.GONE
        return Deletion.BUSY if response.status_code == 422 else Deletion.DELETED

    async def _call(
        self,
        scope: str,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        json: Any = None,
        repeat: bool = False,
        accept: frozenset[int] | set[int] = frozenset(),
    ) -> httpx.Response:
        """With the scope's token; where it is refused, once more with a new one."""
        token = await self._auth.token(scope, self._call_as_app)
        request = _Request(method, path, params, json, repeat, frozenset(accept))
        response = await self._send(request, token, accept={401})
        if response.status_code == 401 and self._auth.refused(scope, token):
            token = await self._auth.token(scope, self._call_as_app)
            response = await self._send(request, token, accept={401})
        if response.status_code == 401:
            raise translate(response, request.what, self._clock.now())
        return response

    async def _call_as_app(self, method: str, path: str, *, bearer: str) -> dict[str, Any]:
        # A token that is minted twice does no harm.
        return answers.fields(await self._send(_Request(method, path, None, None, repeat=True), bearer))

    async def _send(self, request: _Request, token: str, accept: AbstractSet[int] = frozenset()) -> httpx.Response:
        """Repeat what may be repeated, and wait where GitHub asks for a short wait: what it refused for that was not
        done.
        """
        pause_s = PAUSE_S
        for attempt in range(1, TRIES + 1):
            failure = await self._try(request, token, accept)
            if isinstance(failure, httpx.Response):
                return failure
            if isinstance(failure, Throttled):
                wait_s, again = failure.retry_after_s, failure.retry_after_s <= self._max_wait_s
            else:
                wait_s, again = pause_s * (0.5 + self._ids.jitter()), request.repeat and type(failure) is Unavailable
            if not again or attempt == TRIES:
                raise failure
            await self._clock.sleep(wait_s)
            pause_s *= 2
        raise AssertionError  # pragma: no cover - the loop returns or raises

    async def _try(self, request: _Request, token: str, accept: AbstractSet[int]) -> httpx.Response | RemudaError:
        self._calls.add("github", request.name)
        answer = await self._answer(request, token)
        if isinstance(answer, httpx.Response):
            status = answer.status_code
            # What is not there, and what is busy, are answers; a refused credential is not, whoever mends it.
            if not (answer.is_success or status in request.accept | {404}):
                self._calls.fail("github", request.name)
            known = answer.is_success or status in request.accept | accept
            return answer if known else translate(answer, request.what, self._clock.now())
        self._calls.fail("github", request.name)
        return answer

    async def _answer(self, request: _Request, token: str) -> httpx.Response | RemudaError:
        headers = {"Authorization": f"Bearer {token}"}
        try:
            async with asyncio.timeout(TIMEOUT_S):
                async with self._client.stream(
                    request.method, request.path, params=request.params, json=request.json, headers=headers
                ) as response:
                    return await answers.whole(response)
        except Unavailable as error:
            return error
        except (TimeoutError, httpx.TimeoutException):
            return TimedOut(f"GitHub did not answer within {TIMEOUT_S:g} s ({request.what})")
        except httpx.HTTPError as error:
            return Unavailable(f"GitHub cannot be reached ({request.what}): {type(error).__name__}")


@contextmanager
def _needs(scope: str) -> Iterator[None]:
    """404 for a whole scope: it does not exist, or the credential may not see it. GitHub does not say which."""
    try:
        yield
    except NotFound as error:
        raise UserError(
            error.message,
            field="github-scope",
            fix=f"check that {scope} exists and the credential may administer its runners",
        ) from error


def _is_local(url: str) -> bool:
    return httpx.URL(url).host in _LOCAL_HOSTS


def _authorities(url: str) -> ssl.SSLContext | bool:
    """The usual ones. Where there is no TLS none are read, which takes longer than a call."""
    return httpx.URL(url).scheme != "http" or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _runners(scope: str) -> str:
    return f"/repos/{scope}/actions/runners" if "/" in scope else f"/orgs/{scope}/actions/runners"
