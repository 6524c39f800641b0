"""Calls of the adapters: each policy allows those that its holder makes, and no others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import botocore.session
import pytest

import remuda.adapters.aws
from remuda.adapters.aws.dynamodb import items
from remuda.adapters.aws.dynamodb.schema import INDEXES
from remuda.deployment.policies import policies
from remuda.deployment.statements import fill_placeholders
from remuda.domain.scale_down.fleet import GHR_APPLICATION, GHR_APPLICATION_TAG, GHR_ENVIRONMENT_TAG
from remuda.ports.compute import POOL_TAG
from tests.support.iam import IamRequest, Value, allows

ACCOUNT, REGION, POOL = "123456789012", "eu-central-1", "ci"
INSTANCE = "i-0123456789abcdef0"
USER_ID = f"AROA{'A' * 17}:{INSTANCE}"
KEYS = items.ItemKeys(prefix=USER_ID.removesuffix(INSTANCE))
VOLUME_KEY = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/11111111-2222-3333-4444-555555555555"
IMAGE_KEY = f"arn:aws:kms:{REGION}:210987654321:key/22222222-2222-3333-4444-555555555555"
CREDENTIAL = f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:github-AbCdEf"
POLICIES = {
    policy.name: fill_placeholders(
        policy,
        pool=POOL,
        account=ACCOUNT,
        region=REGION,
        environment=POOL,
        credential=CREDENTIAL,
        volume_key=VOLUME_KEY,
        image_key=IMAGE_KEY,
    )
    for policy in policies()
}
SERVICES = ("dynamodb", "ec2", "iam", "sqs")

#: Calls that IAM authorizes by the permissions of their parts.
PARTS = {"TransactWriteItems": "UpdateItem"}
#: Partition keys that each call writes; refresh also writes the configuration.
WRITTEN = {
    "BatchWriteItem": (items.history_pk(INSTANCE),),
    "PutItem": (items.provisions_pk("4711"),),
    "TransactWriteItems": (f"control#{USER_ID}", f"report#{USER_ID}"),
    "UpdateItem": (f"control#{USER_ID}", f"report#{USER_ID}"),
}
#: Calls of each policy's holder, through the adapters.
CALLS = {
    # GetCallerIdentity of STS needs no permission.
    "agent": {
        "dynamodb": {"GetItem", "UpdateItem"},
        "ec2": {"TerminateInstances"},
        "iam": set[str](),
        "sqs": set[str](),
    },
    "provision": {
        "dynamodb": {"BatchGetItem", "BatchWriteItem", "GetItem", "PutItem", "Query", "UpdateItem"},
        # EC2 requires RunInstances for CreateFleet; the doctor makes a dry run of it.
        "ec2": {
            "CreateFleet",
            "DescribeInstances",
            "DescribeSubnets",
            "DescribeTags",
            "RunInstances",
            "TerminateInstances",
        },
        "iam": set[str](),
        "sqs": {
            *("ChangeMessageVisibilityBatch", "DeleteMessageBatch", "GetQueueAttributes", "GetQueueUrl"),
            *("ReceiveMessage", "SendMessageBatch"),
        },
    },
    "refresh": {
        "dynamodb": {
            *("BatchGetItem", "BatchWriteItem", "CreateTable", "DescribeTable", "DescribeTimeToLive", "GetItem"),
            *("PutItem", "Query", "Scan", "TransactWriteItems", "UpdateItem", "UpdateTimeToLive"),
        },
        "ec2": {
            *("CreateLaunchTemplate", "CreateLaunchTemplateVersion", "DescribeImages", "DescribeInstances"),
            *("DescribeLaunchTemplateVersions", "DescribeLaunchTemplates", "DescribeSecurityGroups"),
            *("DescribeSpotPriceHistory", "DescribeSubnets", "DescribeTags", "ModifyLaunchTemplate"),
            "TerminateInstances",
        },
        "iam": {"GetInstanceProfile"},
        "sqs": {
            *("ChangeMessageVisibilityBatch", "CreateQueue", "DeleteMessageBatch", "GetQueueAttributes"),
            *("GetQueueUrl", "ReceiveMessage", "SendMessageBatch", "SetQueueAttributes"),
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
INSTANCE_ARN = arn("ec2", f"instance/{INSTANCE}")
TEMPLATE = arn("ec2", "launch-template/lt-0123456789abcdef0")
#: Tags of the instances of the pool and of its launch template.
POOL_TAGS: dict[str, Value] = {
    f"aws:ResourceTag/{POOL_TAG}": POOL,
    f"aws:ResourceTag/{GHR_APPLICATION_TAG}": GHR_APPLICATION,
    f"aws:ResourceTag/{GHR_ENVIRONMENT_TAG}": POOL,
}
REQUESTED: dict[str, Value] = {f"aws:RequestTag/{POOL_TAG}": POOL}


def request(action: str, resource: str, *contexts: Mapping[str, Value]) -> IamRequest:
    return IamRequest(action=action, resource=resource, context={k: v for each in contexts for k, v in each.items()})


def launch() -> list[IamRequest]:
    """The requests that EC2 authorizes for one instant fleet of spot instances.

    Without `ec2:LaunchTemplate` and `ec2:IsLaunchTemplateResource`: EC2 may not set them for fleets.
    """
    kinds: dict[str, Mapping[str, Value]] = {
        "volume/*": REQUESTED,
        "network-interface/*": REQUESTED,
        "key-pair/people": {},
        "spot-instances-request/*": {},
    }
    # In a shared VPC, the ARNs of subnets and security groups have the account of its owner.
    network = [
        f"arn:aws:ec2:{REGION}:{owner}:{name}"
        for owner in (ACCOUNT, "210987654321")
        for name in ("subnet/subnet-1", "security-group/sg-1")
    ]
    image = f"arn:aws:ec2:{REGION}::image/ami-1"
    tagged = {**REQUESTED, "aws:TagKeys": [POOL_TAG, "remuda:provision"]}
    return [
        request("ec2:CreateFleet", arn("ec2", "fleet/*"), REQUESTED),
        # The instance type is not known before a fleet launches.
        request("ec2:CreateFleet", arn("ec2", "instance/*"), REQUESTED),
        request("ec2:RunInstances", arn("ec2", "instance/*"), REQUESTED, {"ec2:InstanceType": "m6i.large"}),
        *(
            part
            for action in ("ec2:CreateFleet", "ec2:RunInstances")
            for part in (
                request(action, TEMPLATE, POOL_TAGS),
                *(request(action, each) for each in (image, *network)),
                *(request(action, arn("ec2", kind), context) for kind, context in kinds.items()),
            )
        ),
        *(
            request("ec2:CreateTags", arn("ec2", kind), tagged, {"ec2:CreateAction": action})
            for kind in (f"instance/{INSTANCE}", "volume/vol-1", "network-interface/eni-1", "fleet/fleet-1")
            for action in ("CreateFleet", "RunInstances")
        ),
        *(
            request(
                "iam:PassRole",
                f"arn:aws:iam::{ACCOUNT}:role/remuda-{POOL}-agent",
                {"iam:PassedToService": f"ec2.amazonaws.com{china}"},
            )
            for china in ("", ".cn")
        ),
    ]


def dynamodb(operation: str, who: str) -> list[IamRequest]:
    action = f"dynamodb:{PARTS.get(operation, operation)}"
    if who == "agent":
        own = (KEYS.control if operation == "GetItem" else KEYS.report)(INSTANCE)
        named: dict[str, Value] = {
            "dynamodb:LeadingKeys": [str(own[items.PK]["S"])],
            "dynamodb:Attributes": items.REPORT_ATTRIBUTES,
        }
        return [request(action, TABLE, {"aws:userid": USER_ID}, named)]
    indexes = [f"{TABLE}/index/{name}" for name in INDEXES]
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
        return [request(action, TEMPLATE, REQUESTED), request("ec2:CreateTags", TEMPLATE, REQUESTED, created)]
    if "LaunchTemplate" in operation:
        return [request(action, TEMPLATE, POOL_TAGS)]
    if operation in {"CreateTags", "DeleteTags"}:
        return [request(action, INSTANCE_ARN, POOL_TAGS, {"aws:TagKeys": ["ghr:orphan"]})]
    source = {"ec2:SourceInstanceARN": INSTANCE_ARN, "ec2:InstanceID": INSTANCE} if who == "agent" else {}
    return [request(action, INSTANCE_ARN, POOL_TAGS, source)]


def sqs(operation: str, _who: str) -> list[IamRequest]:
    # IAM has no separate actions for batches.
    return [request(f"sqs:{operation.removesuffix('Batch')}", arn("sqs", f"remuda-{POOL}_large"))]


def iam(operation: str, _who: str) -> list[IamRequest]:
    return [request(f"iam:{operation}", f"arn:aws:iam::{ACCOUNT}:instance-profile/remuda-{POOL}-agent")]


REQUESTS_OF = {"dynamodb": dynamodb, "ec2": ec2, "iam": iam, "sqs": sqs}


@pytest.mark.parametrize(
    ("who", "service", "operation"),
    [(who, service, name) for who, calls in CALLS.items() for service in SERVICES for name in sorted(calls[service])],
)
def test_a_policy_allows_the_calls_of_its_holder(who, service, operation):
    denied = [each for each in REQUESTS_OF[service](operation, who) if not allows(POLICIES[who], each)]
    assert not denied


@pytest.mark.parametrize("who", CALLS)
def test_a_policy_denies_all_other_calls(who):
    requests = [
        (service, name, each)
        for service in SERVICES
        for name in {name for calls in CALLS.values() for name in calls[service]} - CALLS[who][service]
        # As the control plane makes them.
        for each in REQUESTS_OF[service](name, "refresh")
        if each.action == f"{service}:{name.removesuffix('Batch')}"
    ]
    assert requests
    assert not [(service, name) for service, name, each in requests if allows(POLICIES[who], each)]


def test_scheduled_commands_may_read_the_secret():
    for who in ("refresh", "scale-down"):
        assert allows(POLICIES[who], request("secretsmanager:GetSecretValue", CREDENTIAL))


@pytest.mark.parametrize("who", ["refresh", "scale-down"])
def test_a_function_may_write_only_its_own_log(who):
    other = {"refresh": "scale-down", "scale-down": "refresh"}[who]
    for action in ("logs:CreateLogStream", "logs:PutLogEvents"):
        for group, is_allowed in ((who, True), (other, False), ("agent", False)):
            stream = arn("logs", f"log-group:/remuda/{POOL}/{group}:log-stream:1")
            assert allows(POLICIES[f"{who}-function"], request(action, stream)) is is_allowed


@pytest.mark.parametrize("parameter", ["/aws/service/ami-amazon-linux-latest/al2023", f"/remuda/{POOL}/ami"])
@pytest.mark.parametrize("who", ["provision", "refresh"])
def test_provision_and_refresh_may_resolve_images(who, parameter):
    account = "" if parameter.startswith("/aws") else ACCOUNT
    lookup = request("ssm:GetParameters", f"arn:aws:ssm:{REGION}:{account}:parameter{parameter}")
    assert allows(POLICIES[who], lookup)


@pytest.mark.parametrize("who", ["refresh", "scale-down"])
def test_a_function_may_read_its_settings(who):
    lookup = request("ssm:GetParameters", arn("ssm", f"parameter/remuda/{POOL}/settings"))
    assert allows(POLICIES[f"{who}-function"], lookup)


@pytest.mark.parametrize(("who", "key"), [("volume-key", VOLUME_KEY), ("image-key", IMAGE_KEY)])
def test_a_launch_may_use_the_keys_of_volumes_and_images_through_ec2_only(who, key):
    """As AWS documents it: https://docs.aws.amazon.com/ebs/latest/userguide/ebs-encryption-requirements.html."""
    policy, via = POLICIES[who], {"kms:ViaService": f"ec2.{REGION}.amazonaws.com"}
    names = ("Decrypt", "DescribeKey", "GenerateDataKeyWithoutPlaintext", "ReEncryptFrom", "ReEncryptTo")
    for name in names:
        assert allows(policy, request(f"kms:{name}", key, via))
        assert not allows(policy, request(f"kms:{name}", key))
        assert not allows(policy, request(f"kms:{name}", f"{key}2", via))
    for is_for_resource in ("true", "false"):
        grant = request("kms:CreateGrant", key, via, {"kms:GrantIsForAWSResource": is_for_resource})
        assert allows(policy, grant) is (is_for_resource == "true")


