"""Workflow runs that ended on GitHub and were not released: what the sweeps remember about them, and the warnings.

A run releases its instances by a job of its workflow. A workflow without such a job would hold them until its
max-runtime-min is over. So each sweep asks GitHub about the runs that hold instances. Its answers are stored among the
anomalies of the sweeps, with a time: an `EndedRun` since when the run has ended, an `AskedRun` and an
`UnreadableRepository` when GitHub was last asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from datetime import datetime, timedelta
from typing import ClassVar, Self

from remuda.domain.provision import Provision, ProvisionEnding, ProvisionStatus
from remuda.domain.text import truncate

#: Maximum characters of a stored text.
MAX_TEXT = 200
#: What the author of the workflow must add, in one line.
RELEASE_JOB = "add a release job with if: always() to its workflow"


@dataclass(frozen=True, slots=True)
class _Anomaly:
    PREFIX: ClassVar[str]

    #: As owner/name in lower case.
    repository: str

    def anomaly(self) -> str:
        """Its name among the anomalies of the sweeps."""
        return self.PREFIX + json.dumps(astuple(self), separators=(",", ":"))

    @classmethod
    def parse(cls, anomaly: str) -> Self | None:
        """None if the anomaly is another, or of another version."""
        if not anomaly.startswith(cls.PREFIX):
            return None
        try:
            found = cls(*json.loads(anomaly.removeprefix(cls.PREFIX)))
        except (ValueError, TypeError, RecursionError):
            return None
        types = [field.type for field in fields(cls)]
        return found if [type(value).__name__ for value in astuple(found)] == types else None

    @classmethod
    def find(cls, first_seen: Mapping[str, datetime]) -> dict[Self, datetime]:
        """All anomalies of this kind with their times."""
        return {found: at for name, at in first_seen.items() if (found := cls.parse(name)) is not None}


@dataclass(frozen=True, slots=True)
class EndedRun(_Anomaly):
    """A run whose attempts up to this one have ended on GitHub, and that still held instances."""

    PREFIX = "ended-run:"

    run_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class AskedRun(_Anomaly):
    """A run about which GitHub was asked, whatever it answered."""

    PREFIX = "asked-run:"

    run_id: str
    #: Of GitHub's last answer that the run has not ended, or empty.
    etag: str


@dataclass(frozen=True, slots=True)
class UnreadableRepository(_Anomaly):
    """A repository whose runs the credential may not read."""

    PREFIX = "unreadable-runs:"

    reason: str

    @classmethod
    def of(cls, repository: str, reason: str) -> UnreadableRepository:
        return cls(repository, truncate(reason, MAX_TEXT))

    def __str__(self) -> str:
        return (
            f"whether the runs of {self.repository} have ended cannot be read, so runs without a release keep their "
            f"instances until max-runtime-min: {self.reason}"
        )


def is_about_runs(anomaly: str) -> bool:
    """Whether the anomaly is one of this module."""
    return anomaly.startswith((EndedRun.PREFIX, AskedRun.PREFIX, UnreadableRepository.PREFIX))


def describe_unreleased(ended: EndedRun, *, waited_s: float, held: int) -> str:
    """The sentence about a run that a sweep releases."""
    count = f"{held} instance{'' if held == 1 else 's'}"
    return (
        f"run {ended.run_id} of {ended.repository} ended {waited_s / 60:.0f} min ago and was not released: its {count} "
        f"return to the pool; {RELEASE_JOB}"
    )


def unreleased_warnings(
    first_seen: Mapping[str, datetime], provisions: Sequence[Provision], *, grace_s: float, now: datetime
) -> Iterator[tuple[str, str]]:
    """Run id and sentence of each ended run that still holds instances, in the time that its release job has."""
    for ended, since in EndedRun.find(first_seen).items():
        of_run = [item for item in provisions if item.run_id == ended.run_id and not item.runner_set]
        if of_run and all(item.status is ProvisionStatus.RELEASED for item in of_run):
            continue
        left_s = (since + timedelta(seconds=grace_s) - now).total_seconds()
        when = f"in {left_s / 60:.0f} min" if left_s >= 60 else "with the next sweep"
        yield (
            ended.run_id,
            f"its run has ended and still holds its instances: refresh releases them {when}; {RELEASE_JOB}",
        )


def unreleased_runs(provisions: Sequence[Provision]) -> list[Provision]:
    """Provisions of runs that ended without a release."""
    without = {ProvisionEnding.UNRELEASED, ProvisionEnding.EXPIRED}
    return [item for item in provisions if item.ending in without and not item.runner_set]
