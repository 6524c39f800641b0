"""Isolation of the roles of the template from other instances, pools, regions and accounts.

The same requests are allowed on a role's own resources. Removing any condition from a policy makes a test fail.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from remuda.adapters.aws.dynamodb import items
from remuda.adapters.aws.dynamodb.schema import INDEXES
from remuda.aws_lambda.runtime import pascal_case
from remuda.deployment.policies import ATTRIBUTES, CLASSES, FUNCTIONS, LEADING_KEYS, ORPHAN_TAG, RETURN_VALUES
from remuda.deployment.stack import STACK_TAG
from remuda.deployment.template import GITHUB, template
from remuda.domain.scale_down.fleet import GHR_APPLICATION, GHR_APPLICATION_TAG, GHR_ENVIRONMENT_TAG
from remuda.ports.compute import POOL_TAG
from tests.support.iam import IamRequest, Value, allows

TEMPLATE = template()["Resources"]
ROLES = tuple(name for name, each in TEMPLATE.items() if each["Type"] == "AWS::IAM::Role")
CONTROL_PLANE = tuple(name for name in ROLES if name != "AgentRole")
REPOSITORY, BRANCH = "acme/app", "main"
POOL, REQUESTED = f"aws:ResourceTag/{POOL_TAG}", f"aws:RequestTag/{POOL_TAG}"
#: Actions that create resources; `misuses` covers their parts.
CREATE_ACTIONS = frozenset({"ec2:CreateFleet", "ec2:CreateLaunchTemplate", "ec2:RunInstances"})
#: IAM can restrict it to a namespace, but not to the dimension of a pool.
METRICS = "cloudwatch:PutMetricData"

#: Each example makes hundreds of requests.
thorough = settings(deadline=None, max_examples=10)


# Places ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Place:
    """An instance, and the pool, region and account that it is in."""

    account: str = "111111111111"
    region: str = "eu-central-1"
    pool: str = "ci"
    instance: str = "i-00000000000000001"
    role_id: str = f"AROA{'A' * 17}"

    def arn(self, service: str, resource: str) -> str:
        return f"arn:aws:{service}:{'' if service == 'iam' else self.region}:{self.account}:{resource}"

    @property
    def table(self) -> str:
        return self.arn("dynamodb", f"table/remuda-{self.pool}")

    @property
    def machine(self) -> str:
        return self.arn("ec2", f"instance/{self.instance}")

    @property
    def template(self) -> str:
        return self.arn("ec2", f"launch-template/lt-{self.pool}")

    @property
    def secret(self) -> str:
        return self.arn("secretsmanager", f"secret:remuda/{self.pool}/github-AbCdEf")

    @property
    def stack(self) -> str:
        return self.arn("cloudformation", f"stack/remuda-{self.pool}/0a1b")

    @property
    def bundle(self) -> str:
        """The agent in the bucket of the pool, which all its instances download."""
        return f"arn:aws:s3:::remuda-{self.pool}-{self.account}-{self.region}/agent/bundle.tar.gz"

    @property
    def volume_key(self) -> str:
        return self.arn("kms", f"key/{self.pool}")

    @property
    def image_key(self) -> str:
        return self.arn("kms", f"key/{self.pool}-images")

    @property
    def tags(self) -> dict[str, Value]:
        """Tags of its instances and its launch template."""
        return {
            POOL: self.pool,
            f"aws:ResourceTag/{GHR_APPLICATION_TAG}": GHR_APPLICATION,
            f"aws:ResourceTag/{GHR_ENVIRONMENT_TAG}": self.pool,
        }

    @property
    def own_keys(self) -> list[str]:
        keys = items.ItemKeys(prefix=f"{self.role_id}:")
        return [str(kind(self.instance)[items.PK]["S"]) for kind in (keys.control, keys.report)]

    @property
    def keys(self) -> list[str]:
        """Partition keys of the table and of its indexes, of every kind."""
        return [
            *self.own_keys,
            items.history_pk(self.instance),
            items.provisions_pk("4711"),
            str(items.CONFIG[items.PK]["S"]),
            items.shard_of(self.instance),
            items.troubled_of(self.instance),
            items.provision_partition("p-1"),
            items.DEMAND,
            items.LEASE,
            f"{items.JOB_PREFIX}4711",
            items.jobs_of_run_partition("4711"),
        ]

    @property
    def caller(self) -> dict[str, Value]:
        """Context of a request by this instance, including request tags that favour the caller."""
        return {
            "aws:userid": f"{self.role_id}:{self.instance}",
            "ec2:SourceInstanceARN": self.machine,
            # Of the calls of a function's code, in difference to those of Lambda with the same role.
            "lambda:SourceFunctionArn": self.arn("lambda", f"function:remuda-{self.pool}-broker"),
            REQUESTED: self.pool,
            "aws:TagKeys": [ORPHAN_TAG],
            "iam:PassedToService": "ec2.amazonaws.com",
            "ec2:InstanceType": "m6i.large",
            ATTRIBUTES: items.REPORT_ATTRIBUTES,
        }


POOLS = st.from_regex(r"[a-z0-9-]{1,20}", fullmatch=True)
PLACES = st.builds(
    Place,
    account=st.from_regex(r"[0-9]{12}", fullmatch=True),
    region=st.sampled_from(["eu-central-1", "eu-central-2", "us-east-1"]),
    pool=POOLS,
    instance=st.from_regex(r"i-[0-9a-f]{17}", fullmatch=True),
    role_id=st.from_regex(r"AROA[A-Z0-9]{17}", fullmatch=True),
)


@st.composite
def pairs(draw: st.DrawFn, *differ: str) -> tuple[Place, Place]:
    """Two places that differ in at least one of these.

    The name of one pool may be a prefix of the other, which a wildcard in a policy would let through.
    """
    own, other = draw(PLACES), draw(PLACES)
    by = draw(st.sampled_from(differ))
    if draw(st.booleans()):
        other = replace(own, **{by: getattr(other, by)})
    if by == "pool" and draw(st.booleans()):
        other = replace(other, pool=f"{own.pool}-{other.pool}"[:20])
    assume(getattr(own, by) != getattr(other, by))
    return own, other


# Roles of the template ------------------------------------------------------------------------------------------------


def resolved(value: Any, parameters: Mapping[str, Any]) -> Any:
    """The value after CloudFormation has resolved its functions."""
    if isinstance(value, list):
        return [resolved(each, parameters) for each in value]
    if not isinstance(value, Mapping):
        return value
    match list(value.items()):
        case [("Ref", name)]:
            return parameters[name]
        case [("Fn::Sub", text)]:
            return re.sub(r"\$\{(!?)([^}]+)\}", lambda m: f"${{{m[2]}}}" if m[1] else parameters[m[2]], text)
        case [("Fn::If", [condition, there, missing])]:
            given_by = {
                "HasSecret": "GithubSecretArn",
                "HasEnvironment": "GithubEnvironment",
                "HasEnvironments": "Environments",
            }
            return resolved(there if any(parameters[given_by[condition]]) else missing, parameters)
        case [("Fn::Join", [separator, parts])]:
            return separator.join(resolved(parts, parameters))
        case [("Fn::Split", [separator, text])]:
            return resolved(text, parameters).split(separator)
        case [(name, _)] if name.startswith("Fn::"):
            raise NotImplementedError(name)
    return {name: resolved(each, parameters) for name, each in value.items()}


def parameters_of(place: Place) -> dict[str, Any]:
    return {
        "AWS::Partition": "aws",
        "AWS::Region": place.region,
        "AWS::AccountId": place.account,
        "AWS::StackId": place.stack,
        "Pool": place.pool,
        "RolePath": "/",
        "PermissionsBoundary": "",
        "GithubSecretArn": place.secret,
        "GithubEnvironment": "",
        "Repositories": [REPOSITORY],
        "Environments": [""],
        "RefreshRepository": REPOSITORY,
        "VolumeKmsKey": place.volume_key,
        "ImageKmsKey": place.image_key,
        "Branch": BRANCH,
        "OidcProviderArn": place.arn("iam", f"oidc-provider/{GITHUB}"),
    }


def policy_name(reference: Mapping[str, Any]) -> str:
    """The policy of a reference, also if the reference has a condition."""
    while "Fn::If" in reference:
        _, reference, _ = reference["Fn::If"]
    return str(reference["Ref"])


@cache
def policies_of(role: str, place: Place) -> list[dict[str, Any]]:
    """The policies of a role in the stack of this place."""
    names = [policy_name(each) for each in TEMPLATE[role]["Properties"]["ManagedPolicyArns"]]
    return [
        resolved(TEMPLATE[name]["Properties"]["PolicyDocument"], parameters_of(place))
        for name in names
        if name != "AWS::NoValue"
    ]


def granted(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """All actions that a role may perform on some resource."""
    return sorted({action for each in documents for statement in each["Statement"] for action in statement["Action"]})


def test_roles_have_nothing_but_the_policies_of_the_template():
    functions = {"RefreshFunctionRole", "ScaleDownFunctionRole", "BrokerFunctionRole"}
    assert {"AgentRole", "WorkflowRole", "RefreshRole", "ListenerRole", *functions} == set(ROLES)
    for role in ROLES:
        properties = TEMPLATE[role]["Properties"]
        assert "Policies" not in properties
        for each in properties["ManagedPolicyArns"]:
            name = policy_name(each)
            assert name == "AWS::NoValue" or TEMPLATE[name]["Type"] == "AWS::IAM::ManagedPolicy"
    # No resource policy (queue, table, secret) grants anything.
    for resource in TEMPLATE.values():
        assert resource["Type"] not in {"AWS::SQS::QueuePolicy", "AWS::IAM::Policy", "AWS::IAM::User"}
        assert "ResourcePolicy" not in resource["Properties"]


# Requests -------------------------------------------------------------------------------------------------------------


def at(  # noqa: C901, PLR0912 - one branch per service
    action: str, of: Place, by: Place
) -> Iterator[tuple[str, Mapping[str, Value]]]:
    """Resources of a place that an action applies to, each with its context."""
    service, _, name = action.partition(":")
    if service == "dynamodb":
        yield of.table, {}
        yield from ((of.table, {LEADING_KEYS: [key]}) for key in of.keys)
        # A foreign key among own keys, and own keys in a foreign table.
        yield from ((of.table, {LEADING_KEYS: [*by.own_keys, key]}) for key in of.own_keys if key not in by.own_keys)
        yield from ((of.table, {LEADING_KEYS: [key]}) for key in by.own_keys if of.table != by.table)
        for index in INDEXES:
            for known in ({}, {LEADING_KEYS: [of.own_keys[0]]}, {LEADING_KEYS: [items.shard_of(of.instance)]}):
                yield f"{of.table}/index/{index}", known
    elif action in {"ec2:TerminateInstances", "ec2:CreateTags", "ec2:DeleteTags"}:
        yield of.machine, {**of.tags, "ec2:InstanceID": of.instance}
        if action != "ec2:TerminateInstances":
            yield of.template, of.tags
    elif action in {"ec2:CreateLaunchTemplateVersion", "ec2:ModifyLaunchTemplate"}:
        yield of.template, of.tags
    elif service == "iam":
        yield of.arn("iam", f"role/remuda-{of.pool}-agent"), {}
        yield of.arn("iam", f"instance-profile/remuda-{of.pool}-agent"), {}
    elif service == "sqs":
        yield from ((of.arn("sqs", f"remuda-{of.pool}_{each}"), {}) for each in CLASSES)
    elif service == "secretsmanager":
        yield of.secret, {}
    elif service == "lambda":
        yield of.arn("lambda", f"function:remuda-{of.pool}-broker"), {}
    elif service == "autoscaling":
        yield of.arn("autoscaling", f"autoScalingGroup:0a1b:autoScalingGroupName/remuda-{of.pool}-listener"), {}
    elif service == "cloudformation":
        yield of.stack, {}
    elif service == "logs":
        yield from ((of.arn("logs", f"log-group:/remuda/{of.pool}/{who}:log-stream:1"), {}) for who in FUNCTIONS)
    elif service == "ssm":
        yield of.arn("ssm", f"parameter/remuda/{of.pool}/ami"), {}
        yield of.arn("ssm", f"parameter/remuda/{of.pool}/settings"), {}
    elif service == "s3":
        yield of.bundle, {}
    elif service == "kms":
        via: dict[str, Value] = {"kms:ViaService": f"ec2.{of.region}.amazonaws.com"}
        yield from ((key, {**via, "kms:GrantIsForAWSResource": "true"}) for key in (of.volume_key, of.image_key))
    elif name.endswith(("NetworkInterface", "PrivateIpAddresses")):
        yield from ((of.arn("ec2", f"{kind}/1"), {}) for kind in ("network-interface", "security-group", "subnet"))
    else:
        # Describe calls, which have no resources, and calls that create resources.
        assert action in {*CREATE_ACTIONS, METRICS} or name.startswith("Describe"), f"nothing to try {action} on"


def requests(actions: Sequence[str], *, of: Place, by: Place) -> Iterator[IamRequest]:
    for action in actions:
        for resource, known in at(action, of, by):
            # The context of the target overrides that of the caller.
            yield IamRequest(action=action, resource=resource, context={**by.caller, **known})


def allowed_requests(documents: Sequence[Mapping[str, Any]], requests: Iterator[IamRequest]) -> list[IamRequest]:
    return [each for each in requests if allows(documents, each)]


# Instances ------------------------------------------------------------------------------------------------------------


@thorough
@given(pairs("instance", "pool", "region", "account"))
@example((Place(), Place(instance="i-00000000000000002")))
def test_an_instance_cannot_reach_another(pair):
    own, other = pair
    if own.machine == other.machine:
        # Ids are unique within a region.
        other = replace(other, instance=f"i-{'f' * 17}")
        assume(own.machine != other.machine)
    documents = policies_of("AgentRole", own)
    # Including the actions of all other roles.
    actions = sorted({action for role in ROLES for action in granted(policies_of(role, own))} - CREATE_ACTIONS)
    found = allowed_requests(documents, requests(actions, of=other, by=own))
    assert not [each for each in found if each.resource != own.bundle]


@thorough
@given(pairs("role_id"))
def test_an_instance_cannot_reach_records_under_another_role_id(pair):
    own, other = pair
    other = replace(own, role_id=other.role_id)
    assert not allowed_requests(
        policies_of("AgentRole", own), requests(["dynamodb:GetItem", "dynamodb:UpdateItem"], of=other, by=own)
    )


@thorough
@given(PLACES)
def test_an_instance_can_use_its_records_and_its_termination(place):
    actions = sorted({action for role in ROLES for action in granted(policies_of(role, place))} - CREATE_ACTIONS)
    control, report = place.own_keys
    found = {
        (each.action, each.resource, *each.values(LEADING_KEYS))
        for each in allowed_requests(policies_of("AgentRole", place), requests(actions, of=place, by=place))
    }
    assert found == {
        ("dynamodb:GetItem", place.table, control),
        ("dynamodb:GetItem", place.table, report),
        ("dynamodb:UpdateItem", place.table, report),
        ("ec2:TerminateInstances", place.machine),
        ("s3:GetObject", place.bundle),
    }


# Pools ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", CONTROL_PLANE)
@thorough
@given(pairs("pool", "region", "account"))
@example((Place(), Place(pool="ci-2")))
def test_the_control_plane_cannot_reach_another_pool(role, pair):
    own, other = pair
    documents = policies_of(role, own)
    attempts = requests(granted(documents), of=other, by=own)
    # Resources of IAM have no region.
    same_name = (own.account, own.pool) == (other.account, other.pool)
    found = allowed_requests(documents, attempts)
    assert not [each for each in found if not (same_name and each.resource.startswith("arn:aws:iam:"))]


@pytest.mark.parametrize("role", CONTROL_PLANE)
@thorough
@given(PLACES)
def test_a_role_can_use_every_granted_action_in_its_pool(role, place):
    """Proves that the requests above cover every granted action."""
    documents = policies_of(role, place)
    allowed = {each.action for each in allowed_requests(documents, requests(granted(documents), of=place, by=place))}
    untried = {*CREATE_ACTIONS, METRICS}
    tried = {each for each in granted(documents) if each not in untried and not each.startswith("ec2:Describe")}
    # These may tag only at creation.
    at_creation = {"ec2:CreateTags"} if role in {"BrokerFunctionRole", "ListenerRole", "RefreshFunctionRole"} else set()
    # These may be used by Lambda, and not by the code.
    by_lambda = {each for each in tried if each.endswith(("NetworkInterface", "PrivateIpAddresses"))}
    assert bool(by_lambda) is role.endswith("FunctionRole")
    assert allowed == tried - at_creation - by_lambda


@pytest.mark.parametrize("role", CONTROL_PLANE)
@thorough
@given(PLACES, st.from_regex(r"[a-z0-9]{1,8}", fullmatch=True))
def test_a_role_cannot_reach_unrelated_resources(role, place, word):
    """Resources in the same account with similar names, and without the tags of the pool."""
    assume(word not in CLASSES)
    documents = policies_of(role, place)
    tagged: list[Mapping[str, Value]] = [{}, {POOL: f"{place.pool}{word}"}]
    tagged += [{name: value} for name, value in place.tags.items() if name != POOL]
    unrelated: list[tuple[str, Mapping[str, Value]]] = [
        (f"{place.table}-{word}", {}),
        (f"{place.table}/index/{word}", {}),
        (f"{place.table}/stream/{word}", {}),
        (f"{place.table}/backup/{word}", {}),
        (place.arn("sqs", f"remuda-{place.pool}_{word}"), {}),
        (place.arn("sqs", f"remuda-{place.pool}_{CLASSES[0]}-{word}"), {}),
        (place.arn("iam", f"role/{word}"), {}),
        (place.arn("iam", f"role/remuda-{place.pool}-refresh"), {}),
        (place.arn("iam", f"role/remuda-{place.pool}-agent-{word}"), {}),
        (place.arn("secretsmanager", f"secret:{word}-AbCdEf"), {}),
        (f"{place.secret}{word}", {}),
        (place.arn("logs", f"log-group:/aws/lambda/{word}:log-stream:1"), {}),
        (place.arn("lambda", f"function:{word}"), {}),
        (place.arn("lambda", f"function:remuda-{place.pool}-refresh"), {}),
        (place.arn("lambda", f"function:remuda-{place.pool}-broker-{word}"), {}),
        (place.arn("ssm", f"parameter/{word}"), {}),
        (place.arn("ssm", f"parameter/remuda/{place.pool}-{word}/ami"), {}),
        *((place.machine, tags) for tags in tagged),
        (place.arn("ec2", f"volume/{word}"), {}),
        (place.template, {}),
    ]
    for action in set(granted(documents)) - CREATE_ACTIONS:
        if not action.startswith("ec2:Describe"):
            for resource, known in (each for each in unrelated if f":{action.partition(':')[0]}:" in each[0]):
                request = IamRequest(action=action, resource=resource, context={**place.caller, **known})
                assert not allows(documents, request), request


#: Actions that escalate privileges or destroy data.
DANGEROUS_ACTIONS = (
    *("cloudformation:UpdateStack", "dynamodb:DeleteItem", "dynamodb:DeleteTable"),
    *("dynamodb:ExportTableToPointInTime", "dynamodb:PartiQLUpdate", "dynamodb:UpdateTable"),
    *("ec2:AssociateIamInstanceProfile", "ec2:DeleteLaunchTemplate", "ec2:ModifyInstanceAttribute"),
    *("ec2:ModifyInstanceMetadataOptions", "ec2:ReplaceIamInstanceProfileAssociation", "ec2:RequestSpotFleet"),
    *("iam:AttachRolePolicy", "iam:CreateServiceLinkedRole", "iam:UpdateAssumeRolePolicy"),
    *("lambda:UpdateFunctionCode", "logs:GetLogEvents", "secretsmanager:PutSecretValue", "sqs:AddPermission"),
    *("sqs:DeleteQueue", "sqs:PurgeQueue", "ssm:PutParameter", "ssm:SendCommand", "ssm:StartSession"),
    "sts:AssumeRole",
)


@pytest.mark.parametrize("role", ROLES)
def test_no_role_has_dangerous_permissions(role):
    place = Place()
    documents = policies_of(role, place)
    resources = {
        each for document in documents for statement in document["Statement"] for each in statement["Resource"]
    }
    context = {**place.caller, **place.tags, "ec2:InstanceID": place.instance, LEADING_KEYS: place.own_keys[:1]}
    attempts = (
        IamRequest(action=action, resource=each, context=context)
        for action in DANGEROUS_ACTIONS
        for each in sorted(resources)
    )
    assert not allowed_requests(documents, attempts)


@pytest.mark.parametrize("who", FUNCTIONS)
def test_a_function_cannot_write_the_log_of_another(who):
    place = Place()
    role = f"{pascal_case(who)}FunctionRole"
    for action in ("logs:CreateLogStream", "logs:PutLogEvents"):
        for name in FUNCTIONS:
            stream = place.arn("logs", f"log-group:/remuda/ci/{name}:log-stream:1")
            assert allows(policies_of(role, place), IamRequest(action=action, resource=stream)) is (name == who)


def test_the_workflow_role_may_invoke_the_broker_and_nothing_else():
    place = Place()
    documents = policies_of("WorkflowRole", place)
    actions = sorted({action for role in ROLES for action in granted(policies_of(role, place))} - CREATE_ACTIONS)
    allowed = allowed_requests(documents, requests(actions, of=place, by=place))
    assert [(each.action, each.resource) for each in allowed] == [
        ("lambda:InvokeFunction", place.arn("lambda", "function:remuda-ci-broker"))
    ]


def test_without_functions_workflows_provision_in_direct_mode():
    """The role has the policies of the broker then, without the credential."""
    policy, *keys = TEMPLATE["WorkflowRole"]["Properties"]["ManagedPolicyArns"]
    assert policy == {"Fn::If": ["HasFunctions", {"Ref": "WorkflowPolicy"}, {"Ref": "ProvisionPolicy"}]}
    assert [key["Fn::If"][2] for key in keys] == [
        {"Fn::If": [f"Has{name}", {"Ref": f"{name}Policy"}, {"Ref": "AWS::NoValue"}]}
        for name in ("VolumeKey", "ImageKey")
    ]


def test_the_broker_may_read_the_credential_and_cannot_change_the_configuration():
    place = Place()
    documents = policies_of("BrokerFunctionRole", place)
    assert allows(documents, IamRequest(action="secretsmanager:GetSecretValue", resource=place.secret))
    config = {LEADING_KEYS: [str(items.CONFIG[items.PK]["S"])]}
    for action in ("dynamodb:PutItem", "dynamodb:UpdateItem", "dynamodb:BatchWriteItem"):
        assert not allows(documents, IamRequest(action=action, resource=place.table, context=config))
    assert "ec2:CreateLaunchTemplateVersion" not in granted(documents)
    assert "lambda:InvokeFunction" not in granted(documents)


def test_machines_workflows_and_other_holders_of_no_need_cannot_read_the_credential():
    """Of the machines, only that of the listener can. Jobs run on the others."""
    place = Place()
    read = IamRequest(action="secretsmanager:GetSecretValue", resource=place.secret)
    allowed = {role for role in ROLES if allows(policies_of(role, place), read)}
    functions = {"RefreshFunctionRole", "ScaleDownFunctionRole", "BrokerFunctionRole"}
    # A scheduled workflow in place of the functions is optional, and reads the credential like them.
    assert allowed == {"ListenerRole", "RefreshRole", *functions}
    assert {"AgentRole", "WorkflowRole"} == set(ROLES) - allowed


def test_only_the_listener_writes_metrics_and_only_in_one_namespace():
    place = Place()
    for role in ROLES:
        for namespace, is_own in (("Remuda", True), ("AWS/EC2", False), ("", False)):
            context = {"cloudwatch:namespace": namespace} if namespace else {}
            request = IamRequest(action=METRICS, resource="*", context=context)
            assert allows(policies_of(role, place), request) is (is_own and role == "ListenerRole")


def test_the_listener_and_its_template_do_not_have_the_tag_of_the_pool():
    """A role that may launch with the pool's templates, or end its machines, could use it for the listener."""
    data = TEMPLATE["ListenerTemplate"]["Properties"]
    assert POOL_TAG not in json.dumps([data, TEMPLATE["ListenerGroup"]])
    assert STACK_TAG != POOL_TAG


