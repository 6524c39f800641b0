"""A small evaluator of IAM policies: what a policy allows, by the rules of AWS's documentation.

It knows what our policies use and refuses everything else: nothing passes because it was not understood.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

#: A key of the request: one value, or several where the key takes several.
Value = str | Sequence[str]
_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_KNOWN = {"Sid", "Effect", "Action", "Resource", "Condition"}
_OPERATORS = {"ArnLike", "Bool", "Null", "StringEquals", "StringLike"}
FOR_ALL = "ForAllValues:"
#: A pattern's wildcards, apart from characters that only look like them.
ANY, ONE = "\1", "\2"


@dataclass(frozen=True, kw_only=True)
class Request:
    action: str
    resource: str
    #: Keys are compared without case, as IAM does.
    context: Mapping[str, Value] = field(default_factory=dict)

    def values(self, key: str) -> list[str]:
        """None at all where the request has no such key."""
        found = next((value for name, value in self.context.items() if name.lower() == key.lower()), ())
        return [found] if isinstance(found, str) else list(found)


def allows(policy: Mapping[str, Any], request: Request) -> bool:
    """Denied unless allowed; an explicit Deny wins."""
    effects = {each["Effect"] for each in _list(policy["Statement"]) if _applies(each, request)}
    return effects == {"Allow"}


def _applies(statement: Mapping[str, Any], request: Request) -> bool:
    conditions = statement.get("Condition", {})
    # First, also where the action decides already: what is not understood is always told of.
    unknown = {*(set(statement) - _KNOWN), *({name.removeprefix(FOR_ALL) for name in conditions} - _OPERATORS)}
    if unknown or statement["Effect"] not in {"Allow", "Deny"}:
        raise NotImplementedError(f"{sorted(unknown) or statement['Effect']} in a statement")
    return (
        any(_like(_wild(each.lower()), request.action.lower()) for each in _list(statement["Action"]))
        and any(_like(_resolved(each, request), request.resource) for each in _list(statement["Resource"]))
        and all(
            _holds(operator, key, _list(wanted), request)
            for operator, keys in conditions.items()
            for key, wanted in keys.items()
        )
    )


def _holds(operator: str, key: str, wanted: Sequence[str], request: Request) -> bool:
    values = request.values(key)
    if operator == "Null":
        (absent,) = wanted
        return (not values) == _truth(absent)
    for_all = operator.startswith(FOR_ALL)
    compared = operator.removeprefix(FOR_ALL)
    matches = [any(_matches(compared, each, value, request) for each in wanted) for value in values]
    if for_all:
        # Of no values at all everything is true: hence Null beside it.
        return all(matches)
    if len(matches) > 1:
        raise NotImplementedError(f"{operator} over several values of {key}")
    return matches == [True]


def _matches(operator: str, wanted: str, value: str, request: Request) -> bool:
    if operator == "Bool":
        return _truth(wanted) == _truth(value)
    if operator == "StringEquals":
        return _like(_resolved(wanted, request, wildcards=False), value)
    if operator == "StringLike":
        return _like(_resolved(wanted, request), value)
    # Each of the six parts of an ARN by itself: a wildcard does not cross a colon, but within the last one.
    patterns, parts = _parts(wanted), _parts(value)
    return len(patterns) == len(parts) and all(
        _like(_resolved(pattern, request), part) for pattern, part in zip(patterns, parts, strict=True)
    )


def _parts(arn: str) -> list[str]:
    """Of an ARN; the colons within a variable are none of its own."""
    hidden = _VARIABLE.sub(lambda match: match.group().replace(":", "\0"), arn)
    return [part.replace("\0", ":") for part in hidden.split(":", 5)]


def _resolved(text: str, request: Request, *, wildcards: bool = True) -> str | None:
    """With its variables filled in; None where the request lacks one. What a variable brings along is no wildcard."""
    made, end = "", 0
    for match in _VARIABLE.finditer(text):
        values = request.values(match.group(1))
        if len(values) != 1:
            return None
        made += _wild(text[end : match.start()], wildcards=wildcards) + values[0]
        end = match.end()
    return made + _wild(text[end:], wildcards=wildcards)


def _wild(text: str, *, wildcards: bool = True) -> str:
    return text.replace("*", ANY).replace("?", ONE) if wildcards else text


def _like(pattern: str | None, value: str) -> bool:
    if pattern is None or (ANY not in pattern and ONE not in pattern):
        return pattern == value
    made = re.escape(pattern).replace(re.escape(ANY), ".*").replace(re.escape(ONE), ".")
    return re.fullmatch(made, value, re.DOTALL) is not None


def _truth(word: str) -> bool:
    return {"true": True, "false": False}[word.lower()]


def _list(value: Any) -> list[Any]:
    return [value] if isinstance(value, str | Mapping) else list(value)
