"""Release: reset a run's instances and return them to the pool."""

from __future__ import annotations

from remuda.controlplane.release.releasing import release
from remuda.controlplane.release.result import ReleaseOutcome, ReleaseResult, ReleaseStatus

__all__ = ["ReleaseOutcome", "ReleaseResult", "ReleaseStatus", "release"]
