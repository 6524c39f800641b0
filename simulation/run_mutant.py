"""Simulation of one mutant in a separate process, seed by seed until an invariant is violated."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from simulation.campaign import CampaignSettings
from simulation.faults import format_faults, parse_faults
from simulation.mutants import Mutant
from simulation.mutation import command
from simulation.run import simulate

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class MutantResult:
    #: Number of simulated seeds, including the one that violated an invariant.
    seeds_run: int
    #: The seed that violated an invariant; None if none did.
    seed: int | None
    violation: str
    invariant: str


def run_mutant(mutant: Mutant, *, first_seed: int, seed_count: int, settings: CampaignSettings) -> MutantResult:
    """Simulate up to `seed_count` seeds until one violates an invariant. The mutant's settings replace `settings`."""
    effective = mutant.settings or settings
    arguments = [
        str(first_seed),
        str(seed_count),
        str(effective.hours),
        str(effective.instances),
        format_faults(effective.faults),
    ]
    process = run_module_with_mutant(mutant, "simulation.run_mutant", *arguments)
    if process.returncode:
        raise RuntimeError(f"the simulation of mutant {mutant.name} failed:\n{process.stderr}")
    return MutantResult(**json.loads(process.stdout))


def run_module_with_mutant(mutant: Mutant, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module as a program in a new process, with the mutant's replacements applied to the code it imports."""
    argv = command(mutant.replacements, module, *arguments)
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)


def main(arguments: list[str]) -> None:
    """Simulate the seeds in the process that has the mutant's replacements, and print the result as JSON."""
    first_seed, seed_count, hours, instances, faults = arguments
    settings = CampaignSettings(hours=float(hours), instances=int(instances), faults=parse_faults(faults))
    # Exclude imported objects from garbage collection, which makes the simulation faster.
    gc.freeze()
    result = MutantResult(seeds_run=int(seed_count), seed=None, violation="", invariant="")
    for number in range(int(seed_count)):
        seed = int(first_seed) + number
        found = simulate(settings.plan(seed)).violation
        if found is not None:
            result = MutantResult(seeds_run=number + 1, seed=seed, violation=str(found), invariant=found.invariant)
            break
    sys.stdout.write(json.dumps(asdict(result)))


if __name__ == "__main__":
    main(sys.argv[1:])
