"""The scheduled commands as a Lambda function: `refresh` and `scale-down`, by events.

The function's environment holds the settings (`REMUDA_…`), the event says what to do: `{"command": "refresh"}`. What
cannot be done is raised, so that the function's metrics count it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from remuda.adapters.system.clock import SystemClock
from remuda.bootstrap import desired, open_context
from remuda.controlplane.refresh import refresh
from remuda.domain.errors import Partial, RemudaError, TimedOut, UserError
from remuda.entrypoints import views
from remuda.entrypoints.run import bug
from remuda.ports.clock import Clock
from remuda.ports.journal import Journal
from remuda.settings import Loaded, load

#: Left of the function's time when its work is cut: for what closes connections and writes what waits.
RESERVE_S = 5.0
MAX_SHOWN = 60


class LambdaContext(Protocol):
    """What is used of the second argument."""

    aws_request_id: str

    def get_remaining_time_in_millis(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    #: As the command line's `--json`.
    document: Mapping[str, Any]
    #: What was not done, one sentence each.
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    command: str
    #: refresh: the stored configuration stays as it is.
    sweep_only: bool = False
    #: scale-down: decide, and touch nothing.
    dry_run: bool = False


class LogJournal:
    """One JSON line an event, on stdout: Lambda keeps it."""

    def __init__(self, clock: Clock, request_id: str) -> None:
        self._clock = clock
        self._request_id = request_id

    def note(self, action: str, why: str = "", **facts: Any) -> None:
        told = {name: value for name, value in facts.items() if value is not None and value != ""}
        at = self._clock.now().isoformat(timespec="milliseconds")
        line = {"at": at, "action": action, "why": why, **told, "request": self._request_id}
        sys.stdout.write(json.dumps(line, default=str) + "\n")
        sys.stdout.flush()


async def _refresh(loaded: Loaded, journal: Journal, order: Order) -> Outcome:
    settings = loaded.settings
    async with open_context(settings, journal, credentialed=True) as context:
        wanted = None if order.sweep_only else desired(settings, pool=context.pool_name)
        result = await refresh(context, wanted)
    return Outcome(document=views.refresh_document(result), errors=result.errors)


async def _scale_down(_loaded: Loaded, _journal: Journal, _order: Order) -> Outcome:
    raise UserError(
        "scale-down is not part of this build", field="command", fix="leave its schedule off, or deploy a newer build"
    )


#: What an event may ask for.
COMMANDS: Mapping[str, Callable[[Loaded, Journal, Order], Awaitable[Outcome]]] = {
    "refresh": _refresh,
    "scale-down": _scale_down,
}


def handler(event: Any, context: LambdaContext) -> dict[str, Any]:
    """For the function's configuration: `remuda.entrypoints.lambda_handler.handler`."""
    journal = LogJournal(SystemClock(), context.aws_request_id)
    try:
        order = parse(event)
        loaded = load({"backend": "aws"}, environ=os.environ)
        limit_s = context.get_remaining_time_in_millis() / 1000 - RESERVE_S
        outcome = asyncio.run(_within(limit_s, order, COMMANDS[order.command](loaded, journal, order)))
    except RemudaError as error:
        raise _told(journal, error) from None
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a bug, and the log gets one sentence
        raise _told(journal, bug(error)) from None
    # What cannot be written as JSON, a time for one, becomes text here as it does on the command line.
    document: dict[str, Any] = json.loads(json.dumps(outcome.document, default=str))
    journal.note(f"{order.command}-done", f"{len(outcome.errors)} errors" if outcome.errors else "", result=document)
    if outcome.errors:
        raise Partial(f"{order.command}: {len(outcome.errors)} parts were not done; the first: {outcome.errors[0]}")
    return document


def parse(event: Any) -> Order:
    """A schedule's constant input, or the `detail` of an event on a bus."""
    document = event if isinstance(event, dict) else {}
    if "command" not in document and isinstance(document.get("detail"), dict):
        document = document["detail"]
    name = document.get("command")
    known = " or ".join(f'{{"command": "{each}"}}' for each in COMMANDS)
    if not isinstance(name, str) or name not in COMMANDS:
        said = "the event has no command" if name is None else f"command is {str(name)[:MAX_SHOWN]!r}"
        raise UserError(said, field="command", fix=f"send {known}")
    switches = {key: document.get(key, False) for key in ("sweep_only", "dry_run")}
    for key, value in switches.items():
        if not isinstance(value, bool):
            raise UserError(f"{key} is {str(value)[:MAX_SHOWN]!r}", field=key, fix="send true or false")
    return Order(command=name, **switches)


async def _within(limit_s: float, order: Order, work: Awaitable[Outcome]) -> Outcome:
    """Cut before the function's own limit would: every step can be cut at any await, and the next event goes on."""
    try:
        async with asyncio.timeout(max(0.0, limit_s)) as limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        cut = TimedOut(f"{order.command} was cut after {max(0.0, limit_s):.0f} s, before the function's time was up")
        cut.fix = "nothing is lost and the next event goes on; give the function more time"
        raise cut from None


def _told(journal: Journal, error: RemudaError) -> RemudaError:
    """The same error, with its fix in the one sentence that Lambda shows."""
    sentence = " ".join(f"{error.message}; {error.fix}".rstrip("; ").splitlines())
    journal.note("failed", sentence, kind=type(error).__name__)
    error.args = (sentence,)
    return error
