"""`python -m benchmarks`: all of them, or those named; tables, JSON, and what the docs show."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import claims, cold, fleet, footprint, idle_agent, sweeps, warm
from benchmarks.figures import Results
from benchmarks.floor import Floor, floor
from benchmarks.world import FULL, QUICK, TINY, Size, World, open_world
from support.aws_servers import aws_servers

Measure = Callable[[World, Floor], Awaitable[Results]]

MEASURES: Mapping[str, Measure] = {"warm": warm.run, "cold": cold.run, "sweeps": sweeps.run, "claims": claims.run, "idle": idle_agent.run, "fleet": fleet.run, "footprint": footprint.run}


async def measure(names, servers, size):
    results = Results()
    async with open_world(servers, size) as world, floor(world) as least:
        for name in names:
            results += await MEASURES[name](world, least)
    return results

def main(arguments):
    size = {"--tiny": TINY, "--quick": QUICK}.get(arguments[0] if arguments else "", FULL)
    names = [a for a in arguments if not a.startswith("--")] or list(MEASURES)
    with tempfile.TemporaryDirectory() as folder, aws_servers(Path(folder)) as servers:
        results = asyncio.run(measure(names, servers, size))
    for f in results.figures:
        print(f.name, "ours", f.ours, "most", f.most, "floor", f.floor, f.floor_with_waits, "MET" if f.met else "MISSED", f.note)

main(sys.argv[1:])
