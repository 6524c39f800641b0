"""Figures with their limits. A missed limit on a count fails the run, one on a time only in strict mode."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class FigureKind(Enum):
    #: Calls, instances or megabytes, which do not depend on the machine's speed.
    COUNT = "count"
    #: Seconds, which depend on the machine's load.
    TIME = "time"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    name: str
    unit: str
    #: Result of the predecessor on two cores, as text.
    predecessor: str
    #: Maximum for the measured value.
    limit: float
    measured: float
    kind: FigureKind
    #: Seconds of the operation's unavoidable calls, one after the other, on the same servers in the same run.
    floor: float | None = None
    #: The floor plus the wait for agents, whose polling interval is limited.
    floor_with_waits: float | None = None
    #: Maximum ratio of the measured value to that floor.
    max_floors: float | None = None
    samples: int = 1
    note: str = ""

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

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    figures: tuple[Figure, ...] = ()
    points: tuple[GrowthPoint, ...] = ()
    #: Remarks below the tables.
    notes: tuple[str, ...] = ()

    def __add__(self, other: Results) -> Results:
        return Results(
            figures=self.figures + other.figures, points=self.points + other.points, notes=self.notes + other.notes
        )

    def missed(self, *, strict: bool) -> list[Figure]:
        """Return the figures that fail the run."""
        return [each for each in self.figures if not each.met and (strict or each.kind is FigureKind.COUNT)]


def median(samples: Sequence[float]) -> float:
    return round(statistics.median(samples), 4)


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the smallest sample that is not exceeded by the given share of all samples."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
