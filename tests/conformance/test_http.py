"""HTTP connections, with servers and proxies that behave badly."""

from __future__ import annotations

import asyncio
import base64
import select
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509

from remuda import http as module
from remuda.http import (
    ConnectError,
    ConnectionLost,
    HttpConnections,
    InvalidRequest,
    InvalidResponse,
    ProxyError,
    ReadTimeout,
    ResponseTooLong,
    TlsError,
)
from tests.support.aws.servers import LOOPBACK, unused_port
from tests.support.records import LONG_S
from tests.support.tls_server import write_certificate

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
MAX_BODY = 1_000_000


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
                lengths = [
                    int(line.partition(b":")[2])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                ]
                await reader.readexactly(sum(lengths))
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
    url: str,
    *,
    timeout_s: float = LONG_S,
    connections: int = 4,
    ca: str = "",
    keep_alive_s: float = 12.0,
) -> AsyncIterator[HttpConnections]:
    opened = HttpConnections(
        url,
        connect_timeout_s=LONG_S,
        timeout_s=timeout_s,
        connections=connections,
        max_body=MAX_BODY,
        ca_bundle=ca,
        keep_alive_s=keep_alive_s,
    )
    try:
        yield opened
    finally:
        await opened.close()


async def post(http: HttpConnections) -> bytes:
    response = await http.request("POST", http.path, headers={"x-amz-target": "T"}, body=b"{}")
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


async def test_connection_whose_end_the_event_loop_has_not_read_is_not_used_again():
    """As with httpx: otherwise a request that must not be repeated would be lost."""
    server = Server(OK, closes=True)
    async with serving(server) as port, connecting(f"http://{LOOPBACK}:{port}") as http:
        await post(http)
        ((connection, _),) = http._idle
        socket = connection.writer.get_extra_info("socket")
        # Like an event loop that is busy otherwise.
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        while not select.select([socket], [], [], 0)[0]:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0)
        assert not connection.reader.at_eof()
        assert await post(http) == b"ok"
    assert [len(requests) for requests in server.connections] == [1, 1]


async def test_connection_with_an_unrequested_response_is_not_used_again():
    server = Server(OK + b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil", OK)
    async with serving(server) as port, connecting(f"http://{LOOPBACK}:{port}") as http:
        assert [await post(http), await post(http)] == [b"ok", b"ok"]
    assert [len(requests) for requests in server.connections] == [1, 1]


async def test_lost_request_is_not_sent_again():
    server = Server(OK, b"", OK)
    async with serving(server) as port, connecting(f"http://{LOOPBACK}:{port}") as http:
        await post(http)
        with pytest.raises(ConnectionLost):
            await post(http)
        assert await post(http) == b"ok"
    assert [len(requests) for requests in server.connections] == [2, 1]


async def test_methods_targets_and_headers():
    server = Server(OK, OK, b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nLink: <a>\r\nLINK: <b>\r\n\r\n", OK)
    async with serving(server) as port, connecting(f"http://me:secret@{LOOPBACK}:{port}/base") as http:
        await http.request("GET", "/base/list?page=1", headers={"Accept": "text/plain"})
        await http.request("PATCH", "/x", body=b"{}")
        head = await http.request("HEAD", "/x")
        await http.request("POST", "/x")
    assert (head.headers["link"], head.body) == ("<a>, <b>", b"")
    host = f"host: {LOOPBACK}:{port}\r\n".encode()
    assert server.connections == [
        [
            b"GET /base/list?page=1 HTTP/1.1\r\n" + host + b"Accept: text/plain\r\n\r\n",
            b"PATCH /x HTTP/1.1\r\n" + host + b"content-length: 2\r\n\r\n",
            b"HEAD /x HTTP/1.1\r\n" + host + b"\r\n",
            b"POST /x HTTP/1.1\r\n" + host + b"content-length: 0\r\n\r\n",
        ]
    ]


async def test_redirect_is_not_followed():
    server = Server(b"HTTP/1.1 302 Found\r\nLocation: /other\r\nContent-Length: 0\r\n\r\n")
    async with serving(server) as port, connecting(f"http://{LOOPBACK}:{port}") as http:
        response = await http.request("GET", "/")
    assert (response.status, response.is_success) == (302, False)
    assert len(server.connections[0]) == 1


async def test_old_connection_is_not_used_again():
    server = Server(OK)
    async with serving(server) as port, connecting(f"http://{LOOPBACK}:{port}", keep_alive_s=0.0) as http:
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


@pytest.mark.parametrize(
    ("method", "target", "name", "value"),
    [
        ("POST", "/", "x-amz-security-token", "token\n"),
        ("POST", "/", "x-amz-security-token", "token\r\nx-amz-target: Other"),
        ("POST", "/", "x-amz-security-token", "\0"),
        ("POST", "/", "x-amz-security-token", "tökén"),
        ("POST", "/", "x: y\r\nz", "token"),
        ("POST", "/ HTTP/1.1\r\nx: y", "x", "token"),
        ("POST", "/a b", "x", "token"),
        ("POST", "//token/ü", "x", "token"),
        ("POST", "http://other/token", "x", "token"),
        ("GET / HTTP/1.1\r\n", "/", "x", "token"),
    ],
)
async def test_request_with_an_invalid_character_is_not_sent(method: str, target: str, name: str, value: str):
    server = Server(OK)
    async with serving(server) as port, connecting(f"http://{LOOPBACK}:{port}") as http:
        with pytest.raises(InvalidRequest) as raised:
            await http.request(method, target, headers={name: value}, body=b"{}")
        assert "token" not in str(raised.value)
    assert server.connections == []


@pytest.mark.parametrize(
    ("response", "failure"),
    [
        (b"", ConnectionLost),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", ConnectionLost),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nok", ConnectionLost),
        (b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n", ConnectionLost),
        (b"SSH-2.0-OpenSSH\r\n\r\n", InvalidResponse),
        (b"HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\nok", InvalidResponse),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\nok", InvalidResponse),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nok", InvalidResponse),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", InvalidResponse),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1_0\r\n\r\n", InvalidResponse),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok", InvalidResponse),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", InvalidResponse),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nok\r\n", InvalidResponse),
        (b"HTTP/1.1 200 OK\r\nno header\r\n\r\n", InvalidResponse),
        (b"HTTP/1.1 2000 OK\r\n\r\n", InvalidResponse),
        (b"HTTP/2 200 OK\r\n\r\n", InvalidResponse),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * (module.MAX_HEAD + 10) + b"\r\n\r\n", InvalidResponse),
    ],
)
async def test_incomplete_and_invalid_responses(response: bytes, failure: type[Exception]):
    async with serving(Server(response, closes=True)) as port, connecting(f"http://{LOOPBACK}:{port}") as http:
        with pytest.raises(failure):
            await post(http)


