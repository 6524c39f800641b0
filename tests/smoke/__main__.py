"""`make smoke-aws`: one run of everything in a real AWS account. docs/howto/smoke-aws.md describes it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from remuda.adapters.aws.clients import AwsClients
from remuda.adapters.system.clock import SystemClock
from remuda.adapters.system.prices import shipped_prices
from remuda.domain.errors import RemudaError, UserError
from tests.smoke.account import PREFIX, SmokeAccount
from tests.smoke.budget import Meter, check_budget, upper_limit
from tests.smoke.record import SmokeRecord
from tests.smoke.recording import KEY_VARIABLE, NAMES_VARIABLE, ExchangeRecorder, redactor_from
from tests.smoke.repository import SmokeRepository
from tests.smoke.sequence import SmokeFailure, SmokeRun
from tests.smoke.settings import SmokeSettings, read_settings
from tests.smoke.workflow import ROOT

#: Recordings of a run; those of a successful one become fixtures.
RECORDINGS, FIXTURES = ROOT / "build" / "smoke", ROOT / "tests" / "data" / "smoke"
EXIT_FAILED, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 130


def say(text: str) -> None:
    sys.stderr.write(f"smoke-aws: {text}\n")


class RecordedCommand:
    """The `remuda` command in their own processes, with recordings of their calls."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = dict(environment)
        self._number = 0

    async def __call__(self, step: str, *arguments: str) -> Mapping[str, Any]:
        self._number += 1
        file = self._folder / f"{self._number:03}-{step.replace(' ', '-')}-{arguments[0]}.json"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.smoke.recording", str(file), *arguments, "--json"),
            cwd=ROOT,
            env=self._environment,
            stdout=subprocess.PIPE,
        )
        try:
            output, _ = await process.communicate()
        except asyncio.CancelledError:
            # Ctrl-C reaches it, too, as a member of the group; SIGTERM does not.
            if process.returncode is None:
                process.send_signal(signal.SIGINT)
                await process.wait()
            raise
        try:
            document: Mapping[str, Any] = json.loads(output)
        except ValueError:
            document = {}
        error = document.get("error") or {}
        if arguments[0] == "destroy" and error.get("field") == "--pool":
            # The clean-up also runs if nothing was deployed.
            return {}
        if process.returncode:
            raise SmokeFailure(f"remuda {arguments[0]} failed with exit code {process.returncode}; see its messages")
        return document


async def smoke(settings: SmokeSettings, environment: dict[str, str]) -> None:
    clock, prices = SystemClock(), shipped_prices()
    pool = PREFIX + secrets.token_hex(4)
    owner, _, name = settings.repository.partition("/")
    environment[KEY_VARIABLE] = secrets.token_hex(16)
    environment[NAMES_VARIABLE] = json.dumps({settings.repository: "acme/app", owner: "acme", name: "app"})
    folder = RECORDINGS / pool
    folder.mkdir(parents=True)
    recorder = ExchangeRecorder(redactor_from(environment))
    recorder.install()

    def write(step: str) -> None:
        text = json.dumps(recorder.take(), indent=1) + "\n"
        (folder / f"{step.replace(' ', '-')}.json").write_text(text, encoding="utf-8")

    repository = SmokeRepository(api_url="https://api.github.com", repository=settings.repository, token=settings.token)
    async with AwsClients() as clients:
        run = SmokeRun(
            pool=pool,
            scope=settings.repository,
            bundles=str(settings.bundles),
            remuda=RecordedCommand(folder, environment),
            account=SmokeAccount(clients),
            repository=repository,
            clock=clock,
            meter=Meter(limit_usd=settings.budget_usd, prices=prices),
            say=say,
            record=(record := SmokeRecord(clock=clock, day=clock.now().date(), region=settings.region)),
            on_step_end=write,
        )
        try:
            await run.run()
        finally:
            await repository.close()
            text = record.text(spent_usd=run.meter.spent_usd)
            (folder / "record.md").write_text(text, encoding="utf-8")
            sys.stdout.write(text)
            say(f"recordings are in {folder}; the run may have cost {run.meter.spent_usd:.2f} USD")
    shutil.rmtree(FIXTURES, ignore_errors=True)
    shutil.copytree(folder, FIXTURES)


async def _interruptible(settings: SmokeSettings) -> None:
    """SIGTERM cleans up like Ctrl-C, which cancels the task by itself."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await smoke(settings, dict(os.environ))


def main() -> int:
    try:
        settings = read_settings(os.environ)
        most = check_budget(shipped_prices(), settings.budget_usd)
    except UserError as error:
        say(f"{error.message}{f'; {error.fix}' if error.fix else ''}")
        return EXIT_REFUSED
    say(f"this run may cost up to {most:.2f} USD of your {settings.budget_usd:g}:")
    for item in upper_limit(shipped_prices()):
        say(f"  {item.usd:.2f} {item.name}")
    try:
        asyncio.run(_interruptible(settings))
    except (KeyboardInterrupt, asyncio.CancelledError):
        say("interrupted; everything was cleaned up, unless the lines above say otherwise")
        return EXIT_INTERRUPTED
    except (RemudaError, BotoCoreError, ClientError) as error:
        say(f"failed: {error}")
        return EXIT_FAILED
    say(f"passed; the fixtures are in {FIXTURES.relative_to(ROOT)}: review them before you commit them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
