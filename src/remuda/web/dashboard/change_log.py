"""Change log: versioned JSON items, from which a client gets the changes since the version that it knows.

There is no queue per client. A slow client asks later and gets the newest text of each changed item once. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

#: Number of removed items to remember. A client whose version is older than that starts again from a snapshot.
MAX_TOMBSTONES = 5_000

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Item:
    version: int
    #: JSON text, encoded once for all clients; None if the item was removed.
    text: str | None


class ChangeLog:
    def __init__(self, *, process_id: str) -> None:
        #: Part of every tag: distinguishes the versions of this process from those of another.
        self.process_id = process_id
        self.version = 0
        # In the order of their last change.
        self._items: dict[Key, _Item] = {}
        self._tombstones = 0
        self._oldest_version = 0
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

    def commit(self) -> bool:
        """Turn the changes since the last commit into one version. Return whether there were any."""
        if not self._dirty:
            return False
        self._dirty = False
        self.version += 1
        self._prune_tombstones()
        return True

    @property
    def tag(self) -> str:
        return f"{self.process_id}-{self.version}"

    def version_of(self, tag: str) -> int | None:
        """Return the version that a tag names, or None if the client needs a snapshot."""
        process_id, _, number = tag.rpartition("-")
        if process_id != self.process_id or not (number.isascii() and number.isdigit()) or len(number) > 15:
            return None
        version = int(number)
        return version if self._oldest_version <= version <= self.version else None

    def snapshot(self) -> str:
        current = [(key, item.text) for key, item in self._items.items() if item.text is not None]
        return self._document(current)

    def changes(self, since: int) -> str:
        """Return the items changed after version `since`, by kind and name; removed items are null."""
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
        self._tombstones += (text is None) - (before is not None and before.text is None)
        self._items[key] = _Item(self.version + 1, text)
        self._dirty = True

    def _prune_tombstones(self) -> None:
        if self._tombstones <= MAX_TOMBSTONES:
            return
        removed = [key for key, item in self._items.items() if item.text is None]
        oldest = removed[: self._tombstones - MAX_TOMBSTONES // 2]
        for key in oldest:
            self._oldest_version = self._items.pop(key).version
        self._tombstones -= len(oldest)
