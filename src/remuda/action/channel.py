"""Output of a workflow step: log lines, workflow commands and output files.

GitHub's runner executes log lines that look like workflow commands. Text that may come from outside (an instance's
report, a response of AWS or GitHub) is therefore made harmless before it is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TextIO

Level = Literal["error", "warning", "notice"]

#: The runner trims a line and treats a leading `::` as a command. Any non-word character counts as white space here.
_COMMAND = re.compile(r"\W*::")
#: The older command syntax, which the runner accepts anywhere in a line.
_OLD_COMMAND = "##["
#: Control characters, which could hide or overwrite lines of the log.
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]")
#: Shorter secrets are masked by the runner only; replacing "a" in every word would make the log useless.
MIN_SECRET = 6


def plain_lines(text: str) -> list[str]:
    """Split a text into lines that the runner does not treat as commands."""
    return [_plain(line) for line in text.splitlines()]


def _plain(line: str) -> str:
    clean = _CONTROL.sub("", line).replace(_OLD_COMMAND, "## [")
    return f"| {clean}" if _COMMAND.match(clean) else clean


def escape_data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escape_property(text: str) -> str:
    return escape_data(text).replace(":", "%3A").replace(",", "%2C")


def one_line(text: str) -> str:
    return " ".join(" ".join(text.splitlines()).split())


class StepLog:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._secrets: set[str] = set()

    def mask(self, secret: str) -> None:
        """Mask each line of a secret in all further output, here and in the runner."""
        for line in secret.splitlines():
            part = line.strip()
            if part and part not in self._secrets:
                self._secrets.add(part)
                self._write(f"::add-mask::{escape_data(part)}")

    def redact(self, text: str) -> str:
        # Longest first, because one secret may contain another.
        for secret in sorted(self._secrets, key=len, reverse=True):
            if len(secret) >= MIN_SECRET:
                text = text.replace(secret, "***")
        return text

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


def write_outputs(file: Path, values: dict[str, str], delimiter: Callable[[], str]) -> None:
    """Append outputs. A random delimiter prevents a value from defining further outputs."""
    with file.open("a", encoding="utf-8") as out:
        for name, value in values.items():
            end = delimiter()
            if end in value:
                raise ValueError(f"the delimiter of output {name} is part of its value")
            out.write(f"{name}<<{end}\n{value}\n{end}\n")
