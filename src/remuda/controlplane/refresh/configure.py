"""The configuration half of a refresh."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from remuda.controlplane.context import Context
from remuda.controlplane.refresh.changes import changes
from remuda.controlplane.refresh.result import Tally
from remuda.domain.errors import Conflict, RemudaError, UserError
from remuda.domain.pool_config import PoolConfig, ScopeTokens
from remuda.domain.resources import ResourceClass, Reuse
from remuda.domain.thresholds import Lifetimes
from remuda.domain.timestamps import to_milliseconds
from remuda.ports.github import GitHub

#: A token is replaced when less than this is left of its hour.
TOKEN_LEFT_S = 3_000.0
#: How often a write is tried again when another refresh was first.
TRIES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Desired:
    """What the operator wants, from flags, environment and file."""

    pool: str
    classes: tuple[ResourceClass, ...]
    lifetimes: Lifetimes
    max_instances: int
    github_url: str
    scope: str
    launch: Mapping[str, str] = field(default_factory=dict)
    reuse: Reuse = Reuse.SAME_TRUST


async def apply_configuration(context: Context, desired: Desired, tally: Tally) -> PoolConfig:
    github = _github(context)
    # The store first, then the credential: where one of them is refused, nothing else is made.
    tally.applied.extend(await context.store.prepare())
    stored = await context.store.get_config()
    tokens: ScopeTokens | None = None
    if not _fresh(context, stored.tokens if stored else (), desired.scope):
        tokens = await _mint(github, desired.scope)
    await _prepare(context, desired, tally)
    for _ in range(TRIES):
        kept = stored.tokens if stored else ()
        if tokens is None and not _fresh(context, kept, desired.scope):
            tokens = await _mint(github, desired.scope)
        config = PoolConfig(
            pool=desired.pool,
            classes=desired.classes,
            lifetimes=desired.lifetimes,
            max_instances=desired.max_instances,
            github_url=desired.github_url,
            launch=dict(desired.launch),
            reuse=desired.reuse,
            applied_at=to_milliseconds(context.clock.now()),
            revision=stored.revision + 1 if stored else 1,
            tokens=_with(kept, tokens),
        )
        changed = changes(stored, config) if stored else {}
        applied = list(changed) if stored else [f"configuration of pool {config.pool}"]
        if tokens:
            applied.append(f"tokens for {desired.scope}")
        if not applied:
            return await keep_tokens_fresh(context, stored or config, tally)
        try:
            await context.store.put_config(config)
        except Conflict:
            stored = await context.store.get_config()
            continue
        tally.applied.extend(applied)
        tally.changes.update({name: values for name, values in changed.items() if values is not None})
        return await keep_tokens_fresh(context, config, tally)
    raise Conflict("the pool's configuration keeps changing; is another refresh at work?")


async def _prepare(context: Context, desired: Desired, tally: Tally) -> None:
    """Both to their end, whatever becomes of the other: no call may outlive the refresh."""
    done = await asyncio.gather(
        context.pool.prepare([resource_class.name for resource_class in desired.classes]),
        context.compute.prepare(desired.launch),
        return_exceptions=True,
    )
    for lines in done:
        if isinstance(lines, BaseException):
            raise lines
        tally.applied.extend(lines)


async def keep_tokens_fresh(context: Context, config: PoolConfig, tally: Tally) -> PoolConfig:
    """Mint again what runs out, for every scope that the pool serves."""
    if context.github is None:
        return config
    for scope in [tokens.scope for tokens in config.tokens]:
        if _fresh(context, config.tokens, scope):
            continue
        try:
            minted = await _mint(context.github, scope)
            after = replace(
                config,
                tokens=_with(config.tokens, minted),
                revision=config.revision + 1,
                applied_at=to_milliseconds(context.clock.now()),
            )
            await context.store.put_config(after)
        except Conflict as conflict:
            # Another refresh was first; its tokens are as good.
            config = conflict.current if isinstance(conflict.current, PoolConfig) else config
        except RemudaError as error:
            tally.error(f"tokens for {scope}: {error.message}")
        else:
            config = after
            tally.applied.append(f"tokens for {scope}")
    return config


def _github(context: Context) -> GitHub:
    if context.github is None:
        raise UserError(
            "refresh needs a GitHub credential",
            field="github-token",
            fix="set REMUDA_GITHUB_TOKEN",
        )
    return context.github


def _fresh(context: Context, tokens: tuple[ScopeTokens, ...], scope: str) -> bool:
    now = context.clock.now()
    return any(
        (min(item.registration.expires_at, item.removal.expires_at) - now).total_seconds() > TOKEN_LEFT_S
        for item in tokens
        if item.scope.lower() == scope.lower()
    )


async def _mint(github: GitHub, scope: str) -> ScopeTokens:
    registration, removal = await asyncio.gather(github.registration_token(scope), github.removal_token(scope))
    return ScopeTokens(scope=scope, registration=registration, removal=removal)


def _with(tokens: tuple[ScopeTokens, ...], new: ScopeTokens | None) -> tuple[ScopeTokens, ...]:
    if new is None:
        return tokens
    return (*(item for item in tokens if item.scope.lower() != new.scope.lower()), new)
