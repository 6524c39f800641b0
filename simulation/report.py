"""Report of all mutants and all exhaustive searches: `python -m simulation.report`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from simulation.campaign import CampaignSettings
from simulation.exhaustive import SearchBounds, explore_and_describe
from simulation.faults import format_faults
from simulation.mutants import MUTANTS, Mutant
from simulation.run_mutant import MutantResult, run_mutant

#: Maximum number of seeds within which each mutant must be caught.
MAX_SEEDS = 10_000
SETTINGS = CampaignSettings(hours=0.5, instances=10)
#: Small worlds that are searched completely.
WORLDS = (
    SearchBounds(instances=2, runs=3),
    SearchBounds(instances=2, runs=3, expiry=True),
    SearchBounds(instances=2, runs=3, lost_answer=True),
    SearchBounds(instances=2, runs=3, operator=True),
    SearchBounds(instances=1, runs=3, expiry=True, lost_answer=True),
    SearchBounds(instances=1, runs=2, expiry=True, lost_answer=True, operator=True),
)


def run_all(mutants: Sequence[Mutant], *, seeds: int, workers: int) -> Iterator[tuple[Mutant, MutantResult]]:
    """Run all mutants, in order."""
    with ThreadPoolExecutor(workers) as pool:
        results = pool.map(
            lambda mutant: run_mutant(mutant, first_seed=0, seed_count=seeds, settings=SETTINGS), mutants
        )
        yield from zip(mutants, results, strict=True)


def table(found: Sequence[tuple[Mutant, MutantResult]]) -> str:
    lines = ["| mutant | description | caught by | seeds needed |", "|---|---|---|---|"]
    for mutant, result in found:
        after = f"{result.seeds_run}" if result.seed is not None else f"not within {result.seeds_run}"
        lines.append(
            f"| `{mutant.name}` | {mutant.bug} | {result.invariant or '-'} | {after}{_settings_text(mutant.settings)} |"
        )
    return "\n".join(lines)


def _settings_text(world: CampaignSettings | None) -> str:
    if world is None:
        return ""
    return f" ({world.hours:g} h, {world.instances} instances, only {format_faults(world.faults)})"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation.report", description=__doc__)
    parser.add_argument("--seeds", type=int, default=MAX_SEEDS, help="maximum seeds per mutant")
    parser.add_argument("--states", type=int, help="maximum states per small world (default: all)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="names of mutants to run")
    parser.add_argument("--write", type=Path, help="file to write the table to")
    given = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if not given.only or mutant.name in given.only]
    found: list[tuple[Mutant, MutantResult]] = []
    for mutant, result in run_all(chosen, seeds=given.seeds, workers=given.workers):
        found.append((mutant, result))
        text = f"caught after {result.seeds_run}: {result.violation}" if result.seed is not None else "MISSED"
        sys.stdout.write(f"{mutant.name:<32} {text[:140]}\n")
        sys.stdout.flush()
    if given.write:
        given.write.write_text(f"# Mutants\n\n{table(found)}\n", encoding="utf-8")
    missed = [mutant.name for mutant, result in found if result.seed is None]
    sys.stdout.write(f"{len(found) - len(missed)} of {len(found)} mutants were caught\n")
    violated = _search(given.states)
    return 1 if missed or violated else 0


def _search(limit: int | None) -> bool:
    violated = False
    for bounds in WORLDS:
        search, text = explore_and_describe(bounds, limit)
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()
        violated = violated or bool(search.violation)
    return violated


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
