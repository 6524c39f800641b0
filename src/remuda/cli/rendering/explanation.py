"""A story for people, a line an event, and for programs."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from remuda.cli.rendering.results import record_document
from remuda.cli.rendering.tables import clean
from remuda.domain.reporting.explanation import ExplainedEvent, Explanation, Severity
from remuda.domain.serialization import to_jsonable
from remuda.domain.signals import Signal

if TYPE_CHECKING:
    from rich.text import Text

_STYLES = {Severity.PLAIN: "", Severity.GOOD: "green", Severity.BAD: "yellow", Severity.MINOR: "dim"}
#: An instance id's width, so that what is said stands in one column.
_ID_WIDTH = 19

#: What an agent means by its signals.
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
#: Reasons that say what the step itself says, and who took it.
_NOTHING_NEW = re.compile(r"told the pool( \([a-z-]+\))")
_FOR_RUN = re.compile(r" for (run \S+)$")
_TWICE = re.compile(r"\b(\w+) \(\1 ")


def in_words(text: str) -> str:
    """With what its signals mean; their names stay, for those who look for them."""
    return _SIGNAL.sub(lambda found: f"{_MEANING[Signal(found[1])]} ({', '.join(filter(None, found.groups()))})", text)


def _plainly(story: Explanation) -> Explanation:
    """In words, and nothing twice."""
    return replace(
        story,
        title=_TWICE.sub(r"\1 (", story.title),
        lines=tuple(map(_plain_line, story.lines)),
        upcoming=tuple(map(in_words, story.upcoming)),
    )


def _plain_line(line: ExplainedEvent) -> ExplainedEvent:
    if known := _NOTHING_NEW.fullmatch(line.why):
        return replace(line, what=line.what + known[1], why="")
    run = _FOR_RUN.search(line.what)
    repeated = run is not None and re.search(rf"\b{re.escape(run[1])}\b", line.why)
    what = line.what[: run.start()] if run and repeated else line.what
    return replace(line, what=what, why=in_words(line.why))


def explanation_document(story: Explanation) -> dict[str, Any]:
    story = _plainly(story)
    return {
        "kind": story.kind,
        "subject": story.subject,
        "title": story.title,
        "lines": [{**record_document(line), "at": to_jsonable(line.at)} for line in story.lines],
        "next": list(story.upcoming),
    }


def story_lines(story: Explanation) -> list[Text]:
    from rich.text import Text  # noqa: PLC0415 - only where it is shown

    story = _plainly(story)
    told = [Text(clean(story.title), style="bold")]
    day = None
    began = story.lines[0].at if story.lines else None
    for line in story.lines:
        if line.at.date() != day:
            day = line.at.date()
            told.append(Text(f"{line.at:%Y-%m-%d} UTC", style="dim"))
        told.append(_told(line, began or line.at, with_id=story.kind == "run"))
    told += [Text("Next", style="bold"), *(Text(f"  {clean(sentence)}") for sentence in story.upcoming)]
    return told


def _told(line: ExplainedEvent, began: datetime, *, with_id: bool) -> Text:
    from rich.text import Text  # noqa: PLC0415 - as above

    since_s = (line.at - began).total_seconds()
    text = Text(f"  {line.at:%H:%M:%S}.{line.at.microsecond // 1000:03d} {since_s:>+10.2f} s  ", style="dim")
    if with_id:
        text.append(f"{line.instance_id:<{_ID_WIDTH}}  ", style="not dim")
    text.append(clean(line.what), style=f"not dim {_STYLES[line.tone]}".strip())
    if line.why:
        text.append(f": {clean(line.why)}", style="not dim")
    return text
