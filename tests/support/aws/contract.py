"""Check of requests to AWS against botocore's models and a table of documented limits.

botocore itself checks types, required members and minimum lengths. This also checks maximum lengths, patterns and
enumerations of the models, unknown members, and limits that the models do not contain.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import botocore.session
from botocore.model import ListShape, MapShape, ServiceModel, Shape, StringShape, StructureShape
from botocore.validate import ParamValidator

Parameters = Mapping[str, Any]
#: Classes of characters as the models name them and as Python does. Python has no surrogate pairs.
_CLASSES = {
    r"\uD800\uDC00-\uDBFF\uDFFF": r"\U00010000-\U0010FFFF",
    **dict.fromkeys((r"\p{L}", r"\p{M}", r"\p{N}"), r"\w"),
    r"\p{Z}": r"\s",
}
_EC2 = "https://docs.aws.amazon.com/AWSEC2/latest/"


class ContractViolation(AssertionError):
    """AWS would reject the request."""


def check_request(service: str, operation: str, parameters: Parameters) -> None:
    """Raise `ContractViolation` with all problems of a request."""
    shape = service_model(service).operation_model(operation).input_shape
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
def service_model(service: str) -> ServiceModel:
    """The model of a service, by the name of its client or of its host."""
    model: ServiceModel = _session().get_service_model({"monitoring": "cloudwatch"}.get(service, service))
    return model


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
        pattern = shape.metadata.get("pattern", "")
        if not re.search(_for_python(pattern), value):
            yield f"{where} is {value!r}, which does not match {pattern}"
    elif shape.type_name in {"integer", "long"} and isinstance(value, int):
        yield from _length_problems(shape, value, where)


@cache
def _for_python(pattern: str) -> str:
    for theirs, ours in _CLASSES.items():
        pattern = pattern.replace(theirs, ours)
    return pattern


def _length_problems(shape: Shape, length: int, where: str) -> Iterator[str]:
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    if least is not None and length < least:
        yield f"{where} is or has {length}, less than {least}"
    if most is not None and length > most:
        yield f"{where} is or has {length}, more than {most}"


# Documented limits ----------------------------------------------------------------------------------------------------


class Source(NamedTuple):
    """Documentation of a limit: its place, and its words.

    `where` is an address, or a shape or operation of botocore's models whose documentation contains the words; a test
    checks the latter.
    """

    where: str
    words: str


class Limit(NamedTuple):
    #: Member names; `*` stands for every element of a list or map, `keys` for the keys of a map.
    path: str
    measure: Callable[[Any], float]
    least: float
    most: float
    source: Source


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


def _requirements(configs: Sequence[Mapping[str, Any]]) -> int:
    return sum("InstanceRequirements" in override for config in configs for override in config.get("Overrides", ()))


def _values(filters: Sequence[Mapping[str, Any]]) -> int:
    return sum(len(each.get("Values", ())) for each in filters)


_CONSTRAINTS = "https://docs.aws.amazon.com/amazondynamodb/latest/developerguide/Constraints.html"
_EXPRESSION = Source(_CONSTRAINTS, "The maximum length of any expression string is 4 KB.")
_PLACEHOLDER = Source(
    _CONSTRAINTS,
    "The maximum length of any single expression attribute name or expression attribute value is 255 bytes.",
)
_VARIABLES = Source(_CONSTRAINTS, "The maximum length of all substitution variables in an expression is 2 MB.")
_ITEM = Source("dynamodb BatchWriteItem", "Any individual item in a batch exceeds 400 KB.")
_KEY = Source(
    "dynamodb BatchWriteItem",
    "For a partition key, the limit is 2048 bytes and for a sort key, the limit is 1024 bytes.",
)


def _tags(path: str) -> tuple[Limit, ...]:
    return (
        Limit(path, len, 0, 50, Source("ec2 CreateTags", "Each resource can have a maximum of 50 tags.")),
        Limit(f"{path}.*.Key", len, 1, 127, Source("ec2 Tag.Key", "accept a maximum of 127 Unicode characters")),
        Limit(f"{path}.*.Value", len, 0, 256, Source("ec2 Tag.Value", "accept a maximum of 256 Unicode characters")),
    )


_EXPRESSIONS = (
    *(
        Limit(f"{kind}Expression", _text_bytes, 1, 4_096, _EXPRESSION)
        for kind in ("Condition", "Filter", "KeyCondition", "Projection", "Update")
    ),
    Limit("ExpressionAttributeNames.keys", _text_bytes, 1, 255, _PLACEHOLDER),
    Limit("ExpressionAttributeNames", _item_bytes, 1, 2 * 1024 * 1024, _VARIABLES),
    Limit("ExpressionAttributeValues.keys", _text_bytes, 1, 255, _PLACEHOLDER),
    Limit("ExpressionAttributeValues", _item_bytes, 1, 2 * 1024 * 1024, _VARIABLES),
    Limit("Key.pk.S", _text_bytes, 1, 2_048, _KEY),
    Limit("Key.sk.S", _text_bytes, 1, 1_024, _KEY),
)
_TEMPLATE_DATA = (
    # The model has this limit for the name in CreateFleet only.
    Limit(
        "LaunchTemplateName",
        len,
        3,
        128,
        Source(f"{_EC2}APIReference/API_CreateLaunchTemplate.html", "Minimum length of 3. Maximum length of 128."),
    ),
    Limit(
        "LaunchTemplateData.UserData",
        _decoded,
        1,
        16_384,
        Source(
            f"{_EC2}UserGuide/instancedata-add-user-data.html",
            "User data is limited to 16 KB, in raw form, before it is base64-encoded.",
        ),
    ),
    Limit(
        "LaunchTemplateData.SecurityGroupIds",
        len,
        1,
        16,
        Source(
            "https://docs.aws.amazon.com/vpc/latest/userguide/amazon-vpc-limits.html",
            "Security groups per network interface: 5, adjustable (up to 16)",
        ),
    ),
    *_tags("LaunchTemplateData.TagSpecifications.*.Tags"),
    *_tags("TagSpecifications.*.Tags"),
)
_RESOURCES = Source("ec2 CreateTagsRequest.Resources", "Up to 1000 resource IDs.")
_TIMEOUT = Source("sqs ChangeMessageVisibilityRequest.VisibilityTimeout", "Values range: 0 to 43200.")
#: By service and operation; `*` stands for every operation.
LIMITS: Mapping[str, tuple[Limit, ...]] = {
    "ec2:*": (
        Limit(
            "Filters",
            _values,
            1,
            200,
            # Not found in AWS's documentation; the words of EC2's error FilterLimitExceeded.
            Source(
                "https://github.com/apache/druid/pull/1954",
                "The maximum number of filter values specified on a single call is 200",
            ),
        ),
    ),
    "ec2:CreateFleet": (
        Limit("ClientToken", len, 1, 64, Source("ec2 RunInstancesRequest.ClientToken", "Maximum 64 ASCII characters")),
        Limit(
            "LaunchTemplateConfigs",
            _requirements,
            0,
            4,
            Source(
                f"{_EC2}UserGuide/ec2-fleet-attribute-based-instance-type-selection.html",
                "You can specify a maximum of four InstanceRequirements structures in a request configuration.",
            ),
        ),
        Limit(
            "TargetCapacitySpecification.TotalTargetCapacity",
            float,
            1,
            10_000,
            Source(f"{_EC2}UserGuide/fleet-quotas.html", "The target capacity per EC2 Fleet or Spot Fleet: 10,000"),
        ),
        *_tags("TagSpecifications.*.Tags"),
    ),
    "ec2:CreateLaunchTemplate": _TEMPLATE_DATA,
    "ec2:CreateLaunchTemplateVersion": _TEMPLATE_DATA,
    "ec2:CreateTags": (Limit("Resources", len, 1, 1_000, _RESOURCES), *_tags("Tags")),
    "ec2:DeleteTags": (Limit("Resources", len, 1, 1_000, _RESOURCES),),
    "ec2:TerminateInstances": (
        Limit(
            "InstanceIds",
            len,
            1,
            1_000,
            Source("ec2 TerminateInstancesRequest.InstanceIds", "Up to 1000 instance IDs."),
        ),
    ),
    "ec2:DescribeTags": (
        Limit(
            "MaxResults",
            float,
            5,
            1_000,
            Source("ec2 DescribeTagsRequest.MaxResults", "This value can be between 5 and 1000."),
        ),
    ),
    "dynamodb:UpdateItem": _EXPRESSIONS,
    "dynamodb:GetItem": _EXPRESSIONS,
    "dynamodb:Query": _EXPRESSIONS,
    "dynamodb:Scan": _EXPRESSIONS,
    "dynamodb:PutItem": (*_EXPRESSIONS, Limit("Item", _item_bytes, 1, 400 * 1024, _ITEM)),
    "dynamodb:BatchGetItem": (
        Limit(
            "RequestItems", _batch, 1, 100, Source("dynamodb BatchGetItem", "which can contain as many as 100 items.")
        ),
    ),
    "dynamodb:BatchWriteItem": (
        Limit(
            "RequestItems",
            _batch,
            1,
            25,
            Source("dynamodb BatchWriteItem", "consisting of up to 25 item put or delete operations."),
        ),
        Limit("RequestItems.*.*.PutRequest.Item", _item_bytes, 1, 400 * 1024, _ITEM),
    ),
    "dynamodb:TransactWriteItems": (
        Limit(
            "TransactItems",
            _item_bytes,
            1,
            4 * 1024 * 1024,
            Source(
                "dynamodb TransactWriteItems", "The aggregate size of the items in the transaction cannot exceed 4 MB."
            ),
        ),
    ),
    "sqs:DeleteMessageBatch": (
        Limit("Entries", len, 1, 10, Source("sqs DeleteMessageBatch", "Deletes up to ten messages")),
    ),
    "sqs:SendMessageBatch": (
        Limit("Entries", len, 1, 10, Source("sqs SendMessageBatch", "send up to 10 messages")),
        Limit("Entries", _item_bytes, 1, 1024 * 1024, Source("sqs SendMessageBatch", "1 MiB 1,048,576 bytes")),
        Limit("Entries.*.Id", len, 1, 80, Source("sqs SendMessageBatchRequestEntry.Id", "up to 80 characters")),
        Limit(
            "Entries.*.DelaySeconds",
            float,
            0,
            900,
            Source("sqs SendMessageBatchRequestEntry.DelaySeconds", "Valid values: 0 to 900."),
        ),
    ),
    "sqs:ChangeMessageVisibilityBatch": (
        Limit("Entries", len, 1, 10, Source("sqs ChangeMessageVisibilityBatch", "up to 10")),
        Limit("Entries.*.VisibilityTimeout", float, 0, 43_200, _TIMEOUT),
    ),
    "sqs:ReceiveMessage": (
        Limit(
            "MaxNumberOfMessages",
            float,
            1,
            10,
            Source("sqs ReceiveMessageRequest.MaxNumberOfMessages", "Valid values: 1 to 10."),
        ),
        Limit(
            "WaitTimeSeconds",
            float,
            0,
            20,
            Source("sqs CreateQueueRequest.Attributes", "Valid values: An integer from 0 to 20 (seconds)."),
        ),
        Limit("VisibilityTimeout", float, 0, 43_200, _TIMEOUT),
    ),
    "sqs:CreateQueue": (
        Limit("QueueName", len, 1, 80, Source("sqs CreateQueueRequest.QueueName", "up to 80 characters")),
    ),
}


_SPOT_PRICES = ("SpotMaxPricePercentageOverLowestPrice", "MaxSpotPriceAsPercentageOfOptimalOnDemandPrice")
#: Rules about several members of CreateFleet.
FLEET_RULES = {
    "type": Source(
        "ec2 FleetLaunchTemplateOverridesRequest.InstanceType",
        "If you specify InstanceType, you can't specify InstanceRequirements.",
    ),
    "allowed": Source(
        "ec2 InstanceRequirementsRequest.AllowedInstanceTypes",
        "If you specify AllowedInstanceTypes, you can't specify ExcludedInstanceTypes.",
    ),
    "price": Source(
        f"ec2 InstanceRequirementsRequest.{_SPOT_PRICES[0]}",
        f"Only one of {' or '.join(_SPOT_PRICES)} can be specified.",
    ),
    "subnet": Source(
        "ec2 FleetLaunchTemplateOverridesRequest.SubnetId", "A request of type instant can have only one subnet ID."
    ),
}


def documentation(where: str) -> str:
    """The documentation of a shape, member or operation of botocore's models, without markup."""
    service, _, name = where.partition(" ")
    shape, _, member = name.partition(".")
    model = service_model(service)
    if shape in model.operation_names:
        text = model.operation_model(shape).documentation
    else:
        found: Any = model.shape_for(shape)
        text = (found.members[member] if member else found).documentation
    return " ".join(re.sub(r"<[^>]+>", "", text).split())


