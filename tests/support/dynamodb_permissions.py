"""IAM requests that correspond to recorded DynamoDB requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from policies import LEADING_KEYS, policies
from remuda.adapters.aws.dynamodb.items import PK
from statements import fill_placeholders
from tests.support.iam import IamRequest, Value, allows

ACCOUNT, REGION = "123456789012", "eu-central-1"


def denied_requests(policy_name: str, pool: str, sent: Iterable[IamRequest]) -> list[IamRequest]:
    """The requests that the policy of this name does not allow."""
    (policy,) = [each for each in policies() if each.name == policy_name]
    document = fill_placeholders(policy, pool=pool, account=ACCOUNT, region=REGION)
    return [each for each in sent if not allows(document, each)]


def iam_requests(sent: Mapping[str, list[Any]], context: Mapping[str, Value] | None = None) -> Iterator[IamRequest]:
    """The IAM requests of DynamoDB documents by operation, as in `FaultProxy.sent`."""
    for operation, documents in sent.items():
        for document in documents:
            for action, table, keys in _parts(operation, document):
                yield IamRequest(
                    action=f"dynamodb:{action}",
                    resource=f"arn:aws:dynamodb:{REGION}:{ACCOUNT}:table/{table}",
                    context={**(context or {}), LEADING_KEYS: keys},
                )


def _parts(operation: str, sent: Mapping[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
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
                yield operation, table, [_pk(each["PutRequest"]["Item"]) for each in wanted]
        case "TransactWriteItems":
            # IAM checks the permissions of the parts.
            for each in sent["TransactItems"]:
                yield "UpdateItem", each["Update"]["TableName"], [_pk(each["Update"]["Key"])]
        case _:
            raise NotImplementedError(operation)


def _pk(item: Mapping[str, Any]) -> str:
    return str(item[PK]["S"])
