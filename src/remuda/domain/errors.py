"""The whole error tree: an error says what the caller can do, not where it came from.

RemudaError
├── UserError           fix the input, the credential or the permission       exit 2
├── Conflict            lost a race or the record moved on: choose another    exit 4
├── NotFound            already gone: success for deletes                     exit 4
├── CapacityError       next type, next zone, or later                        exit 3
├── Unavailable         back off and try again                                exit 4
│   ├── Throttled       as above, after `retry_after_s`
│   ├── TimedOut        as above; what was asked for may have happened
│   └── Unreadable      a record cannot be parsed; it is named, the others are there
├── Partial             some of it was done, the rest is named                exit 4
├── Interrupted         stopped by a person, cleaned up                       exit 130
└── InvariantViolated   a bug: stop, with its history                         exit 70
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remuda.domain.text import truncate

#: How much of an error is told: what others said is part of many.
MAX_MESSAGE = 10_000


class RemudaError(Exception):
    """Something went wrong in Remuda."""

    exit_code = 70

    def __init__(self, message: str = "", *, fix: str = "") -> None:
        super().__init__(truncate(message, MAX_MESSAGE) or (type(self).__doc__ or "").strip())
        #: What the reader can do about it, as one sentence.
        self.fix = truncate(fix, MAX_MESSAGE)

    @property
    def message(self) -> str:
        return str(self.args[0])


class UserError(RemudaError):
    """The input cannot be used."""

    exit_code = 2

    def __init__(self, message: str = "", *, field: str = "", fix: str = "") -> None:
        super().__init__(message, fix=fix)
        #: The field as the user wrote it: a flag, a variable or a key of the file.
        self.field = field


class Conflict(RemudaError):
    """The record is not what the write expected."""

    exit_code = 4

    def __init__(self, message: str = "", *, current: Any = None) -> None:
        super().__init__(message)
        #: The record that won, or None where there is none.
        self.current = current


class NotFound(RemudaError):
    """It does not exist (any more)."""

    exit_code = 4


class CapacityError(RemudaError):
    """There is no capacity for what was asked."""

    exit_code = 3


class Unavailable(RemudaError):
    """A service cannot be reached or does not answer as it should."""

    exit_code = 4


class Throttled(Unavailable):
    """A service asks for fewer calls."""

    def __init__(self, message: str = "", *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        #: How long the service wants to be left alone.
        self.retry_after_s = retry_after_s


class TimedOut(Unavailable):
    """No answer in time; what was asked for may have happened."""


class Unreadable(Unavailable):
    """Records cannot be parsed."""

    #: How many of them the message names.
    MOST = 5

    def __init__(self, where: str, unreadable: Mapping[str, str], *, records: Mapping[str, Any] | None = None) -> None:
        told = [f"the record of {name} in {where} cannot be read: {why}" for name, why in unreadable.items()]
        more = [f"and {len(told) - self.MOST} more"] if len(told) > self.MOST else []
        super().__init__("; ".join(told[: self.MOST] + more), fix="mend it, or remove it by hand")
        #: Why, by name. They are there: nobody may act as if they were not.
        self.unreadable = dict(unreadable)
        #: Those of the same read that can be parsed, by name.
        self.records = dict(records or {})


class Partial(RemudaError):
    """Some of it could not be done."""

    exit_code = 4


class Interrupted(RemudaError):
    """Interrupted."""

    exit_code = 130


class InvariantViolated(RemudaError):
    """A rule that must always hold was broken: a bug."""

    exit_code = 70

    def __init__(self, message: str = "", *, history: Sequence[Any] = ()) -> None:
        super().__init__(message)
        #: What led here, oldest first.
        self.history = tuple(history)


class IllegalTransition(InvariantViolated):
    """The transition table has no row for this."""
