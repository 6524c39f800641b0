"""The CloudFormation template: everything that a pool needs before its first refresh, from the code's own names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from policies import AGENT_NAME, CLASSES, EC2, NAME, policies, queue_name
from remuda.adapters.aws.dynamodb import items
from remuda.adapters.aws.dynamodb.schema import INDEXES, KEYS
from remuda.adapters.aws.sqs import ATTRIBUTES
from remuda.ports.compute import POOL_TAG
from statements import VERSION, Policy, render

Resource = dict[str, Any]

PARAMETERS = {
    "<partition>": "${AWS::Partition}",
    "<region>": "${AWS::Region}",
    "<account>": "${AWS::AccountId}",
    "<pool>": "${Pool}",
}
GITHUB = "token.actions.githubusercontent.com"
LOG_DAYS = 30
TAGS = [{"Key": POOL_TAG, "Value": {"Ref": "Pool"}}]


def substituted(text: str) -> Any:
    """As CloudFormation wants it; IAM's own `${…}` stay IAM's."""
    text = text.replace("${", "${!")
    changed = text
    for placeholder, value in PARAMETERS.items():
        changed = changed.replace(placeholder, value)
    return {"Fn::Sub": changed} if changed != text else text.replace("${!", "${")


def template(classes: Sequence[str] = CLASSES) -> dict[str, Any]:
    made = {policy.name: policy for policy in policies(classes)}
    return {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Description": "Remuda: warm EC2 machines for GitHub Actions. Table, queues and roles of one pool.",
        "Parameters": _parameters(),
        "Conditions": {
            "HasWorkflow": {
                "Fn::And": [
                    {"Fn::Not": [{"Fn::Equals": [{"Ref": "OidcProviderArn"}, ""]}]},
                    {"Fn::Not": [{"Fn::Equals": [{"Ref": "Repository"}, ""]}]},
                ]
            }
        },
        "Resources": {
            "Table": _table(),
            **{_logical("Queue", each): _queue(each) for each in classes},
            **{f"{name.title()}Policy": _managed(policy) for name, policy in made.items()},
            "AgentRole": _role("agent", {"Service": EC2}, "sts:AssumeRole"),
            "AgentProfile": {
                "Type": "AWS::IAM::InstanceProfile",
                "Properties": {"InstanceProfileName": substituted(AGENT_NAME), "Roles": [{"Ref": "AgentRole"}]},
            },
            "WorkflowRole": _github_role("workflow", "repo:${Repository}:*"),
            # What is not on this branch was not reviewed: it may use the pool, not change it.
            "RefreshRole": _github_role("refresh", "repo:${Repository}:ref:refs/heads/${Branch}"),
            **{f"{who.title()}Logs": _logs(who) for who in ("agent", "refresh")},
        },
        "Outputs": _outputs(),
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
            "Description": "GitHub's OIDC provider in this account. Empty: no roles for workflows are made.",
        },
        "Repository": {
            "Type": "String",
            "Default": "",
            # No wildcard: the trust is by StringLike.
            "AllowedPattern": "([A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+)?",
            "Description": "owner/name of the repository whose workflows may use the pool.",
        },
        "Branch": {
            "Type": "String",
            "Default": "main",
            "AllowedPattern": "[A-Za-z0-9_./-]+",
            "Description": "The branch whose workflows may run refresh and scale-down.",
        },
    }


def _table() -> Resource:
    names = dict.fromkeys(name for keys in (KEYS, *INDEXES.values()) for name in keys)
    return {
        "Type": "AWS::DynamoDB::Table",
        # Records of machines that may still run: with the stack, but never by a change of it.
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
        # Hints only: refresh announces idle machines again.
        "DeletionPolicy": "Delete",
        "UpdateReplacePolicy": "Delete",
        "Properties": {"QueueName": substituted(queue_name(resource_class)), **attributes, "Tags": TAGS},
    }


def _managed(policy: Policy) -> Resource:
    return {
        "Type": "AWS::IAM::ManagedPolicy",
        "Properties": {
            "ManagedPolicyName": substituted(f"{NAME}-{policy.name}"),
            "Description": f"For {policy.who.replace('`', '')}.",
            "PolicyDocument": render(policy.document(), substituted),
        },
    }


def _role(
    name: str, principal: Mapping[str, Any], action: str, conditions: Mapping[str, Any] | None = None
) -> Resource:
    trust: dict[str, Any] = {"Effect": "Allow", "Principal": dict(principal), "Action": action}
    if conditions:
        trust["Condition"] = dict(conditions)
    return {
        "Type": "AWS::IAM::Role",
        "Properties": {
            # The policies name the agent's: what they name must be what there is.
            "RoleName": substituted(f"{NAME}-{name}"),
            "AssumeRolePolicyDocument": {"Version": VERSION, "Statement": [trust]},
            "ManagedPolicyArns": [{"Ref": f"{name.title()}Policy"}],
            "Tags": TAGS,
        },
    }


def _github_role(name: str, subject: str) -> Resource:
    conditions = {
        "StringEquals": {f"{GITHUB}:aud": "sts.amazonaws.com"},
        "StringLike": {f"{GITHUB}:sub": {"Fn::Sub": subject}},
    }
    role = _role(name, {"Federated": {"Ref": "OidcProviderArn"}}, "sts:AssumeRoleWithWebIdentity", conditions)
    return {"Type": role["Type"], "Condition": "HasWorkflow", "Properties": role["Properties"]}


def _logs(who: str) -> Resource:
    # Made here for their retention alone: a group that its first writer makes keeps everything for ever.
    return {
        "Type": "AWS::Logs::LogGroup",
        "DeletionPolicy": "Delete",
        "UpdateReplacePolicy": "Delete",
        "Properties": {"LogGroupName": substituted(f"/remuda/<pool>/{who}"), "RetentionInDays": LOG_DAYS},
    }


def _outputs() -> dict[str, Any]:
    def output(what: str, value: Any, **more: str) -> dict[str, Any]:
        return {"Description": what, **more, "Value": value}

    def role(name: str) -> Any:
        return {"Fn::GetAtt": [name, "Arn"]}

    return {
        "TableName": output("The table.", {"Ref": "Table"}),
        "AgentProfileName": output("For iam-instance-profile.", {"Ref": "AgentProfile"}),
        "WorkflowPolicyArn": output("For a role of your own.", {"Ref": "WorkflowPolicy"}),
        "RefreshPolicyArn": output("For a role of your own.", {"Ref": "RefreshPolicy"}),
        "WorkflowRoleArn": output("For workflows.", role("WorkflowRole"), Condition="HasWorkflow"),
        "RefreshRoleArn": output("For the scheduled workflow.", role("RefreshRole"), Condition="HasWorkflow"),
    }


def _logical(kind: str, name: str) -> str:
    return kind + "".join(word[:1].upper() + word[1:] for word in re.split(r"[^A-Za-z0-9]+", name))
