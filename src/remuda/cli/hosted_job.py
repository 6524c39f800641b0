"""Jobs that `run-workflow` runs on this machine in place of a GitHub-hosted runner, by the fake runner's worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from remuda.config.sources import FILE_NAME
from remuda.fake_github import install_runner
from remuda.fake_github.client import JobStep
from remuda.fake_github.fake_runner import LENGTH_DIGITS

#: Seconds to wait after SIGINT and after SIGTERM to an interrupted step, as on GitHub.
STEP_GRACE_S = (7.5, 2.5)
#: Seconds until an interrupted worker is killed: its steps get the grace, and some have `if: always()`.
WORKER_GRACE_S = 60.0
#: Maximum bytes of one message of the worker.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024
#: Prefixes of variables that belong to the job that calls `run-workflow`, if it is itself a step on GitHub.
CALLER_VARIABLES = ("ACTIONS_ID_TOKEN_", "ACTIONS_RUNNER_HOOK_", "GITHUB_", "RUNNER_")


class HostedRunner:
    """Runs jobs below a folder, each in its own workspace."""

    def __init__(self, folder: Path, *, state: Path) -> None:
        self._folder = folder
        self._state = state
        self._jobs = 0
        self._installation = asyncio.Lock()

    async def run(self, message: Mapping[str, Any], on_output: Callable[[str], None]) -> dict[str, Any]:
        """Run a job and return the worker's report. A cancellation interrupts its steps as on GitHub."""
        # Jobs that start together must not install it together.
        async with self._installation:
            if not self._jobs:
                await asyncio.to_thread(install_runner, self._folder)
            self._jobs += 1
            number = self._jobs
        job = {
            **message,
            "runner": f"{os.uname().nodename} {number}",
            "work": str(self._folder.absolute() / "_work" / str(number)),
            # GitHub deletes the machine; here, machines that `remuda provision` has started must stay.
            "tracking": "",
            "cancel_grace_s": STEP_GRACE_S,
        }
        worker = await asyncio.create_subprocess_exec(
            str(self._folder / "bin" / "Runner.Worker"),
            env=self._environment(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_MESSAGE_BYTES,
            start_new_session=True,
        )
        reading = asyncio.create_task(_read_report(worker, on_output))
        try:
            assert worker.stdin is not None  # noqa: S101 - PIPE above
            data = json.dumps(job).encode()
            worker.stdin.write(b"%0*d" % (LENGTH_DIGITS, len(data)) + data)
            with contextlib.suppress(ConnectionError):
                await worker.stdin.drain()
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            await _cancel(worker, reading)
            raise
        finally:
            reading.cancel()
            if worker.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    worker.kill()
                await worker.wait()

    def _environment(self) -> dict[str, str]:
        """The environment of the steps. Those that call remuda use this installation and this state folder."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(CALLER_VARIABLES)}
        settings = Path(os.environ.get("REMUDA_CONFIG") or FILE_NAME).absolute()
        return {
            **inherited,
            **({"REMUDA_CONFIG": str(settings)} if settings.exists() else {}),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "REMUDA_DIR": str(self._state),
        }


def steps_of(steps: tuple[JobStep, ...], report: Mapping[str, Any]) -> tuple[JobStep, ...]:
    """The results of the steps in a worker's report."""
    results = [{key: value for key, value in result.items() if key != "name"} for result in report.get("steps", ())]
    names = [str(result["name"]) for result in report.get("steps", ())]
    return tuple(
        JobStep(run=step.run, uses=step.uses, name=name, **result)
        for step, name, result in zip(steps, names, results, strict=False)
    )


async def _read_report(worker: asyncio.subprocess.Process, on_output: Callable[[str], None]) -> dict[str, Any]:
    assert worker.stdout is not None  # noqa: S101 - PIPE
    report: dict[str, Any] = {"result": "failure"}  # if the worker ends without one
    while line := await worker.stdout.readline():
        document = json.loads(line)
        if "output" in document:
            on_output(document["output"])
        if "result" in document:
            report = document
    await worker.wait()
    return report


async def _cancel(worker: asyncio.subprocess.Process, reading: asyncio.Task[dict[str, Any]]) -> None:
    """Cancel the job: the worker interrupts the current step and runs those with `if: always()`."""
    assert worker.stdin is not None  # noqa: S101 - PIPE
    with contextlib.suppress(ConnectionError, TimeoutError):
        worker.stdin.write(b"cancel\n")
        await worker.stdin.drain()
        async with asyncio.timeout(WORKER_GRACE_S):
            await asyncio.shield(reading)