def test_only_the_url_of_the_broker_is_public():
    """The permissions of the URL exist only with it, and the second one does not allow direct invocations."""
    public = {
        name: resource
        for name, resource in TEMPLATE.items()
        if resource["Type"] == "AWS::Lambda::Permission" and resource["Properties"]["Principal"] == "*"
    }
    assert {name: each["Properties"]["Action"] for name, each in public.items()} == {
        "BrokerUrlPermission": "lambda:InvokeFunctionUrl",
        "BrokerUrlInvokePermission": "lambda:InvokeFunction",
    }
    for resource in (*public.values(), TEMPLATE["BrokerUrl"]):
        assert resource["Condition"] == "HasFunctionUrl"
    assert public["BrokerUrlInvokePermission"]["Properties"]["InvokedViaFunctionUrl"] is True
    assert template()["Parameters"]["FunctionUrl"]["Default"] == "false"


# Configuration --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["BrokerFunctionRole", "ListenerRole", "ScaleDownFunctionRole"])
@thorough
@given(PLACES)
def test_only_refresh_may_write_the_configuration(role, place):
    """The configuration determines what instances run, and the broker and workflows in direct mode only use it."""
    pool = str(items.CONFIG[items.PK]["S"])
    assert pool == items.PREFIXES[items.PK]["S"] == items.SWEEP[items.PK]["S"]
    documents = policies_of(role, place)

    def writes(operation: str, keys: list[str]) -> bool:
        context = {**place.caller, LEADING_KEYS: keys}
        return allows(documents, IamRequest(action=f"dynamodb:{operation}", resource=place.table, context=context))

    control, report = place.own_keys
    history, run, job = items.history_pk(place.instance), items.provisions_pk("4711"), f"{items.JOB_PREFIX}4711"
    sets = {items.DEMAND, job} if role == "ListenerRole" else set()
    for operation, its in (
        ("UpdateItem", {control, report}),
        ("BatchWriteItem", {history, *(sets - {job})}),
        ("PutItem", {run, *sets, *([items.LEASE] if sets else [])} if role != "ScaleDownFunctionRole" else set()),
    ):
        assert {key for key in place.keys if writes(operation, [key])} == its
        assert not any(writes(operation, [key, pool]) for key in place.keys)
        assert not writes(operation, [])
    refresh = IamRequest(action="dynamodb:PutItem", resource=place.table, context={LEADING_KEYS: [pool]})
    assert allows(policies_of("RefreshFunctionRole", place), refresh)


