"""A step's way to the runner: its standard output, where lines may be commands, and its files.

Only what is written here on purpose is a command. Everything else may hold text from outside (an instance's detail, an
answer of AWS or GitHub), so it is made plain first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TextIO

Level = Literal["error", "warning", "notice"]

#: The runner trims a line and takes a leading `::` for a command. What it takes for a space is not left to chance.
_COMMAND = re.compile(r"\W*::")
#: The older form counts anywhere in a line.
_OLD_COMMAND = "##["
#: Escape sequences could colour, hide or overwrite lines of the log.
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]")
#: A shorter secret is left to the runner: cutting "a" out of every word helps nobody.
MIN_SECRET = 6


def plain_lines(text: str) -> list[str]:
    """The text as lines that the runner takes for nothing but text."""
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


class Channel:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._secrets: set[str] = set()

    def mask(self, secret: str) -> None:
        """From here on the runner hides it, each line of it, and so do we."""
        for line in secret.splitlines():
            part = line.strip()
            if part and part not in self._secrets:
                self._secrets.add(part)
                self._write(f"::add-mask::{escape_data(part)}")

    def hidden(self, text: str) -> str:
        # The longest first: one may be a part of another.
        for secret in sorted(self._secrets, key=len, reverse=True):
            if len(secret) >= MIN_SECRET:
                text = text.replace(secret, "***")
        return text

    def say(self, text: str) -> None:
        for line in plain_lines(self.hidden(text)):
            self._write(line)

    def annotate(self, level: Level, message: str, *, title: str) -> None:
        """Shown on the page of the run."""
        shown = _plain(one_line(self.hidden(message)))
        self._write(f"::{level} title={escape_property(one_line(title))}::{escape_data(shown)}")

    @contextmanager
    def grouped(self, title: str) -> Iterator[None]:
        self._write(f"::group::{escape_data(_plain(one_line(self.hidden(title))))}")
        try:
            yield
        finally:
            self._write("::endgroup::")

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


def write_outputs(file: Path, values: dict[str, str], delimiter: Callable[[], str]) -> None:
    """A value ends at a line that nobody can guess, so none can bring along an output of its own."""
    with file.open("a", encoding="utf-8") as out:
        for name, value in values.items():
            end = delimiter()
            if end in value:
                raise ValueError(f"the delimiter of output {name} is part of its value")
            out.write(f"{name}<<{end}\n{value}\n{end}\n")
