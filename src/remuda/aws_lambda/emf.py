"""CloudWatch's embedded metric format: a line of log that CloudWatch also reads as metrics.

CloudWatch asks for money by metric, and a metric is one for each set of dimensions: pool and command are all there are,
and a value that says nothing is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

NAMESPACE = "Remuda"
#: What CloudWatch takes at most in one line, and in one dimension's value.
MAX_METRICS = 100
MAX_VALUE = 1_024
#: The largest number that CloudWatch takes; what is no number is larger.
MAX_NUMBER = 2.0**360
UNKNOWN = "unknown"


class Unit(StrEnum):
    COUNT = "Count"
    SECONDS = "Seconds"


@dataclass(frozen=True, slots=True)
class Measure:
    value: float
    unit: Unit = Unit.COUNT


def emf_line(
    measures: Mapping[str, Measure], *, at: datetime, pool: str, command: str, facts: Mapping[str, str] | None = None
) -> str:
    """`facts` are in the log only: they may be of any number."""
    dimensions = {"Pool": _dimension(pool), "Command": _dimension(command)}
    told = {name: each for name, each in list(measures.items())[:MAX_METRICS] if abs(each.value) <= MAX_NUMBER}
    directive = {
        "Namespace": NAMESPACE,
        "Dimensions": [list(dimensions)],
        "Metrics": [{"Name": name, "Unit": each.unit.value} for name, each in told.items()],
    }
    return json.dumps(
        {
            **(facts or {}),
            "_aws": {"Timestamp": round(at.timestamp() * 1_000), "CloudWatchMetrics": [directive]},
            **dimensions,
            **{name: each.value for name, each in told.items()},
        }
    )


def _dimension(value: str) -> str:
    """As CloudWatch takes it: ASCII that can be seen. A line with another value would be no metric at all."""
    kept = "".join(letter for letter in value if letter.isascii() and letter.isprintable()).strip().lstrip(":")
    return kept[:MAX_VALUE].strip() or UNKNOWN


def camel(words: str) -> str:
    """As CloudWatch's own metrics are named: `spot-notice` becomes `SpotNotice`."""
    return "".join(word.capitalize() for word in words.replace("_", "-").split("-"))
