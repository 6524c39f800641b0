"""The IAM policies of Remuda, as data. build.py generates JSON policies, the template and the reference from them.

Placeholders that differ between deployments: `<partition>`, `<region>`, `<account>`, `<pool>`, `<environment>` (the
value of the ghr:environment tag), `<role-path>`, `<github-credential>`, `<volume-kms-key>` and `<image-kms-key>` (the
ARNs of a secret and of two keys).
`${…}` are IAM policy variables.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from remuda.adapters.aws.cloudwatch import NAMESPACE
from remuda.adapters.aws.dynamodb import items
from remuda.adapters.aws.ec2.template import template_name
from remuda.adapters.aws.sqs import queue_name
from remuda.deployment.statements import Conditions, Policy, Statement, fill_placeholders
from remuda.domain.errors import UserError
from remuda.domain.resources import DEFAULT_CLASSES, ResourceClass, TypePatterns, split_type
from remuda.domain.scale_down.fleet import GHR_APPLICATION, GHR_APPLICATION_TAG, GHR_ENVIRONMENT_TAG
from remuda.ports.compute import POOL_TAG

#: Names of the default classes.
CLASSES = tuple(each.name for each in DEFAULT_CLASSES)
#: Sizes of instance types with their vCPUs. Smaller sizes than `large` have up to two.
SIZES = {
    **dict.fromkeys(("nano", "micro", "small", "medium", "large"), 2),
    "xlarge": 4,
    **{f"{each}xlarge": 4 * each for each in (2, 3, 4, 6, 8, 9, 10, 12, 16, 18, 24, 32, 48, 56, 64, 96, 112)},
}
EC2 = "ec2.amazonaws.com"
#: EC2 as IAM names the service that a role is passed to; the second is that of China, as in Karpenter's policy.
PASSED_TO_EC2 = (EC2, f"{EC2}.cn")
#: For calls that IAM cannot restrict to resources; a comment at each use says why.
ANY_RESOURCE = "*"
#: Characters of a managed policy without white space ("IAM and STS quotas" in IAM's guide).
MAX_POLICY = 6_144
#: Classes whose queues are in the policies of the commands. The queues of further classes have policies of their own.
OWN_CLASSES = 10
#: Policies that name queues, and those with the queues of further classes.
FURTHER_QUEUES = {"provision": "provision-queues", "refresh": "refresh-queues"}
#: The only tag that scale-down may set. With the tag of the pool it could make any instance terminable.
ORPHAN_TAG = "ghr:orphan"

#: Descriptions of the policies in IAM, by name: those of 0.1.0, whatever the reference says. IAM cannot change them,
#: and CloudFormation cannot replace a policy that keeps its name. A new policy has none.
DESCRIPTIONS = {
    "agent": "For every instance of the pool, through its instance profile.",
    "workflow": "For workflows, which provision and release through the broker.",
    "provision": "For callers of provision and release: the broker, or workflows in direct mode.",
    "volume-key": "For callers of provision, in addition to the policy provision, if volume-kms-key is set.",
    "refresh": "For callers of refresh and doctor: the scheduled function, a scheduled workflow, an operator.",
    "scale-down": "For callers of scale-down: the scheduled function, a scheduled workflow, an operator.",
    "refresh-function": "For the function that runs refresh, in addition to the policy refresh.",
    "scale-down-function": "For the function that runs scale-down, in addition to the policy scale-down.",
    "broker-function": "For the function that is the broker, in addition to the policy provision.",
    "listener": "For the listener of runner sets, in addition to the policy provision.",
}


# Names --------------------------------------------------------------------------------------------------------------

#: Name of the table and of the launch template; prefix of queues and roles.
NAME = template_name("<pool>")
AGENT_NAME = f"{NAME}-agent"
#: Scheduled commands. Each has its own function, role and log group.
SCHEDULED = ("refresh", "scale-down")
#: The function that provisions and releases for workflows.
BROKER = "broker"
FUNCTIONS = (*SCHEDULED, BROKER)
#: The process that serves runner sets, on an instance of the stack or on another host.
LISTENER = "listener"


def arn(service: str, resource: str, *, region: str = "<region>", account: str = "<account>") -> str:
    return f"arn:<partition>:{service}:{region}:{account}:{resource}"


def ec2(*kinds: str, account: str = "<account>") -> tuple[str, ...]:
    return tuple(arn("ec2", f"{kind}/*", account=account) for kind in kinds)


def ec2_of_any_account(*kinds: str) -> tuple[str, ...]:
    """Resources that can belong to other accounts: images of AWS, or a subnet that another account shares.

    The ARN of a shared resource has the account of its owner ("Share your VPC subnets with other accounts", in AWS's
    documentation), so Karpenter's controller policy has no account in them either.
    """
    return ec2(*kinds, account="*")


TABLE = arn("dynamodb", f"table/{NAME}")
INDEXES = tuple(f"{TABLE}/index/{name}" for name in (items.LIVE_INDEX, items.PROVISION_INDEX, items.TROUBLED_INDEX))
INSTANCES = ec2("instance")
#: Path of the roles, with a slash at both ends.
ROLE_PATH = "<role-path>"
AGENT_ROLE = arn("iam", f"role{ROLE_PATH}{AGENT_NAME}", region="")
AGENT_PROFILE = arn("iam", f"instance-profile/{AGENT_NAME}", region="")
CREDENTIAL = "<github-credential>"
#: Secrets that may contain it if the stack has no GithubSecretArn.
CREDENTIALS = arn("secretsmanager", "secret:remuda/<pool>/*")
ENVIRONMENT = "<environment>"
VOLUME_KEY = "<volume-kms-key>"
IMAGE_KEY = "<image-kms-key>"
LISTENER_GROUP = arn("autoscaling", f"autoScalingGroup:*:autoScalingGroupName/{NAME}-{LISTENER}")
STACK = arn("cloudformation", f"stack/{NAME}/*")

HAS_POOL_TAG = {f"aws:ResourceTag/{POOL_TAG}": "<pool>"}
#: Tags of the instances that scale-down manages; instances of the pool have them, too.
HAS_FLEET_TAGS = {
    f"aws:ResourceTag/{GHR_APPLICATION_TAG}": GHR_APPLICATION,
    f"aws:ResourceTag/{GHR_ENVIRONMENT_TAG}": ENVIRONMENT,
}
REQUESTS_POOL_TAG = {f"aws:RequestTag/{POOL_TAG}": "<pool>"}
#: Condition key for the partition keys of a request. IAM has none for sort keys.
LEADING_KEYS = "dynamodb:LeadingKeys"
#: Condition key for the top-level attributes that a request names, including those of the primary key.
ATTRIBUTES = "dynamodb:Attributes"
#: Condition key for what a write returns, and its values that return no attribute that the request does not name.
RETURN_VALUES = "dynamodb:ReturnValues"
NAMED_VALUES = ("NONE", "UPDATED_NEW", "UPDATED_OLD")


# Agent --------------------------------------------------------------------------------------------------------------


def _own_items(*kinds: str, attributes: Sequence[str] = ()) -> Conditions:
    only: dict[str, str | Sequence[str]] = {LEADING_KEYS: tuple(f"{kind}${{aws:userid}}" for kind in kinds)}
    # ForAllValues is true for a request without values; the Null conditions deny such a request.
    conditions: dict[str, dict[str, str | Sequence[str]]] = {"ForAllValues:StringEquals": only}
    if attributes:
        only[ATTRIBUTES] = attributes
        # As in AWS's examples: with ALL_NEW, a write would return attributes that it may not name. A request without
        # the parameter returns nothing. Source: DynamoDB developer guide, "Using IAM policy conditions for
        # fine-grained access control".
        conditions["StringEqualsIfExists"] = {RETURN_VALUES: NAMED_VALUES}
    return {**conditions, "Null": dict.fromkeys(only, "false")}


def agent() -> Policy:
    return Policy(
        name="agent",
        holder="every instance of the pool, through its instance profile",
        statements=(
            Statement(
                sid="ReadOwnRecords",
                purpose="read its own control record and its own report",
                actions=("dynamodb:GetItem",),
                resources=(TABLE,),
                conditions=_own_items(items.CONTROL_PREFIX, items.REPORT_PREFIX),
            ),
            Statement(
                sid="WriteOwnReport",
                # Without the keys of the other indexes: a machine cannot add items to them.
                purpose="write signals and heartbeats, with the attributes of a report and no others",
                actions=("dynamodb:UpdateItem",),
                resources=(TABLE,),
                conditions=_own_items(items.REPORT_PREFIX, attributes=items.REPORT_ATTRIBUTES),
            ),
            Statement(
                sid="TerminateItself",
                purpose="terminate itself, and no other instance",
                actions=("ec2:TerminateInstances",),
                resources=INSTANCES,
                # The caller must be the target: `ec2:InstanceID` is the id of the target.
                conditions={"ArnLike": {"ec2:SourceInstanceARN": arn("ec2", "instance/${ec2:InstanceID}")}},
            ),
            _download(),
        ),
    )


# Shared statements --------------------------------------------------------------------------------------------------


def _download() -> Statement:
    return Statement(
        sid="DownloadAgent",
        purpose="download its own program from the bucket of `remuda deploy`",
        actions=("s3:GetObject",),
        resources=("arn:<partition>:s3:::remuda-<pool>-<account>-<region>/agent/*",),
    )


def _read_settings() -> Statement:
    return Statement(
        sid="ReadSettings",
        purpose="read its settings",
        actions=("ssm:GetParameters",),
        resources=(arn("ssm", f"parameter{settings_parameter()}"),),
    )


def _queues(classes: Sequence[ResourceClass]) -> tuple[str, ...]:
    # Listed individually: `remuda-ci-*` would also match the queues of a pool named `ci-nightly`.
    return tuple(arn("sqs", queue_name(NAME, each.name)) for each in classes)


def _read_records(*more: str) -> Statement:
    operations = ("BatchGetItem", "GetItem", "Query", *more)
    return Statement(
        sid="ReadRecords",
        purpose="read the records of the pool",
        actions=_on_items(*operations),
        resources=(TABLE, *INDEXES),
    )


def _on_items(*operations: str) -> tuple[str, ...]:
    return tuple(f"dynamodb:{operation}" for operation in sorted(operations))


def _write(sid: str, purpose: str, operation: str, *partitions: str) -> Statement:
    """Write access to items with these keys, or with key prefixes, which end with `#`. None is the configuration's."""
    keys = tuple(f"{partition}*" if partition.endswith("#") else partition for partition in partitions)
    return Statement(
        sid=sid,
        purpose=purpose,
        actions=_on_items(operation),
        resources=(TABLE,),
        conditions={"ForAllValues:StringLike": {LEADING_KEYS: keys}, "Null": {LEADING_KEYS: "false"}},
    )


