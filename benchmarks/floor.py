"""The floor of an operation: its unavoidable calls, one after the other, bare, at the same servers in the same run."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.figures import middle
from benchmarks.world import CLASS, SCOPE, Pool, World, control_item, idle, present
from remuda.adapters.aws.dynamodb import items, schema
from remuda.adapters.aws.dynamodb.items import ItemKeys
from remuda.adapters.aws.dynamodb.polling import CONTROL
from remuda.adapters.aws.sqs import ATTRIBUTES
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.domain.resources import DEFAULT_CLASSES
from remuda.ports.calls import CallCounter
from remuda.ports.compute import POOL_TAG

#: How often the calls of a small operation are timed.
REPEATS = 3
#: A call of this much machines is timed once.
MANY = 20
BATCH = 10

#: A queue each.
CLASSES = len(DEFAULT_CLASSES)

Calls = Mapping[str, int]


def warm_provision(machines: int) -> Calls:
    """Configuration, intent, hints; a claim, its reading, the signal and the commit of each machine; the reports."""
    batches = math.ceil(machines / BATCH)
    return {
        "get": 1 + machines,
        "put": 2,
        "receive": batches,
        "update": 3 * machines,
        "batch_get": 1,
        "delete": batches,
    }


def cold_provision(machines: int) -> Calls:
    return {
        "get": 1 + machines,
        "put": 2,
        "receive": 1,
        "query": 1,
        "create_fleet": machines,
        "update": 3 * machines,
        "batch_get": 1,
    }


def release(machines: int) -> Calls:
    """Releasing, signal, idle and announced: four writes for each machine."""
    batches = math.ceil(machines / BATCH)
    return {
        "get": 1 + machines,
        "query": 1,
        "put": 1,
        "batch_get": 2,
        "update": 4 * machines,
        "send": batches,
    }


def misfits(machines: int) -> Calls:
    """All of them are looked at and handed back; then one is created."""
    batches = math.ceil(machines / BATCH)
    return {**cold_provision(1), "receive": batches + 1, "hand_back": batches}


def claims(provisions: int, machines: int) -> Calls:
    """Up to the claims themselves."""
    receives = provisions * math.ceil(machines / BATCH)
    return {"get": provisions, "put": provisions, "receive": receives, "update": provisions * machines}


def first_refresh() -> Calls:
    """A table, seven queues, a template, two tokens; and what the next ones do, too."""
    return {
        "create_table": 1,
        "create_queue": CLASSES,
        "create_template": 1,
        "token": 2,
        "put": 2,
        "describe": 1,
        "runners": 1,
        "query": 5,
    }


def next_refresh() -> Calls:
    """What tells that all is as it should be."""
    return {"get": 2, "query": 5, "describe": 1, "runners": 1, "describe_table": 1, "template": 1, "depth": CLASSES}


def reaping(machines: int) -> Calls:
    return {
        "get": 2,
        "query": 5,
        "describe": 2,
        "runners": 1,
        "update": 2 * machines,
        "tags": 1,
        "terminate": 1,
        "depth": CLASSES,
    }


def poll_wait_s(machines: int) -> float:
    """How long it takes on average until the last of so many idle agents has looked: their reads are limited."""
    return CONTROL.first_s * machines / (machines + 1)


class Floor:
    def __init__(self, world: World, pool: Pool) -> None:
        self._world = world
        self._pool = pool
        self._clock = SystemClock()
        self._record = idle(1)
        self._key = ItemKeys(prefix=pool.prefix).control(self._record.instance_id)
        self._queue = ""
        self._github = world.github(CallCounter())
        self._ended: list[str] = []

    async def prepare(self) -> None:
        await self._pool.write([self._record])
        answer = await self._world.sqs.get_queue_url(QueueName=f"{self._pool.table}-{CLASS}")
        self._queue = answer["QueueUrl"]
        self._ended = await self._create_fleet(1)

    async def close(self) -> None:
        await self._github.close()

    async def seconds(self, calls: Calls) -> float:
        """All of them, one after the other: the middle of several tries where they are few."""
        repeats = 1 if sum(calls.values()) > MANY * REPEATS else REPEATS
        return middle([await self._once(calls) for _ in range(repeats)])

    async def _once(self, calls: Calls) -> float:
        started = self._clock.monotonic()
        for name, times in calls.items():
            if name == "create_fleet":
                await self._create_fleet(times)
                continue
            call: Callable[[], Awaitable[Any]] = getattr(self, f"_{name}")
            for _ in range(times):
                await call()
        return self._clock.monotonic() - started

    async def _get(self) -> None:
        await self._world.dynamodb.get_item(TableName=self._pool.table, Key=self._key, ConsistentRead=True)

    async def _put(self) -> None:
        item = present(control_item(ItemKeys(prefix="floor:"), self._record))
        await self._world.dynamodb.put_item(TableName=self._pool.table, Item=item)

    async def _update(self) -> None:
        await self._world.dynamodb.update_item(
            TableName=self._pool.table,
            Key=self._key,
            UpdateExpression="SET #why = :why",
            ConditionExpression="#state = :state",
            ExpressionAttributeNames={"#why": "retire", "#state": "state"},
            ExpressionAttributeValues={":why": {"S": ""}, ":state": {"S": "idle"}},
            ReturnValues="ALL_NEW",
        )

    async def _batch_get(self) -> None:
        wanted = {self._pool.table: {"Keys": [self._key], "ConsistentRead": True}}
        await self._world.dynamodb.batch_get_item(RequestItems=wanted)

    async def _query(self) -> None:
        await self._world.dynamodb.query(
            TableName=self._pool.table,
            IndexName=items.LIVE_INDEX,
            KeyConditionExpression="#pk = :pk",
            ExpressionAttributeNames={"#pk": items.LIVE_PK},
            ExpressionAttributeValues={":pk": {"S": items.UNSETTLED}},
        )

    async def _describe_table(self) -> None:
        await self._world.dynamodb.describe_table(TableName=self._pool.table)

    async def _send(self) -> None:
        entries = [{"Id": str(number), "MessageBody": "{}", "DelaySeconds": 900} for number in range(BATCH)]
        await self._world.sqs.send_message_batch(QueueUrl=self._queue, Entries=entries)

    async def _receive(self) -> None:
        await self._world.sqs.receive_message(QueueUrl=self._queue, MaxNumberOfMessages=BATCH, WaitTimeSeconds=0)

    async def _delete(self) -> None:
        entries = [{"Id": str(number), "ReceiptHandle": f"gone-{number}"} for number in range(BATCH)]
        await self._world.sqs.delete_message_batch(QueueUrl=self._queue, Entries=entries)

    async def _hand_back(self) -> None:
        entries = [
            {"Id": str(number), "ReceiptHandle": f"gone-{number}", "VisibilityTimeout": 0} for number in range(BATCH)
        ]
        await self._world.sqs.change_message_visibility_batch(QueueUrl=self._queue, Entries=entries)

    async def _create_queue(self) -> None:
        await self._world.sqs.create_queue(QueueName=SystemIds().new("floor-"), Attributes=ATTRIBUTES)

    async def _create_table(self) -> None:
        """With an index for the sweeps alone, and its expiry."""
        name = SystemIds().new("floor-")
        keys = [*schema.KEYS, items.LIVE_PK, items.LIVE_SK]
        await self._world.dynamodb.create_table(
            TableName=name,
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": key, "AttributeType": "S"} for key in keys],
            KeySchema=_schema(schema.KEYS),
            GlobalSecondaryIndexes=[
                {
                    "IndexName": items.LIVE_INDEX,
                    "KeySchema": _schema(schema.INDEXES[items.LIVE_INDEX]),
                    "Projection": {"ProjectionType": "ALL"},
                }
            ],
        )
        await self._world.dynamodb.update_time_to_live(
            TableName=name, TimeToLiveSpecification={"Enabled": True, "AttributeName": items.TTL}
        )

    async def _create_template(self) -> None:
        await self._world.ec2.create_launch_template(
            LaunchTemplateName=SystemIds().new("floor-"),
            LaunchTemplateData={"ImageId": self._world.servers.launch["ami"]},
        )

    async def _token(self) -> None:
        await self._github.registration_token(SCOPE)

    async def _depth(self) -> None:
        await self._world.sqs.get_queue_attributes(QueueUrl=self._queue, AttributeNames=["ApproximateNumberOfMessages"])

    async def _create_fleet(self, machines: int) -> list[str]:
        """One call for all of them."""
        needs = {"VCpuCount": {"Min": 2}, "MemoryMiB": {"Min": 4_096}}
        subnet = self._world.servers.launch["subnet-ids"].split(",")[0]
        template = {"LaunchTemplateName": self._pool.table, "Version": "$Default"}
        answer = await self._world.ec2.create_fleet(
            Type="instant",
            ClientToken=SystemIds().new("floor-"),
            LaunchTemplateConfigs=[
                {
                    "LaunchTemplateSpecification": template,
                    "Overrides": [{"SubnetId": subnet, "InstanceRequirements": needs}],
                }
            ],
            TargetCapacitySpecification={
                "TotalTargetCapacity": machines,
                "DefaultTargetCapacityType": "on-demand",
            },
        )
        return [name for group in answer["Instances"] for name in group["InstanceIds"]]

    async def _describe(self) -> None:
        await self._world.ec2.describe_instances(MaxResults=1_000)

    async def _tags(self) -> None:
        filters = [{"Name": "resource-id", "Values": self._ended}, {"Name": "key", "Values": [POOL_TAG]}]
        await self._world.ec2.describe_tags(Filters=filters)

    async def _terminate(self) -> None:
        """Of one that has ended: EC2 takes it again."""
        await self._world.ec2.terminate_instances(InstanceIds=self._ended)

    async def _template(self) -> None:
        await self._world.ec2.describe_launch_templates(LaunchTemplateNames=[self._pool.table])

    async def _runners(self) -> None:
        await self._github.list_runners(SCOPE)


def _schema(keys: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"AttributeName": name, "KeyType": kind} for name, kind in keys.items()]


@asynccontextmanager
async def floor(world: World) -> AsyncIterator[Floor]:
    made = Floor(world, await world.pool())
    await made.prepare()
    try:
        yield made
    finally:
        await made.close()
