"""Paths in the state folder of the local backend."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class LocalLayout:
    root: Path

    @property
    def database(self) -> Path:
        return self.root / "remuda.db"

    @property
    def github(self) -> Path:
        return self.root / "github"

    @property
    def runner(self) -> Path:
        return self.root / "runner"

    @property
    def instances(self) -> Path:
        return self.root / "instances"

    @property
    def logs(self) -> Path:
        return self.root / "logs"