def _write_instances() -> tuple[Statement, ...]:
    return (
        _write(
            "WriteInstances", "write the records of instances", "UpdateItem", items.CONTROL_PREFIX, items.REPORT_PREFIX
        ),
        _write("WriteHistory", "write their histories", "BatchWriteItem", items.history_pk("")),
    )


def _credential() -> Statement:
    return Statement(
        sid="ReadGitHubCredential",
        purpose="read the secret with the GitHub credential",
        actions=("secretsmanager:GetSecretValue",),
        resources=(CREDENTIAL,),
    )


#: The permission for a single message covers batch calls.
MESSAGES = (
    "sqs:ChangeMessageVisibility",
    "sqs:DeleteMessage",
    "sqs:GetQueueAttributes",
    "sqs:GetQueueUrl",
    "sqs:ReceiveMessage",
    "sqs:SendMessage",
)
PREPARE_QUEUES = ("sqs:CreateQueue", "sqs:SetQueueAttributes")


def _messages(classes: Sequence[ResourceClass]) -> Statement:
    return Statement(
        sid="Messages",
        purpose="publish, receive, return and delete messages about idle instances",
        actions=MESSAGES,
        resources=_queues(classes),
    )


def _further_queues(classes: Sequence[ResourceClass]) -> tuple[Policy, ...]:
    """The queues of the classes after the first ones, for which the policies of the commands have no room."""
    further = classes[OWN_CLASSES:]
    if not further:
        return ()
    prepare = Statement(
        sid="Queues",
        purpose="create and update the queues, and their messages about idle instances",
        actions=(*MESSAGES, *PREPARE_QUEUES),
        resources=_queues(further),
    )
    statements = {"provision": _messages(further), "refresh": prepare}
    return tuple(
        Policy(
            name=FURTHER_QUEUES[name],
            holder=f"callers of `{name}`, in addition to the policy `{name}`: the queues of further classes",
            statements=(statement,),
        )
        for name, statement in statements.items()
    )


