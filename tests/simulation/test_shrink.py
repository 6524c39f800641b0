"""Shrinking of violations, and their reports."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from remuda.cli.output import Output
from remuda.domain.errors import InvariantViolated
from simulation.__main__ import run_one
from simulation.campaign import CampaignSettings
from simulation.faults import Swarm
from simulation.invariants import Violation
from simulation.plan import draw_plan
from simulation.run import simulate
from simulation.safety import SafetyInvariants
from simulation.shrink import describe, minimize, shrink
from simulation.world import World


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
    worlds = (simulate(draw_plan(seed, hours=0.3, instances=6)) for seed in range(40))
    found = next(world for world in worlds if world.violation is not None)
    shrunk = shrink(found, tries=60)
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