# Creation of resources ------------------------------------------------------------------------------------------------


def misuses(own: Place, other: Place) -> list[IamRequest]:
    """Requests for parts of launches outside the pool. EC2 authorizes each part, so each must be denied."""

    def part(action: str, resource: str, *known: Mapping[str, Value]) -> IamRequest:
        context = {key: value for each in known for key, value in each.items()}
        return IamRequest(action=f"ec2:{action}", resource=resource, context=context)

    ours: dict[str, Value] = {REQUESTED: own.pool}
    theirs: dict[str, Value] = {REQUESTED: other.pool}
    large: dict[str, Value] = {"ec2:InstanceType": "m6i.large"}
    made = [own.arn("ec2", f"{kind}/*") for kind in ("fleet", "instance", "network-interface", "volume")]
    fleet = ("CreateFleet", "RunInstances")
    at_launch: dict[str, Value] = {"ec2:CreateAction": "RunInstances"}
    return [
        # With the template of another pool, or without tags.
        *(part(action, own.template, tags) for action in fleet for tags in (other.tags, {})),
        # Without a tag, or with the tag of another pool.
        *(part(action, each, large, tags) for action in fleet for each in made for tags in ({}, theirs)),
        # Of a size that no class has, or of an unknown type.
        part("RunInstances", own.arn("ec2", "instance/*"), ours, {"ec2:InstanceType": "m6i.24xlarge"}),
        part("RunInstances", own.arn("ec2", "instance/*"), ours),
        # Tags for existing resources, for resources created otherwise, or outside the pool.
        *(part("CreateTags", each, ours) for each in (own.machine, own.template)),
        *(part("CreateTags", each, ours, {"ec2:CreateAction": "CreateVolume"}) for each in (own.machine, own.template)),
        *(part("CreateTags", each, at_launch, tags) for each in (own.machine,) for tags in ({}, theirs)),
        *(
            part("CreateTags", own.template, {"ec2:CreateAction": "CreateLaunchTemplate"}, tags)
            for tags in ({}, theirs)
        ),
        *(part("CreateLaunchTemplate", own.template, tags) for tags in ({}, theirs)),
        # A role for another service.
        IamRequest(
            action="iam:PassRole",
            resource=own.arn("iam", f"role/remuda-{own.pool}-agent"),
            context={"iam:PassedToService": "lambda.amazonaws.com"},
        ),
        # Adding or removing the tag of the pool, together with the orphan tag, or by removing all tags.
        *(
            IamRequest(action=action, resource=own.machine, context={**own.tags, "aws:TagKeys": keys})
            for action in ("ec2:CreateTags", "ec2:DeleteTags")
            for keys in ([], [POOL_TAG], [ORPHAN_TAG, POOL_TAG], [GHR_ENVIRONMENT_TAG])
        ),
    ]


