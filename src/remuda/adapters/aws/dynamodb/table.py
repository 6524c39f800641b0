"""One table's calls: counted as they go over the wire, errors translated, pages followed, batches completed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from botocore.exceptions import ClientError, ParamValidationError

from remuda.adapters.aws.dynamodb.items import PK, SK, Item
from remuda.adapters.aws.errors import (
    CONDITION_FAILED,
    DYNAMODB,
    FAILURES,
    TRANSACTION_REFUSED,
    answered,
    attempts_of,
    blames_of,
    code_of,
    item_of,
    translated,
)
from remuda.adapters.aws.gather import chunks, gathered
from remuda.domain.errors import Throttled, Unavailable
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock, Ids

if TYPE_CHECKING:
    from types_aiobotocore_dynamodb import DynamoDBClient

T = TypeVar("T")

SERVICE = "dynamodb"
#: What one BatchGetItem and one BatchWriteItem may carry.
READ_BATCH = 100
WRITE_BATCH = 25
#: And one TransactWriteItems.
TRANSACTION = 100
#: How often the rest of a batch that was not processed is asked for again, and how long before.
BATCH_TRIES = 6
BATCH_PAUSE_S = 0.05
#: Reads while somebody waits are counted apart.
POLL = "poll:"


class Refused(Exception):
    """A condition did not hold."""

    def __init__(self, item: Item | None, *, repeated: bool) -> None:
        super().__init__("a condition did not hold")
        #: What is there instead.
        self.item = item
        #: The call was sent more than once: the answer to an earlier one may have been lost.
        self.repeated = repeated


class Cancelled(Exception):
    """A transaction was refused: nothing of it was written."""

    def __init__(self, blames: Sequence[str], *, repeated: bool) -> None:
        super().__init__("a transaction was refused")
        #: What is said of each part, in their order; empty where nothing is.
        self.blames = blames
        #: As of `Refused`.
        self.repeated = repeated


class Table:
    def __init__(
        self,
        *,
        client: DynamoDBClient,
        name: str,
        clock: Clock,
        ids: Ids,
        calls: CallCounter,
    ) -> None:
        self.client = client
        self.name = name
        self.clock = clock
        self._ids = ids
        self._calls = calls

    async def call(self, operation: str, method: Callable[..., Awaitable[T]], prefix: str = "", **arguments: Any) -> T:
        """One call. A failed condition raises `Refused`, a refused transaction `Cancelled`."""
        attempts, failed = 1, 0
        try:
            with translated(DYNAMODB, self.name):
                try:
                    answer = await answered(method(**arguments))
                except FAILURES as error:
                    attempts = failed = attempts_of(error.response) if isinstance(error, ClientError) else 1
                    if isinstance(error, ClientError) and code_of(error) == CONDITION_FAILED:
                        failed -= 1
                        raise Refused(item_of(error), repeated=attempts > 1) from None
                    if isinstance(error, ClientError) and code_of(error) in TRANSACTION_REFUSED:
                        failed -= 1
                        raise Cancelled(blames_of(error), repeated=attempts > 1) from None
                    raise
                attempts = attempts_of(answer)
                failed = attempts - 1
                return answer
        finally:
            self._calls.add(SERVICE, f"{prefix}{operation}", attempts)
            self._calls.fail(SERVICE, f"{prefix}{operation}", failed)

    # One item -------------------------------------------------------------------------------------------------

    async def get(self, key: Item, *, prefix: str = "") -> Item | None:
        answer = await self.call(
            "GetItem", self.client.get_item, prefix, TableName=self.name, Key=key, ConsistentRead=True
        )
        # Nothing at all is what an answer says that is none; where there is no such item, it says who answered.
        if "Item" not in answer and not answer.get("ResponseMetadata", {}).get("RequestId"):
            raise self._unreadable()
        return answer.get("Item") or None

    async def update(self, key: Item, arguments: Mapping[str, Any]) -> Item:
        """What there is afterwards; `Refused` with what there is where the condition does not hold."""
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
        """All of these updates, at most `TRANSACTION` of them; `Cancelled` where none of them was made."""
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
        """Those that exist, in as few calls as there can be."""
        if len(keys) == 1:
            found = [await self.get(key, prefix=prefix) for key in keys]
            return [item for item in found if item is not None]
        batches = await gathered(self._get_batch(batch, prefix) for batch in chunks(list(keys), READ_BATCH))
        return [item for batch in batches for item in batch]

    async def _get_batch(self, keys: Sequence[Item], prefix: str) -> list[Item]:
        found: list[Item] = []
        wanted: Mapping[str, Any] = {self.name: {"Keys": keys, "ConsistentRead": True}}
        for tries in range(BATCH_TRIES):
            await self._pause(tries)
            with self._continued(again=tries > 0):
                answer = await self.call("BatchGetItem", self.client.batch_get_item, prefix, RequestItems=wanted)
            found.extend(self._keyed(self._part(answer, "Responses", Mapping).get(self.name, [])))
            wanted = answer.get("UnprocessedKeys", {})
            if not wanted:
                return found
        raise Throttled(f"{DYNAMODB} left part of a batch read of {self.name} undone {BATCH_TRIES} times")

    async def put_all(self, new: Sequence[Item]) -> None:
        """Up to `WRITE_BATCH` items, unconditionally."""
        wanted: Mapping[str, Any] = {self.name: [{"PutRequest": {"Item": item}} for item in new]}
        for tries in range(BATCH_TRIES):
            await self._pause(tries)
            with self._continued(again=tries > 0):
                answer = await self.call("BatchWriteItem", self.client.batch_write_item, RequestItems=wanted)
            wanted = answer.get("UnprocessedItems", {})
            if not wanted:
                return
        raise Throttled(f"{DYNAMODB} left part of a batch write of {self.name} undone {BATCH_TRIES} times")

    async def _pause(self, tries: int) -> None:
        if tries:
            await self.clock.sleep(BATCH_PAUSE_S * 2**tries * (0.5 + self._ids.jitter()))

    async def query(self, arguments: Mapping[str, Any]) -> list[Item]:
        return [item async for page in self._pages("Query", self.client.query, arguments) for item in self._items(page)]

    async def query_first(
        self, arguments: Mapping[str, Any], limit: int, counts: Callable[[Item], bool] = lambda _: True
    ) -> list[Item]:
        """The first so many that count, and no page more than they need."""
        found: list[Item] = []
        if limit > 0:
            async for page in self._pages("Query", self.client.query, {"Limit": limit, **arguments}):
                found.extend(item for item in self._items(page) if counts(item))
                if len(found) >= limit:
                    break
        return found[:limit]

    async def scan(self, arguments: Mapping[str, Any]) -> list[Item]:
        return [item async for page in self._pages("Scan", self.client.scan, arguments) for item in self._items(page)]

    def _items(self, page: Mapping[str, Any]) -> list[Item]:
        return self._keyed(self._part(page, "Items", list))

    def _keyed(self, found: list[Item]) -> list[Item]:
        if not all(isinstance(item, Mapping) and _has_keys(item) for item in found):
            raise self._unreadable()
        return found

    def _part(self, answer: Mapping[str, Any], name: str, kind: Any) -> Any:
        """What every such answer has: without it nobody may think that there is nothing."""
        if not isinstance(answer.get(name), kind):
            raise self._unreadable()
        return answer[name]

    @contextmanager
    def _continued(self, *, again: bool) -> Iterator[None]:
        """What an answer said of the rest is sent back as it came: botocore refuses it where it cannot be."""
        try:
            yield
        except ParamValidationError:
            if not again:
                raise
            raise self._unreadable() from None

    def _unreadable(self) -> Unavailable:
        return Unavailable(f"{DYNAMODB} gave an answer about table {self.name} that cannot be read")

    async def _pages(
        self, operation: str, method: Callable[..., Awaitable[Any]], arguments: Mapping[str, Any]
    ) -> AsyncIterator[Any]:
        start: Mapping[str, Any] = {}
        while True:
            with self._continued(again=bool(start)):
                page = await self.call(operation, method, TableName=self.name, **{**arguments, **start})
            yield page
            if not page.get("LastEvaluatedKey"):
                return
            start = {"ExclusiveStartKey": page["LastEvaluatedKey"]}


def _has_keys(item: Item) -> bool:
    # Some ask for the first key alone.
    keys = (item.get(PK), item.get(SK, {"S": ""}))
    return all(isinstance(key, Mapping) and isinstance(key.get("S"), str) for key in keys)


def key_of(item: Item) -> tuple[str, str]:
    return str(item[PK]["S"]), str(item[SK]["S"])
