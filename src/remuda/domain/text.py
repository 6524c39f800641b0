"""Sanitizing of untrusted text for terminals, logs and pages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def sanitize(text: str) -> str:
    """Return one printable line: whitespace becomes a space, other unprintable characters are escaped.

    Escape sequences could hide or forge lines, direction marks could reverse them, lone surrogates cannot be encoded.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def truncate(text: str, limit: int) -> str:
    """Sanitize a text and cut it to `limit` characters."""
    text = text[:limit]
    return text if text.isprintable() else sanitize(text)[:limit]


def quote(value: Any, limit: int) -> str:
    """Return the `repr` of a rejected value for an error message, sanitized and cut to `limit` characters."""
    try:
        text = repr(value[:limit] if isinstance(value, str) else value)
    except (ValueError, RecursionError):
        # Python refuses to format integers of thousands of digits and values that are nested too deeply.
        text = f"a {type(value).__name__} that is too large to show"
    return truncate(text, limit)


def nearest(given: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the known word that is most similar to a mistyped one, or an empty text.

    `cutoff` is the least similarity, up to 1. Example: `labels` for `label`.
    """
    import difflib  # noqa: PLC0415 - for mistakes only

    return next(iter(difflib.get_close_matches(given, list(known), n=1, cutoff=cutoff)), "")


def suggest(given: str, known: Iterable[str]) -> str:
    """Return the fix for an unknown word: the nearest known one, or all of them."""
    words = list(known)
    near = nearest(given, words)
    return f"did you mean {near}?" if near else f"use one of {', '.join(words)}"


def _escape(char: str) -> str:
    return " " if char.isspace() else char.encode("unicode_escape").decode("ascii")