@pytest.mark.parametrize("role", ROLES)
@thorough
@given(pairs("pool"))
def test_a_role_cannot_create_or_tag_resources_outside_its_pool(role, pair):
    own, other = pair
    other = replace(own, pool=other.pool)
    assert not allowed_requests(policies_of(role, own), iter(misuses(own, other)))


# Sensitivity of these tests -------------------------------------------------------------------------------------------


#: The policy of each role whose conditions are removed; the broker has the first policy of the listener, too.
LOOSENED = {"AgentRole": 0, "BrokerFunctionRole": 0, "RefreshFunctionRole": 0, "ScaleDownFunctionRole": 0}
LOOSENED["ListenerRole"] = -1


def _conditions() -> Iterator[tuple[str, int, str, str]]:
    for role, policy in LOOSENED.items():
        for number, statement in enumerate(policies_of(role, Place())[policy]["Statement"]):
            for operator, keys in statement.get("Condition", {}).items():
                for key in keys:
                    yield role, number, operator, key


def half_tagged(place: Place) -> Iterator[IamRequest]:
    """Requests for instances that have only one of the two fleet tags."""
    for name, value in place.tags.items():
        if name != POOL:
            for action in ("ec2:TerminateInstances", "ec2:CreateTags", "ec2:DeleteTags"):
                context = {name: value, "aws:TagKeys": [ORPHAN_TAG]}
                yield IamRequest(action=action, resource=place.machine, context=context)


