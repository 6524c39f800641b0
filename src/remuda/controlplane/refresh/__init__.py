"""Refresh: the configuration and the fleet as they should be.

It applies the desired configuration, keeps the tokens fresh, and sweeps: whatever any process left half done is found
from outside (GitHub, EC2) and from the records, and finished. Every sweep can be cut at any await and run again.
"""

from __future__ import annotations

from remuda.controlplane.context import Context, check_pool_name
from remuda.controlplane.refresh.configure import Desired, apply_configuration, keep_tokens_fresh
from remuda.controlplane.refresh.result import RefreshResult, Tally
from remuda.controlplane.refresh.sweep import Sweep

__all__ = ["Desired", "RefreshResult", "refresh"]


async def refresh(context: Context, desired: Desired | None) -> RefreshResult:
    """With `desired` None the stored configuration stays, and only tokens and sweeps are done."""
    started = context.clock.monotonic()
    tally = Tally(context.event_log)
    if desired is not None:
        config = await apply_configuration(context, desired, tally)
    else:
        stored = await context.store.get_config()
        if stored is None:
            return tally.result(context, started)
        config = await keep_tokens_fresh(context, stored, tally)
    check_pool_name(context, config)
    await Sweep(context, config, tally).run()
    return tally.result(context, started)
