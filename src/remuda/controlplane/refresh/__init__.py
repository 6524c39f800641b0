"""Refresh: applies the configuration, renews tokens, and sweeps.

The sweeps compare records with EC2 and GitHub and finish what other processes left incomplete. A refresh can be
interrupted at any await and run again.
"""

from __future__ import annotations

from remuda.controlplane.budget import update_spending
from remuda.controlplane.context import Context, check_pool_name
from remuda.controlplane.refresh.configure import DesiredConfig, apply_configuration, renew_tokens
from remuda.controlplane.refresh.result import RefreshResult, RefreshResultBuilder
from remuda.controlplane.refresh.sweep import Sweep
from remuda.domain.errors import RemudaError
from remuda.domain.pool_config import PoolConfig
from remuda.domain.reporting.warnings import WarningKind
from remuda.ports.clock import CLOCK_FIX

__all__ = ["DesiredConfig", "RefreshResult", "refresh"]


async def refresh(context: Context, desired: DesiredConfig | None, *, interval_s: float | None = None) -> RefreshResult:
    """With `desired` None the stored configuration stays; tokens are renewed and the sweeps run.

    `interval_s` is the time to the next refresh, if the caller repeats it.
    """
    result = RefreshResultBuilder(context)
    if desired is not None:
        config = await apply_configuration(context, desired, result)
    else:
        stored = await context.store.get_config()
        if stored is None:
            return result.build()
        config = await renew_tokens(context, stored, result)
    check_pool_name(context, config)
    if config.runner is not None and (found := config.runner.warning(context.clock.now())):
        result.warn(WarningKind.RUNNER_VERSION, str(found))
    config = await _keep_account(context, config, result)
    await Sweep(context, config, result, interval_s=interval_s).run()
    if (wrong := context.clock_error) is not None:
        result.warn(WarningKind.CLOCK, f"{wrong}: {CLOCK_FIX}")
    return result.build()


async def _keep_account(context: Context, config: PoolConfig, result: RefreshResultBuilder) -> PoolConfig:
    """Before the sweeps, which confirm terminations."""
    try:
        config = await update_spending(context, config)
    except RemudaError as error:
        result.error(f"the spending of this month is not updated: {error.message}")
    if warning := config.budget.warning(context.clock.now()):
        result.warn(WarningKind.BUDGET, f"budget: {warning}")
    return config
