"""Parts that all Lambda functions share: settings, event log, time limit and metrics.

The settings come from the function's environment (`REMUDA_…`) and from the Systems Manager parameter that it names,
because Lambda limits the environment to 4 KB. Each invocation ends with one line of metrics in CloudWatch's embedded
metric format (EMF): a JSON log line that CloudWatch also records as metrics. CloudWatch charges per metric and
combination of dimensions, so the only dimensions are pool and command.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from remuda.adapters.aws.cloudwatch import NAMESPACE
from remuda.cli.output import record_line
from remuda.domain.errors import RemudaError, TimedOut
from remuda.domain.instance import RetireReason
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock
from remuda.ports.event_log import EventLog

if TYPE_CHECKING:
    from remuda.adapters.aws.clients import AwsClients

T = TypeVar("T")

#: Seconds before the function's timeout at which its work is cancelled, to close connections and write pending data.
RESERVE_S = 5.0
#: Variable with the name of the Systems Manager parameter that contains the settings.
SETTINGS_VARIABLE = "REMUDA_SETTINGS_PARAMETER"
_VARIABLE_LINE = re.compile(r"^(REMUDA_[A-Z0-9_]+)=", re.MULTILINE)
GITHUB = "github"
#: CloudWatch's limits: metrics per line, and characters of a dimension's value.
MAX_METRICS = 100
MAX_DIMENSION_LENGTH = 1_024
#: Largest number that CloudWatch accepts. The comparison also excludes NaN.
MAX_NUMBER = 2.0**360
UNKNOWN = "unknown"


class LambdaContext(Protocol):
    """The part of Lambda's context object that is used."""

    aws_request_id: str

    def get_remaining_time_in_millis(self) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class LambdaOutcome:
    #: The same document as `--json` on the command line.
    document: Mapping[str, Any]
    #: One message per part that failed.
    errors: tuple[str, ...] = ()
    #: Metrics of the command, by name.
    counts: Mapping[str, int] = field(default_factory=dict)


class LambdaEventLog:
    """Writes one JSON line per event to stdout, like `--log-format json`."""

    def __init__(self, clock: Clock, request_id: str) -> None:
        self._clock = clock
        self.facts = {"request": request_id}
        #: Number of retirements per reason.
        self.retirements: Counter[str] = Counter()

    def record(self, action: str, why: str = "", **facts: Any) -> None:
        if reason := facts.get("retire_reason"):
            self.retirements[reason if isinstance(reason, RetireReason) else "other"] += 1
        write_line(record_line(self._clock.now(), action, why, {**facts, **self.facts}))


def write_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def read_environment(environ: Mapping[str, str], clients: AwsClients | None = None) -> Mapping[str, str]:
    """The function's environment, and the variables of the parameter that it does not set itself."""
    name = environ.get(SETTINGS_VARIABLE)
    if not name:
        return dict(environ)
    from remuda.adapters.aws import clients as aws_clients  # noqa: PLC0415 - slow to import

    if clients is None:
        async with aws_clients.AwsClients() as opened:
            return await read_environment(environ, opened)
    text = await aws_clients.read_parameter(clients, name)
    return {**parse_variables(text), **{key: value for key, value in environ.items() if value}}


def parse_variables(text: str) -> dict[str, str]:
    """Variables from lines of `REMUDA_NAME=value`. Other lines continue a value."""
    _, *parts = _VARIABLE_LINE.split(text)
    return {name: value.rstrip("\n") for name, value in zip(parts[::2], parts[1::2], strict=True)}


class InvocationMetrics:
    """Metrics of one invocation, also if it fails."""

    def __init__(self, clock: Clock, event_log: LambdaEventLog) -> None:
        self._clock = clock
        self._event_log = event_log
        self._started = clock.monotonic()
        self.calls = CallCounter()
        self.command = ""
        self.pool = ""
        #: None if the command did not complete.
        self.outcome: LambdaOutcome | None = None

    def line(self) -> str:
        outcome, retirements = self.outcome, self._event_log.retirements
        github = [counts for (service, _), counts in self.calls.outcomes().items() if service == GITHUB]
        counts = {
            "Errors": 1 if outcome is None else len(outcome.errors),
            "Failed": int(outcome is None),
            "GithubCalls": sum(ok + failed for ok, failed in github),
            "GithubCallErrors": sum(failed for _, failed in github),
            **(outcome.counts if outcome is not None else {}),
            **({"Retired": retirements.total()} if retirements else {}),
            **{f"Retired{pascal_case(reason)}": count for reason, count in sorted(retirements.items())},
        }
        measures = {"Duration": Measurement(round(self._clock.monotonic() - self._started, 3), MetricUnit.SECONDS)}
        measures |= {name: Measurement(count) for name, count in counts.items()}
        return emf_line(
            measures, at=self._clock.now(), pool=self.pool, command=self.command, facts=self._event_log.facts
        )


async def run_with_timeout(limit_s: float, command: str, work: Awaitable[T], *, fix: str) -> T:
    """Cancel the work before Lambda's own timeout. It can be cancelled at any await."""
    try:
        async with asyncio.timeout(max(0.0, limit_s)) as limit:
            return await work
    except TimeoutError:
        if not limit.expired():
            raise
        error = TimedOut(f"{command} was cancelled after {max(0.0, limit_s):.0f} s, before the function's timeout")
        error.fix = fix
        raise error from None


def log_failure(event_log: EventLog, error: RemudaError) -> RemudaError:
    """Log the error and put its fix into its message, because Lambda shows only that."""
    message = " ".join(f"{error.message}; {error.fix}".rstrip("; ").splitlines())
    event_log.record("failed", message, kind=type(error).__name__)
    error.args = (message,)
    return error


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
