"""The short campaign: half an hour with ten instances, each seed with its own half of the faults."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter

import pytest

from remuda.domain.transitions import TRANSITIONS
from simulation.campaign import CampaignSettings, run_many
from simulation.faults import Fault, Swarm, parse_faults
from simulation.mutants import MUTANTS
from simulation.run import simulate
from simulation.shrink import describe, shrink

SEEDS = 500
SETTINGS = CampaignSettings(hours=0.5, instances=10)
SMALL = CampaignSettings(hours=0.25, instances=5)
FEW_FAULTS = replace(SMALL, faults=Swarm.FEW)
FEW_SEEDS = 100
#: Bugs that the simulation found, and the seeds that find their mutants.
FOUND_BUGS = {
    "duplicates-of-the-unclaimed": 248,
    "gone-by-an-old-list": 68,
    "messages-that-came-back": 31,
    "acquired-by-instance": 131,
    "quarantine-unseen": 64,
    "quarantine-without-patience": 20,
    "renewal-that-comes-late": 7,
    "renewal-that-lasts-longer": 364,
}
#: Settings that each mutant is simulated with.
MUTANT_SETTINGS = {mutant.name: mutant.settings or SETTINGS for mutant in MUTANTS}
#: The registration of a new machine was removed as stale while its provision was paused.
REMOVED_BEFORE_ITS_RECORD = 620_239
REMOVED_FAULTS = "reset-failed,listener-dies,write-unsure,slow-call,agent-pause,terminate,pause,throttled"
#: Bugs that the small worlds of the long campaign found.
FOUND_IN_SMALL_WORLDS = {"quarantine-unseen": 422, "expired at creation": 7260, "a drain over a quarantine": 13_866}


def report(seed: int, settings: CampaignSettings = SETTINGS) -> str:
    return "\n".join(describe(shrink(simulate(settings.plan(seed)), tries=60)))


@pytest.mark.timeout(1_200)
def test_no_invariant_is_violated_in_the_short_campaign():
    summary = run_many(range(SEEDS), SETTINGS, workers=2)
    assert summary.seeds == SEEDS
    assert not summary.violations, report(min(summary.violations))
    missing = [fault.value for fault in Fault if not summary.faults[fault]]
    assert not missing, f"these faults never happened: {missing}"
    unused = [row.name for row in TRANSITIONS if not summary.stats[f"transition {row.name}"]]
    assert not unused, f"these transitions never happened: {unused}"


def test_no_invariant_is_violated_with_few_faults():
    summary = run_many(range(FEW_SEEDS), FEW_FAULTS, workers=2)
    assert not summary.violations, report(min(summary.violations), FEW_FAULTS)


@pytest.mark.parametrize(
    ("seed", "settings"),
    [
        *sorted({(seed, MUTANT_SETTINGS[name]) for name, seed in FOUND_BUGS.items()}, key=itemgetter(0)),
        *((seed, SMALL) for seed in FOUND_IN_SMALL_WORLDS.values()),
        (REMOVED_BEFORE_ITS_RECORD, replace(SMALL, faults=parse_faults(REMOVED_FAULTS))),
    ],
)
def test_seeds_of_found_bugs_violate_nothing(seed: int, settings: CampaignSettings):
    assert not simulate(settings.plan(seed)).violation
