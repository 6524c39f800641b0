"""What a sweep records for the next sweep and for the views: anomalies, and what GitHub answered.

An anomaly counts only if it lasts, because the lists of EC2 and GitHub lag behind the records. Example: a sweep at
12:00 finds no machine for an instance, and records the anomaly `missing` with this time. The sweep at 12:01 finds none
either, and ends the instance. If it finds the machine, it records no anomaly, and the next one begins with a new time.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import cached_property

from remuda.domain.demand import MAX_TEXT, RepositoryQueue
from remuda.domain.errors import UserError
from remuda.domain.text import truncate
from remuda.domain.timestamps import to_milliseconds


class AnomalyKind(StrEnum):
    """What an anomaly is. The comments say what its subject is."""

    #: An instance whose machine is in no list.
    MISSING = "missing"
    #: The name of a runner that is registered without a record and a machine.
    STALE_REGISTRATION = "stale-registration"
    #: An instance of a runner set whose only job has ended without a listener that has recorded it.
    SPENT = "spent"
    #: An instance of a runner set with a job that no listener has recorded.
    UNBOUND_JOB = "unbound-job"
    #: An instance whose job its maximum runtime ends soon.
    EXPIRES_SOON = "expires-soon"
    #: A resource class with more pool messages than idle instances.
    SURPLUS_MESSAGES = "surplus-messages"
    #: A runner set for which GitHub counts jobs that wait, and no known job waits.
    DISAGREEMENT = "disagreement"


@dataclass(frozen=True, kw_only=True, slots=True)
class Anomaly:
    kind: AnomalyKind
    subject: str
    #: Assignment of the instance; 0 if the anomaly is none of an assignment.
    epoch: int = 0
    first_seen_at: datetime

    @property
    def key(self) -> tuple[AnomalyKind, str, int]:
        """What two sweeps see as the same anomaly."""
        return self.kind, self.subject, self.epoch


@dataclass(frozen=True, kw_only=True, slots=True)
class RunAnswer:
    """What GitHub last said about a workflow run that holds instances."""

    #: As owner/name in lower case.
    repository: str
    run_id: str
    #: None if it was not asked yet.
    asked_at: datetime | None = None
    #: Of GitHub's last answer that the run has not ended, or empty.
    etag: str = ""
    #: The attempt that had ended, and when a sweep first read that; 0 and None if the run has not ended.
    ended_attempt: int = 0
    ended_at: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class UnreadableRepository:
    """A repository that the credential may not read."""

    #: As owner/name in lower case.
    repository: str
    reason: str
    #: When GitHub refused it last.
    at: datetime

    def __post_init__(self) -> None:
        object.__setattr__(self, "repository", truncate(self.repository, MAX_TEXT))
        object.__setattr__(self, "reason", truncate(self.reason, MAX_TEXT))

    @classmethod
    def after(cls, error: UserError, repository: str, *, now: datetime) -> UnreadableRepository:
        return cls(repository=repository, reason=error.describe(MAX_TEXT), at=to_milliseconds(now))


@dataclass(frozen=True, kw_only=True, slots=True)
class EmptyRunList:
    """An answer of GitHub without runs. While it is unchanged, the next audit need not read it again."""

    repository: str
    #: Of the runs that were asked for.
    status: str
    etag: str


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueAudit:
    """What the audits of GitHub's queues have found: each reads as many repositories as its calls suffice for."""

    #: Time of the last audit; None if there was none.
    at: datetime | None = None
    queues: tuple[RepositoryQueue, ...] = ()
    unreadable: tuple[UnreadableRepository, ...] = ()
    empty_lists: tuple[EmptyRunList, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """The record of the last sweep. Each sweep replaces it."""

    #: When the next sweep must have run; None if there was no sweep.
    next_due_at: datetime | None = None
    anomalies: tuple[Anomaly, ...] = ()
    runs: tuple[RunAnswer, ...] = ()
    #: Repositories whose runs cannot be read.
    unreadable: tuple[UnreadableRepository, ...] = ()
    audit: QueueAudit = QueueAudit()

    @cached_property
    def _first_seen(self) -> dict[tuple[AnomalyKind, str, int], datetime]:
        return {item.key: item.first_seen_at for item in self.anomalies}

    def first_seen(self, kind: AnomalyKind, subject: str, epoch: int = 0) -> datetime | None:
        """When an anomaly was first seen; None if the last sweep has not seen it."""
        return self._first_seen.get((kind, subject, epoch))

    def sighting(self, kind: AnomalyKind, subject: str, epoch: int = 0, *, now: datetime) -> Anomaly:
        """An anomaly that is seen now, with the time when it was first seen."""
        since = self.first_seen(kind, subject, epoch) or to_milliseconds(now)
        return Anomaly(kind=kind, subject=subject, epoch=epoch, first_seen_at=since)
