"""Commands that change the pool: `remuda provision`, `release`, `refresh` and `scale-down`.

A provision also reads the event of its run, which decides whether the run is trusted.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from remuda.adapters.system.clock import SystemClock
from remuda.adapters.system.prices import chosen_prices
from remuda.cli.output import Output
from remuda.cli.rendering import results
from remuda.cli.run import EXIT_OK, EXIT_PARTIAL, plural, run_async
from remuda.config.settings import Settings
from remuda.config.sources import check_backend
from remuda.domain.errors import RemudaError, UserError
from remuda.domain.resources import repository_of
from remuda.domain.text import truncate
from remuda.domain.trust import Trust, UnreadablePayload, decide_trust
from remuda.ports.event_log import EventLog
from remuda.wiring import desired, open_context, open_fleet

if TYPE_CHECKING:
    from remuda.controlplane.provision import ProvisionResult
    from remuda.controlplane.refresh import RefreshResult
    from remuda.controlplane.release import ReleaseResult
    from remuda.controlplane.scale_down import ScaleDownResult

#: Event name if only the payload file is known.
UNNAMED_EVENT = "(none)"
#: Characters that may follow the run's number in a label. The hook before a job (`job-started.sh`) knows them, too.
LABEL_SEPARATORS = "._-"
_STARTS_WITH_RUN_NUMBER = re.compile(rf"[0-9]+([{LABEL_SEPARATORS}]|$)")
#: GitHub limits a payload to 25 MB.
MAX_EVENT_BYTES = 32 * 1024 * 1024
#: Characters of a path that a reason repeats.
MAX_SHOWN = 120


def run_provision(settings: Settings, output: Output) -> int:
    from remuda.controlplane.provision import ProvisionRequest, provision  # noqa: PLC0415 - as in run_refresh
    from remuda.controlplane.provision.plan import missing_credential  # noqa: PLC0415

    _require_run_id(settings)
    # Checked before any API call. The local backend always has a credential.
    if settings.ephemeral and settings.backend == "aws" and not (settings.github_token or settings.github_app_id):
        raise missing_credential()
    check_label(settings.run_id, environ=os.environ, field=settings.shown("run_id"))
    trusted = trust(settings)
    request = ProvisionRequest(
        run_id=settings.run_id,
        attempt=settings.run_attempt,
        count=settings.instance_count,
        resource_class=settings.resource_class,
        usage_class=settings.usage_class,
        patterns=settings.allowed_instance_types,
        scope=settings.github_scope,
        tier=trusted.tier,
        tier_reason=trusted.why,
        repository=repository(settings),
        ephemeral=settings.ephemeral,
        add=settings.add,
        # None: the limit of the pool applies.
        max_runtime_s=settings.max_runtime_min * 60 if settings.given("max_runtime_min") else None,
        timeout_s=settings.provision_timeout_sec if settings.given("provision_timeout_sec") else None,
    )

    async def work() -> ProvisionResult:
        # Only just-in-time registration needs a GitHub credential.
        event_log = output.event_log(SystemClock())
        async with open_context(settings, event_log, needs_github=settings.ephemeral) as context:
            return await provision(output.guarded(context), request)

    return show_provision(
        output, run_async(work, on_interrupt_message="interrupted; acquired instances were given back")
    )


def show_provision(output: Output, result: ProvisionResult) -> int:
    output.say(
        f"run {result.run_id} has {plural(len(result.instances), 'runner')}: {result.reused} reused, "
        f"{result.created} created, in {result.seconds:.2f} s ({result.tier}: {result.tier_reason})"
    )
    output.result(results.provision_document(result))
    return EXIT_OK


def run_release(settings: Settings, output: Output) -> int:
    from remuda.controlplane.release import release  # noqa: PLC0415 - as in run_refresh

    _require_run_id(settings)

    async def work() -> ReleaseResult:
        async with open_context(settings, output.event_log(SystemClock()), needs_github=False) as context:
            return await release(output.guarded(context), run_id=settings.run_id, attempt=settings.run_attempt)

    return show_release(
        output, run_async(work, on_interrupt_message="interrupted; the next sweep finishes the release")
    )


def show_release(output: Output, result: ReleaseResult) -> int:
    from remuda.controlplane.release import ReleaseStatus  # noqa: PLC0415 - as in run_refresh

    for outcome in result.outcomes:
        if outcome.status is not ReleaseStatus.RELEASED:
            detail = f" ({outcome.detail})" if outcome.detail else ""
            output.say(f"{outcome.instance_id} {outcome.status.value}: {outcome.why}{detail}", style="yellow")
    for warning in result.warnings:
        output.say(f"warning: {warning}", style="yellow")
    output.say_errors(result.errors)
    counts = ", ".join(f"{len(result.of(status))} {status.value}" for status in ReleaseStatus if result.of(status))
    nothing = "nothing was released" if result.errors else "nothing to release"
    output.say(f"run {result.run_id}: {counts or nothing}, in {result.seconds:.2f} s")
    output.result(results.release_document(result))
    return EXIT_PARTIAL if result.errors or result.of(ReleaseStatus.EXPIRED) else EXIT_OK


def _require_run_id(settings: Settings) -> None:
    if not settings.run_id:
        raise UserError(
            "--run-id is empty", field="--run-id", fix="give the workflow's run id (GITHUB_RUN_ID in a workflow)"
        )


def run_refresh(settings: Settings, output: Output, *, sweep_only: bool, reset: bool, every: float | None) -> int:
    from remuda.controlplane.refresh import refresh  # noqa: PLC0415 - the other commands do not wait for it

    if sweep_only and reset:
        raise UserError("--reset contradicts --sweep-only", field="--reset", fix="pass one of them")
    if settings.backend == "aws" and not sweep_only:
        from remuda.deployment.policies import check_policies  # noqa: PLC0415 - AWS libraries are slow to import

        check_policies(settings.resource_class_config, pool=settings.pool)
    # Prices are read only if there is a budget, but a mistyped name is one always.
    chosen_prices(settings.prices)
    for warning in check_backend(settings):
        output.say(f"warning: {warning}", style="yellow")
    event_log = output.event_log(SystemClock())

    async def once() -> RefreshResult:
        async with open_context(settings, event_log, needs_github=True, require_local_github=not sweep_only) as context:
            wanted = None if sweep_only else desired(settings, pool=context.pool_name, keeps_unset=not reset)
            with _named(settings, only="runner-sets"):
                return await refresh(output.guarded(context), wanted, interval_s=every)

    async def supervise() -> None:
        """On the local backend, let the listener of runner sets follow the configuration."""
        if settings.backend == "local":
            from remuda.cli.local_backend import adjust_listener  # noqa: PLC0415 - see above

            try:
                await adjust_listener(settings, event_log, wait=every is None)
            except RemudaError as error:
                event_log.record("listener-unsupervised", error.message)

    async def sweep() -> None:
        # First: the listener must not depend on the success of a sweep.
        await supervise()
        await once()

    async def apply() -> RefreshResult:
        result = await once()
        await supervise()
        return result

    if every is not None:
        return run_async(lambda: run_periodically(sweep, every, event_log, failure_event="sweep-failed"))
    result = run_async(apply)
    _say_refresh(output, result)
    output.result(results.refresh_document(result))
    return EXIT_PARTIAL if result.errors else EXIT_OK


def run_scale_down(settings: Settings, output: Output, *, dry_run: bool, every: float | None) -> int:
    from remuda.controlplane.scale_down import scale_down  # noqa: PLC0415 - as in run_refresh
    from remuda.domain.scale_down.decisions import Action  # noqa: PLC0415

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
    failed = f"incomplete, {plural(len(result.errors), 'error')}; " if result.errors else ""
    output.say(
        f"refresh: {failed}{changes or 'no changes'} ({result.seconds:.2f} s)", style="yellow" if failed else None
    )
    for line in results.applied_lines(results.refresh_document(result)):
        output.say(f"  applied: {line}")


def trust(settings: Settings) -> Trust:
    requested = settings.tier if settings.given("tier") else None
    # A payload file without an event name still belongs to an event.
    event = settings.event_name or (UNNAMED_EVENT if settings.event_path else "")
    payload = read_event(settings.event_path) if event else None
    with _named(settings):
        return decide_trust(event, payload, requested)


def check_label(run_id: str, *, environ: Mapping[str, str], field: str) -> None:
    """In a workflow, require a label that begins with the run's number.

    Agents refuse jobs of other runs by that number, so instances with another label could not serve any job.
    """
    if environ.get("GITHUB_RUN_ID") and not _STARTS_WITH_RUN_NUMBER.match(run_id):
        raise UserError(
            f"{field} must begin with the run's number, got {run_id!r}",
            field=field,
            fix="give github.run_id, optionally with a suffix: 123-large",
        )


def repository(settings: Settings) -> str:
    """The repository of the run, or empty. A runner that is registered in a repository serves only that one."""
    with _named(settings):
        known = repository_of(settings.github_scope, settings.repository)
    is_explicit = settings.given("repository") and settings.origins["repository"] != "GITHUB_REPOSITORY"
    if is_explicit and settings.repository and settings.repository.lower() != known.lower():
        raise UserError(
            f"repository is {settings.repository!r}, but the runners register in {settings.github_scope!r}",
            field=settings.shown("repository"),
            fix="omit --repository, or give the scope of that repository",
        )
    return known


@contextmanager
def _named(settings: Settings, only: str = "") -> Iterator[None]:
    """Make errors name the setting as the user wrote it: every setting, or only one."""
    try:
        yield
    except UserError as error:
        if only and error.field != only:
            raise
        raise UserError(error.message, field=settings.shown(error.field.replace("-", "_")), fix=error.fix) from None


def read_event(path: str) -> Any:
    """The event's payload, or `UnreadablePayload` with the reason: then the event's name alone decides the trust."""
    if not path:
        return UnreadablePayload(file="", why="GITHUB_EVENT_PATH is not set")
    shown = truncate(path, MAX_SHOWN)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:  # noqa: PTH123  # a descriptor
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return UnreadablePayload(file=shown, why="not a regular file")
            text = file.read(MAX_EVENT_BYTES + 1)
        found = json.loads(text) if len(text) <= MAX_EVENT_BYTES else None
    except OSError as problem:
        return UnreadablePayload(file=shown, why=problem.strerror or "cannot be opened")
    except (ValueError, RecursionError):
        return UnreadablePayload(file=shown, why="not JSON")
    if len(text) > MAX_EVENT_BYTES:
        return UnreadablePayload(file=shown, why=f"larger than {MAX_EVENT_BYTES} bytes")
    return found if isinstance(found, Mapping) else UnreadablePayload(file=shown, why="not a JSON object")
