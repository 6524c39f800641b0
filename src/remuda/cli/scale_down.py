"""Scale-down as an entry point: the command line and the Lambda function both drive it through here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remuda.controlplane.scale_down import ScaleDownResult, scale_down
from remuda.wiring import open_fleet

if TYPE_CHECKING:
    from remuda.config.settings import Loaded
    from remuda.ports.calls import CallCounter
    from remuda.ports.event_log import EventLog


async def run_scale_down(
    loaded: Loaded, event_log: EventLog, *, dry_run: bool = False, calls: CallCounter | None = None
) -> ScaleDownResult:
    """One cycle with these settings. What could not be done is in the result's `errors`."""
    settings = loaded.settings
    async with open_fleet(settings, event_log, calls=calls) as context:
        return await scale_down(context, settings.scale_down_policy, dry_run=dry_run)
