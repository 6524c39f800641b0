"""The IAM policy of the person who runs `remuda deploy` and `remuda destroy`, and the actions that their check tries.

CloudFormation creates the resources of the stack with the permissions of this person. Which calls it makes for a
resource is documented only in part, so the policy permits every action on what has the name of the pool, and names
the actions of IAM and EC2, whose resources others share.
"""

from __future__ import annotations

from remuda.adapters.aws.sqs import queue_name
from remuda.deployment.policies import (
    ANY_RESOURCE,
    INDEXES,
    LISTENER_GROUP,
    NAME,
    PASSED_TO_EC2,
    ROLE_PATH,
    STACK,
    TABLE,
    arn,
    ec2,
    ec2_of_any_account,
    log_group,
    settings_parameter,
)
from remuda.deployment.statements import Policy, Statement
from remuda.ports.compute import POOL_TAG

#: Actions that creating, changing and deleting a resource of each type of the template needs.
ACTIONS = {
    "AWS::AutoScaling::AutoScalingGroup": (
        "autoscaling:CreateAutoScalingGroup",
        "autoscaling:UpdateAutoScalingGroup",
        "autoscaling:DeleteAutoScalingGroup",
    ),
    "AWS::AutoScaling::LifecycleHook": ("autoscaling:PutLifecycleHook", "autoscaling:DeleteLifecycleHook"),
    "AWS::CloudWatch::Alarm": ("cloudwatch:PutMetricAlarm", "cloudwatch:DeleteAlarms"),
    "AWS::DynamoDB::Table": ("dynamodb:CreateTable", "dynamodb:UpdateTimeToLive", "dynamodb:DeleteTable"),
    # A group with a launch template needs permission to launch with it.
    "AWS::EC2::LaunchTemplate": ("ec2:CreateLaunchTemplate", "ec2:DeleteLaunchTemplate", "ec2:RunInstances"),
    "AWS::Events::Rule": ("events:PutRule", "events:PutTargets", "events:DeleteRule"),
    "AWS::IAM::InstanceProfile": ("iam:CreateInstanceProfile", "iam:AddRoleToInstanceProfile"),
    "AWS::IAM::ManagedPolicy": ("iam:CreatePolicy", "iam:CreatePolicyVersion", "iam:DeletePolicy"),
    "AWS::IAM::Role": ("iam:CreateRole", "iam:AttachRolePolicy", "iam:PassRole", "iam:DeleteRole"),
    "AWS::Lambda::EventInvokeConfig": ("lambda:PutFunctionEventInvokeConfig",),
    "AWS::Lambda::Function": ("lambda:CreateFunction", "lambda:UpdateFunctionCode", "lambda:DeleteFunction"),
    "AWS::Lambda::Permission": ("lambda:AddPermission",),
    "AWS::Lambda::Url": ("lambda:CreateFunctionUrlConfig",),
    "AWS::Logs::LogGroup": ("logs:CreateLogGroup", "logs:PutRetentionPolicy", "logs:DeleteLogGroup"),
    "AWS::SQS::Queue": ("sqs:CreateQueue", "sqs:DeleteQueue"),
    "AWS::SSM::Parameter": ("ssm:PutParameter", "ssm:DeleteParameter"),
}
#: Actions of `deploy` itself.
OWN_ACTIONS = (
    "cloudformation:CreateChangeSet",
    "cloudformation:ExecuteChangeSet",
    "ec2:CreateSecurityGroup",
    "ec2:DescribeInstanceTypes",
    "iam:CreateOpenIDConnectProvider",
    "iam:CreateServiceLinkedRole",
    "lambda:GetAccountSettings",
    "lambda:InvokeFunction",
    "s3:CreateBucket",
    "s3:PutBucketPolicy",
    "s3:PutObject",
    "secretsmanager:CreateSecret",
    "secretsmanager:GetSecretValue",
)

_ROLES = arn("iam", f"role{ROLE_PATH}{NAME}-*", region="")
_BUCKET = f"arn:<partition>:s3:::{NAME}-<account>-<region>"


def _iam(*names: str) -> tuple[str, ...]:
    return tuple(f"iam:{name}" for name in names)


