"""The CloudFormation template: table, queues, roles, scheduled functions and broker of one pool."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from remuda.adapters.aws.cloudwatch import NAMESPACE
from remuda.adapters.aws.dynamodb import items
from remuda.adapters.aws.dynamodb.schema import INDEXES, KEYS
from remuda.adapters.aws.launch import GROUP_RESOURCE, HOOK
from remuda.adapters.aws.sqs import ATTRIBUTES, queue_name
from remuda.aws_lambda.runtime import SETTINGS_VARIABLE
from remuda.config.declaration import Group, Setting, variable
from remuda.config.settings import BOUNDARY, ROLE_PATH, SETTINGS
from remuda.controlplane.demand.heartbeat import HEARTBEATS
from remuda.deployment.listener import (
    DEFAULT_LISTENER_IMAGE,
    DEFAULT_LISTENER_TYPE,
    MAX_LIFE_S,
    READY_TIMEOUT_S,
    ROOT_DEVICE,
    UPDATE_TIMEOUT_S,
    VOLUME_GIB,
    listener_user_data,
)
from remuda.deployment.policies import (
    AGENT_NAME,
    BROKER,
    CREDENTIAL,
    CREDENTIALS,
    DESCRIPTIONS,
    EC2,
    ENVIRONMENT,
    FUNCTIONS,
    IMAGE_KEY,
    LISTENER,
    NAME,
    SCHEDULED,
    STACK,
    VOLUME_KEY,
    attached,
    log_group,
    policies,
    settings_parameter,
)
from remuda.deployment.statements import VERSION, Policy, render
from remuda.domain.resources import DEFAULT_CLASSES, Architecture, ResourceClass
from remuda.domain.workflow_identity import NAME_FORM, OWNER_FORM, REPOSITORY_FORM
from remuda.ports.compute import POOL_TAG

Resource = dict[str, Any]

#: Placeholders of the policies to CloudFormation expressions.
PARAMETERS = {
    "<partition>": "${AWS::Partition}",
    "<region>": "${AWS::Region}",
    "<account>": "${AWS::AccountId}",
    "<pool>": "${Pool}",
    "<role-path>": "${RolePath}",
}
GITHUB = "token.actions.githubusercontent.com"
LOG_DAYS = 30
SCHEDULE = "rate(5 minutes)"
#: Timeout of a function in seconds, below the schedule's interval so that runs never overlap.
FUNCTION_TIMEOUT_S = 240
#: Memory of a function. CPU time grows with it, and loading the models of the AWS libraries needs a full CPU.
FUNCTION_MB = 1_024
#: Maximum age of an undelivered event in seconds, the minimum of EventBridge. The next event replaces it.
EVENT_AGE_S = 60
HANDLER = "remuda.aws_lambda.handler.handler"
BROKER_HANDLER = "remuda.aws_lambda.broker.handler"
#: Lambda's maximum: a provision may wait for new machines to boot.
BROKER_TIMEOUT_S = 900
#: One full CPU ("Configure Lambda function memory" in AWS' documentation): somebody waits for each request.
BROKER_MB = 1_769
HAS_FUNCTIONS = "HasFunctions"
HAS_URL = "HasFunctionUrl"
ALARMS = "Alarms"
HAS_SETS = "HasRunnerSets"
HAS_LISTENER = "HasListener"
SET_ALARMS = "RunnerSetAlarms"
HAS_VOLUME_KEY = "HasVolumeKey"
HAS_IMAGE_KEY = "HasImageKey"
HAS_FUNCTION_NETWORK = "HasFunctionNetwork"
HAS_BOUNDARY = "HasPermissionsBoundary"
HAS_ROLE_PATH = "HasRolePath"
#: Policies that exist only under a condition.
POLICY_CONDITIONS = {
    "volume-key": HAS_VOLUME_KEY,
    "image-key": HAS_IMAGE_KEY,
    "function-network": HAS_FUNCTION_NETWORK,
}
#: What a role needs that launches, as policies; some exist only under a condition.
LAUNCHING = ("provision", "volume-key", "image-key")
#: The property with the name of a resource. CloudFormation does not replace a resource that keeps its name ("Name type"
#: in its template reference): the update is rolled back.
NAMES = {
    "AWS::AutoScaling::AutoScalingGroup": "AutoScalingGroupName",
    "AWS::AutoScaling::LifecycleHook": "LifecycleHookName",
    "AWS::CloudWatch::Alarm": "AlarmName",
    "AWS::DynamoDB::Table": "TableName",
    "AWS::EC2::LaunchTemplate": "LaunchTemplateName",
    "AWS::Events::Rule": "Name",
    "AWS::IAM::InstanceProfile": "InstanceProfileName",
    "AWS::IAM::ManagedPolicy": "ManagedPolicyName",
    "AWS::IAM::Role": "RoleName",
    "AWS::Lambda::Function": "FunctionName",
    "AWS::Logs::LogGroup": "LogGroupName",
    "AWS::SQS::Queue": "QueueName",
    "AWS::SSM::Parameter": "Name",
}
#: Bad periods before an alarm, as the next run makes up for a single failure, and the periods that they may be among: a
#: command may run much less often than every period. In a row where nothing is as bad as a failure.
ALARM_AFTER, ALARM_WITHIN = 3, 12
#: Settings of the functions that are parameters of the stack.
STACK_SETTINGS = tuple(declared for declared in SETTINGS.values() if declared.is_parameter)
#: Parameters that contain the runner sets and the places of machines.
SETS, SUBNETS, GROUPS = (SETTINGS[name].parameter for name in ("runner_sets", "subnet_ids", "security_group_ids"))
VOLUME_KEY_PARAMETER = SETTINGS["volume_kms_key"].parameter
IMAGE_KEY_PARAMETER = "ImageKmsKey"
FUNCTION_SUBNETS = "FunctionSubnetIds"
AGENT_URL, AGENT_SHA256 = (SETTINGS[name].parameter for name in ("agent_url", "agent_sha256"))
TAGS = [{"Key": POOL_TAG, "Value": {"Ref": "Pool"}}]


def _with_parameters(text: str) -> str:
    for placeholder, value in PARAMETERS.items():
        text = text.replace(placeholder, value)
    return text


#: Placeholders that are never part of a longer text.
EXACT: dict[str, Any] = {
    CREDENTIAL: {"Fn::If": ["HasSecret", {"Ref": "GithubSecretArn"}, {"Fn::Sub": _with_parameters(CREDENTIALS)}]},
    ENVIRONMENT: {"Fn::If": ["HasEnvironment", {"Ref": "GithubEnvironment"}, {"Ref": "Pool"}]},
    VOLUME_KEY: {"Ref": VOLUME_KEY_PARAMETER},
    IMAGE_KEY: {"Ref": IMAGE_KEY_PARAMETER},
    # Whatever its name.
    STACK: {"Ref": "AWS::StackId"},
}


def substituted(text: str) -> Any:
    """The text as a CloudFormation expression. IAM policy variables (`${…}`) are escaped."""
    if text in EXACT:
        return EXACT[text]
    text = text.replace("${", "${!")
    changed = _with_parameters(text)
    return {"Fn::Sub": changed} if changed != text else text.replace("${!", "${")


def template(classes: Sequence[ResourceClass] = DEFAULT_CLASSES, *, issuer: str = GITHUB) -> dict[str, Any]:
    """`issuer` is the host and path of the issuer of OIDC tokens: keys of conditions cannot refer to a parameter."""
    made = policies(classes)
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": "Remuda: reusable EC2 runners for GitHub Actions. Table, queues, roles and functions of a pool.",
        "Metadata": _metadata(),
        "Parameters": _parameters(),
        "Rules": _rules(),
        "Conditions": _conditions(),
        "Resources": {
            "Table": _table(),
            **{_logical("Queue", each.name): _queue(each.name) for each in classes},
            **{_logical(policy.name, "Policy"): _managed(policy) for policy in made},
            "AgentRole": _role("agent", {"Service": EC2}, "sts:AssumeRole", ("agent",)),
            "AgentProfile": {
                "Type": "AWS::IAM::InstanceProfile",
                "Properties": {"InstanceProfileName": substituted(AGENT_NAME), "Roles": [{"Ref": "AgentRole"}]},
            },
            "WorkflowRole": _workflow_role(issuer, classes),
            # Only reviewed code on this branch may change the pool; other branches may only use it.
            "RefreshRole": _github_role(
                "refresh", issuer, _refresh_subjects(issuer), attached(SCHEDULED, classes), "HasRefresh"
            ),
            "Settings": _settings(),
            **{logs_id(who): _logs(who) for who in FUNCTIONS},
            **{name: resource for who in SCHEDULED for name, resource in _scheduled(who, classes).items()},
            **_broker(classes),
            **_listener(classes),
            **{_logical(who, "Alarm"): _alarm(who) for who in FUNCTIONS},
            "ProvisionAlarm": _provision_alarm(),
            "RunnerVersionAlarm": _runner_version_alarm(),
            "BudgetAlarm": _budget_alarm(),
            "ListenerAlarm": _listener_alarm(),
            "WaitingJobsAlarm": _waiting_jobs_alarm(),
            "ThrottlesAlarm": _throttles_alarm(),
        },
        "Outputs": _outputs(),
    }


def _is_set(parameter: str) -> dict[str, Any]:
    return {"Fn::Not": [{"Fn::Equals": [{"Ref": parameter}, ""]}]}


def _is_list_set(parameter: str) -> dict[str, Any]:
    """Whether a list parameter has an element that is not empty."""
    return {"Fn::Not": [{"Fn::Equals": [{"Fn::Join": ["", {"Ref": parameter}]}, ""]}]}


def _is_on_instance() -> dict[str, Any]:
    return {"Fn::Equals": [{"Ref": "Listener"}, "instance"]}


def _conditions() -> dict[str, Any]:
    return {
        "HasWorkflow": {"Fn::And": [_is_set("OidcProviderArn"), _is_list_set("Repositories")]},
        "HasRefresh": {"Fn::And": [_is_set("OidcProviderArn"), _is_set("RefreshRepository")]},
        "HasEnvironments": _is_list_set("Environments"),
        HAS_FUNCTIONS: {"Fn::And": [_is_set("CodeBucket"), _is_set("CodeKey")]},
        ALARMS: {"Fn::And": [{"Condition": HAS_FUNCTIONS}, _is_set("AlarmTopicArn")]},
        # Also if the list is empty: the listener removes the last set from GitHub.
        HAS_SETS: _is_set(SETS),
        HAS_LISTENER: {"Fn::And": [{"Condition": HAS_FUNCTIONS}, {"Condition": HAS_SETS}, _is_on_instance()]},
        SET_ALARMS: {"Fn::And": [{"Condition": ALARMS}, {"Condition": HAS_SETS}]},
        "HasSecret": _is_set("GithubSecretArn"),
        "IsApp": _is_set("GithubAppId"),
        HAS_VOLUME_KEY: _is_set(VOLUME_KEY_PARAMETER),
        HAS_IMAGE_KEY: _is_set(IMAGE_KEY_PARAMETER),
        HAS_FUNCTION_NETWORK: _is_set(FUNCTION_SUBNETS),
        HAS_BOUNDARY: _is_set("PermissionsBoundary"),
        HAS_ROLE_PATH: {"Fn::Not": [{"Fn::Equals": [{"Ref": "RolePath"}, "/"]}]},
        "HasEnvironment": _is_set("GithubEnvironment"),
        # Without an image the functions leave the stored configuration as it is.
        "Configures": _is_set("Ami"),
        "Reserves": {"Fn::Equals": [{"Ref": "ReserveConcurrency"}, "true"]},
        "LimitsBroker": _is_set("BrokerConcurrency"),
        HAS_URL: {"Fn::And": [{"Condition": HAS_FUNCTIONS}, {"Fn::Equals": [{"Ref": "FunctionUrl"}, "true"]}]},
        "ScalesDown": {"Fn::Equals": [{"Ref": "ScaleDown"}, "true"]},
    }


def _rules() -> dict[str, Any]:
    """Checks of the parameters before any resource is created."""
    required = {
        "GithubSecretArn": "The functions need a GitHub credential. Set GithubSecretArn.",
        "GithubScope": "The functions need the scope of the runners. Set GithubScope.",
    }
    return {
        "Functions": {
            "RuleCondition": _is_set("CodeBucket"),
            "Assertions": [
                {"Assert": _is_set(name), "AssertDescription": message} for name, message in required.items()
            ],
        },
        "Instances": {
            "RuleCondition": _is_set("Ami"),
            "Assertions": [{"Assert": _is_set(SUBNETS), "AssertDescription": "Ami requires SubnetIds."}],
        },
        "FunctionNetwork": {
            "RuleCondition": _is_set(FUNCTION_SUBNETS),
            "Assertions": [{"Assert": _is_set(GROUPS), "AssertDescription": f"{FUNCTION_SUBNETS} requires {GROUPS}."}],
        },
        "Listener": {
            "RuleCondition": {"Fn::And": [_is_set("CodeBucket"), _is_set(SETS), _is_on_instance()]},
            "Assertions": [
                {
                    "Assert": _is_set(name),
                    "AssertDescription": f"The listener of RunnerSets requires {name}, or Listener=none.",
                }
                for name in (AGENT_URL, AGENT_SHA256, SUBNETS, GROUPS)
            ],
        },
    }


def _without_checks(*names: str) -> dict[str, Any]:
    """Metadata that disables checks of cfn-lint."""
    return {"cfn-lint": {"config": {"ignore_checks": list(names)}}}


def _metadata() -> dict[str, Any]:
    """Groups of the parameters in the CloudFormation console, and settings of the linter."""
    groups = {
        "Pool": ["Pool", "PermissionsBoundary", "RolePath"],
        "Workflows": ["OidcProviderArn", "Repositories", "Environments", "RefreshRepository", "Branch"],
        "Functions": [*_function_parameters(), IMAGE_KEY_PARAMETER],
        "Broker": [*_broker_parameters(), *(item.parameter for item in STACK_SETTINGS if item.group is Group.BROKER)],
        "Listener of runner sets": list(_listener_parameters()),
        "Settings of refresh": [
            item.parameter for item in STACK_SETTINGS if item.group not in {Group.SCALE_DOWN, Group.BROKER}
        ],
        "Settings of scale-down": [item.parameter for item in STACK_SETTINGS if item.group is Group.SCALE_DOWN],
    }
    return {
        # Security groups are an empty list by default, and rules require one where they are used. An image may be
        # resolve:ssm:NAME, which the type of parameters for images refuses.
        **_without_checks("W1033", "W2506"),
        "AWS::CloudFormation::Interface": {
            "ParameterGroups": [{"Label": {"default": label}, "Parameters": names} for label, names in groups.items()]
        },
    }


def _parameters() -> dict[str, Any]:
    return {
        "Pool": {
            "Type": "String",
            "Default": "default",
            "AllowedPattern": "[a-z0-9-]{1,20}",
            "Description": "Name of the pool.",
        },
        "OidcProviderArn": {
            "Type": "String",
            "Default": "",
            "Description": "ARN of GitHub's OIDC provider. If empty, no roles for workflows are created.",
        },
        "Repositories": {
            "Type": "CommaDelimitedList",
            "Default": "",
            "AllowedPattern": f"({REPOSITORY_FORM})?",
            "Description": (
                "Repositories whose workflows may use the pool, separated by commas: owner/name, owner/* for all "
                "repositories of an organisation, or owner@id/name@id and owner@id/* for immutable subject claims."
            ),
        },
        "Environments": {
            "Type": "CommaDelimitedList",
            "Default": "",
            "AllowedPattern": "[^*?:,]*",
            "Description": (
                "GitHub environments whose jobs may use the pool, separated by commas. If empty, all jobs of the "
                "repositories may."
            ),
        },
        "RefreshRepository": {
            "Type": "String",
            "Default": "",
            "AllowedPattern": f"({OWNER_FORM}/{NAME_FORM})?",
            "Description": "Repository (owner/name, owner@id/name@id) whose workflows may run refresh and scale-down.",
        },
        "Branch": {
            "Type": "String",
            "Default": "main",
            "AllowedPattern": "[A-Za-z0-9_./-]+",
            "Description": "Branch of RefreshRepository whose workflows may run refresh and scale-down.",
        },
        "PermissionsBoundary": _text(
            "ARN of the policy that limits every role of the pool, as organizations require it.",
            AllowedPattern=f"({BOUNDARY.pattern})?",
        ),
        "RolePath": _text(
            "Path of the roles of the pool. Fixed when the stack is created: IAM cannot move a role.",
            "/",
            AllowedPattern=ROLE_PATH.pattern,
        ),
        **_function_parameters(),
        **_broker_parameters(),
        **_listener_parameters(),
        IMAGE_KEY_PARAMETER: _text(
            "ARN of the KMS key of encrypted images, if it is not that of the volumes: a key of the account that "
            "shares the images, for example.",
            AllowedPattern="(arn:[a-z-]+:kms:[a-z0-9-]+:[0-9]{12}:key/.+)?",
        ),
        **{declared.parameter: _setting(declared) for declared in STACK_SETTINGS},
    }


def _text(what: str, default: str = "", **more: Any) -> dict[str, Any]:
    return {"Type": "String", "Default": default, **more, "Description": what}


def _function_parameters() -> dict[str, Any]:
    return {
        "CodeBucket": _text(
            "S3 bucket with the code of the functions. If empty, no functions and schedules are created."
        ),
        "CodeKey": _text("Key of remuda-lambda.zip in the bucket ('make lambda' builds it).", "remuda-lambda.zip"),
        "Architecture": _text(
            "Architecture that the code was built for.", "x86_64", AllowedValues=[each.value for each in Architecture]
        ),
        "Runtime": _text(
            "Python version that the code was built for.",
            "python3.13",
            AllowedValues=["python3.11", "python3.12", "python3.13"],
        ),
        "GithubSecretArn": _text(
            "ARN of the secret with the GitHub token, or with the private key of the GitHub App if GithubAppId is set.",
            AllowedPattern="(arn:[a-z-]+:secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:.+)?",
        ),
        "ScaleDown": _text("Whether scale-down runs on its schedule.", "true", AllowedValues=["true", "false"]),
        "AlarmTopicArn": _text(
            "SNS topic for alarms: functions that fail repeatedly, a runner version that GitHub refuses soon, a silent "
            "listener, and jobs of runner sets that wait too long. "
            "If empty, no alarms are created.",
            AllowedPattern="(arn:[a-z-]+:sns:[a-z0-9-]+:[0-9]{12}:.+)?",
        ),
        FUNCTION_SUBNETS: _text(
            "Subnets of the functions, separated by commas, in the VPC of SecurityGroupIds and with a route to the "
            "internet through a NAT: GitHub then sees the addresses of the NAT. If empty, the functions are outside of "
            "any VPC, and their addresses change.",
            AllowedPattern="(subnet-[0-9a-f]+(,subnet-[0-9a-f]+)*)?",
        ),
        "ReserveConcurrency": _text(
            "Whether each scheduled function reserves one of the account's concurrent executions.",
            "false",
            AllowedValues=["true", "false"],
        ),
    }


def _broker_parameters() -> dict[str, Any]:
    return {
        "FunctionUrl": _text(
            "Whether the broker has a public URL, so that workflows need no AWS credentials. It requires the same OIDC "
            "token of the workflow as without URL.",
            "false",
            AllowedValues=["true", "false"],
        ),
        "BrokerConcurrency": _text(
            "Maximum number of concurrent requests to the broker, reserved from the account's concurrent executions. "
            "Each waiting workflow needs two. If empty, only the limit of the account applies.",
            AllowedPattern="([1-9][0-9]{0,4})?",
        ),
    }


def _listener_parameters() -> dict[str, Any]:
    return {
        "Listener": _text(
            "Where the listener of RunnerSets runs: on its own instance, which exists if RunnerSets is set "
            "(also as []), or none in this stack.",
            "instance",
            AllowedValues=["instance", "none"],
        ),
        "ListenerInstanceType": _text(
            "Instance type of the listener.", DEFAULT_LISTENER_TYPE, AllowedPattern=r"[a-z0-9-]+\.[a-z0-9-]+"
        ),
        "ListenerAmi": _text(
            "Image of the listener: Ubuntu 24.04 for the architecture of ListenerInstanceType, as an id or as "
            "resolve:ssm:NAME.",
            DEFAULT_LISTENER_IMAGE,
            AllowedPattern="ami-[0-9a-f]+|resolve:ssm:.+",
        ),
    }


def _setting(declared: Setting) -> dict[str, Any]:
    """The parameter of a setting. Empty means the default of the function."""
    limits: dict[str, Any] = {}
    if declared.kind.choices:
        limits["AllowedValues"] = ["", *declared.kind.choices]
    elif declared.kind.is_number:
        limits["AllowedPattern"] = "[0-9.]*[smhdw]?" if declared.kind.is_duration else "[0-9.]*"
    return _text(declared.full_description, **limits)


def _table() -> Resource:
    names = dict.fromkeys(name for keys in (KEYS, *INDEXES.values()) for name in keys)
    return {
        "Type": "AWS::DynamoDB::Table",
        # Deleted with the stack, but never by an update: instances with these records may still run.
        "DeletionPolicy": "Delete",
        "UpdateReplacePolicy": "Retain",
        "Properties": {
            "TableName": substituted(NAME),
            "BillingMode": "PAY_PER_REQUEST",
            "AttributeDefinitions": [{"AttributeName": name, "AttributeType": "S"} for name in names],
            "KeySchema": _schema(KEYS),
            "GlobalSecondaryIndexes": [
                {"IndexName": name, "KeySchema": _schema(keys), "Projection": {"ProjectionType": "ALL"}}
                for name, keys in INDEXES.items()
            ],
            "TimeToLiveSpecification": {"AttributeName": items.TTL, "Enabled": True},
            "Tags": TAGS,
        },
    }


def _schema(keys: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"AttributeName": name, "KeyType": kind} for name, kind in keys.items()]


def _queue(resource_class: str) -> Resource:
    attributes = {name: int(value) for name, value in ATTRIBUTES.items()}
    return {
        "Type": "AWS::SQS::Queue",
        # Not retained: refresh publishes idle instances again.
        "DeletionPolicy": "Delete",
        "UpdateReplacePolicy": "Delete",
        "Properties": {
            "QueueName": substituted(queue_name(NAME, resource_class)),
            **attributes,
            "SqsManagedSseEnabled": True,
            "Tags": TAGS,
        },
    }


def _managed(policy: Policy) -> Resource:
    made: Resource = {
        "Type": "AWS::IAM::ManagedPolicy",
        "Properties": {
            "ManagedPolicyName": substituted(f"{NAME}-{policy.name}"),
            **({"Description": DESCRIPTIONS[policy.name]} if policy.name in DESCRIPTIONS else {}),
            "PolicyDocument": render(policy.document(), substituted),
        },
    }
    condition = POLICY_CONDITIONS.get(policy.name)
    return _only_if(condition, made) if condition else made


def _policy_arn(name: str) -> dict[str, Any]:
    arn = {"Ref": _logical(name, "Policy")}
    condition = POLICY_CONDITIONS.get(name)
    return {"Fn::If": [condition, arn, {"Ref": "AWS::NoValue"}]} if condition else arn


def _role(
    name: str,
    principal: Mapping[str, Any],
    action: str,
    policy_names: Sequence[str],
    conditions: Mapping[str, Any] | None = None,
) -> Resource:
    trust: dict[str, Any] = {"Effect": "Allow", "Principal": dict(principal), "Action": action}
    if conditions:
        trust["Condition"] = dict(conditions)
    return {
        "Type": "AWS::IAM::Role",
        "Properties": {
            # Fixed names, because policies refer to the role of the agent by name.
            "RoleName": substituted(f"{NAME}-{name}"),
            # Not written as the default: for CloudFormation, to add a path is to replace the role.
            "Path": {"Fn::If": [HAS_ROLE_PATH, {"Ref": "RolePath"}, {"Ref": "AWS::NoValue"}]},
            "PermissionsBoundary": {
                "Fn::If": [HAS_BOUNDARY, {"Ref": "PermissionsBoundary"}, {"Ref": "AWS::NoValue"}],
            },
            "AssumeRolePolicyDocument": {"Version": VERSION, "Statement": [trust]},
            "ManagedPolicyArns": [_policy_arn(policy) for policy in policy_names],
            "Tags": TAGS,
        },
    }


def _for_each(parameter: str, before: str, after: str) -> dict[str, Any]:
    """A list of texts, one per element of a list parameter, with a text before and after it."""
    joined = {"Fn::Join": [f"{after},{before}", {"Ref": parameter}]}
    return {"Fn::Split": [",", {"Fn::Join": ["", [before, joined, after]]}]}


def _workflow_subjects(issuer: str) -> Mapping[str, Any]:
    """Conditions on the subject of GitHub's token: `repo:owner/name:` and a branch, tag, event or environment.

    Both operators must hold. The second one has another name because a condition has each operator once.
    """
    of_environments = {"Fn::If": ["HasEnvironments", _for_each("Environments", "repo:*:environment:", ""), "repo:*"]}
    return {
        "StringLike": {f"{issuer}:sub": _for_each("Repositories", "repo:", ":*")},
        "StringLikeIfExists": {f"{issuer}:sub": of_environments},
    }


def _workflow_role(issuer: str, classes: Sequence[ResourceClass]) -> Resource:
    role = _github_role("workflow", issuer, _workflow_subjects(issuer), (), "HasWorkflow")
    # Without functions there is no broker, and workflows provision in direct mode.
    direct = [{"Fn::If": [HAS_FUNCTIONS, {"Ref": "WorkflowPolicy"}, {"Ref": "ProvisionPolicy"}]}]
    _, *more = attached(LAUNCHING, classes)
    direct += [{"Fn::If": [HAS_FUNCTIONS, {"Ref": "AWS::NoValue"}, _policy_arn(name)]} for name in more]
    role["Properties"]["ManagedPolicyArns"] = direct
    return role


def _refresh_subjects(issuer: str) -> Mapping[str, Any]:
    return {"StringLike": {f"{issuer}:sub": {"Fn::Sub": "repo:${RefreshRepository}:ref:refs/heads/${Branch}"}}}


def _github_role(
    name: str, issuer: str, subjects: Mapping[str, Any], policy_names: Sequence[str], condition: str
) -> Resource:
    conditions = {"StringEquals": {f"{issuer}:aud": "sts.amazonaws.com"}, **subjects}
    role = _role(
        name, {"Federated": {"Ref": "OidcProviderArn"}}, "sts:AssumeRoleWithWebIdentity", policy_names, conditions
    )
    return _only_if(condition, role)


def _settings() -> Resource:
    """The settings of the functions, one variable per line: Lambda limits the environment of a function to 4 KB."""
    lines = [f"{variable(declared.name)}=${{{declared.parameter}}}" for declared in STACK_SETTINGS]
    # A text cannot refer to a list parameter itself.
    lists = {name: {"Fn::Join": [",", {"Ref": name}]} for name in ("Repositories", "Environments")}
    lines += [f"{variable(name.lower())}=${{{name}}}" for name in lists]
    settings: Resource = {
        "Type": "AWS::SSM::Parameter",
        "Properties": {
            "Name": substituted(settings_parameter()),
            "Description": "Settings of the functions, made from the parameters of the stack.",
            "Type": "String",
            # Up to 4 KB are free, up to 8 KB cost a few cents per month.
            "Tier": "Intelligent-Tiering",
            "Value": {"Fn::Sub": ["\n".join(lines), lists]},
        },
    }
    return _only_if(HAS_FUNCTIONS, settings)


def logs_id(who: str) -> str:
    """The logical id of a log group."""
    return _logical(who, "Logs")


def _logs(who: str) -> Resource:
    # Created here to set the retention: a group that Lambda creates never expires its events.
    return {
        "Type": "AWS::Logs::LogGroup",
        "DeletionPolicy": "Delete",
        "UpdateReplacePolicy": "Delete",
        "Properties": {"LogGroupName": substituted(log_group(who)), "RetentionInDays": LOG_DAYS},
    }


def _only_if(condition: str, resource: Resource) -> Resource:
    return {"Type": resource["Type"], "Condition": condition, **resource}


def _function(
    who: str,
    handler: str,
    description: str,
    policy_names: Sequence[str],
    *,
    memory_mb: int,
    timeout_s: int,
    reserved: Any,
) -> dict[str, Resource]:
    """A function and its role."""
    role, function = (_logical(who, kind) for kind in ("FunctionRole", "Function"))
    service = {"Service": "lambda.amazonaws.com"}
    return {
        role: _role(
            f"{who}-function", service, "sts:AssumeRole", (*policy_names, f"{who}-function", "function-network")
        ),
        function: {
            "Type": "AWS::Lambda::Function",
            "Properties": {
                "FunctionName": substituted(f"{NAME}-{who}"),
                "Description": description,
                "Code": {"S3Bucket": {"Ref": "CodeBucket"}, "S3Key": {"Ref": "CodeKey"}},
                "Handler": handler,
                "Runtime": {"Ref": "Runtime"},
                "Architectures": [{"Ref": "Architecture"}],
                "Role": {"Fn::GetAtt": [role, "Arn"]},
                "MemorySize": memory_mb,
                "Timeout": timeout_s,
                "ReservedConcurrentExecutions": reserved,
                "VpcConfig": {
                    "Fn::If": [
                        HAS_FUNCTION_NETWORK,
                        {
                            "SubnetIds": {"Fn::Split": [",", {"Ref": FUNCTION_SUBNETS}]},
                            "SecurityGroupIds": {"Fn::Split": [",", {"Ref": GROUPS}]},
                        },
                        {"Ref": "AWS::NoValue"},
                    ]
                },
                "LoggingConfig": {"LogGroup": {"Ref": logs_id(who)}, "LogFormat": "Text"},
                "Environment": {"Variables": _variables(who)},
                "Tags": TAGS,
            },
        },
        # No retries and no queue: the next scheduled event or the waiting workflow makes up for a failed one.
        _logical(who, "Invocations"): {
            "Type": "AWS::Lambda::EventInvokeConfig",
            "Properties": {
                "FunctionName": {"Ref": function},
                "Qualifier": "$LATEST",
                "MaximumRetryAttempts": 0,
                "MaximumEventAgeInSeconds": EVENT_AGE_S,
            },
        },
    }


def _scheduled(who: str, classes: Sequence[ResourceClass]) -> dict[str, Resource]:
    """A command every five minutes: a function, its role, and the rule that invokes it."""
    function, rule = (_logical(who, kind) for kind in ("Function", "Schedule"))
    made = {
        **_function(
            who,
            HANDLER,
            f"remuda {who}",
            attached((who,), classes),
            memory_mb=FUNCTION_MB,
            timeout_s=FUNCTION_TIMEOUT_S,
            reserved={"Fn::If": ["Reserves", 1, {"Ref": "AWS::NoValue"}]},
        ),
        rule: {
            "Type": "AWS::Events::Rule",
            "Properties": {
                "Name": substituted(f"{NAME}-{who}"),
                "Description": f"remuda {who}, every five minutes",
                "ScheduleExpression": SCHEDULE,
                "State": _state(who),
                "Targets": [
                    {
                        "Id": who,
                        "Arn": {"Fn::GetAtt": [function, "Arn"]},
                        "Input": _input(who),
                        "RetryPolicy": {"MaximumRetryAttempts": 0, "MaximumEventAgeInSeconds": EVENT_AGE_S},
                    }
                ],
            },
        },
        _logical(who, "Permission"): {
            "Type": "AWS::Lambda::Permission",
            "Properties": {
                "Action": "lambda:InvokeFunction",
                "FunctionName": {"Ref": function},
                "Principal": "events.amazonaws.com",
                "SourceArn": {"Fn::GetAtt": [rule, "Arn"]},
            },
        },
    }
    return {name: _only_if(HAS_FUNCTIONS, resource) for name, resource in made.items()}


def _broker(classes: Sequence[ResourceClass]) -> dict[str, Resource]:
    """The broker, and its public URL, which anyone may call: the broker itself verifies the caller's token.

    Since October 2025 a URL needs both permissions ("Control access to Lambda function URLs" in AWS' documentation).
    """
    function = {"Ref": _logical(BROKER, "Function")}
    made = _function(
        BROKER,
        BROKER_HANDLER,
        "remuda provision and release for workflows",
        attached(LAUNCHING, classes),
        memory_mb=BROKER_MB,
        timeout_s=BROKER_TIMEOUT_S,
        reserved={"Fn::If": ["LimitsBroker", {"Ref": "BrokerConcurrency"}, {"Ref": "AWS::NoValue"}]},
    )
    public: Resource = {"Type": "AWS::Lambda::Permission", "Properties": {"FunctionName": function, "Principal": "*"}}
    url: dict[str, Resource] = {
        "BrokerUrl": {"Type": "AWS::Lambda::Url", "Properties": {"TargetFunctionArn": function, "AuthType": "NONE"}},
        "BrokerUrlPermission": {
            **public,
            "Properties": {
                **public["Properties"],
                "Action": "lambda:InvokeFunctionUrl",
                "FunctionUrlAuthType": "NONE",
            },
        },
        "BrokerUrlInvokePermission": {
            **public,
            "Properties": {
                **public["Properties"],
                "Action": "lambda:InvokeFunction",
                # Only through the URL: without it, anyone with an AWS account could invoke the function.
                "InvokedViaFunctionUrl": True,
            },
        },
    }
    return {
        **{name: _only_if(HAS_FUNCTIONS, resource) for name, resource in made.items()},
        **{name: _only_if(HAS_URL, resource) for name, resource in url.items()},
    }


# Listener -----------------------------------------------------------------------------------------------------------


def _listener(classes: Sequence[ResourceClass]) -> dict[str, Resource]:
    """The listener on its own instance, which an Auto Scaling group replaces if it fails.

    During a replacement there may be two: the lease lets one of them serve the sets. Template and instance do not have
    the tag of the pool: provision may launch with tagged templates, and refresh ends tagged instances without a record.
    """
    name = substituted(f"{NAME}-{LISTENER}")
    named = {"Key": "Name", "Value": name}
    made: dict[str, Resource] = {
        "ListenerRole": _role(LISTENER, {"Service": EC2}, "sts:AssumeRole", attached((*LAUNCHING, LISTENER), classes)),
        "ListenerProfile": {
            "Type": "AWS::IAM::InstanceProfile",
            "Properties": {"InstanceProfileName": name, "Roles": [{"Ref": "ListenerRole"}]},
        },
        "ListenerTemplate": {
            "Type": "AWS::EC2::LaunchTemplate",
            "Properties": {
                "LaunchTemplateName": name,
                "LaunchTemplateData": {
                    "ImageId": {"Ref": "ListenerAmi"},
                    "InstanceType": {"Ref": "ListenerInstanceType"},
                    "IamInstanceProfile": {"Name": {"Ref": "ListenerProfile"}},
                    "SecurityGroupIds": {"Fn::Split": [",", {"Ref": GROUPS}]},
                    "MetadataOptions": {
                        "HttpEndpoint": "enabled",
                        "HttpTokens": "required",
                        "HttpPutResponseHopLimit": 1,
                    },
                    "BlockDeviceMappings": [
                        {
                            "DeviceName": ROOT_DEVICE,
                            "Ebs": {"Encrypted": True, "VolumeType": "gp3", "VolumeSize": VOLUME_GIB},
                        }
                    ],
                    "TagSpecifications": [{"ResourceType": "volume", "Tags": [named]}],
                    "UserData": {"Fn::Base64": _listener_user_data()},
                },
            },
        },
        GROUP_RESOURCE: {
            "Type": "AWS::AutoScaling::AutoScalingGroup",
            # The new instance starts as a standby, before the old one ends. Without its signal the update is rolled
            # back. CloudFormation waits for signals only, not for the hook.
            "UpdatePolicy": {
                "AutoScalingRollingUpdate": {
                    "MinInstancesInService": 1,
                    "MaxBatchSize": 1,
                    "WaitOnResourceSignals": True,
                    "PauseTime": f"PT{UPDATE_TIMEOUT_S // 60}M",
                }
            },
            "Properties": {
                "AutoScalingGroupName": name,
                "MinSize": "1",
                "MaxSize": "2",
                "DesiredCapacity": "1",
                "VPCZoneIdentifier": {"Fn::Split": [",", {"Ref": SUBNETS}]},
                "LaunchTemplate": {
                    "LaunchTemplateId": {"Ref": "ListenerTemplate"},
                    "Version": {"Fn::GetAtt": ["ListenerTemplate", "LatestVersionNumber"]},
                },
                "HealthCheckType": "EC2",
                "MaxInstanceLifetime": MAX_LIFE_S,
                "InstanceMaintenancePolicy": {"MinHealthyPercentage": 100, "MaxHealthyPercentage": 200},
                "Tags": [{**named, "PropagateAtLaunch": True}],
            },
        },
        # For all other replacements. Not a part of the group: its first instance has no predecessor to keep.
        "ListenerHook": {
            "Type": "AWS::AutoScaling::LifecycleHook",
            "Properties": {
                "AutoScalingGroupName": {"Ref": GROUP_RESOURCE},
                "LifecycleHookName": HOOK,
                "LifecycleTransition": "autoscaling:EC2_INSTANCE_LAUNCHING",
                "DefaultResult": "ABANDON",
                "HeartbeatTimeout": READY_TIMEOUT_S,
            },
        },
    }
    return {name: _only_if(HAS_LISTENER, resource) for name, resource in made.items()}


def _listener_user_data() -> dict[str, Any]:
    references = {"pool": "Pool", "agent_url": AGENT_URL, "agent_sha256": AGENT_SHA256, "settings": "Settings"}
    secret = {"Ref": "GithubSecretArn"}
    credentials = {
        "github_token": {"Fn::If": ["IsApp", "", secret]},
        "github_app_key": {"Fn::If": ["IsApp", secret, ""]},
    }
    keys = {**references, **{name: _logical(name) for name in credentials}}
    values = {name: f"${{{key}}}" for name, key in keys.items()}
    # The group itself refers to this text.
    values |= {"group": _with_parameters(f"{NAME}-{LISTENER}"), "stack": "${AWS::StackId}"}
    text = listener_user_data(values.__getitem__, lambda text: text.replace("${", "${!"))
    return {"Fn::Sub": [text, {keys[name]: value for name, value in credentials.items()}]}


def _alarm(who: str) -> Resource:
    return _alarm_on(
        who,
        "The broker crashes; its log contains the error."
        if who == BROKER
        else f"remuda {who} fails; its log contains the error.",
        _metric("AWS/Lambda", "Errors", {"FunctionName": {"Ref": _logical(who, "Function")}}),
        # A missing refresh is as bad as a failed one; scale-down may be disabled, and the broker waits for workflows.
        missing="breaching" if who == "refresh" else "notBreaching",
    )


def _provision_alarm() -> Resource:
    return _metric_alarm(
        "provision",
        "Provisions fail through no fault of the workflows; the log of the broker contains the errors.",
        metric="Failed",
        command="provision",
    )


def _runner_version_alarm() -> Resource:
    return _metric_alarm(
        "runner-version",
        "GitHub refuses the pool's version of the actions runner soon; remuda status says when and what to do.",
        metric="RunnerVersionWarnings",
        command="refresh",
    )


def _budget_alarm() -> Resource:
    return _metric_alarm(
        "budget",
        "80 % of the pool's budget for this month are spent, or all of it; remuda budget says how much.",
        metric="BudgetWarnings",
        command="refresh",
    )


def _listener_alarm() -> Resource:
    return _metric_alarm(
        LISTENER,
        "The listener of the runner sets is silent; its machine's console has its log.",
        metric=HEARTBEATS,
        command="listen",
        missing="breaching",
        condition=SET_ALARMS,
        period_s=60,
        comparison="LessThanThreshold",
    )


def _waiting_jobs_alarm() -> Resource:
    return _metric_alarm(
        "waiting-jobs",
        "Jobs wait for a runner for more than five minutes; remuda status says which, and why.",
        metric="JobsWaitingTooLong",
        command="refresh",
    )


def _metric_alarm(
    name: str,
    description: str,
    *,
    metric: str,
    command: str,
    missing: str = "notBreaching",
    period_s: int = 300,
    **more: str,
) -> Resource:
    """On a metric that a command of the pool writes."""
    watched = {**_metric(NAMESPACE, metric, {"Pool": {"Ref": "Pool"}, "Command": command}), "Period": period_s}
    return _alarm_on(name, description, watched, missing=missing, **more)


def _throttles_alarm() -> Resource:
    """Of the broker: nothing else notices it. A refresh that does not run has an alarm."""
    return _alarm_on(
        "throttles",
        "Lambda refuses calls of the broker: too many at a time for the account, or for what is reserved.",
        _metric("AWS/Lambda", "Throttles", {"FunctionName": {"Ref": _logical(BROKER, "Function")}}),
    )


def _metric(namespace: str, name: str, dimensions: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "Namespace": namespace,
        "MetricName": name,
        "Dimensions": [{"Name": key, "Value": value} for key, value in dimensions.items()],
        "Statistic": "Sum",
        "Period": 300,
    }


def _alarm_on(
    name: str,
    description: str,
    watched: Mapping[str, Any],
    *,
    missing: str = "notBreaching",
    condition: str = ALARMS,
    comparison: str = "GreaterThanOrEqualToThreshold",
) -> Resource:
    """`watched` are the properties with the metric."""
    alarm: Resource = {
        "Type": "AWS::CloudWatch::Alarm",
        "Properties": {
            "AlarmName": substituted(f"{NAME}-{name}"),
            "AlarmDescription": description,
            **watched,
            "EvaluationPeriods": ALARM_AFTER if missing == "breaching" else ALARM_WITHIN,
            "DatapointsToAlarm": ALARM_AFTER,
            "Threshold": 1,
            "ComparisonOperator": comparison,
            "TreatMissingData": missing,
            "AlarmActions": [{"Ref": "AlarmTopicArn"}],
            "OKActions": [{"Ref": "AlarmTopicArn"}],
        },
    }
    return _only_if(condition, alarm)


def _state(who: str) -> Any:
    return {"Fn::If": ["ScalesDown", "ENABLED", "DISABLED"]} if who == "scale-down" else "ENABLED"


def _input(who: str) -> Any:
    plain = json.dumps({"command": who})
    if who != "refresh":
        return plain
    return {"Fn::If": ["Configures", plain, json.dumps({"command": who, "sweep_only": True})]}


def _variables(who: str) -> dict[str, Any]:
    secret = {"Ref": "GithubSecretArn"}
    shared = {
        "REMUDA_BACKEND": "aws",
        "REMUDA_POOL": {"Ref": "Pool"},
        # The secret contains either a token or a private key; an empty variable counts as unset.
        variable("github_token"): {"Fn::If": ["IsApp", "", secret]},
        variable("github_app_key"): {"Fn::If": ["IsApp", secret, ""]},
        variable("iam_instance_profile"): {"Ref": "AgentProfile"},
        SETTINGS_VARIABLE: {"Ref": "Settings"},
    }
    if who != "scale-down":
        return shared
    return {
        **shared,
        "ENVIRONMENT": EXACT[ENVIRONMENT],
    }


def _outputs() -> dict[str, Any]:
    def output(what: str, value: Any, **more: str) -> dict[str, Any]:
        return {"Description": what, **more, "Value": value}

    def role(name: str) -> Any:
        return {"Fn::GetAtt": [name, "Arn"]}

    return {
        "TableName": output("Name of the table.", {"Ref": "Table"}),
        "AgentProfileName": output("Value for iam-instance-profile.", {"Ref": "AgentProfile"}),
        "WorkflowPolicyArn": output("Policy for your own role.", {"Ref": "WorkflowPolicy"}),
        "ProvisionPolicyArn": output("Policy for your own role in direct mode.", {"Ref": "ProvisionPolicy"}),
        "RefreshPolicyArn": output("Policy for your own role.", {"Ref": "RefreshPolicy"}),
        "VolumeKeyPolicyArn": output("Policy for your own role.", {"Ref": "VolumeKeyPolicy"}, Condition=HAS_VOLUME_KEY),
        "WorkflowRoleArn": output("Role for workflows.", role("WorkflowRole"), Condition="HasWorkflow"),
        "RefreshRoleArn": output("Role for a scheduled workflow.", role("RefreshRole"), Condition="HasRefresh"),
        "ScaleDownPolicyArn": output("Policy for your own role.", {"Ref": "ScaleDownPolicy"}),
        "ListenerPolicyArn": output("Policy for your own role, with that of provision.", {"Ref": "ListenerPolicy"}),
        "ListenerGroupName": output(
            "Auto Scaling group of the listener.", {"Ref": "ListenerGroup"}, Condition=HAS_LISTENER
        ),
        **{
            _logical(who, "FunctionName"): output(
                f"Runs {who} every five minutes.", {"Ref": _logical(who, "Function")}, Condition=HAS_FUNCTIONS
            )
            for who in SCHEDULED
        },
        "BrokerName": output("Function for workflows.", {"Ref": "BrokerFunction"}, Condition=HAS_FUNCTIONS),
        "BrokerUrl": output("Value for broker-url.", {"Fn::GetAtt": ["BrokerUrl", "FunctionUrl"]}, Condition=HAS_URL),
    }


def _logical(*names: str) -> str:
    words = (word for name in names for word in re.split(r"[^A-Za-z0-9]+", name))
    return "".join(word[:1].upper() + word[1:] for word in words)
