"""A choice of mutants that the first seeds must catch. `make simulate` runs all of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from simulation.campaign import CampaignSettings
from simulation.mutants import MUTANTS
from simulation.run_mutant import run_mutant

SETTINGS = CampaignSettings(hours=0.5, instances=10)
#: Some of each kind that need few seeds.
QUICK = (
    "claim-without-epoch",
    "adopt-a-sibling",
    "no-rollback",
    "signals-of-any-epoch",
    "release-without-attempt",
    "current-registration-is-stale",
    "start-before-running",
    "stop-before-removal",
    "agent-without-margin",
)
SEEDS = 40


@pytest.mark.timeout(900)
def test_quick_mutants_are_caught():
    chosen = [mutant for mutant in MUTANTS if mutant.name in QUICK]
    assert len(chosen) == len(QUICK)
    with ThreadPoolExecutor(2) as pool:
        results = list(
            pool.map(lambda mutant: run_mutant(mutant, first_seed=0, seed_count=SEEDS, settings=SETTINGS), chosen)
        )
    missed = [mutant.name for mutant, result in zip(chosen, results, strict=True) if not result.invariant]
    assert not missed
