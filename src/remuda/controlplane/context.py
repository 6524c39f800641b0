"""The ports that every use case works with, and the steps that use cases share: reads, transitions and retries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from remuda.domain.errors import Conflict, DiskFull, RemudaError, Unavailable, Unreadable, UserError
from remuda.domain.instance import Credential, Instance
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision
from remuda.domain.reporting.prices import PriceTable
from remuda.domain.transitions import Actor, Change, Event, advance
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, ClockError, CorrectedClock, Ids, ServerDates, backoff_s, retry
from remuda.ports.compute import Compute, SpotPrices
from remuda.ports.event_log import EventLog
from remuda.ports.github import GitHub
from remuda.ports.pool import ResourcePool
from remuda.ports.store import InstanceStore

T = TypeVar("T")
R = TypeVar("R")

#: Items that one process works on concurrently.
CONCURRENCY = 64
#: Retries of a write that failed with `Unavailable`.
WRITE_RETRIES = 4
#: Mean pause in seconds before a failed call is repeated.
RETRY_PAUSE_S = 0.2
#: Attempts to change a record that other processes change at the same time.
CONFLICT_ATTEMPTS = 4


@dataclass(frozen=True, kw_only=True)
class Context:
    #: The name in the machines' tags and the runners' names.
    pool_name: str
    store: InstanceStore
    pool: ResourcePool
    compute: Compute
    #: None if the process has no GitHub credential.
    github: GitHub | None
    clock: Clock
    ids: Ids
    event_log: EventLog
    calls: CallCounter
    #: None if the backend has no spot market.
    spot_prices: SpotPrices | None = None
    #: Reads the table of prices.
    read_prices: Callable[[], PriceTable] = PriceTable
    #: The time of the answers of AWS and GitHub; None in a process that does not judge its clock.
    dates: ServerDates | None = None
    #: Removal tokens minted by this process, by scope. One token serves all instances of a scope.
    removal_tokens: dict[str, Credential] = field(default_factory=dict)
    removal_token_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    #: Monotonic times until which no removal token is minted, by scope, because GitHub did not answer.
    removal_token_retry_at: dict[str, float] = field(default_factory=dict)

    @property
    def clock_error(self) -> ClockError | None:
        """How far the clock of this computer is off, if that is more than normal and an answer has shown it."""
        return None if self.dates is None else self.dates.error()

    def with_true_time(self) -> Context:
        """The context with a clock that is corrected by its known error, for views that judge the times of others.

        Example: with a clock that is 20 min ahead, every agent would look silent for 20 min.
        """
        error = self.clock_error
        return self if error is None else replace(self, clock=CorrectedClock(self.clock, error))


def find_by_prefix(instances: Iterable[Instance], prefix: str) -> Instance | None:
    """The only instance whose id begins with this, or None. Tables shorten ids on a narrow terminal."""
    found = [item for item in instances if item.instance_id.startswith(prefix)]
    return found[0] if len(found) == 1 else None


async def read_config(context: Context) -> PoolConfig:
    config = await context.store.get_config()
    if config is None:
        raise UserError("the pool has no configuration yet", field="backend", fix="run remuda refresh first")
    check_pool_name(context, config)
    return config


def check_pool_name(context: Context, config: PoolConfig) -> None:
    """Refuse to combine the machines of one pool with the records of another: every machine would look unrecorded."""
    if config.pool != context.pool_name:
        raise UserError(
            f"pool is {context.pool_name!r}, but the store belongs to pool {config.pool!r}",
            field="pool",
            fix=f"use --pool {config.pool}",
        )


async def map_concurrently(
    items: Iterable[T], work: Callable[[T], Awaitable[R]], *, limit: int = CONCURRENCY
) -> Sequence[R | RemudaError]:
    """Call `work` for all items concurrently. An item's `RemudaError` is returned in its place and affects no other."""
    free = asyncio.Semaphore(limit)

    async def one(item: T) -> R | RemudaError:
        async with free:
            try:
                return await work(item)
            except RemudaError as error:
                return error

    return await asyncio.gather(*(one(item) for item in items))


async def skip_unreadable(
    read: Awaitable[Mapping[str, T]], report_error: Callable[[str], None] | None = None
) -> tuple[Mapping[str, T], frozenset[str]]:
    """Return the records that can be parsed and the ids of those that cannot.

    An unreadable record exists, so callers must not treat its id as unrecorded. Without `report_error` the error is
    ignored: some other read of the caller reports it.
    """
    try:
        return await read, frozenset()
    except Unreadable as error:
        if report_error is not None:
            report_error(error.message)
        return error.records, frozenset(error.unreadable)


