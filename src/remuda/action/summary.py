"""The page that a step leaves behind (GITHUB_STEP_SUMMARY), made from the same documents as `--json`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remuda.cli.rendering.results import applied_lines

#: A page may have a mebibyte; nobody reads more rows than that.
MAX_ROWS = 100
MAX_CELL = 300

#: What has a meaning in Markdown or HTML, in a table, or as the start of a link.
_SPECIAL = re.compile(r"[^\w\s.,:;/()'+=%-]|_|:(?=//)|(?<=www)\.", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")

Document = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenBack:
    """What a provision that failed did with an instance that it held."""

    instance_id: str
    source: str
    target: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    message: str
    fix: str
    exit_code: int
    interrupted: bool

    @property
    def sentence(self) -> str:
        return f"{self.message}; {self.fix}" if self.fix else self.message


def text(value: object) -> str:
    """Text from anywhere, as plain text of a table's cell."""
    line = _CONTROL.sub(" ", str(value)).strip()
    cut = line if len(line) <= MAX_CELL else line[: MAX_CELL - 1] + "…"
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", cut)


def summary(mode: str, document: Document, failure: Failure | None, given_back: Sequence[GivenBack]) -> str:
    parts = _failed(mode, failure, given_back) if failure is not None else _PAGES[mode](document)
    return "\n\n".join(parts) + "\n"


def _provision(document: Document) -> list[str]:
    instances = document["instances"]
    head = f"{_count(len(instances), 'runner')} for run {text(document['run_id'])}"
    facts = (
        f"{document['reused']} reused, {document['created']} created, in {_seconds(document['seconds'])}. "
        f"Jobs get them with <code>runs-on: {text(document['label'])}</code><br>"
        f"Tier {text(document['tier'])}: {text(document['tier_reason'])}"
        + ("<br>Ephemeral: each machine serves one job" if document["ephemeral"] else "")
    )
    rows = [
        (
            item["instance_id"],
            item["instance_type"],
            item["usage_class"],
            "reused" if item["source"] == "pool" else "created",
            _seconds(item["registration_seconds"]),
        )
        for item in instances
    ]
    phases = [(name, _seconds(spent)) for name, spent in document["phases"].items()]
    return [
        _title("provision", head),
        facts,
        *_table(("instance", "type", "usage", "source", "registered in"), rows),
        *_table(("phase", "time"), [*phases, ("all", _seconds(document["seconds"]))]),
        *_calls(document),
    ]


def _release(document: Document) -> list[str]:
    fates = ("released", "retired", "expired", "skipped")
    told = ", ".join(f"{len(document[fate])} {fate}" for fate in fates if document[fate])
    rows = [
        (name, fate, document["reasons"].get(name, ""), _seconds(document["deregistration_seconds"].get(name)))
        for fate in fates
        for name in document[fate]
    ]
    return [
        _title("release", f"run {text(document['run_id'])}"),
        f"{told or 'nothing to release'}, in {_seconds(document['seconds'])}",
        *_table(("instance", "now", "why", "reset in"), rows),
        *_errors(document),
        *_calls(document),
    ]


_SWEPT = {
    "terminated": "ended, and EC2 confirmed it",
    "rolled_back": "taken back from provisions that failed",
    "announced": "announced to the pool",
    "finished": "interrupted releases finished",
    "removed": "registrations without an owner removed",
}


def _refresh(document: Document) -> list[str]:
    rows = [("configuration", line) for line in applied_lines(document)]
    rows += [("retired", f"{name}: {document['reasons'].get(name, '')}") for name in document["retired"]]
    rows += [(what, name) for field, what in _SWEPT.items() for name in document[field]]
    return [
        _title("refresh", _count(len(rows), "change") if rows else "all is as it should be"),
        f"in {_seconds(document['seconds'])}",
        *_table(("what", "which"), rows),
        *_errors(document),
        *_calls(document),
    ]


def _scale_down(document: Document) -> list[str]:
    decisions = document["decisions"]
    would = "what would be done" if document["dry_run"] else _count(len(decisions), "decision")
    quota = document["idle_quota"]
    rows = [
        (item["instance_id"], item["owner"], item["action"], item["reason"], "yes" if item["done"] else "no")
        for item in decisions
    ]
    return [
        _title("scale-down", f"{text(document['environment'])}, {would}"),
        f"Idle quota {text(quota['idle_count'])}, {text(quota['eviction'])}; in {_seconds(document['seconds'])}",
        *_table(("instance", "owner", "action", "why", "done"), rows),
        *_errors(document),
        *_calls(document),
    ]


_PAGES: Mapping[str, Callable[[Document], list[str]]] = {
    "provision": _provision,
    "release": _release,
    "refresh": _refresh,
    "scale-down": _scale_down,
}


def _failed(mode: str, failure: Failure, given_back: Sequence[GivenBack]) -> list[str]:
    head = "cancelled" if failure.interrupted else "failed"
    told = text(failure.message) + (f"<br>To do: {text(failure.fix)}" if failure.fix else "")
    rows = [(item.instance_id, item.source, item.target) for item in given_back]
    return [
        _title(mode, head),
        f"{told}<br>Exit code {failure.exit_code}",
        *([f"Given back: {_count(len(rows), 'instance')}"] if rows else []),
        *_table(("instance", "was", "is"), rows),
    ]


def _title(mode: str, head: str) -> str:
    return f"### remuda {text(mode)}: {head}".replace(" :", ":")


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    if not rows:
        return []
    shown = [_row(map(text, row)) for row in rows[:MAX_ROWS]]
    table = "\n".join([_row(columns), _row("---" for _ in columns), *shown])
    left = len(rows) - MAX_ROWS
    return [table, f"and {left} more"] if left > 0 else [table]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _errors(document: Document) -> list[str]:
    return _table(("not done",), [(error,) for error in document["errors"]])


def _calls(document: Document) -> list[str]:
    counts = [f"{text(service)} {sum(calls.values())}" for service, calls in document["calls"].items() if calls]
    return [f"Calls: {', '.join(counts)}"] if counts else []


def _seconds(value: object) -> str:
    return f"{value:.2f} s" if isinstance(value, int | float) else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
