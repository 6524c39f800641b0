"""Texts and exit codes of actions/runner that the agent matches: tests/data/actions_runner.json lists them all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from remuda.agent import listener, runner
from remuda.agent.decide import TERMINAL_EXITS

CONTRACT = json.loads((Path(__file__).parents[2] / "data" / "actions_runner.json").read_text(encoding="utf-8"))
#: Of the modules that read output of the runner.
PATTERNS: dict[str, re.Pattern[str]] = {
    name: value
    for module in (runner, listener)
    for name, value in vars(module).items()
    if isinstance(value, re.Pattern)
}


@pytest.mark.parametrize("entry", CONTRACT["texts"], ids=lambda entry: f"{entry['pattern']} {entry['source'][:60]}")
def test_a_pattern_matches_the_text_of_the_runner(entry: dict[str, Any]) -> None:
    assert PATTERNS[entry["pattern"]].search(entry["text"])


def test_every_pattern_has_a_text_with_its_source() -> None:
    assert set(PATTERNS) == {entry["pattern"] for entry in CONTRACT["texts"]}
    assert all(entry["source"] for entry in CONTRACT["texts"])


def test_terminal_exit_codes_are_those_of_the_runner() -> None:
    codes = CONTRACT["exit_codes"]["codes"]
    assert {codes[name] for name in CONTRACT["exit_codes"]["terminal"]} == TERMINAL_EXITS
