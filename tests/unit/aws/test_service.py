"""Retries of the AWS clients."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    ProxyConnectionError,
    ReadTimeoutError,
    SSLError,
)

from remuda.adapters.aws import service as module
from remuda.adapters.aws.clients import MAX_ATTEMPTS, PROTOCOLS
from remuda.adapters.aws.protocols import UnreadableResponse, UnsendableRequest
from remuda.adapters.aws.service import ServiceClient
from remuda.adapters.aws.signature import AwsCredentials
from remuda.http import (
    ClientResponse,
    ConnectError,
    ConnectionLost,
    ConnectTimeout,
    InvalidRequest,
    InvalidResponse,
    ProxyError,
    ReadTimeout,
    ResponseTooLong,
    TlsError,
)
from remuda.ports.clock import HTTP_DATE, ServerDates
from tests.support.virtual_time import FixedClock

GOOD = ClientResponse(200, {"x-amzn-requestid": "r-1"}, b'{"Item": {}}')
CLOSED = ConnectionLost("closed")
TIMEOUT = ReadTimeout("slow")


def refusal(code: str, status: int = 400) -> ClientResponse:
    return ClientResponse(status, {}, json.dumps({"__type": f"com.amazonaws#{code}", "message": "no"}).encode())


class ScriptedHttp:
    url, host, path = "http://x", "x", "/"

    def __init__(self, *outcomes: ClientResponse | Exception) -> None:
        self._outcomes = list(outcomes)
        self.requests: list[tuple[Mapping[str, str], bytes]] = []

    async def request(self, method: str, target: str, *, headers: Mapping[str, str], body: bytes) -> ClientResponse:
        assert (method, target) == ("POST", "/")
        self.requests.append((headers, body))
        outcome = self._outcomes.pop(0) if len(self._outcomes) > 1 else self._outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def close(self) -> None:
        """Nothing to close."""


class Client(ServiceClient):
    def __init__(self, http: ScriptedHttp, dates: ServerDates | None = None) -> None:
        self.keys = 0
        super().__init__(
            name="dynamodb",
            protocol=PROTOCOLS["dynamodb"](),
            http=http,
            region="eu-central-1",
            credentials=self._key,
            attempts=MAX_ATTEMPTS,
            dates=dates,
        )

    async def _key(self) -> AwsCredentials:
        self.keys += 1
        return AwsCredentials(access_key=f"AK{self.keys}", secret_key="s")


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts, without jitter, which take no time."""
    made: list[float] = []

    async def sleep(seconds: float) -> None:
        made.append(seconds)

    monkeypatch.setattr("remuda.adapters.aws.service.asyncio.sleep", sleep)
    monkeypatch.setattr(module, "random", lambda: 1.0)
    return made


@pytest.mark.parametrize(
    "failure",
    [
        CLOSED,
        TIMEOUT,
        refusal("ThrottlingException"),
        refusal("TransactionInProgressException"),
        refusal("InternalServerError", 500),
        ClientResponse(503, {}, b"<html>"),
        ClientResponse(200, {"x-amz-crc32": "1"}, b"{}"),
    ],
    ids=["closed", "timeout", "throttled", "in progress", "500", "503", "checksum"],
)
async def test_temporary_failure_is_retried(failure: Any, pauses: list[float]):
    http = ScriptedHttp(failure, failure, GOOD)
    client: Any = Client(http)
    answer = await client.get_item(TableName="t")
    assert answer["ResponseMetadata"]["RetryAttempts"] == 2
    assert answer["ResponseMetadata"]["RequestId"] == "r-1"
    assert pauses == [1.0, 2.0]
    assert ["AK3/" in headers["authorization"] for headers, _ in http.requests] == [False, False, True]


