"""`remuda agent`: the on-machine loop. Started by the machine, with its identity in the environment."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from remuda import __version__
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.agent import processes
from remuda.agent.actions_runner import ActionsRunner
from remuda.agent.loop import Agent
from remuda.agent.reset import Reset
from remuda.domain.errors import RemudaError, Unavailable, UserError
from remuda.domain.timestamps import to_text
from remuda.ports.calls import CallCounter

BACKEND = "REMUDA_BACKEND"


class LineJournal:
    """One plain line an event on stdout, which the machine keeps as the agent's log."""

    def __init__(self, clock: SystemClock) -> None:
        self._clock = clock

    def note(self, action: str, why: str = "", **facts: Any) -> None:
        told = " ".join(f"{key}={value}" for key, value in facts.items() if value not in {None, ""})
        sys.stdout.write(f"{to_text(self._clock.now())} {action} {told} {why}".rstrip() + "\n")
        sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="remuda agent", description="Run the agent of this machine.")
    parser.add_argument("--dir", help="State folder of the local backend. Machines on EC2 need none.")
    parsed = parser.parse_args(arguments)
    try:
        if parsed.dir is not None:
            asyncio.run(_run_local(Path(parsed.dir)))
        else:
            _run_on_ec2()
    except RemudaError as error:
        fix = f"; {error.fix}" if error.fix else ""
        sys.stderr.write(f"remuda agent: {error.message}{fix}\n")
        return error.exit_code
    except OSError as problem:
        sys.stderr.write(f"remuda agent: the machine does not work: {problem}\n")
        return Unavailable.exit_code
    return 0


def _run_on_ec2() -> None:
    backend = os.environ.get(BACKEND, "")
    if backend != "aws":
        raise UserError(
            f"{BACKEND} is {backend!r}, and there is no --dir: this is no machine that Remuda made",
            field=BACKEND,
            fix="let `remuda provision` launch machines; they start their agents themselves",
        )
    try:
        from remuda.entrypoints.agent_ec2 import run  # noqa: PLC0415 - only machines on EC2 pay for AWS's libraries
    except ImportError as error:
        raise UserError(
            f"the agent needs a library that is not installed: {error.name}", fix="install remuda[aws]"
        ) from None

    clock = SystemClock()
    asyncio.run(run(os.environ, clock=clock, journal=LineJournal(clock)))


async def _run_local(root: Path) -> None:
    # Only local machines need them.
    from remuda.adapters.local.machine import (  # noqa: PLC0415 - as above
        LocalMachine,
        job_environment,
        machine_folder,
        pristine_runner,
        supervisor_pid,
    )
    from remuda.adapters.sqlite.store import SqliteInstanceStore  # noqa: PLC0415 - as above
    from remuda.bootstrap import LocalLayout  # noqa: PLC0415 - as above

    places, folder = LocalLayout(root), machine_folder(os.environ)
    clock, ids = SystemClock(), SystemIds()
    reset = Reset(
        # The supervisor adopts whatever a job leaves behind.
        kill=partial(processes.kill_all, supervisor_pid(folder), keep={os.getpid()}, clock=clock),
        runner_folder=folder / "runner",
        pristine=pristine_runner(folder),
        recreate=(folder / "home", folder / "work", folder / "tmp"),
    )
    await reset.prepare()
    store = SqliteInstanceStore(path=places.database, clock=clock, ids=ids, calls=CallCounter())
    try:
        await Agent(
            store=store,
            machine=LocalMachine(folder=folder, clock=clock, reset=reset.run),
            runner=ActionsRunner(
                folder=folder / "runner",
                work=folder / "work",
                log=folder / "logs" / "runner.log",
                clock=clock,
                environment=job_environment(folder),
            ),
            clock=clock,
            ids=ids,
            journal=LineJournal(clock),
            version=__version__,
        ).run()
    finally:
        await store.close()
