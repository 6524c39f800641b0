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
    #: Number of seeds simulated, the last of which violated an invariant if `seed` is set.
    tried: int
    seed: int | None
    violation: str
    invariant: str


def run_mutant(mutant: Mutant, *, first: int, seeds: int, settings: CampaignSettings) -> MutantResult:
    """Simulate seeds from `first` on, with the mutant's own settings if it has any, until one violates an invariant."""
    world = mutant.settings or settings
    arguments = [str(first), str(seeds), str(world.hours), str(world.instances), format_faults(world.faults)]
    done = run_mutated(mutant, "simulation.run_mutant", *arguments)
    if done.returncode:
        raise RuntimeError(f"mutant {mutant.name} does not run:\n{done.stderr}")
    return MutantResult(**json.loads(done.stdout))


def run_mutated(mutant: Mutant, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a module's command line with the mutant's replacements."""
    words = command(mutant.replacements, module, *arguments)
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)


def main(arguments: list[str]) -> None:
    """In the mutant's process."""
    first, seeds, hours, instances, faults = arguments
    settings = CampaignSettings(hours=float(hours), instances=int(instances), faults=parse_faults(faults))
    gc.freeze()
    result = MutantResult(tried=int(seeds), seed=None, violation="", invariant="")
    for number in range(int(seeds)):
        seed = int(first) + number
        found = simulate(settings.plan(seed)).violation
        if found is not None:
            result = MutantResult(tried=number + 1, seed=seed, violation=str(found), invariant=found.invariant)
            break
    sys.stdout.write(json.dumps(asdict(result)))


if __name__ == "__main__":
    main(sys.argv[1:])
