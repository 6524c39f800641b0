"""Floor of an operation: the time of its unavoidable calls in sequence, on the same servers in the same run."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.environment import CLASS, SCOPE, BenchmarkEnvironment, BenchmarkPool, control_item, idle, without_nulls
from benchmarks.figures import median
from remuda.adapters.aws.dynamodb import items, schema
from remuda.adapters.aws.dynamodb.items import ItemKeys
from remuda.adapters.aws.sqs import ATTRIBUTES, queue_name
from remuda.adapters.github.scale_sets import ScaleSetSource
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.domain.resources import DEFAULT_CLASSES
from remuda.domain.runner_set import RunnerSet
from remuda.ports.calls import CallCounter
from remuda.ports.compute import POOL_TAG
from remuda.ports.event_log import SilentEventLog
from remuda.ports.poll_intervals import CONTROL

#: Number of times that the calls of a small operation are measured.
REPEATS = 3
#: Operations with more than `REPEATS` times this number of calls are measured once.
MANY_CALLS = 20
BATCH = 10

#: Each class has one queue.
CLASSES = len(DEFAULT_CLASSES)

Calls = Mapping[str, int]


def warm_provision(instances: int) -> Calls:
    """Configuration, intent and messages; claim, read, signal and commit per instance; reports."""
    batches = math.ceil(instances / BATCH)
    return {
        "get": 1 + instances,
        "put": 2,
        "receive": batches,
        "update": 3 * instances,
        "batch_get": 1,
        "delete": batches,
    }


def cold_provision(instances: int) -> Calls:
    return {
        "get": 1 + instances,
        "put": 2,
        "receive": 1,
        "query": 1,
        "create_fleet": instances,
        "update": 3 * instances,
        "batch_get": 1,
    }


def release(instances: int) -> Calls:
    """Four writes per instance: releasing, signal, idle, published."""
    batches = math.ceil(instances / BATCH)
    return {
        "get": 1 + instances,
        "query": 1,
        "put": 1,
        "batch_get": 2,
        "update": 4 * instances,
        "send": batches,
    }


def set_start(jobs: int) -> Calls:
    """From a message of a runner set to the start of the runners: the message's record, intents, and per job the claim,
    the registration, its record, the agent's read and its signal.
    """
    return {
        "put": 1 + jobs,
        "update": 3 * jobs,
        "jit": jobs,
        "get": jobs,
    }


def mismatches(instances: int) -> Calls:
    """All messages are received and returned; then one instance is created."""
    batches = math.ceil(instances / BATCH)
    return {**cold_provision(1), "receive": batches + 1, "return_messages": batches}


def claims(provisions: int, instances: int) -> Calls:
    """The calls up to the claims."""
    receives = provisions * math.ceil(instances / BATCH)
    return {"get": provisions, "put": provisions, "receive": receives, "update": provisions * instances}


def first_refresh() -> Calls:
    """Create a table, seven queues, a template and two tokens, and do what every refresh does."""
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
    """Reads of a refresh that changes nothing."""
    return {"get": 2, "query": 5, "describe": 1, "runners": 1, "describe_table": 1, "template": 1, "depth": CLASSES}


def terminating_refresh(instances: int) -> Calls:
    return {
        "get": 2,
        "query": 5,
        "describe": 2,
        "runners": 1,
        "update": 2 * instances,
        "tags": 1,
        "terminate": 1,
        "depth": CLASSES,
    }


def poll_wait_s(instances: int) -> float:
    """Average seconds until the last of `instances` idle agents has polled."""
    return CONTROL.first_s * instances / (instances + 1)


class Floor:
    def __init__(self, environment: BenchmarkEnvironment, pool: BenchmarkPool) -> None:
        self._world = environment
        self._pool = pool
        self._clock = SystemClock()
        self._record = idle(1)
        self._key = ItemKeys(prefix=pool.prefix).control(self._record.instance_id)
        self._queue = ""
        self._github = environment.github(CallCounter())
        self._source = ScaleSetSource(
            github=self._github, clock=self._clock, ids=SystemIds(), calls=CallCounter(), event_log=SilentEventLog()
        )
        self._set = RunnerSet(name="floor", labels=("floor",), resource_class=CLASS, scope=SCOPE, max=1)
        self._set_id = 0
        self._terminated: list[str] = []

    async def prepare(self) -> None:
        await self._pool.write([self._record])
        answer = await self._world.sqs.get_queue_url(QueueName=queue_name(self._pool.table, CLASS))
        self._queue = answer["QueueUrl"]
        self._terminated = await self._create_fleet(1)

    async def close(self) -> None:
        await self._source.close()
        await self._github.close()

    async def seconds(self, calls: Calls) -> float:
        """Measure the calls, one after the other. Small operations are repeated; the median counts."""
        if "jit" in calls and not self._set_id:
            self._set_id = await self._source.create_set(self._set)
        repeats = 1 if sum(calls.values()) > MANY_CALLS * REPEATS else REPEATS
        return median([await self._once(calls) for _ in range(repeats)])

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
        item = without_nulls(control_item(ItemKeys(prefix="floor:"), self._record))
        await self._world.dynamodb.put_item(TableName=self._pool.table, Item=item)

    async def _update(self) -> None:
        await self._world.dynamodb.update_item(
            TableName=self._pool.table,
            Key=self._key,
            UpdateExpression="SET #why = :why",
            ConditionExpression="#state = :state",
            ExpressionAttributeNames={"#why": "retireDetail", "#state": "state"},
            ExpressionAttributeValues={":why": {"S": ""}, ":state": {"S": "idle"}},
            ReturnValues="ALL_NEW",
        )

    async def _batch_get(self) -> None:
        keys = {self._pool.table: {"Keys": [self._key], "ConsistentRead": True}}
        await self._world.dynamodb.batch_get_item(RequestItems=keys)

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

    async def _return_messages(self) -> None:
        entries = [
            {"Id": str(number), "ReceiptHandle": f"gone-{number}", "VisibilityTimeout": 0} for number in range(BATCH)
        ]
        await self._world.sqs.change_message_visibility_batch(QueueUrl=self._queue, Entries=entries)

    async def _create_queue(self) -> None:
        await self._world.sqs.create_queue(QueueName=SystemIds().new("floor-"), Attributes=ATTRIBUTES)

    async def _create_table(self) -> None:
        """With the index of the sweeps and a time to live."""
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

    async def _jit(self) -> None:
        await self._source.register(self._set, self._set_id, name=SystemIds().new("floor-"))

    async def _depth(self) -> None:
        await self._world.sqs.get_queue_attributes(QueueUrl=self._queue, AttributeNames=["ApproximateNumberOfMessages"])

    async def _create_fleet(self, instances: int) -> list[str]:
        """One call for all instances."""
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
                "TotalTargetCapacity": instances,
                "DefaultTargetCapacityType": "on-demand",
            },
        )
        return [name for group in answer["Instances"] for name in group["InstanceIds"]]

    async def _describe(self) -> None:
        await self._world.ec2.describe_instances(MaxResults=1_000)

    async def _tags(self) -> None:
        filters = [{"Name": "resource-id", "Values": self._terminated}, {"Name": "key", "Values": [POOL_TAG]}]
        await self._world.ec2.describe_tags(Filters=filters)

    async def _terminate(self) -> None:
        """EC2 accepts the call for a terminated instance."""
        await self._world.ec2.terminate_instances(InstanceIds=self._terminated)

    async def _template(self) -> None:
        await self._world.ec2.describe_launch_templates(LaunchTemplateNames=[self._pool.table])

    async def _runners(self) -> None:
        await self._github.list_runners(SCOPE)


def _schema(keys: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"AttributeName": name, "KeyType": kind} for name, kind in keys.items()]


@asynccontextmanager
async def open_floor(environment: BenchmarkEnvironment) -> AsyncIterator[Floor]:
    made = Floor(environment, await environment.pool())
    await made.prepare()
    try:
        yield made
    finally:
        await made.close()
