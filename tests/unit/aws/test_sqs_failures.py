"""Every operation of the pool with every class of errors of SQS."""

from __future__ import annotations

from typing import Any

import botocore.session
import pytest

from remuda.adapters.aws.clients import MAX_ATTEMPTS
from remuda.adapters.aws.sqs import BATCH_ATTEMPTS, SqsResourcePool
from remuda.domain.errors import NotFound, Throttled, Unavailable, UserError
from remuda.ports.calls import CallCounter
from simulation.loop import SeededIds
from tests.support.aws.failures import CONNECTION, connection_failures, deviations
from tests.support.aws.scripted_http import AwsScript, ScriptedClient, answer, refusal
from tests.support.failure_tables import Expected, Failing, Outcome, Scripted
from tests.support.records import message
from tests.support.virtual_time import FixedClock

PREFIX = "remuda-ci"
#: Errors of SQS in botocore's model, with their older codes, which SQS sends in a header (awsQueryError in its model).
SQS_CODES = {
    "RequestThrottled": ("RequestThrottled", Expected(Throttled, MAX_ATTEMPTS)),
    "KmsThrottled": ("KMS.ThrottlingException", Expected(Throttled, 1)),
    "QueueDoesNotExist": ("AWS.SimpleQueueService.NonExistentQueue", Expected(NotFound, 1)),
    # More than 120,000 messages in flight, or attributes too often.
    "OverLimit": ("OverLimit", Expected(Unavailable, 1)),
    "QueueDeletedRecently": ("AWS.SimpleQueueService.QueueDeletedRecently", Expected(Unavailable, 1)),
    # Another process created it with other attributes: the next refresh repairs them.
    "QueueNameExists": ("QueueAlreadyExists", Expected(Unavailable, 1)),
    "KmsAccessDenied": ("KMS.AccessDeniedException", Expected(UserError, 1)),
    "KmsDisabled": ("KMS.DisabledException", Expected(UserError, 1)),
    "KmsInvalidKeyUsage": ("KMS.InvalidKeyUsageException", Expected(UserError, 1)),
    "KmsInvalidState": ("KMS.InvalidStateException", Expected(UserError, 1)),
    "KmsNotFound": ("KMS.NotFoundException", Expected(UserError, 1)),
    "KmsOptInRequired": ("KMS.OptInRequired", Expected(UserError, 1)),
    "UnsupportedOperation": ("AWS.SimpleQueueService.UnsupportedOperation", Expected(Unavailable, 1)),
    "InvalidAddress": ("InvalidAddress", Expected(Unavailable, 1)),
    "InvalidSecurity": ("InvalidSecurity", Expected(Unavailable, 1)),
    "InvalidAttributeName": ("InvalidAttributeName", Expected(Unavailable, 1)),
    "InvalidAttributeValue": ("InvalidAttributeValue", Expected(Unavailable, 1)),
    "TooManyEntriesInBatchRequest": (
        "AWS.SimpleQueueService.TooManyEntriesInBatchRequest",
        Expected(Unavailable, 1),
    ),
    "EmptyBatchRequest": ("AWS.SimpleQueueService.EmptyBatchRequest", Expected(Unavailable, 1)),
    "BatchEntryIdsNotDistinct": ("AWS.SimpleQueueService.BatchEntryIdsNotDistinct", Expected(Unavailable, 1)),
    "BatchRequestTooLong": ("AWS.SimpleQueueService.BatchRequestTooLong", Expected(Unavailable, 1)),
    "InvalidBatchEntryId": ("AWS.SimpleQueueService.InvalidBatchEntryId", Expected(Unavailable, 1)),
}
SQS_OUTCOMES: dict[str, Outcome] = {
    **connection_failures(),
    "server": refusal("sqs", "InternalFailure", 500),
    "denied": refusal("sqs", "AccessDenied", 403),
    "expired": refusal("sqs", "ExpiredToken", 403),
    "unknown key": refusal("sqs", "InvalidClientTokenId", 403),
    "clock": refusal("sqs", "SignatureDoesNotMatch", 403),
}
SQS_EXPECTED = {
    **CONNECTION,
    "server": Expected(Unavailable, MAX_ATTEMPTS),
    **dict.fromkeys(("denied", "expired", "unknown key", "clock"), Expected(UserError, 1)),
}
URL = answer("sqs", "GetQueueUrl", {"QueueUrl": "http://aws/1/remuda-ci-large"})
FOUND: Scripted = {"GetQueueUrl": [URL]}
NO_QUEUE: Scripted = {"GetQueueUrl": [refusal("sqs", "AWS.SimpleQueueService.NonExistentQueue")]}
WRONG: Scripted = {**FOUND, "GetQueueAttributes": [answer("sqs", "", {"Attributes": {"DelaySeconds": "5"}})]}
POOL_OPERATIONS = [
    Failing(
        "prepare",
        "GetQueueUrl",
        lambda pool: pool.prepare(["large"]),
        {"CreateQueue": [URL]},
        {"QueueDoesNotExist": Expected(None, 1)},
    ),
    Failing("prepare found", "GetQueueAttributes", lambda pool: pool.prepare(["large"]), FOUND),
    Failing("prepare new", "CreateQueue", lambda pool: pool.prepare(["large"]), NO_QUEUE),
    Failing("prepare wrong", "SetQueueAttributes", lambda pool: pool.prepare(["large"]), WRONG),
    Failing(
        "inspect", "GetQueueUrl", lambda pool: pool.inspect(["large"]), but={"QueueDoesNotExist": Expected(None, 1)}
    ),
    Failing(
        "inspect attributes",
        "GetQueueAttributes",
        lambda pool: pool.inspect(["large"]),
        FOUND,
        {"QueueDoesNotExist": Expected(None, 1)},
    ),
    Failing("send to", "GetQueueUrl", lambda pool: pool.send([message(1)])),
    Failing("send", "SendMessageBatch", lambda pool: pool.send([message(1)]), FOUND),
    Failing("receive", "ReceiveMessage", lambda pool: pool.receive("large", visibility_s=60.0), FOUND),
    Failing("wait", "ReceiveMessage", lambda pool: pool.receive("large", visibility_s=60.0, wait_s=20.0), FOUND),
    Failing("delete", "DeleteMessageBatch", lambda pool: pool.delete("large", ["r-1"]), FOUND),
    Failing("make_visible", "ChangeMessageVisibilityBatch", lambda pool: pool.make_visible("large", ["r-1"]), FOUND),
    Failing("depth", "GetQueueAttributes", lambda pool: pool.depth("large"), FOUND),
]


