"""Planted bugs: small patches of the real code, each of which the simulation must catch.

A mutant is made on a copy of the package and hunted in processes of its own; the code that runs here stays as it is.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from remuda.domain.errors import InvariantViolated
from simulation.campaign import Settings
from simulation.faults import parse_faults, spelled
from simulation.run import simulate

#: What a copy needs.
PARTS = ("src/remuda/domain", "src/remuda/ports", "src/remuda/controlplane", "src/remuda/agent", "simulation")
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Patch:
    file: str
    old: str
    new: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    name: str
    #: What the bug is, in one sentence.
    bug: str
    patches: tuple[Patch, ...]
    #: Where it is hunted, if not in the worlds of all the others: what needs few faults, one after the other, is met
    #: too late in a swarm.
    world: Settings | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Catch:
    """What a hunt came to. `tried` seeds, the last of which caught it."""

    tried: int
    seed: int | None
    violation: str
    invariant: str


def applied(patch: Patch, text: str) -> str:
    if text.count(patch.old) != 1:
        raise InvariantViolated(f"{patch.file}: the text to patch occurs {text.count(patch.old)} times, not once")
    return text.replace(patch.old, patch.new)


@contextmanager
def copy_of_package(mutant: Mutant) -> Iterator[Path]:
    """A folder to put on the path: the package with the bug in it."""
    with tempfile.TemporaryDirectory(prefix="remuda-mutant-") as folder:
        package = Path(folder) / "remuda"
        for part in PARTS:
            target = Path(folder) / part.removeprefix("src/")
            shutil.copytree(ROOT / part, target, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copyfile(ROOT / "src" / "remuda" / "__init__.py", package / "__init__.py")
        for patch in mutant.patches:
            path = package / patch.file
            path.write_text(applied(patch, path.read_text(encoding="utf-8")), encoding="utf-8")
        yield Path(folder)


def hunt(mutant: Mutant, *, first: int, seeds: int, settings: Settings) -> Catch:
    """Try one seed after the other, until one catches the bug, in such worlds or in the bug's own."""
    world = mutant.world or settings
    with copy_of_package(mutant) as folder:
        environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        arguments = [str(first), str(seeds), str(world.hours), str(world.instances), spelled(world.faults)]
        done = subprocess.run(
            [sys.executable, "-m", "simulation.run_mutant", *arguments],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        *_, last = done.stderr.strip().splitlines() or ["no word"]
        return Catch(tried=1, seed=None, violation=f"it does not run: {last}", invariant="")
    return Catch(**json.loads(done.stdout))


def _hunt_here(first: int, seeds: int, settings: Settings) -> Catch:
    """In the process of a mutant."""
    gc.freeze()
    for seed in range(first, first + seeds):
        outcome = simulate(settings.plan(seed))
        if outcome.violation is not None:
            violation = outcome.violation
            return Catch(tried=seed - first + 1, seed=seed, violation=str(violation), invariant=violation.invariant)
    return Catch(tried=seeds, seed=None, violation="", invariant="")


def main(arguments: list[str]) -> None:
    first, seeds, hours, instances, faults = arguments
    settings = Settings(hours=float(hours), instances=int(instances), faults=parse_faults(faults))
    catch = _hunt_here(int(first), int(seeds), settings)
    document = {"tried": catch.tried, "seed": catch.seed, "violation": catch.violation, "invariant": catch.invariant}
    sys.stdout.write(json.dumps(document))


if __name__ == "__main__":
    main(sys.argv[1:])
