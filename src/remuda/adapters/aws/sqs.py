"""The pool in SQS: one standard queue a resource class."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from botocore.exceptions import ClientError

from remuda.adapters.aws.errors import FAILURES, QUEUE_MISSING, SQS, answered, attempts_of, code_of, translated
from remuda.adapters.aws.gather import chunks, gathered
from remuda.domain import serialization
from remuda.domain.errors import NotFound, Unavailable, UserError
from remuda.domain.resources import PoolMessage
from remuda.domain.text import truncate
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, Ids
from remuda.ports.pool import BATCH, Delivery

if TYPE_CHECKING:
    from types_aiobotocore_sqs import SQSClient

T = TypeVar("T")

SERVICE = "sqs"
#: An idle instance is announced again long before its message is forgotten.
RETENTION_S = 4 * 24 * 3_600
VISIBILITY_S = 60
#: What SQS allows.
MAX_VISIBILITY_S = 12 * 3_600
MAX_DELAY_S = 900
MAX_WAIT_S = 20
#: A batch of which a part was refused is tried so often in all.
BATCH_TRIES = 2
#: A short poll asks only some of SQS's hosts: an empty answer is asked for again.
SHORT_POLLS = 2
#: How much a log may hear of a body that cannot be parsed.
MAX_REASON = 200

#: Of every queue.
ATTRIBUTES = {
    "MessageRetentionPeriod": str(RETENTION_S),
    "VisibilityTimeout": str(VISIBILITY_S),
    "DelaySeconds": "0",
    "ReceiveMessageWaitTimeSeconds": "0",
}
#: What no queue may have: a hint is received and handed back as often as it does not fit.
REDRIVE = "RedrivePolicy"
_DEPTHS = (
    "ApproximateNumberOfMessages",
    "ApproximateNumberOfMessagesNotVisible",
    "ApproximateNumberOfMessagesDelayed",
)
#: What SQS says of a receipt whose message is gone, came back, or was of another queue.
_STALE = frozenset({"ReceiptHandleIsInvalid", "InvalidParameterValue", "MessageNotInflight"}) | {
    "AWS.SimpleQueueService.MessageNotInflight"
}
_QUEUE_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")


class SqsResourcePool:
    def __init__(self, *, client: SQSClient, prefix: str, clock: Clock, ids: Ids, calls: CallCounter) -> None:
        self._client = client
        self._prefix = prefix
        self._clock = clock
        self._ids = ids
        self._calls = calls
        #: By class. A queue's address never changes while it lives.
        self._urls: dict[str, str] = {}

    async def prepare(self, classes: Collection[str]) -> Sequence[str]:
        names = sorted(set(classes))
        for name in names:
            if not _QUEUE_NAME.fullmatch(self._queue(name)):
                raise UserError(
                    f"{self._queue(name)!r} cannot be the name of a queue",
                    fix="shorten the names of pool and class to 79 letters, digits, '-' and '_' in all",
                )
        done = await gathered(self._prepare(name) for name in names)
        return [what for what in done if what]

    async def inspect(self, classes: Collection[str]) -> Mapping[str, str]:
        """What `prepare` would do, by queue; empty where all is as it should be. Nothing is changed."""
        names = sorted(set(classes))
        found = await gathered(self._inspect(name) for name in names)
        return {self._queue(name): what for name, what in zip(names, found, strict=True) if what}

    async def _inspect(self, name: str) -> str:
        try:
            found = await self._attributes(name, await self._url(name), (*ATTRIBUTES, REDRIVE))
        except NotFound:
            return "is missing"
        if found.get(REDRIVE):
            return "has a dead-letter queue, which would swallow hints"
        wrong = _wrong(found)
        return f"has other values of {', '.join(sorted(wrong))}" if wrong else ""

    async def close(self) -> None:
        """The client is its owner's to close."""

    async def send(self, messages: Collection[PoolMessage], *, delay_s: float = 0.0) -> None:
        by_class: dict[str, list[PoolMessage]] = {}
        for message in messages:
            by_class.setdefault(message.resource_class, []).append(message)
        # All of them first: nothing is sent where one class has no queue.
        urls = dict(zip(by_class, await gathered(self._url(name) for name in by_class), strict=True))
        delay = _whole(delay_s, MAX_DELAY_S)
        await gathered(
            self._batch(
                "SendMessageBatch",
                self._client.send_message_batch,
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
        give_up_at = self._clock.monotonic() + wait_s
        polls = 0
        while True:
            polls += 1
            # Whole seconds only: a wait may last up to one more.
            remaining_s = max(0.0, give_up_at - self._clock.monotonic()) if wait_s > 0 else 0.0
            answer = await self._call(
                "ReceiveMessage",
                self._client.receive_message,
                resource_class,
                QueueUrl=url,
                MaxNumberOfMessages=min(limit, BATCH),
                VisibilityTimeout=_whole(visibility_s, MAX_VISIBILITY_S),
                WaitTimeSeconds=_whole(remaining_s, MAX_WAIT_S),
            )
            messages = answer.get("Messages", [])
            over = self._clock.monotonic() >= give_up_at if wait_s > 0 else polls >= SHORT_POLLS
            if messages or over:
                # Without a receipt it can be neither deleted nor handed back: it comes again by itself.
                return [_delivery(message) for message in messages if message.get("ReceiptHandle")]

    async def delete(self, resource_class: str, receipts: Collection[str]) -> None:
        await self._with_receipts("DeleteMessageBatch", self._client.delete_message_batch, resource_class, receipts, {})

    async def hand_back(self, resource_class: str, receipts: Collection[str]) -> None:
        await self._with_receipts(
            "ChangeMessageVisibilityBatch",
            self._client.change_message_visibility_batch,
            resource_class,
            receipts,
            {"VisibilityTimeout": 0},
        )

    async def depth(self, resource_class: str) -> int:
        found = await self._attributes(resource_class, await self._url(resource_class), _DEPTHS)
        try:
            return sum(int(found.get(name, "0")) for name in _DEPTHS)
        except (TypeError, ValueError):
            raise Unavailable(f"{SQS} gives no number for the depth of {self._queue(resource_class)}") from None

    # Queues ---------------------------------------------------------------------------------------------------

    def _queue(self, resource_class: str) -> str:
        return f"{self._prefix}-{resource_class}"

    async def _url(self, resource_class: str) -> str:
        if resource_class not in self._urls:
            answer = await self._call(
                "GetQueueUrl", self._client.get_queue_url, resource_class, QueueName=self._queue(resource_class)
            )
            self._urls[resource_class] = self._url_in(answer, resource_class)
        return self._urls[resource_class]

    def _url_in(self, answer: Mapping[str, Any], resource_class: str) -> str:
        url = answer.get("QueueUrl")
        if not isinstance(url, str) or not url:
            raise Unavailable(f"{SQS} gives no address for queue {self._queue(resource_class)}")
        return url

    async def _prepare(self, name: str) -> str:
        """What was done, or empty."""
        self._urls.pop(name, None)
        try:
            url = await self._url(name)
        except NotFound:
            answer = await self._call(
                "CreateQueue",
                self._client.create_queue,
                name,
                QueueName=self._queue(name),
                Attributes=ATTRIBUTES,
            )
            self._urls[name] = self._url_in(answer, name)
            return f"queue {self._queue(name)}"
        found = await self._attributes(name, url, (*ATTRIBUTES, REDRIVE))
        if found.get(REDRIVE):
            raise UserError(
                f"queue {self._queue(name)} has a dead-letter queue: hints that fit no run for a while would end there",
                fix="remove its redrive policy, or name another pool",
            )
        wrong = _wrong(found)
        if not wrong:
            return ""
        await self._call("SetQueueAttributes", self._client.set_queue_attributes, name, QueueUrl=url, Attributes=wrong)
        return f"{', '.join(sorted(wrong))} of queue {self._queue(name)}"

    async def _attributes(self, name: str, url: str, wanted: Sequence[str]) -> Mapping[str, str]:
        answer = await self._call(
            "GetQueueAttributes", self._client.get_queue_attributes, name, QueueUrl=url, AttributeNames=wanted
        )
        return {str(key): value for key, value in answer.get("Attributes", {}).items()}

    # Calls ----------------------------------------------------------------------------------------------------

    async def _with_receipts(
        self,
        operation: str,
        method: Callable[..., Awaitable[Any]],
        resource_class: str,
        receipts: Collection[str],
        fields: Mapping[str, Any],
    ) -> None:
        url = await self._url(resource_class)
        await gathered(
            self._batch(
                operation, method, resource_class, url, [{"ReceiptHandle": receipt, **fields} for receipt in batch]
            )
            for batch in chunks(list(dict.fromkeys(receipts)), BATCH)
        )

    async def _batch(
        self,
        operation: str,
        method: Callable[..., Awaitable[Any]],
        resource_class: str,
        url: str,
        entries: Sequence[Mapping[str, Any]],
    ) -> None:
        """All of them, those that were refused once more; what is stale is done."""
        left = {str(number): entry for number, entry in enumerate(entries)}
        codes: set[str] = set()
        for _ in range(BATCH_TRIES):
            batch = [{"Id": key, **entry} for key, entry in left.items()]
            answer = await self._call(operation, method, resource_class, QueueUrl=url, Entries=batch)
            failed = {
                str(each.get("Id")): str(each.get("Code", ""))
                for each in answer.get("Failed", [])
                if "ReceiptHandle" not in entries[0] or each.get("Code") not in _STALE
            }
            left = {key: entry for key, entry in left.items() if key in failed}
            codes = set(failed.values())
            if not left:
                return
        raise Unavailable(
            f"{SQS} refused {len(left)} of {len(entries)} entries of a batch for queue {self._queue(resource_class)}:"
            f" {', '.join(sorted(codes))}"
        )

    async def _call(
        self, operation: str, method: Callable[..., Awaitable[T]], resource_class: str, **arguments: Any
    ) -> T:
        attempts, failed = 1, 0
        try:
            with translated(SQS, self._queue(resource_class)):
                try:
                    answer = await answered(method(**arguments))
                except FAILURES as error:
                    attempts = failed = attempts_of(error.response) if isinstance(error, ClientError) else 1
                    if isinstance(error, ClientError) and code_of(error) in QUEUE_MISSING:
                        self._urls.pop(resource_class, None)
                    raise
                attempts = attempts_of(answer)
                failed = attempts - 1
                return answer
        finally:
            self._calls.add(SERVICE, operation, attempts)
            self._calls.fail(SERVICE, operation, failed)


def _wrong(found: Mapping[str, str]) -> dict[str, str]:
    """The attributes that have another value, with the one that they should have."""
    return {key: value for key, value in ATTRIBUTES.items() if found.get(key, value) != value}


def _whole(seconds: float, most: int) -> int:
    """Up to a whole second: never sooner than asked."""
    return max(0, min(math.ceil(seconds), most))


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
        raise ValueError("its body is no text") from None
