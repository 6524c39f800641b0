"""Output of a command: a JSON document on stdout for programs, messages and tables for people on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar

from remuda.adapters.system.clock import SystemClock
from remuda.disk import FULL
from remuda.domain.errors import RemudaError, UserError
from remuda.domain.text import sanitize
from remuda.domain.timestamps import to_text
from remuda.ports.clock import Clock
from remuda.ports.event_log import EventLog

if TYPE_CHECKING:
    from remuda.cli.terminal import PlainConsole
    from remuda.config.settings import Settings
    from remuda.controlplane.context import Context

#: Terminal style per event; others are plain.
_STYLES = {
    "claim-won": "green",
    "create": "cyan",
    "launch": "cyan",
    "commit": "green",
    "committed": "bold green",
    "pool": "green",
    "rollback": "bold yellow",
    "confirm": "dim",
}
_TERMINATION_STYLE = "magenta"
#: Events whose name contains one of these words are warnings.
_WARNING_WORDS = ("failed", "lost", "refused", "incomplete", "unconfirmed", "warning")
#: Events that appear in JSON logs only.
_JSON_ONLY = frozenset({"announce", "renew", "credential", "extend", "scale-keep", "scale-skip", "scale-renew"})
#: Prefix of the events of a dry run, which ends with a table of them.
_PLANNED = "would-"

JSON_LOGS = "json"
#: Characters per line with --wide; the longest lines are shorter.
MAX_WIDTH = 10_000


#: Variables with which rich treats a stream as a terminal.
_STYLE_VARIABLES = ("FORCE_COLOR", "TTY_COMPATIBLE")


def early_log_format(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """The log format before the settings are read, for errors in the settings themselves."""
    for index, argument in enumerate(arguments):
        if argument == "--log-format" and index + 1 < len(arguments):
            return arguments[index + 1]
        if argument.startswith("--log-format="):
            return argument.partition("=")[2]
    return environ.get("REMUDA_LOG_FORMAT", "")


def set_log_format(name: str) -> None:
    """Set the format for the whole process, which has one stderr."""
    Output.logs_json = name == JSON_LOGS


def event_line(at: datetime, name: str, facts: Mapping[str, Any], *, level: str) -> str:
    """One line of a structured log. Empty facts are left out."""
    given = {key: value for key, value in facts.items() if value is not None and value != ""}
    return json.dumps({"at": to_text(at), "level": level, "event": name, **given}, default=str)


def record_line(at: datetime, action: str, why: str, facts: Mapping[str, Any]) -> str:
    """An event of the event log, with its reason and its facts (instance, run, epoch and others)."""
    level = "warning" if any(word in action for word in _WARNING_WORDS) else "info"
    return event_line(at, action, {"reason": why, **facts}, level=level)


def error_line(at: datetime, error: RemudaError) -> str:
    facts = {"type": type(error).__name__, "reason": error.message, "fix": error.fix}
    return event_line(at, "error", facts, level="error")


class Output:
    #: Whether stderr gets one JSON document per line.
    logs_json: ClassVar[bool] = False
    #: The settings of the present command, when they are known: advised commands get its flags.
    settings: ClassVar[Settings | None] = None

    def __init__(self, *, as_json: bool, quiet: bool = False, wide: bool = False) -> None:
        self.as_json = as_json
        #: Whether tables show all columns and rows, as wide as they are.
        self.wide = wide
        self._quiet = quiet
        self._console: PlainConsole | None = None

    @property
    def is_quiet(self) -> bool:
        return self._quiet

    @property
    def console(self) -> PlainConsole:
        """The console on stderr: styled on a terminal, plain lines in a log."""
        if self._console is None:
            from remuda.cli.terminal import PlainConsole  # noqa: PLC0415 - slow to import and often not needed

            self._console = PlainConsole(stderr=True, width=self.width, soft_wrap=True)
        return self._console

    def say(self, *lines: str, style: str | None = None) -> None:
        """Print lines for people. A line break in one of them, as in texts from outside, does not start a new line."""
        if self._quiet:
            return
        text = "\n".join(lines).strip()
        if not self.logs_json:
            for line in lines:
                self._print(line, style)
        elif text:
            self.event("message", {"text": text}, level="warning" if style and "yellow" in style else "info")

    def say_after(self, lead: str, text: str, *, style: str | None = None) -> None:
        """Print a text after its lead, for example the time and the name of a job.

        On a terminal that is too narrow for the line, it continues with the next word, below the text.
        """
        line = sanitize(f"{lead}{text}")
        width = None if self._quiet or self.logs_json else _stderr_width()
        if width is None or (len(line) <= width and line.isascii()):
            self.say(line, style=style)
            return
        from remuda.cli.terminal import wrap_line  # noqa: PLC0415 - slow to import and often not needed

        for part in wrap_line(self.console, line, width=width, indent=len(lead)):
            self.say(part, style=style)

    def say_command(self, command: str) -> None:
        """Print a command on a line of its own, which is never broken, so that it can be pasted."""
        if self._quiet:
            return
        if self.logs_json:
            self.say(command)
        else:
            self._print(f"  {command}", None, soft_wrap=True)

    def _print(self, line: str, style: str | None, *, soft_wrap: bool = False) -> None:
        """One line on stderr. rich is slow to import, and only a terminal shows styles."""
        if sys.stderr.isatty() or any(name in os.environ for name in _STYLE_VARIABLES):
            self.console.print(sanitize(line), style=style, soft_wrap=soft_wrap)
        else:
            self.log_line(sanitize(line))

    def say_errors(self, errors: Iterable[str]) -> None:
        for error in errors:
            self.say(f"error: {error}", style="bold red")

    def show(self, renderable: Any) -> None:
        """Show a table. It does not appear in JSON logs."""
        if not self._quiet and not self.logs_json:
            self.console.print(renderable)

    def event(self, name: str, facts: Mapping[str, Any], *, level: str) -> None:
        self.log_line(event_line(SystemClock().now(), name, facts, level=level))

    def log_line(self, line: str) -> None:
        try:
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()
        except OSError as error:
            # A full disk must not stop a background process that writes its log there.
            if error.errno not in FULL:
                raise

    def complete(self, advice: str) -> str:
        """The advice with complete commands: `run remuda refresh --dir state` instead of `run remuda refresh`."""
        if self.settings is None or "remuda " not in advice:
            return advice
        from remuda.cli.advice import complete_commands  # noqa: PLC0415 - for mistakes only

        return complete_commands(advice, self.settings)

    def answer(self, *renderables: Any, soft_wrap: bool = False) -> None:
        """Print the result for people on stdout. With --json, `result` prints the document there instead.

        A text is one line. `soft_wrap` leaves long lines unbroken, for logs and grep.
        """
        if self.as_json:
            return
        from remuda.cli.terminal import PlainConsole  # noqa: PLC0415 - slow to import and often not needed

        console = PlainConsole(width=self.width)
        for renderable in renderables:
            shown = sanitize(renderable) if isinstance(renderable, str) else renderable
            console.print(shown, soft_wrap=soft_wrap)

    @property
    def width(self) -> int:
        return MAX_WIDTH if self.wide else _terminal_size()[0]

    @property
    def height(self) -> int:
        return _terminal_size()[1]

    def log(self, action: str, why: str, facts: Mapping[str, Any]) -> None:
        if not self._quiet:
            self.log_line(record_line(SystemClock().now(), action, why, facts))

    def result(self, document: Mapping[str, Any]) -> None:
        if self.as_json:
            sys.stdout.write(json.dumps(document, indent=2, default=str) + "\n")
            sys.stdout.flush()

    def event_log(self, clock: Clock) -> EventLog:
        """The event log of a use case, shown by this output."""
        return ConsoleEventLog(self, clock)

    def guarded(self, context: Context) -> Context:
        """The ports for the use case. A subclass may wrap them, for example to mask credentials."""
        return context

    def error(self, error: RemudaError) -> None:
        error.fix = self.complete(error.fix)
        fix = f"; {error.fix}" if error.fix else ""
        if self.logs_json:
            self.log_line(error_line(SystemClock().now(), error))
        else:
            self._print(f"remuda: {error.message}{fix}", "bold red")
        details = error.details if isinstance(error, UserError) else ()
        self.say_errors(details)
        document = {
            "type": type(error).__name__,
            "message": error.message,
            "field": error.field if isinstance(error, UserError) else None,
            "fix": error.fix or None,
        }
        self.result({"error": document | ({"details": list(details)} if details else {})})


def _terminal_size() -> tuple[int, int]:
    import shutil  # noqa: PLC0415 - slow to import and often not needed

    return shutil.get_terminal_size((160, 40))


def _stderr_width() -> int | None:
    """Columns of the terminal on stderr. None for a file or a pipe, whose lines stay whole, unless COLUMNS is set."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or None
    except (OSError, ValueError):
        return None


