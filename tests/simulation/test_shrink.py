"""From a violation to the least that shows it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from remuda.cli.output import Output
from remuda.domain.errors import InvariantViolated
from simulation.cli import Request, run_simulate
from simulation.invariants import SafetyInvariants, Violation
from simulation.plan import draw_plan
from simulation.run import simulate
from simulation.shrink import fewest, shrink, tell
from simulation.world import World


def test_fewest_leaves_what_is_needed():
    needed = {3, 17}
    assert fewest(list(range(40)), lambda items: needed <= set(items)) == [3, 17]


def test_fewest_of_what_needs_nothing_is_nothing():
    assert fewest(list(range(10)), lambda _: True) == []


def test_a_violation_is_cut_down_and_told(monkeypatch: pytest.MonkeyPatch):
    """A rule that is wrong on purpose: no instance may ever be claimed."""
    judge = SafetyInvariants.record_written

    def strict(self: SafetyInvariants, instance_id: str) -> None:
        judge(self, instance_id)
        record = self._world.database.instances.get(instance_id)
        if record is not None and record.epoch > 1:
            self.violated("S1", f"{instance_id} was claimed", instance_id)

    monkeypatch.setattr(SafetyInvariants, "record_written", strict)
    worlds = (simulate(draw_plan(seed, hours=0.3, instances=6)) for seed in range(40))
    found = next(world for world in worlds if world.violation is not None)
    shrunk = shrink(found, tries=60)
    assert shrunk.least.violation is not None
    assert shrunk.least.violation.invariant == "S1"
    assert len(shrunk.least.plan.operations) < len(found.plan.operations) / 2
    lines = list(tell(shrunk))
    assert lines[0].startswith(f"seed {found.plan.seed}: S1 at ")
    assert "operations:" in lines
    assert "timeline:" in lines
    assert f"history of {shrunk.least.violation.instance_id}:" in lines
    assert " claim " in lines[-1]


def test_a_violation_says_how_to_see_its_world_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(SafetyInvariants, "launched", lambda self, machine: self.violated("S8", machine.instance_id))
    asked = Request(seeds=1, hours=0.1, instances=4, faults="few", seed=1, trace=False, first=None, workers=None)
    assert run_simulate(asked, Output(as_json=True, quiet=True)) == InvariantViolated.exit_code
    (tale,) = json.loads(capsys.readouterr().out)["tales"]
    assert tale[-1] == "see all of it: python -m simulation --seed 1 --hours 0.1 --instances 4 --faults few --trace"


def test_a_world_stops_at_its_first_violation(monkeypatch: pytest.MonkeyPatch):
    told: list[float] = []
    monkeypatch.setattr(World, "stop", _noting(World.stop, told))
    monkeypatch.setattr(SafetyInvariants, "launched", lambda self, machine: self.violated("S8", machine.instance_id))
    result = simulate(draw_plan(1, hours=0.1, instances=4))
    assert result.violation is not None
    assert result.violation.invariant == "S8"
    assert len(set(told)) == 1


def _noting(stop: Callable[[World, Violation], None], told: list[float]) -> Callable[[World, Violation], None]:
    def noted(self: World, violation: Violation) -> None:
        told.append(violation.at)
        stop(self, violation)

    return noted
