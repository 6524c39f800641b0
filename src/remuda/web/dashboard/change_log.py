"""What the page shows, as versioned items: whoever knows an earlier version gets what has changed since, merged.

There is no queue for a client: one that is slow asks later, and gets the newest state of each item once. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

#: So many removed items are remembered; who knows only older versions starts again from a snapshot.
TOMBSTONES = 5_000

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Item:
    version: int
    #: A JSON text, encoded once for all clients; None where the item was removed.
    text: str | None


class Board:
    def __init__(self, *, life: str) -> None:
        #: Tells the versions of one process from those of another.
        self.life = life
        self.version = 0
        # In the order of their last change.
        self._items: dict[Key, _Item] = {}
        self._removed = 0
        self._floor = 0
        self._dirty = False

    def put(self, kind: str, name: str, text: str) -> None:
        key = (kind, name)
        before = self._items.get(key)
        if before is None or before.text != text:
            self._set(key, text)

    def drop(self, kind: str, name: str) -> None:
        before = self._items.get((kind, name))
        if before is not None and before.text is not None:
            self._set((kind, name), None)

    def names(self, kind: str) -> list[str]:
        return [name for (each, name), item in self._items.items() if each == kind and item.text is not None]

    def commit(self) -> bool:
        """Make the changes one version. Whether there were any."""
        if not self._dirty:
            return False
        self._dirty = False
        self.version += 1
        self._forget()
        return True

    @property
    def tag(self) -> str:
        return f"{self.life}-{self.version}"

    def version_of(self, tag: str) -> int | None:
        """The version that a client has, or None where it cannot be continued from."""
        life, _, number = tag.rpartition("-")
        if life != self.life or not (number.isascii() and number.isdigit()) or len(number) > 15:
            return None
        version = int(number)
        return version if self._floor <= version <= self.version else None

    def snapshot(self) -> str:
        kept = [(key, item.text) for key, item in self._items.items() if item.text is not None]
        return self._document(kept)

    def changes(self, since: int) -> str:
        """What is different from an earlier version: items by kind and name, null where one was removed."""
        return self._document(self._newer(since))

    def _newer(self, since: int) -> Iterator[tuple[Key, str | None]]:
        for key in reversed(self._items):
            item = self._items[key]
            if item.version <= since:
                return
            yield key, item.text

    def _document(self, items: Iterable[tuple[Key, str | None]]) -> str:
        kinds: dict[str, list[str]] = {}
        for (kind, name), text in items:
            kinds.setdefault(kind, []).append(f"{json.dumps(name)}:{'null' if text is None else text}")
        parts = [f'"version":{self.version}', f'"tag":{json.dumps(self.tag)}']
        parts += [f"{json.dumps(kind)}:{{{','.join(texts)}}}" for kind, texts in kinds.items()]
        return f"{{{','.join(parts)}}}"

    def _set(self, key: Key, text: str | None) -> None:
        before = self._items.pop(key, None)
        self._removed += (text is None) - (before is not None and before.text is None)
        self._items[key] = _Item(self.version + 1, text)
        self._dirty = True

    def _forget(self) -> None:
        if self._removed <= TOMBSTONES:
            return
        oldest = [key for key, item in self._items.items() if item.text is None][: self._removed - TOMBSTONES // 2]
        for key in oldest:
            self._floor = self._items.pop(key).version
        self._removed -= len(oldest)
