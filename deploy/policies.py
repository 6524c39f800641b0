"""Every right that Remuda has on AWS, as data. JSON policies, template and docs are made from it (build.py).

`<partition>`, `<region>`, `<account>`, `<pool>`, `<environment>` (the value of the tag ghr:environment) and
`<github-credential>` (the ARN of a secret) stand for what differs between deployments; `${…}` is IAM's own, and filled
in by IAM for each request.
"""

from __future__ import annotations

from collections.abc import Sequence

from remuda.adapters.aws.dynamodb import items
from remuda.adapters.aws.ec2.template import template_name
from remuda.domain.resources import DEFAULT_CLASSES
from remuda.domain.scale_down.fleet import GHR_APPLICATION, GHR_APPLICATION_TAG, GHR_ENVIRONMENT_TAG
from remuda.ports.compute import POOL_TAG
from statements import Conditions, Policy, Statement

CLASSES = tuple(each.name for each in DEFAULT_CLASSES)
EC2 = "ec2.amazonaws.com"
#: The one resource that some calls know; each use says why.
EVERYTHING = "*"
#: What scale-down notes on a machine. Never the pool's tag: with it anything could be made terminable.
ORPHAN_TAG = "ghr:orphan"


# Names --------------------------------------------------------------------------------------------------------------

#: Of the table, of the launch template; queues and roles begin with it.
NAME = template_name("<pool>")
AGENT_NAME = f"{NAME}-agent"


def arn(service: str, resource: str, *, region: str = "<region>", account: str = "<account>") -> str:
    return f"arn:<partition>:{service}:{region}:{account}:{resource}"


def ec2(*kinds: str) -> tuple[str, ...]:
    # An image or a snapshot may be another account's: AWS's own, as a rule. Their ARNs name no account of ours.
    return tuple(
        arn("ec2", f"{kind}/*", account="*" if kind in {"image", "snapshot"} else "<account>") for kind in kinds
    )


def queue_name(resource_class: str) -> str:
    return f"{NAME}-{resource_class}"


TABLE = arn("dynamodb", f"table/{NAME}")
INDEXES = tuple(f"{TABLE}/index/{name}" for name in (items.LIVE_INDEX, items.PROVISION_INDEX))
INSTANCES = ec2("instance")
AGENT_ROLE = arn("iam", f"role/{AGENT_NAME}", region="")
AGENT_PROFILE = arn("iam", f"instance-profile/{AGENT_NAME}", region="")
CREDENTIAL = "<github-credential>"
#: Where it may lie while the template was not told where it does.
CREDENTIALS = arn("secretsmanager", "secret:remuda/<pool>/*")
ENVIRONMENT = "<environment>"

OF_THE_POOL = {f"aws:ResourceTag/{POOL_TAG}": "<pool>"}
#: A fleet of GitHub runners that scale-down looks after: the pool's machines carry these tags, too.
OF_THE_FLEET = {
    f"aws:ResourceTag/{GHR_APPLICATION_TAG}": GHR_APPLICATION,
    f"aws:ResourceTag/{GHR_ENVIRONMENT_TAG}": ENVIRONMENT,
}
ASKS_FOR_THE_POOL = {f"aws:RequestTag/{POOL_TAG}": "<pool>"}
#: The partition keys that a request touches. IAM has no word for sort keys.
LEADING_KEYS = "dynamodb:LeadingKeys"


# Agent --------------------------------------------------------------------------------------------------------------


def _own_item(kind: str) -> Conditions:
    return {
        "ForAllValues:StringEquals": {LEADING_KEYS: f"{kind}${{aws:userid}}"},
        # ForAllValues holds where there are no values at all: a request without keys is refused by this.
        "Null": {LEADING_KEYS: "false"},
    }


def agent() -> Policy:
    return Policy(
        name="agent",
        who="every machine of the pool, by its instance profile",
        statements=(
            Statement(
                sid="ReadOwnControl",
                why="read what it is to do",
                actions=("dynamodb:GetItem",),
                resources=(TABLE,),
                conditions=_own_item(items.CONTROL_PREFIX),
            ),
            Statement(
                sid="WriteOwnReport",
                why="signals and heartbeat",
                actions=("dynamodb:UpdateItem",),
                resources=(TABLE,),
                conditions=_own_item(items.REPORT_PREFIX),
            ),
            Statement(
                sid="TerminateItself",
                why="end itself, and no other machine",
                actions=("ec2:TerminateInstances",),
                resources=INSTANCES,
                # Who asks is whom it is about: `ec2:InstanceID` is the target's.
                conditions={"ArnLike": {"ec2:SourceInstanceARN": arn("ec2", "instance/${ec2:InstanceID}")}},
            ),
        ),
    )


# Parts of several ---------------------------------------------------------------------------------------------------


def _queues(classes: Sequence[str]) -> tuple[str, ...]:
    # One by one: `remuda-ci-*` would be the queues of a pool named `ci-nightly`, too.
    return tuple(arn("sqs", queue_name(each)) for each in classes)


