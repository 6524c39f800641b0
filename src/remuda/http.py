"""HTTP/1.1 client: connections to one origin, kept open, limited in number, through a proxy if one is configured.

aiohttp and httpx take longer to import than a warm provision takes to run (docs/adr/0034-aws-client.md). Redirects are
not followed, and no request is sent twice: callers decide what they retry.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import select
import time
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import SplitResult, unquote, urlsplit

from remuda.tls import client_context

#: Seconds after which an unused connection is not used again. AWS closes it after 20 or more.
KEEP_ALIVE_S = 12.0
#: Maximum size of the head of a response in bytes.
MAX_HEAD = 64 * 1024
DEFAULT_PORTS = {"http": 80, "https": 443}
_WITHOUT_BODY = frozenset({204, 304})
#: Methods whose requests have a length even without a body (RFC 9110, 8.6).
_WITH_LENGTH = frozenset({"PATCH", "POST", "PUT"})
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
#: What the value of a header may contain. A line break would end it: what follows would be read as further headers.
_VALUE = re.compile(r"[\t -~]*")
_TARGET = re.compile(r"/[!-~]*")


class HttpError(Exception):
    """There is no response. Messages contain no header and no part of a body."""


class InvalidRequest(HttpError):
    """The request was not sent: it has a character that HTTP does not allow."""


class ConnectError(HttpError):
    pass


class ConnectTimeout(ConnectError):
    pass


class TlsError(ConnectError):
    pass


class ProxyError(HttpError):
    def __init__(self, proxy: str, problem: object) -> None:
        super().__init__(f"{proxy}: {problem}")
        #: Its host name.
        self.proxy = proxy


class ReadTimeout(HttpError):
    """The server may have received the request."""


class ConnectionLost(HttpError):
    """The server may have received the request."""


class InvalidResponse(HttpError):
    """The peer does not speak HTTP/1.1, or says more than the caller accepts."""


class ResponseTooLong(InvalidResponse):
    pass


class ClientResponse(NamedTuple):
    status: int
    #: By lower-case name. Values of repeated headers are joined by a comma.
    headers: Mapping[str, str]
    body: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class _Connection(NamedTuple):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def is_usable(self) -> bool:
        """False if the server closed the connection, or sent data that belongs to no request.

        Asks the operating system, too: the event loop may not have noticed yet.
        """
        # asyncio has no public method for data that was received, but not read.
        if self.writer.is_closing() or self.reader.at_eof() or self.reader._buffer:  # type: ignore[attr-defined]  # noqa: SLF001
            return False
        poll = select.poll()
        poll.register(self.writer.get_extra_info("socket").fileno(), select.POLLIN)
        return not poll.poll(0)


class HttpConnections:
    def __init__(
        self,
        url: str,
        *,
        connect_timeout_s: float,
        timeout_s: float,
        connections: int,
        max_body: int,
        ca_bundle: str = "",
        use_proxy: bool = True,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        """`timeout_s` limits a whole exchange, without the time to connect.

        `max_body` is the maximum size of a body in bytes. Raises `ValueError` for an invalid URL.
        """
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
        self._timeout_s = timeout_s
        self._max_body = max_body
        self._ca_bundle = ca_bundle
        self._keep_alive_s = keep_alive_s
        self._slots = asyncio.Semaphore(connections)
        #: Unused connections and the time since when they are, the last used one last.
        self._idle: list[tuple[_Connection, float]] = []
        self._proxy = _proxy_for(self._scheme, self._host, self._port) if use_proxy else None

    async def close(self) -> None:
        """Close unused connections, without the TLS farewell: it would take a round trip, and no data is pending."""
        while self._idle:
            connection, _ = self._idle.pop()
            connection.writer.transport.abort()
        # The sockets are closed by the next iteration of the event loop.
        await asyncio.sleep(0)

    async def request(
        self,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        timeout_s: float | None = None,
    ) -> ClientResponse:
        """Send one request; `timeout_s` overrides the limit of the client. Raises `HttpError`.

        `target` is the whole path, with the query. `headers` need no host and no length.
        """
        message = self._head(method, target, headers or {}, len(body)) + body
        async with self._slots:
            connection = self._reused() or await self._connected()
            try:
                async with asyncio.timeout(self._timeout_s if timeout_s is None else timeout_s):
                    connection.writer.write(message)
                    response, is_open = await _read_response(connection.reader, self._max_body, method)
                    _check_timeout(response)
            except TimeoutError as error:
                raise _ended(connection, ReadTimeout(str(error))) from None
            except (OSError, asyncio.IncompleteReadError) as error:
                raise _ended(connection, ConnectionLost(str(error))) from None
            except asyncio.LimitOverrunError as error:
                raise _ended(connection, InvalidResponse(str(error))) from None
            except BaseException:
                # Cancelled: the response would be read as that of the next request.
                connection.writer.transport.abort()
                raise
            if is_open:
                self._idle.append((connection, _wall_s()))
            else:
                connection.writer.transport.abort()
            return response

    def _head(self, method: str, target: str, headers: Mapping[str, str], length: int) -> bytes:
        if not _NAME.fullmatch(method) or not _TARGET.fullmatch(target):
            raise InvalidRequest("the method or the path has a character that is not allowed")
        lines = {"host": self.host, **headers}
        if length or method in _WITH_LENGTH:
            lines["content-length"] = str(length)
        if self._proxy is not None and self._scheme == "http":
            target = f"http://{self.host}{target}"
            lines |= _proxy_authorization(self._proxy)
        return _encode_head(f"{method} {target}", lines)

    def _reused(self) -> _Connection | None:
        now = _wall_s()
        while self._idle:
            connection, since = self._idle.pop()
            if abs(now - since) < self._keep_alive_s and connection.is_usable():
                return connection
            connection.writer.transport.abort()
        return None

    async def _connected(self) -> _Connection:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return await (self._through_proxy(self._proxy) if self._proxy else self._open())
        except TimeoutError as error:
            raise ConnectTimeout(str(error)) from None
        except (OSError, UnicodeError) as error:
            # Errors of TLS are `OSError`, too, but importing ssl's names is left to those who need them.
            failure = TlsError if type(error).__module__ == "ssl" else ConnectError
            raise failure(str(error)) from None
        except (InvalidResponse, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise ProxyError(str(self._proxy.hostname if self._proxy else ""), error) from None

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
        try:
            connection.writer.write(_encode_head(f"CONNECT {target}", {"host": target, **_proxy_authorization(proxy)}))
            _check_tunnel(await _read_head(connection.reader))
            await connection.writer.start_tls(client_context(self._ca_bundle), server_hostname=self._host)
        except BaseException:
            connection.writer.transport.abort()
            raise
        return connection


def _ended(connection: _Connection, error: HttpError) -> HttpError:
    connection.writer.transport.abort()
    return error


def _encode_head(first: str, lines: Mapping[str, str]) -> bytes:
    for name, value in lines.items():
        if not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            # Such as the newline at the end of a credential.
            raise InvalidRequest("a header has a character that is not allowed, such as a line break")
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{first} HTTP/1.1\r\n{head}\r\n".encode("ascii")


def _wall_s() -> float:
    """The monotonic clock of a Lambda function may stop between two invocations; AWS closes connections meanwhile."""
    return time.time()  # noqa: TID251 - the age of a connection; nothing else depends on it


def _check_timeout(response: ClientResponse) -> None:
    """A server may send status 408 while it closes an unused connection: it is no response to this request."""
    if response.status == 408:
        raise ConnectionResetError("the server closed the connection")


def _check_tunnel(head: tuple[int, Mapping[str, str]]) -> None:
    if head[0] != 200:
        raise InvalidResponse(f"the proxy responded with status {head[0]}")


# Responses ------------------------------------------------------------------------------------------------------------


async def _read_response(reader: asyncio.StreamReader, max_body: int, method: str) -> tuple[ClientResponse, bool]:
    """The response, and whether the connection stays open."""
    status, headers = await _read_head(reader)
    while 100 <= status < 200:
        status, headers = await _read_head(reader)
    is_open = "close" not in _items(headers, "connection")
    if status in _WITHOUT_BODY or method == "HEAD":
        return ClientResponse(status, headers, b""), is_open
    if codings := _items(headers, "transfer-encoding"):
        if codings != ["chunked"]:
            raise InvalidResponse("the transfer coding is not supported")
        return ClientResponse(status, headers, await _read_chunks(reader, max_body)), is_open
    if "content-length" in headers:
        length = _length(headers["content-length"], 10, max_body)
        return ClientResponse(status, headers, await reader.readexactly(length)), is_open
    body = bytearray()
    while more := await reader.read(MAX_HEAD):
        body += more
        if len(body) > max_body:
            raise _too_long(max_body)
    return ClientResponse(status, headers, bytes(body)), False


def _items(headers: Mapping[str, str], name: str) -> list[str]:
    return [item.strip() for item in headers.get(name, "").lower().split(",") if item.strip()]


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head[:-4].decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if version not in {"HTTP/1.0", "HTTP/1.1"} or not re.match("[1-9][0-9]{2}( |$)", rest):
        raise InvalidResponse("no status line")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not _NAME.fullmatch(name):
            raise InvalidResponse("a header is not valid")
        name, value = name.lower(), value.strip(" \t")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    if version == "HTTP/1.0":
        headers.setdefault("connection", "close")
    return int(rest[:3]), headers


async def _read_chunks(reader: asyncio.StreamReader, max_body: int) -> bytes:
    body = bytearray()
    while True:
        size = await reader.readuntil(b"\r\n")
        length = _length(size.partition(b";")[0].strip().decode("latin-1"), 16, max_body - len(body))
        if not length:
            # Trailers, up to an empty line.
            while await reader.readuntil(b"\r\n") != b"\r\n":
                pass
            return bytes(body)
        body += await reader.readexactly(length)
        if await reader.readexactly(2) != b"\r\n":
            raise InvalidResponse("a chunk is longer than its size")


def _length(text: str, base: int, limit: int) -> int:
    if not re.fullmatch("[0-9]{1,18}" if base == 10 else "[0-9A-Fa-f]{1,15}", text):
        raise InvalidResponse("a length is not a number")
    length = int(text, base)
    if length > limit:
        raise _too_long(limit)
    return length


def _too_long(limit: int) -> ResponseTooLong:
    return ResponseTooLong(f"the response is longer than {limit} bytes")


# Proxies --------------------------------------------------------------------------------------------------------------


def _proxy_for(scheme: str, host: str, port: int) -> SplitResult | None:
    """The proxy that the environment names for this server (`HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY`, `NO_PROXY`)."""
    if not any(name.lower() in {f"{scheme}_proxy", "all_proxy"} for name in os.environ):
        return None
    import urllib.request  # noqa: PLC0415 - slow to import

    proxies = urllib.request.getproxies_environment()
    found = proxies.get(scheme) or proxies.get("all", "")
    # Other programs may use SOCKS for everything.
    if found == proxies.get("all") and found.startswith("socks"):
        return None
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
