"""HTTP connections of the AWS clients, with servers and proxies that behave badly."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

import pytest
from botocore.exceptions import (
    ConnectionClosedError,
    EndpointConnectionError,
    HTTPClientError,
    ProxyConnectionError,
    ReadTimeoutError,
    SSLError,
)
from cryptography import x509

from remuda.adapters.aws import http as module
from remuda.adapters.aws.http import HttpConnections
from tests.support.aws.servers import LOOPBACK, unused_port
from tests.support.records import LONG_S
from tests.support.tls_server import write_certificate

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Answers each request with the next response, the last one again and again. Records requests per connection."""

    def __init__(self, *responses: bytes, closes: bool = False) -> None:
        self._responses = list(responses)
        self._closes = closes
        self.connections: list[list[bytes]] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received: list[bytes] = []
        self.connections.append(received)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                received.append(head)
                length = next(
                    int(line.partition(b":")[2])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                )
                await reader.readexactly(length)
                response = self._responses.pop(0) if len(self._responses) > 1 else self._responses[0]
                writer.write(response)
                await writer.drain()
                if self._closes or not response:
                    break
        writer.close()


@asynccontextmanager
async def serving(handler: Handler, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    tasks: set[asyncio.Task[None] | None] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        await handler(reader, writer)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(handle, LOOPBACK, 0, ssl=context)
    async with server, asyncio.timeout(3 * LONG_S):
        yield server.sockets[0].getsockname()[1]
        await asyncio.gather(*(task for task in tasks if task))


@asynccontextmanager
async def connecting(
    url: str, *, read_timeout_s: float = LONG_S, connections: int = 4, ca: str = ""
) -> AsyncIterator[HttpConnections]:
    opened = HttpConnections(
        url, connect_timeout_s=LONG_S, read_timeout_s=read_timeout_s, connections=connections, ca_bundle=ca
    )
    try:
        yield opened
    finally:
        await opened.close()


async def post(http: HttpConnections) -> bytes:
    response = await http.post({"host": http.host, "x-amz-target": "T"}, b"{}")
    return response.body


@pytest.mark.parametrize(
    ("response", "body"),
    [
        (OK, b"ok"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"ok"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;x=y\r\no\r\n1\r\nk\r\n0\r\nTrailer: t\r\n\r\n",
            b"ok",
        ),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    ],
    ids=["length", "continue", "chunked", "no content"],
)
async def test_connection_is_used_again(response: bytes, body: bytes):
    server = Server(response)
    async with serving(server) as port, connecting(f"http://{LOOPBACK}:{port}") as http:
        assert [await post(http) for _ in range(3)] == [body] * 3
    assert [len(requests) for requests in server.connections] == [3]


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        OK,
    ],
    ids=["close", "until the end", "HTTP/1.0", "closed without notice"],
)
async def test_closed_connection_is_not_used_again(response: bytes):
    server = Server(response, closes=True)
    async with serving(server) as port, connecting(f"http://{LOOPBACK}:{port}") as http:
        for _ in range(2):
            assert await post(http) == b"ok"
            # The end of the connection arrives.
            await asyncio.sleep(0.01)
    assert [len(requests) for requests in server.connections] == [1, 1]


async def test_old_connection_is_not_used_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "KEEP_ALIVE_S", 0.0)
    server = Server(OK)
    async with serving(server) as port, connecting(f"http://{LOOPBACK}:{port}") as http:
        assert [await post(http), await post(http)] == [b"ok", b"ok"]
    assert len(server.connections) == 2


async def test_connection_from_before_a_freeze_is_not_used_again(monkeypatch: pytest.MonkeyPatch):
    """Lambda freezes a process between two invocations: the wall clock goes on, the monotonic one may not."""
    server = Server(OK)
    async with serving(server) as port, connecting(f"http://{LOOPBACK}:{port}") as http:
        await post(http)
        later = module._wall_s() + 60.0
        monkeypatch.setattr(module, "_wall_s", lambda: later)
        await post(http)
    assert len(server.connections) == 2


async def test_header_with_a_line_break_is_not_sent():
    server = Server(OK)
    async with serving(server) as port, connecting(f"http://{LOOPBACK}:{port}") as http:
        for value in ("token\n", "token\r\nx-amz-target: Other", "\0"):
            with pytest.raises(HTTPClientError, match="check the AWS credentials") as raised:
                await http.post({"host": http.host, "x-amz-security-token": value}, b"{}")
            assert "token" not in str(raised.value)
    assert server.connections == []


@pytest.mark.parametrize(
    ("response", "failure"),
    [
        (b"", ConnectionClosedError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", ConnectionClosedError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nok", ConnectionClosedError),
        (b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n", ConnectionClosedError),
        (b"SSH-2.0-OpenSSH\r\n\r\n", HTTPClientError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\nok", HTTPClientError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\nok", HTTPClientError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nok", HTTPClientError),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", HTTPClientError),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * (module.MAX_HEAD + 10) + b"\r\n\r\n", HTTPClientError),
    ],
)
async def test_incomplete_and_invalid_responses(response: bytes, failure: type[Exception]):
    async with serving(Server(response, closes=True)) as port, connecting(f"http://{LOOPBACK}:{port}") as http:
        with pytest.raises(failure):
            await post(http)


