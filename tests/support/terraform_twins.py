"""Resources of the Terraform module in the form of the CloudFormation template, so that the two can be compared."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from remuda.deployment.template import GITHUB, NAMES, template
from remuda.domain.resources import DEFAULT_CLASSES, ResourceClass
from tests.support.cloudformation import EvaluatedStack
from tests.support.terraform import TerraformModule

ACCOUNT, REGION = "123456789012", "eu-central-1"
PSEUDO = {"AWS::Partition": "aws", "AWS::Region": REGION, "AWS::AccountId": ACCOUNT}
#: The stack in the policy of the listener. The module, which has no stack, names every one with the name of the pool.
STACK = f"arn:aws:cloudformation:{REGION}:{ACCOUNT}:stack/remuda-{{}}/*"
#: Forms of ARNs, with the name of the resource.
ARNS = {
    "AWS::DynamoDB::Table": f"arn:aws:dynamodb:{REGION}:{ACCOUNT}:table/{{}}",
    "AWS::Events::Rule": f"arn:aws:events:{REGION}:{ACCOUNT}:rule/{{}}",
    "AWS::IAM::ManagedPolicy": f"arn:aws:iam::{ACCOUNT}:policy/{{}}",
    "AWS::IAM::Role": f"arn:aws:iam::{ACCOUNT}:role/{{}}",
    "AWS::Lambda::Function": f"arn:aws:lambda:{REGION}:{ACCOUNT}:function:{{}}",
}
#: The property that tells a resource from others of its type.
IDENTITIES = {
    **NAMES,
    "AWS::Lambda::EventInvokeConfig": "FunctionName",
    "AWS::Lambda::Url": "TargetFunctionArn",
}
Properties = dict[str, Any]


# Twins: the properties in CloudFormation of a resource of Terraform -------------------------------------------------


def _tags(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def _keys(hash_key: str, range_key: str) -> list[dict[str, str]]:
    return [{"AttributeName": hash_key, "KeyType": "HASH"}, {"AttributeName": range_key, "KeyType": "RANGE"}]


def _table(found: Mapping[str, Any]) -> Properties:
    (ttl,) = found["ttl"]
    return {
        "TableName": found["name"],
        "BillingMode": found["billing_mode"],
        "AttributeDefinitions": [
            {"AttributeName": each["name"], "AttributeType": each["type"]} for each in found["attribute"]
        ],
        "KeySchema": _keys(found["hash_key"], found["range_key"]),
        "GlobalSecondaryIndexes": [
            {
                "IndexName": each["name"],
                "KeySchema": _keys(each["hash_key"], each["range_key"]),
                "Projection": {"ProjectionType": each["projection_type"]},
            }
            for each in found["global_secondary_index"]
        ],
        "TimeToLiveSpecification": {"AttributeName": ttl["attribute_name"], "Enabled": ttl["enabled"]},
        "Tags": _tags(found["tags"]),
    }


def _queue(found: Mapping[str, Any]) -> Properties:
    return {
        "QueueName": found["name"],
        "MessageRetentionPeriod": found["message_retention_seconds"],
        "VisibilityTimeout": found["visibility_timeout_seconds"],
        "DelaySeconds": found["delay_seconds"],
        "ReceiveMessageWaitTimeSeconds": found["receive_wait_time_seconds"],
        "SqsManagedSseEnabled": found["sqs_managed_sse_enabled"],
        "Tags": _tags(found["tags"]),
    }


def _role(found: Mapping[str, Any]) -> Properties:
    boundary = {"PermissionsBoundary": found["permissions_boundary"]} if found["permissions_boundary"] else {}
    return {
        "RoleName": found["name"],
        **({"Path": found["path"]} if found["path"] != "/" else {}),
        **boundary,
        "AssumeRolePolicyDocument": json.loads(found["assume_role_policy"]),
        "ManagedPolicyArns": [],
        "Tags": _tags(found["tags"]),
    }


def _network(found: Mapping[str, Any]) -> Properties:
    if not (blocks := found.get("vpc_config")):
        return {}
    (network,) = blocks
    return {
        "VpcConfig": {"SubnetIds": network["subnet_ids"], "SecurityGroupIds": network["security_group_ids"]},
    }


def _function(found: Mapping[str, Any]) -> Properties:
    (logging,), (environment,) = found["logging_config"], found["environment"]
    reserved = found["reserved_concurrent_executions"]
    return {
        "FunctionName": found["function_name"],
        "Description": found["description"],
        "Code": {"S3Bucket": found["s3_bucket"], "S3Key": found["s3_key"]},
        "Handler": found["handler"],
        "Runtime": found["runtime"],
        "Architectures": found["architectures"],
        "Role": found["role"],
        "MemorySize": found["memory_size"],
        "Timeout": found["timeout"],
        # The provider's word for no reservation.
        **({} if reserved == -1 else {"ReservedConcurrentExecutions": reserved}),
        **_network(found),
        "LoggingConfig": {"LogGroup": logging["log_group"], "LogFormat": logging["log_format"]},
        "Environment": {"Variables": environment["variables"]},
        "Tags": _tags(found["tags"]),
    }


def _permission(found: Mapping[str, Any]) -> Properties:
    made = {
        "Action": found["action"],
        "FunctionName": found["function_name"],
        "Principal": found["principal"],
        "SourceArn": found.get("source_arn"),
        "FunctionUrlAuthType": found.get("function_url_auth_type"),
        "InvokedViaFunctionUrl": found.get("invoked_via_function_url"),
    }
    return {name: value for name, value in made.items() if value}


def _alarm(found: Mapping[str, Any]) -> Properties:
    return {
        "AlarmName": found["alarm_name"],
        "AlarmDescription": found["alarm_description"],
        "Namespace": found["namespace"],
        "MetricName": found["metric_name"],
        "Dimensions": [{"Name": key, "Value": value} for key, value in found["dimensions"].items()],
        "Statistic": found["statistic"],
        "Period": found["period"],
        "EvaluationPeriods": found["evaluation_periods"],
        "DatapointsToAlarm": found["datapoints_to_alarm"],
        "Threshold": found["threshold"],
        "ComparisonOperator": found["comparison_operator"],
        "TreatMissingData": found["treat_missing_data"],
        "AlarmActions": found["alarm_actions"],
        "OKActions": found["ok_actions"],
    }


def _with_stack(user_data: str) -> str:
    """The user data as in a stack."""
    text = base64.b64decode(user_data).decode()
    (pool,) = re.findall("'REMUDA_POOL=(.*?)'", text)
    assert "'REMUDA_LISTENER_STACK='" in text
    named = text.replace("'REMUDA_LISTENER_STACK='", f"'REMUDA_LISTENER_STACK={STACK.format(pool)}'")
    return base64.b64encode(named.encode()).decode()


def _launch_template(found: Mapping[str, Any]) -> Properties:
    (profile,), (metadata,), (device,) = (
        found[name] for name in ("iam_instance_profile", "metadata_options", "block_device_mappings")
    )
    (ebs,) = device["ebs"]
    return {
        "LaunchTemplateName": found["name"],
        "LaunchTemplateData": {
            "ImageId": found["image_id"],
            "InstanceType": found["instance_type"],
            "IamInstanceProfile": {"Name": profile["name"]},
            "SecurityGroupIds": found["vpc_security_group_ids"],
            "MetadataOptions": {
                "HttpEndpoint": metadata["http_endpoint"],
                "HttpTokens": metadata["http_tokens"],
                "HttpPutResponseHopLimit": metadata["http_put_response_hop_limit"],
            },
            "BlockDeviceMappings": [
                {
                    "DeviceName": device["device_name"],
                    "Ebs": {
                        "Encrypted": ebs["encrypted"],
                        "VolumeType": ebs["volume_type"],
                        "VolumeSize": ebs["volume_size"],
                    },
                }
            ],
            "TagSpecifications": [
                {"ResourceType": each["resource_type"], "Tags": _tags(each["tags"])}
                for each in found["tag_specifications"]
            ],
            "UserData": _with_stack(found["user_data"]),
        },
    }


def _group(found: Mapping[str, Any]) -> Properties:
    (template,), (maintenance,) = found["launch_template"], found["instance_maintenance_policy"]
    return {
        "AutoScalingGroupName": found["name"],
        "MinSize": str(found["min_size"]),
        "MaxSize": str(found["max_size"]),
        "DesiredCapacity": str(found["desired_capacity"]),
        "VPCZoneIdentifier": found["vpc_zone_identifier"],
        "LaunchTemplate": {"LaunchTemplateId": template["id"], "Version": template["version"]},
        "HealthCheckType": found["health_check_type"],
        "MaxInstanceLifetime": found["max_instance_lifetime"],
        "InstanceMaintenancePolicy": {
            "MinHealthyPercentage": maintenance["min_healthy_percentage"],
            "MaxHealthyPercentage": maintenance["max_healthy_percentage"],
        },
        "Tags": [
            {"Key": each["key"], "Value": each["value"], "PropagateAtLaunch": each["propagate_at_launch"]}
            for each in found["tag"]
        ],
    }


def _renamed(**names: str) -> Callable[[Mapping[str, Any]], Properties]:
    """A twin whose properties only have other names."""
    return lambda found: {new: found[old] for new, old in names.items()}


TWINS: dict[str, tuple[str, Callable[[Mapping[str, Any]], Properties]]] = {
    "aws_autoscaling_lifecycle_hook": (
        "AWS::AutoScaling::LifecycleHook",
        _renamed(
            AutoScalingGroupName="autoscaling_group_name",
            LifecycleHookName="name",
            LifecycleTransition="lifecycle_transition",
            DefaultResult="default_result",
            HeartbeatTimeout="heartbeat_timeout",
        ),
    ),
    "aws_autoscaling_group": ("AWS::AutoScaling::AutoScalingGroup", _group),
    "aws_launch_template": ("AWS::EC2::LaunchTemplate", _launch_template),
    "aws_cloudwatch_event_rule": (
        "AWS::Events::Rule",
        lambda found: {
            "Name": found["name"],
            "Description": found["description"],
            "ScheduleExpression": found["schedule_expression"],
            "State": found["state"],
            "Targets": [],
        },
    ),
    "aws_cloudwatch_log_group": (
        "AWS::Logs::LogGroup",
        _renamed(LogGroupName="name", RetentionInDays="retention_in_days"),
    ),
    "aws_cloudwatch_metric_alarm": ("AWS::CloudWatch::Alarm", _alarm),
    "aws_dynamodb_table": ("AWS::DynamoDB::Table", _table),
    "aws_iam_instance_profile": (
        "AWS::IAM::InstanceProfile",
        lambda found: {"InstanceProfileName": found["name"], "Roles": [found["role"]]},
    ),
    "aws_iam_policy": (
        "AWS::IAM::ManagedPolicy",
        lambda found: {
            "ManagedPolicyName": found["name"],
            **({"Description": found["description"]} if found["description"] else {}),
            "PolicyDocument": json.loads(found["policy"]),
        },
    ),
    "aws_iam_role": ("AWS::IAM::Role", _role),
    "aws_lambda_function": ("AWS::Lambda::Function", _function),
    "aws_lambda_function_event_invoke_config": (
        "AWS::Lambda::EventInvokeConfig",
        _renamed(
            FunctionName="function_name",
            Qualifier="qualifier",
            MaximumRetryAttempts="maximum_retry_attempts",
            MaximumEventAgeInSeconds="maximum_event_age_in_seconds",
        ),
    ),
    "aws_lambda_function_url": (
        "AWS::Lambda::Url",
        _renamed(TargetFunctionArn="function_name", AuthType="authorization_type"),
    ),
    "aws_lambda_permission": ("AWS::Lambda::Permission", _permission),
    "aws_sqs_queue": ("AWS::SQS::Queue", _queue),
    "aws_ssm_parameter": (
        "AWS::SSM::Parameter",
        _renamed(Name="name", Type="type", Tier="tier", Value="value", Description="description"),
    ),
}
#: Resources of Terraform that are a property of another resource in CloudFormation.
PARTS = {"aws_iam_role_policy_attachment", "aws_cloudwatch_event_target"}

Resources = dict[tuple[str, str], Properties]


def _identity(kind: str, properties: Mapping[str, Any]) -> tuple[str, str]:
    if kind == "AWS::Lambda::Permission":
        return kind, f"{properties['FunctionName']} {properties['Action']}"
    return kind, properties[IDENTITIES[kind]]


def attributes(kind: str, properties: Mapping[str, Any]) -> dict[str, str]:
    """The attributes of a resource in CloudFormation."""
    name = _identity(kind, properties)[1]
    arn = ARNS.get(kind, "{}").format(name)
    reference = arn if kind == "AWS::IAM::ManagedPolicy" else name
    return {"Arn": arn, "Ref": reference, "FunctionUrl": f"https://{name}/", "LatestVersionNumber": f"of {name}"}


def computed(kind: str, found: Mapping[str, Any]) -> dict[str, str]:
    if kind in PARTS:
        return {}
    twin, convert = TWINS[kind]
    if kind == "aws_launch_template":
        return {"id": found["name"], "latest_version": f"of {found['name']}"}
    made = attributes(twin, convert(found))
    return {"arn": made["Arn"]} if twin in ARNS else {"function_url": made["FunctionUrl"]}


def twins(resources: Iterable[tuple[str, Mapping[str, Any]]]) -> Resources:
    """Resources of Terraform, each with its type, in the form of the template."""
    instances = list(resources)
    made: Resources = {}
    for kind, found in instances:
        if kind not in PARTS:
            twin, convert = TWINS[kind]
            properties = convert(found)
            assert _identity(twin, properties) not in made
            made[_identity(twin, properties)] = properties
    for kind, found in instances:
        if kind == "aws_iam_role_policy_attachment":
            made["AWS::IAM::Role", found["role"]]["ManagedPolicyArns"].append(found["policy_arn"])
        elif kind == "aws_cloudwatch_event_target":
            (retry,) = found["retry_policy"]
            target = {
                "Id": found["target_id"],
                "Arn": found["arn"],
                "Input": found["input"],
                "RetryPolicy": {
                    "MaximumRetryAttempts": retry["maximum_retry_attempts"],
                    "MaximumEventAgeInSeconds": retry["maximum_event_age_in_seconds"],
                },
            }
            made["AWS::Events::Rule", found["rule"]]["Targets"].append(target)
    return {key: normalized(key[0], properties) for key, properties in made.items()}


def normalized(kind: str, properties: Properties) -> Properties:
    """Without the order of sets, and with JSON as values."""
    properties = json.loads(json.dumps(properties))
    if kind == "AWS::IAM::Role":
        properties["ManagedPolicyArns"].sort()
        properties["AssumeRolePolicyDocument"] = _without_single_lists(properties["AssumeRolePolicyDocument"])
    if kind == "AWS::DynamoDB::Table":
        properties["AttributeDefinitions"].sort(key=lambda each: each["AttributeName"])
        properties["GlobalSecondaryIndexes"].sort(key=lambda each: each["IndexName"])
    if kind == "AWS::Events::Rule":
        for each in properties["Targets"]:
            each["Input"] = json.loads(each["Input"])
    if kind == "AWS::SSM::Parameter":
        properties["Value"] = sorted(map(_setting_line, properties["Value"].split("\n")))
        # It names parameters of a stack there, and variables of a module here.
        properties.pop("Description")
    if kind == "AWS::Lambda::Function" and "ReservedConcurrentExecutions" in properties:
        # Parameters are texts.
        properties["ReservedConcurrentExecutions"] = int(properties["ReservedConcurrentExecutions"])
    if kind == "AWS::CloudWatch::Alarm":
        properties["Dimensions"].sort(key=lambda each: each["Name"])
    return properties


def _without_single_lists(document: Any) -> Any:
    """The policy with single values in place of lists of one value, which mean the same to IAM."""
    if isinstance(document, dict):
        return {key: _without_single_lists(value) for key, value in document.items()}
    if isinstance(document, list):
        return (
            document[0]
            if len(document) == 1 and isinstance(document[0], str)
            else [*map(_without_single_lists, document)]
        )
    return document


def _setting_line(line: str) -> tuple[str, Any]:
    name, _, value = line.partition("=")
    return name, json.loads(value) if value.startswith(("{", "[")) else value


def pseudo_of(parameters: Mapping[str, str]) -> dict[str, str]:
    """CloudFormation's own parameters for a stack."""
    return {**PSEUDO, "AWS::StackId": STACK.format(parameters.get("Pool", "default"))}


