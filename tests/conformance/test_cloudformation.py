"""The CloudFormation template on a test server."""

from __future__ import annotations

import importlib
import io
import json
import secrets
import zipfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from build import DEPLOY
from remuda.adapters.aws.clients import config, open_session
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.aws.sqs import SqsResourcePool
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.aws_lambda.handler import parse_event
from remuda.aws_lambda.runtime import SETTINGS_VARIABLE, parse_variables
from remuda.config.sources import load
from remuda.controlplane.demand.heartbeat import HEARTBEATS, INTERVAL_S
from remuda.deployment.policies import BROKER, CLASSES, FUNCTIONS, SCHEDULED, policies
from remuda.deployment.statements import fill_placeholders
from remuda.deployment.template import (
    ALARMS,
    BROKER_HANDLER,
    BROKER_TIMEOUT_S,
    FUNCTION_TIMEOUT_S,
    HANDLER,
    LOG_DAYS,
    SET_ALARMS,
    template,
)
from remuda.ports.calls import CallCounter
from tests.support.aws.ec2 import shared_ec2_server
from tests.support.aws.servers import REGION

ACCOUNT = "123456789012"
SECRET = f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:github-AbCdEf"
IMAGE_KEY = f"arn:aws:kms:{REGION}:210987654321:key/22222222-2222-3333-4444-555555555555"
VOLUME_KEY = f"arn:aws:kms:{REGION}:{ACCOUNT}:key/11111111-2222-3333-4444-555555555555"
#: Lambda's limit for the names and values of a function's variables in bytes.
MAX_ENVIRONMENT = 4_096
#: CloudFormation's limit for the value of a parameter in bytes.
MAX_PARAMETER = 4_096
#: Maximum length of a template in a bucket.
MAX_TEMPLATE = 1_000_000
PROVIDER = f"arn:aws:iam::{ACCOUNT}:oidc-provider/token.actions.githubusercontent.com"


class CreatedStack:
    """A stack of the template, and clients for its resources."""

    def __init__(self, opened: AsyncExitStack) -> None:
        self._opened = opened
        self._session = open_session()
        # Unique names, because tests share the server.
        self.pool = secrets.token_hex(4)
        self.bucket = f"code-{self.pool}"
        self.name = f"remuda-{self.pool}"
        self.arn = ""

    async def client(self, service: str) -> Any:
        create: Any = self._session.create_client
        made = create(
            service,
            region_name=REGION,
            endpoint_url=shared_ec2_server().url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            config=config(read_timeout_s=60).for_botocore(),
        )
        return await self._opened.enter_async_context(made)

    async def create_functions(self, **parameters: str) -> set[str]:
        """Create the stack with a package for the functions."""
        s3 = await self.client("s3")
        await s3.create_bucket(Bucket=self.bucket, CreateBucketConfiguration={"LocationConstraint": REGION})
        code = io.BytesIO()
        with zipfile.ZipFile(code, "w") as archive:
            archive.writestr("remuda/__init__.py", "")
        await s3.put_object(Bucket=self.bucket, Key="remuda-lambda.zip", Body=code.getvalue())
        given = {"CodeBucket": self.bucket, "GithubSecretArn": SECRET, "GithubScope": "acme/app"}
        return await self.create(**given, **parameters)

    async def create(self, **parameters: str) -> set[str]:
        """Create the stack and return the names of its roles."""
        client = await self.client("cloudformation")
        await client.create_stack(
            StackName=self.name,
            TemplateBody=(DEPLOY / "cloudformation.yml").read_text(encoding="utf-8"),
            Capabilities=["CAPABILITY_NAMED_IAM"],
            Parameters=[
                {"ParameterKey": key, "ParameterValue": value}
                for key, value in {"Pool": self.pool, **parameters}.items()
            ],
        )
        (stack,) = (await client.describe_stacks(StackName=self.name))["Stacks"]
        assert stack["StackStatus"] == "CREATE_COMPLETE"
        self.arn = stack["StackId"]
        roles = (await (await self.client("iam")).list_roles())["Roles"]
        return {role["RoleName"] for role in roles if role["RoleName"].startswith(f"{self.name}-")}

    async def policy(self, name: str) -> Any:
        """The document of a managed policy."""
        arn = f"arn:aws:iam::{ACCOUNT}:policy/{self.name}-{name}"
        version = await (await self.client("iam")).get_policy_version(PolicyArn=arn, VersionId="v1")
        document = version["PolicyVersion"]["Document"]
        return json.loads(document) if isinstance(document, str) else document

    async def function(self, name: str) -> Any:
        """The configuration of a function."""
        return (await (await self.client("lambda")).get_function(FunctionName=f"{self.name}-{name}"))["Configuration"]

    async def variables(self, name: str) -> dict[str, str]:
        """The settings of a function, as its handler reads them."""
        given = (await self.function(name))["Environment"]["Variables"]
        parameter = given[SETTINGS_VARIABLE]
        assert parameter == f"/remuda/{self.pool}/settings"
        found = await (await self.client("ssm")).get_parameters(Names=[parameter])
        return {
            **parse_variables(found["Parameters"][0]["Value"]),
            **{key: value for key, value in given.items() if value},
        }

    async def role(self, name: str) -> tuple[Any, Any]:
        """A role, and the only statement of its trust policy."""
        role = (await (await self.client("iam")).get_role(RoleName=f"{self.name}-{name}"))["Role"]
        (trust,) = role["AssumeRolePolicyDocument"]["Statement"]
        return role, trust


