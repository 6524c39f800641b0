"""Runs commands of the tests inside the machine: requests and answers are JSON lines on a virtio port.

Standard library only: runs with the interpreter of the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

PORT = "/dev/virtio-ports/remuda.commands"
#: The exit code of timeout(1).
TIMED_OUT = 124
#: The exit code of a shell for a command that does not exist.
NOT_FOUND = 127


def answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        done = subprocess.run(
            request["command"],
            input=request["stdin"].encode(),
            capture_output=True,
            timeout=request["timeout_s"],
            check=False,
            cwd="/",
        )
    except subprocess.TimeoutExpired as error:
        return {"code": TIMED_OUT, "stdout": text(error.stdout), "stderr": text(error.stderr)}
    except OSError as error:
        return {"code": NOT_FOUND, "stdout": "", "stderr": str(error)}
    return {"code": done.returncode, "stdout": text(done.stdout), "stderr": text(done.stderr)}


def text(output: bytes | None) -> str:
    return (output or b"").decode(errors="replace")


def main() -> None:
    port = os.open(PORT, os.O_RDWR)
    sending = threading.Lock()

    def send(document: dict[str, Any]) -> None:
        # Starts with a line break: a restart may have cut off an earlier line.
        rest = memoryview(f"\n{json.dumps(document)}\n".encode())
        with sending:
            while rest:
                rest = rest[os.write(port, rest) :]

    def handle(request: dict[str, Any]) -> None:
        send({"id": request["id"], **answer(request)})

    send({"boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip()})
    received = b""
    while chunk := os.read(port, 65_536):
        received += chunk
        *lines, received = received.split(b"\n")
        for line in filter(None, lines):
            try:
                request = json.loads(line)
            except ValueError:
                continue  # the rest of a line that an earlier boot received in part
            threading.Thread(target=handle, args=(request,), daemon=True).start()
    # The host is not connected. systemd starts this program again.
    sys.exit(1)


if __name__ == "__main__":
    main()
