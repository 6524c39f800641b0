"""Figures with their limits. A missed limit on a count fails the run, one on a time only in strict mode."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from enum import Enum
from typing import Any


class FigureKind(Enum):
    #: Calls, instances or megabytes, which do not depend on the machine's speed.
    COUNT = "count"
    #: Seconds, which depend on the machine's load.
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    unit: str
    measured: float
    _: KW_ONLY
    #: Maximum for the measured value.
    limit: float
    #: Result of the predecessor on two cores, as text.
    predecessor: str = "—"
    kind: FigureKind = FigureKind.COUNT
    #: Seconds of the operation's unavoidable calls, one after the other, on the same servers in the same run.
    floor: float | None = None
    #: The floor plus the wait for agents, whose polling interval is limited.
    floor_with_waits: float | None = None
    #: Maximum ratio of the measured value to that floor.
    max_floors: float | None = None
    samples: int = 1
    note: str = ""
    #: Heading of its table. Figures without one come first.
    section: str = ""

    @property
    def met(self) -> bool:
        return self.measured <= self.limit and self.within_floors

    @property
    def within_floors(self) -> bool:
        if self.max_floors is None or self.floor_with_waits is None:
            return True
        return self.measured <= self.max_floors * self.floor_with_waits

    @property
    def ratio(self) -> float | None:
        return self.measured / self.floor if self.floor else None

    @property
    def ratio_with_waits(self) -> float | None:
        return self.measured / self.floor_with_waits if self.floor_with_waits else None

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "kind": self.kind.value, "met": self.met, "ratio": self.ratio}


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowthPoint:
    """Time and calls of one operation at one number of live instances and old records."""

    operation: str
    live: int
    old: int
    seconds: float
    #: By service.
    calls: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.calls.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class ListenerPoint:
    """Cost of a listener at one number of sets and of machines that have a job."""

    sets: int
    machines: int
    jobs_per_s: float
    #: Share of a core, and maximum memory.
    cpu_share: float
    memory_mb: float
    #: Per minute, by service.
    calls: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    figures: tuple[Figure, ...] = ()
    points: tuple[GrowthPoint, ...] = ()
    listeners: tuple[ListenerPoint, ...] = ()

    def ratio(self, point: GrowthPoint) -> float:
        """Seconds of an operation, relative to its seconds with the fewest instances and no old records."""
        same = (each for each in self.points if each.operation == point.operation)
        return point.seconds / min(same, key=lambda each: (each.old, each.live)).seconds

    def __add__(self, other: Results) -> Results:
        return Results(
            figures=self.figures + other.figures,
            points=self.points + other.points,
            listeners=self.listeners + other.listeners,
        )

    def missed(self, *, strict: bool) -> list[Figure]:
        """Return the figures that fail the run."""
        return [each for each in self.figures if not each.met and (strict or each.kind is FigureKind.COUNT)]


def timed(
    name: str, seconds: float | Sequence[float], *, limit: float, floor: float | None, wait_s: float = 0.0, **more: Any
) -> Figure:
    """A time, or the median of several, with its floor and the wait that is added to the floor."""
    samples = [seconds] if isinstance(seconds, float) else seconds
    floors = {} if floor is None else {"floor": round(floor, 4), "floor_with_waits": round(floor + wait_s, 4)}
    values = {"samples": len(samples), **floors, **more}
    return Figure(name, "s", median(samples), limit=limit, kind=FigureKind.TIME, **values)


def median(samples: Sequence[float]) -> float:
    return round(statistics.median(samples), 4)


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the smallest sample that is not exceeded by the given share of all samples."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
