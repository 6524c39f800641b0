"""The provision record of each instance of a runner set: replaced in one step with the instance's own record."""

from __future__ import annotations

from collections.abc import Callable

from remuda.controlplane.context import CONFLICT_ATTEMPTS, Context, transition, transition_with_provision
from remuda.domain.errors import Conflict, ProvisionConflict
from remuda.domain.instance import Instance, RetireReason
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision, ProvisionChange, ProvisionEnding, ProvisionStatus, released, settled
from remuda.domain.timestamps import after
from remuda.domain.transitions import Actor, End, Event


async def transition_in_set(
    context: Context,
    instance: Instance,
    event: Event,
    replaced: Callable[[Provision | None], Provision | None],
    *,
    by: Actor,
    why: str,
    provision: Provision | None = None,
) -> tuple[Instance, Provision | None]:
    """Apply a transition of a machine of a runner set and replace its provision in one step. Return both records.

    `replaced` returns the new provision, or None if the stored one remains. It gets None if none is stored any more.
    `provision` is the stored one, if known.
    """
    for _ in range(CONFLICT_ATTEMPTS):
        if provision is None and instance.latest_holder is not None:
            provision = await context.store.get_provision(instance.latest_holder)
        new = replaced(provision)
        if provision is None or new is None:
            return await transition(context, instance, event, by=by, why=why), provision
        change = ProvisionChange(before=provision, after=new)
        try:
            changed = await transition_with_provision(context, instance, event, change, by=by, why=why)
        except ProvisionConflict as conflict:
            provision = conflict.current
        else:
            return changed, new
    raise Conflict(f"the provision of {instance.instance_id} keeps changing")


async def leave_provision(
    context: Context,
    config: PoolConfig,
    instance: Instance,
    event: Event,
    *,
    by: Actor,
    why: str,
    provision: Provision | None = None,
) -> tuple[Instance, Provision | None]:
    """Apply a transition after which the provision of a machine of a runner set does not hold it any more."""

    def closed(stored: Provision | None) -> Provision | None:
        return closed_provision(context, config, stored, instance, why, ending=_ending_after(event))

    return await transition_in_set(context, instance, event, closed, by=by, why=why, provision=provision)


def _ending_after(event: Event) -> ProvisionEnding:
    """The ending of the provision of a machine of a runner set, by the event that takes the machine from it."""
    if not isinstance(event, End) or event.reason is RetireReason.RELEASED:
        return ProvisionEnding.RELEASED
    return ProvisionEnding.EXPIRED if event.reason is RetireReason.EXPIRED else ProvisionEnding.FAILED


def closed_provision(
    context: Context,
    config: PoolConfig,
    provision: Provision | None,
    instance: Instance,
    why: str,
    *,
    ending: ProvisionEnding = ProvisionEnding.RELEASED,
) -> Provision | None:
    """The provision of a machine of a runner set that it does not hold any more; None if that is recorded."""
    if provision is None or provision.settled:
        return None
    if provision.status is ProvisionStatus.COMMITTED and instance.instance_id not in provision.instance_ids:
        # It holds another machine: a claim whose answer was lost was applied after the launch of that one.
        return None
    now = context.clock.now()
    if provision.status is not ProvisionStatus.RELEASED:
        provision = released(provision, now=now, why=why, ending=ending)
    return settled(provision, forget_at=after(now, config.lifetimes.keep_records_s))
