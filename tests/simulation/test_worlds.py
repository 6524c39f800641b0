"""Simulated worlds: determinism, selection of faults, and shrinking of violations."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache

import pytest

from remuda.cli.main import run_app
from remuda.cli.output import Output
from remuda.domain.errors import InvariantViolated
from simulation.__main__ import main, run_one
from simulation.campaign import CampaignSettings, CampaignSummary, simulate
from simulation.faults import FEW, NAMED, OF_MACHINES, SEPARATE, Fault, FaultChoice, Swarm, format_faults, parse_faults
from simulation.invariants import Violation
from simulation.plan import LONG_JOB_S, TOKEN_LIVES_S, PlannedRun, WorldScale, draw_plan
from simulation.safety import SafetyInvariants
from simulation.shrink import describe, minimize, shrink
from simulation.world import World

PROGRAM = """
import sys
from simulation.plan import draw_plan
from simulation.campaign import simulate
for seed in sys.argv[1:]:
    result = simulate(draw_plan(int(seed), hours=0.5, instances=10))
    print(result.digest, result.steps, result.violation)
"""
SEEDS = ("12", "13", "203")


@cache
def history(salt: str, seeds: tuple[str, ...]) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": salt}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *seeds], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_a_seed_gives_the_same_trace_under_another_hash_seed():
    assert history("1", SEEDS) == history("4242", SEEDS)


def test_an_earlier_simulation_does_not_change_the_trace():
    """Memory addresses of tasks differ then."""
    *_, last = history("1", SEEDS).splitlines()
    assert [last] == history("1", SEEDS[-1:]).splitlines()


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


DRAWS = range(300)


#: Faults that are drawn: the others occur only in worlds that name them.
DRAWN = frozenset(Fault) - frozenset(NAMED)
OF_RUNS = frozenset(fault for fault in DRAWN if not fault.needs_demand)
SEPARATELY = frozenset(SEPARATE)


def drawn(seed: int, faults: FaultChoice, *, demand: bool = False) -> frozenset[Fault]:
    return draw_plan(seed, hours=0.1, instances=4, faults=faults, demand=demand).faults


@pytest.mark.parametrize("text", ["swarm", "few", "all", "none", "crash,write-lost"])
def test_formatted_faults_parse_to_the_same(text: str):
    assert format_faults(parse_faults(text)) == text


def test_swarm_draws_half_of_the_faults_per_seed():
    drawings = [drawn(seed, Swarm.HALF) for seed in DRAWS]
    assert {len(faults - SEPARATELY) for faults in drawings} == {len(OF_RUNS - SEPARATELY) // 2}
    assert {len(faults & SEPARATELY) for faults in drawings} == {len(SEPARATELY) // 2}
    assert frozenset[Fault]().union(*drawings) == OF_RUNS
    assert len(set(drawings)) == len(drawings)


def test_worlds_with_runner_sets_also_draw_half_of_their_own_faults_or_none_that_blind_a_listener():
    drawings = {seed: drawn(seed, Swarm.HALF, demand=True) for seed in DRAWS}
    own = DRAWN - OF_RUNS
    calm = {seed for seed, faults in drawings.items() if faults <= OF_MACHINES | {Fault.CONFIG_CHANGE}}
    assert 0.1 < len(calm) / len(DRAWS) < 0.4
    assert {len(faults & own) for seed, faults in drawings.items() if seed not in calm} == {len(own) // 2}
    for seed, faults in drawings.items():
        half = drawn(seed, Swarm.HALF)
        assert faults & OF_RUNS == (half & (OF_MACHINES | {Fault.CONFIG_CHANGE}) if seed in calm else half)
    assert frozenset[Fault]().union(*drawings.values()) == DRAWN


def test_runner_sets_change_nothing_else_of_a_plan():
    without, with_sets = (draw_plan(3, hours=0.2, instances=4, demand=demand) for demand in (False, True))
    assert not any(without.runner_sets)
    assert not without.listeners
    assert with_sets.runner_sets[0]
    assert (without.reuses, without.runners) == (with_sets.reuses, with_sets.runners)


def test_few_draws_one_to_six_faults_and_every_fault_occurs():
    drawings = [drawn(seed, Swarm.FEW) for seed in DRAWS]
    assert {len(faults - SEPARATELY) for faults in drawings} == set(range(1, FEW + 1))
    assert {len(faults & SEPARATELY) for faults in drawings} == {0, 1}
    assert frozenset[Fault]().union(*drawings) == OF_RUNS
    with_sets = [drawn(seed, Swarm.FEW, demand=True) for seed in DRAWS]
    assert frozenset[Fault]().union(*with_sets) == DRAWN


def test_worlds_differ_in_their_times():
    plans = [draw_plan(seed, hours=0.1, instances=4) for seed in DRAWS]
    assert {plan.scale for plan in plans} == set(WorldScale)
    assert {plan.token_life_s for plan in plans} == set(TOKEN_LIVES_S)
    operations = [item for plan in plans if plan.scale is WorldScale.LONG_JOBS for item in plan.operations]
    assert max(seconds for item in operations if isinstance(item, PlannedRun) for seconds in item.jobs) >= LONG_JOB_S[0]


def test_the_same_faults_by_name_give_the_same_plan():
    plan = draw_plan(7, hours=0.25, instances=5, faults=Swarm.FEW)
    assert draw_plan(7, hours=0.25, instances=5, faults=plan.faults) == plan


def test_minimize_keeps_the_needed_items():
    needed = {3, 17}
    assert minimize(list(range(40)), lambda items: needed <= set(items)) == [3, 17]


def test_minimize_of_an_always_failing_check_is_empty():
    assert minimize(list(range(10)), lambda _: True) == []


def test_a_violation_is_shrunk_and_described(monkeypatch: pytest.MonkeyPatch):
    """With a wrong rule: no instance may ever be claimed."""
    check = SafetyInvariants.record_written

    def strict(self: SafetyInvariants, instance_id: str) -> None:
        check(self, instance_id)
        record = self._world.database.instances.get(instance_id)
        if record is not None and record.epoch > 1:
            self.violated("S1", f"{instance_id} was claimed", instance_id)

    monkeypatch.setattr(SafetyInvariants, "record_written", strict)
    # With few faults, claims are usual, so that operations can be removed one by one.
    worlds = (simulate(draw_plan(seed, hours=0.3, instances=6, faults=Swarm.FEW)) for seed in range(40))
    found = next(world for world in worlds if world.violation is not None)
    shrunk = shrink(found, seconds=float("inf"))
    assert shrunk.smallest.violation is not None
    assert shrunk.smallest.violation.invariant == "S1"
    assert len(shrunk.smallest.plan.operations) < len(found.plan.operations) / 2
    lines = list(describe(shrunk))
    assert lines[0].startswith(f"seed {found.plan.seed}: S1 at ")
    assert "operations:" in lines
    assert "timeline:" in lines
    assert f"history of {shrunk.smallest.violation.instance_id}:" in lines
    assert " claim " in lines[-1]


def test_a_report_ends_with_the_command_for_the_full_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(SafetyInvariants, "launched", lambda self, machine: self.violated("S8", machine.instance_id))
    settings = CampaignSettings(hours=0.1, instances=4, faults=Swarm.FEW)
    assert run_one(1, settings, Output(as_json=True, quiet=True)) == InvariantViolated.exit_code
    (report,) = json.loads(capsys.readouterr().out)["reports"]
    assert report[-1] == "full trace: python -m simulation --seed 1 --hours 0.1 --instances 4 --faults few --trace"


def test_without_reports_a_violation_is_only_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(SafetyInvariants, "launched", lambda self, machine: self.violated("S8", machine.instance_id))
    settings = CampaignSettings(hours=0.1, instances=4, faults=Swarm.FEW)
    assert run_one(1, settings, Output(as_json=True, quiet=True), reports=0) == InvariantViolated.exit_code
    document = json.loads(capsys.readouterr().out)
    assert document["reports"] == []
    assert [item["invariant"] for item in document["violations"]] == ["S8"]


def test_shrinking_ends_after_its_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(SafetyInvariants, "launched", lambda self, machine: self.violated("S8", machine.instance_id))
    found = simulate(draw_plan(1, hours=0.1, instances=4))
    shrunk = shrink(found, seconds=0.0)
    assert shrunk.tries == 0
    assert shrunk.smallest.plan == found.plan


def test_a_campaign_lists_each_violation_as_soon_as_its_batch_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    listed: list[list[str]] = []

    def two_batches(*_: object, done: Callable[[CampaignSummary], None], **__: object) -> CampaignSummary:
        summary = CampaignSummary()
        for seed in (7, 8):
            summary.seeds += 1
            summary.violations[seed] = Violation(invariant="S1", text="owned twice", instance_id="", at=1.0)
            done(summary)
            listed.append([line for line in capsys.readouterr().err.splitlines() if line.startswith("seed ")])
        return summary

    monkeypatch.setattr("simulation.__main__.run_many", two_batches)
    assert run_app(main, ["--seeds", "2", "--first-seed", "7", "--reports", "0"]) == InvariantViolated.exit_code
    assert listed == [["seed 7: S1 at 1.000 s: owned twice"], ["seed 8: S1 at 1.000 s: owned twice"]]


def test_a_world_stops_at_its_first_violation(monkeypatch: pytest.MonkeyPatch):
    times: list[float] = []
    monkeypatch.setattr(World, "stop", _recording(World.stop, times))
    monkeypatch.setattr(SafetyInvariants, "launched", lambda self, machine: self.violated("S8", machine.instance_id))
    result = simulate(draw_plan(1, hours=0.1, instances=4))
    assert result.violation is not None
    assert result.violation.invariant == "S8"
    assert len(set(times)) == 1


def _recording(stop: Callable[[World, Violation], None], times: list[float]) -> Callable[[World, Violation], None]:
    def recorded(self: World, violation: Violation) -> None:
        times.append(violation.at)
        stop(self, violation)

    return recorded
