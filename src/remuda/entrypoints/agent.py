"""`remuda agent`: the on-machine loop. Started by the machine, with its identity in the environment."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from remuda import __version__
from remuda.adapters.local.machine import (
    LocalMachine,
    job_environment,
    machine_folder,
    pristine_runner,
    supervisor_pid,
)
from remuda.adapters.sqlite.store import SqliteInstanceStore
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.agent.actions_runner import ActionsRunner
from remuda.agent.loop import Agent
from remuda.agent.reset import Reset
from remuda.bootstrap import LocalLayout
from remuda.domain.errors import RemudaError
from remuda.domain.timestamps import to_text
from remuda.ports.calls import CallCounter


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
    parser.add_argument("--dir", required=True, help="State folder of the local backend.")
    parsed = parser.parse_args(arguments)
    try:
        asyncio.run(_run(LocalLayout(Path(parsed.dir)), machine_folder(os.environ)))
    except RemudaError as error:
        sys.stderr.write(f"remuda agent: {error.message}\n")
        return error.exit_code
    return 0


async def _run(places: LocalLayout, folder: Path) -> None:
    clock, ids = SystemClock(), SystemIds()
    # The supervisor adopts whatever a job leaves behind.
    reset = Reset(
        keep_root_pid=supervisor_pid(folder),
        keep=(os.getpid(),),
        runner_folder=folder / "runner",
        pristine=pristine_runner(folder),
        recreate=(folder / "home", folder / "work", folder / "tmp"),
        clock=clock,
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
