"""Test servers on loopback: DynamoDB, SQS and Secrets Manager (ministack), a second SQS (fauxqs) and the fake GitHub.

Each server is a process of the test worker that started it and ends with it. EC2 is in `ec2.py`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any
from urllib.error import URLError

import certifi
import pytest
from aiobotocore.session import AioSession, get_session

from remuda.adapters.aws import clients
from remuda.adapters.aws.clients import ClientConfig
from remuda.adapters.aws.environment import AwsEndpoint
from remuda.adapters.aws.service import ServiceClient
from remuda.adapters.aws.signature import AwsCredentials
from remuda.fake_github import Endpoint, read_endpoint
from tests.support.records import NOW

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
PYTHON = Path(os.environ.get("REMUDA_TEST_SERVERS", ROOT / ".venv-servers")) / "bin" / "python"
FAUXQS = ROOT / "requirements" / "node_modules" / "fauxqs" / "dist" / "app.js"
#: Seconds in which a server must start or stop. Generous: only a broken server reaches it.
LIMIT_S = 120.0
POLL_S = 0.05
LOOPBACK = "127.0.0.1"
REGION = "eu-central-1"
#: A bundle with a single certificate: no server here uses TLS, but each client parses the whole bundle.
CA_BUNDLE = "ca.pem"
PEM_END = "-----END CERTIFICATE-----"
#: Before the time stamps of test records, so that none of them has expired.
LONG_AGO = NOW - timedelta(days=30)
#: Environment variable with the URL of a DynamoDB server to use instead of ministack.
DYNAMODB_URL = "REMUDA_TEST_DYNAMODB_URL"
#: Overrides everything that botocore would read from the developer's machine.
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_SESSION_TOKEN": "",
    "AWS_REGION": REGION,
    "AWS_DEFAULT_REGION": REGION,
    "AWS_EC2_METADATA_DISABLED": "true",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}


CREDENTIALS = AwsCredentials(access_key="test", secret_key="test")


class ServerError(RuntimeError):
    """A test server is not installed or did not start."""


def aws_client(service: str, url: str, **options: Any) -> AbstractAsyncContextManager[Any]:
    """A client of a test server."""
    create: Any = _session().create_client
    defaults = {"region_name": REGION, "aws_access_key_id": "test", "aws_secret_access_key": "test"}
    client: AbstractAsyncContextManager[Any] = create(service, endpoint_url=url, **{**defaults, **options})
    return client


def service_client(
    service: str, url: str, *, credentials: AwsCredentials = CREDENTIALS, settings: ClientConfig | None = None
) -> ServiceClient:
    """The product's client of a test server."""

    async def given() -> AwsCredentials:
        return credentials

    return clients.service_client(service, AwsEndpoint(url, REGION), settings or clients.config(), given)


@cache
def _session() -> AioSession:
    """Shared, because botocore takes a second to read the model of EC2."""
    return get_session()


@contextmanager
def unused_port(host: str = LOOPBACK) -> Iterator[int]:
    """Reserve a port at which nothing listens. A server started with SO_REUSEADDR can still bind to it (Linux)."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((host, 0))
        yield int(holder.getsockname()[1])


def die_with_parent() -> None:
    """In a child process: request SIGKILL at the death of the parent, so that a killed test worker leaves no server."""
    if sys.platform == "linux":
        import ctypes  # noqa: PLC0415 - only in the child

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


# DynamoDB, SQS, Secrets Manager ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ministack:
    url: str
    process: subprocess.Popen[bytes]
    #: Holds the offset of the server's clock from the real time, as one double that the server has mapped.
    clock_file: Path

    def advance_clock(self, seconds: float) -> None:
        (offset,) = struct.unpack("<d", self.clock_file.read_bytes())
        with self.clock_file.open("r+b") as file:
            file.write(struct.pack("<d", offset + seconds))

    def environment(self) -> dict[str, str]:
        """Variables with which a process uses this server and no other."""
        return {
            **ENVIRONMENT,
            "AWS_CA_BUNDLE": str(self.clock_file.with_name(CA_BUNDLE)),
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ENDPOINT_URL_DYNAMODB": os.environ.get(DYNAMODB_URL, self.url),
        }


@contextmanager
def ministack(folder: Path, *, starts_at: datetime = LONG_AGO, host: str = LOOPBACK) -> Iterator[Ministack]:
    if not PYTHON.exists():
        raise ServerError(f"the test servers are not installed in {PYTHON.parents[1]}; run make conformance")
    (folder / CA_BUNDLE).write_text(Path(certifi.where()).read_text().partition(PEM_END)[0] + PEM_END + "\n")
    clock_file = folder / "clock-offset"
    clock_file.write_bytes(struct.pack("<d", starts_at.timestamp() - time.time()))  # noqa: TID251 - the server's clock
    log = folder / "ministack.log"
    with unused_port(host) as port:
        with log.open("wb") as output:
            process = subprocess.Popen(
                [PYTHON, HERE / "ministack_process.py", clock_file],
                env={
                    "PATH": os.environ["PATH"],
                    # The usual limit of an account. Its own default depends on the memory of this computer.
                    "LAMBDA_ACCOUNT_CONCURRENCY": "1000",
                    "HOME": str(folder),
                    "TMPDIR": str(folder),
                    "BIND_HOST": host,
                    "GATEWAY_PORT": str(port),
                    "LOG_LEVEL": "ERROR",
                    "MINISTACK_REGION": REGION,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                # Ctrl-C must not reach the server: tests need it for their cleanup.
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509 - no threads yet
            )
        server = Ministack(url=f"http://{host}:{port}", process=process, clock_file=clock_file)
        try:
            _wait_until_healthy(server, log)
            yield server
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_healthy(server: Ministack, log: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while True:
        if server.process.poll() is not None or time.monotonic() >= deadline:
            raise ServerError(f"ministack did not start:\n{log.read_text()}")
        try:
            with urllib.request.urlopen(f"{server.url}/_ministack/health", timeout=1):  # noqa: S310 - loopback
                return
        except (URLError, OSError):
            time.sleep(POLL_S)  # noqa: TID251 - the server does not announce that it listens


# A second SQS ---------------------------------------------------------------------------------------------------------


class Fauxqs:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.url = f"http://{LOOPBACK}:{int(self._read())}"

    def advance_clock(self, seconds: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        assert self._read() == "moved"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def fauxqs() -> Iterator[Fauxqs]:
    node = shutil.which("node")
    if node is None or not FAUXQS.exists():
        pytest.skip("fauxqs is not installed: run make conformance on a machine with npm")
    command = [node, str(HERE / "fauxqs.mjs"), str(FAUXQS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Fauxqs(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(LIMIT_S)


# GitHub ---------------------------------------------------------------------------------------------------------------


@contextmanager
def fake_github(folder: Path, host: str = LOOPBACK) -> Iterator[Endpoint]:
    with subprocess.Popen(
        [sys.executable, "-m", "remuda.fake_github", "--dir", str(folder), "--host", host],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509 - no threads yet
    ) as process:
        assert process.stdout is not None
        first_line = process.stdout.readline()
        endpoint = read_endpoint(folder)
        try:
            if not first_line.startswith("http") or endpoint is None:
                raise ServerError(f"the fake GitHub did not start: {first_line}")
            yield endpoint
        finally:
            process.terminate()
