"""`remuda refresh` and `remuda scale-down`: once, or periodically with --every."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from remuda.adapters.system.clock import SystemClock
from remuda.cli.output import Output
from remuda.cli.rendering import results
from remuda.cli.run import EXIT_OK, EXIT_PARTIAL, run_async
from remuda.config.settings import Settings
from remuda.controlplane.refresh import RefreshResult, refresh
from remuda.controlplane.scale_down import ScaleDownResult, scale_down
from remuda.domain.errors import RemudaError
from remuda.domain.scale_down.decisions import Action
from remuda.ports.event_log import EventLog
from remuda.wiring import desired, open_context, open_fleet


def run_refresh(settings: Settings, output: Output, *, sweep_only: bool, every: float | None) -> int:
    event_log = output.event_log(SystemClock())

    async def once() -> RefreshResult:
        async with open_context(settings, event_log, needs_github=True, require_local_github=not sweep_only) as context:
            wanted = None if sweep_only else desired(settings, pool=context.pool_name)
            return await refresh(output.guarded(context), wanted)

    if every is not None:
        return run_async(lambda: run_periodically(once, every, event_log, failure_event="sweep-failed"))
    result = run_async(once)
    _say_refresh(output, result)
    output.result(results.refresh_document(result))
    return EXIT_PARTIAL if result.errors else EXIT_OK


def run_scale_down(settings: Settings, output: Output, *, dry_run: bool, every: float | None) -> int:
    event_log = output.event_log(SystemClock())

    async def once() -> ScaleDownResult:
        async with open_fleet(settings, event_log) as context:
            return await scale_down(context, settings.scale_down_policy, dry_run=dry_run)

    message = "interrupted; the next cycle continues from the tags"
    if every is not None:
        return run_async(
            lambda: run_periodically(once, every, event_log, failure_event="scale-down-failed"),
            on_interrupt_message=message,
        )
    result = run_async(once, on_interrupt_message=message)
    output.answer(results.scale_down_table(result))
    output.say_errors(result.errors)
    counts = ", ".join(f"{len(result.of(action))} {action}" for action in Action if result.of(action))
    output.say(f"scale-down of {result.environment}: {counts or 'no instances'} ({result.seconds:.2f} s)")
    output.result(results.scale_down_document(result))
    return EXIT_PARTIAL if result.errors else EXIT_OK


async def run_periodically(
    once: Callable[[], Awaitable[object]], interval_s: float, event_log: EventLog, *, failure_event: str
) -> int:
    """Run until interrupted. A failed run is recorded, and the next one follows as usual."""
    clock = SystemClock()
    while True:
        try:
            await once()
        except RemudaError as error:
            event_log.record(failure_event, error.message)
        except Exception as error:  # noqa: BLE001 - a bug in one run must not stop the others
            event_log.record(failure_event, f"a bug: {type(error).__name__}: {error}")
        await clock.sleep(interval_s)


def _say_refresh(output: Output, result: RefreshResult) -> None:
    counts = {
        "applied": len(result.applied),
        "retired": len(result.retired),
        "terminated": len(result.terminated),
        "rolled back": len(result.rolled_back),
        "published": len(result.published),
        "releases finished": len(result.finished_releases),
        "stale registrations removed": len(result.stale_registrations),
    }
    changes = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    output.say(f"refresh: {changes or 'no changes'} ({result.seconds:.2f} s)")
    for line in results.applied_lines(results.refresh_document(result)):
        output.say(f"  applied: {line}")
