"""Each rule for requests to AWS, and the requests that break it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.aws.contract import service_model
from tests.support.aws.model_rules import REPEATABLE, TOKENS
from tests.support.aws.request_rules import RULES, WITHOUT_RULES, BrokenRule, RequestSequence, judge_request
from tests.support.records import NOW

CONTROL = {"pk": {"S": "control#i-1"}, "sk": {"S": "control"}}
REPORT = {"pk": {"S": "report#i-1"}, "sk": {"S": "report"}}
JOB = {"pk": {"S": "job#1"}, "sk": {"S": "job"}}
NAMED = {"ExpressionAttributeNames": {"#a": "a"}, "ExpressionAttributeValues": {":b": {"S": "b"}}}
CONDITION = {"ConditionExpression": "#a = :b"}
UPDATE = {"Key": CONTROL, "UpdateExpression": "SET #a = :b", **CONDITION, **NAMED}
BOTH = {"ReturnValues": "ALL_NEW", "ReturnValuesOnConditionCheckFailure": "ALL_OLD"}
LOSER = {"ReturnValuesOnConditionCheckFailure": "ALL_OLD"}
TOKEN = {"ClientRequestToken": "t"}
POOL = [{"Key": "remuda:pool", "Value": "ci"}]
ON_DEMAND = {"DefaultTargetCapacityType": "on-demand", "TotalTargetCapacity": 1}
SPOT = {"TargetCapacitySpecification": {**ON_DEMAND, "DefaultTargetCapacityType": "spot"}}
TEMPLATE = {"LaunchTemplateName": "remuda-ci", "Version": "$Default"}
FLEET = {
    "Type": "instant",
    "ClientToken": "t",
    "LaunchTemplateConfigs": [{"LaunchTemplateSpecification": TEMPLATE}],
    "TargetCapacitySpecification": ON_DEMAND,
    "TagSpecifications": [{"ResourceType": kind, "Tags": POOL} for kind in ("instance", "volume", "fleet")],
}
METADATA = {"HttpTokens": "required", "HttpPutResponseHopLimit": 1, "InstanceMetadataTags": "enabled"}
DATA = {"InstanceInitiatedShutdownBehavior": "terminate", "MetadataOptions": METADATA}
VERSION = {"ClientToken": "t", "VersionDescription": "remuda 1", "LaunchTemplateData": DATA}
LIST = {"Filters": [{"Name": "instance-id", "Values": ["i-1"]}], "MaxResults": 1_000}
PRICES = {"ProductDescriptions": ["Linux/UNIX"], "StartTime": NOW, "EndTime": NOW}
ENTRIES = [{"Id": "0", "VisibilityTimeout": 0}, {"Id": "1", "VisibilityTimeout": 0}]

#: By service and operation: requests that keep the rules, and requests that break one.
EXAMPLES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "dynamodb:GetItem": ([{"ConsistentRead": True}], [{}, {"ConsistentRead": False}]),
    "dynamodb:BatchGetItem": (
        [{"RequestItems": {"t": {"ConsistentRead": True, "Keys": [CONTROL, REPORT]}}}],
        [
            {"RequestItems": {"t": {"Keys": [CONTROL]}}},
            {"RequestItems": {"t": {"ConsistentRead": True, "Keys": []}, "u": {"Keys": []}}},
            {"RequestItems": {"t": {"ConsistentRead": True, "Keys": [CONTROL, CONTROL]}}},
        ],
    ),
    "dynamodb:Query": (
        [{"ConsistentRead": True}, {"IndexName": "live"}],
        [{}, {"IndexName": "live", "ConsistentRead": True}],
    ),
    "dynamodb:UpdateItem": (
        [
            {**UPDATE, **BOTH},
            {**UPDATE, "Key": REPORT, "ReturnValues": "NONE"},
            {"Key": REPORT, "UpdateExpression": "SET #a = :b ADD #a :b", **NAMED, "ReturnValues": "NONE"},
        ],
        [
            {"Key": CONTROL, "UpdateExpression": "SET #a = :b", **NAMED, **BOTH},
            {"Key": CONTROL, "UpdateExpression": "SET #a = :b ADD #a :b", **NAMED, **BOTH},
            {"Key": REPORT, "UpdateExpression": "SET #a = :b", **NAMED, "ReturnValues": "NONE"},
            {**UPDATE, "ReturnValues": "ALL_NEW"},
            {**UPDATE, **LOSER},
            {**UPDATE, "Key": REPORT, **BOTH},
        ],
    ),
    "dynamodb:PutItem": (
        [{"Item": CONTROL, **CONDITION, **NAMED, **LOSER}, {"Item": JOB, **LOSER}],
        [
            {"Item": CONTROL, **LOSER},
            {"Item": CONTROL, **CONDITION, **NAMED},
            # A reserved word, a placeholder that is missing, and one that is not used.
            {"Item": CONTROL, "ConditionExpression": "attribute_not_exists(status)", **LOSER},
            {"Item": CONTROL, **CONDITION, **LOSER},
            {"Item": JOB, **NAMED, **LOSER},
        ],
    ),
    "dynamodb:BatchWriteItem": (
        [{"RequestItems": {"t": [{"PutRequest": {"Item": JOB}}, {"DeleteRequest": {"Key": REPORT}}]}}],
        [
            {"RequestItems": {"t": [{"PutRequest": {"Item": JOB}}, {"PutRequest": {"Item": CONTROL}}]}},
            {"RequestItems": {"t": [{"DeleteRequest": {"Key": CONTROL}}]}},
            {"RequestItems": {"t": [{"PutRequest": {"Item": JOB}}, {"PutRequest": {"Item": JOB}}]}},
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
        [FLEET, {**FLEET, **SPOT, "SpotOptions": {"InstanceInterruptionBehavior": "terminate"}}],
        [
            {**FLEET, "ClientToken": ""},
            {**FLEET, "Type": "request"},
            {**FLEET, "TagSpecifications": []},
            {**FLEET, "LaunchTemplateConfigs": [{"LaunchTemplateSpecification": {**TEMPLATE, "Version": "$Latest"}}]},
            {**FLEET, **SPOT},
            {**FLEET, **SPOT, "SpotOptions": {"InstanceInterruptionBehavior": "stop"}},
            {**FLEET, "SpotOptions": {}},
        ],
    ),
    "ec2:CreateLaunchTemplate": (
        [{**VERSION, "TagSpecifications": [{"Tags": POOL}]}],
        [VERSION, {**VERSION, "ClientToken": "", "TagSpecifications": [{"Tags": POOL}]}],
    ),
    "ec2:CreateLaunchTemplateVersion": (
        [VERSION],
        [
            {**VERSION, "ClientToken": ""},
            {**VERSION, "VersionDescription": ""},
            {**VERSION, "LaunchTemplateData": {**DATA, "MetadataOptions": {}}},
            {**VERSION, "LaunchTemplateData": {**DATA, "InstanceInitiatedShutdownBehavior": "stop"}},
        ],
    ),
    "ec2:DescribeLaunchTemplateVersions": ([{"Versions": ["$Default"]}], [{}]),
    "ec2:RunInstances": ([{"DryRun": True}], [{"ClientToken": "t"}, {}]),
    "ec2:DescribeSpotPriceHistory": ([PRICES], [{**PRICES, "ProductDescriptions": []}, {"Filters": LIST["Filters"]}]),
    "ec2:DescribeTags": (
        [{**LIST, "Filters": [{"Name": "resource-id", "Values": ["i-1"]}]}],
        [
            {**LIST, "Filters": [{"Name": "tag-key", "Values": ["x"]}]},
            {**LIST, "Filters": [{"Name": "resource-id", "Values": []}]},
            {**LIST, "Filters": [{"Name": "resource-id", "Values": ["i-1", "i-1"]}]},
        ],
    ),
    "dynamodb:CreateTable": ([{"BillingMode": "PAY_PER_REQUEST"}], [{}]),
    "s3:HeadBucket": ([{"ExpectedBucketOwner": "1"}], [{}]),
    "s3:PutObject": (
        [{"ExpectedBucketOwner": "1", "ChecksumSHA256": "x"}],
        [{"ChecksumSHA256": "x"}, {"ExpectedBucketOwner": "1"}],
    ),
    "s3:CreateBucket": ([{}], [{"CreateBucketConfiguration": {"LocationConstraint": "us-east-1"}}]),
    "cloudformation:ExecuteChangeSet": (
        [{"ChangeSetName": "arn:x", "ClientRequestToken": "t"}],
        [{"ChangeSetName": "x", "ClientRequestToken": "t"}, {"ChangeSetName": "arn:x"}],
    ),
    "cloudformation:CreateChangeSet": (
        [{"ClientToken": "t", "ChangeSetType": "UPDATE", "Capabilities": ["CAPABILITY_NAMED_IAM"]}],
        [{"ClientToken": "t"}, {"ChangeSetType": "UPDATE", "Capabilities": ["CAPABILITY_NAMED_IAM"]}],
    ),
    "cloudwatch:PutMetricData": ([{"Namespace": "Remuda"}], [{"Namespace": "AWS/EC2"}]),
    "ec2:DescribeInstances": (
        [LIST],
        [{**LIST, "InstanceIds": ["i-1"]}, {**LIST, "MaxResults": 5}, {"MaxResults": 1_000}],
    ),
    "ec2:TerminateInstances": ([{"InstanceIds": ["i"] * 100}], [{"InstanceIds": ["i"] * 101}, {"InstanceIds": []}]),
    "ec2:CreateTags": ([{"Resources": ["i"]}], [{"Resources": ["i"] * 101}]),
    "sqs:SendMessageBatch": (
        [{"Entries": ENTRIES}],
        [
            {"Entries": [{"Id": "0"}, {"Id": "0"}]},
            {"Entries": []},
            {"Entries": [{"Id": "0", "MessageGroupId": "large"}]},
        ],
    ),
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


def test_an_operation_without_a_rule_is_refused() -> None:
    with pytest.raises(BrokenRule, match="is new"):
        judge_request("sqs", "PurgeQueue", {})


def test_operations_of_the_rules_exist() -> None:
    """Also those that may be carried out twice, which have a token."""
    named = {name for rule in RULES for name in rule.operations.split()}
    assert not named & WITHOUT_RULES
    for name in (*named, *WITHOUT_RULES, *REPEATABLE):
        service, operation = name.split(":")
        members = service_model(service).operation_model(operation).input_shape
        assert name not in REPEATABLE or (members and set(TOKENS) & set(members.members))


@pytest.mark.parametrize(
    ("operation", "name"),
    [("DescribeInstances", "tag:x"), ("DescribeInstances", "instance-id"), ("DescribeTags", "key")],
)
def test_filters_are_those_of_the_documentation(operation: str, name: str) -> None:
    request = {"Filters": [{"Name": name, "Values": ["x"]}], "MaxResults": 1_000}
    judge_request("ec2", operation, request)
    with pytest.raises(BrokenRule, match="has no filter"):
        judge_request(
            "ec2", operation, {**request, "Filters": [{"Name": f"{name.partition(':')[0]}s", "Values": ["x"]}]}
        )


def test_the_client_of_botocore_adds_some_tokens_itself() -> None:
    request = {"Name": "x", "Tags": POOL}
    judge_request("secretsmanager", "CreateSecret", request, adds_tokens=True)
    with pytest.raises(BrokenRule, match="ClientRequestToken"):
        judge_request("secretsmanager", "CreateSecret", request)


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