def forged(place: Place) -> Iterator[IamRequest]:
    """Writes to the machine's own report: of no attributes, of others than a report has, and one that returns all."""
    forgeries: tuple[dict[str, Value], ...] = (
        {ATTRIBUTES: []},
        {ATTRIBUTES: ["pk", "sk", "gsi1pk"]},
        {RETURN_VALUES: "ALL_NEW"},
    )
    for known in forgeries:
        context = {**place.caller, LEADING_KEYS: place.own_keys[1:], **known}
        yield IamRequest(action="dynamodb:UpdateItem", resource=place.table, context=context)


def unkeyed(place: Place) -> Iterator[IamRequest]:
    """Writes to the configuration, and writes without keys."""
    for operation in ("BatchWriteItem", "PutItem", "UpdateItem"):
        for keys in ([], [str(items.CONFIG[items.PK]["S"])]):
            yield IamRequest(action=f"dynamodb:{operation}", resource=place.table, context={LEADING_KEYS: keys})


@pytest.mark.parametrize(("role", "number", "operator", "key"), list(_conditions()))
def test_removing_any_condition_allows_more(role, number, operator, key):
    own = Place()
    other = replace(own, instance="i-00000000000000002", pool="ci" if role == "AgentRole" else "ci-2")
    whole = policies_of(role, own)
    loosened = copy.deepcopy(whole)
    del loosened[LOOSENED[role]]["Statement"][number]["Condition"][operator][key]
    tried = [
        *requests(granted(whole), of=other, by=own),
        *misuses(own, replace(own, pool="ci-2")),
        *half_tagged(own),
        *unkeyed(own),
        *forged(own),
        IamRequest(action=METRICS, resource="*", context={"cloudwatch:namespace": "AWS/EC2"}),
    ]
    assert len(allowed_requests(loosened, iter(tried))) > len(allowed_requests(whole, iter(tried)))


