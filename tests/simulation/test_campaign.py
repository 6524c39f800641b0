"""Campaigns: the short campaign, mutants that it must catch, seeds of found bugs, and `python -m simulation`.

The first test takes longest and uses two processes. It is in the first place so that it starts first.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from remuda.domain.transitions import TRANSITIONS
from simulation.campaign import CampaignSettings, run_many, simulate
from simulation.faults import FEW, NAMED, Fault, Swarm, parse_faults
from simulation.mutants import MUTANTS
from simulation.report import ROOT, SETTINGS, run_all
from simulation.shrink import describe, shrink

SEEDS = 80
SMALL = CampaignSettings(hours=0.25, instances=5)
FEW_FAULTS = replace(SMALL, faults=Swarm.FEW)
FEW_SEEDS = 30
#: Bugs that seeds beyond the short campaign found.
FOUND_BUGS = {
    "a message that came again while its claim took long was dropped": 248,
    "a worker that lost a race made its provision forget what another one had claimed": 131,
}
#: A delayed renewal lasted beyond the maximum age, while operators acted.
LATE_RENEWAL = 364
LATE_RENEWAL_FAULTS = "drain,quarantine,pause,slow-call"
#: A lost write left the tombstone of a new machine to the sweeps.
LOST_TOMBSTONE = 58
#: A machine was launched although an idle one fitted.
PASSED_OVER = 174
#: The registration of a new machine was removed as stale while its provision was paused.
REMOVED_BEFORE_ITS_RECORD = 620_239
REMOVED_FAULTS = "reset-failed,listener-dies,write-unsure,slow-call,agent-pause,terminate,pause,throttled"
#: Bugs that the small worlds of the long campaign found.
FOUND_IN_SMALL_WORLDS = {
    "quarantine-unseen": 422,
    "expired at creation": 7260,
    "a drain over a quarantine": 13_866,
    "a cancelled rollback": 69,
    "a cancelled call to make messages visible": 710_172,
    "a launch after the deadline": 6031,
    "a shorter extension of the same job": 11_892,
    "a shorter quarantine during the return to the pool": 1_005_925,
}
#: Bugs that worlds with runner sets found.
FOUND_WITH_SETS = {
    "above the maximum after a lost machine returned": 301_596,
    "a late renewal of a listening runner": 307_242,
    "a second re-run by a paused listener": 307_051,
    "a second re-run after a late write": 304_433,
    "two machines of one provision": 305_403,
    "a release of a listening runner over the run of its job": 700_088,
}
#: Some mutants of each kind that need few seeds; `make simulate` runs all of them.
QUICK = (
    "claim-keeps-epoch",
    "adopt-a-sibling",
    "no-rollback",
    "signals-of-any-epoch",
    "release-without-attempt",
    "current-registration-is-stale",
    "start-before-running",
    "stop-before-removal",
    "agent-without-margin",
    "runtime-after-the-deadline",
    "half-the-age",
    "surplus-kept-hidden",
    "limit-without-the-new",
    "notice-of-the-idle-ignored",
    "sent-away-is-served",
)
#: Worlds with runner sets, the transitions that only they have, and mutants that need few of them.
DEMAND = CampaignSettings(hours=0.1, instances=3, demand=True)
SMALL_WITH_SETS = replace(DEMAND, hours=0.15)
DEMAND_SEEDS = 50
DEMAND_ROWS = frozenset({"equip", "bind", "listen-on", "fill"})
QUICK_OF_DEMAND = (
    "free-capacity-announced",
    "lease-without-expiry",
    "surplus-without-deregistration",
    "acknowledged-and-forgotten",
    "fork-by-its-event",
    "configuration-kept-while-bound",
    "listener-before-the-boot",
    "launch-without-its-record",
    "second-job-of-a-registration",
)
#: Worlds whose GitHub knows when runs end, with what may keep a sweep from reading it.
UNRELEASED_SEEDS = 40
UNRELEASED = replace(
    SMALL,
    faults=parse_faults(
        "run-unreleased,rerun,release-never,github-403,github-5xx,github-unsure,github-hangs,pause,crash,clock-skew"
    ),
)
SMALL_WORLD = ("--hours", "0.1", "--instances", "4")


def report(seed: int, settings: CampaignSettings = SETTINGS) -> str:
    return "\n".join(describe(shrink(simulate(settings.plan(seed)), tries=60)))


@pytest.mark.timeout(1_200)
def test_no_invariant_is_violated_in_the_short_campaign():
    summary = run_many(range(SEEDS), SETTINGS, workers=2)
    assert summary.seeds == SEEDS
    assert not summary.violations, report(min(summary.violations))
    drawn = [fault for fault in Fault if fault not in NAMED and not fault.needs_demand]
    missing = [fault.value for fault in drawn if not summary.faults[fault]]
    assert not missing, f"these faults never happened: {missing}"
    rows = {row.name for row in TRANSITIONS}
    unused = sorted(name for name in rows - DEMAND_ROWS if not summary.stats[f"transition {name}"])
    assert not unused, f"these transitions never happened: {unused}"


@pytest.mark.timeout(1_200)
def test_no_invariant_is_violated_with_runner_sets():
    summary = run_many(range(DEMAND_SEEDS), DEMAND, workers=2)
    assert not summary.violations, report(min(summary.violations), DEMAND)
    missing = [fault.value for fault in Fault if not summary.faults[fault] and fault.needs_demand]
    assert not missing, f"these faults never happened: {missing}"
    unused = [name for name in DEMAND_ROWS if not summary.stats[f"transition {name}"]]
    assert not unused, f"these transitions never happened: {unused}"
    assert summary.stats["jobs of sets"] > 5 * DEMAND_SEEDS


@pytest.mark.timeout(900)
def test_mutants_of_demand_mode_are_caught():
    chosen = [mutant for mutant in MUTANTS if mutant.name in QUICK_OF_DEMAND]
    assert len(chosen) == len(QUICK_OF_DEMAND)
    missed = [mutant.name for mutant, result in run_all(chosen, seeds=20, workers=2) if not result.invariant]
    assert not missed


def test_no_invariant_is_violated_with_few_faults():
    summary = run_many(range(FEW_SEEDS), FEW_FAULTS, workers=2)
    assert not summary.violations, report(min(summary.violations), FEW_FAULTS)


def test_runs_that_end_without_a_release_are_released():
    summary = run_many(range(UNRELEASED_SEEDS), UNRELEASED, workers=2)
    assert not summary.violations, report(min(summary.violations), UNRELEASED)
    assert summary.faults[Fault.RUN_UNRELEASED] > UNRELEASED_SEEDS
    assert summary.stats["ended runs released"] > UNRELEASED_SEEDS / 4


def test_mutants_of_ended_runs_are_caught():
    chosen = [mutant for mutant in MUTANTS if mutant.name.startswith("ended-")]
    assert len(chosen) == 4
    missed = [mutant.name for mutant, result in run_all(chosen, seeds=80, workers=2) if not result.invariant]
    assert not missed


@pytest.mark.parametrize(
    ("seed", "settings"),
    [
        *((seed, SETTINGS) for seed in FOUND_BUGS.values()),
        (LATE_RENEWAL, replace(SMALL, faults=parse_faults(LATE_RENEWAL_FAULTS))),
        (LOST_TOMBSTONE, SETTINGS),
        (PASSED_OVER, SETTINGS),
        *((seed, SMALL) for seed in FOUND_IN_SMALL_WORLDS.values()),
        *((seed, SMALL_WITH_SETS) for seed in FOUND_WITH_SETS.values()),
        (REMOVED_BEFORE_ITS_RECORD, replace(SMALL, faults=parse_faults(REMOVED_FAULTS))),
    ],
)
def test_seeds_of_found_bugs_violate_nothing(seed: int, settings: CampaignSettings):
    assert not simulate(settings.plan(seed)).violation


@pytest.mark.timeout(900)
def test_quick_mutants_are_caught():
    chosen = [mutant for mutant in MUTANTS if mutant.name in QUICK]
    assert len(chosen) == len(QUICK)
    missed = [mutant.name for mutant, result in run_all(chosen, seeds=40, workers=2) if not result.invariant]
    assert not missed


def simulation(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "simulation", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_campaign_prints_a_summary_as_json():
    done = simulation("--seeds", "6", "--first-seed", "3", *SMALL_WORLD, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["seeds"], document["violations"], document["first_seed"]) == (6, [], 3)
    assert document["machines"] > 0
    assert document["checks"] > 100
    assert set(document["faults"]) == {fault.value for fault in Fault}
    assert document["seeds_per_s"] > 0
    assert done.stderr.splitlines()[-1] == "verdict: passed (0 violations in 6 seeds)"


def test_one_seed_with_trace_is_reproducible():
    first, again = (simulation("--seed", "5", "--trace", *SMALL_WORLD, "--json") for _ in range(2))
    assert first.returncode == 0, first.stderr
    document = json.loads(first.stdout)
    assert document["trace_hash"] == json.loads(again.stdout)["trace_hash"]
    assert any("record" in line for line in document["trace"])


def test_campaign_prints_a_summary_as_text():
    done = simulation("--seeds", "2", "--faults", "crash, write-lost", *SMALL_WORLD)
    assert done.returncode == 0, done.stderr
    assert "seeds/s" in done.stdout
    assert done.stdout.splitlines()[-1] == "verdict: passed (0 violations in 2 seeds)"


def test_few_faults():
    done = simulation("--seeds", "2", "--first-seed", "0", "--faults", "few", *SMALL_WORLD, "--json")
    assert done.returncode == 0, done.stderr
    assert 0 < sum(1 for count in json.loads(done.stdout)["faults"].values() if count) <= 2 * FEW


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--faults", "rain"), "rain"),
        (("--faults", ","), "empty"),
        (("--trace",), "--seed"),
        (("--seeds", "0"), "seeds"),
        (("--hours", "never"), "hours"),
    ],
)
def test_bad_input_prints_one_line(arguments: tuple[str, ...], word: str):
    done = simulation(*arguments)
    assert done.returncode == 2
    assert word in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
