"""The policy of the person who deploys: it is enough for a deployment, and not for what other pools have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from remuda.deployment.deployer import ACTIONS, OWN_ACTIONS, deployer
from remuda.deployment.statements import fill_placeholders
from remuda.ports.compute import POOL_TAG
from tests.support.iam import IamRequest, Value, allows

ACCOUNT, REGION = "123456789012", "eu-central-1"
#: Maximum length of a managed policy, without white space.
MAX_POLICY_CHARS = 6_144
POLICY = fill_placeholders(deployer(), pool="ci", account=ACCOUNT, region=REGION)


def arn(service: str, resource: str, *, region: str = REGION) -> str:
    return f"arn:aws:{service}:{region}:{ACCOUNT}:{resource}"


def may(action: str, resource: str, **context: Value) -> bool:
    known: dict[str, Value] = {"iam:PassedToService": "ec2.amazonaws.com", "iam:AWSServiceName": "spot.amazonaws.com"}
    known["iam:PolicyARN"] = arn("iam", "policy/remuda-ci-agent", region="")
    return allows(POLICY, IamRequest(action=action, resource=resource, context={**known, **context}))


def resources(pool: str) -> dict[str, tuple[str, ...]]:
    """Resources of a pool by service."""
    bucket = f"arn:aws:s3:::remuda-{pool}-{ACCOUNT}-{REGION}"
    return {
        "autoscaling": (arn("autoscaling", f"autoScalingGroup:1:autoScalingGroupName/remuda-{pool}-listener"),),
        "cloudformation": (arn("cloudformation", f"stack/remuda-{pool}/1"),),
        "cloudwatch": (arn("cloudwatch", f"alarm:remuda-{pool}-refresh"),),
        "dynamodb": (arn("dynamodb", f"table/remuda-{pool}"),),
        "events": (arn("events", f"rule/remuda-{pool}-refresh"),),
        "iam": tuple(
            arn("iam", f"{kind}/remuda-{pool}-agent", region="") for kind in ("role", "policy", "instance-profile")
        ),
        "lambda": (arn("lambda", f"function:remuda-{pool}-broker"),),
        "logs": (arn("logs", f"log-group:/remuda/{pool}/refresh"),),
        "s3": (bucket, f"{bucket}/agent/1.tar.gz"),
        "secretsmanager": (arn("secretsmanager", f"secret:remuda/{pool}/github-AbCdEf"),),
        "sqs": (arn("sqs", f"remuda-{pool}_large"),),
        "ssm": (arn("ssm", f"parameter/remuda/{pool}/settings"),),
    }


WANTED = sorted({*OWN_ACTIONS, *(action for each in ACTIONS.values() for action in each)})
#: Actions whose resources have no name of a pool.
SHARED = {
    "ec2:DescribeInstanceTypes": "*",
    "lambda:GetAccountSettings": "*",
    "ec2:RunInstances": arn("ec2", "instance/*"),
    "iam:CreateOpenIDConnectProvider": arn("iam", "oidc-provider/token.actions.githubusercontent.com", region=""),
    "iam:CreateServiceLinkedRole": arn("iam", "role/aws-service-role/spot.amazonaws.com/a", region=""),
}


@pytest.mark.parametrize("action", WANTED)
def test_everything_that_a_deployment_needs_is_allowed(action: str) -> None:
    service = action.partition(":")[0]
    if action in SHARED:
        assert may(action, SHARED[action])
    elif service == "ec2":
        assert any(may(action, arn("ec2", f"{kind}/1")) for kind in ("launch-template", "security-group"))
    else:
        assert any(may(action, each) for each in resources("ci")[service])


@pytest.mark.parametrize("action", [each for each in WANTED if each not in SHARED and not each.startswith("ec2:")])
def test_nothing_of_another_pool_or_program_can_be_changed(action: str) -> None:
    service = action.partition(":")[0]
    for pool in ("other", "c", "ci2"):
        assert not any(may(action, each) for each in resources(pool)[service])
    assert not may(action, arn(service, "production"))


def test_only_instances_of_the_pool_can_be_terminated() -> None:
    name = arn("ec2", "instance/i-0123456789abcdef0")
    tag = f"aws:ResourceTag/{POOL_TAG}"
    assert may("ec2:TerminateInstances", name, **{tag: "ci"})
    assert not may("ec2:TerminateInstances", name, **{tag: "other"})
    assert not may("ec2:TerminateInstances", name)


def test_a_vpc_of_another_account_can_be_used() -> None:
    """The ARNs of what an account shares have its id."""
    shared = f"arn:aws:ec2:{REGION}:210987654321"
    for kind in ("subnet", "security-group"):
        assert may("ec2:RunInstances", f"{shared}:{kind}/1")
    assert may("ec2:CreateSecurityGroup", f"{shared}:vpc/vpc-1")
    assert not may("ec2:DeleteSecurityGroup", f"{shared}:security-group/1", **{f"aws:ResourceTag/{POOL_TAG}": "ci"})


def test_roles_are_passed_to_instances_and_functions_only() -> None:
    role = arn("iam", "role/remuda-ci-agent", region="")
    passed: dict[str, Any] = {"iam:PassedToService": "sagemaker.amazonaws.com"}
    assert may("iam:PassRole", role)
    assert may("iam:PassRole", role, **{"iam:PassedToService": "ec2.amazonaws.com.cn"})
    assert not may("iam:PassRole", role, **passed)


def test_only_policies_of_the_pool_are_attached_and_no_boundary_is_removed() -> None:
    role = arn("iam", "role/remuda-ci-agent", region="")
    administrator: dict[str, Any] = {"iam:PolicyARN": "arn:aws:iam::aws:policy/AdministratorAccess"}
    assert may("iam:AttachRolePolicy", role)
    assert not may("iam:AttachRolePolicy", role, **administrator)
    assert not may("iam:DeleteRolePermissionsBoundary", role)


@pytest.mark.parametrize("operation", ["DescribeStacks", "ListStacks"])
def test_stacks_can_be_listed(operation: str) -> None:
    # Without a name of a stack, these calls have no resource.
    assert may(f"cloudformation:{operation}", "*")


def test_the_policy_fits_a_managed_policy() -> None:
    assert len(json.dumps(POLICY, separators=(",", ":"))) <= MAX_POLICY_CHARS
