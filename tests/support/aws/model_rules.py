"""Rules for requests to AWS that follow from botocore's models, for every operation that has such a member.

Tokens of idempotency, names of filters, keys that occur twice, and expressions of DynamoDB, whose reserved words and
unused placeholders test servers accept.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from botocore.model import OperationModel

from tests.support.aws.contract import service_model

Parameters = Mapping[str, Any]
#: Members with which AWS recognises a request that is sent again.
TOKENS = ("ClientToken", "ClientRequestToken")
#: Operations that may be carried out twice, and why that is harmless.
REPEATABLE = {
    "cloudformation:DeleteStack": "a stack that is being deleted stays so",
    "ec2:ModifyLaunchTemplate": "it names the default version",
}
_FILTER = re.compile(r"<code>([a-z][\w.:<>-]*)</code>")
_EXPRESSIONS = ("Condition", "Filter", "KeyCondition", "Projection", "Update")
#: Names, placeholders and functions in an expression. A dot separates the parts of a path.
_WORD = re.compile(r"[#:]?[A-Za-z_]\w*")
#: Words of DynamoDB's grammar (Expressions.OperatorsAndFunctions.html and Expressions.UpdateExpressions.html).
_GRAMMAR = frozenset({"SET", "REMOVE", "ADD", "DELETE", "AND", "OR", "NOT", "IN", "BETWEEN", "size", "contains"}) | {
    *("attribute_exists", "attribute_not_exists", "attribute_type", "begins_with", "if_not_exists", "list_append"),
}


def model_problems(service: str, operation: str, parameters: Parameters, *, adds_tokens: bool) -> Iterator[str]:
    """Describe what is wrong with a request. `adds_tokens`: the client adds a token where botocore's model says so."""
    model = service_model(service).operation_model(operation)
    yield from _token_problems(f"{service}:{operation}", model, parameters, adds_tokens=adds_tokens)
    known = filter_names(service, operation)
    for each in parameters.get("Filters", ()):
        if known and not _is_known(each["Name"], known):
            yield f"has no filter {each['Name']}"
        if not each.get("Values") or len(set(each["Values"])) < len(each["Values"]):
            yield f"has no values of the filter {each['Name']}, or the same twice"
    if service == "dynamodb":
        yield from (f"writes or reads {key} twice" for key, count in Counter(_keys(parameters)).items() if count > 1)
        for part in _with_expressions(parameters):
            yield from _expression_problems(part)


def _token_problems(name: str, model: OperationModel, parameters: Parameters, *, adds_tokens: bool) -> Iterator[str]:
    members = {} if model.input_shape is None else model.input_shape.members
    for token in TOKENS:
        if token not in members or name in REPEATABLE or parameters.get("DryRun"):
            continue
        is_added = adds_tokens and members[token].metadata.get("idempotencyToken", False)
        if not parameters.get(token) and not is_added:
            yield f"has no {token}: sent again after a lost answer, it is another request"


@cache
def filter_names(service: str, operation: str) -> frozenset[str]:
    """The filters that the documentation of an operation names; empty if it has none."""
    shape = service_model(service).operation_model(operation).input_shape
    member = None if shape is None else shape.members.get("Filters")
    return frozenset() if member is None else frozenset(_FILTER.findall(html.unescape(member.documentation)))


def _is_known(name: str, known: frozenset[str]) -> bool:
    return name in known or (name.startswith("tag:") and any(each.partition(":")[0] == "tag" for each in known))


def _keys(parameters: Parameters) -> Iterator[str]:
    """The keys of all items in a batch or transaction."""
    for requests in parameters.get("RequestItems", {}).values():
        keys = requests["Keys"] if isinstance(requests, Mapping) else map(_key_of_write, requests)
        yield from map(_key, keys)
    for part in parameters.get("TransactItems", ()):
        yield from (_key(write.get("Key") or write["Item"]) for write in part.values())


def _key_of_write(request: Mapping[str, Any]) -> Mapping[str, Any]:
    key: Mapping[str, Any] = (
        request["PutRequest"]["Item"] if "PutRequest" in request else request["DeleteRequest"]["Key"]
    )
    return key


def _key(item: Mapping[str, Any]) -> str:
    return " ".join(str(item[name]["S"]) for name in ("pk", "sk") if name in item)


def _with_expressions(parameters: Parameters) -> Iterator[Parameters]:
    yield parameters
    for part in parameters.get("TransactItems", ()):
        yield from part.values()


def _expression_problems(part: Parameters) -> Iterator[str]:
    defined = {*part.get("ExpressionAttributeNames", ()), *part.get("ExpressionAttributeValues", ())}
    used = {
        word
        for kind in _EXPRESSIONS
        for word in _WORD.findall(part.get(f"{kind}Expression", ""))
        if word not in _GRAMMAR
    }
    if bare := sorted(word for word in used if word[0] not in "#:"):
        yield f"names {bare} without a placeholder, which may be reserved words"
    if unknown := sorted((used - {*bare}) ^ defined):
        yield f"has placeholders that are not defined or not used: {unknown}"
