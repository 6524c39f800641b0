"""`remuda agent`: the agent of an instance. The instance starts it, with its identity in the environment."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from remuda import __version__, procfs
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.agent import processes
from remuda.agent.job_folders import JobFolders
from remuda.agent.job_hook import REFUSED, JobHook
from remuda.agent.loop import Agent
from remuda.agent.runner import ActionsRunner
from remuda.cli.output import JSON_LOGS, error_line, record_line
from remuda.domain.errors import RemudaError, Unavailable, UserError
from remuda.domain.text import sanitize
from remuda.domain.timestamps import to_text
from remuda.ports.calls import CallCounter
from remuda.ports.event_log import EventLog
from remuda.ports.store import InstanceStore

BACKEND = "REMUDA_BACKEND"
LOG_FORMAT = "REMUDA_LOG_FORMAT"


class LineEventLog:
    """One line per event on stdout, which the instance keeps as the log of the agent."""

    def __init__(self, clock: SystemClock, *, as_json: bool = False) -> None:
        self._clock = clock
        self._as_json = as_json

    def record(self, action: str, why: str = "", **facts: Any) -> None:
        # Texts of jobs and other programs may contain line breaks and escape sequences.
        why = " ".join(why.splitlines())
        if self._as_json:
            line = record_line(self._clock.now(), action, why, facts)
        else:
            fields = " ".join(f"{key}={value}" for key, value in facts.items() if value not in {None, ""})
            line = sanitize(f"{to_text(self._clock.now())} {action} {fields} {why}").rstrip()
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def fail(self, error: RemudaError) -> None:
        """Report the error that stops the agent, on stderr."""
        fix = f"; {error.fix}" if error.fix else ""
        plain = sanitize(f"remuda agent: {error.message}{fix}")
        sys.stderr.write((error_line(self._clock.now(), error) if self._as_json else plain) + "\n")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="remuda agent", description="Run the agent of this instance.")
    parser.add_argument("--dir", help="State directory of the local backend; omitted on EC2.")
    parser.add_argument(
        "--log-format",
        choices=("text", JSON_LOGS),
        # An unknown value must not keep the agent from starting.
        default=JSON_LOGS if os.environ.get(LOG_FORMAT) == JSON_LOGS else "text",
        help="Format of the log. (default: text)",
    )
    parsed = parser.parse_args(arguments)
    event_log = LineEventLog(SystemClock(), as_json=parsed.log_format == JSON_LOGS)
    try:
        if parsed.dir is not None:
            asyncio.run(_run_local(Path(parsed.dir), event_log))
        else:
            _run_on_ec2(event_log)
    except RemudaError as error:
        event_log.fail(error)
        return error.exit_code
    except OSError as problem:
        event_log.fail(Unavailable(f"the instance does not work: {problem}"))
        return Unavailable.exit_code
    return 0


def _run_on_ec2(event_log: EventLog) -> None:
    backend = os.environ.get(BACKEND, "")
    if backend != "aws":
        raise UserError(
            f"{BACKEND} is {backend!r} and --dir is not given, so this is no instance of Remuda",
            field=BACKEND,
            fix="launch instances with 'remuda provision --run-id 1'; they start their agents",
        )
    try:
        from remuda.cli.agent_ec2 import run  # noqa: PLC0415 - AWS libraries are slow to import
    except ImportError as error:
        raise UserError(
            f"the agent needs a library that is not installed: {error.name}", fix="install remuda[aws]"
        ) from None

    asyncio.run(run(os.environ, clock=SystemClock(), event_log=event_log))


async def _run_local(root: Path, event_log: EventLog) -> None:
    from remuda.adapters.local.layout import LocalLayout  # noqa: PLC0415 - not needed on EC2
    from remuda.adapters.sqlite.store import SqliteInstanceStore  # noqa: PLC0415 - as above

    store = SqliteInstanceStore(
        path=LocalLayout(root).database, clock=SystemClock(), ids=SystemIds(), calls=CallCounter()
    )
    try:
        await run_on_local_machine(store, event_log)
    finally:
        await store.close()


async def run_on_local_machine(store: InstanceStore, event_log: EventLog) -> None:
    """Run the agent of the local machine whose supervisor started this process."""
    from remuda.adapters.local.machine import (  # noqa: PLC0415 - not needed on EC2
        LocalMachine,
        job_environment,
        machine_folder,
        pristine_runner,
        supervisor_pid,
    )

    clock, folder = SystemClock(), machine_folder(os.environ)
    pristine = pristine_runner(folder)
    jobs = JobFolders(
        folder,
        pristine=pristine,
        # Processes that a job leaves behind become children of the supervisor.
        processes=partial(procfs.descendants, supervisor_pid(folder)),
        kill=partial(processes.kill_descendants, supervisor_pid(folder), keep={os.getpid()}, clock=clock),
    )
    await Agent(
        store=store,
        machine=LocalMachine(folder=folder, clock=clock, reset=jobs.reset),
        runner=ActionsRunner(
            host=jobs,
            config_folder=jobs.runner_folder,
            state_folder=folder / "logs",
            log=folder / "logs" / "runner.log",
            work=folder / "work",
            clock=clock,
            environment=job_environment(folder),
            hook=JobHook(folder=folder / "hook", pristine=pristine, refused_file=folder / "work" / REFUSED),
        ),
        clock=clock,
        ids=SystemIds(),
        event_log=event_log,
        version=__version__,
    ).run()