@pytest.fixture
async def stack() -> AsyncIterator[CreatedStack]:
    async with AsyncExitStack() as opened:
        yield CreatedStack(opened)


async def test_refresh_changes_nothing_in_a_new_stack(stack):
    await stack.create()
    given: dict[str, Any] = {"clock": SystemClock(), "ids": SystemIds(), "calls": CallCounter()}
    store = DynamoInstanceStore(client=await stack.client("dynamodb"), table=stack.name, **given)
    pool = SqsResourcePool(client=await stack.client("sqs"), prefix=stack.name, **given)
    # The server ignores the TTL of templates.
    assert set(await store.prepare()) <= {f"expiry of old items in table {stack.name}"}
    assert not await pool.prepare(CLASSES)
    await store.close()


async def test_the_stack_contains_the_generated_policies(stack):
    network = {"FunctionSubnetIds": "subnet-1", "SecurityGroupIds": "sg-1"}
    await stack.create(GithubSecretArn=SECRET, VolumeKmsKey=VOLUME_KEY, ImageKmsKey=IMAGE_KEY, **network)
    for policy in policies():
        document = await stack.policy(policy.name)
        for statement in document["Statement"]:
            if statement["Sid"] == "SignalStack":
                assert statement["Resource"] == [stack.arn], "its own stack only"
                statement["Resource"] = [f"arn:aws:cloudformation:{REGION}:{ACCOUNT}:stack/{stack.name}/*"]
        assert document == fill_placeholders(
            policy,
            pool=stack.pool,
            account=ACCOUNT,
            region=REGION,
            environment=stack.pool,
            credential=SECRET,
            volume_key=VOLUME_KEY,
            image_key=IMAGE_KEY,
        )


