"""Client of one AWS service: requests signed, retried and counted, with the interface of botocore's clients.

`await client.get_item(TableName=…)` returns the response document or raises an exception of `botocore.exceptions`.
Retries follow botocore's standard mode (docs/adr/0034-aws-client.md).
"""

from __future__ import annotations

import asyncio
import time
import typing
import zlib
from collections.abc import Awaitable, Callable, Mapping
from random import random  # noqa: TID251 - jitter of retries, as in botocore; nothing else depends on it
from typing import Any, Self

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    ConnectionError,  # noqa: A004 - botocore's name
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    ProxyConnectionError,
    ReadTimeoutError,
    SSLError,
)

from remuda.adapters.aws.protocols import Protocol, UnreadableResponse, UnsendableRequest
from remuda.adapters.aws.signature import AwsCredentials, sign
from remuda.http import (
    ClientResponse,
    ConnectError,
    ConnectionLost,
    ConnectTimeout,
    HttpError,
    InvalidRequest,
    ProxyError,
    ReadTimeout,
    TlsError,
)
from remuda.ports.clock import ServerDates

#: Codes and statuses that are retried: `botocore.retries.standard`.
RETRIED_CODES = frozenset({"PriorRequestNotComplete", "RequestTimeout", "RequestTimeoutException"}) | {
    *("BandwidthLimitExceeded", "EC2ThrottledException", "LimitExceededException", "RequestLimitExceeded"),
    *("ProvisionedThroughputExceededException", "RequestThrottled", "RequestThrottledException", "SlowDown"),
    *("ThrottledException", "Throttling", "ThrottlingException", "TooManyRequestsException"),
    "TransactionInProgressException",
}
RETRIED_STATUSES = frozenset({500, 502, 503, 504})
#: Longest pause between two attempts, in seconds.
MAX_PAUSE_S = 20.0
#: Retries of a client end while its quota is used up: `botocore.retries.quota`.
QUOTA = 500
RETRY_COST, TIMEOUT_COST = 5, 10
USER_AGENT = "remuda"
_BOTOCORE_ERRORS: Mapping[type[HttpError], type[BotoCoreError]] = {
    ConnectError: EndpointConnectionError,
    ConnectTimeout: ConnectTimeoutError,
    ConnectionLost: ConnectionClosedError,
    ReadTimeout: ReadTimeoutError,
    TlsError: SSLError,
}


class Http(typing.Protocol):
    """The part of `HttpConnections` that clients use."""

    @property
    def url(self) -> str: ...

    @property
    def host(self) -> str:
        """The value of the header `Host`."""
        ...

    @property
    def path(self) -> str: ...

    async def request(self, method: str, target: str, *, headers: Mapping[str, str], body: bytes) -> ClientResponse: ...

    async def close(self) -> None: ...


class ServiceClient:
    def __init__(
        self,
        *,
        name: str,
        protocol: Protocol,
        http: Http,
        region: str,
        credentials: Callable[[], Awaitable[AwsCredentials]],
        attempts: int,
        dates: ServerDates | None = None,
    ) -> None:
        """`dates` observes the time of the answers."""
        self._dates = dates
        self.name = name
        self.protocol = protocol
        self.http = http
        #: Region of the endpoint, which signatures name.
        self.region = region
        self._credentials = credentials
        self._attempts = attempts
        self._quota = QUOTA

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self.http.close()

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        """The operation with this name in lower case with underscores, such as `get_item`."""
        if name.startswith("_"):
            raise AttributeError(name)
        operation = "".join(word.capitalize() for word in name.split("_"))

        async def call(**parameters: Any) -> Any:
            return await self.call(operation, parameters)

        return call

    async def call(self, operation: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        headers, body = self.protocol.request(operation, parameters)
        cost = 0
        for attempt in range(1, self._attempts + 1):
            failure: BotoCoreError | ClientError
            try:
                document = await self._attempt(operation, headers, body, attempt)
            except (ClientError, ConnectionError, HTTPClientError) as error:
                failure = error
            else:
                self._quota = min(QUOTA, self._quota + (cost or 1))
                return document
            cost = TIMEOUT_COST if isinstance(failure, (ConnectTimeoutError, ReadTimeoutError)) else RETRY_COST
            if attempt == self._attempts or not _is_retried(failure) or self._quota < cost:
                raise failure
            self._quota -= cost
            await asyncio.sleep(min(MAX_PAUSE_S, random() * 2 ** (attempt - 1)))  # noqa: S311 - only spreads retries
        raise AssertionError  # pragma: no cover - the loop returns or raises

    async def _attempt(self, operation: str, headers: Mapping[str, str], body: bytes, attempt: int) -> dict[str, Any]:
        # AWS compares the time of a signature with the real time, whatever clock the process uses otherwise.
        signed = sign(
            await self._credentials(),
            {"host": self.http.host, **headers},
            body,
            service=self.name,
            region=self.region,
            at=time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()),
            path=self.http.path,
        )
        try:
            response = await self.http.request(
                "POST", self.http.path, headers={**signed, "user-agent": USER_AGENT}, body=body
            )
        except HttpError as problem:
            raise _for_botocore(problem, self.http.url) from None
        if self._dates is not None:
            self._dates.observe("AWS", response.headers.get("date", ""))
        _check_sum(response)
        metadata = {
            "HTTPStatusCode": response.status,
            "HTTPHeaders": dict(response.headers),
            "RetryAttempts": attempt - 1,
        }
        try:
            if response.status >= 300:
                error = self.protocol.error(response)
                metadata["RequestId"] = response.headers.get("x-amzn-requestid", "")
                response_document: Any = {**error, "ResponseMetadata": metadata}
                raise ClientError(response_document, operation)
            document = self.protocol.document(operation, response)
        except (ValueError, RecursionError) as error:
            raise UnreadableResponse(error=type(error).__name__) from None
        if request_id := response.headers.get("x-amzn-requestid") or document.pop("requestId", ""):
            metadata["RequestId"] = request_id
        return {**document, "ResponseMetadata": metadata}


def _is_retried(failure: BotoCoreError | ClientError) -> bool:
    if not isinstance(failure, ClientError):
        return True
    error, metadata = failure.response["Error"], failure.response["ResponseMetadata"]
    return error.get("Code") in RETRIED_CODES or metadata["HTTPStatusCode"] in RETRIED_STATUSES


def _for_botocore(error: HttpError, url: str) -> BotoCoreError:
    match error:
        case InvalidRequest():
            return UnsendableRequest(error=error)
        case ProxyError():
            return ProxyConnectionError(proxy_url=error.proxy, error=error)
        case _:
            return _BOTOCORE_ERRORS.get(type(error), HTTPClientError)(endpoint_url=url, error=error)


def _check_sum(response: ClientResponse) -> None:
    """DynamoDB sends a checksum of each response."""
    expected = response.headers.get("x-amz-crc32", "")
    if expected.isdecimal() and int(expected) != zlib.crc32(response.body):
        raise HTTPClientError(error="the checksum of the response is wrong")
