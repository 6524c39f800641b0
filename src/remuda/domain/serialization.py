"""Conversion of domain records to JSON documents with camelCase keys, and back.

Other parties can write to the stores and queues that documents come from: parsing checks every field and raises
`ValueError` with the field's name, never with its value, which may be secret or hostile. Unknown keys are ignored, so
that newer versions may add some.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from enum import Enum
from functools import cache, partial
from typing import Any, TypeVar

from remuda.domain import timestamps
from remuda.domain.text import truncate

T = TypeVar("T")

#: Largest integer that every JSON parser and every store represents exactly.
MAX_INTEGER = 2**53 - 1
#: Range of accepted times. Adding any duration that a record may hold to them does not overflow.
EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
LATEST = datetime(9000, 1, 1, tzinfo=UTC)
#: Maximum characters of a key in an error message.
MAX_KEY = 80


@typing.runtime_checkable
class SelfChecking(typing.Protocol):
    """A record with conditions beyond its field types. They are checked when it is parsed."""

    def check(self) -> None:
        """Raise `ValueError` if the record is invalid. The message must not contain its values."""
        ...


def camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)


def document_key(field: dataclasses.Field[Any]) -> str:
    """The field's name in camelCase, unless its metadata names another key."""
    return str(field.metadata.get("key") or camel(field.name))


def to_jsonable(value: Any) -> Any:
    """Convert one value to JSON types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_document(value)
    if isinstance(value, datetime):
        return timestamps.to_text(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, tuple | list | frozenset):
        return [to_jsonable(item) for item in value]
    return value


def to_document(record: Any) -> dict[str, Any]:
    return {document_key(field): to_jsonable(getattr(record, field.name)) for field in dataclasses.fields(record)}


def from_document(cls: type[T], document: Mapping[str, Any]) -> T:
    if not isinstance(document, Mapping):
        raise ValueError(f"{cls.__name__} must be an object, not {type(document).__name__}")
    values: dict[str, Any] = {}
    for name, key, where, parser, required in _fields(typing.cast("Any", cls)):
        if key in document:
            values[name] = parser(document[key], where)
        elif required:
            raise ValueError(f"{cls.__name__} lacks {key}")
    record = cls(**values)
    if _is_checked(typing.cast("Any", cls)):
        typing.cast("SelfChecking", record).check()
    return record


@cache
def _is_checked(cls: type[Any]) -> bool:
    """Cached because `issubclass` with a protocol is slow, and stores return thousands of records."""
    return issubclass(cls, SelfChecking)


#: Converts a JSON value; the second argument names its place for errors.
_Parser = Callable[[Any, str], Any]


@cache
def _fields(cls: Any) -> tuple[tuple[str, str, str, _Parser, bool], ...]:
    hints = typing.get_type_hints(cls)
    return tuple(
        (
            field.name,
            document_key(field),
            f"{cls.__name__}.{document_key(field)}",
            _parser(hints[field.name]),
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(cls)
    )


def parse(kind: Any, value: Any, where: str) -> Any:
    """Convert a JSON value to the type of an annotation."""
    return _parser(kind)(value, where)


@cache
def _parser(kind: Any) -> _Parser:
    """Return the parser of an annotation. Cached because stores hold many records of few types."""
    origin = typing.get_origin(kind)
    if origin in {types.UnionType, typing.Union}:
        return _union_parser(kind)
    if origin is tuple:
        return _tuple_parser(kind)
    if origin in {Mapping, dict}:
        return _mapping_parser(kind)
    if dataclasses.is_dataclass(kind):
        return lambda value, _: from_document(typing.cast("type[Any]", kind), value)
    if kind is datetime:
        return _parse_time
    if isinstance(kind, type) and issubclass(kind, Enum):
        return partial(_parse_enum, kind, {member.value: member for member in kind})
    return _parse_float if kind is float else partial(_typed, kind)


def _union_parser(kind: Any) -> _Parser:
    args = typing.get_args(kind)
    members = [arg for arg in args if arg is not type(None)]
    inner = _parser(members[0]) if len(members) == 1 else _variant_parser(members)
    if len(members) == len(args):
        return inner
    return lambda value, where: None if value is None else inner(value, where)


def _variant_parser(members: Sequence[Any]) -> _Parser:
    """Parser of one of several dataclasses. The key of the first field of each tells which one a document holds."""
    parsers = {document_key(dataclasses.fields(member)[0]): _parser(member) for member in members}

    def parse_variant(value: Any, where: str) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be an object, not {type(value).__name__}")
        found = [parser for key, parser in parsers.items() if key in value]
        if len(found) != 1:
            raise ValueError(f"{where} must have exactly one of the keys {', '.join(parsers)}")
        return found[0](value, where)

    return parse_variant


def _tuple_parser(kind: Any) -> _Parser:
    inner = _parser(typing.get_args(kind)[0])

    def parse_tuple(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where} must be a list, not {type(value).__name__}")
        return tuple(inner(item, where) for item in value)

    return parse_tuple


def _mapping_parser(kind: Any) -> _Parser:
    inner = _parser(typing.get_args(kind)[1])

    def parse_mapping(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise ValueError(f"{where} must be an object, not {type(value).__name__}")
        return {
            _typed(str, key, where): inner(item, f"{where}.{truncate(key, MAX_KEY)}") for key, item in value.items()
        }

    return parse_mapping


def _parse_time(value: Any, where: str) -> datetime:
    try:
        at = timestamps.from_text(_typed(str, value, where))
    except ValueError:
        raise ValueError(f"{where} is not a time of the form 2025-05-31T12:00:00.000Z") from None
    if not EARLIEST <= at <= LATEST:
        raise ValueError(f"{where} is not between {EARLIEST.year} and {LATEST.year}")
    return at


def _parse_enum(kind: type[Enum], members: Mapping[Any, Enum], value: Any, where: str) -> Enum:
    # Unhashable values cannot be looked up and are not members.
    member = members.get(value) if isinstance(value, str | int) else None
    if member is None:
        known = ", ".join(str(member.value) for member in kind)
        raise ValueError(f"{where} is not one of {known}")
    return member


def _parse_float(value: Any, where: str) -> float:
    number = _typed(int if isinstance(value, int) else float, value, where)
    if not math.isfinite(number):
        raise ValueError(f"{where} must be finite")
    return float(number)


def _typed(kind: Any, value: Any, where: str) -> Any:
    if kind is not bool and isinstance(value, bool):
        raise ValueError(f"{where} must be {kind.__name__}, not bool")
    if not isinstance(value, kind):
        raise ValueError(f"{where} must be {kind.__name__}, not {type(value).__name__}")
    if kind is int and abs(value) > MAX_INTEGER:
        raise ValueError(f"{where} is larger than {MAX_INTEGER}")
    if kind is str and not _is_text(value):
        raise ValueError(f"{where} contains a lone surrogate")
    return value


def _is_text(value: str) -> bool:
    """Whether a string can be encoded: JSON can contain lone surrogates."""
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError:
        return False
    return True
