"""Output of a workflow step: log lines, workflow commands, output files, and the Markdown summary.

GitHub's runner executes log lines that look like workflow commands. Text that may come from outside (an instance's
report, a response of AWS or GitHub) is therefore made harmless before it is written. The summary
(GITHUB_STEP_SUMMARY) shows the same documents as `--json`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TextIO

from remuda.cli.rendering.results import applied_lines
from remuda.cli.run import plural

#: Maximum rows of a table. GitHub limits a summary to 1 MiB.
MAX_ROWS = 100
MAX_TEXT = 300

#: Characters with a meaning in Markdown or HTML, and those that start a link.
_SPECIAL = re.compile(r"[^\w\s.,:;/()'+=%-]|_|:(?=//)|(?<=www)\.", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")

Document = Mapping[str, Any]
_SWEEP_RESULTS = {
    "terminated": "terminated",
    "rolled_back": "rolled back from failed provisions",
    "published": "published to the pool",
    "finished_releases": "interrupted release completed",
    "stale_registrations": "stale registration removed",
}
Level = Literal["error", "warning", "notice"]

#: The runner trims a line and treats a leading `::` as a command. Any non-word character counts as white space here.
_COMMAND = re.compile(r"\W*::")
#: The older command syntax, which the runner accepts anywhere in a line.
_OLD_COMMAND = "##["
#: Control characters, which could hide or overwrite lines of the log.
_LOG_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]")
#: Shorter secrets are masked by the runner only; replacing "a" in every word would make the log useless.
MIN_SECRET = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class RolledBackInstance:
    """An instance that a failed provision returned or terminated: its previous and its new state."""

    instance_id: str
    source: str
    target: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFailure:
    message: str
    fix: str
    exit_code: int
    interrupted: bool

    @property
    def text(self) -> str:
        return f"{self.message}; {self.fix}" if self.fix else self.message


def escape(value: object) -> str:
    """Escape untrusted text for a Markdown table: one line of at most `MAX_TEXT` characters."""
    line = _CONTROL.sub(" ", str(value)).strip()
    cut = line if len(line) <= MAX_TEXT else line[: MAX_TEXT - 1] + "…"
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", cut)


def summary(
    mode: str, document: Document, failure: StepFailure | None, rolled_back: Sequence[RolledBackInstance]
) -> str:
    parts = _failed(mode, failure, rolled_back) if failure is not None else _PAGES[mode](document)
    return "\n\n".join(parts) + "\n"


def _provision(document: Document) -> list[str]:
    instances = document["instances"]
    head = f"{plural(len(instances), 'runner')} for run {escape(document['run_id'])}"
    facts = (
        f"{document['reused']} reused, {document['created']} created, in {_seconds(document['seconds'])}. "
        f"Use them with <code>runs-on: {escape(document['label'])}</code>. "
        "They have no label <code>self-hosted</code>: a job that asks for it as well waits forever.<br>"
        f"Tier {escape(document['tier'])}: {escape(document['tier_reason'])}"
        + (f"<br>They end at {escape(document['ends_at'])}, even if a job runs" if document["ends_at"] else "")
        + ("<br>Ephemeral: each instance runs one job" if document["ephemeral"] else "")
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
        *_table(("phase", "time"), [*phases, ("total", _seconds(document["seconds"]))]),
        *_calls(document),
    ]


def _release(document: Document) -> list[str]:
    fates = ("released", "retired", "expired", "skipped")
    nothing = "nothing was released" if document["errors"] else "nothing to release"
    counts = ", ".join(f"{len(document[fate])} {fate}" for fate in fates if document[fate])
    rows = [
        (name, fate, document["reasons"].get(name, ""), _seconds(document["deregistration_seconds"].get(name)))
        for fate in fates
        for name in document[fate]
    ]
    return [
        _title("release", f"run {escape(document['run_id'])}"),
        f"{counts or nothing}, in {_seconds(document['seconds'])}",
        *(f"⚠ {escape(warning)}" for warning in document["warnings"]),
        *_table(("instance", "result", "reason", "reset in"), rows),
        *_errors(document),
        *_calls(document),
    ]


def _refresh(document: Document) -> list[str]:
    rows = [("configuration", line) for line in applied_lines(document)]
    rows += [("retired", f"{name}: {document['reasons'].get(name, '')}") for name in document["retired"]]
    rows += [(label, name) for field, label in _SWEEP_RESULTS.items() for name in document[field]]
    return [
        _title(
            "refresh",
            ("incomplete, " if document["errors"] else "") + (plural(len(rows), "change") if rows else "no changes"),
        ),
        f"in {_seconds(document['seconds'])}",
        *_table(("change", "subject"), rows),
        *_errors(document),
        *_calls(document),
    ]


def _scale_down(document: Document) -> list[str]:
    decisions = document["decisions"]
    count = "dry run" if document["dry_run"] else plural(len(decisions), "decision")
    quota = document["idle_quota"]
    rows = [
        (item["instance_id"], item["owner"], item["action"], item["reason"], "yes" if item["done"] else "no")
        for item in decisions
    ]
    return [
        _title("scale-down", f"{escape(document['environment'])}, {count}"),
        f"Idle quota {escape(quota['idle_count'])}, {escape(quota['eviction'])}; in {_seconds(document['seconds'])}",
        *_table(("instance", "owner", "action", "reason", "done"), rows),
        *_errors(document),
        *_calls(document),
    ]


_PAGES: Mapping[str, Callable[[Document], list[str]]] = {
    "provision": _provision,
    "release": _release,
    "refresh": _refresh,
    "scale-down": _scale_down,
}


def _failed(mode: str, failure: StepFailure, rolled_back: Sequence[RolledBackInstance]) -> list[str]:
    head = "cancelled" if failure.interrupted else "failed"
    message = escape(failure.message) + (f"<br>Fix: {escape(failure.fix)}" if failure.fix else "")
    rows = [(item.instance_id, item.source, item.target) for item in rolled_back]
    return [
        _title(mode, head),
        f"{message}<br>Exit code {failure.exit_code}",
        *([f"Rolled back: {plural(len(rows), 'instance')}"] if rows else []),
        *_table(("instance", "before", "after"), rows),
    ]


def _title(mode: str, head: str) -> str:
    return f"### remuda {escape(mode)}: {head}".replace(" :", ":")


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    if not rows:
        return []
    shown = [_row(map(escape, row)) for row in rows[:MAX_ROWS]]
    table = "\n".join([_row(columns), _row("---" for _ in columns), *shown])
    more = len(rows) - MAX_ROWS
    return [table, f"and {more} more"] if more > 0 else [table]


def _row(values: Iterable[str]) -> str:
    return f"| {' | '.join(values)} |"


def _errors(document: Document) -> list[str]:
    return _table(("error",), [(error,) for error in document["errors"]])


def _calls(document: Document) -> list[str]:
    counts = [f"{escape(service)} {sum(calls.values())}" for service, calls in document["calls"].items() if calls]
    return [f"API calls: {', '.join(counts)}"] if counts else []


def _seconds(value: object) -> str:
    return f"{value:.2f} s" if isinstance(value, int | float) else ""


def plain_lines(text: str) -> list[str]:
    """Split a text into lines that the runner does not treat as commands."""
    return [_plain(line) for line in text.splitlines()]


def _plain(line: str) -> str:
    clean = _LOG_CONTROL.sub("", line).replace(_OLD_COMMAND, "## [")
    return f"| {clean}" if _COMMAND.match(clean) else clean


def escape_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escape_property(text: str) -> str:
    return escape_data(text).replace(":", "%3A").replace(",", "%2C")


def one_line(text: str) -> str:
    return " ".join(" ".join(text.splitlines()).split())


class StepLog:
    """The step's log. With `tells_runner`, GitHub's runner masks secrets, too; otherwise none leaves this process."""

    def __init__(self, stream: TextIO, *, tells_runner: bool = True) -> None:
        self._stream = stream
        self._tells_runner = tells_runner
        self._secrets: set[str] = set()

    def mask(self, secret: str) -> None:
        """Mask each line of a secret in all further output, here and in the runner."""
        for line in secret.splitlines():
            part = line.strip()
            if part and part not in self._secrets:
                self._secrets.add(part)
                if self._tells_runner:
                    self._write(f"::add-mask::{escape_data(part)}")

    def redact(self, text: str) -> str:
        # Longest first, because one secret may contain another.
        for secret in sorted(self._secrets, key=len, reverse=True):
            if len(secret) >= MIN_SECRET:
                text = text.replace(secret, "***")
        return text

    def redact_all(self, document: Any) -> Any:
        """The document with every text redacted."""
        if isinstance(document, str):
            return self.redact(document)
        if isinstance(document, Mapping):
            return {self.redact_all(key): self.redact_all(value) for key, value in document.items()}
        return [*map(self.redact_all, document)] if isinstance(document, list | tuple) else document

    def say(self, text: str) -> None:
        for line in plain_lines(self.redact(text)):
            self._write(line)

    def annotate(self, level: Level, message: str, *, title: str) -> None:
        """Write an annotation, which GitHub shows on the run's page."""
        shown = _plain(one_line(self.redact(message)))
        self._write(f"::{level} title={escape_property(one_line(title))}::{escape_data(shown)}")

    @contextmanager
    def grouped(self, title: str) -> Iterator[None]:
        self._write(f"::group::{escape_data(_plain(one_line(self.redact(title))))}")
        try:
            yield
        finally:
            self._write("::endgroup::")

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


def outputs_text(values: Mapping[str, str], delimiter: Callable[[], str]) -> str:
    """The outputs as GITHUB_OUTPUT has them. A random delimiter prevents a value from defining further outputs."""
    parts = []
    for name, value in values.items():
        end = delimiter()
        if end in value:
            raise ValueError(f"the delimiter of output {name} is part of its value")
        parts.append(f"{name}<<{end}\n{value}\n{end}\n")
    return "".join(parts)
