"""Lambda handler for the scheduled commands `refresh` and `scale-down`.

The settings come from the function's environment (`REMUDA_…`) and from the Systems Manager parameter that it names,
because Lambda limits the environment to 4 KB. The command comes from the event: `{"command": "refresh"}`.
Failures are raised, so that the function's error metric counts them. Each invocation ends with one line of metrics in
CloudWatch's embedded metric format (EMF): a JSON log line that CloudWatch also records as metrics. CloudWatch charges
per metric and combination of dimensions, so the only dimensions are pool and command.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Protocol

from remuda.adapters.aws.clients import AwsClients, read_parameter
from remuda.adapters.system.clock import SystemClock
from remuda.cli.output import record_line
from remuda.cli.rendering import results
from remuda.cli.run import bug_error
from remuda.config.settings import Settings
from remuda.config.sources import load
from remuda.controlplane.refresh import refresh
from remuda.controlplane.scale_down import scale_down
from remuda.domain.errors import Partial, RemudaError, TimedOut, UserError
from remuda.domain.instance import RetireReason
from remuda.domain.scale_down.decisions import Action
from remuda.domain.text import quote
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock
from remuda.ports.event_log import EventLog
from remuda.wiring import desired, open_context, open_fleet

#: Seconds before the function's timeout at which its work is cancelled, to close connections and write pending data.
RESERVE_S = 5.0
MAX_SHOWN = 60
#: Variable with the name of the Systems Manager parameter that contains the settings.
SETTINGS_VARIABLE = "REMUDA_SETTINGS_PARAMETER"
_VARIABLE_LINE = re.compile(r"^(REMUDA_[A-Z0-9_]+)=", re.MULTILINE)
GITHUB = "github"
NAMESPACE = "Remuda"
#: CloudWatch's limits: metrics per line, and characters of a dimension's value.
MAX_METRICS = 100
MAX_DIMENSION_LENGTH = 1_024
#: Largest number that CloudWatch accepts. The comparison also excludes NaN.
MAX_NUMBER = 2.0**360
UNKNOWN = "unknown"


class LambdaContext(Protocol):
    """The part of Lambda's context object that is used."""

    aws_request_id: str

    def get_remaining_time_in_millis(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LambdaOutcome:
    #: The same document as `--json` on the command line.
    document: Mapping[str, Any]
    #: One message per part that failed.
    errors: tuple[str, ...] = ()
    #: Metrics of the command, by name.
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class LambdaCommand:
    name: str
    #: refresh: keep the stored configuration.
    sweep_only: bool = False
    #: scale-down: decide without changing anything.
    dry_run: bool = False


class LambdaEventLog:
    """Writes one JSON line per event to stdout, like `--log-format json`."""

    def __init__(self, clock: Clock, request_id: str) -> None:
        self._clock = clock
        self.facts = {"request": request_id}
        #: Number of retirements per reason.
        self.retirements: Counter[str] = Counter()

    def record(self, action: str, why: str = "", **facts: Any) -> None:
        if reason := facts.get("retire_reason"):
            self.retirements[reason if isinstance(reason, RetireReason) else "other"] += 1
        _write(record_line(self._clock.now(), action, why, {**facts, **self.facts}))


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def _refresh(
    settings: Settings, event_log: EventLog, command: LambdaCommand, calls: CallCounter
) -> LambdaOutcome:
    async with open_context(settings, event_log, needs_github=True, calls=calls) as context:
        wanted = None if command.sweep_only else desired(settings, pool=context.pool_name)
        result = await refresh(context, wanted)
    counts = {f"Instances{pascal_case(state)}": count for state, count in (result.live_instances or {}).items()}
    counts["StaleRegistrationsRemoved"] = len(result.stale_registrations)
    counts["RunnerVersionWarnings"] = len(result.warnings)
    return LambdaOutcome(document=results.refresh_document(result), errors=result.errors, counts=counts)


async def _scale_down(
    settings: Settings, event_log: EventLog, command: LambdaCommand, calls: CallCounter
) -> LambdaOutcome:
    async with open_fleet(settings, event_log, calls=calls) as context:
        result = await scale_down(context, settings.scale_down_policy, dry_run=command.dry_run)
    done = {action: sum(item.done for item in result.of(action)) for action in Action}
    counts = {
        "InstancesExamined": len({item.decision.instance_id for item in result.outcomes}),
        "Terminated": done[Action.TERMINATE],
        "OrphansMarked": done[Action.MARK_ORPHAN],
    }
    return LambdaOutcome(document=results.scale_down_document(result), errors=result.errors, counts=counts)


#: Commands that an event may name.
COMMANDS: Mapping[str, Callable[[Settings, EventLog, LambdaCommand, CallCounter], Awaitable[LambdaOutcome]]] = {
    "refresh": _refresh,
    "scale-down": _scale_down,
}


def handler(event: Any, context: LambdaContext) -> dict[str, Any]:
    """Entry point, configured as `remuda.aws_lambda.handler.handler`."""
    # The log level of a function can be configured from outside. At DEBUG, libraries log requests and responses with
    # their tokens and credentials.
    logging.disable(logging.DEBUG)
    clock = SystemClock()
    event_log = LambdaEventLog(clock, context.aws_request_id)
    metrics = InvocationMetrics(clock, event_log)
    try:
        command, outcome = _run(event, context, event_log, metrics)
        # Values that JSON does not support, such as times, become text.
        document: dict[str, Any] = json.loads(json.dumps(outcome.document, default=str))
        summary = f"{len(outcome.errors)} errors" if outcome.errors else ""
        event_log.record(f"{command.name}-done", summary, result=document)
    finally:
        _write(metrics.line())
    if outcome.errors:
        raise Partial(f"{command.name}: {len(outcome.errors)} errors; first: {outcome.errors[0]}")
    return document


def _run(
    event: Any, context: LambdaContext, event_log: LambdaEventLog, metrics: InvocationMetrics
) -> tuple[LambdaCommand, LambdaOutcome]:
    try:
        command = parse_event(event)
        metrics.command = command.name
        settings = load({"backend": "aws"}, environ=asyncio.run(_read_environment(os.environ)))
        metrics.pool = settings.pool
        limit_s = context.get_remaining_time_in_millis() / 1000 - RESERVE_S
        work = COMMANDS[command.name](settings, event_log, command, metrics.calls)
        metrics.outcome = asyncio.run(_run_with_timeout(limit_s, command, work))
    except RemudaError as error:
        raise _log_failure(event_log, error) from None
    except Exception as error:  # noqa: BLE001 - a bug, logged as one message
        raise _log_failure(event_log, bug_error(error)) from None
    return command, metrics.outcome


async def _read_environment(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The function's environment, and the variables of the parameter that it does not set itself."""
    name = environ.get(SETTINGS_VARIABLE)
    if not name:
        return environ
    async with AwsClients() as clients:
        text = await read_parameter(clients, name)
    return {**parse_variables(text), **{key: value for key, value in environ.items() if value}}


def parse_variables(text: str) -> dict[str, str]:
    """Variables from lines of `REMUDA_NAME=value`. Other lines continue a value."""
    _, *parts = _VARIABLE_LINE.split(text)
    return {name: value.rstrip("\n") for name, value in zip(parts[::2], parts[1::2], strict=True)}


class InvocationMetrics:
    """Metrics of one invocation, also if it fails."""

    def __init__(self, clock: Clock, event_log: LambdaEventLog) -> None:
        self._clock = clock
        self._event_log = event_log
        self._started = clock.monotonic()
        self.calls = CallCounter()
        self.command = ""
        self.pool = ""
        #: None if the command did not complete.
        self.outcome: LambdaOutcome | None = None

    def line(self) -> str:
        outcome, retirements = self.outcome, self._event_log.retirements
        github = [counts for (service, _), counts in self.calls.outcomes().items() if service == GITHUB]
        counts = {
            "Errors": 1 if outcome is None else len(outcome.errors),
            "Failed": int(outcome is None),
            "GithubCalls": sum(ok + failed for ok, failed in github),
            "GithubCallErrors": sum(failed for _, failed in github),
            **(outcome.counts if outcome is not None else {}),
            **({"Retired": retirements.total()} if retirements else {}),
            **{f"Retired{pascal_case(reason)}": count for reason, count in sorted(retirements.items())},
        }
        measures = {"Duration": Measurement(round(self._clock.monotonic() - self._started, 3), MetricUnit.SECONDS)}
        measures |= {name: Measurement(count) for name, count in counts.items()}
        return emf_line(
            measures, at=self._clock.now(), pool=self.pool, command=self.command, facts=self._event_log.facts
        )


def parse_event(event: Any) -> LambdaCommand:
    """Parse a schedule's constant input, or the `detail` of an EventBridge event."""
    document = event if isinstance(event, dict) else {}
    if "command" not in document and isinstance(document.get("detail"), dict):
        document = document["detail"]
    name = document.get("command")
    known = " or ".join(f'{{"command": "{each}"}}' for each in COMMANDS)
    if not isinstance(name, str) or name not in COMMANDS:
        message = "the event has no command" if name is None else f"command is {quote(name, MAX_SHOWN)}"
        raise UserError(message, field="command", fix=f"send {known}")
    switches = {key: document.get(key, False) for key in ("sweep_only", "dry_run")}
    for key, value in switches.items():
        if not isinstance(value, bool):
            raise UserError(f"{key} is {quote(value, MAX_SHOWN)}", field=key, fix="send true or false")
    return LambdaCommand(name=name, **switches)


async def _run_with_timeout(limit_s: float, command: LambdaCommand, work: Awaitable[LambdaOutcome]) -> LambdaOutcome:
    """Cancel the work before Lambda's own timeout. It can be cancelled at any await; the next event continues."""
    try:
        async with asyncio.timeout(max(0.0, limit_s)) as limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        error = TimedOut(f"{command.name} was cancelled after {max(0.0, limit_s):.0f} s, before the function's timeout")
        error.fix = "the next event continues the work; increase the function's timeout"
        raise error from None


def _log_failure(event_log: EventLog, error: RemudaError) -> RemudaError:
    """Log the error and put its fix into its message, because Lambda shows only that."""
    message = " ".join(f"{error.message}; {error.fix}".rstrip("; ").splitlines())
    event_log.record("failed", message, kind=type(error).__name__)
    error.args = (message,)
    return error


class MetricUnit(StrEnum):
    COUNT = "Count"
    SECONDS = "Seconds"


@dataclass(frozen=True, slots=True)
class Measurement:
    value: float
    unit: MetricUnit = MetricUnit.COUNT


def emf_line(
    measures: Mapping[str, Measurement],
    *,
    at: datetime,
    pool: str,
    command: str,
    facts: Mapping[str, str] | None = None,
) -> str:
    """Build one line. `facts` appear in the log only and do not become metrics."""
    dimensions = {"Pool": _dimension(pool), "Command": _dimension(command)}
    valid = {name: each for name, each in list(measures.items())[:MAX_METRICS] if abs(each.value) <= MAX_NUMBER}
    directive = {
        "Namespace": NAMESPACE,
        "Dimensions": [list(dimensions)],
        "Metrics": [{"Name": name, "Unit": each.unit.value} for name, each in valid.items()],
    }
    return json.dumps(
        {
            **(facts or {}),
            "_aws": {"Timestamp": round(at.timestamp() * 1_000), "CloudWatchMetrics": [directive]},
            **dimensions,
            **{name: each.value for name, each in valid.items()},
        }
    )


def _dimension(value: str) -> str:
    """Reduce to printable ASCII. CloudWatch ignores a line with any other dimension value."""
    value = "".join(letter for letter in value if letter.isascii() and letter.isprintable()).strip().lstrip(":")
    return value[:MAX_DIMENSION_LENGTH].strip() or UNKNOWN


def pascal_case(words: str) -> str:
    """Convert `spot-notice` to `SpotNotice`, as in CloudWatch's metric names."""
    return "".join(word.capitalize() for word in words.replace("_", "-").split("-"))
