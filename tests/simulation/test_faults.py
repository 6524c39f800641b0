"""Selection of the faults of a world."""

from __future__ import annotations

import pytest

from simulation.faults import FEW, Fault, FaultChoice, Swarm, format_faults, parse_faults
from simulation.plan import draw_plan

SEEDS = range(300)


def drawn(seed: int, faults: FaultChoice) -> frozenset[Fault]:
    return draw_plan(seed, hours=0.1, instances=4, faults=faults).faults


@pytest.mark.parametrize("text", ["swarm", "few", "all", "none", "crash,write-lost"])
def test_formatted_faults_parse_to_the_same(text: str):
    assert format_faults(parse_faults(text)) == text


def test_swarm_draws_half_of_the_faults_per_seed():
    drawings = [drawn(seed, Swarm.HALF) for seed in SEEDS]
    assert {len(faults) for faults in drawings} == {len(Fault) // 2}
    assert frozenset[Fault]().union(*drawings) == frozenset(Fault)
    assert len(set(drawings)) == len(drawings)


def test_few_draws_one_to_six_faults_and_every_fault_occurs():
    drawings = [drawn(seed, Swarm.FEW) for seed in SEEDS]
    assert {len(faults) for faults in drawings} == set(range(1, FEW + 1))
    assert frozenset[Fault]().union(*drawings) == frozenset(Fault)


def test_the_same_faults_by_name_give_the_same_plan():
    plan = draw_plan(7, hours=0.25, instances=5, faults=Swarm.FEW)
    assert draw_plan(7, hours=0.25, instances=5, faults=plan.faults) == plan
