"""A figure, its limit, and whether it is met. A count that is not met fails a run; a time only where it must."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    #: Calls, machines, megabytes: the same on a slow computer.
    COUNT = "count"
    #: Seconds: they hang on what else the computer does.
    TIME = "time"


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    name: str
    unit: str
    #: What was measured for its predecessor, on two cores.
    before: str
    #: What ours may be at most.
    most: float
    ours: float
    kind: Kind
    #: The least that the operation's calls take, one after the other, at the same servers in the same run.
    floor: float | None = None
    #: The floor, and what waiting for agents costs that may not read more often.
    floor_with_waits: float | None = None
    #: How many times that floor ours may be.
    most_floors: float | None = None
    samples: int = 1
    note: str = ""

    @property
    def met(self) -> bool:
        return self.ours <= self.most and self.within_floors

    @property
    def within_floors(self) -> bool:
        if self.most_floors is None or self.floor_with_waits is None:
            return True
        return self.ours <= self.most_floors * self.floor_with_waits

    @property
    def ratio(self) -> float | None:
        return self.ours / self.floor if self.floor else None

    @property
    def ratio_with_waits(self) -> float | None:
        return self.ours / self.floor_with_waits if self.floor_with_waits else None

    def document(self) -> dict[str, Any]:
        return {**asdict(self), "kind": self.kind.value, "met": self.met, "ratio": self.ratio}


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One operation at one size of the herd."""

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
    points: tuple[Point, ...] = ()
    #: Sentences that belong to the tables.
    notes: tuple[str, ...] = ()

    def __add__(self, other: Results) -> Results:
        return Results(
            figures=self.figures + other.figures, points=self.points + other.points, notes=self.notes + other.notes
        )

    def missed(self, *, strict: bool) -> list[Figure]:
        """What fails the run."""
        return [each for each in self.figures if not each.met and (strict or each.kind is Kind.COUNT)]


def middle(samples: Sequence[float]) -> float:
    return round(statistics.median(samples), 4)


def percentile(samples: Sequence[float], part: float) -> float:
    """The smallest sample that this part of all does not exceed."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
