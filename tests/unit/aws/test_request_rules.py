"""Each rule for requests to AWS, and the requests that break it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.aws.request_rules import RULES, BrokenRule, RequestSequence, judge_request

CONTROL = {"pk": {"S": "control#i-1"}, "sk": {"S": "control"}}
REPORT = {"pk": {"S": "report#i-1"}, "sk": {"S": "report"}}
JOB = {"pk": {"S": "job#1"}, "sk": {"S": "job"}}
CONDITION = {"ConditionExpression": "a = b"}
UPDATE = {"Key": CONTROL, "UpdateExpression": "SET a = b", **CONDITION}
BOTH = {"ReturnValues": "ALL_NEW", "ReturnValuesOnConditionCheckFailure": "ALL_OLD"}
LOSER = {"ReturnValuesOnConditionCheckFailure": "ALL_OLD"}
TOKEN = {"ClientRequestToken": "t"}
POOL = [{"Key": "remuda:pool", "Value": "ci"}]
FLEET = {
    "Type": "instant",
    "ClientToken": "t",
    "TagSpecifications": [{"ResourceType": kind, "Tags": POOL} for kind in ("instance", "volume", "fleet")],
}
LIST = {"Filters": [{"Name": "instance-id", "Values": ["i-1"]}], "MaxResults": 1_000}
ENTRIES = [{"Id": "0", "VisibilityTimeout": 0}, {"Id": "1", "VisibilityTimeout": 0}]

#: By service and operation: requests that keep the rules, and requests that break one.
EXAMPLES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "dynamodb:GetItem": ([{"ConsistentRead": True}], [{}, {"ConsistentRead": False}]),
    "dynamodb:BatchGetItem": (
        [{"RequestItems": {"t": {"ConsistentRead": True}}}],
        [{"RequestItems": {"t": {}}}, {"RequestItems": {"t": {"ConsistentRead": True}, "u": {}}}],
    ),
    "dynamodb:Query": (
        [{"ConsistentRead": True}, {"IndexName": "live"}],
        [{}, {"IndexName": "live", "ConsistentRead": True}],
    ),
    "dynamodb:UpdateItem": (
        [
            {**UPDATE, **BOTH},
            {**UPDATE, "Key": REPORT, "ReturnValues": "NONE"},
            {"Key": REPORT, "UpdateExpression": "SET a = b ADD beat :one", "ReturnValues": "NONE"},
        ],
        [
            {"Key": CONTROL, "UpdateExpression": "SET a = b", **BOTH},
            {"Key": CONTROL, "UpdateExpression": "SET a = b ADD beat :one", **BOTH},
            {"Key": REPORT, "UpdateExpression": "SET a = b", "ReturnValues": "NONE"},
            {**UPDATE, "ReturnValues": "ALL_NEW"},
            {**UPDATE, **LOSER},
            {**UPDATE, "Key": REPORT, **BOTH},
        ],
    ),
    "dynamodb:PutItem": (
        [{"Item": CONTROL, **CONDITION, **LOSER}, {"Item": JOB, **LOSER}],
        [{"Item": CONTROL, **LOSER}, {"Item": CONTROL, **CONDITION}],
    ),
    "dynamodb:BatchWriteItem": (
        [{"RequestItems": {"t": [{"PutRequest": {"Item": JOB}}, {"DeleteRequest": {"Key": REPORT}}]}}],
        [
            {"RequestItems": {"t": [{"PutRequest": {"Item": JOB}}, {"PutRequest": {"Item": CONTROL}}]}},
            {"RequestItems": {"t": [{"DeleteRequest": {"Key": CONTROL}}]}},
        ],
    ),
    "dynamodb:TransactWriteItems": (
        [{"TransactItems": [{"Update": UPDATE}, {"Put": {"Item": JOB}}], **TOKEN}],
        [
            {"TransactItems": [{"Update": UPDATE}]},
            {"TransactItems": [{"Update": UPDATE}, {"Update": {"Key": CONTROL}}], **TOKEN},
            {"TransactItems": [{"Put": {"Item": CONTROL}}], **TOKEN},
        ],
    ),
    "ec2:CreateFleet": (
        [FLEET],
        [{**FLEET, "ClientToken": ""}, {**FLEET, "Type": "request"}, {**FLEET, "TagSpecifications": []}],
    ),
    "ec2:CreateLaunchTemplateVersion": ([{"ClientToken": "t"}], [{}]),
    "ec2:RunInstances": ([{"DryRun": True}, {"ClientToken": "t"}], [{}]),
    "ec2:DescribeInstances": (
        [LIST],
        [{**LIST, "InstanceIds": ["i-1"]}, {**LIST, "MaxResults": 5}, {"MaxResults": 1_000}],
    ),
    "ec2:TerminateInstances": ([{"InstanceIds": ["i"] * 100}], [{"InstanceIds": ["i"] * 101}, {"InstanceIds": []}]),
    "ec2:CreateTags": ([{"Resources": ["i"]}], [{"Resources": ["i"] * 101}]),
    "sqs:SendMessageBatch": ([{"Entries": ENTRIES}], [{"Entries": [{"Id": "0"}, {"Id": "0"}]}, {"Entries": []}]),
    "sqs:ChangeMessageVisibilityBatch": ([{"Entries": ENTRIES}], [{"Entries": [{"Id": "0", "VisibilityTimeout": 9}]}]),
    "sqs:ReceiveMessage": ([{"WaitTimeSeconds": 20}], [{"WaitTimeSeconds": 26}]),
    "sqs:CreateQueue": ([{"Attributes": {"DelaySeconds": "0"}}], [{"Attributes": {"RedrivePolicy": "{}"}}]),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_requests_that_keep_and_that_break_the_rules(name: str) -> None:
    service, operation = name.split(":")
    kept, broken = EXAMPLES[name]
    for request in kept:
        judge_request(service, operation, request)
    for request in broken:
        with pytest.raises(BrokenRule):
            judge_request(service, operation, request)


def test_each_rule_is_broken_by_an_example() -> None:
    for rule in RULES:
        broken = [request for name in rule.operations.split() for request in EXAMPLES.get(name, ((), ()))[1]]
        assert not all(rule.is_kept(request) for request in broken), rule.requires


LAST = {"pk": {"S": "x"}, "sk": {"S": "y"}}


@pytest.mark.parametrize(
    ("first", "second", "is_kept"),
    [
        ({"ConsistentRead": True}, {"ConsistentRead": True, "ExclusiveStartKey": LAST}, True),
        ({"IndexName": "live"}, {"ConsistentRead": True, "ExclusiveStartKey": LAST}, False),
        ({"ConsistentRead": True, "Limit": 4}, {"ConsistentRead": True, "ExclusiveStartKey": LAST}, False),
        ({"ConsistentRead": True}, {"ConsistentRead": True, "ExclusiveStartKey": {"pk": {"S": "z"}}}, False),
    ],
)
def test_pages_are_of_one_list(first: dict[str, Any], second: dict[str, Any], is_kept: bool) -> None:  # noqa: FBT001
    sequence = RequestSequence()
    sequence.judge("dynamodb", "Query", first)
    sequence.observe("dynamodb", "Query", first, {"LastEvaluatedKey": LAST})
    if is_kept:
        sequence.judge("dynamodb", "Query", second)
        return
    with pytest.raises(BrokenRule, match="another list"):
        sequence.judge("dynamodb", "Query", second)


def test_a_token_belongs_to_one_transaction() -> None:
    sequence = RequestSequence()
    (request,) = EXAMPLES["dynamodb:TransactWriteItems"][0]
    for _ in range(2):
        sequence.judge("dynamodb", "TransactWriteItems", request)
    sequence.judge("dynamodb", "TransactWriteItems", {**request, "TransactItems": [], "ClientRequestToken": "u"})
    with pytest.raises(BrokenRule, match="another request"):
        sequence.judge("dynamodb", "TransactWriteItems", {**request, "TransactItems": []})