def _terminate() -> Statement:
    return Statement(
        sid="TerminatePoolInstances",
        purpose="terminate instances of this pool",
        actions=("ec2:TerminateInstances",),
        resources=INSTANCES,
        conditions={"StringEquals": HAS_POOL_TAG},
    )


def _describe(*operations: str) -> Statement:
    return Statement(
        sid="Describe",
        purpose="list resources",
        actions=tuple(f"ec2:{operation}" for operation in operations),
        # Describe calls of EC2 support neither resources nor tags.
        resources=(ANY_RESOURCE,),
    )


# Workflow -----------------------------------------------------------------------------------------------------------


def workflow() -> Policy:
    return Policy(
        name="workflow",
        holder="workflows, which provision and release through the broker",
        statements=(
            Statement(
                sid="InvokeBroker",
                purpose="invoke the broker of this pool, which checks the workflow's OIDC token",
                actions=("lambda:InvokeFunction",),
                resources=(arn("lambda", f"function:{NAME}-{BROKER}"),),
            ),
        ),
    )


# Provision ----------------------------------------------------------------------------------------------------------


def provision(classes: Sequence[ResourceClass] = DEFAULT_CLASSES) -> Policy:
    return Policy(
        name="provision",
        holder="callers of `provision` and `release`: the broker, or workflows in direct mode",
        statements=(
            _read_records(),
            *_write_instances(),
            _write("WriteProvisions", "write the provisions of runs", "PutItem", items.provisions_pk("")),
            _messages(classes[:OWN_CLASSES]),
            *_launch(launch_types(classes)),
            _terminate(),
            _describe("DescribeInstances", "DescribeSubnets", "DescribeTags"),
        ),
    )


