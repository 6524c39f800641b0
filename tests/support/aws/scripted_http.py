"""AWS below `remuda.http`, for tests without a server: answers in each protocol's form, failures of the connection.

Requests are checked like those of the conformance suites (`contract`, `request_rules`).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

from remuda.adapters.aws.clients import MAX_ATTEMPTS, PROTOCOLS
from remuda.adapters.aws.service import ServiceClient
from remuda.adapters.aws.signature import AwsCredentials
from remuda.http import ClientResponse
from tests.support.aws.contract import check_request
from tests.support.aws.request_rules import RequestSequence
from tests.support.failure_tables import Scripted

#: Services whose errors and answers are XML.
_XML = frozenset({"autoscaling", "cloudformation", "ec2", "iam", "sts"})


class AwsScript:
    """Answers each operation of one service with its outcomes in turn; the last one is repeated."""

    url, host, path = "http://aws", "aws", "/"

    def __init__(self, service: str, outcomes: Scripted | None = None) -> None:
        self.service = service
        self.outcomes = {name: [*each] for name, each in (outcomes or {}).items()}
        #: Operations and bodies, one entry per request that was sent.
        self.sent: list[tuple[str, bytes]] = []

    async def request(self, method: str, target: str, *, headers: Mapping[str, str], body: bytes) -> ClientResponse:
        assert (method, target) == ("POST", self.path)
        operation = headers.get("x-amz-target", "").rpartition(".")[2] or dict(parse_qsl(body.decode()))["Action"]
        self.sent.append((operation, body))
        waiting = self.outcomes[operation]
        outcome = waiting.pop(0) if len(waiting) > 1 else waiting[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def close(self) -> None:
        """Nothing to close."""

    def sends_of(self, operation: str) -> int:
        same = Counter(body for name, body in self.sent if name == operation)
        return max(same.values(), default=0)


class ScriptedClient(ServiceClient):
    """The real client of a service over scripted answers, which checks its requests."""

    def __init__(self, http: AwsScript, *, attempts: int = MAX_ATTEMPTS) -> None:
        super().__init__(
            name=http.service,
            protocol=PROTOCOLS[http.service](),
            http=http,
            region="eu-central-1",
            credentials=self._keys,
            attempts=attempts,
        )
        self._sequence = RequestSequence()

    @staticmethod
    async def _keys() -> AwsCredentials:
        return AwsCredentials(access_key="AK", secret_key="s")

    async def call(self, operation: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        check_request(self.name, operation, parameters)
        self._sequence.judge(self.name, operation, parameters)
        answer = await super().call(operation, parameters)
        self._sequence.observe(self.name, operation, parameters, answer)
        return answer


def answer(service: str, operation: str, document: Any) -> ClientResponse:
    """A successful response. The document is JSON, or the XML within the element of the response."""
    if service not in _XML:
        return ClientResponse(200, {"x-amzn-requestid": "r-1"}, json.dumps(document).encode())
    inner = document if service == "ec2" else f"<{operation}Result>{document}</{operation}Result>"
    return ClientResponse(200, {}, f"<{operation}Response>{inner}</{operation}Response>".encode())


def refusal(service: str, code: str, status: int = 400, *, message: str = "refused", **more: Any) -> ClientResponse:
    """An error as the service sends it. Queues have their older codes in a header, beside the newer in the body."""
    if service in _XML:
        body = f"<Response><Errors><Error><Code>{code}</Code><Message>{message}</Message></Error></Errors></Response>"
        return ClientResponse(status, {}, body.encode())
    headers = {"x-amzn-query-error": f"{code};Sender"} if service == "sqs" else {}
    document = {"__type": f"com.amazonaws.{service}#{code}", "message": message, **more}
    return ClientResponse(status, headers, json.dumps(document).encode())
