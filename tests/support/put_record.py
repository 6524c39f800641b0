"""Puts a record, given as a document on stdin, into the table of a pool: `python put_record.py TABLE`."""

from __future__ import annotations

import asyncio
import json
import sys

from remuda.adapters.aws.clients import AwsClients
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.domain.instance import Instance
from remuda.domain.serialization import from_document
from remuda.ports.calls import CallCounter
from tests.support.records import birth


async def _unused() -> str:
    raise AssertionError("the pool is prepared: its keys' prefix is in the table")


async def put(table: str) -> None:
    record = from_document(Instance, json.load(sys.stdin))
    async with AwsClients() as clients:
        store = DynamoInstanceStore(
            client=await clients.dynamodb(),
            table=table,
            clock=SystemClock(),
            ids=SystemIds(),
            calls=CallCounter(),
            newest_prefix=_unused,
        )
        await store.apply(birth(record))
        await store.close()


if __name__ == "__main__":
    asyncio.run(put(sys.argv[1]))
