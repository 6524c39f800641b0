"""Runs of mutants in separate processes, and of all of them: `python -m simulation.report`."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from simulation.campaign import CampaignSettings, FirstViolation
from simulation.mutants import MUTANTS, Mutant
from simulation.mutation import command

ROOT = Path(__file__).parents[1]
#: Maximum number of seeds within which each mutant must be caught.
MAX_SEEDS = 10_000
SETTINGS = CampaignSettings(hours=0.5, instances=10)


def run_module_with_mutant(mutant: Mutant, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module as a program in a new process, with the mutant's replacements applied to the code it imports."""
    argv = command(mutant.replacements, module, *arguments)
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)


def run_mutant(mutant: Mutant, *, seed_count: int) -> FirstViolation:
    """Simulate up to `seed_count` seeds until one violates an invariant."""
    arguments = (mutant.settings or SETTINGS).arguments(seed_count)
    process = run_module_with_mutant(mutant, "simulation.campaign", *arguments)
    if process.returncode:
        raise RuntimeError(f"the simulation of mutant {mutant.name} failed:\n{process.stderr}")
    return FirstViolation(**json.loads(process.stdout))


def run_all(mutants: Sequence[Mutant], *, seeds: int, workers: int) -> Iterator[tuple[Mutant, FirstViolation]]:
    """Run all mutants, in order."""
    with ThreadPoolExecutor(workers) as pool:
        yield from zip(mutants, pool.map(lambda mutant: run_mutant(mutant, seed_count=seeds), mutants), strict=True)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation.report", description=__doc__)
    parser.add_argument("--seeds", type=int, default=MAX_SEEDS, help="maximum seeds per mutant")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[], help="names of mutants to run")
    given = parser.parse_args(arguments)
    chosen = [mutant for mutant in MUTANTS if not given.only or mutant.name in given.only]
    found: list[tuple[Mutant, FirstViolation]] = []
    for mutant, result in run_all(chosen, seeds=given.seeds, workers=given.workers):
        found.append((mutant, result))
        text = f"caught after {result.seeds_run}: {result.violation}" if result.seed is not None else "MISSED"
        sys.stdout.write(f"{mutant.name:<32} {text[:140]}\n")
        sys.stdout.flush()
    missed = [mutant.name for mutant, result in found if result.seed is None]
    sys.stdout.write(f"{len(found) - len(missed)} of {len(found)} mutants were caught\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
