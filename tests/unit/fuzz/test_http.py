"""Arbitrary bytes in place of an HTTP response: the caller gets a response or one of the errors of reading."""

from __future__ import annotations

import asyncio

from hypothesis import example, given
from hypothesis import strategies as st

from remuda.http import ClientResponse, InvalidResponse, _read_response
from tests.support.mutations import fuzzed

MAX_BODY = 100
PARTS = [
    *(b"HTTP/1.1 200 OK", b"HTTP/1.0 404", b"HTTP/1.1 100 Continue", b"HTTP/1.1 204 No Content", b"HTTP/1.1 99"),
    *(b"\r\n", b"\r\n\r\n", b"\n", b":", b" ", b"\0", b"\xff", b"0", b"5", b"ffffffffffffffffffffff", b"-1", b"hello"),
    *(b"Content-Length: 5", b"content-length: 1_0", b"Transfer-Encoding: chunked", b"Connection: close", b"X : y"),
]


@fuzzed()
@given(
    st.lists(st.sampled_from(PARTS) | st.binary(max_size=5), max_size=12).map(b"".join),
    st.sampled_from(["GET", "HEAD"]),
)
@example(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (MAX_BODY + 1), "GET")
@example(
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\n" + b"x" * 100 + b"\r\n1\r\nx\r\n0\r\n\r\n", "GET"
)
def test_response(data: bytes, method: str) -> None:
    async def read() -> ClientResponse | None:
        reader = asyncio.StreamReader(limit=1_000)
        reader.feed_data(data)
        reader.feed_eof()
        try:
            return (await _read_response(reader, MAX_BODY, method))[0]
        except (InvalidResponse, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return None

    response = asyncio.run(read())
    if response is not None:
        assert 200 <= response.status <= 999
        assert len(response.body) <= MAX_BODY
        for name, value in response.headers.items():
            assert name == name.lower().strip()
            assert "\r\n" not in value