async def test_server_that_does_not_listen_is_named():
    with unused_port() as port:
        async with connecting(f"http://{LOOPBACK}:{port}") as http:
            with pytest.raises(EndpointConnectionError, match=str(port)):
                await post(http)


async def test_slow_response():
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with serving(silent) as port, connecting(f"http://{LOOPBACK}:{port}", read_timeout_s=0.05) as http:
        with pytest.raises(ReadTimeoutError):
            await post(http)


async def test_response_of_a_cancelled_request_is_not_taken_for_that_of_the_next():
    arrived, answered = asyncio.Event(), asyncio.Event()
    server = Server(OK)

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if server.connections:
            await server(reader, writer)
            return
        server.connections.append([await reader.readuntil(b"\r\n\r\n")])
        arrived.set()
        await answered.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nold")
        writer.close()

    async with serving(late) as port, connecting(f"http://{LOOPBACK}:{port}") as http, asyncio.timeout(LONG_S):
        request = asyncio.create_task(post(http))
        await arrived.wait()
        request.cancel()
        with suppress(asyncio.CancelledError):
            await request
        answered.set()
        assert await post(http) == b"ok"


async def test_number_of_connections_is_limited():
    server = Server(OK)
    async with serving(server) as port, connecting(f"http://{LOOPBACK}:{port}", connections=2) as http:
        assert await asyncio.gather(*(post(http) for _ in range(8))) == [b"ok"] * 8
    assert len(server.connections) == 2


# TLS and proxies ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of this computer. Its key is beside it."""
    file = tmp_path_factory.mktemp("tls") / "server.pem"
    write_certificate(file, file.with_name("key.pem"), x509.IPAddress(ip_address(LOOPBACK)))
    return file


@pytest.fixture
def server_context(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    return context


async def test_tls(certificate: Path, server_context: ssl.SSLContext):
    server = Server(OK)
    async with serving(server, server_context) as port:
        async with connecting(f"https://{LOOPBACK}:{port}", ca=str(certificate)) as http:
            assert [await post(http), await post(http)] == [b"ok", b"ok"]
        async with connecting(f"https://{LOOPBACK}:{port}") as http:
            with pytest.raises(SSLError, match="CERTIFICATE_VERIFY_FAILED"):
                await post(http)
    assert len(server.connections) == 1


class Proxy:
    """Connects clients with the servers that they name, or refuses with a status."""

    def __init__(self, status: bytes = b"200 OK") -> None:
        self._status = status
        self.heads: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        method, target, _ = head.split(b" ", 2)
        if method != b"CONNECT":
            writer.write(OK)
        else:
            writer.write(b"HTTP/1.1 " + self._status + b"\r\n\r\n")
            if self._status.startswith(b"200"):
                host, _, port = target.decode().rpartition(":")
                there, back = await asyncio.open_connection(host, int(port))
                await asyncio.gather(_copy(reader, back), _copy(there, writer))
        writer.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await source.read(65_536):
            target.write(data)
    target.close()


async def test_tls_through_a_proxy(certificate: Path, server_context: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch):
    server, proxy = Server(OK), Proxy()
    async with serving(server, server_context) as port, serving(proxy) as proxy_port:
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:p%40ss@{LOOPBACK}:{proxy_port}")
        async with connecting(f"https://{LOOPBACK}:{port}", ca=str(certificate)) as http:
            assert [await post(http), await post(http)] == [b"ok", b"ok"]
    (head,) = proxy.heads
    assert head.startswith(f"CONNECT {LOOPBACK}:{port} HTTP/1.1".encode())
    assert base64.b64encode(b"me:p@ss") in head
    assert b"proxy-authorization" not in b"".join(server.connections[0])


async def test_http_through_a_proxy(monkeypatch: pytest.MonkeyPatch):
    proxy = Proxy()
    async with serving(proxy) as proxy_port:
        monkeypatch.setenv("http_proxy", f"{LOOPBACK}:{proxy_port}")
        async with connecting("http://dynamodb.example.com/base") as http:
            assert await post(http) == b"ok"
    assert proxy.heads[0].startswith(b"POST http://dynamodb.example.com/base HTTP/1.1\r\n")


async def test_proxy_that_refuses(monkeypatch: pytest.MonkeyPatch):
    async with serving(Proxy(b"407 Proxy Authentication Required")) as proxy_port:
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:s3cret@{LOOPBACK}:{proxy_port}")
        async with connecting("https://dynamodb.example.com") as http:
            with pytest.raises(ProxyConnectionError) as refused:
                await post(http)
    assert "s3cret" not in str(refused.value)


async def test_no_proxy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", LOOPBACK)
    async with serving(Server(OK)) as port, connecting(f"http://{LOOPBACK}:{port}") as http:
        assert await post(http) == b"ok"
