"""Rules for requests to AWS that test servers do not check: consistency, conditions, versions, owners, pages.

`contract.py` checks what AWS would reject, and `model_rules.py` what the models say about every operation. Requests
that break a rule of this file are accepted, and do something else than was meant: a read that misses the last write, a
write without its condition, a launch of another version. Every operation that Remuda calls is in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from remuda.adapters.aws.clients import SQS_READ_TIMEOUT_S
from remuda.adapters.aws.dynamodb.items import CONTROL_PREFIX, JOB_PREFIX, REPORT_PREFIX
from remuda.adapters.aws.dynamodb.store import TRIED
from remuda.ports.compute import POOL_TAG
from tests.support.aws.model_rules import model_problems

Parameters = Mapping[str, Any]
_STORE = "ports/store.py"
_AWS_DATABASE = "https://docs.aws.amazon.com/amazondynamodb/latest/"
_AWS_EC2 = "https://docs.aws.amazon.com/AWSEC2/latest/"
_AWS_QUEUES = "https://docs.aws.amazon.com/AWSSimpleQueueService/latest/"
_AWS_STACKS = "https://docs.aws.amazon.com/AWSCloudFormation/latest/APIReference/"
_AWS_OBJECTS = "https://docs.aws.amazon.com/AmazonS3/latest/"
#: Seconds that an answer to a long poll may take beyond its wait.
ANSWER_S = 5.0
#: Most resources of one call: one that EC2 rejects fails the whole call.
EC2_BATCH = 100
#: Items that are written without a condition, because nothing depends on who writes last (ports/demand.py, store.py).
_LAST_WRITER_WINS = ("demand", JOB_PREFIX)
_SWEEP = ("pool", "sweep")


class BrokenRule(AssertionError):
    """AWS would carry out the request, but not as meant."""


class Rule(NamedTuple):
    #: Such as `sqs:ReceiveMessage`, several separated by blanks.
    operations: str
    requires: str
    is_kept: Callable[[Parameters], bool]
    source: str


def judge_request(service: str, operation: str, parameters: Parameters, *, adds_tokens: bool = False) -> None:
    """Raise `BrokenRule` with all rules that a request breaks. `adds_tokens`: it goes through a client of botocore."""
    name = f"{_SERVICES.get(service, service)}:{operation}"
    rules = [rule for rule in RULES if name in rule.operations.split()]
    broken = [f"{rule.requires} ({rule.source})" for rule in rules if not rule.is_kept(parameters)]
    broken += model_problems(service, operation, parameters, adds_tokens=adds_tokens)
    if not rules and name not in WITHOUT_RULES:
        broken.append("is new: give it a rule here, or name it in WITHOUT_RULES")
    if broken:
        raise BrokenRule(f"{name} {'; '.join(broken)}: {parameters}")


#: Services whose name in host names is another one.
_SERVICES = {"monitoring": "cloudwatch"}


# Conditions of the rules ----------------------------------------------------------------------------------------------


def _partition(key_or_item: Mapping[str, Any]) -> str:
    return str(key_or_item["pk"]["S"])


def _has_condition(parameters: Parameters) -> bool:
    return bool(parameters.get("ConditionExpression"))


def _is_free(item: Mapping[str, Any]) -> bool:
    """Whether the item may be replaced without a condition."""
    is_sweep_record = (item["pk"]["S"], item["sk"]["S"]) == _SWEEP
    return is_sweep_record or _partition(item).startswith(_LAST_WRITER_WINS)


def _is_guarded_update(parameters: Parameters) -> bool:
    """A condition, or a heartbeat: the only update whose fields the agent may replace at any time."""
    is_beat = _partition(parameters["Key"]).startswith(REPORT_PREFIX) and " ADD " in (
        f" {parameters['UpdateExpression']}"
    )
    return _has_condition(parameters) or is_beat


def _tells_the_winner(parameters: Parameters) -> bool:
    partition = _partition(parameters["Key"])
    is_unread = partition.startswith(REPORT_PREFIX) or partition == f"{CONTROL_PREFIX}{TRIED}"
    wanted = ("NONE", None) if is_unread else ("ALL_NEW", "ALL_OLD")
    return (parameters.get("ReturnValues"), parameters.get("ReturnValuesOnConditionCheckFailure")) == wanted


def _are_guarded_parts(parameters: Parameters) -> bool:
    for part in parameters["TransactItems"]:
        ((kind, write),) = part.items()
        if not (_has_condition(write) or (kind == "Put" and _is_free(write["Item"]))):
            return False
    return True


def _may_be_unconditional(parameters: Parameters) -> bool:
    """A batch has no conditions: only history and jobs are written by it, and only demand and reports deleted."""
    written, deleted = ("history#", JOB_PREFIX), ("demand", REPORT_PREFIX)
    return all(
        _partition(each["PutRequest"]["Item"]).startswith(written)
        if "PutRequest" in each
        else _partition(each["DeleteRequest"]["Key"]).startswith(deleted)
        for each in _of_all_tables(parameters)
    )


def _of_all_tables(parameters: Parameters) -> Iterator[Mapping[str, Any]]:
    for requests in parameters["RequestItems"].values():
        yield from requests


def _is_pool_resource(parameters: Parameters) -> bool:
    tagged = {
        each["ResourceType"] for each in parameters["TagSpecifications"] if POOL_TAG in {t["Key"] for t in each["Tags"]}
    }
    return parameters["Type"] == "instant" and {"instance", "volume", "fleet"} <= tagged


def _is_of_one_usage_class(parameters: Parameters) -> bool:
    """Spot instances are never stopped, and the options of the other usage class would say nothing."""
    spot = parameters.get("SpotOptions", {})
    if parameters["TargetCapacitySpecification"]["DefaultTargetCapacityType"] == "spot":
        return "OnDemandOptions" not in parameters and bool(spot.get("InstanceInterruptionBehavior") == "terminate")
    return "SpotOptions" not in parameters


def _launches_the_default(parameters: Parameters) -> bool:
    used = [each["LaunchTemplateSpecification"] for each in parameters["LaunchTemplateConfigs"]]
    return all(each.get("Version") == "$Default" for each in used)


def _is_safe_template(parameters: Parameters) -> bool:
    data = parameters["LaunchTemplateData"]
    wanted = {"HttpTokens": "required", "HttpPutResponseHopLimit": 1, "InstanceMetadataTags": "enabled"}
    ends = data.get("InstanceInitiatedShutdownBehavior") == "terminate"
    return bool(ends and wanted.items() <= data.get("MetadataOptions", {}).items())


def _has_distinct_ids(parameters: Parameters) -> bool:
    ids = [each["Id"] for each in parameters["Entries"]]
    return bool(ids) and len(set(ids)) == len(ids)


def _is_waited_for(parameters: Parameters) -> bool:
    return bool(parameters["WaitTimeSeconds"] + ANSWER_S <= SQS_READ_TIMEOUT_S)


#: What each request must be like, why, and who says so.
RULES: Sequence[Rule] = (
    Rule(
        "dynamodb:GetItem",
        "must be strongly consistent: reads by key see all acknowledged writes",
        lambda given: given.get("ConsistentRead") is True,
        _STORE,
    ),
    Rule(
        "dynamodb:BatchGetItem",
        "must be strongly consistent, the remainder of a batch too",
        lambda given: all(each.get("ConsistentRead") is True for each in given["RequestItems"].values()),
        _STORE,
    ),
    Rule(
        "dynamodb:Query",
        "must be strongly consistent, or of an index, which cannot be",
        lambda given: ("IndexName" in given) != (given.get("ConsistentRead") is True),
        f"{_AWS_DATABASE}developerguide/HowItWorks.ReadConsistency.html",
    ),
    Rule("dynamodb:UpdateItem", "needs its condition, except a heartbeat", _is_guarded_update, _STORE),
    Rule(
        "dynamodb:UpdateItem",
        "must return the record or the winner's; that of a report must not, which the agent's policy denies",
        _tells_the_winner,
        _STORE,
    ),
    Rule(
        "dynamodb:PutItem",
        "needs its condition, except where the last writer wins",
        lambda given: _has_condition(given) or _is_free(given["Item"]),
        _STORE,
    ),
    Rule(
        "dynamodb:PutItem",
        "must return the winner's record",
        lambda given: given.get("ReturnValuesOnConditionCheckFailure") == "ALL_OLD",
        _STORE,
    ),
    Rule(
        "dynamodb:BatchWriteItem",
        "must not write what others decide on: it has no condition",
        _may_be_unconditional,
        _STORE,
    ),
    Rule(
        "dynamodb:TransactWriteItems",
        "needs a condition for each record",
        _are_guarded_parts,
        _STORE,
    ),
    Rule("ec2:CreateFleet", "must tag all that it creates: leaks are found by tag", _is_pool_resource, "lifecycle, S7"),
    Rule(
        "ec2:CreateFleet",
        "must launch the default version: a refresh that was interrupted leaves a newer one",
        _launches_the_default,
        "adapters/aws/ec2/template.py",
    ),
    Rule(
        "ec2:CreateLaunchTemplate ec2:CreateLaunchTemplateVersion",
        "must have a description, by which the next refresh recognises the version",
        lambda given: bool(given.get("VersionDescription")),
        "adapters/aws/ec2/template.py",
    ),
    Rule(
        "ec2:CreateLaunchTemplate ec2:CreateLaunchTemplateVersion",
        "must let instances end by powering off, and hide their metadata from jobs",
        _is_safe_template,
        f"{_AWS_EC2}APIReference/API_InstanceMetadataOptionsRequest.html",
    ),
    Rule(
        "ec2:CreateFleet",
        "must have the options of its usage class",
        _is_of_one_usage_class,
        f"{_AWS_EC2}APIReference/API_SpotOptionsRequest.html",
    ),
    Rule("ec2:RunInstances", "must be a dry run", lambda given: given.get("DryRun") is True, "adapters/aws/doctor.py"),
    Rule(
        "ec2:DescribeSpotPriceHistory",
        "must name the product, the beginning and the end: a type has one price per product",
        lambda given: given.get("ProductDescriptions") == ["Linux/UNIX"] and {"StartTime", "EndTime"} <= set(given),
        f"{_AWS_EC2}APIReference/API_DescribeSpotPriceHistory.html",
    ),
    Rule(
        "ec2:DescribeLaunchTemplateVersions",
        "must name versions: all of them have several pages",
        lambda given: bool(given.get("Versions")),
        f"{_AWS_EC2}APIReference/API_DescribeLaunchTemplateVersions.html",
    ),
    Rule(
        "ec2:DescribeInstances ec2:DescribeTags",
        "must pass ids as a filter, because an unknown id fails the call, and ask for full pages",
        lambda given: (
            "InstanceIds" not in given
            and bool(given.get("Filters"))
            and (given.get("MaxResults") == 1_000 or given.get("DryRun") is True)
        ),
        f"{_AWS_EC2}APIReference/API_DescribeInstances.html",
    ),
    Rule(
        "ec2:TerminateInstances ec2:CreateTags ec2:DeleteTags",
        f"must have at most {EC2_BATCH} resources: one that EC2 rejects fails the call",
        lambda given: 0 < len(given.get("InstanceIds", given.get("Resources", ()))) <= EC2_BATCH,
        f"{_AWS_EC2}APIReference/API_TerminateInstances.html",
    ),
    Rule(
        "sqs:SendMessageBatch sqs:DeleteMessageBatch sqs:ChangeMessageVisibilityBatch",
        "must have entries with distinct ids",
        _has_distinct_ids,
        f"{_AWS_QUEUES}APIReference/API_SendMessageBatch.html",
    ),
    Rule(
        "sqs:ReceiveMessage",
        "must be answered before the client gives up: a lost answer hides its messages",
        _is_waited_for,
        f"{_AWS_QUEUES}SQSDeveloperGuide/sqs-short-and-long-polling.html",
    ),
    Rule(
        "sqs:ChangeMessageVisibilityBatch",
        "hands messages back at once",
        lambda given: all(each.get("VisibilityTimeout") == 0 for each in given["Entries"]),
        "ports/pool.py",
    ),
    Rule(
        "sqs:CreateQueue sqs:SetQueueAttributes",
        "must not set a redrive policy: idle instances would leave the pool",
        lambda given: "RedrivePolicy" not in given.get("Attributes", {}),
        "adapters/aws/sqs.py",
    ),
    Rule(
        "sqs:SendMessageBatch sqs:CreateQueue sqs:SetQueueAttributes",
        "must not use what only FIFO queues have: a standard queue ignores it",
        lambda given: (
            not any(
                name in {"FifoQueue", "MessageGroupId", "MessageDeduplicationId", "ContentBasedDeduplication"}
                for each in (given.get("Attributes", {}), *given.get("Entries", ()))
                for name in each
            )
        ),
        f"{_AWS_QUEUES}SQSDeveloperGuide/standard-queues.html",
    ),
    Rule(
        "dynamodb:CreateTable",
        "must be paid by request: a burst of workflows would be throttled",
        lambda given: given.get("BillingMode") == "PAY_PER_REQUEST",
        "adapters/aws/dynamodb/schema.py",
    ),
    Rule(
        "ec2:CreateLaunchTemplate ec2:CreateSecurityGroup secretsmanager:CreateSecret "
        "iam:CreateOpenIDConnectProvider s3:PutBucketTagging",
        "must have the tag of the pool: remuda destroy finds it by that",
        lambda given: POOL_TAG in repr(given.get("TagSpecifications") or given.get("Tags") or given.get("Tagging")),
        "deployment/resources.py",
    ),
    Rule(
        "s3:HeadBucket s3:GetBucketTagging s3:ListObjectsV2 s3:ListObjectVersions s3:PutPublicAccessBlock "
        "s3:PutBucketEncryption s3:PutBucketPolicy s3:PutBucketTagging s3:HeadObject s3:PutObject s3:DeleteObject "
        "s3:DeleteObjects s3:DeleteBucket",
        "must name the owner: another account may have taken the name of a deleted bucket",
        lambda given: bool(given.get("ExpectedBucketOwner")),
        f"{_AWS_OBJECTS}userguide/bucket-owner-condition.html",
    ),
    Rule(
        "s3:PutObject",
        "must have a digest: S3 refuses other content, so an object under the key is complete",
        lambda given: bool(given.get("ChecksumSHA256")),
        f"{_AWS_OBJECTS}userguide/checking-object-integrity.html",
    ),
    Rule(
        "s3:CreateBucket",
        "must not name the first region, which S3 rejects",
        lambda given: given.get("CreateBucketConfiguration", {}).get("LocationConstraint") != "us-east-1",
        f"{_AWS_OBJECTS}API/API_CreateBucket.html",
    ),
    Rule(
        "cloudformation:ExecuteChangeSet cloudformation:DescribeChangeSet",
        "must name the change set by its id: another deployment may have replaced the one of this name",
        lambda given: str(given.get("ChangeSetName", "")).startswith("arn:"),
        f"{_AWS_STACKS}API_ExecuteChangeSet.html",
    ),
    Rule(
        "cloudformation:CreateChangeSet",
        "must say whether the stack is new, and that its policies are meant",
        lambda given: "ChangeSetType" in given and given.get("Capabilities") == ["CAPABILITY_NAMED_IAM"],
        f"{_AWS_STACKS}API_CreateChangeSet.html",
    ),
    Rule(
        "cloudwatch:PutMetricData",
        "must not use a namespace of AWS",
        lambda given: not given["Namespace"].startswith("AWS/"),
        "https://docs.aws.amazon.com/AmazonCloudWatch/latest/APIReference/API_PutMetricData.html",
    ),
)
#: Operations of which `contract.py` and `model_rules.py` check all that can be wrong: each names one thing, which it
#: reads or sets as a whole. Whoever adds an operation gives it a rule, or adds it here.
WITHOUT_RULES = frozenset(
    [
        *("autoscaling:CompleteLifecycleAction", "cloudformation:SignalResource", "sts:GetCallerIdentity"),
        *("cloudformation:DeleteChangeSet", "cloudformation:DeleteStack", "cloudformation:DescribeStackEvents"),
        *("cloudformation:DescribeStacks", "cloudformation:GetTemplate", "cloudformation:ListStacks"),
        *("dynamodb:DescribeTable", "dynamodb:DescribeTimeToLive", "dynamodb:UpdateTimeToLive", "dynamodb:Scan"),
        *("dynamodb:DeleteTable", "dynamodb:ListTagsOfResource", "sqs:GetQueueUrl", "sqs:GetQueueAttributes"),
        *("ec2:DescribeImages", "ec2:DescribeLaunchTemplates", "ec2:DescribeSubnets", "ec2:DescribeSecurityGroups"),
        *("ec2:ModifyLaunchTemplate", "ec2:DeleteLaunchTemplate", "ec2:DeleteSecurityGroup", "ec2:DescribeVpcs"),
        *("ec2:DescribeInstanceTypes", "ec2:DescribeRouteTables", "ec2:DescribeSnapshots", "ec2:DescribeVpcEndpoints"),
        *("ec2:GetEbsDefaultKmsKeyId", "kms:DescribeKey", "kms:GetKeyPolicy", "ssm:GetParameters"),
        *("iam:GetInstanceProfile", "iam:GetRole", "iam:ListRoles", "iam:CreateServiceLinkedRole"),
        *("iam:GetOpenIDConnectProvider", "iam:ListOpenIDConnectProviders", "iam:DeleteOpenIDConnectProvider"),
        "iam:AddClientIDToOpenIDConnectProvider",
        *("lambda:GetAccountSettings", "lambda:Invoke", "logs:DescribeLogGroups", "logs:DeleteLogGroup"),
        *("secretsmanager:GetSecretValue", "secretsmanager:DescribeSecret", "secretsmanager:PutSecretValue"),
        *("secretsmanager:RestoreSecret", "secretsmanager:DeleteSecret"),
        *("service-quotas:GetServiceQuota", "service-quotas:GetAWSDefaultServiceQuota"),
    ]
)

# Rules about several requests -----------------------------------------------------------------------------------------

#: Token of the next page in answers, and its name in the next request.
_PAGES = {"LastEvaluatedKey": "ExclusiveStartKey", "NextToken": "NextToken"}
#: Identifies a transaction that is sent again. That of a launch may be used by another process, too.
_TOKEN = "ClientRequestToken"


class RequestSequence:
    """The requests of one client: the pages of a list are those of one request, and a token belongs to one request."""

    def __init__(self) -> None:
        #: Requests without their place in the list, by operation and token of the next page.
        self._paged: dict[tuple[str, str], Parameters] = {}
        self._by_token: dict[str, Parameters] = {}

    def judge(self, service: str, operation: str, parameters: Parameters) -> None:
        name = f"{service}:{operation}"
        judge_request(service, operation, parameters)
        for start in set(_PAGES.values()) & set(parameters):
            first = self._paged.get((name, repr(parameters[start])))
            if first != _without(parameters, start):
                raise BrokenRule(f"{name} continues another list: {parameters}, not {first}")
        known = self._by_token.setdefault(str(parameters.get(_TOKEN)), parameters)
        if _TOKEN in parameters and known != parameters:
            raise BrokenRule(f"{name} uses the token of another request: {parameters}, not {known}")

    def observe(self, service: str, operation: str, parameters: Parameters, answer: Mapping[str, Any]) -> None:
        for found, start in _PAGES.items():
            if answer.get(found):
                self._paged[f"{service}:{operation}", repr(answer[found])] = _without(parameters, start)


def _without(parameters: Parameters, name: str) -> Parameters:
    return {key: value for key, value in parameters.items() if key != name}
