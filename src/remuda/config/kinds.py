"""Kinds of settings: how a value is parsed, and how help and errors describe it.

Not pydantic: every command needs the declarations for its flags, and importing pydantic takes longer than `--help`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

#: Decimal digits with an optional sign; int() would also accept underscores and digits of other scripts.
_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,30}\s*")
_NUMBER_TEXT = re.compile(r"[0-9eE.+\s-]{1,400}")
#: Printable ASCII without spaces: a token is sent in an HTTP header.
_TOKEN_TEXT = re.compile(r"[!-~]*")
_SECRET_ARN = re.compile(r"arn:[a-z-]+:secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:[A-Za-z0-9/_+=.@!-]{1,519}")


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


def text(
    *, expected: str = "text", metavar: str = "TEXT", parse: Callable[[str], Any] | None = None, numbers: bool = False
) -> ValueKind:
    """`parse` checks or converts the text. With `numbers`, an integer of the file counts as text."""

    def convert(value: Any) -> Any:
        if numbers and isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            raise InvalidValue
        return parse(value) if parse else value

    return ValueKind(metavar=metavar, expected=expected, parse=convert)


def integer(least: int, most: int) -> ValueKind:
    def convert(value: Any) -> int:
        if isinstance(value, str) and _INTEGER.fullmatch(value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise InvalidValue
        return value

    return ValueKind(metavar="INTEGER", expected=f"an integer from {least} to {most}", parse=convert, is_number=True)


def number(least: float, most: float, unit: str) -> ValueKind:
    """`unit` is a plural, such as seconds."""

    def convert(value: Any) -> float:
        if isinstance(value, str) and _NUMBER_TEXT.fullmatch(value):
            try:
                value = float(value)
            except ValueError:
                raise InvalidValue from None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidValue
        # Compared before the conversion: an integer may be too large for a float.
        if not least <= value <= most or not math.isfinite(value):
            raise InvalidValue
        return float(value)

    return ValueKind(
        metavar=unit.upper(),
        expected=f"a number of {unit} from {least:g} to {most:.15g}",
        parse=convert,
        is_number=True,
    )


def choice(values: type[StrEnum] | tuple[str, ...]) -> ValueKind:
    known = {str(value): value for value in values}

    def convert(value: Any) -> str:
        if not isinstance(value, str) or value not in known:
            raise InvalidValue
        return known[value]

    names = tuple(known)
    return ValueKind(
        metavar=f"[{'|'.join(names)}]",
        expected=f"{', '.join(names[:-1])} or {names[-1]}",
        parse=convert,
        choices=names,
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
