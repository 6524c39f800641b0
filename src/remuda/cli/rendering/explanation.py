"""Explanations as terminal output, one line per event, and as JSON documents."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from remuda.cli.rendering.formatting import clean
from remuda.cli.rendering.results import record_document
from remuda.domain.reporting.explanation import ExplainedEvent, Explanation, Severity
from remuda.domain.serialization import to_jsonable

if TYPE_CHECKING:
    from rich.text import Text

_STYLES = {Severity.NORMAL: "", Severity.GOOD: "green", Severity.BAD: "yellow", Severity.MINOR: "dim"}
#: Width of an instance id, to align the texts.
_ID_WIDTH = 19


def explanation_document(explanation: Explanation) -> dict[str, Any]:
    return {
        "kind": explanation.kind,
        "subject": explanation.subject,
        "title": explanation.title,
        "events": [{**record_document(event), "at": to_jsonable(event.at)} for event in explanation.events],
        "next": list(explanation.next_steps),
    }


def explanation_lines(explanation: Explanation) -> list[Text]:
    from rich.text import Text  # noqa: PLC0415 - slow to import

    lines = [Text(clean(explanation.title), style="bold")]
    day = None
    began = explanation.events[0].at if explanation.events else None
    for event in explanation.events:
        if event.at.date() != day:
            day = event.at.date()
            lines.append(Text(f"{event.at:%Y-%m-%d} UTC", style="dim"))
        lines.append(_event_line(event, began or event.at, with_id=explanation.kind == "run"))
    lines += [Text("Next", style="bold"), *(Text(f"  {clean(text)}") for text in explanation.next_steps)]
    return lines


def _event_line(event: ExplainedEvent, began: datetime, *, with_id: bool) -> Text:
    from rich.text import Text  # noqa: PLC0415

    since_s = (event.at - began).total_seconds()
    text = Text(f"  {event.at:%H:%M:%S}.{event.at.microsecond // 1000:03d} {since_s:>+10.2f} s  ", style="dim")
    if with_id:
        text.append(f"{event.instance_id:<{_ID_WIDTH}}  ", style="not dim")
    text.append(clean(event.what), style=f"not dim {_STYLES[event.severity]}".strip())
    if event.why:
        text.append(f": {clean(event.why)}", style="not dim")
    return text
