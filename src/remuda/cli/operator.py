"""`remuda drain`, `quarantine` and `terminate`: what is chosen, what would happen, what was done."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from remuda.adapters.system.clock import SystemClock
from remuda.cli.output import Output
from remuda.cli.rendering.formatting import DAY_S, parse_duration
from remuda.cli.run import EXIT_OK, EXIT_PARTIAL, run_async
from remuda.config.settings import Settings
from remuda.controlplane import operator
from remuda.controlplane.context import Context
from remuda.controlplane.operator import InstanceSelector, OperatorAction, OperatorResult
from remuda.domain.errors import UserError
from remuda.domain.instance import Instance
from remuda.domain.resources import MAX_SHOWN, is_instance_id
from remuda.wiring import open_context

MAX_QUARANTINE_S = 7 * DAY_S
_DONE = {
    OperatorAction.DRAIN: "drained",
    OperatorAction.QUARANTINE: "in quarantine",
    OperatorAction.TERMINATE: "terminating",
}

Pull = Callable[[Context, Sequence[Instance], bool], Awaitable[OperatorResult]]


def check_choice(choice: InstanceSelector) -> InstanceSelector:
    """Ids or a filter, not both, not none: nobody ends a fleet by leaving a word out."""
    for instance_id in choice.instance_ids:
        if not is_instance_id(instance_id):
            raise UserError(
                f"INSTANCE is {instance_id[:MAX_SHOWN]!r}",
                field="INSTANCE",
                fix="give an instance id such as i-0123456789abcdef0; remuda status lists them",
            )
    filtered = choice.everything or bool(choice.resource_class) or bool(choice.ami)
    if filtered and choice.instance_ids:
        raise UserError("instances are given, and a filter too", field="INSTANCE", fix="give one or the other")
    if not filtered and not choice.instance_ids:
        raise UserError("no instance is given", field="INSTANCE", fix="name instances, or say --all")
    return choice


def check_reason(text: str) -> str:
    if len(text) > operator.MAX_REASON or not text.isprintable():
        raise UserError(
            f"--reason is {text[:40]!r}", field="--reason", fix=f"give one line of up to {operator.MAX_REASON} letters"
        )
    return text.strip() or "no reason was given"


def run_drain(settings: Settings, output: Output, choice: InstanceSelector, *, reason: str, dry_run: bool) -> int:
    why = check_reason(reason)

    async def pull(context: Context, chosen: Sequence[Instance], dry: bool) -> OperatorResult:  # noqa: FBT001 - a callback
        return await operator.drain(context, chosen, reason=why, dry_run=dry)

    return _tell(output, _run(settings, output, check_choice(choice), pull, dry_run=dry_run))


def run_quarantine(
    settings: Settings, output: Output, choice: InstanceSelector, *, last: str, reason: str, dry_run: bool
) -> int:
    for_s = parse_duration(last)
    if for_s is None or not 0 < for_s <= MAX_QUARANTINE_S:
        raise UserError(f"--for is {last[:40]!r}", field="--for", fix="give 30m, 4h or 2d, at most 7d")
    why = check_reason(reason)

    async def pull(context: Context, chosen: Sequence[Instance], dry: bool) -> OperatorResult:  # noqa: FBT001 - a callback
        return await operator.quarantine(context, chosen, for_s=for_s, reason=why, dry_run=dry)

    return _tell(output, _run(settings, output, check_choice(choice), pull, dry_run=dry_run))


def run_terminate(
    settings: Settings, output: Output, choice: InstanceSelector, *, reason: str, dry_run: bool, sure: bool
) -> int:
    why = check_reason(reason)

    async def pull(context: Context, chosen: Sequence[Instance], dry: bool) -> OperatorResult:  # noqa: FBT001 - a callback
        return await operator.terminate(context, chosen, reason=why, dry_run=dry)

    check_choice(choice)
    if not (dry_run or sure):
        _ask(output, _run(settings, output, choice, pull, dry_run=True))
    return _tell(output, _run(settings, output, choice, pull, dry_run=dry_run))


def _run(settings: Settings, output: Output, choice: InstanceSelector, pull: Pull, *, dry_run: bool) -> OperatorResult:
    async def work() -> OperatorResult:
        event_log = output.event_log(SystemClock())
        async with open_context(settings, event_log, credentialed=False, alive=False) as context:
            guarded = output.guarded(context)
            return await pull(guarded, await operator.select_instances(guarded, choice), dry_run)

    return run_async(work, farewell="interrupted; what was done stays done")


def _ask(output: Output, plan: OperatorResult) -> None:
    """Jobs die with their machines: a person must say so."""
    if not plan.done:
        return
    if not sys.stdin.isatty():
        raise UserError("terminate asks, and there is nobody to answer", field="--yes", fix="add --yes, or --dry-run")
    busy = sum(item.busy for item in plan.done)
    for item in plan.done:
        run = f" for run {item.run_id}" if item.run_id else ""
        output.say(f"  {item.instance_id} {item.state}{run}{', a job runs on it' if item.busy else ''}")
    import typer  # noqa: PLC0415 - only where somebody is asked

    jobs = f"; {busy} of them run a job, which is lost" if busy else ""
    if not typer.confirm(f"terminate {len(plan.done)} instances{jobs}?", default=False, err=True):
        raise UserError("nothing was terminated", field="--yes", fix="answer y, or add --yes")


def _tell(output: Output, result: OperatorResult) -> int:
    word = f"would be {_DONE[result.action]}" if result.dry_run else _DONE[result.action]
    for item in result.outcomes:
        run = f" (run {item.run_id})" if item.run_id else ""
        told = f"{word}: {item.why}" if item.done else f"unchanged: {item.why}"
        output.say(f"{item.instance_id} was {item.state}{run}, {told}")
    for error in result.errors:
        output.say(f"error: {error}", style="bold red")
    output.say(f"{len(result.done)} {word}, {len(result.outcomes) - len(result.done)} unchanged")
    output.result(_document(result))
    return EXIT_PARTIAL if result.errors else EXIT_OK


def _document(result: OperatorResult) -> dict[str, Any]:
    return {
        "action": result.action.value,
        "dry_run": result.dry_run,
        "done": [item.instance_id for item in result.done],
        "unchanged": [item.instance_id for item in result.outcomes if not item.done],
        "reasons": {item.instance_id: item.why for item in result.outcomes},
        "states": {item.instance_id: item.state.value for item in result.outcomes},
        "errors": list(result.errors),
    }
