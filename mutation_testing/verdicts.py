"""Verdicts on mutants that survived, and the report of a run.

`verdicts.toml` is written by hand: one entry per mutant, by its id. Ids stay the same as long as the changed code does,
so a later run shows only survivors without a verdict.
"""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from mutation_testing.recording import PACKAGES

FOLDER = Path(__file__).parent
VERDICTS_FILE = FOLDER / "verdicts.toml"
#: Verdicts on mutants that the simulation alone does not kill.
SIMULATION_VERDICTS_FILE = FOLDER / "simulation_verdicts.toml"
_KILLED = frozenset({"killed", "timeout"})


class VerdictKind(StrEnum):
    #: No test can tell the mutant from the original.
    EQUIVALENT = "equivalent"
    #: A test that was written since then kills it.
    KILLED_SINCE = "killed since"
    #: It differs, but not in a way that matters.
    ACCEPTED = "accepted"
    #: Of the simulation: it breaks no invariant, but changes a text, a speed, or the way to the same end.
    NEUTRAL = "neutral"
    #: Of the simulation: it breaks an invariant, or one is missing.
    MISSED = "missed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    kind: VerdictKind
    reason: str


def read_verdicts(text: str) -> dict[str, Verdict]:
    found: dict[str, Verdict] = {}
    for entry in tomllib.loads(text).get("mutant", []):
        if entry["id"] in found:
            raise ValueError(f"two verdicts on mutant {entry['id']}")
        found[entry["id"]] = Verdict(kind=VerdictKind(entry["verdict"]), reason=entry["reason"])
    return found


def load_verdicts(file: Path = VERDICTS_FILE) -> dict[str, Verdict]:
    return read_verdicts(file.read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    tried: int
    killed: int
    timeouts: int
    equivalent: int

    @property
    def percent(self) -> float:
        """Killed ones of those that are not equivalent."""
        return 100 * self.killed / (self.tried - self.equivalent) if self.tried > self.equivalent else 100.0


def score(mutants: Sequence[Mapping[str, Any]], verdicts: Mapping[str, Verdict]) -> Score:
    outcomes = Counter(mutant["outcome"] for mutant in mutants)
    survivors = [mutant["id"] for mutant in mutants if mutant["outcome"] not in _KILLED]
    cannot_be_killed = {VerdictKind.EQUIVALENT, VerdictKind.NEUTRAL}
    equivalent = [name for name in survivors if name in verdicts and verdicts[name].kind in cannot_be_killed]
    killed = sum(outcomes[name] for name in _KILLED)
    return Score(tried=len(mutants), killed=killed, timeouts=outcomes["timeout"], equivalent=len(equivalent))


def score_table(mutants: Sequence[Mapping[str, Any]], verdicts: Mapping[str, Verdict]) -> str:
    lines = [
        "| package | mutants | killed | of these by a time limit | equivalent | score |",
        "|---|---|---|---|---|---|",
    ]
    for package in PACKAGES:
        ours = [mutant for mutant in mutants if mutant["module"].split(".")[1] == package]
        found = score(ours, verdicts)
        numbers = (found.tried, found.killed, found.timeouts, found.equivalent)
        lines.append(f"| `{package}` | {' | '.join(map(str, numbers))} | {found.percent:.0f} % |")
    return "\n".join(lines)


def survivor_table(mutants: Sequence[Mapping[str, Any]], verdicts: Mapping[str, Verdict]) -> str:
    lines = ["| mutant | code | change | verdict |", "|---|---|---|---|"]
    for mutant in mutants:
        if mutant["outcome"] in _KILLED:
            continue
        verdict = verdicts.get(mutant["id"])
        text = f"{verdict.kind}: {verdict.reason}" if verdict else "none yet"
        change = f"{_code(mutant['old'])} → {_code(mutant['new'])}"
        where = f"`{mutant['module'].removeprefix('remuda.')}` {_code(mutant['function'])}"
        lines.append(f"| {mutant['id']} | {where} | {change} | {text} |")
    return "\n".join(lines)


def _code(text: str) -> str:
    short = " ".join(text.split()).replace("|", "\\|")
    short = short if len(short) <= 90 else f"{short[:89]}…"
    return f"`{short}`" if short else "(nothing)"


def results_file(judge: str) -> Path:
    """Results of the last full run with a judge, which the docs show."""
    return FOLDER / f"results-{judge}.json"


def load_results(judge: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(results_file(judge).read_text(encoding="utf-8"))
    return document
