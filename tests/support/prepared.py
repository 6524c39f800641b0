"""Commands as processes that need not import all anew: a server that has, forks one for each.

For tests of many commands, where importing AWS's libraries would be most of the work. Each has its own process, streams
and environment; that the installed command starts by itself, others show.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

PRELOADED = (
    "remuda.entrypoints.cli",
    "remuda.entrypoints.commands",
    "remuda.entrypoints.doctor",
    "remuda.adapters.aws.dynamodb.store",
    "remuda.adapters.aws.ec2.compute",
    "remuda.adapters.aws.sqs",
    "remuda.adapters.github.client",
)
STDOUT, STDERR = 1, 2


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def run_prepared(
    arguments: Sequence[str], *, environment: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` does it with what it writes kept."""
    with tempfile.TemporaryDirectory() as folder:
        out, told = Path(folder) / "out", Path(folder) / "told"
        process = _server().Process(target=_command, args=(list(arguments), dict(environment), str(out), str(told)))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(list(arguments), timeout_s, told.read_bytes())
        return subprocess.CompletedProcess(arguments, process.exitcode, out.read_text(), told.read_text())


def _command(arguments: list[str], environment: dict[str, str], out: str, told: str) -> None:
    from remuda.entrypoints.cli import main  # noqa: PLC0415 - in the new process only

    for number, path in ((STDOUT, out), (STDERR, told)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (STDOUT, STDERR))  # noqa: SIM115 - as long as the process lives
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["remuda", *arguments]
    sys.exit(main(arguments))
