"""Lambda handler for the scheduled commands `refresh` and `scale-down`.

The command comes from the event: `{"command": "refresh"}`. Failures are raised, so that the function's error metric
counts them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from remuda.adapters.system.clock import SystemClock
from remuda.aws_lambda.runtime import (
    RESERVE_S,
    InvocationMetrics,
    LambdaContext,
    LambdaEventLog,
    LambdaOutcome,
    log_failure,
    pascal_case,
    read_environment,
    run_with_timeout,
    write_line,
)
from remuda.cli.rendering import results
from remuda.cli.run import bug_error
from remuda.config.settings import Settings
from remuda.config.sources import load
from remuda.controlplane.refresh import refresh
from remuda.controlplane.scale_down import scale_down
from remuda.domain.errors import Partial, RemudaError, UserError
from remuda.domain.reporting.warnings import WarningKind
from remuda.domain.scale_down.decisions import Action
from remuda.domain.text import quote
from remuda.ports.calls import CallCounter
from remuda.ports.event_log import EventLog
from remuda.wiring import desired, open_context, open_fleet

MAX_SHOWN = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class LambdaCommand:
    name: str
    #: refresh: keep the stored configuration.
    sweep_only: bool = False
    #: scale-down: decide without changing anything.
    dry_run: bool = False


#: Parts of the configuration that no parameter of the stack sets.
NO_PARAMETERS = frozenset({"monthly_budget"})


async def _refresh(
    settings: Settings, event_log: EventLog, command: LambdaCommand, calls: CallCounter
) -> LambdaOutcome:
    async with open_context(settings, event_log, needs_github=True, calls=calls) as context:
        wanted = None
        if not command.sweep_only:
            wanted = desired(settings, pool=context.pool_name, keeps_unset=False)
            # The parameters of the stack are the whole configuration, but for what `remuda budget` sets.
            wanted = replace(wanted, unset=NO_PARAMETERS)
        result = await refresh(context, wanted)
    counts = {f"Instances{pascal_case(state)}": count for state, count in (result.live_instances or {}).items()}
    counts["StaleRegistrationsRemoved"] = len(result.stale_registrations)
    counts["RunnerVersionWarnings"] = result.warning_kinds.count(WarningKind.RUNNER_VERSION)
    counts["BudgetWarnings"] = result.warning_kinds.count(WarningKind.BUDGET)
    counts["JobsWaitingTooLong"] = len(result.waiting_jobs)
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
        write_line(metrics.line())
    if outcome.errors:
        raise Partial(f"{command.name}: {len(outcome.errors)} errors; first: {outcome.errors[0]}")
    return document


def _run(
    event: Any, context: LambdaContext, event_log: LambdaEventLog, metrics: InvocationMetrics
) -> tuple[LambdaCommand, LambdaOutcome]:
    try:
        command = parse_event(event)
        metrics.command = command.name
        settings = load({"backend": "aws"}, environ=asyncio.run(read_environment(os.environ)))
        metrics.pool = settings.pool
        limit_s = context.get_remaining_time_in_millis() / 1000 - RESERVE_S
        work = COMMANDS[command.name](settings, event_log, command, metrics.calls)
        fix = "the next event continues the work; increase the function's timeout"
        metrics.outcome = asyncio.run(run_with_timeout(limit_s, command.name, work, fix=fix))
    except RemudaError as error:
        raise log_failure(event_log, error) from None
    except Exception as error:  # noqa: BLE001 - a bug, logged as one message
        raise log_failure(event_log, bug_error(error)) from None
    return command, metrics.outcome


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
