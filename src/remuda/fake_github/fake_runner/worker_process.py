"""The listener's handle of a worker process."""

import json
import os
import pathlib
import subprocess
from typing import Any

from . import LENGTH_DIGITS

CHUNK = 64 * 1024
#: Limit of the output that is not sent to the server yet. The oldest part is dropped.
MAX_OUTPUT_CHARS = 256 * 1024
END_LIMIT_S = 8.0


class WorkerProcess:
    def __init__(self, root: pathlib.Path, message: dict[str, Any]) -> None:
        self.job_id: int = message["id"]
        self.job_name: str = message["name"]
        self.result = "failure"  # if the worker ends without a result
        self.steps: list[dict[str, Any]] = []
        self.cancelled = False
        self._output = ""
        self._partial = b""
        self._process = subprocess.Popen(
            [str(root / "bin" / "Runner.Worker")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=root,
        )
        # The job is sent through the pipe because it may hold secrets, and every user can read command lines.
        data = json.dumps(message).encode()
        self._send(b"%0*d" % (LENGTH_DIGITS, len(data)) + data)

    def fileno(self) -> int:
        assert self._process.stdout is not None  # noqa: S101  # opened with PIPE
        return self._process.stdout.fileno()

    def cancel(self) -> None:
        if not self.cancelled:
            self.cancelled = True
            self._send(b"cancel\n")

    def feed(self) -> bool:
        """Read the worker's messages. Return whether it has ended."""
        chunk = os.read(self.fileno(), CHUNK)
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        for line in lines:
            self._handle(json.loads(line))
        if chunk:
            return False
        self.end()
        return True

    def take_output(self) -> str:
        output, self._output = self._output, ""
        return output

    def prepend_output(self, output: str) -> None:
        self._output = output + self._output

    def end(self) -> None:
        """Close the pipes, which cancels a running job, and wait for the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _handle(self, document: dict[str, Any]) -> None:
        self._output = (self._output + document.get("output", ""))[-MAX_OUTPUT_CHARS:]
        if "result" in document:
            self.result = document["result"]
            self.steps = document["steps"]

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None  # noqa: S101  # opened with PIPE
        try:
            while data:
                data = data[os.write(self._process.stdin.fileno(), data) :]
        except OSError:
            return  # the worker has ended; `feed` notices it
