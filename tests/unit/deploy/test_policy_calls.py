"""Every call that the adapters make is allowed to the one who makes it, and to nobody else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import botocore.session
import pytest

import remuda.adapters.aws
from policies import policies
from remuda.adapters.aws.dynamodb import items
from remuda.domain.scale_down.fleet import GHR_APPLICATION, GHR_APPLICATION_TAG, GHR_ENVIRONMENT_TAG
from remuda.ports.compute import POOL_TAG
from statements import fill_placeholders
from tests.support.iam import IamRequest, Value, allows

ACCOUNT, REGION, POOL = "123456789012", "eu-central-1", "ci"
INSTANCE = "i-0123456789abcdef0"
USER_ID = f"AROA{'A' * 17}:{INSTANCE}"
KEYS = items.ItemKeys(prefix=USER_ID.removesuffix(INSTANCE))
CREDENTIAL = f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:github-AbCdEf"
MADE = {
    policy.name: fill_placeholders(
        policy, pool=POOL, account=ACCOUNT, region=REGION, environment=POOL, credential=CREDENTIAL
    )
    for policy in policies()
}
SERVICES = ("dynamodb", "ec2", "iam", "sqs")

#: What IAM asks for in place of a call: the rights of its parts.
PARTS = {"TransactWriteItems": "UpdateItem"}
#: Partition keys of what is written, by whoever writes; refresh writes the configuration, too.
WRITTEN = {
    "BatchWriteItem": (items.history_pk(INSTANCE),),
    "PutItem": (items.run_pk("4711"),),
    "TransactWriteItems": (f"control#{USER_ID}", f"report#{USER_ID}"),
    "UpdateItem": (f"control#{USER_ID}", f"report#{USER_ID}"),
}
#: Who makes which call: what the use cases of each come to, by way of the adapters.
CALLS = {
    # Who it is, everybody may ask STS without any right.
    "agent": {
        "dynamodb": {"GetItem", "UpdateItem"},
        "ec2": {"TerminateInstances"},
        "iam": set[str](),
        "sqs": set[str](),
    },
    "workflow": {
        "dynamodb": {"BatchGetItem", "BatchWriteItem", "GetItem", "PutItem", "Query", "UpdateItem"},
        # RunInstances as a dry run of the doctor's; EC2 asks for it within CreateFleet, too.
        "ec2": {"CreateFleet", "DescribeInstances", "DescribeTags", "RunInstances", "TerminateInstances"},
        "iam": set[str](),
        "sqs": {
            "ChangeMessageVisibilityBatch",
            "DeleteMessageBatch",
            "GetQueueAttributes",
            "GetQueueUrl",
            "ReceiveMessage",
            "SendMessageBatch",
        },
    },
    "refresh": {
        "dynamodb": {
            "BatchGetItem",
            "BatchWriteItem",
            "CreateTable",
            "DescribeTable",
            "DescribeTimeToLive",
            "GetItem",
            "PutItem",
            "Query",
            "Scan",
            "TransactWriteItems",
            "UpdateItem",
            "UpdateTimeToLive",
        },
        "ec2": {
            "CreateLaunchTemplate",
            "CreateLaunchTemplateVersion",
            "DescribeImages",
            "DescribeInstances",
            "DescribeLaunchTemplateVersions",
            "DescribeLaunchTemplates",
            "DescribeSecurityGroups",
            "DescribeSpotPriceHistory",
            "DescribeSubnets",
            "DescribeTags",
            "ModifyLaunchTemplate",
            "TerminateInstances",
        },
        "iam": {"GetInstanceProfile"},
        "sqs": {
            "ChangeMessageVisibilityBatch",
            "CreateQueue",
            "DeleteMessageBatch",
            "GetQueueAttributes",
            "GetQueueUrl",
            "ReceiveMessage",
            "SendMessageBatch",
            "SetQueueAttributes",
        },
    },
    "scale-down": {
        "dynamodb": {"BatchGetItem", "BatchWriteItem", "GetItem", "Query", "UpdateItem"},
        "ec2": {"CreateTags", "DeleteTags", "DescribeInstances", "TerminateInstances"},
        "iam": set[str](),
        "sqs": set[str](),
    },
}


def arn(service: str, resource: str) -> str:
    return f"arn:aws:{service}:{REGION}:{ACCOUNT}:{resource}"


TABLE = arn("dynamodb", f"table/remuda-{POOL}")
MACHINE = arn("ec2", f"instance/{INSTANCE}")
TEMPLATE = arn("ec2", "launch-template/lt-0123456789abcdef0")
#: As the machines of a pool are tagged, and its launch template.
OURS: dict[str, Value] = {
    f"aws:ResourceTag/{POOL_TAG}": POOL,
    f"aws:ResourceTag/{GHR_APPLICATION_TAG}": GHR_APPLICATION,
    f"aws:ResourceTag/{GHR_ENVIRONMENT_TAG}": POOL,
}
ASKED: dict[str, Value] = {f"aws:RequestTag/{POOL_TAG}": POOL}
WITH_TEMPLATE: dict[str, Value] = {"ec2:LaunchTemplate": TEMPLATE}
OF_TEMPLATE: dict[str, Value] = {**WITH_TEMPLATE, "ec2:IsLaunchTemplateResource": "true"}


def request(action: str, resource: str, *contexts: Mapping[str, Value]) -> IamRequest:
    return IamRequest(action=action, resource=resource, context={k: v for each in contexts for k, v in each.items()})


def launch() -> list[IamRequest]:
    """What EC2 asks IAM for one instant fleet of spot machines."""
    kinds: dict[str, Mapping[str, Value]] = {
        "instance/*": {**ASKED, **WITH_TEMPLATE},
        "volume/*": {**ASKED, **WITH_TEMPLATE},
        "subnet/subnet-1": WITH_TEMPLATE,
        "network-interface/*": WITH_TEMPLATE,
        "security-group/sg-1": OF_TEMPLATE,
        "key-pair/people": OF_TEMPLATE,
        "spot-instances-request/*": {},
    }
    tagged = {**ASKED, "aws:TagKeys": [POOL_TAG, "remuda:provision"]}
    return [
        request("ec2:CreateFleet", arn("ec2", "fleet/*")),
        request("ec2:CreateFleet", TEMPLATE, OURS),
        request("ec2:RunInstances", TEMPLATE, OURS, WITH_TEMPLATE),
        request("ec2:RunInstances", f"arn:aws:ec2:{REGION}::image/ami-1", OF_TEMPLATE),
        *(request("ec2:RunInstances", arn("ec2", kind), context) for kind, context in kinds.items()),
        *(
            request("ec2:CreateTags", arn("ec2", kind), tagged, {"ec2:CreateAction": action})
            for kind in (f"instance/{INSTANCE}", "volume/vol-1")
            for action in ("CreateFleet", "RunInstances")
        ),
        request(
            "iam:PassRole",
            f"arn:aws:iam::{ACCOUNT}:role/remuda-{POOL}-agent",
            {"iam:PassedToService": "ec2.amazonaws.com"},
        ),
    ]


def dynamodb(operation: str, who: str) -> list[IamRequest]:
    action = f"dynamodb:{PARTS.get(operation, operation)}"
    if who == "agent":
        own = (KEYS.control if operation == "GetItem" else KEYS.report)(INSTANCE)
        return [request(action, TABLE, {"aws:userid": USER_ID, "dynamodb:LeadingKeys": [str(own[items.PK]["S"])]})]
    indexes = [f"{TABLE}/index/{name}" for name in (items.LIVE_INDEX, items.PROVISION_INDEX)]
    return [
        request(action, each, {"dynamodb:LeadingKeys": [key]})
        for each in (TABLE, *(indexes if operation == "Query" else ()))
        for key in WRITTEN.get(operation, ("pool",))
    ]


def ec2(operation: str, who: str) -> list[IamRequest]:
    action = f"ec2:{operation}"
    if operation.startswith("Describe"):
        return [request(action, "*")]
    if operation in {"CreateFleet", "RunInstances"}:
        return launch()
    if operation == "CreateLaunchTemplate":
        created = {"ec2:CreateAction": operation, "aws:TagKeys": [POOL_TAG]}
        return [request(action, TEMPLATE, ASKED), request("ec2:CreateTags", TEMPLATE, ASKED, created)]
    if "LaunchTemplate" in operation:
        return [request(action, TEMPLATE, OURS)]
    if operation in {"CreateTags", "DeleteTags"}:
        return [request(action, MACHINE, OURS, {"aws:TagKeys": ["ghr:orphan"]})]
    source = {"ec2:SourceInstanceARN": MACHINE, "ec2:InstanceID": INSTANCE} if who == "agent" else {}
    return [request(action, MACHINE, OURS, source)]


def sqs(operation: str, _who: str) -> list[IamRequest]:
    # IAM knows no batches.
    return [request(f"sqs:{operation.removesuffix('Batch')}", arn("sqs", f"remuda-{POOL}-large"))]


def iam(operation: str, _who: str) -> list[IamRequest]:
    return [request(f"iam:{operation}", f"arn:aws:iam::{ACCOUNT}:instance-profile/remuda-{POOL}-agent")]


ASKS = {"dynamodb": dynamodb, "ec2": ec2, "iam": iam, "sqs": sqs}


@pytest.mark.parametrize(
    ("who", "service", "operation"),
    [(who, service, name) for who, calls in CALLS.items() for service in SERVICES for name in sorted(calls[service])],
)
def test_who_makes_a_call_may_make_it(who, service, operation):
    refused = [asked for asked in ASKS[service](operation, who) if not allows(MADE[who], asked)]
    assert not refused


@pytest.mark.parametrize("who", CALLS)
def test_who_does_not_make_a_call_may_not_make_it(who):
    asks = [
        (service, name, asked)
        for service in SERVICES
        for name in {name for calls in CALLS.values() for name in calls[service]} - CALLS[who][service]
        # As the control plane asks it.
        for asked in ASKS[service](name, "refresh")
        if asked.action == f"{service}:{name.removesuffix('Batch')}"
    ]
    assert asks
    assert not [(service, name) for service, name, asked in asks if allows(MADE[who], asked)]


def test_what_is_read_once_at_refresh():
    for who in ("refresh", "scale-down"):
        assert allows(MADE[who], request("secretsmanager:GetSecretValue", CREDENTIAL))


@pytest.mark.parametrize("who", ["refresh", "scale-down"])
def test_a_function_writes_its_own_log(who):
    other = {"refresh": "scale-down", "scale-down": "refresh"}[who]
    for action in ("logs:CreateLogStream", "logs:PutLogEvents"):
        for group, is_allowed in ((who, True), (other, False), ("agent", False)):
            stream = arn("logs", f"log-group:/remuda/{POOL}/{group}:log-stream:1")
            assert allows(MADE[f"{who}-logs"], request(action, stream)) is is_allowed


@pytest.mark.parametrize("parameter", ["/aws/service/ami-amazon-linux-latest/al2023", f"/remuda/{POOL}/ami"])
def test_images_are_resolved(parameter):
    account = "" if parameter.startswith("/aws") else ACCOUNT
    asked = request("ssm:GetParameters", f"arn:aws:ssm:{REGION}:{account}:parameter{parameter}")
    assert allows(MADE["workflow"], asked)


def test_the_list_of_calls_is_that_of_the_adapters():
    """Each names the operations that it calls: one that is new there belongs into the list, and into a policy."""
    (folder,) = remuda.adapters.aws.__path__
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted(Path(folder).rglob("*.py")))
    words = set(re.findall(r'"([A-Z][A-Za-z]+)"', text))
    session = botocore.session.get_session()
    for service in SERVICES:
        called = words & set(session.get_service_model(service).operation_names)
        assert called == {name for calls in CALLS.values() for name in calls[service]}
