"""Error classes. The class tells the caller what to do, not which component failed.

RemudaError
├── UserError           fix the input, the credential or the permission       exit 2
├── Conflict            another process changed the record: choose another    exit 4
├── NotFound            it does not exist: success for deletes                exit 4
├── CapacityError       try another type or zone, or later                    exit 3
├── Unavailable         back off and retry                                    exit 4
│   ├── Throttled       retry after `retry_after_s`
│   ├── DiskFull        free space: processes that go on retry, a command ends     exit 2
│   ├── TimedOut        retry; the request may have been applied
│   └── Unreadable      records cannot be parsed; lists their names and the other records
├── Partial             some of the work failed                               exit 4
├── Interrupted         interrupted by a person, after cleaning up            exit 130
└── InvariantViolated   a bug: stop                                           exit 70
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remuda.domain.text import truncate

#: Maximum characters of a message. Many contain responses of other services.
MAX_MESSAGE = 10_000


class RemudaError(Exception):
    """Something went wrong in Remuda."""

    exit_code = 70

    def __init__(self, message: str = "", *, fix: str = "") -> None:
        super().__init__(truncate(message, MAX_MESSAGE) or (type(self).__doc__ or "").strip())
        #: What the reader can do about it, as an imperative.
        self.fix = truncate(fix, MAX_MESSAGE)

    @property
    def message(self) -> str:
        return str(self.args[0])

    def describe(self, limit: int = MAX_MESSAGE) -> str:
        """The message and the fix in one line of at most `limit` characters. A message that is too long is cut.

        Example: "none of 2 spot instances could be launched: TagPolicyViolation: …; let the tag policy accept the tag".
        """
        if not self.fix:
            return self.message[:limit]
        return f"{self.message[: max(0, limit - len(self.fix) - 2)]}; {self.fix}"[:limit]


class UserError(RemudaError):
    """The input cannot be used."""

    exit_code = 2

    def __init__(self, message: str = "", *, field: str = "", fix: str = "", details: Sequence[str] = ()) -> None:
        super().__init__(message, fix=fix)
        #: The input as the user wrote it: a flag, an environment variable or a key of the file.
        self.field = field
        #: The problems one by one, if there are several.
        self.details = tuple(truncate(detail, MAX_MESSAGE) for detail in details)


class Conflict(RemudaError):
    """The stored record does not meet the condition of a write."""

    exit_code = 4

    def __init__(self, message: str = "", *, current: Any = None, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        #: The stored record, or None if none exists.
        self.current = current


class NotFound(RemudaError):
    """It does not exist."""

    exit_code = 4


class CapacityError(RemudaError):
    """There is no capacity for the request."""

    exit_code = 3


class Unavailable(RemudaError):
    """A service is unreachable or responds unexpectedly."""

    exit_code = 4


class Throttled(Unavailable):
    """A service limits the rate of requests."""

    def __init__(self, message: str = "", *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        #: Seconds to wait before the next request.
        self.retry_after_s = retry_after_s


class DiskFull(Unavailable):
    """A disk of this computer is full. Nothing was written."""

    exit_code = 2


class TimedOut(Unavailable):
    """A request timed out; it may have been applied."""


class Unreadable(Unavailable):
    """Records cannot be parsed."""

    #: Maximum number of records that the message names.
    MAX_NAMED = 5

    def __init__(self, where: str, unreadable: Mapping[str, str], *, records: Mapping[str, Any] | None = None) -> None:
        messages = [f"the record of {name} in {where} cannot be read: {why}" for name, why in unreadable.items()]
        more = [f"and {len(messages) - self.MAX_NAMED} more"] if len(messages) > self.MAX_NAMED else []
        super().__init__("; ".join(messages[: self.MAX_NAMED] + more), fix="repair or remove the record by hand")
        #: Reasons by name. These records exist: callers must not treat them as missing.
        self.unreadable = dict(unreadable)
        #: The readable records of the same read, by name.
        self.records = dict(records or {})


class Partial(RemudaError):
    """Some of the work failed."""

    exit_code = 4


class Interrupted(RemudaError):
    """Interrupted."""

    exit_code = 130


class InvariantViolated(RemudaError):
    """An invariant was violated: a bug."""

    exit_code = 70

    def __init__(self, message: str = "", *, history: Sequence[Any] = ()) -> None:
        super().__init__(message)
        #: Records or events that led to it, oldest first.
        self.history = tuple(history)


class IllegalTransition(InvariantViolated):
    """The transition table does not allow this transition."""
