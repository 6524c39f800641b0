"""`python -m benchmarks`: all of them, or those named; tables, JSON, and what the docs show."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import claims, cold, dashboard, fleet, footprint, growth, idle_agent, sweeps, warm
from benchmarks.figures import Results
from benchmarks.floor import Floor, floor
from benchmarks.report import Run, show, write_docs
from benchmarks.world import FULL, QUICK, ROOT, TINY, Size, World, open_world
from remuda.adapters.system.clock import SystemClock
from tests.support.aws.stack import AwsStack, aws_stack

Measure = Callable[[World, Floor], Awaitable[Results]]

#: In the order in which they run: what is small first, while the servers hold little.
MEASURES: Mapping[str, Measure] = {
    "footprint": footprint.run,
    "dashboard": dashboard.run,
    "sweeps": sweeps.run,
    "warm": warm.run,
    "cold": cold.run,
    "idle": idle_agent.run,
    "claims": claims.run,
    "fleet": fleet.run,
    "growth": growth.run,
}
SIZES = {"full": FULL, "quick": QUICK, "tiny": TINY}
#: Of tables that no terminal shows.
WIDTH = 170
RESULTS = ROOT / "build" / "benchmarks.json"


async def measure(names: Sequence[str], servers: AwsStack, size: Size, console: Console) -> Results:
    results, clock = Results(), SystemClock()
    async with open_world(servers, size) as world, floor(world) as least:
        for name in names:
            started = clock.monotonic()
            results += await MEASURES[name](world, least)
            console.print(f"{name}: {clock.monotonic() - started:.1f} s", style="dim")
        await world.clear()
    return results


def main(arguments: Sequence[str]) -> int:
    parsed = _parsed(arguments)
    console, clock = Console(stderr=True), SystemClock()
    at, started = clock.now(), clock.monotonic()
    with tempfile.TemporaryDirectory(prefix="remuda-bench-") as folder, aws_stack(Path(folder)) as servers:
        results = asyncio.run(measure(parsed.measures, servers, SIZES[parsed.size], console))
    run = Run(at=at, seconds=clock.monotonic() - started, results=results)
    # A file or a pipe has no width: as wide as the table.
    show(results, Console() if sys.stdout.isatty() else Console(width=WIDTH))
    parsed.json.parent.mkdir(parents=True, exist_ok=True)
    parsed.json.write_text(json.dumps(run.document(), indent=1) + "\n", encoding="utf-8")
    if parsed.docs:
        write_docs(run, ROOT / "docs")
    missed = results.missed(strict=parsed.strict)
    for figure in missed:
        console.print(f"not met: {figure.name}", style="bold red")
    return 1 if missed else 0


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="What Remuda costs.")
    parser.add_argument("measures", nargs="*", metavar="measure", help=f"of {', '.join(MEASURES)}; all by default")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", dest="size", action="store_const", const="quick", help="less of everything")
    sizes.add_argument("--tiny", dest="size", action="store_const", const="tiny", help="just to see that it runs")
    parser.add_argument("--strict", action="store_true", help="times that are not met fail the run, too")
    parser.add_argument("--docs", action="store_true", help="write what the docs show")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where to write the figures (default: %(default)s)")
    parser.set_defaults(size="full")
    parsed = parser.parse_args(arguments)
    parsed.measures = parsed.measures or list(MEASURES)
    for name in parsed.measures:
        if name not in MEASURES:
            parser.error(f"there is no measure {name!r}; choose of {', '.join(MEASURES)}")
    return parsed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
