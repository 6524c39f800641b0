"""The AWS servers that tests run on: real processes on loopback, one for each worker, gone with it."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from urllib.error import URLError

import certifi

from tests.support.records import NOW

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("REMUDA_TEST_SERVERS", ROOT / ".venv-servers")) / "bin" / "python"
#: Generous: nothing waits for it unless something is broken.
START_WITHIN_S = 120.0
#: No server here speaks TLS, yet each client reads all authorities that it is given: one is read soonest.
AUTHORITIES = "authorities.pem"
PEM_END = "-----END CERTIFICATE-----"
LOOPBACK = "127.0.0.1"
LONG_AGO = NOW - timedelta(days=30)
#: Somebody's own server for the store, in place of the one started here.
DYNAMODB_URL = "REMUDA_TEST_DYNAMODB_URL"
#: What botocore would read from the developer's own machine.
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_SESSION_TOKEN": "",
    "AWS_REGION": "eu-central-1",
    "AWS_DEFAULT_REGION": "eu-central-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


class ServerProblem(RuntimeError):
    """A server that tests need is not there."""


@dataclass(frozen=True, kw_only=True)
class Ministack:
    url: str
    process: subprocess.Popen[bytes]
    clock_file: Path

    def let_pass(self, seconds: float) -> None:
        """Move its clock ahead."""
        self._set_ahead(self._ahead() + seconds)

    def _ahead(self) -> float:
        (ahead,) = struct.unpack("<d", self.clock_file.read_bytes())
        return float(ahead)

    def _set_ahead(self, seconds: float) -> None:
        # In place: the server has the file mapped.
        with self.clock_file.open("r+b") as file:
            file.write(struct.pack("<d", seconds))

    def environment(self) -> dict[str, str]:
        """What a process needs to talk to it, and to nobody else."""
        dynamodb = os.environ.get(DYNAMODB_URL, self.url)
        return {
            **ENVIRONMENT,
            "AWS_CA_BUNDLE": str(self.clock_file.with_name(AUTHORITIES)),
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ENDPOINT_URL_DYNAMODB": dynamodb,
        }


@contextmanager
def ministack(folder: Path, *, starts_at: datetime = LONG_AGO) -> Iterator[Ministack]:
    """Its clock starts before the records of tests: what they expire by is still to come."""
    if not PYTHON.exists():
        raise ServerProblem(f"the test servers are not installed in {PYTHON.parents[1]}: run make conformance")
    (folder / AUTHORITIES).write_text(Path(certifi.where()).read_text().partition(PEM_END)[0] + PEM_END + "\n")
    clock_file = folder / "ahead"
    clock_file.write_bytes(struct.pack("<d", starts_at.timestamp() - time.time()))  # noqa: TID251 - the server's clock
    log = folder / "ministack.log"
    with held_port() as port:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [PYTHON, Path(__file__).with_name("shifted_ministack.py"), clock_file],
                env={
                    "PATH": os.environ["PATH"],
                    "HOME": str(folder),
                    "TMPDIR": str(folder),
                    "BIND_HOST": LOOPBACK,
                    "GATEWAY_PORT": str(port),
                    "LOG_LEVEL": "ERROR",
                    "MINISTACK_REGION": ENVIRONMENT["AWS_REGION"],
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                # Ctrl-C is for whoever started it: others still need it to clean up.
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - no threads yet
            )
        server = Ministack(url=f"http://{LOOPBACK}:{port}", process=process, clock_file=clock_file)
        try:
            _await_health(server, log)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def held_port() -> Iterator[int]:
    """A port at which nobody listens. Nobody else is given it meanwhile: not to listen at, nor to call from. A server
    that is told its number may listen there, as all of them ask for an address that is in use (Linux).
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((LOOPBACK, 0))
        yield int(holder.getsockname()[1])


def _await_health(server: Ministack, log: Path) -> None:
    give_up_at = time.monotonic() + START_WITHIN_S
    while True:
        if server.process.poll() is not None or time.monotonic() >= give_up_at:
            raise ServerProblem(f"ministack did not start:\n{log.read_text()}")
        try:
            with urllib.request.urlopen(f"{server.url}/_ministack/health", timeout=1):  # noqa: S310 - loopback
                return
        except (URLError, OSError):
            time.sleep(0.05)  # noqa: TID251 - nothing else tells that it listens


def die_with_parent() -> None:
    """A worker that is killed leaves no server behind (Linux)."""
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 - only in the child

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
