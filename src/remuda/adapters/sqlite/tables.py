"""SQL statements on the store's tables: functions of a connection, called in its thread.

Functions named `write_…` must be called inside a transaction.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from enum import StrEnum
from typing import Any

from remuda.adapters.sqlite.documents import encode, time_text
from remuda.domain.demand import JobRecord
from remuda.domain.holder import Holder
from remuda.domain.instance import HistoryEntry, Instance, State
from remuda.domain.provision import Provision, ProvisionStatus
from remuda.domain.signals import Report
from remuda.ports.store import HISTORY_LIMIT


class RecordKind(StrEnum):
    """The kinds of records for which a process can wait."""

    CONTROL = "control"
    REPORT = "report"


Key = tuple[RecordKind, str]

_BY_ID = {
    RecordKind.CONTROL: "SELECT doc FROM instances WHERE instance_id = ?",
    RecordKind.REPORT: "SELECT doc FROM reports WHERE instance_id = ?",
}
_BY_IDS = {
    RecordKind.CONTROL: "SELECT instance_id, doc FROM instances WHERE instance_id IN (SELECT value FROM json_each(?))",
    RecordKind.REPORT: "SELECT instance_id, doc FROM reports WHERE instance_id IN (SELECT value FROM json_each(?))",
}
_BY_KEYS = """
SELECT 'control', instance_id, doc FROM instances WHERE instance_id IN (SELECT value FROM json_each(?))
UNION ALL
SELECT 'report', instance_id, doc FROM reports WHERE instance_id IN (SELECT value FROM json_each(?))
"""


def one(connection: sqlite3.Connection, kind: RecordKind, instance_id: str) -> str | None:
    return _first(connection, _BY_ID[kind], instance_id)


def many(connection: sqlite3.Connection, kind: RecordKind, instance_ids: Collection[str]) -> dict[str, str]:
    return dict(connection.execute(_BY_IDS[kind], (json.dumps(sorted(instance_ids)),)).fetchall())


def by_keys(connection: sqlite3.Connection, keys: Collection[Key]) -> dict[Key, str | None]:
    wanted = [json.dumps(sorted(each for kind, each in keys if kind is wanted)) for wanted in RecordKind]
    found: dict[Key, str | None] = dict.fromkeys(keys)
    for kind, instance_id, doc in connection.execute(_BY_KEYS, wanted):
        found[RecordKind(kind), instance_id] = doc
    return found


# Control records --------------------------------------------------------------------------------------------------


def write_instance(connection: sqlite3.Connection, record: Instance, entry: HistoryEntry) -> str:
    """Write the record and its history entry. Return the JSON document."""
    doc = encode(record)
    connection.execute(
        "INSERT OR REPLACE INTO instances (instance_id, state, epoch, threshold, provision_id, forget_at, doc)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            record.instance_id,
            record.state.value,
            record.epoch,
            time_text(record.threshold),
            record.provision_id,
            time_text(record.forget_at),
            doc,
        ),
    )
    last = _first(connection, "SELECT max(seq) FROM history WHERE instance_id = ?", record.instance_id)
    seq = int(last or 0) + 1
    connection.execute("INSERT INTO history VALUES (?, ?, ?)", (record.instance_id, seq, encode(entry)))
    connection.execute(
        "DELETE FROM history WHERE instance_id = ? AND seq <= ?", (record.instance_id, seq - HISTORY_LIMIT)
    )
    return doc


def history(connection: sqlite3.Connection, instance_id: str) -> list[str]:
    found = connection.execute("SELECT doc FROM history WHERE instance_id = ? ORDER BY seq", (instance_id,))
    return [row[0] for row in found]


def histories(connection: sqlite3.Connection, instance_ids: Collection[str]) -> list[tuple[str, str]]:
    statement = (
        "SELECT instance_id, doc FROM history WHERE instance_id IN (SELECT value FROM json_each(?))"
        " ORDER BY instance_id, seq"
    )
    return _named(connection, statement, json.dumps(sorted(instance_ids)))


def in_states(
    connection: sqlite3.Connection, states: Collection[State], before: datetime | None
) -> list[tuple[str, str]]:
    statement = (
        "SELECT instance_id, doc FROM instances WHERE state IN (SELECT value FROM json_each(?1)) AND (?2 IS NULL"
        " OR threshold <= ?2) ORDER BY threshold, instance_id"
    )
    return _named(connection, statement, json.dumps(sorted(states)), time_text(before))


def all_reports(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    """Return all reports: one per local machine, so there are few."""
    return _named(connection, "SELECT instance_id, doc FROM reports")


def of_provision(connection: sqlite3.Connection, provision_id: str) -> list[tuple[str, str]]:
    # SQLite uses the partial index only with the second condition.
    statement = (
        "SELECT instance_id, doc FROM instances WHERE provision_id = ? AND provision_id <> '' ORDER BY instance_id"
    )
    return _named(connection, statement, provision_id)


def count_live(connection: sqlite3.Connection) -> int:
    return int(_first(connection, "SELECT count(*) FROM instances WHERE state <> 'terminated'") or 0)


def write_report(connection: sqlite3.Connection, report: Report) -> None:
    connection.execute("INSERT OR REPLACE INTO reports VALUES (?, ?)", (report.instance_id, encode(report)))


# Provisions -------------------------------------------------------------------------------------------------------


def write_provision(connection: sqlite3.Connection, provision: Provision) -> None:
    connection.execute(
        "INSERT OR REPLACE INTO provisions"
        " (holder, provision_id, created_at, deadline, status, settled, forget_at, doc)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            provision.holder.key,
            provision.provision_id,
            time_text(provision.created_at),
            time_text(provision.deadline),
            provision.status.value,
            provision.settled,
            time_text(provision.forget_at),
            encode(provision),
        ),
    )


def provision(connection: sqlite3.Connection, holder: Holder) -> str | None:
    statement = "SELECT doc FROM provisions WHERE holder = ? AND provision_id = ?"
    return _first(connection, statement, holder.key, holder.provision_id)


def of_run(connection: sqlite3.Connection, run_id: str) -> list[tuple[str, str]]:
    statement = "SELECT provision_id, doc FROM provisions WHERE holder = ? ORDER BY created_at, provision_id"
    return _named(connection, statement, run_id)


def unsettled(connection: sqlite3.Connection, deadline_before: datetime) -> list[tuple[str, str]]:
    statement = (
        "SELECT provision_id, doc FROM provisions WHERE settled = 0 AND (deadline <= ? OR status = ?)"
        " ORDER BY deadline, provision_id"
    )
    return _named(connection, statement, time_text(deadline_before), ProvisionStatus.RELEASED.value)


def recent(connection: sqlite3.Connection, limit: int, since: datetime | None) -> list[tuple[str, str]]:
    statement = (
        "SELECT provision_id, doc FROM provisions WHERE created_at >= ?"
        " ORDER BY created_at DESC, provision_id DESC LIMIT ?"
    )
    return _named(connection, statement, time_text(since) or "", max(limit, 0))


# Jobs of runner sets ----------------------------------------------------------------------------------------------


def write_jobs(connection: sqlite3.Connection, jobs: Iterable[JobRecord]) -> None:
    connection.executemany(
        "INSERT OR REPLACE INTO jobs (job_id, run_id, seen_at, expires_at, doc) VALUES (?, ?, ?, ?, ?)",
        [(job.job_id, job.run_id, time_text(job.seen_at), time_text(job.expires_at), encode(job)) for job in jobs],
    )


def jobs(connection: sqlite3.Connection, job_ids: Collection[str]) -> list[tuple[str, str]]:
    statement = "SELECT job_id, doc FROM jobs WHERE job_id IN (SELECT value FROM json_each(?))"
    return _named(connection, statement, json.dumps(sorted(job_ids)))


def jobs_of_run(connection: sqlite3.Connection, run_id: str) -> list[tuple[str, str]]:
    return _named(connection, "SELECT job_id, doc FROM jobs WHERE run_id = ? ORDER BY seen_at, job_id", run_id)


def recent_jobs(connection: sqlite3.Connection, limit: int, since: datetime | None) -> list[tuple[str, str]]:
    statement = "SELECT job_id, doc FROM jobs WHERE seen_at >= ? ORDER BY seen_at DESC, job_id DESC LIMIT ?"
    return _named(connection, statement, time_text(since) or "", max(limit, 0))


# Single documents, and expired records ----------------------------------------------------------------------------


def single(connection: sqlite3.Connection, name: str) -> str | None:
    return _first(connection, "SELECT doc FROM singles WHERE name = ?", name)


def write_single(connection: sqlite3.Connection, name: str, doc: str) -> None:
    connection.execute("INSERT OR REPLACE INTO singles VALUES (?, ?)", (name, doc))


def singles(connection: sqlite3.Connection, prefix: str) -> list[tuple[str, str]]:
    """Return the documents whose names begin with the prefix, without it."""
    statement = (
        "SELECT substr(name, length(?1) + 1), doc FROM singles WHERE substr(name, 1, length(?1)) = ?1 ORDER BY 1"
    )
    return _named(connection, statement, prefix)


def write_deleted_single(connection: sqlite3.Connection, name: str) -> None:
    connection.execute("DELETE FROM singles WHERE name = ?", (name,))


def write_forget(connection: sqlite3.Connection, *, now: datetime) -> int:
    """Delete records, provisions, jobs and leases that are due. Return their number."""
    due = "SELECT instance_id FROM instances WHERE state = 'terminated' AND forget_at <= ?"
    connection.execute(f"DELETE FROM reports WHERE instance_id IN ({due})", (time_text(now),))  # noqa: S608 - constant
    connection.execute(f"DELETE FROM history WHERE instance_id IN ({due})", (time_text(now),))  # noqa: S608 - constant
    instances = connection.execute(
        "DELETE FROM instances WHERE state = 'terminated' AND forget_at <= ?", (time_text(now),)
    )
    provisions = connection.execute("DELETE FROM provisions WHERE forget_at <= ?", (time_text(now),))
    expired = connection.execute("DELETE FROM jobs WHERE expires_at <= ?", (time_text(now),))
    leases = connection.execute(
        "DELETE FROM singles WHERE name LIKE 'lease/%' AND json_valid(doc) AND json_extract(doc, '$.forgetAt') <= ?",
        (time_text(now),),
    )
    return instances.rowcount + provisions.rowcount + expired.rowcount + leases.rowcount


def _named(connection: sqlite3.Connection, statement: str, *parameters: Any) -> list[tuple[str, str]]:
    """Return names and documents."""
    return connection.execute(statement, parameters).fetchall()


def _first(connection: sqlite3.Connection, statement: str, *parameters: Any) -> str | None:
    rows: Sequence[tuple[str]] = connection.execute(statement, parameters).fetchmany(1)
    return rows[0][0] if rows else None