def stack_of(parameters: Mapping[str, str], classes: Sequence[ResourceClass] = DEFAULT_CLASSES) -> EvaluatedStack:
    # As `remuda deploy` makes it.
    issuer = parameters.get("OidcIssuer", "").partition("://")[2] or GITHUB
    made = template(classes, issuer=issuer)
    return EvaluatedStack(template=made, parameters=parameters, pseudo=pseudo_of(parameters), attributes=attributes)


def stacked(stack: EvaluatedStack) -> Resources:
    """The resources of the template."""
    return {_identity(kind, each): normalized(kind, each) for kind, each in stack.resources.values()}


# Parameters and variables --------------------------------------------------------------------------------------------

#: Parameters of the template that are objects of the module.
OBJECTS = {
    "OidcProviderArn": "oidc_provider",
    "AlarmTopicArn": "alarm_topic",
    "VolumeKmsKey": "volume_kms_key",
    "ImageKmsKey": "image_kms_key",
}
CODE = {"CodeBucket": "s3_bucket", "CodeKey": "s3_key"}


def variable_name(parameter: str) -> str:
    if parameter in CODE:
        return "code"
    return OBJECTS.get(parameter) or re.sub(r"(?<!^)(?=[A-Z])", "_", parameter).lower()


def variables_of(module: TerraformModule, parameters: Mapping[str, str]) -> dict[str, Any]:
    """The variables of the module for parameters of the stack."""
    made: dict[str, Any] = {}
    for parameter, value in parameters.items():
        name = variable_name(parameter)
        if parameter in CODE:
            made.setdefault("code", {})[CODE[parameter]] = value
        elif parameter in OBJECTS:
            made[name] = {"arn": value}
        else:
            made[name] = _typed(module.variables[name].attributes["type"], value)
    return made