def launch_types(classes: Sequence[ResourceClass]) -> tuple[str, ...]:
    """Patterns of the instance types that the classes may launch: their types, up to their maximum of vCPUs.

    A size without a wildcard is taken as it is: the operator named it.
    """
    found: dict[str, None] = {}
    for each in classes:
        sizes = [size for size, cpu in SIZES.items() if cpu <= each.largest_cpu]
        for family, size in map(split_type, each.types.words):
            fitting = [name for name in sizes if TypePatterns((size,)).matches(name)] if "*" in size else [size]
            found |= dict.fromkeys(f"{family}.{name}" for name in fitting)
    # Without those that another pattern includes.
    return tuple(
        each for each in found if not any(other != each and TypePatterns((other,)).matches(each) for other in found)
    )


def _launch(types: Sequence[str]) -> tuple[Statement, ...]:
    """The statements of Karpenter's controller policy for launches with CreateFleet, with the tag of the pool.

    EC2 authorizes a launch for each resource involved: first CreateFleet, then the RunInstances that it makes. Which
    condition keys EC2 sets for that RunInstances is not documented, so these statements use only keys of that policy,
    and the type of the instance. Source: NodeLifecyclePolicy in karpenter-provider-aws (1d92708, August 2026),
    website/content/en/preview/getting-started/getting-started-with-karpenter/cloudformation.yaml. As there, fleets,
    instances and volumes get their tags from CreateFleet, network interfaces from the launch template.
    """
    return (
        Statement(
            sid="LaunchFrom",
            purpose="use images, subnets and security groups; the other statements restrict what is launched",
            actions=("ec2:CreateFleet", "ec2:RunInstances"),
            # Spot requests are not tagged: a launch template cannot tag them for on-demand instances.
            resources=(
                *ec2("key-pair", "spot-instances-request"),
                *ec2_of_any_account("image", "security-group", "snapshot", "subnet"),
            ),
        ),
        Statement(
            sid="LaunchWithPoolTemplate",
            purpose="launch with the template of this pool (identified by its tag, as its ARN contains only an id)",
            actions=("ec2:CreateFleet", "ec2:RunInstances"),
            resources=ec2("launch-template"),
            conditions={"StringEquals": HAS_POOL_TAG},
        ),
        Statement(
            sid="LaunchTypes",
            purpose="launch instances of the types and sizes of the classes, with the tag of this pool from the start",
            actions=("ec2:RunInstances",),
            resources=INSTANCES,
            conditions={"StringEquals": REQUESTS_POOL_TAG, "StringLike": {"ec2:InstanceType": tuple(types)}},
        ),
        Statement(
            sid="LaunchTagged",
            purpose="create fleets, volumes and network interfaces with the tag of this pool",
            actions=("ec2:CreateFleet", "ec2:RunInstances"),
            resources=ec2("fleet", "network-interface", "volume"),
            conditions={"StringEquals": REQUESTS_POOL_TAG},
        ),
        Statement(
            sid="RequestInstances",
            purpose="request instances with the tag of this pool from a fleet; LaunchTypes restricts them",
            actions=("ec2:CreateFleet",),
            resources=INSTANCES,
            conditions={"StringEquals": REQUESTS_POOL_TAG},
        ),
        Statement(
            sid="TagAtLaunch",
            purpose="tag new resources at launch only",
            actions=("ec2:CreateTags",),
            resources=ec2("fleet", "instance", "network-interface", "volume"),
            conditions={
                "StringEquals": {"ec2:CreateAction": ("CreateFleet", "RunInstances"), **REQUESTS_POOL_TAG},
            },
        ),
        Statement(
            sid="PassAgentRole",
            purpose="pass the role of the agent to EC2 instances only",
            actions=("iam:PassRole",),
            resources=(AGENT_ROLE,),
            conditions={"StringEquals": {"iam:PassedToService": PASSED_TO_EC2}},
        ),
        _resolve_images(),
    )