async def test_without_an_arn_only_secrets_of_the_pool_may_be_read(stack):
    await stack.create()
    for name in ("refresh", "scale-down", "broker-function"):
        document = await stack.policy(name)
        (read,) = [each for each in document["Statement"] if each["Sid"] == "ReadGitHubCredential"]
        assert read["Resource"] == [f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:remuda/{stack.pool}/*"]


async def test_scale_down_uses_the_environment_of_the_stack(stack):
    await stack.create(GithubEnvironment="theirs")
    document = await stack.policy("scale-down")
    (statement,) = [each for each in document["Statement"] if each["Sid"] == "TerminateFleetInstances"]
    assert statement["Condition"]["StringEquals"]["aws:ResourceTag/ghr:environment"] == "theirs"


async def test_roles_for_workflows_require_a_repository(stack):
    assert await stack.create(OidcProviderArn=PROVIDER) == {f"{stack.name}-agent"}


async def test_the_workflow_role_requires_no_repository_for_refresh(stack):
    roles = await stack.create(OidcProviderArn=PROVIDER, Repositories="acme/app")
    assert roles == {f"{stack.name}-{name}" for name in ("agent", "workflow")}


async def test_the_roles_trust_the_repositories(stack):
    given = {"Repositories": "acme/app,other/*", "Environments": "ci,prod", "RefreshRepository": "acme/infra"}
    roles = await stack.create(OidcProviderArn=PROVIDER, **given)
    assert roles == {f"{stack.name}-{name}" for name in ("agent", "workflow", "refresh")}
    conditions = {}
    for name in ("workflow", "refresh"):
        _, trust = await stack.role(name)
        assert trust["Principal"] == {"Federated": PROVIDER}
        conditions[name] = trust["Condition"]
    audience = {"token.actions.githubusercontent.com:aud": "sts.amazonaws.com"}
    subject = "token.actions.githubusercontent.com:sub"
    assert conditions == {
        "workflow": {
            "StringEquals": audience,
            "StringLike": {subject: ["repo:acme/app:*", "repo:other/*:*"]},
            "StringLikeIfExists": {subject: ["repo:*:environment:ci", "repo:*:environment:prod"]},
        },
        "refresh": {
            "StringEquals": audience,
            "StringLike": {subject: "repo:acme/infra:ref:refs/heads/main"},
        },
    }


async def test_the_instance_profile_has_the_role_of_the_agent(stack):
    await stack.create()
    iam = await stack.client("iam")
    profile = (await iam.get_instance_profile(InstanceProfileName=f"{stack.name}-agent"))["InstanceProfile"]
    assert [role["RoleName"] for role in profile["Roles"]] == [f"{stack.name}-agent"]


# Functions ----------------------------------------------------------------------------------------------------------


async def test_without_code_no_function_and_no_schedule_is_created(stack):
    await stack.create()
    names = [rule["Name"] for rule in (await (await stack.client("events")).list_rules())["Rules"]]
    assert not [name for name in names if name.startswith(stack.name)]


async def test_each_function_has_its_own_role(stack):
    roles = await stack.create_functions()
    for who in FUNCTIONS:
        assert f"{stack.name}-{who}-function" in roles
        role, trust = await stack.role(f"{who}-function")
        assert trust["Principal"] == {"Service": "lambda.amazonaws.com"}
        found = await stack.function(who)
        handler, timeout_s = (BROKER_HANDLER, BROKER_TIMEOUT_S) if who == BROKER else (HANDLER, FUNCTION_TIMEOUT_S)
        assert (found["Role"], found["Handler"], found["Timeout"]) == (role["Arn"], handler, timeout_s)


@pytest.mark.parametrize("handler", [HANDLER, BROKER_HANDLER])
async def test_the_handler_exists(handler):
    module, _, name = handler.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))


async def test_the_broker_gets_the_rules_of_the_stack(stack):
    await stack.create_functions(
        Repositories="acme/app,acme@12/*",
        Environments="ci,release build",
        OidcIssuer="https://ghes.example/_services/token",
        TrustPullRequests="true",
    )
    settings = load({}, environ=await stack.variables(BROKER))
    assert [str(each) for each in settings.repositories] == ["acme/app", "acme@12/*"]
    assert settings.environments == ("ci", "release build")
    assert settings.oidc_issuer == "https://ghes.example/_services/token"
    assert settings.trust_pull_requests is True


def test_the_broker_has_a_url_only_if_the_stack_asks_for_it():
    """Checked in the template: the server creates no URLs."""
    made = template()
    url = made["Resources"]["BrokerUrl"]
    assert (url["Condition"], url["Properties"]["AuthType"]) == ("HasFunctionUrl", "NONE")
    assert made["Outputs"]["BrokerUrl"]["Condition"] == "HasFunctionUrl"
    assert made["Conditions"]["HasFunctionUrl"]["Fn::And"][1] == {"Fn::Equals": [{"Ref": "FunctionUrl"}, "true"]}


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ({}, {"refresh": {"command": "refresh", "sweep_only": True}, "scale-down": {"command": "scale-down"}}),
        (
            {"Ami": "ami-12c6146b", "SubnetIds": "subnet-1"},
            {"refresh": {"command": "refresh"}, "scale-down": {"command": "scale-down"}},
        ),
    ],
    ids=["sweeps only", "applies its settings"],
)
async def test_each_function_is_invoked_every_five_minutes_with_its_command(stack, given, inputs):
    await stack.create_functions(**given)
    events, functions = await stack.client("events"), await stack.client("lambda")
    for who in SCHEDULED:
        name = f"{stack.name}-{who}"
        rule = await events.describe_rule(Name=name)
        assert (rule["ScheduleExpression"], rule["State"]) == ("rate(5 minutes)", "ENABLED")
        (target,) = (await events.list_targets_by_rule(Rule=name))["Targets"]
        function = (await functions.get_function(FunctionName=name))["Configuration"]
        assert target["Arn"] == function["FunctionArn"]
        assert json.loads(target["Input"]) == inputs[who]
        # The handler accepts the input.
        assert parse_event(json.loads(target["Input"])).name == who
        assert target["RetryPolicy"]["MaximumRetryAttempts"] == 0
        policy = json.loads((await functions.get_policy(FunctionName=name))["Policy"])
        (statement,) = policy["Statement"]
        assert rule["Arn"] in json.dumps(statement)


async def test_scale_down_can_be_disabled(stack):
    await stack.create_functions(ScaleDown="false")
    events = await stack.client("events")
    states = {who: (await events.describe_rule(Name=f"{stack.name}-{who}"))["State"] for who in SCHEDULED}
    assert states == {"refresh": "ENABLED", "scale-down": "DISABLED"}


@pytest.mark.parametrize(
    ("app", "named"),
    [("", {"REMUDA_GITHUB_TOKEN": SECRET}), ("7", {"REMUDA_GITHUB_APP_KEY": SECRET, "REMUDA_GITHUB_APP_ID": "7"})],
    ids=["token", "app"],
)
async def test_functions_get_the_settings_of_the_stack(stack, app, named):
    await stack.create_functions(GithubAppId=app, Ami="ami-12c6146b", SubnetIds="subnet-12345678,subnet-23456789")
    for who in SCHEDULED:
        variables = await stack.variables(who)
        settings = load({}, environ=variables)
        assert (settings.backend, settings.pool, settings.github_scope) == ("aws", stack.pool, "acme/app")
        assert (settings.ami, settings.iam_instance_profile) == ("ami-12c6146b", f"{stack.name}-agent")
        keys = ("REMUDA_GITHUB_TOKEN", "REMUDA_GITHUB_APP_KEY", "REMUDA_GITHUB_APP_ID")
        assert {key: variables[key] for key in keys if variables.get(key)} == named


async def test_long_settings_do_not_exceed_the_environment_of_a_function(stack):
    classes = {f"class-{number}": {"cpu": number + 1, "mmem": 4096} for number in range(40)}
    # Parameters may contain line breaks.
    text = json.dumps(classes, indent=10)
    assert MAX_PARAMETER - 500 < len(text) <= MAX_PARAMETER
    await stack.create_functions(ResourceClassConfig=text, KeyName="people")
    for who in SCHEDULED:
        given = (await stack.function(who))["Environment"]["Variables"]
        assert sum(len(f"{name}{value}".encode()) for name, value in given.items()) <= MAX_ENVIRONMENT
        settings = load({}, environ=await stack.variables(who))
        assert [each.name for each in settings.resource_class_config] == list(classes)
        assert settings.key_name == "people"


async def test_every_log_group_has_a_retention(stack):
    await stack.create()
    logs = await stack.client("logs")
    found = (await logs.describe_log_groups(logGroupNamePrefix=f"/remuda/{stack.pool}/"))["logGroups"]
    assert {group["logGroupName"].rpartition("/")[2] for group in found} == set(FUNCTIONS)
    assert {group["retentionInDays"] for group in found} == {LOG_DAYS}


def test_alarms_require_a_topic():
    """Checked in the template: the server creates no alarms."""
    made = template()
    alarms = {name: item for name, item in made["Resources"].items() if item["Type"] == "AWS::CloudWatch::Alarm"}
    functions = {"RefreshAlarm", "ScaleDownAlarm", "BrokerAlarm"}
    assert set(alarms) == functions | {
        "ProvisionAlarm",
        "RunnerVersionAlarm",
        "BudgetAlarm",
        "WaitingJobsAlarm",
        "ListenerAlarm",
        "ThrottlesAlarm",
    }
    for name, alarm in alarms.items():
        assert alarm["Condition"] == (SET_ALARMS if name == "ListenerAlarm" else ALARMS)
        assert alarm["Properties"]["AlarmActions"] == [{"Ref": "AlarmTopicArn"}]
    own = {
        "RunnerVersionAlarm": ("RunnerVersionWarnings", "refresh"),
        "BudgetAlarm": ("BudgetWarnings", "refresh"),
        "WaitingJobsAlarm": ("JobsWaitingTooLong", "refresh"),
        "ProvisionAlarm": ("Failed", "provision"),
        "ListenerAlarm": (HEARTBEATS, "listen"),
    }
    silent = alarms["ListenerAlarm"]["Properties"]
    assert (silent["TreatMissingData"], silent["Period"] * silent["EvaluationPeriods"]) == ("breaching", 180)
    # It writes more often than the alarm looks.
    assert silent["Period"] > INTERVAL_S
    for name, (metric, command) in own.items():
        properties = alarms.pop(name)["Properties"]
        assert (properties["Namespace"], properties["MetricName"]) == ("Remuda", metric)
        found = {item["Name"]: item["Value"] for item in properties["Dimensions"]}
        assert found == {"Pool": {"Ref": "Pool"}, "Command": command}
    for name in functions:
        properties = alarms[name]["Properties"]
        (dimension,) = properties["Dimensions"]
        assert dimension == {"Name": "FunctionName", "Value": {"Ref": name.replace("Alarm", "Function")}}
        assert dimension["Value"]["Ref"] in made["Resources"]
    assert alarms["RefreshAlarm"]["Properties"]["TreatMissingData"] == "breaching"
    assert made["Parameters"]["AlarmTopicArn"]["Default"] == ""


def _policy_names(reference: dict[str, Any]) -> list[str]:
    """The policies of a reference, each with its condition."""
    if "Fn::If" not in reference:
        name = reference["Ref"].removesuffix("Policy")
        return [name] if name != "AWS::NoValue" else []
    condition, there, missing = reference["Fn::If"]
    return [
        *(f"{name} if {condition}" for name in _policy_names(there)),
        *(f"{name} unless {condition}" for name in _policy_names(missing)),
    ]


def test_each_role_has_only_its_policies():
    """Checked in the template: the server attaches no policies."""
    resources = template()["Resources"]
    carried = {
        name: {policy for each in resource["Properties"]["ManagedPolicyArns"] for policy in _policy_names(each)}
        for name, resource in resources.items()
        if resource["Type"] == "AWS::IAM::Role"
    }
    keys, network = ("VolumeKey if HasVolumeKey", "ImageKey if HasImageKey"), "FunctionNetwork if HasFunctionNetwork"
    assert carried == {
        "AgentRole": {"Agent"},
        "WorkflowRole": {
            "Workflow if HasFunctions",
            "Provision unless HasFunctions",
            "VolumeKey if HasVolumeKey unless HasFunctions",
            "ImageKey if HasImageKey unless HasFunctions",
        },
        "RefreshRole": {"Refresh", "ScaleDown"},
        "RefreshFunctionRole": {"Refresh", "RefreshFunction", network},
        "ScaleDownFunctionRole": {"ScaleDown", "ScaleDownFunction", network},
        "BrokerFunctionRole": {"Provision", *keys, "BrokerFunction", network},
        "ListenerRole": {"Provision", *keys, "Listener"},
    }


def test_the_template_fits_the_limit_of_cloudformation():
    assert len((DEPLOY / "cloudformation.yml").read_bytes()) < MAX_TEMPLATE


def test_failed_invocations_are_not_retried_and_logs_go_to_the_log_group():
    """Checked in the template: the server supports neither."""
    resources = template()["Resources"]
    for name in ("Refresh", "ScaleDown", "Broker"):
        assert resources[f"{name}Invocations"]["Properties"]["MaximumRetryAttempts"] == 0
        assert resources[f"{name}Function"]["Properties"]["LoggingConfig"]["LogGroup"] == {"Ref": f"{name}Logs"}
