"""Whole processes, as a user sees them: time, time to the first AWS call, CPU time and memory of short commands."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.environment import ROOT, SCOPE, BenchmarkEnvironment, BenchmarkPool
from benchmarks.figures import Figure, FigureKind, Results, median, timed
from benchmarks.floor import Floor
from remuda.adapters.system.clock import SystemClock

SECTION = "As a user sees it"
COMMAND = str(Path(sys.executable).with_name("remuda"))
#: By number of instances. Three quarters of the prototype's time.
PROVISION_LIMIT_S = {1: 0.585, 10: 0.7}
PROVISION_PREDECESSOR = {1: "0.78 s", 10: "0.93 s"}
RELEASE_LIMIT_S = 0.8
REFRESH_LIMIT_S = 0.6
FIRST_CALL_LIMIT_S = 0.35
CPU_LIMIT_S = 0.4
MEMORY_LIMIT_MB = 50.0
LAMBDA_LIMIT_S = 0.8
#: Modules of the stack's functions.
LAMBDA_MODULES = ("remuda.aws_lambda.handler", "remuda.aws_lambda.broker")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredProcess:
    """Resources of a process that has ended."""

    seconds: float
    cpu_s: float
    memory_mb: float


async def run(environment: BenchmarkEnvironment, _floor: Floor) -> Results:
    figures: list[Figure] = []
    for count in sorted({1, min(10, max(environment.size.counts))}):
        await environment.clear()
        pool = await environment.pool()
        await pool.fill(count)
        figures += _commands(environment, pool, count)
    return Results(figures=(*figures, *_imports(environment.size.starts)))


def _commands(environment: BenchmarkEnvironment, pool: BenchmarkPool, count: int) -> list[Figure]:
    variables = environment.servers.environment()  # Without PYTHONDONTWRITEBYTECODE.
    # A workflow has no GitHub credential: its runners register with the tokens of the pool.
    workflow = {name: value for name, value in variables.items() if name != "REMUDA_GITHUB_TOKEN"}
    common = ("--pool", pool.name)
    provisions, releases = [], []
    for _ in range(environment.size.starts):
        run_id = ("--run-id", environment.next_run())
        number = ("--instance-count", str(count), "--github-scope", SCOPE)
        provisions.append(measure([COMMAND, "provision", *run_id, *number, *common], workflow))
        releases.append(measure([COMMAND, "release", *run_id, *common], workflow))
    figures = [
        _time(
            f"process: warm provision, N = {count}",
            provisions,
            PROVISION_LIMIT_S.get(count, 1.0),
            PROVISION_PREDECESSOR.get(count, ""),
        ),
        _time(f"process: release, N = {count}", releases, RELEASE_LIMIT_S, ""),
    ]
    if count > 1:
        return figures
    refresh = [COMMAND, "refresh", "--github-scope", SCOPE, *environment.servers.flags(), *common]
    refreshes = [measure(refresh, variables) for _ in range(environment.size.starts)]
    provision = [COMMAND, "provision", "--run-id", "1", *common]
    first = [seconds_to_first_call(provision, workflow) for _ in range(environment.size.starts)]
    return [
        *figures,
        _time("process: next refresh", refreshes, REFRESH_LIMIT_S, "0.30 s"),
        timed(
            "process: provision, start to first AWS call",
            first,
            limit=FIRST_CALL_LIMIT_S,
            predecessor="0.21 s",
            floor=None,
            section=SECTION,
        ),
        timed(
            "process: warm provision, N = 1: CPU time",
            [each.cpu_s for each in provisions],
            limit=CPU_LIMIT_S,
            predecessor="0.29 s",
            floor=None,
            section=SECTION,
        ),
        _memory("process: warm provision, N = 1", provisions),
        _memory("process: next refresh", refreshes),
    ]


def _imports(times: int) -> list[Figure]:
    """The import of each function's module, for which the first invocation of a function waits.

    Without the bytecode of Remuda: bundles contain none, and the folder of a function is read-only.
    """
    figures = []
    with tempfile.TemporaryDirectory(prefix="remuda-bench-") as folder:
        shutil.copytree(ROOT / "src", folder, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        variables = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        for module in LAMBDA_MODULES:
            found = [measure([sys.executable, "-c", f"import {module}"], variables) for _ in range(times)]
            figures.append(_time(f"process: import of {module}", found, LAMBDA_LIMIT_S, ""))
    return figures


def _time(name: str, found: Sequence[MeasuredProcess], limit: float, predecessor: str) -> Figure:
    return timed(
        name, [each.seconds for each in found], limit=limit, predecessor=predecessor or "—", floor=None, section=SECTION
    )


def _memory(name: str, found: Sequence[MeasuredProcess]) -> Figure:
    measured = median([each.memory_mb for each in found])
    # Like a time, it depends on the machine: on its versions of Python and the libraries.
    return Figure(
        f"{name}: memory",
        "MB",
        round(measured, 1),
        limit=MEMORY_LIMIT_MB,
        kind=FigureKind.TIME,
        samples=len(found),
        section=SECTION,
    )


#: Runs in its own interpreter, which uses little memory: a new process starts with the memory of its parent.
_MEASURE = """
import os, sys, time
nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
started = time.monotonic()
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ, file_actions=nowhere)
_, status, used = os.wait4(pid, 0)
print(time.monotonic() - started, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e6, status)
"""


def measure(command: Sequence[str], variables: Mapping[str, str]) -> MeasuredProcess:
    """Run a command, which must succeed."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", _MEASURE, *command],
        env=variables,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    seconds, cpu_s, memory_mb, status = done.stdout.split()
    if int(status):
        raise RuntimeError(f"{' '.join(command)}: status {os.waitstatus_to_exitcode(int(status))}")
    return MeasuredProcess(seconds=float(seconds), cpu_s=float(cpu_s), memory_mb=float(memory_mb))


def seconds_to_first_call(command: Sequence[str], variables: Mapping[str, str]) -> float:
    """Seconds from the start of a process to its first request to AWS, which is refused."""
    body = b'{"__type":"AccessDeniedException","message":"refused"}'
    response = b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(body), body)
    clock = SystemClock()
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        environment = {**variables, "AWS_ENDPOINT_URL": url, "AWS_ENDPOINT_URL_DYNAMODB": url}
        started = clock.monotonic()
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            connection, _ = server.accept()
            with closing(connection):
                connection.recv(1)
                seconds = clock.monotonic() - started
                connection.recv(65_536)
                connection.sendall(response)
    return seconds
