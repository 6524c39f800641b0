"""GitHub below `remuda.http`: connections whose requests are judged, and answers without a server."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from remuda.http import ClientResponse, HttpConnections
from tests.support.github_requests import SentRequest, judge_request, operation_of, parsed_request
from tests.support.github_sequence import GitHubSequence, TokenKinds

#: A response, or a failure of the connection that is raised.
Outcome = ClientResponse | Exception
#: Of all connections of this process: one service issues the tokens of another.
_KINDS: TokenKinds = {}


class JudgedConnections(HttpConnections):
    """Connections whose requests keep the rules."""

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self._sequence = GitHubSequence(_KINDS)

    async def request(
        self,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        timeout_s: float | None = None,
    ) -> ClientResponse:
        request = parsed_request(self.path, method, target, headers, body)
        judge_request(request)
        self._sequence.judge(request)
        response = await super().request(method, target, headers=headers, body=body, timeout_s=timeout_s)
        self._sequence.observe(request, response)
        return response


class GitHubScript:
    """Answers each request with the outcomes for it in turn; the last one is repeated.

    `connections` stands in for `HttpConnections`, at whatever address.
    """

    def __init__(self, outcomes: Mapping[str, Sequence[Outcome]]) -> None:
        """`outcomes`: by method and last part of the path that is no number, such as `GET runners`."""
        self.outcomes = {name: [*each] for name, each in outcomes.items()}
        self.sent: list[tuple[str, SentRequest]] = []
        self._sequence = GitHubSequence({})

    def connections(self, url: str, **_: Any) -> ScriptedConnections:
        return ScriptedConnections(self, url)

    def answer(self, request: SentRequest) -> ClientResponse:
        judge_request(request)
        self._sequence.judge(request)
        name = operation_of(request)
        self.sent.append((name, request))
        waiting = self.outcomes[name]
        outcome = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        if isinstance(outcome, Exception):
            raise outcome
        self._sequence.observe(request, outcome)
        return outcome

    def sends_of(self, operation: str) -> int:
        """How often the same request of this operation was sent at most."""
        same = Counter(f"{request} {request.body}" for name, request in self.sent if name == operation)
        return max(same.values(), default=0)


class ScriptedConnections:
    def __init__(self, script: GitHubScript, url: str) -> None:
        self.url = url
        self.path = urlsplit(url).path or "/"
        self._script = script

    async def request(
        self, method: str, target: str, *, headers: Mapping[str, str] | None = None, body: bytes = b"", **_: Any
    ) -> ClientResponse:
        return self._script.answer(parsed_request(self.path, method, target, headers, body))

    async def close(self) -> None:
        """Nothing to close."""


def json_answer(document: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> ClientResponse:
    return ClientResponse(status, headers or {}, json.dumps(document).encode())