def test_lambda_may_connect_a_function_to_shared_subnets_and_the_code_of_the_function_may_not():
    """The calls of AWSLambdaVPCAccessExecutionRole. Only those of the code have the ARN of the function."""
    shared = f"arn:aws:ec2:{REGION}:210987654321"
    interface = arn("ec2", "network-interface/eni-1")
    calls = [
        *(("CreateNetworkInterface", each) for each in (interface, f"{shared}:subnet/1", f"{shared}:security-group/1")),
        *((name, interface) for name in ("AssignPrivateIpAddresses", "UnassignPrivateIpAddresses")),
        ("DeleteNetworkInterface", interface),
    ]
    code: dict[str, Value] = {"lambda:SourceFunctionArn": arn("lambda", f"function:remuda-{POOL}-broker")}
    for name, resource in calls:
        assert allows(POLICIES["function-network"], request(f"ec2:{name}", resource))
        assert not allows(POLICIES["function-network"], request(f"ec2:{name}", resource, code))
    for name in ("DescribeNetworkInterfaces", "DescribeSubnets"):
        assert allows(POLICIES["function-network"], request(f"ec2:{name}", "*"))


def test_the_list_of_calls_matches_the_adapters():
    """A new operation in an adapter belongs into the list above and into a policy."""
    (folder,) = remuda.adapters.aws.__path__
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted(Path(folder).rglob("*.py")))
    words = set(re.findall(r'"([A-Z][A-Za-z]+)"', text))
    session = botocore.session.get_session()
    for service in SERVICES:
        called = words & set(session.get_service_model(service).operation_names)
        assert called == {name for calls in CALLS.values() for name in calls[service]}