def _read_records(*more: str) -> Statement:
    operations = ("BatchGetItem", "GetItem", "Query", *more)
    return Statement(
        sid="ReadRecords",
        why="the pool's records",
        actions=_on_items(*operations),
        resources=(TABLE, *INDEXES),
    )


def _on_items(*operations: str) -> tuple[str, ...]:
    return tuple(f"dynamodb:{operation}" for operation in sorted(operations))


def _write(sid: str, why: str, operation: str, *partitions: str) -> Statement:
    """Of items whose keys begin so, and of no others: never the pool's configuration."""
    begins = tuple(f"{partition}*" for partition in partitions)
    return Statement(
        sid=sid,
        why=why,
        actions=_on_items(operation),
        resources=(TABLE,),
        conditions={"ForAllValues:StringLike": {LEADING_KEYS: begins}, "Null": {LEADING_KEYS: "false"}},
    )


def _write_machines() -> tuple[Statement, ...]:
    return (
        _write("WriteMachines", "records of machines", "UpdateItem", items.CONTROL_PREFIX, items.REPORT_PREFIX),
        _write("WriteHistory", "lines of their histories", "BatchWriteItem", items.history_pk("")),
    )


def _credential() -> Statement:
    return Statement(
        sid="ReadGitHubCredential",
        why="the one secret that holds the GitHub credential",
        actions=("secretsmanager:GetSecretValue",),
        resources=(CREDENTIAL,),
    )


def _messages(classes: Sequence[str]) -> Statement:
    return Statement(
        sid="Messages",
        # SQS judges a batch call by the right to the single one.
        why="announce, receive, hand back and delete hints about idle machines",
        actions=(
            "sqs:ChangeMessageVisibility",
            "sqs:DeleteMessage",
            "sqs:GetQueueAttributes",
            "sqs:GetQueueUrl",
            "sqs:ReceiveMessage",
            "sqs:SendMessage",
        ),
        resources=_queues(classes),
    )


def _terminate() -> Statement:
    return Statement(
        sid="TerminateThePools",
        why="end machines of this pool",
        actions=("ec2:TerminateInstances",),
        resources=INSTANCES,
        conditions={"StringEquals": OF_THE_POOL},
    )


def _look(*operations: str) -> Statement:
    return Statement(
        sid="Look",
        why="see what there is",
        actions=tuple(f"ec2:{operation}" for operation in operations),
        # EC2's Describe calls know neither resources nor tags.
        resources=(EVERYTHING,),
    )


# Workflow -----------------------------------------------------------------------------------------------------------


def workflow(classes: Sequence[str] = CLASSES) -> Policy:
    return Policy(
        name="workflow",
        who="workflows, for `provision` and `release`",
        statements=(
            _read_records(),
            *_write_machines(),
            _write("WriteProvisions", "what a run has asked for", "PutItem", items.run_pk("")),
            _messages(classes),
            *_launch(),
            _terminate(),
            _look("DescribeInstances", "DescribeTags"),
        ),
    )


def _launch() -> tuple[Statement, ...]:
    """EC2 judges a launch by each resource that it touches: as CreateFleet, then again as the RunInstances within."""
    any_template = {"ec2:LaunchTemplate": ec2("launch-template")[0]}
    return (
        Statement(
            sid="LaunchByThePoolsTemplate",
            why="launch with this pool's template (it is told by its tag: EC2 knows its name only as an id)",
            actions=("ec2:CreateFleet", "ec2:RunInstances"),
            resources=ec2("launch-template"),
            conditions={"StringEquals": OF_THE_POOL},
        ),
        Statement(
            sid="LaunchTagged",
            why="launch machines and volumes that carry this pool's tag from the start",
            actions=("ec2:RunInstances",),
            resources=ec2("instance", "volume"),
            conditions={"StringEquals": ASKS_FOR_THE_POOL, "ArnLike": any_template},
        ),
        Statement(
            sid="LaunchWhatTheTemplateNames",
            why="the image, groups and key that the template names, none of one's own choice",
            actions=("ec2:RunInstances",),
            resources=ec2("image", "key-pair", "security-group", "snapshot"),
            conditions={"Bool": {"ec2:IsLaunchTemplateResource": "true"}, "ArnLike": any_template},
        ),
        Statement(
            sid="LaunchInSubnets",
            why="a provision chooses among the pool's subnets",
            actions=("ec2:RunInstances",),
            resources=ec2("network-interface", "subnet"),
            conditions={"ArnLike": any_template},
        ),
        Statement(
            sid="AskForFleets",
            why="ask for machines; what is launched is judged by the rows above",
            actions=("ec2:CreateFleet",),
            resources=ec2(
                "fleet",
                "image",
                "instance",
                "key-pair",
                "network-interface",
                "security-group",
                "snapshot",
                "subnet",
                "volume",
            ),
        ),
        Statement(
            sid="AskForSpot",
            why="the request behind a spot machine; the machine itself is judged by the rows above",
            actions=("ec2:RunInstances",),
            resources=ec2("spot-instances-request"),
        ),
        Statement(
            sid="TagAtLaunch",
            why="tag what it launches, and nothing later",
            actions=("ec2:CreateTags",),
            resources=ec2("instance", "volume"),
            conditions={
                "StringEquals": {"ec2:CreateAction": ("CreateFleet", "RunInstances"), **ASKS_FOR_THE_POOL},
            },
        ),
        Statement(
            sid="GiveTheAgentsRole",
            why="machines get the agent's role, and only machines",
            actions=("iam:PassRole",),
            resources=(AGENT_ROLE,),
            conditions={"StringEquals": {"iam:PassedToService": EC2}},
        ),
        Statement(
            sid="ResolveImages",
            why="an image given as `resolve:ssm:…`: AWS's public ones, or the pool's own",
            actions=("ssm:GetParameters",),
            resources=(
                arn("ssm", "parameter/aws/service/*", account=""),
                arn("ssm", "parameter/remuda/<pool>/*"),
            ),
        ),
    )


