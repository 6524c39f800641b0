"""Runner sets: the listener serves runner sets without provisions in workflows.

It receives GitHub's messages about the jobs of each set, keeps as many listening runners as they need, and returns used
machines to the pool. It holds no state of record: another process can continue from the records and GitHub.
"""

from __future__ import annotations

from remuda.controlplane.demand.context import DemandContext
from remuda.controlplane.demand.listener import DemandListener, ListenerResult

__all__ = ["DemandContext", "DemandListener", "ListenerResult"]
