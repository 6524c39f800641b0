"""The registration of an instance during a provision: the wait for it, and the classification of its failures."""

from __future__ import annotations

from remuda.controlplane.context import Context
from remuda.controlplane.signal_waiter import SignalWaiter, StopReason, WaitResult
from remuda.domain.errors import Unavailable, UserError
from remuda.domain.instance import Instance
from remuda.domain.runner_release import LATEST, VERSION
from remuda.domain.signals import (
    FailureKind,
    Signal,
    Verdict,
    registration_verdict,
)


async def wait_for_registration(context: Context, instance: Instance, *, until: float) -> WaitResult:
    """Wait until the monotonic time `until`. Raise if the registration failed for a reason that affects every instance.

    GitHub rejected the credential or the runner's version, GitHub is unreachable, or the pre-runner script failed.
    """
    waiter = SignalWaiter(
        context, instance_id=instance.instance_id, epoch=instance.epoch, verdict_of=registration_verdict
    )
    waited = await waiter.wait(until=until)
    report = waited.report
    if waited.verdict is not Verdict.FAILED or report is None:
        return waited
    if report.failure is FailureKind.CREDENTIAL_REFUSED:
        raise UserError(
            f"GitHub refused the registration: {report.detail}",
            field="github-token",
            fix="check the credential's rights on the scope and run remuda refresh",
        )
    if report.failure is FailureKind.VERSION_REFUSED:
        raise UserError(
            f"GitHub refused runner {instance.runner_version or 'of the image'}: {report.detail}",
            field=VERSION,
            fix=f"set {VERSION} to {LATEST} and run remuda refresh",
        )
    if report.failure is FailureKind.GITHUB_UNREACHABLE:
        raise Unavailable(f"the runners cannot register: {report.detail}", fix="try again when GitHub answers")
    if report.signal is Signal.UD_FAILED:
        raise UserError(
            f"the pre-runner script failed: {report.detail}",
            field="pre-runner-script",
            fix="fix the script and run remuda refresh",
        )
    return waited


def describe_failure(waited: WaitResult) -> str:
    if waited.stopped is StopReason.VERDICT and waited.report is not None:
        return waited.report.describe_signal()
    return f"not registered: {waited.stopped.value}"
