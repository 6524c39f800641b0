"""The judge's report: every planted bug hunted until it is caught, and small worlds in every order of events."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from simulation.campaign import Settings
from simulation.exhaustive import Bounds, told
from simulation.faults import spelled
from simulation.mutants import MUTANTS, Mutant
from simulation.run_mutant import MutantResult, run_mutant

#: Within so many seeds each must be caught.
MOST_SEEDS = 10_000
SETTINGS = Settings(hours=0.5, instances=10)
#: Small worlds, each searched to its end.
WORLDS = (
    Bounds(instances=2, runs=3),
    Bounds(instances=2, runs=3, expiry=True),
    Bounds(instances=2, runs=3, lost_answer=True),
    Bounds(instances=2, runs=3, operator=True),
    Bounds(instances=1, runs=3, expiry=True, lost_answer=True),
    Bounds(instances=1, runs=2, expiry=True, lost_answer=True, operator=True),
)


def run_all(mutants: Sequence[Mutant], *, seeds: int, workers: int) -> Iterator[tuple[Mutant, MutantResult]]:
    """One after the other, as they are caught."""
    with ThreadPoolExecutor(workers) as pool:
        results = pool.map(lambda mutant: run_mutant(mutant, first=0, seeds=seeds, settings=SETTINGS), mutants)
        yield from zip(mutants, results, strict=True)


def table(found: Sequence[tuple[Mutant, MutantResult]]) -> str:
    lines = ["| planted bug | what it is | caught by | after seeds |", "|---|---|---|---|"]
    for mutant, result in found:
        after = f"{result.tried}" if result.seed is not None else f"not within {result.tried}"
        lines.append(
            f"| `{mutant.name}` | {mutant.bug} | {result.invariant or '-'} | {after}{_where(mutant.settings)} |"
        )
    return "\n".join(lines)


def _where(world: Settings | None) -> str:
    if world is None:
        return ""
    return f" ({world.hours:g} h, {world.instances} instances, under {spelled(world.faults)} alone)"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation.report", description=__doc__)
    parser.add_argument("--seeds", type=int, default=MOST_SEEDS, help="the most seeds for each bug")
    parser.add_argument("--states", type=int, help="the most states of each small world; all, unless given")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="names of planted bugs")
    parser.add_argument("--write", type=Path, help="a file to write the table to")
    given = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if not given.only or mutant.name in given.only]
    found: list[tuple[Mutant, MutantResult]] = []
    for mutant, result in run_all(chosen, seeds=given.seeds, workers=given.workers):
        found.append((mutant, result))
        said = f"caught after {result.tried}: {result.violation}" if result.seed is not None else "MISSED"
        sys.stdout.write(f"{mutant.name:<32} {said[:140]}\n")
        sys.stdout.flush()
    if given.write:
        given.write.write_text(f"# Planted bugs\n\n{table(found)}\n", encoding="utf-8")
    missed = [mutant.name for mutant, result in found if result.seed is None]
    sys.stdout.write(f"{len(found) - len(missed)} of {len(found)} planted bugs were caught\n")
    broken = _search(given.states)
    return 1 if missed or broken else 0


def _search(most: int | None) -> bool:
    broken = False
    for bounds in WORLDS:
        search, text = told(bounds, most)
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
        broken = broken or bool(search.violation)
    return broken


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
