"""Requests that each policy denies, and the form of the policies.

test_least_privilege.py checks resources of other pools, test_policy_calls.py the calls that must be allowed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import build
from remuda.adapters.aws.dynamodb import items
from remuda.adapters.aws.dynamodb.schema import INDEXES
from remuda.adapters.aws.sqs import queue_name
from remuda.config.settings import _POOL_NAME
from remuda.deployment.policies import (
    ANY_RESOURCE,
    ATTRIBUTES,
    FURTHER_QUEUES,
    MAX_POLICY,
    ORPHAN_TAG,
    RETURN_VALUES,
    check_policies,
    launch_types,
    policies,
    provision,
)
from remuda.deployment.statements import fill_placeholders
from remuda.deployment.template import template
from remuda.domain.errors import UserError
from remuda.domain.resources import _CLASS_NAME, ResourceClass, parse_classes
from remuda.domain.scale_down.fleet import GHR_APPLICATION, GHR_APPLICATION_TAG, GHR_ENVIRONMENT_TAG
from remuda.ports.compute import POOL_TAG
from tests.support.iam import IamRequest, Value, allows

ACCOUNT, REGION = "123456789012", "eu-central-1"

no_deadline = settings(deadline=None)

POLICIES = {policy.name: policy for policy in policies()}
POOL_NAMES = st.from_regex(r"[a-z0-9-]{1,20}", fullmatch=True)
INSTANCE_IDS = st.from_regex(r"i-[0-9a-f]{17}", fullmatch=True)
ROLE_IDS = st.from_regex(r"AROA[A-Z0-9]{17}", fullmatch=True)
#: All actions on items, including those that no policy allows.
ITEM_ACTIONS = tuple(
    f"dynamodb:{name}"
    for name in (
        *("BatchGetItem", "BatchWriteItem", "ConditionCheckItem", "DeleteItem", "GetItem", "PartiQLDelete"),
        *("PartiQLInsert", "PartiQLSelect", "PartiQLUpdate", "PutItem", "Query", "Scan", "UpdateItem"),
    )
)
LEADING = "dynamodb:LeadingKeys"


@cache
def of(name: str, pool: str = "ci") -> dict[str, Any]:
    return fill_placeholders(
        POLICIES[name],
        pool=pool,
        account=ACCOUNT,
        region=REGION,
        environment=f"{pool}-env",
        credential=credential_of(pool),
    )


def credential_of(pool: str) -> str:
    return arn("secretsmanager", f"secret:remuda/{pool}/github-AbCdEf")


def arn(service: str, resource: str) -> str:
    return f"arn:aws:{service}:{REGION}:{ACCOUNT}:{resource}"


def may(policy: Mapping[str, Any], action: str, resource: str, context: Mapping[str, Value] | None = None) -> bool:
    return allows(policy, IamRequest(action=action, resource=resource, context=context or {}))


def table_of(pool: str) -> str:
    return arn("dynamodb", f"table/remuda-{pool}")


def partition(item: items.Item) -> str:
    return str(item[items.PK]["S"])


def caller(role: str, instance: str) -> dict[str, Value]:
    """The context of a request that this instance makes."""
    return {"aws:userid": f"{role}:{instance}", "ec2:SourceInstanceARN": arn("ec2", f"instance/{instance}")}


# An instance ----------------------------------------------------------------------------------------------------------


@no_deadline
@given(INSTANCE_IDS, ROLE_IDS)
def test_an_instance_may_only_read_its_records_and_write_its_report(instance, role):
    keys = items.ItemKeys(prefix=f"{role}:")
    control, report = partition(keys.control(instance)), partition(keys.report(instance))
    allowed = {
        (action, key)
        for action in ITEM_ACTIONS
        for key in (control, report, items.history_pk(instance), "pool")
        if may(of("agent"), action, table_of("ci"), {**caller(role, instance), LEADING: [key], ATTRIBUTES: ["pk"]})
    }
    assert allowed == {("dynamodb:GetItem", control), ("dynamodb:GetItem", report), ("dynamodb:UpdateItem", report)}


def test_an_instance_may_write_only_the_attributes_of_its_report():
    instance, role = "i-0123456789abcdef0", f"AROA{'A' * 17}"
    report = partition(items.ItemKeys(prefix=f"{role}:").report(instance))

    def may_write(*names: str) -> bool:
        context = {**caller(role, instance), LEADING: [report], ATTRIBUTES: names}
        return may(of("agent"), "dynamodb:UpdateItem", table_of("ci"), context)

    assert may_write(*items.REPORT_ATTRIBUTES)
    assert not may_write()
    indexes = {name for keys in INDEXES.values() for name in keys} - {items.SK, items.TROUBLED_PK}
    assert indexes == {"gsi1pk", "gsi1sk", "gsi2pk", "gsi2sk"}
    for name in (*indexes, "state", "owner"):
        assert not may_write(*items.REPORT_ATTRIBUTES, name)


def test_a_write_of_an_instance_may_not_return_attributes_that_it_does_not_name():
    instance, role = "i-0123456789abcdef0", f"AROA{'A' * 17}"
    report = partition(items.ItemKeys(prefix=f"{role}:").report(instance))

    def may_return(values: dict[str, Value]) -> bool:
        context = {**caller(role, instance), LEADING: [report], ATTRIBUTES: items.REPORT_ATTRIBUTES, **values}
        return may(of("agent"), "dynamodb:UpdateItem", table_of("ci"), context)

    values = ("NONE", "ALL_OLD", "ALL_NEW", "UPDATED_OLD", "UPDATED_NEW")
    assert {each for each in values if may_return({RETURN_VALUES: each})} == {"NONE", "UPDATED_OLD", "UPDATED_NEW"}
    assert may_return({})


@no_deadline
@given(INSTANCE_IDS, ROLE_IDS, st.sampled_from(ITEM_ACTIONS))
def test_a_request_without_keys_is_denied(instance, role, action):
    assert not may(of("agent"), action, table_of("ci"), {**caller(role, instance), LEADING: []})
    assert not may(of("agent"), action, table_of("ci"), caller(role, instance))


@no_deadline
@given(INSTANCE_IDS, INSTANCE_IDS, ROLE_IDS)
def test_an_instance_may_terminate_only_itself(mine, other, role):
    def may_terminate(target: str) -> bool:
        context = {**caller(role, mine), "ec2:InstanceID": target, f"aws:ResourceTag/{POOL_TAG}": "ci"}
        return may(of("agent"), "ec2:TerminateInstances", arn("ec2", f"instance/{target}"), context)

    assert may_terminate(mine)
    assert may_terminate(other) is (mine == other)


def test_credentials_used_outside_the_instance_may_not_terminate():
    context = {"ec2:InstanceID": "i-0123456789abcdef0"}
    assert not may(of("agent"), "ec2:TerminateInstances", arn("ec2", "instance/i-0123456789abcdef0"), context)


# Pools ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["provision", "refresh"])
@no_deadline
@given(POOL_NAMES, POOL_NAMES, INSTANCE_IDS)
def test_only_instances_with_the_tag_of_the_pool_may_be_terminated(name, pool, other, instance):
    assume(pool != other)

    def may_terminate(tags: Mapping[str, Value]) -> bool:
        return may(of(name, pool), "ec2:TerminateInstances", arn("ec2", f"instance/{instance}"), tags)

    assert may_terminate({f"aws:ResourceTag/{POOL_TAG}": pool})
    assert not may_terminate({f"aws:ResourceTag/{POOL_TAG}": other})
    assert not may_terminate({"aws:ResourceTag/Name": pool})
    # Tags of the request do not count.
    assert not may_terminate({f"aws:RequestTag/{POOL_TAG}": pool})


def fleet(environment: str) -> dict[str, Value]:
    """The tags of an instance that scale-down manages."""
    return {
        f"aws:ResourceTag/{GHR_APPLICATION_TAG}": GHR_APPLICATION,
        f"aws:ResourceTag/{GHR_ENVIRONMENT_TAG}": environment,
    }


@no_deadline
@given(POOL_NAMES, POOL_NAMES, INSTANCE_IDS)
def test_scale_down_may_terminate_and_mark_only_instances_of_its_environment(pool, other, instance):
    assume(pool != other)
    machine = arn("ec2", f"instance/{instance}")
    orphan: dict[str, Value] = {"aws:TagKeys": [ORPHAN_TAG]}
    own, foreign = fleet(f"{pool}-env"), fleet(f"{other}-env")
    halves = [dict([item]) for item in own.items()]
    policy = of("scale-down", pool)
    for action in ("ec2:TerminateInstances", "ec2:CreateTags", "ec2:DeleteTags"):
        assert may(policy, action, machine, {**own, **orphan})
        for tags in (foreign, {}, *halves, {f"aws:ResourceTag/{POOL_TAG}": pool}):
            assert not may(policy, action, machine, {**tags, **orphan})
    for action in ("ec2:CreateTags", "ec2:DeleteTags"):
        for keys in ([], [GHR_ENVIRONMENT_TAG], [ORPHAN_TAG, POOL_TAG]):
            assert not may(policy, action, machine, {**own, "aws:TagKeys": keys})
    # It may update records, but not create them.
    record: dict[str, Value] = {LEADING: [partition(items.ItemKeys(prefix="AROA:").control(instance))]}
    assert may(policy, "dynamodb:UpdateItem", table_of(pool), record)
    for action in ("dynamodb:PutItem", "dynamodb:DeleteItem", "dynamodb:Scan", "dynamodb:CreateTable"):
        assert not may(policy, action, table_of(pool), record)


def test_refresh_may_not_change_instances_without_the_tag_of_the_pool():
    machine = arn("ec2", "instance/i-0123456789abcdef0")
    tagged = {**fleet("ci-env"), "aws:TagKeys": [ORPHAN_TAG]}
    for action in ("ec2:TerminateInstances", "ec2:CreateTags", "ec2:DeleteTags"):
        assert not may(of("refresh"), action, machine, tagged)


def test_only_functions_and_the_listener_may_read_the_secret():
    read = "secretsmanager:GetSecretValue"
    allowed = {name for name in POLICIES if may(of(name), read, credential_of("ci"))}
    assert allowed == {"refresh", "scale-down", "broker-function", "listener"}
    for name in POLICIES:
        assert not may(of(name), read, credential_of("ci") + "x")
        assert not may(of(name), read, arn("secretsmanager", "secret:remuda/ci/other-AbCdEf"))


@no_deadline
@given(POOL_NAMES, POOL_NAMES)
def test_a_launch_requires_template_and_tag_of_the_pool(pool, other):
    assume(pool != other)
    policy = of("provision", pool)
    template = arn("ec2", "launch-template/lt-1")
    for action in ("ec2:CreateFleet", "ec2:RunInstances"):
        assert may(policy, action, template, {f"aws:ResourceTag/{POOL_TAG}": pool})
        assert not may(policy, action, template, {f"aws:ResourceTag/{POOL_TAG}": other})
        assert not may(policy, action, template)
        for kind in ("fleet", "instance", "network-interface", "volume"):
            made, large = arn("ec2", f"{kind}/*"), {"ec2:InstanceType": "m6i.large"}
            assert may(policy, action, made, {**large, f"aws:RequestTag/{POOL_TAG}": pool})
            assert not may(policy, action, made, large)
            assert not may(policy, action, made, {**large, f"aws:RequestTag/{POOL_TAG}": other})


def test_launches_use_no_condition_key_that_ec2_may_not_set_for_fleets():
    """Whether EC2 sets them when CreateFleet calls RunInstances is not documented, so a launch must not need them."""
    text = json.dumps(of("provision"))
    assert "ec2:LaunchTemplate" not in text
    assert "ec2:IsLaunchTemplateResource" not in text


# Instance types -------------------------------------------------------------------------------------------------------


def may_launch(policy: Mapping[str, Any], instance_type: str | None) -> bool:
    context = {f"aws:RequestTag/{POOL_TAG}": "ci"}
    named = {"ec2:InstanceType": instance_type} if instance_type else {}
    return may(policy, "ec2:RunInstances", arn("ec2", "instance/*"), {**context, **named})


def provision_for(**classes: Any) -> dict[str, Any]:
    return fill_placeholders(provision(parse_classes(classes)), pool="ci", account=ACCOUNT, region=REGION)


def test_a_provision_may_not_launch_larger_instances_than_the_classes():
    for allowed in ("t3.small", "m6i.large", "c7g.16xlarge", "g5.12xlarge"):
        assert may_launch(of("provision"), allowed)
    for denied in ("m6i.24xlarge", "p5.48xlarge", "u-24tb1.112xlarge", "c6i.metal", "m7i.metal-24xl", None):
        assert not may_launch(of("provision"), denied)


def test_a_provision_may_launch_only_the_types_of_the_classes():
    policy = provision_for(
        graviton={"cpu": 2, "mmem": 4096, "max-cpu": 8, "instance-types": "c7g.* m7g*"},
        gpu={"cpu": 4, "mmem": 8192, "gpu": 1, "instance-types": "g5.xlarge g6.*"},
        host={"cpu": 4, "mmem": 8192, "max-cpu": 128, "instance-types": "c6i.metal"},
    )
    for allowed in ("c7g.large", "c7g.2xlarge", "m7gd.xlarge", "g5.xlarge", "g6.16xlarge", "c6i.metal"):
        assert may_launch(policy, allowed), allowed
    for denied in ("c7g.4xlarge", "c6i.large", "g5.2xlarge", "g6.24xlarge", "m7g.metal", "c6i.32xlarge"):
        assert not may_launch(policy, denied), denied


def test_patterns_that_others_include_are_left_out():
    assert launch_types(parse_classes({"a": {"cpu": 1, "mmem": 1, "max-cpu": 4}})) == (
        *("*.nano", "*.micro", "*.small", "*.medium", "*.large", "*.xlarge"),
    )
    named = {"a": {"cpu": 1, "mmem": 1, "max-cpu": 4}, "b": {"cpu": 1, "mmem": 1, "instance-types": "m5.large m5.2x*"}}
    assert launch_types(parse_classes(named))[6:] == ("m5.2xlarge",)


@no_deadline
@given(POOL_NAMES)
def test_no_policy_allows_adding_the_tag_of_the_pool(pool):
    machine = arn("ec2", "instance/i-0123456789abcdef0")
    into = {f"aws:RequestTag/{POOL_TAG}": pool, "aws:TagKeys": [POOL_TAG]}
    inside = {f"aws:ResourceTag/{POOL_TAG}": pool}
    for name in POLICIES:
        policy = of(name, pool)
        assert not may(policy, "ec2:CreateTags", machine, into)
        assert not may(policy, "ec2:CreateTags", machine, {**into, **fleet(f"{pool}-env")})
        assert not may(policy, "ec2:CreateTags", machine, {**into, "ec2:CreateAction": "CreateVolume"})
        for action in ("ec2:CreateTags", "ec2:DeleteTags"):
            assert not may(policy, action, machine, {**inside, "aws:TagKeys": [POOL_TAG]})
            assert not may(policy, action, machine, {**inside, "aws:TagKeys": [ORPHAN_TAG, POOL_TAG]})
            assert not may(policy, action, machine, inside)
            assert not may(policy, action, machine, {"aws:TagKeys": [ORPHAN_TAG]})


def test_only_a_provision_may_pass_the_role_of_the_agent_and_only_to_ec2():
    role = f"arn:aws:iam::{ACCOUNT}:role/remuda-ci-agent"
    to_ec2, to_lambda = ({"iam:PassedToService": f"{name}.amazonaws.com"} for name in ("ec2", "lambda"))
    assert may(of("provision"), "iam:PassRole", role, to_ec2)
    assert not may(of("provision"), "iam:PassRole", role, to_lambda)
    assert not may(of("provision"), "iam:PassRole", role)
    assert not may(of("provision"), "iam:PassRole", f"arn:aws:iam::{ACCOUNT}:role/admin", to_ec2)
    assert not may(of("refresh"), "iam:PassRole", role, to_ec2)


def test_a_workflow_may_only_invoke_the_broker_of_its_pool():
    (statement,) = of("workflow")["Statement"]
    assert (statement["Action"], statement["Resource"]) == (
        ["lambda:InvokeFunction"],
        [arn("lambda", "function:remuda-ci-broker")],
    )
    for other in ("remuda-ci-refresh", "remuda-ci-scale-down", "remuda-ci-2-broker", "remuda-ci-broker:1"):
        assert not may(of("workflow"), "lambda:InvokeFunction", arn("lambda", f"function:{other}"))
    for action in ("lambda:UpdateFunctionCode", "lambda:GetFunction", "lambda:InvokeFunctionUrl"):
        assert not may(of("workflow"), action, arn("lambda", "function:remuda-ci-broker"))


# Form -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POLICIES)
def test_no_wildcards_except_resources_of_calls_without_resources(name):
    for statement in POLICIES[name].statements:
        assert not any("*" in action or "?" in action for action in statement.actions)
        if ANY_RESOURCE in statement.resources and statement.actions != ("cloudwatch:PutMetricData",):
            assert all(action.startswith("ec2:Describe") for action in statement.actions)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_fits_the_limit_of_iam(name):
    longest = fill_placeholders(
        POLICIES[name], pool="p" * 20, account=ACCOUNT, region="ap-southeast-1", partition="aws-us-gov"
    )
    assert len(json.dumps(longest, separators=(",", ":"))) <= MAX_POLICY


def many_classes(count: int, **fields: Any) -> tuple[ResourceClass, ...]:
    (made,) = parse_classes({"one": {"cpu": 2, "mmem": 4096, **fields}})
    return tuple(replace(made, name=f"class-number-{number:02}") for number in range(count))


def test_sixty_classes_fit_the_limit_of_iam():
    check_policies(many_classes(60), pool="p" * 20, role_path="/ci/runners/")


@given(
    pools=st.tuples(*[st.from_regex(_POOL_NAME, fullmatch=True)] * 2),
    names=st.tuples(*[st.from_regex(_CLASS_NAME, fullmatch=True)] * 2),
)
@example(pools=("ci", "ci-prod"), names=("prod-large", "large"))
@example(pools=("ci", "ci-a"), names=("a_b", "b"))
def test_each_queue_belongs_to_one_class_of_one_pool(pools: tuple[str, str], names: tuple[str, str]) -> None:
    first, second = zip(pools, names, strict=True)
    queues = [queue_name(f"remuda-{pool}", name) for pool, name in (first, second)]
    assert (queues[0] == queues[1]) == (first == second)


def test_each_class_has_its_queue_and_no_pool_has_that_of_another():
    classes = many_classes(60)
    made = {
        policy.name: fill_placeholders(policy, pool="ci", account=ACCOUNT, region=REGION)
        for policy in policies(classes)
    }
    for command, further in FURTHER_QUEUES.items():
        for each in classes:
            own, other = (arn("sqs", f"remuda-{pool}_{each.name}") for pool in ("ci", "ci-nightly"))
            assert sum(may(made[name], "sqs:ReceiveMessage", own) for name in (command, further)) == 1
            assert not any(may(made[name], "sqs:ReceiveMessage", other) for name in (command, further))
            assert sum(may(made[name], "sqs:CreateQueue", own) for name in (command, further)) == (command == "refresh")
    resources = template(classes)["Resources"]
    for role in ("BrokerFunctionRole", "ListenerRole", "RefreshFunctionRole", "RefreshRole", "WorkflowRole"):
        text = json.dumps(resources[role]["Properties"]["ManagedPolicyArns"])
        assert "QueuesPolicy" in text
        assert text.count("ProvisionQueuesPolicy") == text.count('"ProvisionPolicy"')
        assert text.count("RefreshQueuesPolicy") == text.count('"RefreshPolicy"')
    # With fewer classes, nothing changes for roles of one's own.
    assert {policy.name for policy in policies(many_classes(10))} == set(POLICIES)


def test_classes_that_do_not_fit_are_refused_with_the_size():
    classes = [
        many_classes(1, **{"instance-types": " ".join(f"{family}{number}i.{number}xlarge" for number in range(1, 60))})
        for family in "mc"
    ]
    with pytest.raises(UserError) as caught:
        check_policies([each for made in classes for each in made], pool="p" * 20)
    assert re.fullmatch(
        r"resource-class-config: the policy provision for 2 classes has 6,\d{3} characters, and IAM accepts 6,144",
        caught.value.message,
    )
    assert caught.value.field == "resource-class-config"


@pytest.mark.parametrize("name", POLICIES)
def test_statement_ids_are_unique_and_alphanumeric(name):
    sids = [statement.sid for statement in POLICIES[name].statements]
    assert len(set(sids)) == len(sids)
    assert all(sid.isalnum() and sid.isascii() for sid in sids)


def test_generated_files_are_current():
    assert build.main(["--check"]) == 0


def test_check_names_files_that_are_not_current(capsys):
    assert build.main(["--check", "--classes", '{"small": {"cpu": 1, "mmem": 512}}']) == 1
    assert "provision.json" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["small,gpu", "{}", '{"small": {"cpu": 0}}', "@/nowhere"])
def test_invalid_classes_are_rejected(capsys, text):
    with pytest.raises(SystemExit):
        build.main(["--check", "--classes", text])
    assert "argument --classes: " in capsys.readouterr().err
