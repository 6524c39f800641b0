"""Domain records as plain documents (JSON types, camelCase keys) and back.

Documents come from stores and queues that others can write to: parsing checks every field and raises `ValueError`
with the field's name, never with its value, which may be a secret or hostile. Unknown keys are ignored, so that a
newer version may add some.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from datetime import datetime
from enum import Enum
from functools import cache
from typing import Any, TypeVar

from remuda.domain import timestamps

T = TypeVar("T")


def camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)


def plain(value: Any) -> Any:
    """One value as JSON types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_document(value)
    if isinstance(value, datetime):
        return timestamps.to_text(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list | frozenset):
        return [plain(item) for item in value]
    return value


def to_document(record: Any) -> dict[str, Any]:
    return {camel(field.name): plain(getattr(record, field.name)) for field in dataclasses.fields(record)}


def from_document(cls: type[T], document: Mapping[str, Any]) -> T:
    if not isinstance(document, Mapping):
        raise ValueError(f"{cls.__name__} must be an object, not {type(document).__name__}")
    values: dict[str, Any] = {}
    for name, kind, required in _fields(typing.cast("Any", cls)):
        key = camel(name)
        if key not in document:
            if required:
                raise ValueError(f"{cls.__name__} lacks {key}")
            continue
        values[name] = parse(kind, document[key], f"{cls.__name__}.{key}")
    return cls(**values)


@cache
def _fields(cls: Any) -> tuple[tuple[str, Any, bool], ...]:
    hints = typing.get_type_hints(cls)
    return tuple(
        (
            field.name,
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(cls)
    )


def parse(kind: Any, value: Any, where: str) -> Any:
    """A JSON value as the type that an annotation names."""
    origin = typing.get_origin(kind)
    if origin in {types.UnionType, typing.Union}:
        return _parse_optional(kind, value, where)
    if origin is tuple:
        return _parse_tuple(kind, value, where)
    if origin in {Mapping, dict}:
        return _parse_mapping(kind, value, where)
    if dataclasses.is_dataclass(kind):
        return from_document(typing.cast("type[Any]", kind), value)
    if kind is datetime:
        return _parse_time(value, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return _parse_enum(kind, value, where)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    return _typed(kind, value, where)


def _parse_optional(kind: Any, value: Any, where: str) -> Any:
    if value is None:
        return None
    (inner,) = (arg for arg in typing.get_args(kind) if arg is not type(None))
    return parse(inner, value, where)


def _parse_tuple(kind: Any, value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where} must be a list, not {type(value).__name__}")
    return tuple(parse(typing.get_args(kind)[0], item, where) for item in value)


def _parse_mapping(kind: Any, value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be an object, not {type(value).__name__}")
    inner = typing.get_args(kind)[1]
    return {_typed(str, key, where): parse(inner, item, f"{where}.{key}") for key, item in value.items()}


def _parse_time(value: Any, where: str) -> datetime:
    try:
        return timestamps.from_text(_typed(str, value, where))
    except ValueError:
        raise ValueError(f"{where} is not a time of the form 2025-05-31T12:00:00.000Z") from None


def _parse_enum(kind: type[Enum], value: Any, where: str) -> Enum:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(str(member.value) for member in kind)
        raise ValueError(f"{where} is not one of {known}") from None


def _typed(kind: Any, value: Any, where: str) -> Any:
    if kind is not bool and isinstance(value, bool):
        raise ValueError(f"{where} must be {kind.__name__}, not bool")
    if not isinstance(value, kind):
        raise ValueError(f"{where} must be {kind.__name__}, not {type(value).__name__}")
    return value