async def run_to_end(work: Coroutine[None, None, None]) -> None:
    """Await a clean-up. If this task is cancelled meanwhile, the cancellation is raised after the end of the work."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


async def pause_before_retry(context: Context) -> None:
    await context.clock.sleep(backoff_s(1, first_s=RETRY_PAUSE_S, ids=context.ids))


async def retry_write(context: Context, write: Callable[[], Awaitable[T]], **facts: str) -> T:
    """Repeat a write that fails with `Unavailable`. It may have been applied, so `write` must recognise its own result.

    `facts` identify the record in the event log.
    """

    def pause_s(error: RemudaError, _attempt: int) -> float | None:
        # A record that cannot be parsed stays so, and a full disk stays full for long; nothing was written to it.
        if not isinstance(error, Unavailable) or isinstance(error, Unreadable | DiskFull):
            return None
        context.event_log.record("write-unconfirmed", error.message, **facts)
        return backoff_s(1, first_s=RETRY_PAUSE_S, ids=context.ids)

    return await retry(write, attempts=WRITE_RETRIES + 1, pause_s=pause_s, clock=context.clock)


async def record_intent(context: Context, intent: Provision) -> None:
    """Write a provision record. Its id or its nonce is new, so a stored record that equals it is our own write."""

    async def write() -> None:
        try:
            await context.store.put_provision(intent)
        except Conflict as conflict:
            if conflict.current != intent:
                raise

    await retry_write(context, write, run_id=intent.subject)


async def retry_conflicts(context: Context, write: Callable[[], Awaitable[T]]) -> T:
    """Repeat a write that fails with `Conflict`, a few times. It must read again what it is based on."""
    return await retry(
        write,
        attempts=CONFLICT_ATTEMPTS,
        pause_s=lambda error, _attempt: 0.0 if isinstance(error, Conflict) else None,
        clock=context.clock,
    )


async def transition(context: Context, instance: Instance, event: Event, *, by: Actor, why: str) -> Instance:
    """Apply one transition and log it. Raise `Conflict` if another process changed the record first."""
    change = advance(instance, event, by=by, now=context.clock.now(), why=why)
    after = await apply_confirmed(context, change)
    _log_transition(context, change)
    return after


async def transition_all(
    context: Context, instances: Sequence[Instance], event: Event, *, by: Actor, why: str
) -> Sequence[RemudaError | None]:
    """Apply the same transition to many instances in as few store calls as possible.

    Return one error or None per instance. A failure affects no other instance.
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
    results = await _resolve_ambiguous(context, changes, results)
    for change, failure in zip(changes, results, strict=True):
        if failure is None:
            _log_transition(context, change)
    return results


async def _resolve_ambiguous(
    context: Context, changes: Sequence[Change], results: Sequence[RemudaError | None]
) -> list[RemudaError | None]:
    """Repeat one by one the changes that may have been applied: only a single write tells whether it was."""
    ambiguous = [
        (change, result) for change, result in zip(changes, results, strict=True) if isinstance(result, Unavailable)
    ]
    if ambiguous:
        context.event_log.record("write-unconfirmed", ambiguous[0][1].message, instances=len(ambiguous))
    repeated = await map_concurrently(ambiguous, lambda item: apply_confirmed(context, item[0]))
    resolved = {
        change.instance_id: result if isinstance(result, RemudaError) else None
        for (change, _), result in zip(ambiguous, repeated, strict=True)
    }
    return [
        _unless_applied(change, resolved.get(change.instance_id, result))
        for change, result in zip(changes, results, strict=True)
    ]


def _unless_applied(change: Change, failure: RemudaError | None) -> RemudaError | None:
    current = failure.current if isinstance(failure, Conflict) else None
    return None if isinstance(current, Instance) and is_applied(change, current) else failure


def _log_transition(context: Context, change: Change) -> None:
    entry = change.entry
    if entry.source != entry.target:
        context.event_log.record(
            entry.transition,
            entry.why,
            instance_id=change.instance_id,
            source=entry.source,
            target=entry.target,
            run_id=entry.subject,
            epoch=entry.epoch,
            retire_reason=entry.retire_reason,
        )


async def apply_confirmed(context: Context, change: Change) -> Instance:
    """Apply a change and find out whether it was applied, even if the store's answer was lost.

    A repeated write fails with `Conflict` if the first one was applied. The record then equals the result of our
    change, including our claim. (state, epoch) never recurs, so no other process can have written it.
    """

    async def write() -> Instance:
        try:
            return await context.store.apply(change)
        except Conflict as conflict:
            current = conflict.current
            if isinstance(current, Instance) and is_applied(change, current):
                return current
            raise

    return await retry_write(context, write, instance_id=change.instance_id)


def is_applied(change: Change, current: Instance) -> bool:
    """Whether every field that the change sets has the value that it sets."""
    return replace(current, **change.sets) == current
