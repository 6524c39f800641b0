"""An evaluator of IAM policies by the rules of the AWS documentation.

It supports the elements that the project's policies use and raises `NotImplementedError` for all others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

from remuda.adapters.aws.dynamodb.items import PK
from remuda.deployment.policies import ATTRIBUTES, LEADING_KEYS, RETURN_VALUES, policies
from remuda.deployment.statements import fill_placeholders

#: The value of a condition key, or its values if the key is multivalued.
Value = str | Sequence[str]
Document = Mapping[str, Any]

#: The only version with policy variables.
VERSION = "2012-10-17"
_ELEMENTS = {"Sid", "Effect", "Action", "NotAction", "Resource", "NotResource", "Condition"}
_VARIABLE = re.compile(r"\$\{([^}]*)\}")
#: `${*}` is a literal star.
_LITERALS = {"*", "?", "$"}
#: Wildcards of a pattern, as distinct from literal stars and question marks.
ANY, ONE = "\1", "\2"

FOR_ALL, FOR_ANY = "ForAllValues", "ForAnyValue"
IF_EXISTS = "IfExists"
_POSITIVE = {"ArnEquals", "ArnLike", "Bool", "StringEquals", "StringEqualsIgnoreCase", "StringLike"}
#: Negated operators, which also match a missing key.
_NEGATED = {
    "ArnNotEquals": "ArnEquals",
    "ArnNotLike": "ArnLike",
    "StringNotEquals": "StringEquals",
    "StringNotEqualsIgnoreCase": "StringEqualsIgnoreCase",
    "StringNotLike": "StringLike",
}


@dataclass(frozen=True, kw_only=True)
class IamRequest:
    action: str
    resource: str
    #: Keys are case-insensitive, as in IAM.
    context: Mapping[str, Value] = field(default_factory=dict)

    def values(self, key: str) -> list[str]:
        """The values of a key; empty if the request does not have it."""
        found = next((value for name, value in self.context.items() if name.lower() == key.lower()), ())
        return [found] if isinstance(found, str) else list(found)


def allows(policy: Document | Sequence[Document], request: IamRequest) -> bool:
    """Whether the policies allow a request: one must allow it and none deny it."""
    effects = {
        statement["Effect"]
        for document in _list(policy)
        for statement in _statements(document)
        if _applies(statement, request)
    }
    return effects == {"Allow"}


# Statements -----------------------------------------------------------------------------------------------------------


def _statements(document: Document) -> list[Document]:
    """The statements of a policy, after a check that all of them are supported."""
    if document.get("Version") != VERSION or set(document) - {"Version", "Id", "Statement"}:
        raise NotImplementedError(f"a policy with {sorted(document)}, version {document.get('Version')}")
    statements = _list(document["Statement"])
    for statement in statements:
        unknown = set(statement) - _ELEMENTS
        if unknown or statement.get("Effect") not in {"Allow", "Deny"}:
            raise NotImplementedError(f"{sorted(unknown) or statement.get('Effect')} in a statement")
        for one, other in (("Action", "NotAction"), ("Resource", "NotResource")):
            if (one in statement) == (other in statement):
                raise NotImplementedError(f"a statement needs either {one} or {other}")
        for operator in statement.get("Condition", {}):
            _operator(operator)
    return statements


def _applies(statement: Document, request: IamRequest) -> bool:
    return (
        _is_among(statement, "Action", lambda each: _is_action(each, request.action))
        and _is_among(statement, "Resource", lambda each: _is_resource(each, request))
        and all(
            _holds(_operator(operator), key, _list(wanted), request)
            for operator, keys in statement.get("Condition", {}).items()
            for key, wanted in keys.items()
        )
    )


def _is_among(statement: Document, element: str, fits: Callable[[str], bool]) -> bool:
    if element in statement:
        return any(map(fits, _list(statement[element])))
    return not any(map(fits, _list(statement[f"Not{element}"])))


@lru_cache(maxsize=100_000)
def _is_action(pattern: str, action: str) -> bool:
    return _like(_wild(pattern.lower()), action.lower())


def _is_resource(pattern: str, request: IamRequest) -> bool:
    return pattern == "*" or _arn_like(pattern, request.resource, request)


# Conditions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Operator:
    name: str
    #: Qualifier for multivalued keys: FOR_ALL, FOR_ANY, or empty.
    over: str = ""
    if_exists: bool = False
    negated: bool = False


@cache
def _operator(text: str) -> Operator:
    over, separator, rest = text.rpartition(":")
    name = rest.removesuffix(IF_EXISTS)
    if separator and over not in {FOR_ALL, FOR_ANY}:
        raise NotImplementedError(text)
    if name not in _POSITIVE and name not in _NEGATED and text != "Null":
        raise NotImplementedError(text)
    return Operator(name=_NEGATED.get(name, name), over=over, if_exists=rest != name, negated=name in _NEGATED)


def _holds(operator: Operator, key: str, wanted: Sequence[str], request: IamRequest) -> bool:
    values = request.values(key)
    if operator.name == "Null":
        (absent,) = wanted
        return (not values) == _truth(absent)
    if not values:
        return _holds_without_values(operator)
    matches = [
        any(_matches(operator.name, each, value, request) for each in wanted) is not operator.negated
        for value in values
    ]
    if operator.over:
        return all(matches) if operator.over == FOR_ALL else any(matches)
    if len(matches) > 1:
        raise NotImplementedError(f"{operator.name} over several values of {key}")
    return matches[0]


def _holds_without_values(operator: Operator) -> bool:
    """Whether a condition holds for a missing key. ForAllValues does, hence policies add a Null condition."""
    if operator.over:
        return operator.over == FOR_ALL or operator.if_exists
    return operator.negated or operator.if_exists


def _matches(operator: str, wanted: str, value: str, request: IamRequest) -> bool:
    if operator == "Bool":
        return _truth(wanted) == _truth(value)
    if operator == "StringEquals":
        return _like(_resolved(wanted, request, wildcards=False), value)
    if operator == "StringEqualsIgnoreCase":
        resolved = _resolved(wanted, request, wildcards=False)
        return resolved is not None and resolved.casefold() == value.casefold()
    if operator == "StringLike":
        return _like(_resolved(wanted, request), value)
    # ArnEquals behaves like ArnLike.
    return _arn_like(wanted, value, request)


# Patterns -------------------------------------------------------------------------------------------------------------


def _arn_like(wanted: str, value: str, request: IamRequest) -> bool:
    """Compare the six parts separately: a wildcard matches colons in the last part only."""
    patterns, parts = _parts(wanted), _parts(value)
    return len(patterns) == len(parts) and all(
        _like(_resolved(pattern, request), part) for pattern, part in zip(patterns, parts, strict=True)
    )


def _parts(arn: str) -> list[str]:
    """The parts of an ARN. Colons within a variable do not separate parts."""
    hidden = _VARIABLE.sub(lambda match: match.group().replace(":", "\0"), arn)
    return [part.replace("\0", ":") for part in hidden.split(":", 5)]


def _resolved(text: str, request: IamRequest, *, wildcards: bool = True) -> str | None:
    """A pattern with its variables replaced; None if the request lacks one. Wildcards in values are literal."""
    resolved, end = "", 0
    for match in _VARIABLE.finditer(text):
        name = match.group(1)
        if "," in name:
            raise NotImplementedError(f"a variable with a default: {name}")
        values = [name] if name in _LITERALS else request.values(name)
        if len(values) != 1:
            return None
        resolved += _wild(text[end : match.start()], wildcards=wildcards) + values[0]
        end = match.end()
    return resolved + _wild(text[end:], wildcards=wildcards)


def _wild(text: str, *, wildcards: bool = True) -> str:
    return text.replace("*", ANY).replace("?", ONE) if wildcards else text


def _like(pattern: str | None, value: str) -> bool:
    if pattern is None or (ANY not in pattern and ONE not in pattern):
        return pattern == value
    return _compiled(pattern).fullmatch(value) is not None


@lru_cache(maxsize=1_000)
def _compiled(pattern: str) -> re.Pattern[str]:
    made = re.escape(pattern).replace(re.escape(ANY), ".*").replace(re.escape(ONE), ".")
    return re.compile(made, re.DOTALL)


def _truth(word: str) -> bool:
    return {"true": True, "false": False}[word.lower()]


def _list(value: Any) -> list[Any]:
    return [value] if isinstance(value, str | Mapping) else list(value)


# DynamoDB requests ---------------------------------------------------------------------------------------------------

ACCOUNT, REGION = "123456789012", "eu-central-1"


def denied_requests(policy_names: str, pool: str, sent: Iterable[IamRequest]) -> list[IamRequest]:
    """The requests that the policies of these names, separated by spaces, do not allow together."""
    made = {policy.name: policy for policy in policies()}
    documents = [
        fill_placeholders(made[name], pool=pool, account=ACCOUNT, region=REGION) for name in policy_names.split()
    ]
    return [each for each in sent if not allows(documents, each)]


def iam_requests(sent: Mapping[str, list[Any]], context: Mapping[str, Value] | None = None) -> Iterator[IamRequest]:
    """The IAM requests of DynamoDB documents by operation, as in `FaultProxy.sent`."""
    for operation, documents in sent.items():
        for document in documents:
            for action, table, keys in _dynamodb_parts(operation, document):
                yield IamRequest(
                    action=f"dynamodb:{action}",
                    resource=f"arn:aws:dynamodb:{REGION}:{ACCOUNT}:table/{table}",
                    context={
                        **(context or {}),
                        LEADING_KEYS: keys,
                        ATTRIBUTES: _attributes(document),
                        **_returned(document),
                    },
                )


def _attributes(sent: Mapping[str, Any]) -> list[str]:
    """The top-level attributes that a request names: its key or item, and its expressions."""
    named = [*sent.get("Key", ()), *sent.get("Item", ()), *sent.get("ExpressionAttributeNames", {}).values()]
    return list(dict.fromkeys(named))


def _returned(sent: Mapping[str, Any]) -> dict[str, Value]:
    """The key for what a request returns, which exists only with a parameter; of both, the one that returns more."""
    values = [str(sent[name]) for name in ("ReturnValues", "ReturnValuesOnConditionCheckFailure") if name in sent]
    widest = next((each for each in values if each.startswith("ALL_")), "NONE")
    return {RETURN_VALUES: widest} if values else {}


def _dynamodb_parts(operation: str, sent: Mapping[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    """Action, table or index, and partition keys of each part of a request."""
    match operation:
        case "GetItem" | "UpdateItem":
            yield operation, sent["TableName"], [_pk(sent["Key"])]
        case "PutItem":
            yield operation, sent["TableName"], [_pk(sent["Item"])]
        case "Query":
            index = f"/index/{sent['IndexName']}" if "IndexName" in sent else ""
            # "#pk = :v0", possibly followed by other conditions.
            value = sent["KeyConditionExpression"].split()[2]
            yield operation, sent["TableName"] + index, [sent["ExpressionAttributeValues"][value]["S"]]
        case "BatchGetItem":
            for table, wanted in sent["RequestItems"].items():
                yield operation, table, [_pk(key) for key in wanted["Keys"]]
        case "BatchWriteItem":
            for table, wanted in sent["RequestItems"].items():
                yield operation, table, [_pk(_written(each)) for each in wanted]
        case "TransactWriteItems":
            # IAM checks the permissions of the parts.
            for part in sent["TransactItems"]:
                for action, each in part.items():
                    yield f"{action}Item", each["TableName"], [_pk(each.get("Key") or each["Item"])]
        case _:
            raise NotImplementedError(operation)


def _written(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """The item or the key of one request of BatchWriteItem."""
    return {**request.get("PutRequest", {}).get("Item", {}), **request.get("DeleteRequest", {}).get("Key", {})}


def _pk(item: Mapping[str, Any]) -> str:
    return str(item[PK]["S"])
