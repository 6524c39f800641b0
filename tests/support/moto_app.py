"""The EC2 test server's process: moto behind the shim. Started by moto_server.py with the interpreter of moto's own
virtualenv; says its port, and ends when its standard input does.
"""

from __future__ import annotations

import os
import sys
import threading

from ec2_shim import Ec2Shim
from moto.ec2.models import ec2_backends
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class Quiet(WSGIRequestHandler):  # type: ignore[misc]  # its types are in the other virtualenv
    def log(self, *_line: object) -> None:
        """Tests read no access log."""


def _follow_parent() -> None:
    sys.stdin.read()
    os._exit(0)


def _reset() -> None:
    """EC2 alone: moto's own reset would load every service there is first."""
    for account in ec2_backends.values():
        for backend in list(account.values()):
            backend.reset()


def main() -> None:
    app = Ec2Shim(DomainDispatcherApplication(create_backend_app), _reset)
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    threading.Thread(target=_follow_parent, daemon=True).start()
    print(server.server_port, flush=True)  # noqa: T201 - whoever started it waits for this
    server.serve_forever()


if __name__ == "__main__":
    main()
