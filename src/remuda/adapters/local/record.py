"""A machine's record (instance.json), as launcher, compute and agent read it. The supervisor fills in the end."""

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
    #: The launch options as they were given.
    launch: Mapping[str, str] = field(default_factory=dict)
    first_life_s: float
    margin_s: float
    #: The pristine runner folder.
    runner_source: str
    booted_at: datetime | None = None
    ending_at: datetime | None = None
    ended_at: datetime | None = None
    #: Why it ended, or ends.
    reason: str = ""
    #: Nothing of it is left but the record and the logs.
    finished: bool = False

    def check(self) -> None:
        if not 0 <= self.margin_s <= MAX_LIFETIME or not 0 <= self.first_life_s <= MAX_LIFETIME:
            raise ValueError("its margin or its first life cannot be one")


def read_record(folder: Path) -> MachineRecord | None:
    """None where there is none, or it is not this folder's: jobs can write there."""
    document = files.read(str(folder / files.RECORD))
    if document is None:
        return None
    try:
        record = from_document(MachineRecord, document)
    except ValueError:
        return None
    return record if record.instance_id == folder.name and is_instance_id(record.instance_id) else None