def _resolve_images() -> Statement:
    return Statement(
        sid="ResolveImages",
        purpose="resolve an image given as `resolve:ssm:…`: public parameters of AWS, or those of the pool",
        actions=("ssm:GetParameters",),
        resources=(
            arn("ssm", "parameter/aws/service/*", account=""),
            arn("ssm", "parameter/remuda/<pool>/*"),
        ),
    )


def volume_key() -> Policy:
    return Policy(
        name="volume-key",
        holder="callers of `provision`, in addition to the policy `provision`, if `volume-kms-key` is set",
        statements=_on_key(VOLUME_KEY, "encrypt root volumes with the key of `volume-kms-key`, through EC2 only"),
    )


def image_key() -> Policy:
    return Policy(
        name="image-key",
        holder="callers of `provision`, in addition to the policy `provision`, if `ImageKmsKey` is set",
        statements=_on_key(IMAGE_KEY, "decrypt images that are encrypted with another key, through EC2 only"),
    )


def _on_key(key: str, purpose: str) -> tuple[Statement, ...]:
    """As EBS requires it of the caller of a launch; AWS documents it in "Requirements for Amazon EBS encryption"."""
    via_ec2 = {"StringEquals": {"kms:ViaService": "ec2.<region>.amazonaws.com"}}
    return (
        Statement(
            sid="EncryptVolumes",
            purpose=purpose,
            actions=(
                "kms:Decrypt",
                "kms:DescribeKey",
                "kms:GenerateDataKeyWithoutPlaintext",
                "kms:ReEncryptFrom",
                "kms:ReEncryptTo",
            ),
            resources=(key,),
            conditions=via_ec2,
        ),
        Statement(
            sid="AttachVolumes",
            purpose="let EC2 decrypt the volumes of an instance as long as it runs",
            actions=("kms:CreateGrant",),
            resources=(key,),
            conditions={**via_ec2, "Bool": {"kms:GrantIsForAWSResource": "true"}},
        ),
    )


# Refresh ------------------------------------------------------------------------------------------------------------


