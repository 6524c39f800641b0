"""Declarations of settings: the kinds of values, the form of a declaration, and what follows from it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

#: Commands that act on one pool.
POOL_COMMANDS = (
    "up",
    "down",
    "refresh",
    "listen",
    "provision",
    "release",
    "scale-down",
    "status",
    "explain",
    "report",
    "dashboard",
    "drain",
    "quarantine",
    "terminate",
    "budget",
    "doctor",
)
#: Commands that create or delete a pool on AWS. They have no backend to choose.
DEPLOY_COMMANDS = ("deploy", "destroy")
ALL_COMMANDS = (*POOL_COMMANDS, *DEPLOY_COMMANDS, "config", "run-workflow", "demo")
#: Modes of the GitHub Action: each runs the command of that name.
ACTION_MODES = ("provision", "release", "refresh", "scale-down")

DEFAULT = "default"
#: Decimal digits with an optional sign; int() would also accept underscores and digits of other scripts.
_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,30}\s*")
_DURATION = re.compile(r"\s*([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*([smhdw])\s*", re.ASCII)
_SUFFIXES_S = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}
_UNITS_S = {"seconds": 1.0, "minutes": 60.0}
DURATION_EXAMPLES = "90s, 30m or 7d"
_NUMBER_TEXT = re.compile(r"[0-9eE.+\s-]{1,400}")
#: Printable ASCII without spaces: a token is sent in an HTTP header.
_TOKEN_TEXT = re.compile(r"[!-~]*")
_SECRET_ARN = re.compile(r"arn:[a-z-]+:secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:[A-Za-z0-9/_+=.@!-]{1,519}")


class Group(StrEnum):
    """Sections of `--help` and of the reference."""

    RUN = "Run"
    POOL = "Pool"
    AWS = "AWS"
    SCALE_DOWN = "Scale-down"
    BROKER = "Broker"
    GITHUB = "GitHub"
    LOCAL = "Local backend"
    COMMON = "Common"
    OUTPUT = "Output"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The declaration of one setting."""

    name: str = ""
    kind: ValueKind
    default: Any
    description: str
    #: The default in words, if it depends on something else.
    default_text: str
    group: Group
    #: Commands that take it as a flag. Other settings are read from the environment and the file only.
    commands: tuple[str, ...]
    #: Whether the GitHub Action has it as an input.
    is_input: bool
    #: Whether the CloudFormation stack has it as a parameter.
    is_parameter: bool
    #: Whether it is stored with the pool as a launch option of EC2 instances.
    is_launch_option: bool
    #: Environment variables of other programs that set it too; REMUDA_… has priority.
    other_variables: tuple[str, ...]

    @property
    def key(self) -> str:
        return key(self.name)

    @property
    def parameter(self) -> str:
        """The name of the CloudFormation parameter."""
        return "".join(word.capitalize() for word in self.name.split("_"))

    @property
    def is_aws_only(self) -> bool:
        """Whether the local backend has nothing that the setting could change."""
        # Scale-down finds instances of either backend by the environment.
        return self.group is Group.AWS and self.name != "github_environment"

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes of the GitHub Action that take it as an input."""
        if not self.is_input:
            return ()
        # A credential is no flag, but every mode takes it.
        return tuple(mode for mode in ACTION_MODES if mode in self.commands) or ACTION_MODES

    @property
    def shown_default(self) -> str:
        """The default in words, or an empty text."""
        if self.default_text or self.default in {None, "", ()}:
            return self.default_text
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return f"{self.default:.15g}" if isinstance(self.default, float) else str(self.default)

    @property
    def full_description(self) -> str:
        """The description with choices and default, for formats that have no fields for these."""
        choices = f" One of {', '.join(self.kind.choices)}." if self.kind.choices else ""
        return self.description + choices + (f" Default: {self.shown_default}." if self.shown_default else "")

    @property
    def help(self) -> str:
        is_off = self.kind.is_boolean and not self.default
        return self.description + (f" (default: {self.shown_default})" if self.shown_default and not is_off else "")


def flag(name: str) -> str:
    return "--" + key(name)


def variable(name: str) -> str:
    return "REMUDA_" + name.upper()


def key(name: str) -> str:
    return name.replace("_", "-")


def declare(
    kind: ValueKind,
    default: Any,
    description: str,
    *,
    group: Group,
    commands: Iterable[str] = (),
    is_input: bool | None = None,
    is_parameter: bool = False,
    is_launch_option: bool = False,
    other_variables: tuple[str, ...] = (),
    default_text: str = "",
) -> Any:
    """A dataclass field with the declaration.

    Unless `is_input` says otherwise, a flag of a command that the action runs is an input of the action. A parameter of
    the stack is a flag of `deploy`.
    """
    taken_by = tuple(commands)
    if is_parameter and "deploy" not in taken_by:
        taken_by = (*taken_by, "deploy")
    declared = Setting(
        kind=kind,
        default=default,
        description=description,
        default_text=default_text,
        group=group,
        commands=taken_by,
        is_input=bool(set(taken_by) & set(ACTION_MODES)) if is_input is None else is_input,
        is_parameter=is_parameter,
        is_launch_option=is_launch_option,
        other_variables=other_variables,
    )
    return field(default=default, metadata={"setting": declared})


class InvalidValue(ValueError):
    """The value does not fit its kind. The text is a detail to add to the error, or empty."""


@dataclass(frozen=True, slots=True)
class Secret:
    """A credential; its text appears in no `repr`, log or document."""

    text: str = field(repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueKind:
    #: Placeholder of the value in `--help`.
    metavar: str
    #: Completes the sentence "--flag must be …".
    expected: str
    #: Converts a value as it was written: text, or any value of a TOML file. Raises `InvalidValue`, or `UserError`
    #: if the parser has a more precise message.
    parse: Callable[[Any], Any]
    choices: tuple[str, ...] = ()
    is_secret: bool = False
    is_boolean: bool = False
    is_number: bool = False
    #: Whether a number may have a suffix: s, m, h, d or w.
    is_duration: bool = False
    #: Whether @FILE stands for the content of a file.
    takes_file: bool = False
    #: Whether a text is JSON; the settings file may have lists and tables instead.
    is_json: bool = False
    #: Whether the value may be a table of the settings file.
    takes_table: bool = False


def text(
    *,
    expected: str = "text",
    metavar: str = "TEXT",
    parse: Callable[[str], Any] | None = None,
    numbers: bool = False,
    takes_file: bool = False,
) -> ValueKind:
    """`parse` checks or converts the text. With `numbers`, an integer of the file counts as text."""

    def convert(value: Any) -> Any:
        if numbers and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            raise InvalidValue
        return parse(value) if parse else value

    return ValueKind(metavar=metavar, expected=expected, parse=convert, takes_file=takes_file)


def integer(least: int, most: int) -> ValueKind:
    def convert(value: Any) -> int:
        if isinstance(value, str) and _INTEGER.fullmatch(value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise InvalidValue
        return value

    return ValueKind(metavar="INTEGER", expected=f"an integer from {least} to {most}", parse=convert, is_number=True)


def number(least: float, most: float, unit: str) -> ValueKind:
    """`unit` is a plural, such as dollars."""
    return ValueKind(
        metavar=unit.upper(),
        expected=_number_expected(least, most, unit),
        parse=lambda value: _parse_number(value, least, most),
        is_number=True,
    )


def duration(least: float, most: float, unit: str = "seconds") -> ValueKind:
    """A period of time, as a float in `unit`: seconds or minutes. A number without a suffix has that unit."""

    def convert(value: Any) -> float:
        return _parse_number(parse_duration(value, unit) if isinstance(value, str) else value, least, most)

    return ValueKind(
        metavar="DURATION",
        expected=f"{_number_expected(least, most, unit)}, or a time such as {DURATION_EXAMPLES}",
        parse=convert,
        is_number=True,
        is_duration=True,
    )


def parse_duration(text: str, unit: str = "seconds") -> float:
    """Parse `900`, `30m`, `1.5h` or `7d` to a number of `unit`. Raises `InvalidValue`.

    Nothing is rounded: `90s` is 1.5 minutes.
    """
    found = _DURATION.fullmatch(text)
    if found:
        return float(found.group(1)) * _SUFFIXES_S[found.group(2)] / _UNITS_S[unit]
    return _parse_float(text)


def _number_expected(least: float, most: float, unit: str) -> str:
    return f"a number of {unit} from {least:g} to {most:.15g}"


def _parse_number(value: Any, least: float, most: float) -> float:
    if isinstance(value, str):
        value = _parse_float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidValue
    # Compared before the conversion: an integer may be too large for a float.
    if not least <= value <= most or not math.isfinite(value):
        raise InvalidValue
    return float(value)


def _parse_float(text: str) -> float:
    try:
        if _NUMBER_TEXT.fullmatch(text):
            return float(text)
    except ValueError:
        pass
    raise InvalidValue


def choice(values: type[StrEnum] | tuple[str, ...]) -> ValueKind:
    known = {str(value): value for value in values}

    def convert(value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            raise InvalidValue
        return known[value]

    names = tuple(known)
    return ValueKind(
        metavar=f"[{'|'.join(names)}]", expected=f"{', '.join(names[:-1])} or {names[-1]}", parse=convert, choices=names
    )


def boolean() -> ValueKind:
    def convert(value: Any) -> bool:
        if isinstance(value, bool):
            return value
        if not isinstance(value, str) or value not in {"true", "false"}:
            raise InvalidValue
        return value == "true"

    return ValueKind(metavar="", expected="true or false", parse=convert, choices=("true", "false"), is_boolean=True)


def secret(*, expected: str, is_token: bool = False) -> ValueKind:
    """A credential, or the ARN of a Secrets Manager secret that contains it."""

    def convert(value: Any) -> Secret:
        if not isinstance(value, str):
            raise InvalidValue
        value = value.strip()
        # A mistyped ARN would be sent to GitHub as a token.
        if value.startswith("arn:") and not is_secret_arn(value):
            raise InvalidValue("a secret's ARN has the form arn:aws:secretsmanager:REGION:ACCOUNT:secret:NAME")
        if is_token and not _TOKEN_TEXT.fullmatch(value):
            raise InvalidValue("a token contains no spaces or line breaks")
        return Secret(value)

    return ValueKind(metavar="SECRET", expected=expected, parse=convert, is_secret=True)


def is_secret_arn(value: str) -> bool:
    """Whether the value is the ARN of a Secrets Manager secret."""
    return _SECRET_ARN.fullmatch(value) is not None
