"""A fake of the instance metadata service, version 2, on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

INSTANCE_ID = "i-0123456789abcdef0"
CREDENTIALS = "iam/security-credentials/"


class FakeImds:
    def __init__(self) -> None:
        #: By path below /latest/meta-data/. All other paths return 404.
        self.values: dict[str, str] = {
            "instance-id": INSTANCE_ID,
            "instance-life-cycle": "on-demand",
            "placement/region": "eu-central-1",
            "tags/instance/remuda:pool": "pool",
            "tags/instance/remuda:margin-s": "60",
            "tags/instance/remuda:first-life-s": "400",
        }
        self.tokens: list[str] = []
        #: Number of the newest tokens that are accepted.
        self.valid = 1
        #: If not 0: the status of all responses.
        self.status = 0
        self.requests: list[str] = []
        self.url = ""

    def answer(self, method: str, path: str, token: str, life: str) -> tuple[int, str]:
        self.requests.append(f"{method} {path}")
        if self.status:
            return self.status, ""
        if (method, path) == ("PUT", "/latest/api/token"):
            if not (life.isdecimal() and 1 <= int(life) <= 21_600):
                return 400, ""
            self.tokens.append(f"token-{len(self.tokens)}")
            return 200, self.tokens[-1]
        if method != "GET" or token not in self.tokens[len(self.tokens) - self.valid :]:
            return 401, ""
        value = self.values.get(path.removeprefix("/latest/meta-data/"))
        return (404, "") if value is None else (200, value)

    def describe(self, instance_id: str, *, tags: Mapping[str, str], zone: str, life_cycle: str = "on-demand") -> None:
        """Become the service of this machine."""
        self.values = {
            "instance-id": instance_id,
            "instance-life-cycle": life_cycle,
            "placement/availability-zone": zone,
            "placement/region": zone[:-1],
            **{f"tags/instance/{key}": value for key, value in tags.items()},
        }

    def set_credentials(self, role: str, credentials: Mapping[str, str]) -> None:
        """Set AccessKeyId, SecretAccessKey, Token and Expiration."""
        self.values[CREDENTIALS] = role
        self.values[CREDENTIALS + role] = json.dumps({"Code": "Success", "Type": "AWS-HMAC", **credentials})

    def set_spot_notice(self, action: str, at: str) -> None:
        self.values["spot/instance-action"] = json.dumps({"action": action, "time": at})


@contextmanager
def fake_imds() -> Iterator[FakeImds]:
    imds = FakeImds()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            token = self.headers.get("X-aws-ec2-metadata-token", "")
            life = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
            status, text = imds.answer(self.command, self.path, token, life)
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = _handle  # noqa: N815 - names that the server calls

        def log_message(self, *_line: object) -> None:
            """Write no access log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        imds.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield imds
        finally:
            server.shutdown()
            thread.join()
