"""Entry point of the benchmarks: runs all or the named ones and writes tables, JSON and the docs page."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from benchmarks import (
    claims,
    cold,
    dashboard,
    demand,
    footprint,
    growth,
    idle_agent,
    processes,
    refresh,
    sandbox,
    warm,
    workflow_step,
)
from benchmarks.environment import FULL, QUICK, ROOT, TINY, BenchmarkEnvironment, Size, open_environment
from benchmarks.figures import Results
from benchmarks.floor import Floor, open_floor
from benchmarks.report import BenchmarkRun, show, write_docs
from remuda.adapters.system.clock import SystemClock
from remuda.cli.terminal import PlainConsole
from tests.support.aws.stack import AwsStack, aws_stack

Benchmark = Callable[[BenchmarkEnvironment, Floor], Awaitable[Results]]

#: In the order in which they run: small ones first, while the servers hold little data.
BENCHMARKS: Mapping[str, Benchmark] = {
    "footprint": footprint.run,
    "sandbox": sandbox.run,
    "dashboard": dashboard.run,
    "processes": processes.run,
    "refresh": refresh.run,
    "warm": warm.run,
    "workflow-step": workflow_step.run,
    "cold": cold.run,
    "demand": demand.run,
    "idle": idle_agent.run,
    "claims": claims.run,
    "scale-down": growth.run_scale_down,
    "growth": growth.run,
}
SIZES = {"full": FULL, "quick": QUICK, "tiny": TINY}
#: Width of tables that are not written to a terminal.
WIDTH = 170
RESULTS = ROOT / "build" / "benchmarks.json"


async def measure(names: Sequence[str], servers: AwsStack, size: Size, console: PlainConsole) -> Results:
    results, clock = Results(), SystemClock()
    async with open_environment(servers, size) as environment, open_floor(environment) as floor:
        for name in names:
            started = clock.monotonic()
            results += await BENCHMARKS[name](environment, floor)
            console.print(f"{name}: {clock.monotonic() - started:.1f} s", style="dim")
        await environment.clear()
    return results


def main(arguments: Sequence[str]) -> int:
    parsed = _parsed(arguments)
    console, clock = PlainConsole(stderr=True), SystemClock()
    at, started = clock.now(), clock.monotonic()
    with tempfile.TemporaryDirectory(prefix="remuda-bench-") as folder, aws_stack(Path(folder)) as servers:
        results = asyncio.run(measure(parsed.benchmarks, servers, SIZES[parsed.size], console))
    run = BenchmarkRun(at=at, seconds=clock.monotonic() - started, results=results)
    # Files and pipes have no width.
    show(results, PlainConsole() if sys.stdout.isatty() else PlainConsole(width=WIDTH))
    parsed.json.parent.mkdir(parents=True, exist_ok=True)
    parsed.json.write_text(json.dumps(run.document(), indent=1) + "\n", encoding="utf-8")
    if parsed.docs:
        write_docs(run, ROOT / "docs")
    missed = results.missed(strict=parsed.strict)
    for figure in missed:
        console.print(f"limit missed: {figure.name}", style="bold red")
    return 1 if missed else 0


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure the time and the API calls of Remuda's operations."
    )
    parser.add_argument(
        "benchmarks", nargs="*", metavar="benchmark", help=f"one of {', '.join(BENCHMARKS)} (default: all)"
    )
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", dest="size", action="store_const", const="quick", help="fewer and smaller samples")
    sizes.add_argument(
        "--tiny", dest="size", action="store_const", const="tiny", help="smallest possible size, as a smoke test"
    )
    parser.add_argument("--strict", action="store_true", help="fail if a limit on a time is missed")
    parser.add_argument("--docs", action="store_true", help="update the docs page")
    parser.add_argument("--json", type=Path, default=RESULTS, help="file for the figures (default: %(default)s)")
    parser.set_defaults(size="full")
    parsed = parser.parse_args(arguments)
    parsed.benchmarks = parsed.benchmarks or list(BENCHMARKS)
    for name in parsed.benchmarks:
        if name not in BENCHMARKS:
            parser.error(f"unknown benchmark {name!r}; choose from {', '.join(BENCHMARKS)}")
    return parsed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
