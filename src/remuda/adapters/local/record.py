"""The record of a local machine (instance.json), read by launcher, compute and agent. The supervisor adds the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from remuda.adapters.local import folder as files
from remuda.domain.resources import is_instance_id
from remuda.domain.serialization import from_document
from remuda.domain.thresholds import MAX_LIFETIME


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineRecord:
    instance_id: str
    pool: str
    instance_type: str
    cpu: int
    memory_mib: int
    tags: Mapping[str, str]
    launched_at: datetime
    #: The launch options of the request.
    launch: Mapping[str, str] = field(default_factory=dict)
    first_life_s: float
    margin_s: float
    #: Folder of the unmodified runner software.
    runner_source: str
    booted_at: datetime | None = None
    ending_at: datetime | None = None
    ended_at: datetime | None = None
    #: Reason of the end.
    reason: str = ""
    #: No process is left, and of the folder only the record and the logs.
    finished: bool = False

    def check(self) -> None:
        if not 0 <= self.margin_s <= MAX_LIFETIME or not 0 <= self.first_life_s <= MAX_LIFETIME:
            raise ValueError("margin or first lifetime out of range")


def read_record(folder: Path) -> MachineRecord | None:
    """Read the record. Return None if it is missing, malformed or of another machine: jobs can write to it."""
    document = files.read(str(folder / files.RECORD))
    if document is None:
        return None
    try:
        record = from_document(MachineRecord, document)
    except ValueError:
        return None
    return record if record.instance_id == folder.name and is_instance_id(record.instance_id) else None
