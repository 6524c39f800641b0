"""What each command does: settings, a use case, its result for people and programs, and the exit code."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from remuda.adapters.system.clock import SystemClock
from remuda.cli.applied import applied_lines
from remuda.cli.output import Output
from remuda.cli.rendering import explanation, results
from remuda.cli.rendering import status as status_view
from remuda.cli.run import EXIT_OK, EXIT_PARTIAL, load_settings, run_async
from remuda.cli.run_event import check_label, repository, trust
from remuda.config.settings import Settings
from remuda.controlplane.context import Context
from remuda.controlplane.provision import ProvisionRequest, ProvisionResult, provision
from remuda.controlplane.provision.request import missing_credential
from remuda.controlplane.read.explain import check_subject, explain
from remuda.controlplane.read.status import Status, status
from remuda.controlplane.refresh import RefreshResult, refresh
from remuda.controlplane.release import ReleaseResult, ReleaseStatus, release
from remuda.controlplane.scale_down.result import ScaleDownResult
from remuda.domain.errors import RemudaError, Unavailable, UserError
from remuda.domain.reporting.explanation import Explanation
from remuda.domain.scale_down.decisions import Action
from remuda.ports.event_log import EventLog
from remuda.wiring import check_local, desired, open_context

Flags = Mapping[str, Any]


def _event_log(output: Output) -> EventLog:
    return output.event_log(SystemClock())


@asynccontextmanager
async def _open(
    settings: Settings, output: Output, event_log: EventLog | None = None, *, credentialed: bool, alive: bool = True
) -> AsyncIterator[Context]:
    event_log = event_log or _event_log(output)
    async with open_context(settings, event_log, credentialed=credentialed, alive=alive) as context:
        yield output.guarded(context)


def _need_run_id(settings: Settings) -> None:
    if not settings.run_id:
        raise UserError(
            "--run-id is empty", field="--run-id", fix="give the workflow's run id (GITHUB_RUN_ID in a workflow)"
        )


def _need_credential(settings: Settings) -> None:
    """Before any call. The local GitHub's is at hand."""
    if settings.ephemeral and settings.backend == "aws" and not (settings.github_token or settings.github_app_id):
        raise missing_credential()