def refresh(classes: Sequence[ResourceClass] = DEFAULT_CLASSES) -> Policy:
    """Without permission to launch: refresh launches nothing."""
    return Policy(
        name="refresh",
        holder="callers of `refresh` and `doctor`: the scheduled function, a scheduled workflow, an operator",
        statements=(
            _read_records("Scan"),
            Statement(
                sid="WriteRecords",
                purpose="write the records of the pool, including its configuration",
                actions=_on_items("BatchWriteItem", "PutItem", "UpdateItem"),
                resources=(TABLE,),
            ),
            Statement(
                sid="PrepareTable",
                purpose="create and verify the table",
                actions=(
                    "dynamodb:CreateTable",
                    "dynamodb:DescribeTable",
                    "dynamodb:DescribeTimeToLive",
                    "dynamodb:UpdateTimeToLive",
                ),
                resources=(TABLE,),
            ),
            _messages(classes[:OWN_CLASSES]),
            Statement(
                sid="PrepareQueues",
                purpose="create and update the queues",
                actions=PREPARE_QUEUES,
                resources=_queues(classes[:OWN_CLASSES]),
            ),
            *_templates(),
            _resolve_images(),
            _terminate(),
            _describe(
                "DescribeImages",
                "DescribeInstances",
                "DescribeLaunchTemplates",
                "DescribeLaunchTemplateVersions",
                "DescribeSecurityGroups",
                "DescribeSpotPriceHistory",
                "DescribeSubnets",
                "DescribeTags",
            ),
            Statement(
                sid="ReadAgentProfile",
                purpose="read the unique id of the role, which is the prefix of record keys",
                actions=("iam:GetInstanceProfile",),
                resources=(AGENT_PROFILE,),
            ),
            _credential(),
        ),
    )


def _templates() -> tuple[Statement, ...]:
    return (
        Statement(
            sid="CreateTemplate",
            purpose="create the launch template with the tag of this pool",
            actions=("ec2:CreateLaunchTemplate",),
            resources=ec2("launch-template"),
            conditions={"StringEquals": REQUESTS_POOL_TAG},
        ),
        Statement(
            sid="TagTemplate",
            purpose="tag the template at creation only",
            actions=("ec2:CreateTags",),
            resources=ec2("launch-template"),
            conditions={"StringEquals": {"ec2:CreateAction": "CreateLaunchTemplate", **REQUESTS_POOL_TAG}},
        ),
        Statement(
            sid="ChangeTemplate",
            purpose="create new versions of the launch template of this pool",
            actions=("ec2:CreateLaunchTemplateVersion", "ec2:ModifyLaunchTemplate"),
            resources=ec2("launch-template"),
            conditions={"StringEquals": HAS_POOL_TAG},
        ),
    )


# Scale-down ---------------------------------------------------------------------------------------------------------


def scale_down() -> Policy:
    return Policy(
        name="scale-down",
        holder="callers of `scale-down`: the scheduled function, a scheduled workflow, an operator",
        statements=(
            _read_records(),
            *_write_instances(),
            Statement(
                sid="TerminateFleetInstances",
                purpose="terminate instances of this environment",
                actions=("ec2:TerminateInstances",),
                resources=INSTANCES,
                conditions={"StringEquals": HAS_FLEET_TAGS},
            ),
            Statement(
                sid="MarkOrphans",
                purpose="mark or unmark an instance of this environment as an orphan",
                actions=("ec2:CreateTags", "ec2:DeleteTags"),
                resources=INSTANCES,
                conditions={
                    "StringEquals": HAS_FLEET_TAGS,
                    "ForAllValues:StringEquals": {"aws:TagKeys": (ORPHAN_TAG,)},
                    # DeleteTags without keys would remove all tags.
                    "Null": {"aws:TagKeys": "false"},
                },
            ),
            _describe("DescribeInstances"),
            _credential(),
        ),
    )


# Functions ----------------------------------------------------------------------------------------------------------


def log_group(who: str) -> str:
    return f"/remuda/<pool>/{who}"


def settings_parameter() -> str:
    """The Systems Manager parameter with the settings of the functions."""
    return "/remuda/<pool>/settings"


def function(who: str) -> Policy:
    runs, policy = ("is the broker", "provision") if who == BROKER else (f"runs `{who}`", who)
    return Policy(
        name=f"{who}-function",
        holder=f"the function that {runs}, in addition to the policy `{policy}`",
        statements=(
            Statement(
                sid="WriteLog",
                purpose="write its own log; the template creates the log group",
                actions=("logs:CreateLogStream", "logs:PutLogEvents"),
                resources=(arn("logs", f"log-group:{log_group(who)}:*"),),
            ),
            _read_settings(),
            # The policies of the scheduled commands contain it; `provision` does not, because workflows may have that.
            *((_credential(),) if who == BROKER else ()),
        ),
    )


