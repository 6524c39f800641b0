"""A minimal HTTP client. Importing `http.client` would double the start-up time of the listener."""

import json
import socket
from typing import Any

from . import VERSION

CONNECT_TIMEOUT_S = 5.0
RESPONSE_TIMEOUT_S = 30.0
CHUNK = 64 * 1024
#: Runner.Common/HostContext.cs, UserAgents.
USER_AGENT = "GitHubActionsRunner-linux-x64"


class HttpResponse:
    def __init__(self, status: int, body: dict[str, Any]) -> None:
        self.status = status
        self.body = body

    @property
    def message(self) -> str:
        return str(self.body.get("message", ""))


class Call:
    """A pending request. Wait for `response`, or with `select` and call `feed` when it is readable."""

    def __init__(
        self,
        server: str,
        method: str,
        path: str,
        *,
        body: dict[str, Any] | None = None,
        secret: str | None = None,
        version: str = VERSION,
        timeout_s: float = RESPONSE_TIMEOUT_S,
    ) -> None:
        host, port = _address(server)
        payload = b"" if body is None else json.dumps(body).encode()
        head = [f"{method} {path} HTTP/1.1", f"Host: {host}:{port}", f"User-Agent: {USER_AGENT}/{version}"]
        head += ["Connection: close", "Content-Type: application/json", f"Content-Length: {len(payload)}"]
        if secret is not None:
            head.append(f"Authorization: Bearer {secret}")
        self._received = bytearray()
        self._socket = socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S)
        self._socket.settimeout(timeout_s)
        self._socket.sendall("\r\n".join([*head, "", ""]).encode() + payload)

    def fileno(self) -> int:
        return self._socket.fileno()

    def feed(self) -> HttpResponse | None:
        """Read available data. Return the response when it is complete, else None."""
        chunk = self._socket.recv(CHUNK)
        if chunk:
            self._received += chunk
            return None
        self.close()
        return _parse(bytes(self._received))

    def response(self) -> HttpResponse:
        """Wait for the response. Raises `OSError` if it is incomplete."""
        try:
            while True:
                response = self.feed()
                if response is not None:
                    return response
        finally:
            self.close()

    def close(self) -> None:
        self._socket.close()


def _address(server: str) -> tuple[str, int]:
    scheme, _, rest = server.partition("://")
    if scheme != "http":
        raise OSError(f"the fake runner supports http only, not {scheme}")
    host, _, port = rest.partition("/")[0].partition(":")
    return host, int(port or 80)


def _parse(raw: bytes) -> HttpResponse:
    head, separator, body = raw.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    fields = dict(_field(line) for line in lines[1:])
    length = int(fields.get("content-length", len(body)))
    if not separator or len(body) < length:
        raise ConnectionError("the connection was closed before the response was complete")
    status = int(lines[0].split(" ")[1])
    try:
        document = json.loads(body) if body else {}
    except ValueError:
        document = {"message": body.decode(errors="replace")}
    return HttpResponse(status, document if isinstance(document, dict) else {})


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip().lower(), value.strip()
