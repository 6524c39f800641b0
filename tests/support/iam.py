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
FOR_ALL = "ForAllValues:"


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
    unknown = set(statement) - _KNOWN
    if unknown or statement["Effect"] not in {"Allow", "Deny"}:
        raise NotImplementedError(f"{sorted(unknown) or statement['Effect']} in a statement")
    # All of it, also where the first part decides already: what is not understood is always told of.
    holds = [
        _holds(operator, key, _list(wanted), request)
        for operator, keys in statement.get("Condition", {}).items()
        for key, wanted in keys.items()
    ]
    return (
        any(_like(pattern.lower(), request.action.lower()) for pattern in _list(statement["Action"]))
        and any(_arn_like(pattern, request) for pattern in _list(statement["Resource"]))
        and all(holds)
    )


def _arn_like(pattern: str, request: Request) -> bool:
    found = _resolved(pattern, request, wildcards=True)
    return found is not None and re.fullmatch(found, request.resource, re.DOTALL) is not None


def _holds(operator: str, key: str, wanted: Sequence[str], request: Request) -> bool:
    values = request.values(key)
    if operator == "Null":
        (absent,) = wanted
        return (not values) == _truth(absent)
    for_all = operator.startswith(FOR_ALL)
    compared = operator.removeprefix(FOR_ALL)
    if compared not in {"StringEquals", "StringLike", "ArnLike", "ArnEquals", "Bool"}:
        raise NotImplementedError(f"operator {operator}")
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
    found = _resolved(wanted, request, wildcards=operator != "StringEquals")
    if found is None:
        return False
    if not operator.startswith("Arn"):
        return re.fullmatch(found, value, re.DOTALL) is not None
    # Each of the six parts by itself: a wildcard does not cross a colon, but within the last one.
    patterns = [_resolved(part, request, wildcards=True) for part in _parts(wanted)]
    return len(patterns) == len(_parts(value)) and all(
        pattern is not None and re.fullmatch(pattern, part, re.DOTALL)
        for pattern, part in zip(patterns, _parts(value), strict=True)
    )


def _parts(arn: str) -> list[str]:
    """Of an ARN; the colons within a variable are none of its own."""
    hidden = _VARIABLE.sub(lambda match: match.group().replace(":", "\0"), arn)
    return [part.replace("\0", ":") for part in hidden.split(":", 5)]


def _resolved(text: str, request: Request, *, wildcards: bool) -> str | None:
    """As a regular expression, variables filled in; None where the request lacks one. What a variable brings along is
    never a wildcard.
    """
    made, end = "", 0
    for match in _VARIABLE.finditer(text):
        values = request.values(match.group(1))
        if len(values) != 1:
            return None
        made += _escaped(text[end : match.start()], wildcards=wildcards) + re.escape(values[0])
        end = match.end()
    return made + _escaped(text[end:], wildcards=wildcards)


def _escaped(text: str, *, wildcards: bool) -> str:
    if not wildcards:
        return re.escape(text)
    return "".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in text)


def _like(pattern: str, value: str) -> bool:
    return re.fullmatch(_escaped(pattern, wildcards=True), value, re.DOTALL) is not None


def _truth(word: str) -> bool:
    return {"true": True, "false": False}[word.lower()]


def _list(value: Any) -> list[Any]:
    return [value] if isinstance(value, str | Mapping) else list(value)
