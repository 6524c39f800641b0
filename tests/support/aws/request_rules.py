"""Rules for requests to AWS that test servers do not check: consistency, conditions, tokens of idempotency, pages.

`contract.py` checks what AWS would reject. Requests that break a rule are accepted, and do something else than was
meant: a read that misses the last write, a write without its condition, a second launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from remuda.adapters.aws.clients import SQS_READ_TIMEOUT_S
from remuda.adapters.aws.dynamodb.items import CONTROL_PREFIX, JOB_PREFIX, REPORT_PREFIX
from remuda.adapters.aws.dynamodb.store import TRIED
from remuda.ports.compute import POOL_TAG

Parameters = Mapping[str, Any]
_STORE = "ports/store.py"
_AWS_DATABASE = "https://docs.aws.amazon.com/amazondynamodb/latest/"
_AWS_EC2 = "https://docs.aws.amazon.com/AWSEC2/latest/"
_AWS_QUEUES = "https://docs.aws.amazon.com/AWSSimpleQueueService/latest/"
#: Seconds that an answer to a long poll may take beyond its wait.
ANSWER_S = 5.0
#: Most resources of one call: one that EC2 rejects fails the whole call.
EC2_BATCH = 100
#: Items that are written without a condition, because nothing depends on who writes last (ports/demand.py, store.py).
_LAST_WRITER_WINS = ("demand", JOB_PREFIX)
_FIRST_SEEN = ("pool", "first_seen")


class BrokenRule(AssertionError):
    """AWS would carry out the request, but not as meant."""


class Rule(NamedTuple):
    #: Such as `sqs:ReceiveMessage`, several separated by blanks.
    operations: str
    requires: str
    is_kept: Callable[[Parameters], bool]
    source: str


def judge_request(service: str, operation: str, parameters: Parameters) -> None:
    """Raise `BrokenRule` with all rules that a request breaks."""
    name = f"{service}:{operation}"
    broken = [
        f"{name} {rule.requires} ({rule.source}): {parameters}"
        for rule in RULES
        if name in rule.operations.split() and not rule.is_kept(parameters)
    ]
    if broken:
        raise BrokenRule("; ".join(broken))


# Conditions of the rules ----------------------------------------------------------------------------------------------


def _partition(key_or_item: Mapping[str, Any]) -> str:
    return str(key_or_item["pk"]["S"])


def _has_condition(parameters: Parameters) -> bool:
    return bool(parameters.get("ConditionExpression"))


def _is_free(item: Mapping[str, Any]) -> bool:
    """Whether the item may be replaced without a condition."""
    is_first_seen = (item["pk"]["S"], item["sk"]["S"]) == _FIRST_SEEN
    return is_first_seen or _partition(item).startswith(_LAST_WRITER_WINS)


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
    Rule(
        "dynamodb:TransactWriteItems",
        "needs a token, with which a repetition is no second transaction",
        lambda given: bool(given.get("ClientRequestToken")),
        f"{_AWS_DATABASE}APIReference/API_TransactWriteItems.html",
    ),
    Rule(
        "ec2:CreateFleet ec2:CreateLaunchTemplate ec2:CreateLaunchTemplateVersion ec2:RunInstances",
        "needs a token, with which a repetition creates nothing",
        lambda given: bool(given.get("ClientToken")) or given.get("DryRun") is True,
        f"{_AWS_EC2}APIReference/Run_Instance_Idempotency.html",
    ),
    Rule("ec2:CreateFleet", "must tag all that it creates: leaks are found by tag", _is_pool_resource, "lifecycle, S7"),
    Rule(
        "ec2:DescribeInstances ec2:DescribeTags",
        "must pass ids as a filter, because an unknown id fails the call, and ask for full pages",
        lambda given: "InstanceIds" not in given and bool(given.get("Filters")) and given.get("MaxResults") == 1_000,
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
