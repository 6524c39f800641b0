"""Calls to one DynamoDB table: counted, errors translated, all pages read, batches completed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from botocore.exceptions import ClientError

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
#: Operation that writes several items, all or none.
TRANSACT = "TransactWriteItems"
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
        #: The stored item, if the write asked for it.
        self.item = item
        #: The call was sent more than once: an earlier attempt may have been applied.
        self.retried = retried


class TransactionCancelled(Exception):
    """A transaction was cancelled. Nothing was written."""

    def __init__(self, reasons: Sequence[str], items: Sequence[Item | None], *, retried: bool) -> None:
        super().__init__("the transaction was cancelled")
        #: The reason of each item, in order. Empty if DynamoDB gave none.
        self.reasons = reasons
        #: The stored items whose condition failed, in the same order.
        self.items = items
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
                # A write of one item is rejected, too, while a transaction writes the item: it is repeated like any
                # other failed call.
                if operation == TRANSACT and code_of(error) in TRANSACTION_CANCELLED:
                    reasons, stored = cancellation_reasons(error)
                    raise TransactionCancelled(reasons, stored, retried=retried) from None
                raise

    # One item -------------------------------------------------------------------------------------------------

    async def get(self, key: Item, *, prefix: str = "") -> Item | None:
        answer = await self.call(
            "GetItem", self.client.get_item, prefix, TableName=self.name, Key=key, ConsistentRead=True
        )
        # For a missing item DynamoDB returns a response without Item but with a request id. Without either, something
        # else answered.
        if not answer.get("Item") and not answer.get("ResponseMetadata", {}).get("RequestId"):
            raise self._unreadable()
        return self._with_keys([answer["Item"]])[0] if answer.get("Item") else None

    async def update(self, key: Item, arguments: Mapping[str, Any]) -> Item:
        """The item after the update. Raises `ConditionFailed` with the stored item."""
        answer = await self._update(
            key, ReturnValues="ALL_NEW", ReturnValuesOnConditionCheckFailure="ALL_OLD", **arguments
        )
        item: Item = self._part(answer, "Attributes", Mapping)
        return item

    async def update_unread(self, key: Item, arguments: Mapping[str, Any]) -> None:
        """Update an item that is not returned, as agents must. Raises `ConditionFailed` without the stored item.

        IAM's condition key `dynamodb:ReturnValues` may concern both parameters: it also exists for ConditionCheckItem,
        which has only the second one (service authorization reference of DynamoDB).
        """
        await self._update(key, ReturnValues="NONE", **arguments)

    async def _update(self, key: Item, **arguments: Any) -> Any:
        return await self.call("UpdateItem", self.client.update_item, TableName=self.name, Key=key, **arguments)

    async def update_together(self, updates: Sequence[tuple[Item, Mapping[str, Any]]]) -> None:
        """Apply up to `TRANSACTION` updates, all or none. Raises `TransactionCancelled`."""
        parts: list[Any] = [{"Update": {"TableName": self.name, "Key": key, **arguments}} for key, arguments in updates]
        await self._transact(parts)

    async def put_together(self, puts: Sequence[tuple[Item, Mapping[str, Any]]]) -> None:
        """Write up to `TRANSACTION` items, all or none. Raises `TransactionCancelled` with the stored items."""
        shared = {"TableName": self.name, "ReturnValuesOnConditionCheckFailure": "ALL_OLD"}
        await self._transact([{"Put": {**shared, "Item": item, **arguments}} for item, arguments in puts])

    async def _transact(self, parts: Any) -> None:
        # With the token, a retry of the client is not another transaction.
        token = self._ids.new("remuda-")
        await self.call(TRANSACT, self.client.transact_write_items, TransactItems=parts, ClientRequestToken=token)

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
        wanted: Sequence[Any] = keys
        for attempt in range(BATCH_ATTEMPTS):
            await self._pause_after(attempt)
            # The consistency is named in each request, whatever the answer repeats of the one before.
            items: Any = {self.name: {"Keys": wanted, "ConsistentRead": True}}
            answer = await self.call("BatchGetItem", self.client.batch_get_item, prefix, RequestItems=items)
            found.extend(self._with_keys(self._part(answer, "Responses", Mapping).get(self.name, [])))
            if not answer.get("UnprocessedKeys"):
                return found
            unread = self._part(answer["UnprocessedKeys"], self.name, Mapping)
            wanted = self._with_keys(self._part(unread, "Keys", list))
        raise Throttled(f"{DYNAMODB} did not finish a batch read of table {self.name} in {BATCH_ATTEMPTS} attempts")

    async def put_all(self, new: Sequence[Item]) -> None:
        """Write up to `WRITE_BATCH` items, unconditionally."""
        await self._write_batch([{"PutRequest": {"Item": item}} for item in new])

    async def delete_all(self, keys: Sequence[Item]) -> None:
        """Delete up to `WRITE_BATCH` items, unconditionally."""
        await self._write_batch([{"DeleteRequest": {"Key": key}} for key in keys])

    async def _write_batch(self, requests: Sequence[Mapping[str, Any]]) -> None:
        wanted: Mapping[str, Any] = {self.name: requests}
        for attempt in range(BATCH_ATTEMPTS):
            await self._pause_after(attempt)
            answer = await self.call("BatchWriteItem", self.client.batch_write_item, RequestItems=wanted)
            if not answer.get("UnprocessedItems"):
                return
            unwritten = self._part(answer["UnprocessedItems"], self.name, list)
            if not all(isinstance(each, Mapping) for each in unwritten):
                raise self._unreadable()
            wanted = {self.name: unwritten}
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

    def _with_keys(self, found: Any) -> list[Item]:
        if not isinstance(found, list) or not all(map(_is_item, found)):
            raise self._unreadable()
        return found

    def _part(self, answer: Any, name: str, kind: Any) -> Any:
        """A required part of a response. A response without it must not be taken for an empty result."""
        if not isinstance(answer, Mapping) or not isinstance(answer.get(name), kind):
            raise self._unreadable()
        return answer[name]

    def _unreadable(self) -> Unavailable:
        return Unavailable(f"the response of {DYNAMODB} for table {self.name} cannot be parsed")

    async def _pages(
        self, operation: str, method: Callable[..., Awaitable[Any]], arguments: Mapping[str, Any]
    ) -> AsyncIterator[Any]:
        start: Mapping[str, Any] = {}
        while True:
            page = await self.call(operation, method, TableName=self.name, **{**arguments, **start})
            yield page
            if not page.get("LastEvaluatedKey"):
                return
            start = {"ExclusiveStartKey": self._with_keys([page["LastEvaluatedKey"]])[0]}


def _is_item(item: Any) -> bool:
    """Whether this is an item of the table: attribute values with one type each, and the keys."""
    if not isinstance(item, Mapping) or not all(isinstance(each, Mapping) and len(each) == 1 for each in item.values()):
        return False
    # Some queries project the partition key only.
    keys = (item.get(PK), item.get(SK, {"S": ""}))
    return all(key is not None and isinstance(key.get("S"), str) for key in keys)


def key_of(item: Item) -> tuple[str, str]:
    return str(item[PK]["S"]), str(item[SK]["S"])
