"""The resource pool in SQS: one standard queue per resource class."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from botocore import xform_name
from botocore.exceptions import ClientError

from remuda.adapters.aws.calls import QUEUE_MISSING, SQS, await_and_count, chunks, code_of, gather, translated
from remuda.domain import serialization
from remuda.domain.errors import NotFound, Unavailable, UserError
from remuda.domain.resources import PoolMessage
from remuda.domain.text import truncate
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, Ids
from remuda.ports.pool import BATCH, Delivery

if TYPE_CHECKING:
    from types_aiobotocore_sqs import SQSClient

SERVICE = "sqs"
#: Idle instances are published again long before their message expires.
RETENTION_S = 4 * 24 * 3_600
VISIBILITY_S = 60
#: Limits of SQS.
MAX_VISIBILITY_S = 12 * 3_600
MAX_DELAY_S = 900
MAX_WAIT_S = 20
#: Maximum attempts for the entries of a batch that SQS rejects.
BATCH_ATTEMPTS = 2
#: A short poll queries only a subset of SQS's servers, so an empty answer is checked by a second poll.
SHORT_POLLS = 2
#: Maximum length of the reason why a message cannot be parsed.
MAX_REASON = 200

#: Attributes of every queue.
ATTRIBUTES = {
    "MessageRetentionPeriod": str(RETENTION_S),
    "VisibilityTimeout": str(VISIBILITY_S),
    "DelaySeconds": "0",
    "ReceiveMessageWaitTimeSeconds": "0",
}
#: Queues must not have a redrive policy: a message that fits no provision is received and made visible many times, and
#: the policy would move it to the dead-letter queue.
REDRIVE = "RedrivePolicy"
_DEPTHS = ("ApproximateNumberOfMessages", "ApproximateNumberOfMessagesNotVisible", "ApproximateNumberOfMessagesDelayed")
#: SQS's codes for a receipt whose message was deleted, became visible again, or belongs to another queue.
_STALE_RECEIPT = frozenset({"ReceiptHandleIsInvalid", "InvalidParameterValue", "MessageNotInflight"}) | {
    "AWS.SimpleQueueService.MessageNotInflight"
}
_QUEUE_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")


def queue_name(prefix: str, resource_class: str) -> str:
    """Return the name of a class's queue. `prefix` is `remuda-<pool>`.

    The first underscore ends the name of the pool, which cannot contain one. With a hyphen, the class `prod-large` of
    the pool `ci` and the class `large` of the pool `ci-prod` would share a queue. SQS permits no other separator.
    """
    return f"{prefix}_{resource_class}"


class SqsResourcePool:
    def __init__(self, *, client: SQSClient, prefix: str, clock: Clock, ids: Ids, calls: CallCounter) -> None:
        self._client = client
        self._prefix = prefix
        self._clock = clock
        self._ids = ids
        self._calls = calls
        #: Queue URL by resource class. The URL of a queue never changes.
        self._urls: dict[str, str] = {}

    async def prepare(self, classes: Collection[str]) -> Sequence[str]:
        """Create missing queues and repair the attributes of existing ones. Return the changes, for people.

        Raises `UserError` for an invalid queue name or a queue with a redrive policy.
        """
        resource_classes = sorted(set(classes))
        for resource_class in resource_classes:
            if not _QUEUE_NAME.fullmatch(self._queue(resource_class)):
                raise UserError(
                    f"{self._queue(resource_class)!r} is not a valid queue name",
                    fix="use at most 79 letters, digits, '-' and '_' for the names of pool and class together",
                )
        changes = await gather(self._prepare(resource_class) for resource_class in resource_classes)
        return [change for change in changes if change]

    async def inspect(self, classes: Collection[str]) -> Mapping[str, str]:
        """Return what `prepare` would repair or reject, by queue name, without changing anything."""
        resource_classes = sorted(set(classes))
        found = await gather(self._inspect(resource_class) for resource_class in resource_classes)
        return {
            self._queue(resource_class): deviation
            for resource_class, deviation in zip(resource_classes, found, strict=True)
            if deviation
        }

    async def _inspect(self, resource_class: str) -> str:
        try:
            found = await self._attributes(resource_class, await self._url(resource_class), (*ATTRIBUTES, REDRIVE))
        except NotFound:
            return "is missing"
        if found.get(REDRIVE):
            return "has a dead-letter queue, which would take messages out of the pool"
        wrong = _attributes_to_set(found)
        return f"has wrong values of {', '.join(sorted(wrong))}" if wrong else ""

    async def close(self) -> None:
        """Does nothing: the client belongs to the caller."""

    async def send(self, messages: Collection[PoolMessage], *, delay_s: float = 0.0) -> None:
        by_class: dict[str, list[PoolMessage]] = {}
        for message in messages:
            by_class.setdefault(message.resource_class, []).append(message)
        # Look up all queues first, so that nothing is sent if one of them is missing.
        urls = dict(zip(by_class, await gather(self._url(name) for name in by_class), strict=True))
        delay = _whole_seconds(delay_s, MAX_DELAY_S)
        await gather(
            self._batch(
                "SendMessageBatch",
                name,
                urls[name],
                [{"MessageBody": _body(message), "DelaySeconds": delay} for message in batch],
            )
            for name, group in by_class.items()
            for batch in chunks(group, BATCH)
        )

    async def receive(
        self, resource_class: str, *, limit: int = BATCH, visibility_s: float, wait_s: float = 0.0
    ) -> Sequence[Delivery]:
        url = await self._url(resource_class)
        if limit <= 0:
            return []
        deadline = self._clock.monotonic() + wait_s
        polls = 0
        while True:
            polls += 1
            # SQS takes whole seconds: the wait may take up to one second longer.
            remaining_s = max(0.0, deadline - self._clock.monotonic()) if wait_s > 0 else 0.0
            answer = await self._call(
                "ReceiveMessage",
                resource_class,
                QueueUrl=url,
                MaxNumberOfMessages=min(limit, BATCH),
                VisibilityTimeout=_whole_seconds(visibility_s, MAX_VISIBILITY_S),
                WaitTimeSeconds=_whole_seconds(remaining_s, MAX_WAIT_S),
            )
            messages = self._list(answer, "Messages", resource_class)
            is_over = self._clock.monotonic() >= deadline if wait_s > 0 else polls >= SHORT_POLLS
            if messages or is_over:
                # A message without a receipt can be neither deleted nor made visible; SQS delivers it again later.
                return [_delivery(message) for message in messages if message.get("ReceiptHandle")]

    async def delete(self, resource_class: str, receipts: Collection[str]) -> None:
        await self._with_receipts("DeleteMessageBatch", resource_class, receipts, {})

    async def make_visible(self, resource_class: str, receipts: Collection[str]) -> None:
        await self._with_receipts("ChangeMessageVisibilityBatch", resource_class, receipts, {"VisibilityTimeout": 0})

    async def depth(self, resource_class: str) -> int:
        """Return the approximate number of messages, including those in flight and delayed."""
        found = await self._attributes(resource_class, await self._url(resource_class), _DEPTHS)
        try:
            return sum(int(found.get(name, "0")) for name in _DEPTHS)
        except (TypeError, ValueError):
            raise Unavailable(
                f"{SQS} returned no number for the depth of queue {self._queue(resource_class)}"
            ) from None

    # Queues ---------------------------------------------------------------------------------------------------

    def _queue(self, resource_class: str) -> str:
        return queue_name(self._prefix, resource_class)

    async def _url(self, resource_class: str) -> str:
        if resource_class not in self._urls:
            answer = await self._call("GetQueueUrl", resource_class, QueueName=self._queue(resource_class))
            self._urls[resource_class] = self._url_in(answer, resource_class)
        return self._urls[resource_class]

    def _url_in(self, answer: Mapping[str, Any], resource_class: str) -> str:
        url = answer.get("QueueUrl")
        if not isinstance(url, str) or not url:
            raise Unavailable(f"{SQS} returned no URL of queue {self._queue(resource_class)}")
        return url

    async def _prepare(self, resource_class: str) -> str:
        """Create or repair the queue of one class. Return the change for people, or an empty string."""
        self._urls.pop(resource_class, None)
        try:
            url = await self._url(resource_class)
        except NotFound:
            answer = await self._call(
                "CreateQueue", resource_class, QueueName=self._queue(resource_class), Attributes=ATTRIBUTES
            )
            self._urls[resource_class] = self._url_in(answer, resource_class)
            return f"queue {self._queue(resource_class)}"
        found = await self._attributes(resource_class, url, (*ATTRIBUTES, REDRIVE))
        if found.get(REDRIVE):
            raise UserError(
                f"queue {self._queue(resource_class)} has a dead-letter queue,"
                " which would take messages out of the pool",
                fix="remove its redrive policy, or choose another pool name",
            )
        wrong = _attributes_to_set(found)
        if not wrong:
            return ""
        await self._call("SetQueueAttributes", resource_class, QueueUrl=url, Attributes=wrong)
        return f"{', '.join(sorted(wrong))} of queue {self._queue(resource_class)}"

    async def _attributes(self, resource_class: str, url: str, wanted: Sequence[str]) -> Mapping[str, str]:
        answer = await self._call("GetQueueAttributes", resource_class, QueueUrl=url, AttributeNames=wanted)
        found = answer.get("Attributes") or {}
        if not isinstance(found, Mapping):
            raise self._unreadable(resource_class)
        return found

    def _list(self, answer: Mapping[str, Any], name: str, resource_class: str) -> list[Mapping[str, Any]]:
        found = answer.get(name) or []
        if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
            raise self._unreadable(resource_class)
        return found

    def _unreadable(self, resource_class: str) -> Unavailable:
        return Unavailable(f"the response of {SQS} for queue {self._queue(resource_class)} cannot be parsed")

    # Calls ----------------------------------------------------------------------------------------------------

    async def _with_receipts(
        self, operation: str, resource_class: str, receipts: Collection[str], fields: Mapping[str, Any]
    ) -> None:
        url = await self._url(resource_class)
        await gather(
            self._batch(operation, resource_class, url, [{"ReceiptHandle": receipt, **fields} for receipt in batch])
            for batch in chunks(list(dict.fromkeys(receipts)), BATCH)
        )

    async def _batch(self, operation: str, resource_class: str, url: str, entries: Sequence[Mapping[str, Any]]) -> None:
        """Send all entries and retry those that SQS rejects. A stale receipt counts as done."""
        remaining = {str(number): entry for number, entry in enumerate(entries)}
        codes: set[str] = set()
        for _ in range(BATCH_ATTEMPTS):
            batch = [{"Id": key, **entry} for key, entry in remaining.items()]
            answer = await self._call(operation, resource_class, QueueUrl=url, Entries=batch)
            failed = {
                str(each.get("Id")): str(each.get("Code", ""))
                for each in self._list(answer, "Failed", resource_class)
                # The codes of a stale receipt can mean other failures in a send, whose entries have no receipt.
                if "ReceiptHandle" not in entries[0] or each.get("Code") not in _STALE_RECEIPT
            }
            remaining = {key: entry for key, entry in remaining.items() if key in failed}
            codes = set(failed.values())
            if not remaining:
                return
        raise Unavailable(
            f"{SQS} rejected {len(remaining)} of {len(entries)} entries of a batch for queue"
            f" {self._queue(resource_class)}: {', '.join(sorted(codes))}"
        )

    async def _call(self, operation: str, resource_class: str, **arguments: Any) -> dict[str, Any]:
        call: Awaitable[dict[str, Any]] = getattr(self._client, xform_name(operation))(**arguments)
        with translated(SQS, self._queue(resource_class)):
            try:
                return await await_and_count(call, self._calls, SERVICE, operation)
            except ClientError as error:
                if code_of(error) in QUEUE_MISSING:
                    self._urls.pop(resource_class, None)
                raise


def _attributes_to_set(found: Mapping[str, str]) -> dict[str, str]:
    """The attributes with a wrong value, and their right values. Attributes that SQS did not return are ignored."""
    return {key: value for key, value in ATTRIBUTES.items() if found.get(key, value) != value}


def _whole_seconds(seconds: float, maximum: int) -> int:
    """Round up, so that nothing happens earlier than requested, and limit the result to what SQS accepts."""
    return max(0, min(math.ceil(seconds), maximum))


def _body(message: PoolMessage) -> str:
    return json.dumps(serialization.to_document(message), separators=(",", ":"))


def _delivery(message: Mapping[str, Any]) -> Delivery:
    receipt = str(message["ReceiptHandle"])
    try:
        return Delivery(receipt=receipt, message=serialization.from_document(PoolMessage, _document(message)))
    except ValueError as error:
        return Delivery(receipt=receipt, message=None, malformed=truncate(str(error), MAX_REASON))


def _document(message: Mapping[str, Any]) -> Any:
    try:
        return json.loads(message.get("Body", ""))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except TypeError:
        raise ValueError("the body is not text") from None
