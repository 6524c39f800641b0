"""What a refresh applied, a line each, for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def applied_lines(document: Mapping[str, Any]) -> list[str]:
    """From the same document as `--json`: settings with what they were and are."""
    return [_applied(name, document["changes"].get(name)) for name in document["applied"]]


def _applied(name: str, values: Sequence[Any] | None) -> str:
    return f"{name}: {' -> '.join(map(_value, values))}" if values else name


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        sizes = (f"{name} ({size['cpu']} vCPU, {size['mmem']} MiB)" for name, size in value.items())
        return ", ".join(sizes) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return "not set" if value is None else str(value)
