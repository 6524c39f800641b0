"""What IAM is asked for when a request comes to DynamoDB: from what was sent over the wire."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from policies import LEADING_KEYS, policies
from remuda.adapters.aws.dynamodb.items import PK
from statements import fill_placeholders
from tests.support.iam import Request, Value, allows

ACCOUNT, REGION = "123456789012", "eu-central-1"


def refused(who: str, pool: str, asked: Iterable[Request]) -> list[Request]:
    """What the policy of this name does not allow."""
    (policy,) = [each for each in policies() if each.name == who]
    document = fill_placeholders(policy, pool=pool, account=ACCOUNT, region=REGION)
    return [each for each in asked if not allows(document, each)]


def requests(sent: Mapping[str, list[Any]], context: Mapping[str, Value] | None = None) -> Iterator[Request]:
    """By operation, as `Wire.sent` has it."""
    for operation, documents in sent.items():
        for document in documents:
            for action, table, keys in _parts(operation, document):
                yield Request(
                    action=f"dynamodb:{action}",
                    resource=f"arn:aws:dynamodb:{REGION}:{ACCOUNT}:table/{table}",
                    context={**(context or {}), LEADING_KEYS: keys},
                )


def _parts(operation: str, sent: Mapping[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    """The right, the table or index, and the partition keys."""
    match operation:
        case "GetItem" | "UpdateItem":
            yield operation, sent["TableName"], [_pk(sent["Key"])]
        case "PutItem":
            yield operation, sent["TableName"], [_pk(sent["Item"])]
        case "Query":
            index = f"/index/{sent['IndexName']}" if "IndexName" in sent else ""
            # "#pk = :v0", and perhaps more.
            value = sent["KeyConditionExpression"].split()[2]
            yield operation, sent["TableName"] + index, [sent["ExpressionAttributeValues"][value]["S"]]
        case "BatchGetItem":
            for table, wanted in sent["RequestItems"].items():
                yield operation, table, [_pk(key) for key in wanted["Keys"]]
        case "BatchWriteItem":
            for table, wanted in sent["RequestItems"].items():
                yield operation, table, [_pk(each["PutRequest"]["Item"]) for each in wanted]
        case "TransactWriteItems":
            # IAM asks for the rights of its parts.
            for each in sent["TransactItems"]:
                yield "UpdateItem", each["Update"]["TableName"], [_pk(each["Update"]["Key"])]
        case _:
            raise NotImplementedError(operation)


def _pk(item: Mapping[str, Any]) -> str:
    return str(item[PK]["S"])
