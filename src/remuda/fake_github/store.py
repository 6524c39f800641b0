"""Write-through of the state's documents to SQLite, so that registrations and jobs survive a kill."""

import json
import pathlib
import sqlite3
from collections.abc import Iterator, Sequence

from remuda.fake_github.state import Document, StoredChange


class DocumentStore:
    def __init__(self, path: pathlib.Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        path.chmod(0o600)
        # NORMAL is safe against a killed process; only a power cut could lose the last writes.
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS document"
            " (kind TEXT NOT NULL, key TEXT NOT NULL, body TEXT NOT NULL, PRIMARY KEY (kind, key)) WITHOUT ROWID"
        )

    def read(self) -> Iterator[tuple[str, str, Document]]:
        for kind, key, body in self._db.execute("SELECT kind, key, body FROM document"):
            yield kind, key, json.loads(body)

    def write(self, changes: Sequence[StoredChange]) -> None:
        """All or nothing."""
        if not changes:
            return
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany(
            "DELETE FROM document WHERE kind = ? AND key = ?",
            [(kind, key) for kind, key, document in changes if document is None],
        )
        self._db.executemany(
            "INSERT OR REPLACE INTO document (kind, key, body) VALUES (?, ?, ?)",
            [(kind, key, json.dumps(document)) for kind, key, document in changes if document is not None],
        )
        self._db.execute("COMMIT")

    def close(self) -> None:
        self._db.close()