# Refresh ------------------------------------------------------------------------------------------------------------


def refresh(classes: Sequence[str] = CLASSES) -> Policy:
    """It launches nothing: so it may not."""
    return Policy(
        name="refresh",
        who="whoever runs `refresh` and `doctor`: the scheduled function, a scheduled workflow, an operator",
        statements=(
            _read_records("Scan"),
            Statement(
                sid="WriteRecords",
                why="the pool's records, its configuration among them",
                actions=_on_items("BatchWriteItem", "PutItem", "UpdateItem"),
                resources=(TABLE,),
            ),
            Statement(
                sid="PrepareTable",
                why="create and verify the table",
                actions=(
                    "dynamodb:CreateTable",
                    "dynamodb:DescribeTable",
                    "dynamodb:DescribeTimeToLive",
                    "dynamodb:UpdateTimeToLive",
                ),
                resources=(TABLE,),
            ),
            _messages(classes),
            Statement(
                sid="PrepareQueues",
                why="create and correct the queues",
                actions=("sqs:CreateQueue", "sqs:SetQueueAttributes"),
                resources=_queues(classes),
            ),
            *_templates(),
            _terminate(),
            _look(
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
                sid="KnowTheAgentsRole",
                why="the role's unique id, which the keys of records begin with",
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
            why="create the launch template, with this pool's tag",
            actions=("ec2:CreateLaunchTemplate",),
            resources=ec2("launch-template"),
            conditions={"StringEquals": ASKS_FOR_THE_POOL},
        ),
        Statement(
            sid="TagTemplate",
            why="tag that template, and nothing later",
            actions=("ec2:CreateTags",),
            resources=ec2("launch-template"),
            conditions={"StringEquals": {"ec2:CreateAction": "CreateLaunchTemplate", **ASKS_FOR_THE_POOL}},
        ),
        Statement(
            sid="ChangeTemplate",
            why="new versions of this pool's launch template",
            actions=("ec2:CreateLaunchTemplateVersion", "ec2:ModifyLaunchTemplate"),
            resources=ec2("launch-template"),
            conditions={"StringEquals": OF_THE_POOL},
        ),
    )


# Scale-down ---------------------------------------------------------------------------------------------------------


def scale_down() -> Policy:
    return Policy(
        name="scale-down",
        who="whoever runs `scale-down`: the scheduled function, a scheduled workflow, an operator",
        statements=(
            _read_records(),
            *_write_machines(),
            Statement(
                sid="TerminateTheFleets",
                why="end machines of this environment's fleet",
                actions=("ec2:TerminateInstances",),
                resources=INSTANCES,
                conditions={"StringEquals": OF_THE_FLEET},
            ),
            Statement(
                sid="MarkOrphans",
                why="note on a machine of this fleet that it is an orphan, or that it is none",
                actions=("ec2:CreateTags", "ec2:DeleteTags"),
                resources=INSTANCES,
                conditions={
                    "StringEquals": OF_THE_FLEET,
                    "ForAllValues:StringEquals": {"aws:TagKeys": (ORPHAN_TAG,)},
                    # DeleteTags without keys removes all of them.
                    "Null": {"aws:TagKeys": "false"},
                },
            ),
            _look("DescribeInstances"),
            _credential(),
        ),
    )


# The functions ------------------------------------------------------------------------------------------------------

#: What runs on a schedule: each has a function, a role and a log of its own.
SCHEDULED = ("refresh", "scale-down")


def log_group(who: str) -> str:
    return f"/remuda/<pool>/{who}"


def function_logs(who: str) -> Policy:
    return Policy(
        name=f"{who}-logs",
        who=f"the function that runs `{who}`, beside the policy `{who}`",
        statements=(
            Statement(
                sid="WriteItsLog",
                why="write its own log; the group itself is the template's",
                actions=("logs:CreateLogStream", "logs:PutLogEvents"),
                resources=(arn("logs", f"log-group:{log_group(who)}:*"),),
            ),
        ),
    )


def policies(classes: Sequence[str] = CLASSES) -> tuple[Policy, ...]:
    return (agent(), workflow(classes), refresh(classes), scale_down(), *map(function_logs, SCHEDULED))
