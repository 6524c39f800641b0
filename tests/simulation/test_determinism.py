"""Determinism: one seed gives one trace, under any PYTHONHASHSEED."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from simulation.plan import draw_plan
from simulation.run import simulate
from simulation.world import World

PROGRAM = """
import sys
from simulation.plan import draw_plan
from simulation.run import simulate
for seed in sys.argv[1:]:
    result = simulate(draw_plan(int(seed), hours=0.5, instances=10))
    print(result.digest, result.steps, result.violation)
"""
SEEDS = ("203", "12", "13")


def history(salt: str, seeds: Sequence[str]) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": salt}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *seeds], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_a_seed_gives_the_same_trace_under_another_hash_seed():
    assert history("1", SEEDS) == history("4242", SEEDS)


def test_an_earlier_simulation_does_not_change_the_trace():
    """Memory addresses of tasks differ then."""
    *_, last = history("1", ("5", "6", "203")).splitlines()
    assert [last] == history("1", ("203",)).splitlines()


def test_a_seed_gives_the_same_trace_again_and_another_seed_another():
    first, again, other = (simulate(draw_plan(seed, hours=0.25, instances=6)) for seed in (21, 21, 22))
    assert first.digest == again.digest
    assert first.digest != other.digest


def test_a_finished_world_is_freed():
    """Even if its processes crashed; otherwise a long campaign would fill the memory."""
    outcomes = [simulate(draw_plan(seed, hours=0.25, instances=6)) for seed in (1, 2, 3)]
    assert any(result.stats["crashes"] for result in outcomes)
    assert not [item for item in gc.get_objects() if isinstance(item, World)]


def test_keeping_the_trace_does_not_change_it():
    plan = draw_plan(23, hours=0.1, instances=4)
    assert simulate(plan).digest == simulate(plan, keep_trace=True).digest


@pytest.mark.parametrize("seed", range(30, 34))
def test_no_faults_are_injected_if_none_are_enabled(seed: int):
    result = simulate(draw_plan(seed, hours=0.25, instances=6, faults=frozenset()))
    assert not result.violation
    assert not result.faults
