"""Service Quotas: a test server with quotas of EC2."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.aws.servers import LOOPBACK

#: vCPUs by quota code of EC2, for servers of this process.
QUOTAS = {"L-1216C47A": 512.0, "L-34B43A08": 256.0}


class QuotaHandler(BaseHTTPRequestHandler):
    """Service Quotas: GetServiceQuota of the quotas above, and errors for everything else."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        operation = self.headers["X-Amz-Target"].rpartition(".")[2]
        value = QUOTAS.get(body.get("QuotaCode")) if body.get("ServiceCode") == "ec2" else None
        if operation != "GetServiceQuota" or value is None:
            self._answer(400, {"__type": "NoSuchResourceException", "message": "the quota does not exist"})
        else:
            self._answer(200, {"Quota": {"ServiceCode": "ec2", "QuotaCode": body["QuotaCode"], "Value": value}})

    def _answer(self, status: int, document: Mapping[str, Any]) -> None:
        content = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/x-amz-json-1.1")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        """Write no log."""


@contextmanager
def quota_server(host: str = LOOPBACK) -> Iterator[str]:
    server = ThreadingHTTPServer((host, 0), QuotaHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
