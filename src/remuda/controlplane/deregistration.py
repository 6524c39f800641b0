"""Removal of runner registrations: the credential that an agent needs, and the API call for just-in-time runners."""

from __future__ import annotations

from remuda.controlplane.context import Context
from remuda.domain.errors import RemudaError
from remuda.domain.instance import Credential, Instance
from remuda.domain.pool_config import PoolConfig
from remuda.ports.github import Deletion

#: A cached removal token with fewer seconds left is replaced.
MIN_TOKEN_LIFE_S = 1_800.0


async def removal_credential(context: Context, config: PoolConfig, scope: str) -> Credential:
    """Mint a removal token, or take the one in the pool's configuration if this process has no GitHub credential.

    The pool's token may expire too early. A sweep then renews it on the instance.
    """
    if context.github is None:
        return config.tokens_for(scope).removal
    try:
        async with context.removal_token_lock:
            token = context.removal_tokens.get(scope)
            if token is None or (token.expires_at - context.clock.now()).total_seconds() < MIN_TOKEN_LIFE_S:
                token = context.removal_tokens[scope] = await context.github.removal_token(scope)
            return token
    except RemudaError as error:
        # Instances must be released even if GitHub does not answer.
        if all(item.scope.lower() != scope.lower() for item in config.tokens):
            raise
        context.event_log.record("removal-token-failed", f"{error.message}; using the pool's token", scope=scope)
        return config.tokens_for(scope).removal


async def remove_jit_registration(context: Context, instance: Instance) -> bool:
    """Delete the registration of a just-in-time runner; no removal token can do that. Return whether it is gone.

    GitHub refuses while a job runs, and removes the registration with the end of the job. Without a credential or an
    answer, the registration outlives the machine until a sweep removes it.
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
