"""`remuda provision` and `remuda release`."""

from __future__ import annotations

import os

from remuda.adapters.system.clock import SystemClock
from remuda.cli.output import Output
from remuda.cli.rendering import results
from remuda.cli.run import EXIT_OK, EXIT_PARTIAL, plural, run_async
from remuda.cli.run_event import check_label, repository, trust
from remuda.config.settings import Settings
from remuda.controlplane.provision import ProvisionRequest, ProvisionResult, provision
from remuda.controlplane.provision.plan import missing_credential
from remuda.controlplane.release import ReleaseResult, ReleaseStatus, release
from remuda.domain.errors import UserError
from remuda.wiring import open_context


def run_provision(settings: Settings, output: Output) -> int:
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
        # None: the limit of the pool applies.
        max_runtime_s=settings.max_runtime_min * 60 if settings.given("max_runtime_min") else None,
        timeout_s=settings.provision_timeout_sec if settings.given("provision_timeout_sec") else None,
    )

    async def work() -> ProvisionResult:
        # Only just-in-time registration needs a GitHub credential.
        event_log = output.event_log(SystemClock())
        async with open_context(settings, event_log, needs_github=settings.ephemeral) as context:
            return await provision(output.guarded(context), request)

    result = run_async(work, on_interrupt_message="interrupted; acquired instances were given back")
    output.say(
        f"run {result.run_id} has {plural(len(result.instances), 'runner')}: {result.reused} reused, "
        f"{result.created} created, in {result.seconds:.2f} s ({trusted})"
    )
    output.result(results.provision_document(result))
    return EXIT_OK


def run_release(settings: Settings, output: Output) -> int:
    _require_run_id(settings)

    async def work() -> ReleaseResult:
        async with open_context(settings, output.event_log(SystemClock()), needs_github=False) as context:
            return await release(output.guarded(context), run_id=settings.run_id, attempt=settings.run_attempt)

    result = run_async(work, on_interrupt_message="interrupted; the next sweep finishes the release")
    for outcome in result.outcomes:
        if outcome.status is not ReleaseStatus.RELEASED:
            detail = f" ({outcome.detail})" if outcome.detail else ""
            output.say(f"{outcome.instance_id} {outcome.status.value}: {outcome.why}{detail}", style="yellow")
    output.say_errors(result.errors)
    counts = ", ".join(f"{len(result.of(status))} {status.value}" for status in ReleaseStatus if result.of(status))
    output.say(f"run {result.run_id}: {counts or 'nothing to release'}, in {result.seconds:.2f} s")
    output.result(results.release_document(result))
    return EXIT_PARTIAL if result.errors or result.of(ReleaseStatus.EXPIRED) else EXIT_OK


def _require_run_id(settings: Settings) -> None:
    if not settings.run_id:
        raise UserError(
            "--run-id is empty", field="--run-id", fix="give the workflow's run id (GITHUB_RUN_ID in a workflow)"
        )
