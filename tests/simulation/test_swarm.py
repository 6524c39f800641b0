"""The short campaign: half an hour with ten instances, each seed under its own half of the faults."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter

import pytest

from remuda.domain.transitions import TRANSITIONS
from simulation.campaign import Settings, run_many
from simulation.coverage import IMPOSSIBLE, wonders
from simulation.faults import Fault, Swarm, parse_faults
from simulation.mutants import MUTANTS
from simulation.run import simulate
from simulation.shrink import shrink, tell

SEEDS = 500
SETTINGS = Settings(hours=0.5, instances=10)
SMALL = Settings(hours=0.25, instances=5)
FEW_FAULTS = replace(SMALL, faults=Swarm.FEW)
FEW_SEEDS = 100
#: Bugs that were found, and the seeds that find them where they are planted again (see `mutants.py`).
ONCE_BROKEN = {
    "duplicates-of-the-unclaimed": 248,
    "gone-by-an-old-list": 68,
    "messages-that-came-back": 24,
    "acquired-by-instance": 30,
    "quarantine-unseen": 64,
    "quarantine-without-patience": 68,
    "renewal-that-comes-late": 30,
    "renewal-that-lasts-longer": 364,
}
#: In which worlds each of them is hunted.
WORLDS = {mutant.name: mutant.settings or SETTINGS for mutant in MUTANTS}
#: A new machine's registration was taken for a ghost while its provision stood still: found where these faults are on.
GHOST_BEFORE_ITS_RECORD = 620_239
WITH = "reset-failed,listener-dies,write-unsure,slow-call,agent-pause,terminate,pause,throttled"
#: Of the small worlds of the long campaign.
BROKEN_WHILE_SMALL = {"quarantine-unseen": 422, "born expired": 7260, "a drain over a quarantine": 13_866}


def story(seed: int, settings: Settings = SETTINGS) -> str:
    return "\n".join(tell(shrink(simulate(settings.plan(seed)), tries=60)))


@pytest.mark.timeout(1_200)
def test_no_invariant_is_violated_in_the_short_campaign():
    summary = run_many(range(SEEDS), SETTINGS, workers=2)
    assert summary.seeds == SEEDS
    assert not summary.violations, story(min(summary.violations))
    missing = [fault.value for fault in Fault if not summary.faults[fault]]
    assert not missing, f"these faults never happened: {missing}"
    unused = [row.name for row in TRANSITIONS if not summary.stats[f"row {row.name}"]]
    assert not unused, f"these transitions never happened: {unused}"
    seen = [f"{fault} while {state}: {IMPOSSIBLE[fault, state]}" for fault, state in wonders(summary.coverage)]
    assert not seen, f"these cannot happen, and did: {seen}"


def test_no_invariant_is_violated_with_few_faults():
    summary = run_many(range(FEW_SEEDS), FEW_FAULTS, workers=2)
    assert not summary.violations, story(min(summary.violations), FEW_FAULTS)


@pytest.mark.parametrize(
    ("seed", "settings"),
    [
        *sorted({(seed, WORLDS[name]) for name, seed in ONCE_BROKEN.items()}, key=itemgetter(0)),
        *((seed, SMALL) for seed in BROKEN_WHILE_SMALL.values()),
        (GHOST_BEFORE_ITS_RECORD, replace(SMALL, faults=parse_faults(WITH))),
    ],
)
def test_what_was_broken_once_holds(seed: int, settings: Settings):
    assert not simulate(settings.plan(seed)).violation