def _typed(kind: Any, value: str) -> Any:
    words = list(kind.scan_values(lambda token: token.type == "NAME"))
    if "map" in words:
        return dict(pair.split("=", 1) for pair in value.split(","))
    (shown,) = kind.scan_values(lambda token: token.type == "NAME" and token != "list") or ("",)
    if "list" in list(kind.scan_values(lambda token: token.type == "NAME")):
        return value.split(",")
    if shown in {"number", "any"}:
        return json.loads(value)
    return value == "true" if shown == "bool" else value


SECRET = f"arn:aws:secretsmanager:{REGION}:{ACCOUNT}:secret:remuda/ci/github-Ab12Cd"
FUNCTIONS = {
    "Pool": "ci",
    "CodeBucket": "acme-code",
    "CodeKey": "remuda-lambda-1.zip",
    "GithubSecretArn": SECRET,
    "GithubScope": "acme/app",
}
ROLES = {"OidcProviderArn": f"arn:aws:iam::{ACCOUNT}:oidc-provider/github", "Repositories": "acme/app,acme/lib"}
ALARMS = {"AlarmTopicArn": f"arn:aws:sns:{REGION}:{ACCOUNT}:alarms"}
EVERYTHING = {
    **FUNCTIONS,
    **ROLES,
    **ALARMS,
    "Environments": "ci,release",
    "RefreshRepository": "acme@1/app@2",
    "Branch": "trunk",
    "Architecture": "arm64",
    "Runtime": "python3.12",
    "ScaleDown": "false",
    "ReserveConcurrency": "true",
    "VolumeKmsKey": f"arn:aws:kms:{REGION}:{ACCOUNT}:key/1",
    "ImageKmsKey": f"arn:aws:kms:{REGION}:210987654321:key/2",
    "FunctionSubnetIds": "subnet-3,subnet-4",
    "GithubEnvironment": 'the "ci" one',
    "GithubAppId": "12345",
    "Ami": "ami-1",
    "SubnetIds": "subnet-1,subnet-2",
    "SecurityGroupIds": "sg-1",
    "CachePaths": "/var/lib/docker,/home/runner/.m2",
    "ResourceClassConfig": '{"large": {"cpu": 2, "mmem": 4096}}',
    "IdleConfig": '[{"cron": "* * 9-17 * * 1-5", "timeZone": "Europe/Berlin", "idleCount": 2}]',
    "FunctionUrl": "true",
    "BrokerConcurrency": "20",
    "OidcIssuer": "https://ghes.example/_services/token",
    "MaxUses": "7",
    "MaxRuntimeMin": "0.5",
    "VolumeSizeGib": "100",
    "Reuse": "never",
    "PermissionsBoundary": f"arn:aws:iam::{ACCOUNT}:policy/boundary",
    "RolePath": "/ci/runners/",
}
SETS = '[{"name": "large", "labels": ["large"], "resource-class": "large", "max": 20}]'
LISTENER = {
    **FUNCTIONS,
    "RunnerSets": SETS,
    "AgentUrl": "arm64=s3://b/agent/a.tar.gz",
    "AgentSha256": f"arm64={'0' * 64}",
    "SubnetIds": "subnet-1,subnet-2",
    "SecurityGroupIds": "sg-1,sg-2",
}
EVERYTHING |= {**LISTENER, "ListenerInstanceType": "t4g.nano", "ListenerAmi": "ami-2"}
CASES = {
    "defaults": {},
    "functions": FUNCTIONS,
    "functions of an App": {**FUNCTIONS, "GithubAppId": "1"},
    "functions with an image": {**FUNCTIONS, "Ami": "ami-1", "SubnetIds": "subnet-1"},
    "code without a topic's functions": ALARMS,
    "alarms": {**FUNCTIONS, **ALARMS},
    "function URL": {**FUNCTIONS, "FunctionUrl": "true"},
    "function URL without functions": {"FunctionUrl": "true"},
    "workflow role": ROLES,
    "workflow role with functions": {**FUNCTIONS, **ROLES},
    "broker with a key": {**FUNCTIONS, **ROLES, "VolumeKmsKey": f"arn:aws:kms:{REGION}:{ACCOUNT}:key/1"},
    "broker with the key of an image": {**FUNCTIONS, **ROLES, "ImageKmsKey": EVERYTHING["ImageKmsKey"]},
    "functions in subnets": {**FUNCTIONS, "FunctionSubnetIds": "subnet-3", "SecurityGroupIds": "sg-1"},
    "workflow role with a key": {**ROLES, "VolumeKmsKey": EVERYTHING["VolumeKmsKey"]},
    "provider without repositories": {"OidcProviderArn": ROLES["OidcProviderArn"]},
    "repositories without a provider": {"Repositories": "acme/*"},
    "refresh role": {"OidcProviderArn": ROLES["OidcProviderArn"], "RefreshRepository": "acme/app"},
    "listener": LISTENER,
    "listener of an App with alarms": {**LISTENER, **ALARMS, "GithubAppId": "1"},
    "listener elsewhere": {**FUNCTIONS, **ALARMS, "RunnerSets": SETS, "Listener": "none"},
    "listener without sets": {**LISTENER, "RunnerSets": "[]"},
    "runner sets without functions": {"RunnerSets": SETS},
    "everything": EVERYTHING,
}
