"""Explanations as terminal output, one line per event, and as JSON documents."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from remuda.cli.rendering.formatting import clean
from remuda.cli.rendering.results import record_document
from remuda.domain.reporting.explanation import ExplainedEvent, Explanation, Severity
from remuda.domain.serialization import to_jsonable
from remuda.domain.signals import Signal

if TYPE_CHECKING:
    from rich.text import Text

_STYLES = {Severity.PLAIN: "", Severity.GOOD: "green", Severity.BAD: "yellow", Severity.MINOR: "dim"}
#: Width of an instance id, to align the texts.
_ID_WIDTH = 19

#: Meaning of the agents' signals.
_MEANING = {
    Signal.UD_OK: "the pre-runner script is done",
    Signal.UD_FAILED: "the pre-runner script failed",
    Signal.UD_REG_OK: "it is registered",
    Signal.UD_REG_FAILED: "it has no working runner",
    Signal.UD_REMOVE_REG_OK: "its registration is removed",
    Signal.UD_REMOVE_REG_FAILED: "its registration could not be removed",
    Signal.UD_REMOVE_REG_REMOVE_RUN_OK: "it is reset",
    Signal.UD_REMOVE_REG_REMOVE_RUN_FAILED: "it could not be reset",
}
_SIGNAL = re.compile(rf"\b({'|'.join(Signal)})\b(?: of (assignment \d+))?", re.ASCII)
#: Reasons that repeat the event, followed by the actor.
_REDUNDANT_REASON = re.compile(r"sent to the pool( \([a-z-]+\))")
_FOR_RUN = re.compile(r" for (run \S+)$")
_REPEATED_WORD = re.compile(r"\b(\w+) \(\1 ")


def describe_signals(text: str) -> str:
    """Put the meaning before each signal name in a text."""
    return _SIGNAL.sub(lambda found: f"{_MEANING[Signal(found[1])]} ({', '.join(filter(None, found.groups()))})", text)


def _simplified(explanation: Explanation) -> Explanation:
    """Describe signals and remove repetitions."""
    return replace(
        explanation,
        title=_REPEATED_WORD.sub(r"\1 (", explanation.title),
        lines=tuple(map(_simplified_line, explanation.lines)),
        upcoming=tuple(map(describe_signals, explanation.upcoming)),
    )


def _simplified_line(line: ExplainedEvent) -> ExplainedEvent:
    if known := _REDUNDANT_REASON.fullmatch(line.why):
        return replace(line, what=line.what + known[1], why="")
    run = _FOR_RUN.search(line.what)
    repeated = run is not None and re.search(rf"\b{re.escape(run[1])}\b", line.why)
    what = line.what[: run.start()] if run and repeated else line.what
    return replace(line, what=what, why=describe_signals(line.why))


def explanation_document(explanation: Explanation) -> dict[str, Any]:
    explanation = _simplified(explanation)
    return {
        "kind": explanation.kind,
        "subject": explanation.subject,
        "title": explanation.title,
        "lines": [{**record_document(line), "at": to_jsonable(line.at)} for line in explanation.lines],
        "next": list(explanation.upcoming),
    }


def explanation_lines(explanation: Explanation) -> list[Text]:
    from rich.text import Text  # noqa: PLC0415 - slow to import

    explanation = _simplified(explanation)
    lines = [Text(clean(explanation.title), style="bold")]
    day = None
    began = explanation.lines[0].at if explanation.lines else None
    for line in explanation.lines:
        if line.at.date() != day:
            day = line.at.date()
            lines.append(Text(f"{line.at:%Y-%m-%d} UTC", style="dim"))
        lines.append(_event_line(line, began or line.at, with_id=explanation.kind == "run"))
    lines += [Text("Next", style="bold"), *(Text(f"  {clean(text)}") for text in explanation.upcoming)]
    return lines


def _event_line(line: ExplainedEvent, began: datetime, *, with_id: bool) -> Text:
    from rich.text import Text  # noqa: PLC0415

    since_s = (line.at - began).total_seconds()
    text = Text(f"  {line.at:%H:%M:%S}.{line.at.microsecond // 1000:03d} {since_s:>+10.2f} s  ", style="dim")
    if with_id:
        text.append(f"{line.instance_id:<{_ID_WIDTH}}  ", style="not dim")
    text.append(clean(line.what), style=f"not dim {_STYLES[line.tone]}".strip())
    if line.why:
        text.append(f": {clean(line.why)}", style="not dim")
    return text
