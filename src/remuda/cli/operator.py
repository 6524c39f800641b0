"""`remuda drain`, `remuda quarantine` and `remuda terminate`."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from remuda.adapters.system.clock import SystemClock
from remuda.cli.output import Output
from remuda.cli.run import EXIT_OK, EXIT_PARTIAL, plural, run_async
from remuda.config.settings import Settings
from remuda.controlplane import operator
from remuda.controlplane.operator import InstanceSelector, OperatorAction, OperatorResult
from remuda.domain.errors import UserError
from remuda.domain.holder import describe_holder
from remuda.domain.instance import State
from remuda.domain.resources import IMAGE_ID, MAX_SHOWN, check_instance_id
from remuda.domain.text import quote
from remuda.wiring import job_files, open_context

_PARTICIPLES = {
    OperatorAction.DRAIN: "drained",
    OperatorAction.QUARANTINE: "quarantined",
    OperatorAction.TERMINATE: "terminating",
}
#: Performs the action: takes the context, the selected instances, and `dry_run` by name.
Act = Callable[..., Awaitable[OperatorResult]]


def check_selection(selector: InstanceSelector, *, has_filters: bool = True) -> InstanceSelector:
    """Require either ids or a filter, so that a forgotten argument never selects the whole pool."""
    for instance_id in selector.instance_ids:
        check_instance_id(instance_id, field="INSTANCE")
    if selector.ami and not IMAGE_ID.fullmatch(selector.ami):
        raise UserError(
            f"--ami is {quote(selector.ami, MAX_SHOWN)}, not the id of an image",
            field="--ami",
            fix="give the id of an image such as ami-0123456789abcdef0",
        )
    is_filter = selector.everything or bool(selector.resource_class) or bool(selector.ami)
    if is_filter and selector.instance_ids:
        raise UserError("both instances and a filter are given", field="INSTANCE", fix="give one or the other")
    if not is_filter and not selector.instance_ids:
        raise UserError(
            "no instance is given",
            field="INSTANCE",
            fix=f"{'use --all, or ' if has_filters else ''}name instances: remuda status --wide lists them",
        )
    return selector


def check_reason(text: str) -> str:
    if len(text) > operator.MAX_REASON or not text.isprintable():
        raise UserError(
            f"--reason must be one line of up to {operator.MAX_REASON} characters, got {text[:40]!r}", field="--reason"
        )
    return text.strip() or "no reason given"


def run_drain(
    settings: Settings,
    output: Output,
    *,
    instances: Sequence[str],
    everything: bool,
    resource_class: str,
    ami: str,
    reason: str,
    dry_run: bool,
) -> int:
    act = partial(operator.drain, reason=check_reason(reason))
    selector = check_selection(
        InstanceSelector(instance_ids=tuple(instances), everything=everything, resource_class=resource_class, ami=ami)
    )
    return _report(output, _run(settings, output, selector, act, dry_run=dry_run))


def run_quarantine(
    settings: Settings, output: Output, *, instances: Sequence[str], for_s: float, reason: str, dry_run: bool
) -> int:
    act = partial(operator.quarantine, for_s=for_s, reason=check_reason(reason))
    selector = check_selection(InstanceSelector(instance_ids=tuple(instances)), has_filters=False)
    result = _run(settings, output, selector, act, dry_run=dry_run)
    used = [item.instance_id for item in result.done if item.state in {State.RUNNING, State.RELEASING}]
    return _report(output, result, job_files={name: job_files(settings, name) for name in used})


def run_terminate(
    settings: Settings,
    output: Output,
    *,
    instances: Sequence[str],
    everything: bool,
    reason: str,
    dry_run: bool,
    confirmed: bool,
) -> int:
    act = partial(operator.terminate, reason=check_reason(reason))
    selector = check_selection(InstanceSelector(instance_ids=tuple(instances), everything=everything))
    if not (dry_run or confirmed):
        _confirm(output, _run(settings, output, selector, act, dry_run=True))
    return _report(output, _run(settings, output, selector, act, dry_run=dry_run))


def _run(settings: Settings, output: Output, selector: InstanceSelector, act: Act, *, dry_run: bool) -> OperatorResult:
    async def work() -> OperatorResult:
        event_log = output.event_log(SystemClock())
        async with open_context(settings, event_log, needs_github=False, require_local_github=False) as context:
            guarded = output.guarded(context)
            return await act(guarded, await operator.select_instances(guarded, selector), dry_run=dry_run)

    return run_async(work, on_interrupt_message="interrupted; completed changes remain")


def _confirm(output: Output, plan: OperatorResult) -> None:
    """Ask before jobs are lost with their instances."""
    if not plan.done:
        return
    if not sys.stdin.isatty():
        raise UserError(
            "confirmation is required, but standard input is not a terminal",
            field="--yes",
            fix="pass --yes, or --dry-run",
        )
    busy = sum(item.busy for item in plan.done)
    for item in plan.done:
        holder = f" for {describe_holder(item.holder)}" if item.holder else ""
        output.say(f"  {item.instance_id} {item.state}{holder}{', running a job' if item.busy else ''}")
    import click  # noqa: PLC0415 - only needed for the prompt

    jobs = f"; {plural(busy, 'job')} will be lost" if busy else ""
    if not click.confirm(f"terminate {plural(len(plan.done), 'instance')}{jobs}?", default=False, err=True):
        raise UserError("nothing was terminated", field="--yes", fix="answer y, or pass --yes")


def _report(output: Output, result: OperatorResult, *, job_files: Mapping[str, str] | None = None) -> int:
    """`job_files` has the folder of the files of the job that an instance has or had last, by id."""
    would = "would be " if result.dry_run else ""
    for item in result.outcomes:
        holder = f" ({describe_holder(item.holder)})" if item.holder else ""
        # The reason of a retirement begins with its kind, such as "drained: old image".
        outcome = f"{would}{item.why}" if item.done else f"unchanged: {item.why}"
        output.say(f"{item.instance_id} was {item.state}{holder}, {outcome}")
        if folder := (job_files or {}).get(item.instance_id):
            output.say(f"  files of its job, until the reset at its release: {folder}")
    output.say_errors(result.errors)
    unchanged = len(result.outcomes) - len(result.done)
    output.say(f"{len(result.done)} {would}{_PARTICIPLES[result.action]}, {unchanged} unchanged")
    output.result(_document(result) | ({} if job_files is None else {"job_files": dict(job_files)}))
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
