"""The table of faults and states, from the documents of several campaigns (`remuda simulate --json`) and the scenes of
`scenes.py`, as a page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from simulation.campaign import Summary
from simulation.coverage import IMPOSSIBLE, STATES, Cell, empty_cells, wonders
from simulation.faults import Fault
from simulation.targeted_scenarios import SCENES


def together(documents: Iterable[Mapping[str, Any]]) -> Counter[Cell]:
    counted: Counter[Cell] = Counter()
    for document in documents:
        for fault, states in document["coverage"].items():
            counted.update({(Fault(fault), state): count for state, count in states.items()})
    return counted


def played() -> dict[str, Any]:
    """What the scenes came to, as of a campaign."""
    summary = Summary()
    for scene in SCENES:
        summary.add(scene.play())
    return summary.document()


def page(campaigns: Sequence[Mapping[str, Any]], scenes: Mapping[str, Any]) -> str:
    documents = [*campaigns, scenes]
    cells = together(documents)
    seeds = sum(int(document["seeds"]) for document in campaigns)
    violations = sum(len(document["violations"]) for document in documents)
    return "\n".join(
        [
            "# Faults and states",
            "",
            "Which fault met an instance in which state, how often. `-`: it cannot, for the reason below.",
            "",
            f"{seeds:,} seeds and {len(SCENES)} scenes, {violations} violations.",
            "",
            "A scene is a world in which something rare is made likely (`simulation/scenes.py`). They are for these,",
            f"which chance alone leaves empty for long: {_named(scene.cell for scene in SCENES)}.",
            "",
            *_table(cells),
            "",
            *_reasons(),
            *_left(cells),
            "",
        ]
    )


def _table(cells: Mapping[Cell, int]) -> Iterator[str]:
    yield f"| fault | {' | '.join(STATES)} |"
    yield "|---|" + "--:|" * len(STATES)
    for fault in Fault:
        yield f"| {fault} | {' | '.join(_cell(cells, (fault, state)) for state in STATES)} |"


def _cell(cells: Mapping[Cell, int], cell: Cell) -> str:
    return f"{cells[cell]:,}" if cells[cell] else "-" if cell in IMPOSSIBLE else "**0**"


def _reasons() -> Iterator[str]:
    reasons: dict[str, dict[Fault, list[str]]] = {}
    for (fault, state), reason in IMPOSSIBLE.items():
        reasons.setdefault(reason, {}).setdefault(fault, []).append(state)
    for reason, faults in reasons.items():
        states = sorted({state for some in faults.values() for state in some}, key=STATES.index)
        yield f"- {', '.join(faults)} while {', '.join(states)}: {reason}."


def _left(cells: Mapping[Cell, int]) -> Iterator[str]:
    if empty := empty_cells(cells):
        yield ""
        yield f"Could be filled, and are not: {_named(empty)}."


def _named(cells: Iterable[Cell]) -> str:
    return ", ".join(f"{fault} while {state}" for fault, state in cells)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulation.coverage_report", description=__doc__)
    parser.add_argument("documents", nargs="+", type=Path)
    parser.add_argument("--write", type=Path, help="a file to write the page to")
    given = parser.parse_args(arguments)
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in given.documents]
    scenes = played()
    text = page(documents, scenes)
    if given.write:
        given.write.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    cells = together([*documents, scenes])
    for fault, state in empty_cells(cells):
        sys.stderr.write(f"empty: {fault} while {state}\n")
    for fault, state in wonders(cells):
        sys.stderr.write(f"called impossible, and happened: {fault} while {state}\n")
    return 1 if empty_cells(cells) or wonders(cells) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
