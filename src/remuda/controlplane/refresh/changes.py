"""What of the pool's configuration changed: by the settings' names, with what was and what is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from remuda.domain.pool_config import PoolConfig
from remuda.domain.serialization import to_jsonable
from remuda.domain.thresholds import Lifetimes

#: What changes with every refresh and is not worth a line.
_BOOKKEEPING = frozenset({"applied_at", "revision", "tokens"})
#: Settings that are kept under a name of their own, or in another unit.
_CLASSES = "resource-class-config"
_RUNTIME = "max-runtime-min"
_SCRIPT = "pre-runner-script"

#: A setting's name, what was and what is. None where there is nothing to tell: a script may hold a secret, and so may
#: an address that is signed.
Change = tuple[str, tuple[Any, Any] | None]


def changes(before: PoolConfig, after: PoolConfig) -> dict[str, tuple[Any, Any] | None]:
    """In the order of the record."""
    found: dict[str, tuple[Any, Any] | None] = {}
    for item in fields(PoolConfig):
        was, now = getattr(before, item.name), getattr(after, item.name)
        if item.name not in _BOOKKEEPING and was != now:
            found.update(_changes(item.name, was, now))
    return found


def _changes(name: str, was: Any, now: Any) -> Iterator[Change]:
    if isinstance(was, Lifetimes):
        yield from _lifetimes(was, now)
    elif isinstance(was, Mapping):
        yield from _launch(was, now)
    elif name == "classes":
        old, new = (
            {item.name: {"cpu": item.cpu, "mmem": item.memory_mib} for item in classes} for classes in (was, now)
        )
        yield _CLASSES, (_without(old, new), _without(new, old))
    else:
        yield _setting(name), (to_jsonable(was), to_jsonable(now))


def _lifetimes(was: Lifetimes, now: Lifetimes) -> Iterator[Change]:
    for part in fields(Lifetimes):
        old, new = getattr(was, part.name), getattr(now, part.name)
        if old == new:
            continue
        if part.name == "max_runtime_s":
            yield _RUNTIME, (old / 60, new / 60)
        else:
            yield _setting(part.name), (old, new)


def _launch(was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Change]:
    for name in sorted({**was, **now}):
        old, new = was.get(name), now.get(name)
        if old != new:
            yield _setting(name), None if name == _SCRIPT or name.endswith("-url") else (old, new)


def _setting(name: str) -> str:
    """As the user writes it: seconds are `-sec` there."""
    known = name.replace("_", "-")
    return f"{known}ec" if known.endswith("-s") else known


def _without(classes: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    return {name: size for name, size in classes.items() if others.get(name) != size}
