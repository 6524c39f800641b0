"""Calls to one DynamoDB table: counted, errors translated, all pages read, batches completed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from botocore.exceptions import ClientError, ParamValidationError

from remuda.adapters.aws.calls import (
    CONDITION_FAILED,
    DYNAMODB,
    TRANSACTION_CANCELLED,
    await_and_count,
    cancellation_reasons,
    chunks,
    code_of,
    gather,
    item_of,
    requests_of,
    translated,
)
from remuda.adapters.aws.dynamodb.items import PK, SK, Item
from remuda.domain.errors import Throttled, Unavailable
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, Ids, backoff_s

if TYPE_CHECKING:
    from types_aiobotocore_dynamodb import DynamoDBClient

T = TypeVar("T")

SERVICE = "dynamodb"
#: DynamoDB's limits: items per BatchGetItem, BatchWriteItem and TransactWriteItems.
READ_BATCH = 100
WRITE_BATCH = 25
TRANSACTION = 100
#: Attempts for the unprocessed rest of a batch, and seconds before the first retry.
BATCH_ATTEMPTS = 6
BATCH_PAUSE_S = 0.1
#: Prefix of the operation name under which polling reads are counted.
POLL = "poll:"


class ConditionFailed(Exception):
    """The condition of a write failed. Nothing was written."""

    def __init__(self, item: Item | None, *, retried: bool) -> None:
        super().__init__("the condition failed")
        #: The stored item.
        self.item = item
        #: botocore sent the call more than once: an earlier attempt may have been applied.
        self.retried = retried


class TransactionCancelled(Exception):
    """A transaction was cancelled. Nothing was written."""

    def __init__(self, reasons: Sequence[str], *, retried: bool) -> None:
        super().__init__("the transaction was cancelled")
        #: The reason of each item, in order. Empty if DynamoDB gave none.
        self.reasons = reasons
        #: As in `ConditionFailed`.
        self.retried = retried


class Table:
    def __init__(self, *, client: DynamoDBClient, name: str, clock: Clock, ids: Ids, calls: CallCounter) -> None:
        self.client = client
        self.name = name
        self.clock = clock
        self._ids = ids
        self._calls = calls

    async def call(self, operation: str, method: Callable[..., Awaitable[T]], prefix: str = "", **arguments: Any) -> T:
        """Make one call. Raises `ConditionFailed` or `TransactionCancelled` if its condition failed."""
        with translated(DYNAMODB, self.name):
            try:
                return await await_and_count(method(**arguments), self._calls, SERVICE, f"{prefix}{operation}")
            except ClientError as error:
                retried = requests_of(error.response) > 1
                if code_of(error) == CONDITION_FAILED:
                    raise ConditionFailed(item_of(error), retried=retried) from None
                if code_of(error) in TRANSACTION_CANCELLED:
                    raise TransactionCancelled(cancellation_reasons(error), retried=retried) from None
                raise

    # One item -------------------------------------------------------------------------------------------------

    async def get(self, key: Item, *, prefix: str = "") -> Item | None:
        answer = await self.call(
            "GetItem", self.client.get_item, prefix, TableName=self.name, Key=key, ConsistentRead=True
        )
        # For a missing item DynamoDB returns a response without Item but with a request id. Without either, something
        # else answered.
        if "Item" not in answer and not answer.get("ResponseMetadata", {}).get("RequestId"):
            raise self._unreadable()
        return answer.get("Item") or None

    async def update(self, key: Item, arguments: Mapping[str, Any]) -> Item:
        """The item after the update. Raises `ConditionFailed` with the stored item."""
        answer = await self.call(
            "UpdateItem",
            self.client.update_item,
            TableName=self.name,
            Key=key,
            ReturnValues="ALL_NEW",
            ReturnValuesOnConditionCheckFailure="ALL_OLD",
            **arguments,
        )
        item: Item = self._part(answer, "Attributes", Mapping)
        return item

    async def update_together(self, updates: Sequence[tuple[Item, Mapping[str, Any]]]) -> None:
        """Apply up to `TRANSACTION` updates, all or none. Raises `TransactionCancelled`."""
        parts: list[Any] = [{"Update": {"TableName": self.name, "Key": key, **arguments}} for key, arguments in updates]
        await self.call("TransactWriteItems", self.client.transact_write_items, TransactItems=parts)

    async def put(self, item: Item, arguments: Mapping[str, Any]) -> None:
        await self.call(
            "PutItem",
            self.client.put_item,
            TableName=self.name,
            Item=item,
            ReturnValuesOnConditionCheckFailure="ALL_OLD",
            **arguments,
        )

    # Many items -----------------------------------------------------------------------------------------------

    async def get_all(self, keys: Collection[Item], *, prefix: str = "") -> list[Item]:
        """The items that exist, in any order."""
        if len(keys) == 1:
            found = [await self.get(key, prefix=prefix) for key in keys]
            return [item for item in found if item is not None]
        batches = await gather(self._get_batch(batch, prefix) for batch in chunks(list(keys), READ_BATCH))
        return [item for batch in batches for item in batch]

    async def _get_batch(self, keys: Sequence[Item], prefix: str) -> list[Item]:
        found: list[Item] = []
        wanted: Mapping[str, Any] = {self.name: {"Keys": keys, "ConsistentRead": True}}
        for attempt in range(BATCH_ATTEMPTS):
            await self._pause_after(attempt)
            with self._unreadable_if_invalid(is_continuation=attempt > 0):
                answer = await self.call("BatchGetItem", self.client.batch_get_item, prefix, RequestItems=wanted)
            found.extend(self._with_keys(self._part(answer, "Responses", Mapping).get(self.name, [])))
            wanted = answer.get("UnprocessedKeys", {})
            if not wanted:
                return found
        raise Throttled(f"{DYNAMODB} did not finish a batch read of table {self.name} in {BATCH_ATTEMPTS} attempts")

    async def put_all(self, new: Sequence[Item]) -> None:
        """Up to `WRITE_BATCH` items, unconditionally."""
        wanted: Mapping[str, Any] = {self.name: [{"PutRequest": {"Item": item}} for item in new]}
        for attempt in range(BATCH_ATTEMPTS):
            await self._pause_after(attempt)
            with self._unreadable_if_invalid(is_continuation=attempt > 0):
                answer = await self.call("BatchWriteItem", self.client.batch_write_item, RequestItems=wanted)
            wanted = answer.get("UnprocessedItems", {})
            if not wanted:
                return
        raise Throttled(f"{DYNAMODB} did not finish a batch write of table {self.name} in {BATCH_ATTEMPTS} attempts")

    async def _pause_after(self, attempts: int) -> None:
        if attempts:
            await self.clock.sleep(backoff_s(attempts, first_s=BATCH_PAUSE_S, ids=self._ids))

    async def query(self, arguments: Mapping[str, Any]) -> list[Item]:
        return [item async for page in self._pages("Query", self.client.query, arguments) for item in self._items(page)]

    async def query_first(
        self, arguments: Mapping[str, Any], limit: int, accepts: Callable[[Item], bool] = lambda _: True
    ) -> list[Item]:
        """The first `limit` items that `accepts` returns True for. Reads no more pages than necessary."""
        found: list[Item] = []
        if limit > 0:
            async for page in self._pages("Query", self.client.query, {"Limit": limit, **arguments}):
                found.extend(item for item in self._items(page) if accepts(item))
                if len(found) >= limit:
                    break
        return found[:limit]

    async def scan(self, arguments: Mapping[str, Any]) -> list[Item]:
        return [item async for page in self._pages("Scan", self.client.scan, arguments) for item in self._items(page)]

    def _items(self, page: Mapping[str, Any]) -> list[Item]:
        return self._with_keys(self._part(page, "Items", list))

    def _with_keys(self, found: list[Item]) -> list[Item]:
        if not all(isinstance(item, Mapping) and _has_keys(item) for item in found):
            raise self._unreadable()
        return found

    def _part(self, answer: Mapping[str, Any], name: str, kind: Any) -> Any:
        """A required part of a response. A response without it must not be taken for an empty result."""
        if not isinstance(answer.get(name), kind):
            raise self._unreadable()
        return answer[name]

    @contextmanager
    def _unreadable_if_invalid(self, *, is_continuation: bool) -> Iterator[None]:
        """If botocore rejects keys of a response that are sent back for its continuation, that response was invalid."""
        try:
            yield
        except ParamValidationError:
            if not is_continuation:
                raise
            raise self._unreadable() from None

    def _unreadable(self) -> Unavailable:
        return Unavailable(f"the response of {DYNAMODB} for table {self.name} cannot be parsed")

    async def _pages(
        self, operation: str, method: Callable[..., Awaitable[Any]], arguments: Mapping[str, Any]
    ) -> AsyncIterator[Any]:
        start: Mapping[str, Any] = {}
        while True:
            with self._unreadable_if_invalid(is_continuation=bool(start)):
                page = await self.call(operation, method, TableName=self.name, **{**arguments, **start})
            yield page
            if not page.get("LastEvaluatedKey"):
                return
            start = {"ExclusiveStartKey": page["LastEvaluatedKey"]}


def _has_keys(item: Item) -> bool:
    # Some queries project the partition key only.
    keys = (item.get(PK), item.get(SK, {"S": ""}))
    return all(isinstance(key, Mapping) and isinstance(key.get("S"), str) for key in keys)


def key_of(item: Item) -> tuple[str, str]:
    return str(item[PK]["S"]), str(item[SK]["S"])
