"""New instances that the cloud ends before they have registered: an unusable disk key, a quota, a bad image.

CreateFleet returns their ids, and they end seconds later without a sign of their agent. Whoever waits for them asks the
cloud regularly, once for all of them, instead of waiting until the time limit.
"""

from __future__ import annotations

from collections.abc import Collection

from remuda.controlplane.context import Context
from remuda.domain.errors import Unavailable
from remuda.domain.instance import Instance, RetireReason
from remuda.domain.transitions import MAX_WHY, End
from remuda.ports.compute import ENDED, MachineView

#: Seconds between two questions to the cloud. The instances of a KMS key that EC2 cannot use end within half a minute.
LOOK_S = 10.0


async def find_ended(context: Context, instances: Collection[Instance]) -> list[tuple[Instance, MachineView]]:
    """Those that the cloud has ended, with its view: one call for up to a hundred instances.

    An instance that the cloud does not know may have been launched a moment ago.
    """
    if not instances:
        return []
    views = await context.compute.describe(sorted(item.instance_id for item in instances))
    found = ((item, views.get(item.instance_id)) for item in instances)
    return [(item, view) for item, view in found if view is not None and view.state in ENDED]


def early_end(instance: Instance, view: MachineView) -> Unavailable:
    """The error of whoever waits for the instance.

    Example: "new instance i-0123 ended before it had registered: the instance is terminated: Client.InternalError:
    Client error on launch", with the key's policy as the fix.
    """
    why = f"new instance {instance.instance_id} ended before it had registered: {view.describe_end()}"
    return Unavailable(why, fix=view.end_fix)


def end_of(view: MachineView, *, claim: str | None = None) -> tuple[End, str]:
    """The event that records the end, and the reason for the history: with the fix, as `explain` shows it."""
    event = End(reason=RetireReason.GONE, detail=view.end_reason, claim=claim)
    return event, Unavailable(view.describe_end(), fix=view.end_fix).describe(MAX_WHY)
