"""A peer below `remuda.http` that takes its time: the limits of connections and calls apply as on a network."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from remuda import http
from remuda.http import ClientResponse

#: From method, path with query, headers and body of a request to its response and the seconds until it comes.
Answer = Callable[[str, str, Mapping[str, str], bytes], tuple[ClientResponse, float]]


class SlowPeer:
    """Answers the requests of all connections, at whatever address. Each connection serves one request."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(http, "client_context", lambda _bundle: None)
        monkeypatch.setattr(asyncio, "open_connection", self._open)

    async def _open(self, _host: str, _port: int, *, limit: int, **_: Any) -> tuple[asyncio.StreamReader, Any]:
        reader = asyncio.StreamReader(limit=limit)
        return reader, _Connection(self._answer, reader)


class _Connection:
    """Stands in for the writer of a stream, and for its transport."""

    def __init__(self, answer: Answer, reader: asyncio.StreamReader) -> None:
        self._answer = answer
        self._reader = reader
        self.transport = self

    def write(self, data: bytes) -> None:
        head, _, body = data.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        method, target, _ = first.split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        response, delay_s = self._answer(method, target, headers, body)
        asyncio.get_running_loop().call_later(delay_s, self._reader.feed_data, _encoded(response))

    def abort(self) -> None:
        """Nothing to close."""


def _encoded(response: ClientResponse) -> bytes:
    lines = {**response.headers, "content-length": str(len(response.body)), "connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"HTTP/1.1 {response.status} Status\r\n{head}\r\n".encode() + response.body
