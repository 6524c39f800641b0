"""Registrations made just in time: no token removes them, so whoever holds a credential asks GitHub."""

from __future__ import annotations

from remuda.controlplane.context import Context
from remuda.domain.errors import RemudaError
from remuda.domain.instance import Instance
from remuda.ports.github import Deletion


async def deregistered(context: Context, instance: Instance) -> bool:
    """Remove the registration of an instance whose provision is over; whether GitHub has confirmed that it is gone.

    Where a job runs on it GitHub refuses, and the registration goes with the job. Without a credential, or an answer,
    the machine ends with its registration, and the sweep for ghosts removes that.
    """
    assignment = instance.assignment
    if context.github is None or assignment is None or not assignment.runner_id:
        return False
    try:
        deletion = await context.github.delete_runner(instance.scope, assignment.runner_id)
    except RemudaError as error:
        context.event_log.record("deregistration-failed", error.message, instance_id=instance.instance_id)
        return False
    context.event_log.record("deregistered", deletion.value, instance_id=instance.instance_id)
    return deletion is not Deletion.BUSY
