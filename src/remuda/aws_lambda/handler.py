"""The scheduled commands as a Lambda function: `refresh` and `scale-down`, by events.

The function's environment holds the settings (`REMUDA_…`), the event says what to do: `{"command": "refresh"}`. What
cannot be done is raised, so that the function's metrics count it. Each invocation ends with one line of metrics.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from remuda.adapters.system.clock import SystemClock
from remuda.aws_lambda.emf import Measure, Unit, camel, emf_line
from remuda.cli.output import note_line
from remuda.cli.rendering import results
from remuda.cli.run import bug
from remuda.cli.scale_down import run_scale_down
from remuda.config.settings import Loaded, load
from remuda.controlplane.refresh import refresh
from remuda.domain.errors import Partial, RemudaError, TimedOut, UserError
from remuda.domain.scale_down.decisions import Action
from remuda.domain.text import quote
from remuda.domain.transitions import ENDINGS
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock
from remuda.ports.event_log import EventLog
from remuda.wiring import desired, open_context

#: Left of the function's time when its work is cut: for what closes connections and writes what waits.
RESERVE_S = 5.0
MAX_SHOWN = 60
GITHUB = "github"


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
    #: What there was and what was done, in numbers.
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    command: str
    #: refresh: the stored configuration stays as it is.
    sweep_only: bool = False
    #: scale-down: decide, and touch nothing.
    dry_run: bool = False


class LambdaEventLog:
    """One JSON line an event, on stdout, as `--log-format json` writes it: Lambda keeps it."""

    def __init__(self, clock: Clock, request_id: str) -> None:
        self._clock = clock
        self.facts = {"request": request_id}
        #: Ends that were decided, by cause.
        self.ends: Counter[str] = Counter()

    def record(self, action: str, why: str = "", **facts: Any) -> None:
        if cause := facts.get("cause"):
            self.ends[cause if cause in ENDINGS else "other"] += 1
        _write(note_line(self._clock.now(), action, why, {**facts, **self.facts}))


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def _refresh(loaded: Loaded, event_log: EventLog, order: Order, calls: CallCounter) -> Outcome:
    settings = loaded.settings
    async with open_context(settings, event_log, credentialed=True, calls=calls) as context:
        wanted = None if order.sweep_only else desired(settings, pool=context.pool_name)
        result = await refresh(context, wanted)
    counts = {f"Instances{camel(state)}": count for state, count in (result.fleet or {}).items()}
    counts["GhostsRemoved"] = len(result.removed)
    return Outcome(document=results.refresh_document(result), errors=result.errors, counts=counts)


async def _scale_down(loaded: Loaded, event_log: EventLog, order: Order, calls: CallCounter) -> Outcome:
    result = await run_scale_down(loaded, event_log, dry_run=order.dry_run, calls=calls)
    done = {action: sum(item.done for item in result.of(action)) for action in Action}
    counts = {
        "Machines": len({item.decision.instance_id for item in result.outcomes}),
        "Terminated": done[Action.TERMINATE],
        "OrphansMarked": done[Action.MARK_ORPHAN],
    }
    return Outcome(document=results.scale_down_document(result), errors=result.errors, counts=counts)


#: What an event may ask for.
COMMANDS: Mapping[str, Callable[[Loaded, EventLog, Order, CallCounter], Awaitable[Outcome]]] = {
    "refresh": _refresh,
    "scale-down": _scale_down,
}


def handler(event: Any, context: LambdaContext) -> dict[str, Any]:
    """For the function's configuration: `remuda.aws_lambda.handler.handler`."""
    # A function's level of logs can be set from outside, and at this one libraries write down all that they send and
    # get: tokens, secrets, the credentials of the function itself.
    logging.disable(logging.DEBUG)
    clock = SystemClock()
    event_log = LambdaEventLog(clock, context.aws_request_id)
    meter = Meter(clock, event_log)
    try:
        order, outcome = _carry_out(event, context, event_log, meter)
        # What cannot be written as JSON, a time for one, becomes text here as it does on the command line.
        document: dict[str, Any] = json.loads(json.dumps(outcome.document, default=str))
        told = f"{len(outcome.errors)} errors" if outcome.errors else ""
        event_log.record(f"{order.command}-done", told, result=document)
    finally:
        _write(meter.line())
    if outcome.errors:
        raise Partial(f"{order.command}: {len(outcome.errors)} parts were not done; the first: {outcome.errors[0]}")
    return document


def _carry_out(event: Any, context: LambdaContext, event_log: LambdaEventLog, meter: Meter) -> tuple[Order, Outcome]:
    try:
        order = parse(event)
        meter.command = order.command
        loaded = load({"backend": "aws"}, environ=os.environ)
        meter.pool = loaded.settings.pool
        limit_s = context.get_remaining_time_in_millis() / 1000 - RESERVE_S
        work = COMMANDS[order.command](loaded, event_log, order, meter.calls)
        meter.outcome = asyncio.run(_within(limit_s, order, work))
    except RemudaError as error:
        raise _told(event_log, error) from None
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a bug, and the log gets one sentence
        raise _told(event_log, bug(error)) from None
    return order, meter.outcome


class Meter:
    """An invocation in numbers, whatever becomes of it."""

    def __init__(self, clock: Clock, event_log: LambdaEventLog) -> None:
        self._clock = clock
        self._event_log = event_log
        self._started = clock.monotonic()
        self.calls = CallCounter()
        self.command = ""
        self.pool = ""
        #: None: it was not brought to its end.
        self.outcome: Outcome | None = None

    def line(self) -> str:
        outcome, ends = self.outcome, self._event_log.ends
        github = [counts for (service, _), counts in self.calls.outcomes().items() if service == GITHUB]
        counts = {
            "Errors": 1 if outcome is None else len(outcome.errors),
            "Failed": int(outcome is None),
            "GithubCalls": sum(ok + failed for ok, failed in github),
            "GithubCallErrors": sum(failed for _, failed in github),
            **(outcome.counts if outcome is not None else {}),
            **({"Retired": ends.total()} if ends else {}),
            **{f"Retired{camel(cause)}": count for cause, count in sorted(ends.items())},
        }
        measures = {"Duration": Measure(round(self._clock.monotonic() - self._started, 3), Unit.SECONDS)}
        measures |= {name: Measure(count) for name, count in counts.items()}
        return emf_line(
            measures, at=self._clock.now(), pool=self.pool, command=self.command, facts=self._event_log.facts
        )


def parse(event: Any) -> Order:
    """A schedule's constant input, or the `detail` of an event on a bus."""
    document = event if isinstance(event, dict) else {}
    if "command" not in document and isinstance(document.get("detail"), dict):
        document = document["detail"]
    name = document.get("command")
    known = " or ".join(f'{{"command": "{each}"}}' for each in COMMANDS)
    if not isinstance(name, str) or name not in COMMANDS:
        said = "the event has no command" if name is None else f"command is {quote(name, MAX_SHOWN)}"
        raise UserError(said, field="command", fix=f"send {known}")
    switches = {key: document.get(key, False) for key in ("sweep_only", "dry_run")}
    for key, value in switches.items():
        if not isinstance(value, bool):
            raise UserError(f"{key} is {quote(value, MAX_SHOWN)}", field=key, fix="send true or false")
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


def _told(event_log: EventLog, error: RemudaError) -> RemudaError:
    """The same error, with its fix in the one sentence that Lambda shows."""
    sentence = " ".join(f"{error.message}; {error.fix}".rstrip("; ").splitlines())
    event_log.record("failed", sentence, kind=type(error).__name__)
    error.args = (sentence,)
    return error
