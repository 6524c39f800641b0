"""Scale-down: terminates idle machines, marks and verifies orphans, and never ends a running job."""

from __future__ import annotations

from remuda.controlplane.scale_down.cycle import FleetContext, scale_down
from remuda.controlplane.scale_down.result import ScaleDownOutcome, ScaleDownResult

__all__ = ["FleetContext", "ScaleDownOutcome", "ScaleDownResult", "scale_down"]
