"""Instance keys contain the role's id; records are still found after the role was replaced."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest

from remuda.adapters.aws.clients import AwsClients
from remuda.adapters.aws.dynamodb.items import ItemKeys
from remuda.adapters.aws.dynamodb.keys import CACHE_TTL_S, own_key_prefix, role_key_prefix
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.aws.signature import AwsCredentials
from remuda.domain.errors import Conflict, Unavailable, UserError
from remuda.domain.signals import Signal
from remuda.ports.calls import CallCounter
from tests.conformance.conftest import DynamoStores
from tests.support.aws.ec2 import PROFILE, Ec2Server, instance_credentials, shared_ec2_server
from tests.support.aws.servers import service_client
from tests.support.records import LONG_S, birth, claim_change, instance, instance_id
from tests.support.virtual_time import AdjustableClock

OLD, NEW = "AROAOLDOLDOLDOLD0:", "AROANEWNEWNEWNEW0:"
FIRST, SECOND = instance_id(1), instance_id(2)
INSTANCE = "i-0123456789abcdef0"
LAUNCH = {"ami": "ami-12345678", "subnet-ids": "subnet-12345678"}


class SharedTable(DynamoStores):
    """A table, and stores of control planes and agents on it."""

    def __init__(self, client: Any, table: str) -> None:
        super().__init__(client, table, CallCounter())
        self.clock = self.arguments["clock"] = AdjustableClock()
        #: The prefix of the current role, as returned by IAM.
        self.role = OLD
        self.lookups = 0

    async def _newest(self) -> str:
        self.lookups += 1
        return self.role

    def control_plane(self, **more: Any) -> Any:
        return self.open(newest_prefix=self._newest, **more)

    def agent(self, prefix: str) -> Any:
        return self.open(key_prefix=prefix)

    async def has_record(self, prefix: str, name: str) -> bool:
        answer = await self.client.get_item(TableName=self.table, Key=ItemKeys(prefix=prefix).control(name))
        return "Item" in answer


@pytest.fixture
async def pool(clients: AwsClients, table_name: str) -> Any:
    made = SharedTable(await clients.dynamodb(), table_name)
    yield made
    await made.close()


async def test_role_is_looked_up_by_prepare_only(pool: SharedTable, calls: CallCounter) -> None:
    refresh = pool.control_plane()
    assert any(OLD in line for line in await refresh.prepare())
    assert await refresh.prepare() == []
    workflow = pool.control_plane(calls=calls)
    record = await workflow.apply(birth(instance(1)))
    assert await pool.has_record(OLD, FIRST)
    assert pool.lookups == 2
    # One read for all instances.
    await asyncio.gather(*(workflow.get(instance_id(number)) for number in range(5)))
    counted = calls.by_service()["dynamodb"]
    # History is written asynchronously.
    assert {name: count for name, count in counted.items() if name != "BatchWriteItem"} == {
        "GetItem": 6,
        "UpdateItem": 1,
    }
    # An agent knows its prefix.
    agent = pool.agent(OLD)
    assert await agent.get(FIRST) == record
    await agent.write_signal(FIRST, epoch=1, signal=Signal.UD_REG_OK)
    reported = await workflow.wait_for_report(FIRST, None, LONG_S)
    assert reported is not None
    assert reported.signal is Signal.UD_REG_OK


async def test_records_of_a_former_role_keep_their_keys(pool: SharedTable) -> None:
    refresh = pool.control_plane()
    await refresh.prepare()
    old = await refresh.apply(birth(instance(1)))
    pool.role = NEW
    assert any(NEW in line for line in await refresh.prepare())
    assert await refresh.prepare() == []
    for store in (refresh, pool.control_plane()):
        assert await store.get(FIRST) == old
        with pytest.raises(Conflict) as caught:
            await store.apply(birth(instance(1)))
        assert caught.value.current == old
    workflow = pool.control_plane()
    claimed = await workflow.apply(claim_change(old, "p-2/a"))
    await workflow.apply(birth(instance(2)))
    assert (await pool.has_record(OLD, FIRST), await pool.has_record(NEW, FIRST)) == (True, False)
    assert (await pool.has_record(OLD, SECOND), await pool.has_record(NEW, SECOND)) == (False, True)
    assert set(await pool.control_plane().get_many([FIRST, SECOND, instance_id(3)])) == {FIRST, SECOND}
    await pool.agent(OLD).write_signal(FIRST, epoch=claimed.epoch, signal=Signal.UD_REG_OK)
    assert set(await pool.control_plane().get_reports([FIRST, SECOND])) == {FIRST}


async def test_running_process_reads_the_new_role_after_the_cache_ttl(pool: SharedTable) -> None:
    await pool.control_plane().prepare()
    sweeper = pool.control_plane()
    assert await sweeper.get(SECOND) is None
    pool.role = NEW
    other = pool.control_plane()
    await other.prepare()
    await other.apply(birth(instance(2)))
    pool.clock.ahead_s += CACHE_TTL_S
    assert await sweeper.get(SECOND) is not None


async def test_former_role_is_dropped_after_its_records_expired(pool: SharedTable) -> None:
    store = pool.control_plane()
    await store.prepare()
    await store.apply(birth(instance(1)))
    pool.role = NEW
    await store.prepare()
    pool.clock.ahead_s += 31 * 86_400
    pool.role = "AROATHIRDTHIRDTHI:"
    await store.prepare()
    assert await pool.control_plane().get(FIRST) is None
    await store.apply(birth(instance(2)))
    assert await pool.has_record(pool.role, SECOND)


async def test_concurrent_refreshes_agree(pool: SharedTable) -> None:
    await pool.control_plane().prepare()
    pool.role = NEW
    stores = [pool.control_plane() for _ in range(4)]
    noted = await asyncio.gather(*(store.prepare() for store in stores))
    assert sum(map(len, noted)) == 1


async def test_unreadable_profile_changes_nothing(pool: SharedTable) -> None:
    async def newest() -> str:
        raise UserError("there is no instance profile")

    with pytest.raises(UserError, match="instance profile"):
        await pool.open(newest_prefix=newest).prepare()
    with pytest.raises(UserError, match="no table"):
        await pool.agent(OLD).get(FIRST)


@pytest.mark.parametrize("use", [DynamoInstanceStore.get, DynamoInstanceStore.get_report])
async def test_table_without_prefixes_is_reported(
    pool: SharedTable, use: Callable[[DynamoInstanceStore, str], Awaitable[object]]
) -> None:
    await pool.agent("").prepare()
    with pytest.raises(UserError, match="role") as caught:
        await use(pool.control_plane(), FIRST)
    assert caught.value.fix == "run remuda refresh"


async def test_unreadable_prefixes_are_reported(pool: SharedTable) -> None:
    await pool.control_plane().prepare()
    malformed = {"pk": {"S": "pool"}, "sk": {"S": "prefixes"}, "prefixes": {"L": []}}
    await pool.client.put_item(TableName=pool.table, Item=malformed)
    with pytest.raises(Unavailable, match="key prefixes"):
        await pool.control_plane().get(FIRST)


# Prefixes from IAM and STS ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Account:
    server: Ec2Server
    iam: Any

    async def prefix_of(self, profile: str) -> str:
        return await role_key_prefix(self.iam, {**LAUNCH, "iam-instance-profile": profile}, CallCounter())


@pytest.fixture
async def account() -> AsyncIterator[Account]:
    server = shared_ec2_server()
    await server.make_profile(PROFILE)
    async with service_client("iam", server.url) as iam:
        yield Account(server=server, iam=iam)


async def test_machine_and_control_plane_compute_the_same_prefix(account: Account) -> None:
    prefix = await account.prefix_of(PROFILE)
    profile = (await account.iam.get_instance_profile(InstanceProfileName=PROFILE))["InstanceProfile"]
    assert await account.prefix_of(profile["Arn"]) == prefix
    given = await instance_credentials(account.server.url, INSTANCE)
    credentials = AwsCredentials(
        access_key=given["AccessKeyId"], secret_key=given["SecretAccessKey"], token=given["Token"]
    )
    async with service_client("sts", account.server.url, credentials=credentials) as opened:
        sts: Any = opened
        assert await own_key_prefix(sts, INSTANCE) == prefix
        with pytest.raises(UserError, match="not to instance i-0"):
            await own_key_prefix(sts, "i-0" + "1" * 16)


async def test_credentials_of_another_identity_are_rejected(account: Account) -> None:
    async with service_client("sts", account.server.url) as opened:
        sts: Any = opened
        with pytest.raises(UserError, match="not to instance"):
            await own_key_prefix(sts, INSTANCE)


async def test_missing_profile_and_profile_without_role_are_rejected(account: Account) -> None:
    with pytest.raises(UserError, match="instance profile 'unknown' does not exist") as caught:
        await account.prefix_of("unknown")
    assert caught.value.field == "iam-instance-profile"
    async with account.server.iam() as iam:
        await iam.create_instance_profile(InstanceProfileName="empty")
        try:
            with pytest.raises(UserError, match="'empty' has no role") as caught:
                await account.prefix_of("empty")
            assert caught.value.field == "iam-instance-profile"
        finally:
            await iam.delete_instance_profile(InstanceProfileName="empty")
