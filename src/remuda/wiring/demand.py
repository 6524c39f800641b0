"""Wiring of the listener: the ports of the pool, and GitHub's runner scale sets."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from remuda import procfs
from remuda.config.settings import Settings, time_zone
from remuda.controlplane.demand.context import DemandContext
from remuda.ports.event_log import EventLog
from remuda.wiring import open_context
from remuda.wiring.aws import open_launch, open_metrics
from remuda.wiring.github import open_demand_source


@asynccontextmanager
async def open_demand(settings: Settings, event_log: EventLog) -> AsyncIterator[DemandContext]:
    async with (
        open_context(settings, event_log, needs_github=True) as context,
        open_demand_source(context) as source,
        open_metrics(settings, context.calls) as metrics,
        open_launch(settings, context.calls) as launch,
    ):
        yield DemandContext(
            context=context,
            source=source,
            store=context.store,
            zone_of=time_zone,
            # Shown on GitHub as the owner of the session.
            owner=context.ids.new(f"{process_name(os.getpid())}-"),
            has_ended=has_ended,
            metrics=metrics,
            launch=launch,
        )


def process_name(pid: int) -> str:
    """Host, process and its start time. The namespace of process ids tells containers of one host apart."""
    process = procfs.read_process(pid)
    namespace = os.stat("/proc/self/ns/pid").st_ino if process else 0  # noqa: PTH116 - a link to no file
    return f"{socket.gethostname()}/{namespace}/{pid}.{process.started if process else 0}"


def has_ended(owner: str) -> bool:
    """Whether the owner was a process of this host that does not run any more: its successor need not wait."""
    name, _, _ = owner.rpartition("-")
    pid = name.rpartition("/")[2].partition(".")[0]
    if not pid.isdecimal() or name.rpartition("/")[0] != process_name(os.getpid()).rpartition("/")[0]:
        return False
    return name != process_name(int(pid))
