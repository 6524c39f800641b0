"""A story for people, a line an event, and for programs."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from remuda.domain.documents import plain
from remuda.domain.story import Line, Story, Tone
from remuda.entrypoints.tables import clean
from remuda.entrypoints.views import record_document

if TYPE_CHECKING:
    from rich.text import Text

_STYLES = {Tone.PLAIN: "", Tone.GOOD: "green", Tone.BAD: "yellow", Tone.MINOR: "dim"}
#: An instance id's width, so that what is said stands in one column.
_ID_WIDTH = 19


def story_document(story: Story) -> dict[str, Any]:
    return {
        "kind": story.kind,
        "subject": story.subject,
        "title": story.title,
        "lines": [{**record_document(line), "at": plain(line.at)} for line in story.lines],
        "next": list(story.upcoming),
    }


def story_lines(story: Story) -> list[Text]:
    from rich.text import Text  # noqa: PLC0415 - only where it is shown

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


def _told(line: Line, began: datetime, *, with_id: bool) -> Text:
    from rich.text import Text  # noqa: PLC0415 - as above

    since_s = (line.at - began).total_seconds()
    text = Text(f"  {line.at:%H:%M:%S}.{line.at.microsecond // 1000:03d} {since_s:>+10.2f} s  ", style="dim")
    if with_id:
        text.append(f"{line.instance_id:<{_ID_WIDTH}}  ", style="not dim")
    text.append(clean(line.what), style=f"not dim {_STYLES[line.tone]}".strip())
    if line.why:
        text.append(f": {clean(line.why)}", style="not dim")
    return text
