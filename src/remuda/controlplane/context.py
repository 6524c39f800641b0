"""What every use case works with, and the small steps that they share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from remuda.domain.errors import Conflict, RemudaError, Unavailable, Unreadable, UserError
from remuda.domain.instance import Credential, Instance
from remuda.domain.pool_config import PoolConfig
from remuda.domain.transitions import Actor, Change, Event, advance
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, Ids
from remuda.ports.compute import Compute
from remuda.ports.event_log import EventLog
from remuda.ports.github import GitHub
from remuda.ports.pool import ResourcePool
from remuda.ports.prices import SpotPrices
from remuda.ports.store import InstanceStore

T = TypeVar("T")
R = TypeVar("R")

#: How many instances one process works on at a time.
CONCURRENCY = 64
#: How often a write whose answer was lost is looked into and tried again.
AMBIGUOUS_TRIES = 4
#: A minted token with less left is replaced.
MINT_AGAIN_S = 1_800.0
AMBIGUOUS_PAUSE_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Context:
    #: The pool that machines are tagged and runners are named for.
    pool_name: str
    store: InstanceStore
    pool: ResourcePool
    compute: Compute
    #: None where the process holds no GitHub credential of its own.
    github: GitHub | None
    clock: Clock
    ids: Ids
    event_log: EventLog
    calls: CallCounter
    #: What the spot market asked, where the backend has one.
    spot: SpotPrices | None = None
    #: Removal tokens minted by this process, by scope: one serves all instances.
    minted: dict[str, Credential] = field(default_factory=dict)
    minting: asyncio.Lock = field(default_factory=asyncio.Lock)


async def read_config(context: Context) -> PoolConfig:
    config = await context.store.get_config()
    if config is None:
        raise UserError("the pool has no configuration yet", field="backend", fix="run remuda refresh first")
    check_pool(context, config)
    return config


def check_pool(context: Context, config: PoolConfig) -> None:
    """With the machines of one pool and the records of another, every machine would look lost."""
    if config.pool != context.pool_name:
        raise UserError(
            f"pool is {context.pool_name!r}, but the store belongs to pool {config.pool!r}",
            field="pool",
            fix=f"use --pool {config.pool}",
        )


async def each(items: Iterable[T], work: Callable[[T], Awaitable[R]]) -> Sequence[R | RemudaError]:
    """Work on all of them concurrently; one that fails leaves the others untouched and is returned in its place."""
    limit = asyncio.Semaphore(CONCURRENCY)

    async def one(item: T) -> R | RemudaError:
        async with limit:
            try:
                return await work(item)
            except RemudaError as error:
                return error

    return await asyncio.gather(*(one(item) for item in items))


async def readable(
    read: Awaitable[Mapping[str, T]], tell: Callable[[str], None]
) -> tuple[Mapping[str, T], frozenset[str]]:
    """What can be read. What cannot is told of, and named: it is there, and nobody may act as if it were not."""
    try:
        return await read, frozenset()
    except Unreadable as error:
        tell(error.message)
        return error.records, frozenset(error.unreadable)


async def transition(context: Context, instance: Instance, event: Event, *, by: Actor, why: str) -> Instance:
    """Advance an instance by one row and tell the event_log. `Conflict` where somebody else was first."""
    change = advance(instance, event, by=by, now=context.clock.now(), why=why)
    after = await apply_surely(context, change)
    _tell(context, change)
    return after


async def transition_all(
    context: Context, instances: Sequence[Instance], event: Event, *, by: Actor, why: str
) -> Sequence[RemudaError | None]:
    """`transition` of many by the same row, in as few calls as the store can. One that fails leaves the others
    untouched; its error, whatever it is, is returned in its place.
    """
    if not instances:
        return []
    now = context.clock.now()
    changes = [advance(instance, event, by=by, now=now, why=why) for instance in instances]
    results: list[RemudaError | None]
    try:
        results = list(await context.store.apply_all(changes))
    except RemudaError as error:
        results = [error] * len(changes)
    results = await _looked_into(context, changes, results)
    for change, failure in zip(changes, results, strict=True):
        if failure is None:
            _tell(context, change)
    return results


async def _looked_into(
    context: Context, changes: Sequence[Change], results: Sequence[RemudaError | None]
) -> list[RemudaError | None]:
    """Those that may have been applied are tried again: of each alone it can be told."""
    unsure = [
        (change, result) for change, result in zip(changes, results, strict=True) if isinstance(result, Unavailable)
    ]
    if unsure:
        context.event_log.record("write-unsure", unsure[0][1].message, instances=len(unsure))
    again = await each(unsure, lambda one: apply_surely(context, one[0]))
    known = {
        change.instance_id: result if isinstance(result, RemudaError) else None
        for (change, _), result in zip(unsure, again, strict=True)
    }
    return [
        _unless_made(change, known.get(change.instance_id, result))
        for change, result in zip(changes, results, strict=True)
    ]


def _unless_made(change: Change, failure: RemudaError | None) -> RemudaError | None:
    current = failure.current if isinstance(failure, Conflict) else None
    return None if isinstance(current, Instance) and made_by(change, current) else failure


def _tell(context: Context, change: Change) -> None:
    entry = change.entry
    if entry.source != entry.target:
        context.event_log.record(
            entry.transition,
            entry.why,
            instance_id=change.instance_id,
            source=entry.source,
            target=entry.target,
            run_id=entry.run_id,
            epoch=entry.epoch,
            retire_reason=entry.retire_reason,
        )


async def apply_surely(context: Context, change: Change) -> Instance:
    """Apply a change and know whether it was applied, even where an answer was lost on the way.

    After `Unavailable` the record is read: if it is what the change would have made of it, with our owner, the write
    was ours. (state, epoch) never recurs, so nobody else can have made it look so.
    """
    tries = 0
    while True:
        tries += 1
        try:
            return await context.store.apply(change)
        except Conflict as conflict:
            current = conflict.current
            if isinstance(current, Instance) and made_by(change, current):
                return current
            raise
        except Unreadable:
            # It will not be better the next time.
            raise
        except Unavailable as error:
            context.event_log.record("write-unsure", error.message, instance_id=change.instance_id)
            if tries > AMBIGUOUS_TRIES:
                raise
            await context.clock.sleep(AMBIGUOUS_PAUSE_S * (0.5 + context.ids.jitter()))


def made_by(change: Change, current: Instance) -> bool:
    """Whether the record shows this very change: every field that it sets has the value that it sets."""
    return replace(current, **change.sets) == current


async def removal_credential(context: Context, config: PoolConfig, scope: str) -> Credential:
    """A fresh one of our own, or the pool's. The pool's may be stale: a sweep renews it on the instance later."""
    if context.github is None:
        return config.tokens_for(scope).removal
    try:
        async with context.minting:
            held = context.minted.get(scope)
            if held is None or (held.expires_at - context.clock.now()).total_seconds() < MINT_AGAIN_S:
                held = context.minted[scope] = await context.github.removal_token(scope)
            return held
    except RemudaError as error:
        # What is held must be given back all the same.
        if all(item.scope.lower() != scope.lower() for item in config.tokens):
            raise
        context.event_log.record("removal-token-failed", f"{error.message}; the pool's will do", scope=scope)
        return config.tokens_for(scope).removal