@pytest.mark.parametrize(
    ("head", "part"),
    [
        (b"Content-Length: 1000001", b""),
        (b"Transfer-Encoding: chunked", b"ffff\r\n" + b"x" * 0xFFFF + b"\r\n"),
        (b"Connection: close", b"x" * 0xFFFF),
    ],
    ids=["length", "chunked", "until the end"],
)
async def test_body_is_read_up_to_the_limit(head: bytes, part: bytes):
    sent = 0

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n")
        with suppress(ConnectionError):
            while part and sent < 100 * MAX_BODY:
                writer.write(part)
                await writer.drain()
                sent += len(part)

    async with serving(endless) as port, connecting(f"http://{LOOPBACK}:{port}") as http:
        with pytest.raises(ResponseTooLong):
            await post(http)
    # The rest is in buffers of the operating system.
    assert sent < 50 * MAX_BODY


async def test_server_that_does_not_listen_is_named():
    with unused_port() as port:
        async with connecting(f"http://{LOOPBACK}:{port}") as http:
            with pytest.raises(ConnectError, match=str(port)):
                await post(http)


async def test_slow_response():
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with serving(silent) as port, connecting(f"http://{LOOPBACK}:{port}", timeout_s=0.05) as http:
        with pytest.raises(ReadTimeout):
            await post(http)
    async with serving(silent) as port, connecting(f"http://{LOOPBACK}:{port}") as http:
        with pytest.raises(ReadTimeout):
            await http.request("GET", "/", timeout_s=0.05)


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
            with pytest.raises(TlsError, match="CERTIFICATE_VERIFY_FAILED"):
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


@pytest.mark.parametrize("variable", ["http_proxy", "ALL_PROXY"])
async def test_http_through_a_proxy(monkeypatch: pytest.MonkeyPatch, variable: str):
    proxy = Proxy()
    async with serving(proxy) as proxy_port:
        monkeypatch.setenv(variable, f"{LOOPBACK}:{proxy_port}")
        async with connecting("http://dynamodb.example.com/base") as http:
            assert await post(http) == b"ok"
    assert proxy.heads[0].startswith(b"POST http://dynamodb.example.com/base HTTP/1.1\r\n")


async def test_proxy_that_refuses(monkeypatch: pytest.MonkeyPatch):
    async with serving(Proxy(b"407 Proxy Authentication Required")) as proxy_port:
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:s3cret@{LOOPBACK}:{proxy_port}")
        async with connecting("https://dynamodb.example.com") as http:
            with pytest.raises(ProxyError) as refused:
                await post(http)
    assert "s3cret" not in str(refused.value)


async def test_no_proxy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", LOOPBACK)
    async with serving(Server(OK)) as port, connecting(f"http://{LOOPBACK}:{port}") as http:
        assert await post(http) == b"ok"
