"""The judge is judged: planted bugs must be caught. `make simulate` hunts all of them; here, the quick ones are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from simulation.campaign import Settings
from simulation.mutants import MUTANTS
from simulation.run_mutant import ROOT, applied, hunt

SETTINGS = Settings(hours=0.5, instances=10)
#: Most are caught by the first seeds; a few of each kind are hunted here.
QUICK = (
    "claim-without-epoch",
    "adopt-a-sibling",
    "no-rollback",
    "signals-of-any-epoch",
    "release-without-attempt",
    "ghosts-of-the-present",
    "start-before-running",
    "stop-before-removal",
    "agent-without-margin",
)
SEEDS = 40


def test_there_are_enough_and_each_has_a_name_of_its_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 30
    assert set(QUICK) <= {mutant.name for mutant in MUTANTS}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_patch_still_applies_and_still_is_python(mutant):
    texts: dict[str, str] = {}
    for patch in mutant.patches:
        before = texts.get(patch.file) or (ROOT / "src" / "remuda" / patch.file).read_text(encoding="utf-8")
        texts[patch.file] = applied(patch, before)
        assert texts[patch.file] != before
    for file, text in texts.items():
        compile(text, file, "exec")


@pytest.mark.timeout(900)
def test_the_quick_ones_are_caught():
    chosen = [mutant for mutant in MUTANTS if mutant.name in QUICK]
    with ThreadPoolExecutor(2) as pool:
        catches = list(pool.map(lambda mutant: hunt(mutant, first=0, seeds=SEEDS, settings=SETTINGS), chosen))
    missed = [mutant.name for mutant, catch in zip(chosen, catches, strict=True) if not catch.invariant]
    assert not missed
