"""Verdicts on survivors, and the score."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutation_testing.verdicts import (
    SIMULATION_VERDICTS_FILE,
    VERDICTS_FILE,
    VerdictKind,
    load_verdicts,
    read_verdicts,
    score,
    survivor_table,
)

ENTRY = '[[mutant]]\nid = "{}"\nverdict = "{}"\nreason = "because"\n'


def result(name: str, outcome: str) -> dict[str, object]:
    text = {"module": "remuda.domain.trust", "function": "f", "old": "a | b", "new": ""}
    return {"id": name, "outcome": outcome, **text}


@pytest.mark.parametrize(("without", "counted"), [("equivalent", "accepted"), ("neutral", "missed")])
def test_mutants_that_cannot_be_killed_do_not_count(without: str, counted: str):
    mutants = [result("a", "killed"), result("b", "timeout"), result("c", "survived"), result("d", "not covered")]
    verdicts = read_verdicts(ENTRY.format("c", without) + ENTRY.format("d", counted))
    found = score(mutants, verdicts)
    assert (found.tried, found.killed, found.timeouts, found.equivalent) == (4, 2, 1, 1)
    assert round(found.percent) == 67


def test_a_mutant_that_is_killed_is_not_equivalent_whatever_its_verdict():
    assert score([result("a", "killed")], read_verdicts(ENTRY.format("a", "equivalent"))).equivalent == 0


def test_survivors_are_listed_with_their_verdict():
    table = survivor_table([result("a", "survived"), result("b", "killed")], {})
    assert "| a | `domain.trust` `f` | `a \\| b` → (nothing) | none yet |" in table
    assert "| b |" not in table


@pytest.mark.parametrize("text", [ENTRY.format("a", "equivalent") * 2, ENTRY.format("a", "unclear")])
def test_contradicting_and_unknown_verdicts_are_errors(text: str):
    with pytest.raises(ValueError):
        read_verdicts(text)


@pytest.mark.parametrize("file", [VERDICTS_FILE, SIMULATION_VERDICTS_FILE], ids=["tests", "simulation"])
def test_the_verdicts_of_the_repository_are_well_formed(file: Path):
    assert all(verdict.reason and verdict.kind in VerdictKind for verdict in load_verdicts(file).values())