@pytest.mark.parametrize("role", ROLES)
def test_widening_any_resource_name_allows_more(role):
    own, other = Place(), Place(pool="ci-2")
    named = [
        (document, statement, resource)
        for document, policy in enumerate(policies_of(role, own))
        for statement, each in enumerate(policy["Statement"])
        for resource, name in enumerate(each["Resource"])
        if re.search(r"remuda[-/]ci", name)
    ]
    assert named
    for document, statement, resource in named:
        loosened = copy.deepcopy(policies_of(role, own))
        names = loosened[document]["Statement"][statement]["Resource"]
        names[resource] = re.sub(r"(remuda[-/]ci)", r"\1*", names[resource])
        # An agent is also restricted to its keys, so it is tried with its own keys in the foreign table.
        assert allowed_requests(loosened, requests(granted(loosened), of=other, by=own)), names[resource]


# Trust policies -------------------------------------------------------------------------------------------------------

NAMES = st.from_regex(r"[A-Za-z0-9_.-]{1,12}", fullmatch=True)


def trusts(role: str, subject: str | None, audience: str = "sts.amazonaws.com", **parameters: Any) -> bool:
    given = {**parameters_of(Place()), **parameters}
    document = resolved(TEMPLATE[role]["Properties"]["AssumeRolePolicyDocument"], given)
    (statement,) = document["Statement"]
    who = statement.pop("Principal")
    assert who == {"Federated": parameters_of(Place())["OidcProviderArn"]}
    context = {f"{GITHUB}:aud": audience, **({f"{GITHUB}:sub": subject} if subject is not None else {})}
    statement["Resource"] = "*"
    request = IamRequest(action="sts:AssumeRoleWithWebIdentity", resource=Place().arn("iam", "role/r"), context=context)
    return allows(document, request)


