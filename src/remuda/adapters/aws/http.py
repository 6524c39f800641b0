"""HTTP/1.1 connections to one AWS endpoint: kept open, limited in number, through a proxy if one is configured.

aiohttp and httpx take longer to import than a warm provision takes to run (docs/adr/0034-aws-client.md).
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import Mapping
from typing import NamedTuple, Protocol
from urllib.parse import SplitResult, unquote, urlsplit

from botocore.exceptions import (
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    ProxyConnectionError,
    ReadTimeoutError,
    SSLError,
)

from remuda.tls import client_context

#: Seconds after which an unused connection is not used again. AWS closes it after 20 or more.
KEEP_ALIVE_S = 12.0
#: Maximum sizes of a response in bytes. DynamoDB limits a batch to 16 MB; a page of 1,000 EC2 instances has about 8 MB.
MAX_HEAD = 64 * 1024
MAX_BODY = 64 * 1024 * 1024
DEFAULT_PORTS = {"http": 80, "https": 443}
_WITHOUT_BODY = frozenset({204, 304})


class AwsHttpResponse(NamedTuple):
    status: int
    #: By lower-case name.
    headers: Mapping[str, str]
    body: bytes


class Http(Protocol):
    @property
    def host(self) -> str:
        """The value of the header `Host`."""
        ...

    @property
    def path(self) -> str: ...

    async def post(self, headers: Mapping[str, str], body: bytes) -> AwsHttpResponse:
        """Send one request. Raises `ConnectionError` or `HTTPClientError` of botocore."""
        ...

    async def close(self) -> None: ...


class _InvalidResponse(Exception):
    """The peer does not speak HTTP/1.1."""


class _Connection(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class HttpConnections:
    def __init__(
        self, url: str, *, connect_timeout_s: float, read_timeout_s: float, connections: int, ca_bundle: str = ""
    ) -> None:
        """`read_timeout_s` limits a whole exchange. Raises `ValueError` for an invalid URL."""
        parts = urlsplit(url)
        if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
            raise ValueError(f"Invalid endpoint: {url}")
        self.url = url
        self._scheme, self._host = parts.scheme, parts.hostname
        self._port = parts.port or DEFAULT_PORTS[parts.scheme]
        #: The value of the header `Host`, without user information.
        self.host = parts.netloc.rpartition("@")[2]
        self.path = parts.path or "/"
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._ca_bundle = ca_bundle
        self._slots = asyncio.Semaphore(connections)
        #: Unused connections and the time since when they are, the last used one last.
        self._idle: list[tuple[_Connection, float]] = []
        self._proxy = _proxy_for(self._scheme, self._host, self._port)

    async def close(self) -> None:
        """Close unused connections, without the TLS farewell: it would take a round trip, and no data is pending."""
        while self._idle:
            connection, _ = self._idle.pop()
            connection.writer.transport.abort()
        # The sockets are closed by the next iteration of the event loop.
        await asyncio.sleep(0)

    async def post(self, headers: Mapping[str, str], body: bytes) -> AwsHttpResponse:
        async with self._slots:
            connection = self._reused() or await self._connected()
            try:
                async with asyncio.timeout(self._read_timeout_s):
                    connection.writer.write(self._head(headers, len(body)) + body)
                    response, is_open = await _read_response(connection.reader)
                    _check_timeout(response)
            except TimeoutError as error:
                connection.writer.transport.abort()
                raise ReadTimeoutError(endpoint_url=self.url, error=error) from None
            except (OSError, asyncio.IncompleteReadError) as error:
                connection.writer.transport.abort()
                raise ConnectionClosedError(endpoint_url=self.url, error=error) from None
            except (_InvalidResponse, asyncio.LimitOverrunError) as error:
                connection.writer.transport.abort()
                raise HTTPClientError(error=error) from None
            except BaseException:
                # Cancelled: the response would be read as that of the next request.
                connection.writer.transport.abort()
                raise
            if is_open:
                self._idle.append((connection, asyncio.get_running_loop().time()))
            else:
                connection.writer.transport.abort()
            return response

    def _head(self, headers: Mapping[str, str], length: int) -> bytes:
        target = self.path
        lines = {**headers, "content-length": str(length)}
        if self._proxy is not None and self._scheme == "http":
            target = f"http://{self.host}{self.path}"
            lines |= _proxy_authorization(self._proxy)
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"POST {target} HTTP/1.1\r\n{head}\r\n".encode()

    def _reused(self) -> _Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection, since = self._idle.pop()
            if now - since < KEEP_ALIVE_S and not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection
            connection.writer.transport.abort()
        return None

    async def _connected(self) -> _Connection:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return await (self._through_proxy(self._proxy) if self._proxy else self._open())
        except TimeoutError as error:
            raise ConnectTimeoutError(endpoint_url=self.url, error=error) from None
        except OSError as error:
            # Errors of TLS are `OSError`, too, but importing ssl's names is left to those who need them.
            failure = SSLError if type(error).__module__ == "ssl" else EndpointConnectionError
            raise failure(endpoint_url=self.url, error=error) from None
        except (_InvalidResponse, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise ProxyConnectionError(
                proxy_url=str(self._proxy.hostname if self._proxy else ""), error=error
            ) from None

    async def _open(self) -> _Connection:
        context = client_context(self._ca_bundle) if self._scheme == "https" else None
        return _Connection(*await asyncio.open_connection(self._host, self._port, ssl=context, limit=MAX_HEAD))

    async def _through_proxy(self, proxy: SplitResult) -> _Connection:
        context = client_context(self._ca_bundle) if proxy.scheme == "https" else None
        port = proxy.port or DEFAULT_PORTS[proxy.scheme]
        connection = _Connection(*await asyncio.open_connection(proxy.hostname, port, ssl=context, limit=MAX_HEAD))
        if self._scheme == "http":
            return connection
        target = f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"
        lines = {"host": target, **_proxy_authorization(proxy)}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        try:
            connection.writer.write(f"CONNECT {target} HTTP/1.1\r\n{head}\r\n".encode())
            _check_tunnel(await _read_head(connection.reader))
            await connection.writer.start_tls(client_context(self._ca_bundle), server_hostname=self._host)
        except BaseException:
            connection.writer.transport.abort()
            raise
        return connection


def _check_timeout(response: AwsHttpResponse) -> None:
    """A server may send status 408 while it closes an unused connection: it is no response to this request."""
    if response.status == 408:
        raise ConnectionResetError("the server closed the connection")


def _check_tunnel(head: tuple[int, Mapping[str, str]]) -> None:
    if head[0] != 200:
        raise _InvalidResponse(f"the proxy responded with status {head[0]}")


# Responses ------------------------------------------------------------------------------------------------------------


async def _read_response(reader: asyncio.StreamReader) -> tuple[AwsHttpResponse, bool]:
    """The response, and whether the connection stays open."""
    status, headers = await _read_head(reader)
    while 100 <= status < 200:
        status, headers = await _read_head(reader)
    is_open = headers.get("connection", "").lower() != "close"
    if status in _WITHOUT_BODY:
        return AwsHttpResponse(status, headers, b""), is_open
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return AwsHttpResponse(status, headers, await _read_chunks(reader)), is_open
    if "content-length" in headers:
        return AwsHttpResponse(
            status, headers, await reader.readexactly(_length(headers["content-length"], 10))
        ), is_open
    body = await reader.read(MAX_BODY + 1)
    while len(body) <= MAX_BODY and (more := await reader.read(MAX_BODY)):
        body += more
    if len(body) > MAX_BODY:
        raise _InvalidResponse("the response is too long")
    return AwsHttpResponse(status, headers, body), False


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
        raise _InvalidResponse("no status line")
    fields = (line.partition(":") for line in lines)
    headers = {name.lower(): value.strip() for name, _, value in fields}
    if version == "HTTP/1.0":
        headers.setdefault("connection", "close")
    return int(rest[:3]), headers


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while True:
        size = await reader.readuntil(b"\r\n")
        length = _length(size.partition(b";")[0].strip().decode("latin-1"), 16)
        if not length:
            # Trailers, up to an empty line.
            while await reader.readuntil(b"\r\n") != b"\r\n":
                pass
            return bytes(body)
        if len(body) + length > MAX_BODY:
            raise _InvalidResponse("the response is too long")
        body += (await reader.readexactly(length + 2))[:-2]


def _length(text: str, base: int) -> int:
    try:
        length = int(text, base)
    except ValueError:
        raise _InvalidResponse("a length is not a number") from None
    if not 0 <= length <= MAX_BODY:
        raise _InvalidResponse("the response is too long")
    return length


# Proxies --------------------------------------------------------------------------------------------------------------


def _proxy_for(scheme: str, host: str, port: int) -> SplitResult | None:
    """The proxy that the environment names for this server (`HTTPS_PROXY`, `HTTP_PROXY`, `NO_PROXY`)."""
    if not any(name.lower() == f"{scheme}_proxy" for name in os.environ):
        return None
    import urllib.request  # noqa: PLC0415 - slow to import

    found = urllib.request.getproxies_environment().get(scheme, "")
    if not found or urllib.request.proxy_bypass_environment(f"{host}:{port}"):  # type: ignore[attr-defined]
        return None
    parts = urlsplit(found if "://" in found else f"http://{found}")
    if parts.scheme not in DEFAULT_PORTS or not parts.hostname:
        raise ValueError(f"Invalid proxy: {parts.scheme}://{parts.hostname or ''}")
    return parts


def _proxy_authorization(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    credential = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"proxy-authorization": f"Basic {base64.b64encode(credential.encode()).decode()}"}
