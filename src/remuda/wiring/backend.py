"""The adapters of one backend, as the wiring of each backend opens them."""

from __future__ import annotations

from typing import NamedTuple

from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.ports.calls import CallCounter
from remuda.ports.clock import ServerDates
from remuda.ports.compute import Compute, SpotPrices
from remuda.ports.github import GitHub
from remuda.ports.pool import ResourcePool
from remuda.ports.store import InstanceStore


class SystemPorts(NamedTuple):
    """Ports that all adapters of a process share."""

    clock: SystemClock
    ids: SystemIds
    calls: CallCounter
    #: None in a process that does not judge its clock.
    dates: ServerDates | None = None


class Backend(NamedTuple):
    pool_name: str
    store: InstanceStore
    pool: ResourcePool
    compute: Compute
    github: GitHub | None
    spot_prices: SpotPrices | None = None
