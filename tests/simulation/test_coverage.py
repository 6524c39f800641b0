"""The table of faults and states: what is empty, what cannot be filled, and what was thought so."""

from __future__ import annotations

import pytest

from remuda.domain.instance import State
from simulation.coverage import IMPOSSIBLE, STATES, empty_cells, wonders
from simulation.faults import NO_RECORD, Fault
from simulation.targeted_scenarios import SCENES, Scene


def test_every_reason_is_about_a_cell_of_the_table():
    assert {state for _, state in IMPOSSIBLE} <= set(STATES)
    assert all(reason for reason in IMPOSSIBLE.values())


def test_what_is_empty_is_told_unless_it_cannot_be_filled():
    empty = empty_cells({(Fault.CRASH, State.IDLE): 3})
    assert (Fault.CRASH, State.RUNNING) in empty
    assert (Fault.CRASH, State.IDLE) not in empty
    assert (Fault.NO_CAPACITY, State.IDLE) not in empty
    assert len(empty) + len(IMPOSSIBLE) + 1 == len(Fault) * len(STATES)


def test_what_happens_although_it_cannot_is_told():
    assert wonders({(Fault.DRAIN, NO_RECORD): 1, (Fault.DRAIN, State.IDLE): 1}) == [(Fault.DRAIN, NO_RECORD)]
    assert not wonders({})


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: f"{scene.fault} while {scene.state}")
def test_a_scene_fills_its_cell_and_breaks_nothing(scene: Scene):
    outcome = scene.play()
    assert not outcome.violation
    assert outcome.coverage[scene.cell]
    assert not wonders(outcome.coverage)
