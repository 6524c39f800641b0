"""CloudWatch's embedded metric format (EMF): JSON log lines that CloudWatch also records as metrics.

CloudWatch charges per metric and combination of dimensions, so the only dimensions are pool and command.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

NAMESPACE = "Remuda"
#: CloudWatch's limits: metrics per line, and characters of a dimension's value.
MAX_METRICS = 100
MAX_DIMENSION_LENGTH = 1_024
#: Largest number that CloudWatch accepts. The comparison also excludes NaN.
MAX_NUMBER = 2.0**360
UNKNOWN = "unknown"


class MetricUnit(StrEnum):
    COUNT = "Count"
    SECONDS = "Seconds"


@dataclass(frozen=True, slots=True)
class Measurement:
    value: float
    unit: MetricUnit = MetricUnit.COUNT


def emf_line(
    measures: Mapping[str, Measurement],
    *,
    at: datetime,
    pool: str,
    command: str,
    facts: Mapping[str, str] | None = None,
) -> str:
    """Build one line. `facts` appear in the log only and do not become metrics."""
    dimensions = {"Pool": _dimension(pool), "Command": _dimension(command)}
    valid = {name: each for name, each in list(measures.items())[:MAX_METRICS] if abs(each.value) <= MAX_NUMBER}
    directive = {
        "Namespace": NAMESPACE,
        "Dimensions": [list(dimensions)],
        "Metrics": [{"Name": name, "Unit": each.unit.value} for name, each in valid.items()],
    }
    return json.dumps(
        {
            **(facts or {}),
            "_aws": {"Timestamp": round(at.timestamp() * 1_000), "CloudWatchMetrics": [directive]},
            **dimensions,
            **{name: each.value for name, each in valid.items()},
        }
    )


def _dimension(value: str) -> str:
    """Reduce to printable ASCII. CloudWatch ignores a line with any other dimension value."""
    value = "".join(letter for letter in value if letter.isascii() and letter.isprintable()).strip().lstrip(":")
    return value[:MAX_DIMENSION_LENGTH].strip() or UNKNOWN


def pascal_case(words: str) -> str:
    """Convert `spot-notice` to `SpotNotice`, as in CloudWatch's metric names."""
    return "".join(word.capitalize() for word in words.replace("_", "-").split("-"))
