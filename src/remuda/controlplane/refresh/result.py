"""The result of a refresh, which is the sum of the results of its parts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import chain
from typing import Any, TypeVar

from remuda.controlplane.context import map_concurrently
from remuda.domain.errors import Conflict
from remuda.domain.reporting.warnings import WarningKind
from remuda.domain.sweep_record import Anomaly, SweepRecord

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RefreshResult:
    """What a refresh, or one part of it, has done and seen."""

    #: Created resources, changed settings by name, and renewed tokens.
    applied: tuple[str, ...] = ()
    #: Previous and new value per changed setting, except settings that may hold a secret.
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    #: Instances whose termination was decided, with the reason.
    retired: Mapping[str, str] = field(default_factory=dict)
    #: Instances whose termination EC2 confirmed.
    terminated: tuple[str, ...] = ()
    #: Instances taken back from provisions that failed, crashed or were released.
    rolled_back: tuple[str, ...] = ()
    #: Instances of runner sets that were released, or whose job was recorded, because their listener did not do it.
    advanced_in_sets: tuple[str, ...] = ()
    #: Idle instances for which a pool message was sent.
    published: tuple[str, ...] = ()
    #: Instances whose interrupted release was finished.
    finished_releases: tuple[str, ...] = ()
    #: Names of the stale registrations that were removed.
    stale_registrations: tuple[str, ...] = ()
    #: Number of stale pool messages that were deleted.
    stale_messages: int = 0
    #: Number of old records that were deleted.
    deleted_records: int = 0
    errors: tuple[str, ...] = ()
    #: Sentences, with the kind of each.
    warnings: tuple[str, ...] = ()
    warning_kinds: tuple[WarningKind, ...] = ()
    #: One sentence per job that waits too long for a runner.
    waiting_jobs: tuple[str, ...] = ()
    #: Number of live instances per state before the sweeps; None if they could not be read.
    live_instances: Mapping[str, int] | None = None
    #: What is recorded for the next sweep and for the views.
    record: SweepRecord = field(default_factory=SweepRecord)
    seconds: float = 0.0
    calls: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def warned(kind: WarningKind, message: str) -> RefreshResult:
    return RefreshResult(warnings=(message,), warning_kinds=(kind,))


def seen(anomalies: Iterable[Anomaly]) -> RefreshResult:
    return RefreshResult(record=SweepRecord(anomalies=tuple(anomalies)))


def combined(parts: Iterable[RefreshResult]) -> RefreshResult:
    """The sum of the results of parts: their lists follow one another, and their numbers add up."""
    return _sum([RefreshResult(), *parts])


def _sum(records: Sequence[T]) -> T:
    kind: Any = type(records[0])
    names = (item.name for item in fields(kind))
    total: T = kind(**{name: _total([getattr(record, name) for record in records]) for name in names})
    return total


def _total(values: Sequence[Any]) -> Any:
    given = [value for value in values if value is not None]
    match given:
        case []:
            return None
        case [tuple(), *_]:
            return tuple(chain(*given))
        case [Mapping(), *_]:
            return {key: value for mapping in given for key, value in mapping.items()}
        case [int() | float(), *_]:
            return sum(given)
        case [first, *_] if is_dataclass(first):
            return _sum(given)
        case _:
            return given[-1]


async def for_each(
    items: Iterable[T], work: Callable[[T], Awaitable[RefreshResult]], *, name: Callable[[T], str]
) -> RefreshResult:
    """Do the same for all items concurrently. An error of one is reported under its `name`, and stops no other.

    After a `Conflict`, another process has changed the record; the next sweep reads it again.
    """
    items = list(items)
    parts = []
    for item, result in zip(items, await map_concurrently(items, work), strict=True):
        if isinstance(result, RefreshResult):
            parts.append(result)
        elif not isinstance(result, Conflict):
            parts.append(RefreshResult(errors=(f"{name(item)}: {result.message}",)))
    return combined(parts)