@pytest.mark.parametrize("status", [200, 403])
async def test_time_of_every_answer_is_observed(status: int):
    """Also that of a refusal: AWS refuses signatures whose time is wrong."""
    clock = FixedClock()
    dates = ServerDates(clock)
    date = (clock.now() - timedelta(minutes=20)).strftime(HTTP_DATE)
    body = GOOD.body if status == 200 else refusal("InvalidSignatureException").body
    with contextlib.suppress(ClientError):
        await Client(ScriptedHttp(ClientResponse(status, {"date": date}, body)), dates).call("GetItem", {})
    assert str(dates.error()) == "the clock of this computer is 20 min ahead of AWS's"


@pytest.mark.parametrize("failure", [CLOSED, refusal("ThrottlingException")], ids=["closed", "throttled"])
async def test_lasting_failure_is_raised(failure: Any):
    http = ScriptedHttp(failure)
    with pytest.raises((ClientError, HTTPClientError)) as raised:
        await Client(http).call("GetItem", {})
    assert len(http.requests) == MAX_ATTEMPTS
    if isinstance(raised.value, ClientError):
        assert raised.value.response["ResponseMetadata"]["RetryAttempts"] == MAX_ATTEMPTS - 1


@pytest.mark.parametrize(
    ("problem", "failure", "said"),
    [
        (CLOSED, ConnectionClosedError, "http://x"),
        (TIMEOUT, ReadTimeoutError, "http://x"),
        (ConnectError("refused"), EndpointConnectionError, "http://x"),
        (ConnectTimeout("slow"), ConnectTimeoutError, "http://x"),
        (TlsError("CERTIFICATE_VERIFY_FAILED"), SSLError, "CERTIFICATE_VERIFY_FAILED"),
        (ProxyError("proxy.example", "status 407"), ProxyConnectionError, "proxy.example"),
        (InvalidRequest("a header has a line break"), UnsendableRequest, "a header has a line break"),
        (InvalidResponse("no status line"), HTTPClientError, "no status line"),
        (ResponseTooLong("the response is too long"), HTTPClientError, "too long"),
    ],
)
async def test_failed_connection_raises_the_error_of_botocore(problem: Exception, failure: type[Exception], said: str):
    with pytest.raises(failure, match=said) as raised:
        await Client(ScriptedHttp(problem)).call("GetItem", {})
    assert type(raised.value) is failure


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (refusal("ConditionalCheckFailedException"), ClientError),
        (refusal("AccessDeniedException"), ClientError),
        (ClientResponse(301, {}, b""), ClientError),
        (ClientResponse(200, {}, b"<html>"), UnreadableResponse),
        (ClientResponse(200, {}, b"[1]"), UnreadableResponse),
        (ClientResponse(200, {}, b"[" * 100_000), UnreadableResponse),
    ],
)
async def test_lasting_refusal_is_not_retried(answer: ClientResponse, failure: type[Exception], pauses: list[float]):
    with pytest.raises(failure):
        await Client(ScriptedHttp(answer)).call("GetItem", {})
    assert pauses == []


async def test_details_of_a_refusal():
    body = {"__type": "x#TransactionCanceledException", "Message": "no", "CancellationReasons": [{"Code": "None"}]}
    with pytest.raises(ClientError) as raised:
        await Client(ScriptedHttp(ClientResponse(400, {}, json.dumps(body).encode()))).call("TransactWriteItems", {})
    response: Any = raised.value.response
    assert response["Error"] == {"Code": "TransactionCanceledException", "Message": "no"}
    assert response["CancellationReasons"] == [{"Code": "None"}]


async def test_retries_end_while_the_service_fails(monkeypatch: pytest.MonkeyPatch):
    """As in botocore: the quota is shared by all calls of a client."""
    retries = 2 * MAX_ATTEMPTS
    monkeypatch.setattr(module, "QUOTA", retries * module.RETRY_COST)
    http = ScriptedHttp(CLOSED)
    client = Client(http)
    calls = retries + 1
    for _ in range(calls):
        with pytest.raises(ConnectionClosedError):
            await client.call("GetItem", {})
    assert len(http.requests) == calls + retries