async def use_pool(http: AwsScript, failing: Failing) -> None:
    client: Any = ScriptedClient(http)
    await failing.call(
        SqsResourcePool(client=client, prefix=PREFIX, clock=FixedClock(), ids=SeededIds(), calls=CallCounter())
    )


@pytest.mark.parametrize("failing", POOL_OPERATIONS, ids=str)
async def test_pool(failing: Failing) -> None:
    failing = failing._replace(but={})
    assert not await deviations("sqs", failing, SQS_OUTCOMES, SQS_EXPECTED, use_pool)


@pytest.mark.parametrize("failing", POOL_OPERATIONS, ids=str)
async def test_pool_with_each_error_of_the_model(failing: Failing) -> None:
    """Each error that botocore's model declares for the operation, by its older and by its newer code."""
    model = botocore.session.get_session().get_service_model("sqs")
    names = [shape.name for shape in model.operation_model(failing.operation).error_shapes]
    expected = {name: SQS_CODES[name][1] for name in names}
    for codes in ({name: SQS_CODES[name][0] for name in names}, {name: name for name in names}):
        outcomes = {name: refusal("sqs", code) for name, code in codes.items()}
        assert not await deviations("sqs", failing, outcomes, expected, use_pool)


STALE = [
    "ReceiptHandleIsInvalid",
    "InvalidParameterValue",
    "MessageNotInflight",
    "AWS.SimpleQueueService.MessageNotInflight",
]
OTHER = ["InternalError", "InternalFailure", "RequestThrottled", "AccessDenied", "InvalidMessageContents", "OverLimit"]


@pytest.mark.parametrize("failing", [each for each in POOL_OPERATIONS if each.operation.endswith("Batch")], ids=str)
async def test_entry_of_a_batch_that_is_rejected(failing: Failing) -> None:
    """A stale receipt is as good as done. A message that is sent has no receipt."""
    done = [] if failing.operation == "SendMessageBatch" else STALE
    expected = {
        code: Expected(None, 1) if code in done else Expected(Unavailable, BATCH_ATTEMPTS) for code in (*STALE, *OTHER)
    }
    entry = {"Id": "0", "SenderFault": True}
    outcomes = {code: answer("sqs", "", {"Successful": [], "Failed": [{**entry, "Code": code}]}) for code in expected}
    assert not await deviations("sqs", failing, outcomes, expected, use_pool)
