"""Text from outside, made fit for people's eyes: a terminal, a log, a page."""

from __future__ import annotations

from typing import Any


def sanitize(text: str) -> str:
    """One line without a character that does more than be read: the others are spelt out, spaces of all kinds are one.

    Escape sequences could hide or github lines, marks of direction turn them round, and half a surrogate pair cannot be
    written at all.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _spelt(char) for char in text)


def truncate(text: str, most: int) -> str:
    """The same, and never more than so many characters."""
    return sanitize(text[:most])[:most]


def quote(value: Any, most: int) -> str:
    """A value as a person would write it, for the error that refuses it; never a page of it."""
    try:
        text = repr(value[:most] if isinstance(value, str) else value)
    except (ValueError, RecursionError):
        # Python writes down no number of thousands of digits, and nothing that is nested without end.
        text = f"a {type(value).__name__} too large to be shown"
    return truncate(text, most)


def _spelt(char: str) -> str:
    return " " if char.isspace() else char.encode("unicode_escape").decode("ascii")