@pytest.mark.parametrize("role", ["WorkflowRole", "RefreshRole"])
@thorough
@given(NAMES, NAMES)
def test_other_repositories_cannot_assume_a_role(role, owner, name):
    assume(f"{owner}/{name}" != REPOSITORY)
    branch = f"ref:refs/heads/{BRANCH}"
    for repository in (f"{owner}/{name}", f"acme/{name}x", f"{owner}acme/app", f"acme/app-{name}", f"acme/app/{name}"):
        assert not trusts(role, f"repo:{repository}:{branch}")
    assert trusts(role, f"repo:{REPOSITORY}:{branch}")
    assert not trusts(role, f"repo:{REPOSITORY}:{branch}", audience=f"https://github.com/{owner}")
    assert not trusts(role, None)


@thorough
@given(NAMES)
def test_only_one_branch_can_assume_the_refresh_role(name):
    assume(name != BRANCH)
    for subject in (f"ref:refs/heads/{name}", f"ref:refs/tags/{BRANCH}", "pull_request", f"environment:{name}"):
        assert not trusts("RefreshRole", f"repo:{REPOSITORY}:{subject}")
        assert trusts("WorkflowRole", f"repo:{REPOSITORY}:{subject}")


def test_the_workflow_role_trusts_every_listed_repository():
    given: dict[str, Any] = {"Repositories": ["acme/app", "acme/lib", "other/tool"]}
    for repository in given["Repositories"]:
        assert trusts("WorkflowRole", f"repo:{repository}:pull_request", **given)
    for repository in ("acme/tool", "other/app", "acme/app2", "acme/ap", "evil/acme/app", "acme/app,acme/lib"):
        assert not trusts("WorkflowRole", f"repo:{repository}:pull_request", **given)