def _count(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"


def run_up(flags: Flags, config: str | None, output: Output) -> int:
    settings = load_settings(flags, config).settings
    from remuda.cli.local_backend import start  # noqa: PLC0415 - only the local backend's commands need it

    result = run_async(lambda: start(settings, _event_log(output)))
    output.say(f"local backend in {settings.dir}: GitHub at {result.url}" + ("" if result.started else " (was up)"))
    output.result({"dir": str(settings.dir), "github_url": result.url, "started": list(result.started)})
    return EXIT_OK


def run_down(flags: Flags, config: str | None, output: Output, *, purge: bool) -> int:
    settings = load_settings(flags, config).settings
    from remuda.cli.local_backend import stop  # noqa: PLC0415 - only the local backend's commands need it

    result = run_async(lambda: stop(settings, _event_log(output), purge=purge))
    if result.left:
        left = _count(len(result.left), "process", "processes")
        output.say(f"{left} could not be ended: {', '.join(map(str, result.left))}")
    else:
        output.say(f"down: {_count(len(result.terminated), 'machine', 'machines')} ended, no process is left")
    output.result(
        {
            "dir": str(settings.dir),
            "stopped": list(result.stopped),
            "terminated": list(result.terminated),
            "left": list(result.left),
        }
    )
    return EXIT_PARTIAL if result.left else EXIT_OK


def run_refresh(flags: Flags, config: str | None, output: Output, *, sweep_only: bool, every: float | None) -> int:
    settings = load_settings(flags, config).settings
    event_log = _event_log(output)

    async def once() -> RefreshResult:
        async with _open(settings, output, event_log, credentialed=True, alive=not sweep_only) as context:
            return await refresh(context, None if sweep_only else desired(settings, pool=context.pool_name))

    if every is not None:
        return run_async(lambda: _again_and_again(once, every, event_log, "sweep-failed"))
    result = run_async(once)
    _say_refresh(output, result)
    output.result(results.refresh_document(result))
    return EXIT_PARTIAL if result.errors else EXIT_OK


async def _again_and_again(
    once: Callable[[], Awaitable[object]], interval_s: float, event_log: EventLog, failed: str
) -> int:
    """Until stopped. The next round may do better: nothing may end them."""
    clock = SystemClock()
    while True:
        try:
            await once()
        except RemudaError as error:
            event_log.record(failed, error.message)
        except Exception as error:  # noqa: BLE001 - as above
            event_log.record(failed, f"a bug: {type(error).__name__}: {error}")
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
    told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    output.say(f"refresh: {told or 'all is as it should be'} ({result.seconds:.2f} s)")
    for line in applied_lines(results.refresh_document(result)):
        output.say(f"  applied: {line}")


def run_provision(flags: Flags, config: str | None, output: Output) -> int:
    loaded = load_settings(flags, config)
    settings = loaded.settings
    _need_run_id(settings)
    _need_credential(settings)
    check_label(settings.run_id, environ=os.environ, field=loaded.shown("run_id"))
    trusted = trust(loaded)
    order = ProvisionRequest(
        run_id=settings.run_id,
        attempt=settings.run_attempt,
        count=settings.instance_count,
        resource_class=settings.resource_class,
        usage_class=settings.usage_class,
        patterns=settings.allowed_instance_types,
        scope=settings.github_scope,
        tier=trusted.tier,
        tier_reason=trusted.why,
        repository=repository(loaded),
        ephemeral=settings.ephemeral,
        # The pool's own, unless this run asks for another.
        max_runtime_s=settings.max_runtime_min * 60 if loaded.given("max_runtime_min") else None,
        timeout_s=settings.provision_timeout_sec if loaded.given("provision_timeout_sec") else None,
    )

    async def work() -> ProvisionResult:
        # Registrations just in time are made with a credential; nothing else here needs one.
        async with _open(settings, output, credentialed=settings.ephemeral) as context:
            return await provision(context, order)

    result = run_async(work, farewell="interrupted; what was held has been given back")
    runners = _count(len(result.instances), "runner", "runners")
    output.say(
        f"run {result.run_id} has {runners}: {result.reused} reused, {result.created} created, "
        f"in {result.seconds:.2f} s ({trusted})"
    )
    output.result(results.provision_document(result))
    return EXIT_OK


def run_release(flags: Flags, config: str | None, output: Output) -> int:
    settings = load_settings(flags, config).settings
    _need_run_id(settings)

    async def work() -> ReleaseResult:
        async with _open(settings, output, credentialed=False) as context:
            return await release(context, run_id=settings.run_id, attempt=settings.run_attempt)

    result = run_async(work, farewell="interrupted; the sweeps finish what was begun")
    for outcome in result.outcomes:
        if outcome.status is not ReleaseStatus.RELEASED:
            detail = f" ({outcome.detail})" if outcome.detail and outcome.detail not in outcome.why else ""
            output.say(f"{outcome.instance_id} {outcome.status.value}: {outcome.why}{detail}", style="yellow")
    for error in result.errors:
        output.say(f"error: {error}", style="bold red")
    counts = ", ".join(f"{len(result.of(status))} {status.value}" for status in ReleaseStatus if result.of(status))
    output.say(f"run {result.run_id}: {counts or 'nothing to release'}, in {result.seconds:.2f} s")
    output.result(results.release_document(result))
    return EXIT_PARTIAL if result.errors or result.of(ReleaseStatus.EXPIRED) else EXIT_OK


def run_scale_down_command(
    flags: Flags, config: str | None, output: Output, *, dry_run: bool, every: float | None
) -> int:
    loaded = load_settings(flags, config)
    from remuda.cli.scale_down import run_scale_down  # noqa: PLC0415 - only this command needs it

    event_log = _event_log(output)

    async def once() -> ScaleDownResult:
        return await run_scale_down(loaded, event_log, dry_run=dry_run)

    farewell = "interrupted; the next cycle goes on from the tags"
    if every is not None:
        return run_async(lambda: _again_and_again(once, every, event_log, "scale-down-failed"), farewell=farewell)
    result = run_async(once, farewell=farewell)
    output.answer(results.scale_down_table(result))
    for error in result.errors:
        output.say(f"error: {error}", style="bold red")
    counts = ", ".join(f"{len(result.of(action))} {action}" for action in Action if result.of(action))
    output.say(f"scale-down of {result.environment}: {counts or 'no machines'} ({result.seconds:.2f} s)")
    output.result(results.scale_down_document(result))
    return EXIT_PARTIAL if result.errors else EXIT_OK


def _silent(settings: Settings) -> list[str]:
    """What of the local backend does not run."""
    if settings.backend != "local":
        return []
    from remuda.cli.local_backend import missing  # noqa: PLC0415 - only the local backend needs it

    return missing(settings)


def _asks(settings: Settings) -> bool:
    """On AWS the caller's own credential is used where there is one; the local GitHub's is at hand while it runs."""
    return settings.backend == "local" and not _silent(settings)


def run_status(
    flags: Flags, config: str | None, output: Output, *, everything: bool, watch: bool, every: float | None
) -> int:
    settings = load_settings(flags, config).settings
    if every is not None and not watch:
        raise UserError(f"--every is {every:g}, without --watch", field="--every", fix="add --watch, or leave it out")
    silent, asks = _silent(settings), _asks(settings)
    if watch:
        from remuda.cli.watch import watch as go_on  # noqa: PLC0415 - only where it is asked for

        return run_async(lambda: go_on(settings, output, everything=everything, every_s=every, asks=asks))

    async def work() -> Status:
        async with _open(settings, output, credentialed=asks, alive=False) as context:
            return await status(context, include_terminated=everything)

    result = run_async(work)
    for name in silent:
        output.say(f"{name} does not run: remuda up starts it", style="bold yellow")
    for sentence in result.unreadable:
        output.say(f"error: {sentence}", style="bold red")
    if not output.as_json:
        output.answer(*status_view.status_tables(result, width=output.width))
    output.result(status_view.status_document(result))
    return EXIT_OK


def run_explain(flags: Flags, config: str | None, output: Output, *, subject: str) -> int:
    settings = load_settings(flags, config).settings
    check_subject(subject)

    async def work() -> Explanation:
        async with _open(settings, output, credentialed=False, alive=False) as context:
            return await explain(context, subject)

    story = run_async(work)
    if not output.as_json:
        output.answer(*explanation.explanation_lines(story), soft_wrap=True)
    output.result(explanation.explanation_document(story))
    return EXIT_OK


def run_report(flags: Flags, config: str | None, output: Output, *, since: str, html: str | None) -> int:
    settings = load_settings(flags, config).settings
    from remuda.cli import report  # noqa: PLC0415 - only where a report is made

    return report.run_report(settings, output, since=since, html=html)


def run_dashboard(flags: Flags, config: str | None, output: Output, **chosen: Any) -> int:
    settings = load_settings(flags, config).settings
    from remuda.web.dashboard import command  # noqa: PLC0415 - a web server only where there is a page

    return command.run_dashboard(settings, output, asks=_asks(settings), **chosen)


def run_drain(flags: Flags, config: str | None, output: Output, **chosen: Any) -> int:
    settings = load_settings(flags, config).settings
    from remuda.cli import operator  # noqa: PLC0415 - only where somebody acts

    return operator.run_drain(settings, output, **chosen)


def run_quarantine(flags: Flags, config: str | None, output: Output, **chosen: Any) -> int:
    settings = load_settings(flags, config).settings
    from remuda.cli import operator  # noqa: PLC0415 - only where somebody acts

    return operator.run_quarantine(settings, output, **chosen)


def run_terminate(flags: Flags, config: str | None, output: Output, **chosen: Any) -> int:
    settings = load_settings(flags, config).settings
    from remuda.cli import operator  # noqa: PLC0415 - only where somebody acts

    return operator.run_terminate(settings, output, **chosen)


def run_doctor_checks(flags: Flags, config: str | None, output: Output) -> int:
    loaded = load_settings(flags, config)
    from remuda.cli.doctor import run_doctor  # noqa: PLC0415 - an HTTP client and the local backend's processes

    return run_async(lambda: run_doctor(loaded, output))


def run_config(flags: Flags, config: str | None, output: Output) -> int:
    loaded = load_settings(flags, config)
    rows = results.config_rows(loaded)
    if not output.as_json:
        output.answer(results.config_table(rows))
    output.result({"settings": rows})
    return EXIT_OK


def run_workflow_file(flags: Flags, config: str | None, output: Output, *, file: str) -> int:
    settings = load_settings(flags, config).settings
    check_local(settings)
    from remuda.cli.run_workflow import run_workflow  # noqa: PLC0415 - YAML and HTTP only where needed

    return run_async(lambda: run_workflow(settings, output, file=file))


def run_demo(flags: Flags, config: str | None, output: Output, *, dashboard: bool = False, keep: bool = False) -> int:
    loaded = load_settings(flags, config)
    if keep and not dashboard:
        raise UserError("--keep requires --dashboard", field="--keep", fix="add --dashboard, or leave it out")
    check_local(loaded.settings)
    from remuda.cli.demo import run_local_demo  # noqa: PLC0415 - slow to import

    folder = loaded.settings.dir if loaded.given("dir") else None
    try:
        return run_async(lambda: run_local_demo(output, folder, dashboard=dashboard, keep=keep))
    except Unavailable as error:
        output.error(error)
        return error.exit_code
