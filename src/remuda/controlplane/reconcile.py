"""Carrying out the steps that `domain.decide` decides: per step one conditional write, and at most one outside call.

`advance` does what is due for an instance, `carry_out` what was decided already, and `leave` takes an instance from its
holder. All drivers use them: provisions that roll back, releases, sweeps and the listener. They may all run at once and
be killed between any two calls: whoever comes next reads the record, decides again, and goes on.

The order of a call to its write:
- A registration is removed before the instance is released, so that GitHub starts no job on a runner that is stopped.
- A new instance is first recorded as ending, then its registration is removed: until then its agent may register.
"""

from __future__ import annotations

import asyncio
from math import inf

from remuda.controlplane.context import Context, transition
from remuda.domain.decide.next_step import (
    Leave,
    NewCredential,
    Publish,
    RegistrationRemoval,
    Step,
    Terminate,
    Write,
    next_step,
)
from remuda.domain.errors import RemudaError, Unavailable
from remuda.domain.instance import Credential, Instance, RetireReason
from remuda.domain.pool_config import PoolConfig
from remuda.domain.resources import Tier
from remuda.domain.signals import Report
from remuda.domain.transitions import Actor, Bind, End, Release, RenewCredential, Retire
from remuda.ports.github import Deletion, GitHub

#: A cached removal token with fewer seconds left is replaced.
MIN_TOKEN_LIFE_S = 1_800.0
#: Seconds that GitHub has for a removal token, or for the removal of a registration, before instances are given back
#: without its answer.
TOKEN_TIMEOUT_S = 3.0
#: Seconds after a failed attempt in which the pool's token is used at once.
TOKEN_RETRY_S = 30.0


async def advance(
    context: Context, config: PoolConfig, instance: Instance, report: Report | None, *, by: Actor
) -> Instance:
    """Do what is due for an instance, if anything. Return its record."""
    step = next_step(instance, report, config.policy, now=context.clock.now())
    return await carry_out(context, config, instance, step, by=by)


async def carry_out(
    context: Context, config: PoolConfig, instance: Instance, step: Step | None, *, by: Actor
) -> Instance:
    """Carry out a step that was decided for this record. Return its record.

    The message of an idle instance is not sent here: callers send those of many instances in one call.
    """
    match step:
        case Write():
            return await transition(context, instance, step.event, by=by, why=step.why)
        case NewCredential():
            return await _renew_credential(context, config, instance, by=by)
        case Publish() | None:
            return instance


async def leave(
    context: Context,
    config: PoolConfig,
    instance: Instance,
    leaving: Terminate | Leave,
    *,
    by: Actor,
    why: str,
    claim: str | None = None,
    removal: Credential | None = None,
) -> Instance:
    """Take an instance from its holder. Return its record.

    `claim` limits the write to what was claimed or launched with this token, for rollbacks. `removal` is the removal
    token; without it, one is made.
    """
    event: End | Release
    if isinstance(leaving, Terminate):
        event = End(reason=RetireReason.RELEASED, claim=claim)
    else:
        credential, is_removed = None, leaving.removal is RegistrationRemoval.USED_UP
        if leaving.removal is RegistrationRemoval.BY_AGENT:
            credential = removal or await removal_credential(context, config, instance.scope)
            is_removed = await remove_jit_registration(context, instance)
        release_time_s = config.lifetimes.release_time_s
        event = Release(release_time_s=release_time_s, credential=credential, claim=claim, deregistered=is_removed)
    return await transition(context, instance, event, by=by, why=why)


async def _renew_credential(context: Context, config: PoolConfig, instance: Instance, *, by: Actor) -> Instance:
    fresh = await removal_credential(context, config, instance.scope)
    current = instance.assignment.credential if instance.assignment else None
    if current is not None and fresh.expires_at <= current.expires_at:
        return instance
    event = RenewCredential(credential=fresh)
    return await transition(context, instance, event, by=by, why="the removal credential expires")


# Removal of registrations: the agent's credential, and the API call for just-in-time runners -------------------------


async def removal_credential(
    context: Context, config: PoolConfig, scope: str, *, timeout_s: float = TOKEN_TIMEOUT_S
) -> Credential:
    """Mint a removal token, or take the one in the pool's configuration if this process has no GitHub credential.

    The pool's token may expire too early. A sweep then renews it on the instance.
    """
    if context.github is None:
        return config.tokens_for(scope).removal
    stored = config.find_tokens(scope)
    if stored is not None and context.clock.monotonic() < context.removal_token_retry_at.get(scope, -inf):
        return stored.removal
    try:
        return await _mint_removal_token(context, context.github, scope, timeout_s=timeout_s)
    except RemudaError as error:
        # Instances must be released even if GitHub does not answer.
        if stored is None:
            raise
        context.removal_token_retry_at[scope] = context.clock.monotonic() + TOKEN_RETRY_S
        context.event_log.record("removal-token-failed", f"{error.message}; using the pool's token", scope=scope)
        return stored.removal


async def _mint_removal_token(context: Context, github: GitHub, scope: str, *, timeout_s: float) -> Credential:
    try:
        # The wait for another's attempt counts as well.
        async with asyncio.timeout(timeout_s), context.removal_token_lock:
            token = context.removal_tokens.get(scope)
            if token is None or (token.expires_at - context.clock.now()).total_seconds() < MIN_TOKEN_LIFE_S:
                token = context.removal_tokens[scope] = await github.removal_token(scope)
            return token
    except TimeoutError:
        raise Unavailable(f"GitHub made no removal token in {timeout_s:.1f} s") from None


# Runners of sets ---------------------------------------------------------------------------------------------------


def binding_of_unknown_job(config: PoolConfig, report: Report | None, *, set_tier: Tier) -> Bind:
    """The event that binds a job which no message has named: its run is unknown, and it counts as untrusted."""
    return Bind(
        report=report,
        tier=Tier.UNTRUSTED,
        set_tier=set_tier,
        max_runtime_s=config.lifetimes.max_runtime_s,
        margin_s=config.lifetimes.margin_s,
    )


async def retire_after_unknown_job(context: Context, instance: Instance, *, by: Actor) -> Instance:
    """Retire a trusted machine that may have served an unknown job."""
    if instance.is_bound or instance.retire_reason is not None or instance.tier is not Tier.TRUSTED:
        return instance
    event = Retire(
        reason=RetireReason.UNTRUSTED_JOB, detail="its registration was gone: it may have had an unknown job"
    )
    return await transition(context, instance, event, by=by, why=event.detail)


async def remove_jit_registration(context: Context, instance: Instance) -> bool:
    """Delete the registration of a just-in-time runner; no removal token can do that. Return whether it is gone.

    GitHub refuses while a job runs, and removes the registration with the end of the job. Without a credential or an
    answer, the registration outlives the machine until a sweep removes it.
    """
    assignment = instance.assignment
    if context.github is None or assignment is None or not assignment.runner_id:
        return False
    try:
        async with asyncio.timeout(TOKEN_TIMEOUT_S):
            deletion = await context.github.delete_runner(instance.scope, assignment.runner_id)
    except (TimeoutError, RemudaError) as error:
        why = str(error) or "timeout"
        context.event_log.record("deregistration-failed", why, instance_id=instance.instance_id)
        return False
    context.event_log.record("deregistered", deletion.value, instance_id=instance.instance_id)
    return deletion is not Deletion.BUSY