def test_the_workflow_role_trusts_all_repositories_of_an_organisation():
    given: dict[str, Any] = {"Repositories": ["acme/*"]}
    for repository in ("acme/app", "acme/x"):
        assert trusts("WorkflowRole", f"repo:{repository}:ref:refs/heads/main", **given)
    for repository in ("acme2/app", "evil-acme/app", "evil/acme", "acme@1/app@2"):
        assert not trusts("WorkflowRole", f"repo:{repository}:ref:refs/heads/acme/x", **given)


def test_only_jobs_of_the_environments_can_assume_the_workflow_role():
    given: dict[str, Any] = {"Repositories": ["acme/app", "other/*"], "Environments": ["ci", "release build"]}
    for repository in ("acme/app", "other/tool"):
        for environment in given["Environments"]:
            assert trusts("WorkflowRole", f"repo:{repository}:environment:{environment}", **given)
        for subject in ("environment:prod", "environment:ci2", "pull_request", "ref:refs/heads/environment/ci"):
            assert not trusts("WorkflowRole", f"repo:{repository}:{subject}", **given)
    assert not trusts("WorkflowRole", "repo:acme/lib:environment:ci", **given)


def test_roles_trust_immutable_subjects():
    """GitHub's default for repositories created since July 2026 (changelog of 2026-04-23)."""
    given: dict[str, Any] = {"Repositories": ["acme@12/app@34", "other@56/*"], "RefreshRepository": "acme@12/app@34"}
    assert trusts("WorkflowRole", "repo:acme@12/app@34:pull_request", **given)
    assert trusts("WorkflowRole", "repo:other@56/tool@7:pull_request", **given)
    assert trusts("RefreshRole", f"repo:acme@12/app@34:ref:refs/heads/{BRANCH}", **given)
    for repository in ("acme@13/app@34", "acme@12/app@3", "acme/app", "other@5/tool@7"):
        assert not trusts("WorkflowRole", f"repo:{repository}:pull_request", **given)


ACCEPTED = {
    "Repositories": ["", "acme/app", "acme/*", "acme@12/app@34", "acme@12/*", "a-b/c_d.e"],
    "RefreshRepository": ["", "acme/app", "acme@12/app@34"],
    "Environments": ["", "ci", "release build"],
}
REJECTED = {
    "Repositories": ["acme", "*", "*/app", "acme/ap*", "ac?e/app", "acme/app:x", "acme/*/x", "acme/app@*", "a@/b"],
    "RefreshRepository": ["acme/*", "acme", "acme/app:ref"],
    "Environments": ["*", "c?", "ci:x"],
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_parameters_of_trust_policies_accept_no_other_wildcards(name):
    pattern = template()["Parameters"][name]["AllowedPattern"]
    assert [text for text in ACCEPTED[name] if not re.fullmatch(pattern, text)] == []
    assert [text for text in REJECTED[name] if re.fullmatch(pattern, text)] == []


@pytest.mark.parametrize(
    ("role", "service"),
    [
        ("AgentRole", "ec2"),
        ("RefreshFunctionRole", "lambda"),
        ("ScaleDownFunctionRole", "lambda"),
        ("BrokerFunctionRole", "lambda"),
        ("ListenerRole", "ec2"),
    ],
)
def test_other_roles_are_assumed_by_a_service(role, service):
    (statement,) = TEMPLATE[role]["Properties"]["AssumeRolePolicyDocument"]["Statement"]
    assert statement["Principal"] == {"Service": f"{service}.amazonaws.com"}
    assert statement["Action"] == "sts:AssumeRole"
