"""The command `remuda listen`: the process that serves the runner sets of a pool.

On AWS its settings and its GitHub credential may be in the stack's parameter and in a secret. They are read again every
few minutes: a changed setting or a rotated credential needs no restart.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from remuda.adapters.system.clock import SystemClock
from remuda.cli.output import Output, record_line
from remuda.cli.run import EXIT_OK, EXIT_PARTIAL, run_async
from remuda.config.declaration import flag
from remuda.config.settings import Settings
from remuda.config.sources import load
from remuda.domain.errors import RemudaError, UserError
from remuda.domain.resources import MAX_SHOWN
from remuda.ports.clock import Clock
from remuda.ports.event_log import EventLog
from remuda.wiring.aws import aws_libraries
from remuda.wiring.demand import open_demand
from remuda.wiring.github import GithubCredential, github_credential

if TYPE_CHECKING:
    from remuda.controlplane.demand import ListenerResult

#: Seconds between two reads of the stack's settings and of the credential.
INPUTS_S = 120.0
#: Seconds between two changes of the file that shows that this process is alive.
ALIVE_S = 30.0


class ListenerInputs(NamedTuple):
    settings: Settings
    #: Of AWS only.
    credential: GithubCredential | None = None


def run_listen(settings: Settings, output: Output, *, once: bool, alive_file: str) -> int:
    if alive_file and not Path(alive_file).parent.is_dir():
        raise UserError(
            f"--alive-file is {alive_file[:MAX_SHOWN]!r}, but its folder does not exist",
            field="--alive-file",
            fix="create the folder",
        )
    clock = SystemClock()
    event_log = JsonLines(clock) if output.as_json and not once else output.event_log(clock)

    async def serve() -> int:
        inputs = await read_inputs(settings)
        touching = asyncio.ensure_future(_touch_regularly(Path(alive_file), clock)) if alive_file else None
        try:
            while True:
                inputs = await _serve_until_changed(settings, inputs, event_log, clock)
        finally:
            if touching is not None:
                touching.cancel()

    async def reconcile() -> ListenerResult:
        from remuda.controlplane.demand import DemandListener  # noqa: PLC0415 - after the settings were checked

        async with open_demand((await read_inputs(settings)).settings, event_log) as demand:
            return await DemandListener(demand).run_once()

    message = "interrupted; the sessions are closed, and the machines keep running"
    if not once:
        return run_async(serve, on_interrupt_message=message)
    result = run_async(reconcile, on_interrupt_message=message)
    output.say_errors(result.errors)
    for name, facts in result.sets.items():
        output.say(f"{name}: {facts['desired']} wanted, {facts['supply']} here, {facts['waiting']} waiting")
    if not result.sets:
        advice = output.complete("add runner-sets and run remuda refresh")
        output.say(f"no runner sets are configured; {advice}", style="yellow")
    output.result({"sets": result.sets, "errors": list(result.errors)})
    return EXIT_PARTIAL if result.errors else EXIT_OK


async def _touch_regularly(file: Path, clock: Clock) -> None:
    """Show that the event loop runs. A standby is alive, too."""
    while True:
        file.touch()  # noqa: ASYNC240 - a local file, without content
        await clock.sleep(ALIVE_S)


async def _serve_until_changed(
    given: Settings, inputs: ListenerInputs, event_log: EventLog, clock: Clock
) -> ListenerInputs:
    """Serve the sets with these inputs. Return others when they have changed."""
    from remuda.controlplane.demand import DemandListener  # noqa: PLC0415 - after the settings were checked

    async with open_demand(inputs.settings, event_log) as demand:
        listener = DemandListener(demand)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, listener.reload)
        serving = asyncio.ensure_future(listener.run())
        watching = asyncio.ensure_future(_wait_for_change(given, inputs, event_log, clock))
        try:
            await asyncio.wait({serving, watching}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            return watching.result()
        finally:
            for task in (serving, watching):
                task.cancel()
            with suppress(asyncio.CancelledError, RemudaError):
                await serving


async def _wait_for_change(
    given: Settings, inputs: ListenerInputs, event_log: EventLog, clock: Clock
) -> ListenerInputs:
    while True:
        await clock.sleep(INPUTS_S)
        try:
            found = await read_inputs(given)
        except RemudaError as error:
            event_log.record("read-failed", error.message)
            continue
        if found != inputs:
            event_log.record("restart", "the settings or the GitHub credential have changed")
            return found


async def read_inputs(given: Settings) -> ListenerInputs:
    """The settings, with those of the stack that were not given, and the credential."""
    if given.backend != "aws":
        return ListenerInputs(given)
    with aws_libraries():
        from remuda.adapters.aws.clients import AwsClients  # noqa: PLC0415 - AWS libraries are slow to import
        from remuda.aws_lambda.runtime import SETTINGS_VARIABLE, read_environment  # noqa: PLC0415 - as above
    settings = given
    async with AwsClients() as clients:
        if os.environ.get(SETTINGS_VARIABLE):
            flags = {name: given.written[name] for name, origin in given.origins.items() if origin == flag(name)}
            settings = load(flags, environ=await read_environment(os.environ, clients))
        return ListenerInputs(settings, await github_credential(settings, clients, required=True))


class JsonLines:
    """Events as JSON documents on stdout, one per line."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def record(self, action: str, why: str = "", **facts: Any) -> None:
        sys.stdout.write(record_line(self._clock.now(), action, why, facts) + "\n")
        sys.stdout.flush()


if TYPE_CHECKING:
    _event_log: type[EventLog] = JsonLines