def function_network() -> Policy:
    """The actions of AWS's managed policy AWSLambdaVPCAccessExecutionRole, which Lambda uses with the role.

    The condition denies them to the code of the function, as "Giving Lambda functions access to resources in an Amazon
    VPC" recommends: in its calls, and not in those of Lambda, the key has a value.
    """
    not_by_code = {"Null": {"lambda:SourceFunctionArn": "true"}}
    return Policy(
        name="function-network",
        holder="all functions, in addition to their own policies, if `FunctionSubnetIds` is set",
        statements=(
            Statement(
                sid="ConnectToSubnets",
                purpose="let Lambda, and not the code, connect the function to its subnets",
                actions=("ec2:CreateNetworkInterface",),
                resources=(*ec2("network-interface"), *ec2_of_any_account("security-group", "subnet")),
                conditions=not_by_code,
            ),
            Statement(
                sid="ChangeInterfaces",
                purpose="let Lambda, and not the code, change and remove these network interfaces",
                actions=(
                    "ec2:AssignPrivateIpAddresses",
                    "ec2:DeleteNetworkInterface",
                    "ec2:UnassignPrivateIpAddresses",
                ),
                resources=ec2("network-interface"),
                conditions=not_by_code,
            ),
            _describe("DescribeNetworkInterfaces", "DescribeSubnets"),
        ),
    )


# Listener -----------------------------------------------------------------------------------------------------------


def listener() -> Policy:
    return Policy(
        name=LISTENER,
        holder="the listener of runner sets, in addition to the policy `provision`",
        statements=(
            _write(
                "WriteDemand",
                "write the demand of runner sets, their jobs and its lease",
                "PutItem",
                items.DEMAND,
                items.JOB_PREFIX,
                items.LEASE,
            ),
            _write("RemoveDemand", "remove the demand of a removed set", "BatchWriteItem", items.DEMAND),
            Statement(
                sid="WriteMetrics",
                purpose="write its heartbeat and the counts of the runner sets",
                actions=("cloudwatch:PutMetricData",),
                # CloudWatch supports no resources for it, only the namespace.
                resources=(ANY_RESOURCE,),
                conditions={"StringEquals": {"cloudwatch:namespace": NAMESPACE}},
            ),
            Statement(
                sid="CompleteLaunch",
                purpose="tell its Auto Scaling group that it works, so that it may replace its predecessor",
                actions=("autoscaling:CompleteLifecycleAction",),
                resources=(LISTENER_GROUP,),
            ),
            Statement(
                sid="SignalStack",
                purpose="tell an update of its stack that it works",
                actions=("cloudformation:SignalResource",),
                resources=(STACK,),
            ),
            _read_settings(),
            _download(),
            _credential(),
        ),
    )


def policies(classes: Sequence[ResourceClass] = DEFAULT_CLASSES) -> tuple[Policy, ...]:
    return (
        agent(),
        workflow(),
        provision(classes),
        volume_key(),
        image_key(),
        refresh(classes),
        scale_down(),
        *map(function, FUNCTIONS),
        function_network(),
        listener(),
        *_further_queues(classes),
    )


def attached(names: Sequence[str], classes: Sequence[ResourceClass]) -> tuple[str, ...]:
    """These policies, with those of the queues of further classes."""
    more = (FURTHER_QUEUES[name] for name in names if name in FURTHER_QUEUES and len(classes) > OWN_CLASSES)
    return (*names, *more)


def check_policies(classes: Sequence[ResourceClass], *, pool: str, role_path: str = "/") -> None:
    """Raise `UserError` if a policy for these classes is too long for IAM. Assumes the longest names of regions."""
    for policy in policies(classes):
        document = fill_placeholders(
            policy, pool=pool, account="0" * 12, region="ap-southeast-1", partition="aws-us-gov", role_path=role_path
        )
        size = len(json.dumps(document, separators=(",", ":")))
        if size > MAX_POLICY:
            raise UserError(
                f"resource-class-config: the policy {policy.name} for {len(classes)} classes has {size:,} characters, "
                f"and IAM accepts {MAX_POLICY:,}",
                field="resource-class-config",
                fix="use fewer classes, shorter names of classes, or a wildcard for several instance-types",
            )
