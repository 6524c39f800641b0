"""Check of requests to AWS against botocore's models and a table of documented limits.

botocore itself checks types, required members and minimum lengths. This also checks maximum lengths, patterns and
enumerations of the models, unknown members, and limits that the models do not contain.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import botocore.session
from botocore.model import ListShape, MapShape, Shape, StringShape, StructureShape
from botocore.validate import ParamValidator

Parameters = Mapping[str, Any]
_EC2 = "https://docs.aws.amazon.com/AWSEC2/latest/"
_DYNAMODB = "https://docs.aws.amazon.com/amazondynamodb/latest/"
_SQS = "https://docs.aws.amazon.com/AWSSimpleQueueService/latest/"


class ContractViolation(AssertionError):
    """AWS would reject the request."""


def check_request(service: str, operation: str, parameters: Parameters) -> None:
    """Raise `ContractViolation` with all problems of a request."""
    shape = _session().get_service_model(service).operation_model(operation).input_shape
    problems: list[str] = []
    if shape is not None:
        report = ParamValidator().validate(parameters, shape)
        if report.has_errors():
            problems.append(report.generate_report())
        problems += _model_problems(shape, parameters, operation)
    problems += (
        f"{operation}: {problem} ({source})" for problem, source in _limit_problems(service, operation, parameters)
    )
    if problems:
        raise ContractViolation("; ".join(problems))


@cache
def _session() -> Any:
    return botocore.session.get_session()


# Models ---------------------------------------------------------------------------------------------------------------


def _model_problems(shape: Shape, value: Any, where: str) -> Iterator[str]:
    if isinstance(shape, StructureShape) and isinstance(value, Mapping):
        for name, item in value.items():
            if name in shape.members:
                yield from _model_problems(shape.members[name], item, f"{where}.{name}")
            else:
                yield f"{where} has no member {name}"
    elif isinstance(shape, ListShape) and isinstance(value, Sequence):
        yield from _length_problems(shape, len(value), where)
        for number, item in enumerate(value):
            yield from _model_problems(shape.member, item, f"{where}[{number}]")
    elif isinstance(shape, MapShape) and isinstance(value, Mapping):
        for name, item in value.items():
            yield from _model_problems(shape.key, name, f"{where} key")
            yield from _model_problems(shape.value, item, f"{where}.{name}")
    elif isinstance(shape, StringShape) and isinstance(value, str):
        yield from _length_problems(shape, len(value), where)
        if shape.enum and value not in shape.enum:
            yield f"{where} is {value!r}, not one of {shape.enum}"
        pattern = shape.metadata.get("pattern")
        if pattern and not re.search(pattern, value):
            yield f"{where} is {value!r}, which does not match {pattern}"
    elif shape.type_name in {"integer", "long"} and isinstance(value, int):
        yield from _length_problems(shape, value, where)


def _length_problems(shape: Shape, length: int, where: str) -> Iterator[str]:
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    if least is not None and length < least:
        yield f"{where} is or has {length}, less than {least}"
    if most is not None and length > most:
        yield f"{where} is or has {length}, more than {most}"


# Documented limits ----------------------------------------------------------------------------------------------------

#: A path of member names; `*` stands for every element of a list or map. With the measure, the smallest and the largest
#: value, and the source.
Limit = tuple[str, Callable[[Any], float], float, float, str]


def _batch(parameters: Parameters) -> int:
    """The number of requests or keys in a batch, over all tables."""
    return sum(len(each["Keys"] if isinstance(each, Mapping) else each) for each in parameters.values())


def _item_bytes(value: Any) -> int:
    """The approximate size of an item: names and values."""
    if isinstance(value, Mapping):
        return sum(len(str(name).encode()) + _item_bytes(item) for name, item in value.items())
    if isinstance(value, list | tuple):
        return sum(map(_item_bytes, value))
    return len(str(value).encode())


def _decoded(text: str) -> int:
    return len(base64.b64decode(text))


def _text_bytes(text: str) -> int:
    return len(text.encode())


_TAG_SOURCE = f"{_EC2}UserGuide/Using_Tags.html"
_TEMPLATE_SOURCE = f"{_EC2}APIReference/API_CreateLaunchTemplate.html"
_FLEET_SOURCE = f"{_EC2}APIReference/API_CreateFleet.html"
_EXPRESSION_SOURCE = f"{_DYNAMODB}developerguide/Constraints.html"


def _tags(path: str) -> tuple[Limit, ...]:
    return (
        (path, len, 0, 50, _TAG_SOURCE),
        (f"{path}.*.Key", len, 1, 128, _TAG_SOURCE),
        (f"{path}.*.Value", len, 0, 256, _TAG_SOURCE),
    )


_EXPRESSIONS: tuple[Limit, ...] = (
    ("UpdateExpression", _text_bytes, 1, 4_096, _EXPRESSION_SOURCE),
    ("ConditionExpression", _text_bytes, 1, 4_096, _EXPRESSION_SOURCE),
    ("FilterExpression", _text_bytes, 1, 4_096, _EXPRESSION_SOURCE),
    ("KeyConditionExpression", _text_bytes, 1, 4_096, _EXPRESSION_SOURCE),
    ("ExpressionAttributeNames.*", _text_bytes, 1, 255, _EXPRESSION_SOURCE),
    ("ExpressionAttributeValues", _item_bytes, 1, 2 * 1024 * 1024, _EXPRESSION_SOURCE),
    ("Key.pk.S", _text_bytes, 1, 2_048, _EXPRESSION_SOURCE),
    ("Key.sk.S", _text_bytes, 1, 1_024, _EXPRESSION_SOURCE),
)
_TEMPLATE_DATA: tuple[Limit, ...] = (
    ("LaunchTemplateName", len, 3, 128, _TEMPLATE_SOURCE),
    ("VersionDescription", len, 0, 255, _TEMPLATE_SOURCE),
    ("LaunchTemplateData.UserData", _decoded, 1, 16_384, f"{_EC2}UserGuide/instancedata-add-user-data.html"),
    ("LaunchTemplateData.SecurityGroupIds", len, 1, 16, f"{_EC2}UserGuide/security-group-quotas.html"),
    *_tags("LaunchTemplateData.TagSpecifications.*.Tags"),
    *_tags("TagSpecifications.*.Tags"),
)
_FILTERS: tuple[Limit, ...] = (
    ("Filters.*.Values", len, 1, 200, f"{_EC2}UserGuide/Using_Filtering.html"),
    ("MaxResults", float, 5, 1_000, f"{_EC2}APIReference/Query-Requests.html"),
)
_REQUIREMENTS = "LaunchTemplateConfigs.*.Overrides.*.InstanceRequirements"
LIMITS: Mapping[str, tuple[Limit, ...]] = {
    "ec2:CreateFleet": (
        ("ClientToken", len, 1, 64, f"{_EC2}APIReference/Run_Instance_Idempotency.html"),
        ("LaunchTemplateConfigs", len, 1, 50, _FLEET_SOURCE),
        ("LaunchTemplateConfigs.*.Overrides", len, 1, 300, f"{_EC2}UserGuide/fleet-quotas.html"),
        (
            f"{_REQUIREMENTS}.AllowedInstanceTypes",
            len,
            1,
            400,
            f"{_EC2}APIReference/API_InstanceRequirementsRequest.html",
        ),
        (
            f"{_REQUIREMENTS}.AllowedInstanceTypes.*",
            len,
            1,
            30,
            f"{_EC2}APIReference/API_InstanceRequirementsRequest.html",
        ),
        ("TargetCapacitySpecification.TotalTargetCapacity", float, 1, 10_000, f"{_EC2}UserGuide/fleet-quotas.html"),
        *_tags("TagSpecifications.*.Tags"),
    ),
    "ec2:CreateLaunchTemplate": _TEMPLATE_DATA,
    "ec2:CreateLaunchTemplateVersion": _TEMPLATE_DATA,
    "ec2:CreateTags": (("Resources", len, 1, 1_000, f"{_EC2}APIReference/API_CreateTags.html"), *_tags("Tags")),
    "ec2:DeleteTags": (("Resources", len, 1, 1_000, f"{_EC2}APIReference/API_DeleteTags.html"),),
    "ec2:TerminateInstances": (("InstanceIds", len, 1, 1_000, f"{_EC2}APIReference/API_TerminateInstances.html"),),
    "ec2:DescribeInstances": _FILTERS,
    "ec2:DescribeTags": _FILTERS,
    "ec2:DescribeImages": _FILTERS[:1],
    "ec2:DescribeSubnets": _FILTERS[:1],
    "ec2:DescribeSecurityGroups": _FILTERS[:1],
    "ec2:DescribeSpotPriceHistory": _FILTERS[:1],
    "dynamodb:UpdateItem": _EXPRESSIONS,
    "dynamodb:GetItem": _EXPRESSIONS,
    "dynamodb:Query": _EXPRESSIONS,
    "dynamodb:Scan": _EXPRESSIONS,
    "dynamodb:PutItem": (*_EXPRESSIONS, ("Item", _item_bytes, 1, 400 * 1024, _EXPRESSION_SOURCE)),
    "dynamodb:BatchGetItem": (("RequestItems", _batch, 1, 100, f"{_DYNAMODB}APIReference/API_BatchGetItem.html"),),
    "dynamodb:BatchWriteItem": (
        ("RequestItems", _batch, 1, 25, f"{_DYNAMODB}APIReference/API_BatchWriteItem.html"),
        ("RequestItems.*.*.PutRequest.Item", _item_bytes, 1, 400 * 1024, _EXPRESSION_SOURCE),
    ),
    "dynamodb:TransactWriteItems": (
        ("TransactItems", len, 1, 100, f"{_DYNAMODB}APIReference/API_TransactWriteItems.html"),
        ("TransactItems", _item_bytes, 1, 4 * 1024 * 1024, f"{_DYNAMODB}APIReference/API_TransactWriteItems.html"),
    ),
    "sqs:SendMessageBatch": (
        ("Entries", len, 1, 10, f"{_SQS}APIReference/API_SendMessageBatch.html"),
        ("Entries", _item_bytes, 1, 256 * 1024, f"{_SQS}APIReference/API_SendMessageBatch.html"),
        ("Entries.*.Id", len, 1, 80, f"{_SQS}APIReference/API_SendMessageBatchRequestEntry.html"),
        ("Entries.*.DelaySeconds", float, 0, 900, f"{_SQS}APIReference/API_SendMessageBatchRequestEntry.html"),
    ),
    "sqs:DeleteMessageBatch": (("Entries", len, 1, 10, f"{_SQS}APIReference/API_DeleteMessageBatch.html"),),
    "sqs:ChangeMessageVisibilityBatch": (
        ("Entries", len, 1, 10, f"{_SQS}APIReference/API_ChangeMessageVisibilityBatch.html"),
        ("Entries.*.VisibilityTimeout", float, 0, 43_200, f"{_SQS}APIReference/API_ChangeMessageVisibility.html"),
    ),
    "sqs:ReceiveMessage": (
        ("MaxNumberOfMessages", float, 1, 10, f"{_SQS}APIReference/API_ReceiveMessage.html"),
        ("WaitTimeSeconds", float, 0, 20, f"{_SQS}APIReference/API_ReceiveMessage.html"),
        ("VisibilityTimeout", float, 0, 43_200, f"{_SQS}APIReference/API_ReceiveMessage.html"),
    ),
    "sqs:CreateQueue": (("QueueName", len, 1, 80, f"{_SQS}APIReference/API_CreateQueue.html"),),
}


def _limit_problems(service: str, operation: str, parameters: Parameters) -> Iterator[tuple[str, str]]:
    for path, measure, least, most, source in LIMITS.get(f"{service}:{operation}", ()):
        for value in _at(parameters, path.split(".")):
            measured = measure(value)
            if not least <= measured <= most:
                yield f"{path} is or has {measured:g}, not {least:g} to {most:g}", source
    if (service, operation) == ("ec2", "CreateFleet"):
        yield from _fleet_problems(parameters)


def _at(value: Any, path: Sequence[str]) -> Iterator[Any]:
    if not path:
        yield value
        return
    head, *rest = path
    if head == "*":
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _at(each, rest)
    elif isinstance(value, Mapping) and head in value:
        yield from _at(value[head], rest)


def _fleet_problems(parameters: Parameters) -> Iterator[tuple[str, str]]:
    """Rules about several members of CreateFleet."""
    for override in _at(parameters, ["LaunchTemplateConfigs", "*", "Overrides", "*"]):
        needs = override.get("InstanceRequirements", {})
        if needs and "InstanceType" in override:
            yield "an override has both InstanceType and InstanceRequirements", _FLEET_SOURCE
        if {"AllowedInstanceTypes", "ExcludedInstanceTypes"} <= set(needs):
            yield "AllowedInstanceTypes and ExcludedInstanceTypes exclude each other", _FLEET_SOURCE
        if parameters["Type"] == "instant" and "," in override.get("SubnetId", ""):
            yield "an override of an instant fleet has more than one subnet", _FLEET_SOURCE
        for name in ("VCpuCount", "MemoryMiB"):
            bounds = needs.get(name, {})
            if "Max" in bounds and bounds["Max"] < bounds["Min"]:
                yield f"{name} has a maximum below its minimum", _FLEET_SOURCE