def deployer() -> Policy:
    return Policy(
        name="deployer",
        holder="the person or pipeline that runs `remuda deploy`, `destroy` and the operator's commands",
        statements=(
            Statement(
                sid="OwnResources",
                purpose="create, change and delete what has the name of the pool: stack, table, queues, functions, …",
                actions=(
                    *("autoscaling:*", "cloudformation:*", "cloudwatch:*", "dynamodb:*", "events:*", "lambda:*"),
                    *("logs:*", "s3:*", "secretsmanager:*", "sqs:*", "ssm:*"),
                ),
                resources=(
                    LISTENER_GROUP,
                    STACK,
                    arn("cloudwatch", f"alarm:{NAME}-*"),
                    TABLE,
                    *INDEXES,
                    arn("events", f"rule/{NAME}-*"),
                    arn("lambda", f"function:{NAME}-*"),
                    arn("logs", f"log-group:{log_group('*')}"),
                    _BUCKET,
                    f"{_BUCKET}/*",
                    arn("secretsmanager", "secret:remuda/<pool>/*"),
                    arn("sqs", queue_name(NAME, "*")),
                    arn("ssm", f"parameter{settings_parameter()}"),
                ),
            ),
            Statement(
                sid="OwnRoles",
                purpose="create, change and delete roles, policies and instance profiles with the name of the pool",
                actions=_iam(
                    *("AddRoleToInstanceProfile", "CreateInstanceProfile", "CreatePolicy", "CreatePolicyVersion"),
                    # Not DeleteRolePermissionsBoundary: whoever requires a boundary does not let it be removed.
                    *("CreateRole", "DeleteInstanceProfile", "DeletePolicy", "DeletePolicyVersion", "DeleteRole"),
                    *("PutRolePermissionsBoundary", "RemoveRoleFromInstanceProfile", "TagInstanceProfile"),
                    *("TagPolicy", "TagRole", "UntagInstanceProfile", "UntagPolicy", "UntagRole"),
                    *("UpdateAssumeRolePolicy", "UpdateRole"),
                ),
                resources=(
                    _ROLES,
                    arn("iam", f"policy/{NAME}-*", region=""),
                    arn("iam", f"instance-profile/{NAME}-*", region=""),
                ),
            ),
            Statement(
                sid="AttachOwnPolicies",
                purpose="attach the policies of the pool to its roles, and no others",
                actions=_iam("AttachRolePolicy", "DetachRolePolicy"),
                resources=(_ROLES,),
                conditions={"ArnLike": {"iam:PolicyARN": arn("iam", f"policy/{NAME}-*", region="")}},
            ),
            Statement(
                sid="PassOwnRoles",
                purpose="give the roles of the pool to instances and functions only",
                actions=_iam("PassRole"),
                resources=(_ROLES,),
                conditions={"StringEquals": {"iam:PassedToService": (*PASSED_TO_EC2, "lambda.amazonaws.com")}},
            ),
            Statement(
                sid="IdentityProvider",
                purpose="create the identity provider of GitHub, which the account has once, and delete an unused one",
                actions=_iam(
                    *("AddClientIDToOpenIDConnectProvider", "CreateOpenIDConnectProvider"),
                    *("DeleteOpenIDConnectProvider", "TagOpenIDConnectProvider"),
                ),
                resources=(arn("iam", "oidc-provider/*", region=""),),
            ),
            Statement(
                sid="ServiceRoles",
                purpose="create the service-linked roles of spot instances and of the listener's group",
                actions=_iam("CreateServiceLinkedRole"),
                resources=(arn("iam", "role/aws-service-role/*", region=""),),
                conditions={
                    "StringEquals": {"iam:AWSServiceName": ("spot.amazonaws.com", "autoscaling.amazonaws.com")}
                },
            ),
            Statement(
                sid="Network",
                purpose="create the security group of the instances, and the launch template of the listener",
                actions=(
                    *("ec2:CreateLaunchTemplate", "ec2:CreateLaunchTemplateVersion", "ec2:CreateSecurityGroup"),
                    *("ec2:CreateTags", "ec2:DeleteLaunchTemplate", "ec2:ModifyLaunchTemplate"),
                ),
                resources=(*ec2("launch-template", "security-group"), *ec2_of_any_account("vpc")),
            ),
            Statement(
                sid="RemoveTagged",
                purpose="terminate instances of the pool, and delete its security group",
                actions=("ec2:DeleteSecurityGroup", "ec2:TerminateInstances"),
                resources=ec2("instance", "security-group"),
                conditions={"StringEquals": {f"aws:ResourceTag/{POOL_TAG}": "<pool>"}},
            ),
            Statement(
                sid="LaunchListener",
                purpose="let the listener's group launch its instance, which EC2 checks when the group is created",
                actions=("ec2:RunInstances",),
                resources=(
                    *ec2("instance", "launch-template", "network-interface", "volume"),
                    *ec2_of_any_account("image", "security-group", "snapshot", "subnet"),
                ),
            ),
            Statement(
                sid="Read",
                purpose="find what exists, and check quotas and permissions; these calls support no resources",
                actions=(
                    *("autoscaling:Describe*", "cloudformation:DescribeStacks", "cloudformation:ListStacks"),
                    *("cloudformation:ValidateTemplate", "cloudwatch:DescribeAlarms"),
                    *("ec2:Describe*", "ec2:GetEbsDefaultKmsKeyId", "iam:Get*", "iam:List*", "logs:DescribeLogGroups"),
                    *("iam:SimulatePrincipalPolicy", "kms:DescribeKey", "kms:GetKeyPolicy"),
                    *("lambda:GetAccountSettings", "secretsmanager:ListSecrets", "servicequotas:Get*"),
                    *("ssm:DescribeParameters", "tag:GetResources"),
                ),
                resources=(ANY_RESOURCE,),
            ),
            Statement(
                sid="ResolveImages",
                purpose="resolve images that a public parameter names",
                actions=("ssm:GetParameter", "ssm:GetParameters"),
                resources=(arn("ssm", "parameter/aws/service/*", account=""),),
            ),
        ),
    )