class ConsoleEventLog:
    """One line per event, as it happens."""

    def __init__(self, output: Output, clock: Clock) -> None:
        self._output = output
        self._clock = clock

    def record(self, action: str, why: str = "", **facts: Any) -> None:
        if Output.logs_json:
            self._output.log(action, why, facts)
            return
        if action in _JSON_ONLY or action.startswith(_PLANNED):
            return
        at: datetime = self._clock.now()
        subject = facts.get("instance_id") or facts.get("run_id") or facts.get("runner") or ""
        arrow = ""
        if facts.get("source") or facts.get("target"):
            arrow = f"{facts.get('source') or 'new'} to {facts.get('target')}: "
        line = f"{at:%H:%M:%S} {action:<16} {subject:<20} {arrow}{why}"
        self._output.say(line.rstrip(), style=self._style(action))

    @staticmethod
    def _style(action: str) -> str | None:
        if any(word in action for word in _WARNING_WORDS):
            return "yellow"
        if action.startswith(("end-", "tombstone", "retire", "stale-registration")):
            return _TERMINATION_STYLE
        return _STYLES.get(action)


def format_duration(seconds: float) -> str:
    """Format seconds as `40 s`, `7 min`, `3 h` or `2 d`."""
    for minimum, unit_s, name in ((172_800, 86_400, "d"), (7_200, 3_600, "h"), (600, 60, "min")):
        if seconds >= minimum:
            return f"{seconds / unit_s:.0f} {name}"
    return f"{seconds:.0f} s"