def _limit_problems(service: str, operation: str, parameters: Parameters) -> Iterator[tuple[str, str]]:
    for limit in (*LIMITS.get(f"{service}:*", ()), *LIMITS.get(f"{service}:{operation}", ())):
        for value in _at(parameters, limit.path.split(".")):
            measured = limit.measure(value)
            if not limit.least <= measured <= limit.most:
                yield f"{limit.path} is or has {measured:g}, not {limit.least:g} to {limit.most:g}", limit.source.where
    if (service, operation) == ("ec2", "CreateFleet"):
        yield from _fleet_problems(parameters)


def _at(value: Any, path: Sequence[str]) -> Iterator[Any]:
    if not path:
        yield value
        return
    head, *rest = path
    if head == "keys":
        yield from value
    elif head == "*":
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _at(each, rest)
    elif isinstance(value, Mapping) and head in value:
        yield from _at(value[head], rest)


def _fleet_problems(parameters: Parameters) -> Iterator[tuple[str, str]]:
    """Rules about several members of CreateFleet."""
    for override in _at(parameters, ["LaunchTemplateConfigs", "*", "Overrides", "*"]):
        needs = override.get("InstanceRequirements", {})
        broken = {
            "type": bool(needs) and "InstanceType" in override,
            "allowed": {"AllowedInstanceTypes", "ExcludedInstanceTypes"} <= set(needs),
            "price": {*_SPOT_PRICES} <= set(needs),
            "subnet": parameters["Type"] == "instant" and "," in override.get("SubnetId", ""),
        }
        yield from (
            (FLEET_RULES[name].words, FLEET_RULES[name].where) for name, is_broken in broken.items() if is_broken
        )
        for name in ("VCpuCount", "MemoryMiB"):
            bounds = needs.get(name, {})
            if "Max" in bounds and bounds["Max"] < bounds["Min"]:
                yield f"{name} has a maximum below its minimum", f"ec2 InstanceRequirementsRequest.{name}"
