"""Where records lie: below the unique id of their machines' role, and still found when that role is replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from remuda.adapters.aws.clients import AwsClients
from remuda.adapters.aws.dynamodb.items import ItemKeys
from remuda.adapters.aws.dynamodb.keys import CACHE_TTL_S
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.domain.errors import Conflict, Unavailable, UserError
from remuda.domain.signals import Signal
from remuda.ports.calls import CallCounter
from tests.support.records import LONG_S, birth, claim, instance, instance_id

OLD, NEW = "AROAOLDOLDOLDOLD0:", "AROANEWNEWNEWNEW0:"
FIRST, SECOND = instance_id(1), instance_id(2)


class Clock(SystemClock):
    def __init__(self) -> None:
        self.ahead_s = 0.0

    def now(self) -> datetime:
        return super().now() + timedelta(seconds=self.ahead_s)

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s


class Pool:
    """As many processes of the control plane as are opened, on one table."""

    def __init__(self, client: Any, table: str) -> None:
        self._client = client
        self._table = table
        self.clock = Clock()
        #: What IAM would say.
        self.role = OLD
        self.asked = 0
        self.opened: list[DynamoInstanceStore] = []

    async def _newest(self) -> str:
        self.asked += 1
        return self.role

    def control_plane(self, calls: CallCounter | None = None) -> DynamoInstanceStore:
        return self._open(calls, newest_prefix=self._newest)

    def agent(self, prefix: str) -> DynamoInstanceStore:
        return self._open(None, key_prefix=prefix)

    def _open(self, calls: CallCounter | None, **more: Any) -> DynamoInstanceStore:
        given: dict[str, Any] = {"clock": self.clock, "ids": SystemIds(), "calls": calls or CallCounter()}
        self.opened.append(DynamoInstanceStore(client=self._client, table=self._table, **given, **more))
        return self.opened[-1]

    async def is_at(self, prefix: str, name: str) -> bool:
        answer = await self._client.get_item(TableName=self._table, Key=ItemKeys(prefix=prefix).control(name))
        return "Item" in answer

    async def spoil(self) -> None:
        await self._client.put_item(
            TableName=self._table, Item={"pk": {"S": "pool"}, "sk": {"S": "prefixes"}, "prefixes": {"L": []}}
        )


@pytest.fixture
async def pool(clients: AwsClients, table_name: str) -> Any:
    made = Pool(await clients.dynamodb(), table_name)
    yield made
    for store in made.opened:
        await store.close()


async def test_the_role_is_asked_for_when_the_table_is_prepared_and_read_by_all_others(pool: Pool) -> None:
    refresh = pool.control_plane()
    assert any(OLD in line for line in await refresh.prepare())
    assert await refresh.prepare() == []
    calls = CallCounter()
    workflow = pool.control_plane(calls)
    record = await workflow.apply(birth(instance(1)))
    assert await pool.is_at(OLD, FIRST)
    assert pool.asked == 2
    # One read for all instances together.
    await asyncio.gather(*(workflow.get(instance_id(number)) for number in range(5)))
    counted = calls.by_service()["dynamodb"]
    # The history is written in its own time.
    assert {name: count for name, count in counted.items() if name != "BatchWriteItem"} == {
        "GetItem": 6,
        "UpdateItem": 1,
    }
    # The machine knows who it is.
    agent = pool.agent(OLD)
    assert await agent.get(FIRST) == record
    await agent.write_signal(FIRST, epoch=1, signal=Signal.UD_REG_OK)
    reported = await workflow.wait_for_report(FIRST, None, LONG_S)
    assert reported is not None
    assert reported.signal is Signal.UD_REG_OK


async def test_records_of_a_former_role_are_found_and_changed_where_they_are(pool: Pool) -> None:
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
    claimed = await workflow.apply(claim(old, "p-2/a"))
    await workflow.apply(birth(instance(2)))
    assert (await pool.is_at(OLD, FIRST), await pool.is_at(NEW, FIRST)) == (True, False)
    assert (await pool.is_at(OLD, SECOND), await pool.is_at(NEW, SECOND)) == (False, True)
    assert set(await pool.control_plane().get_many([FIRST, SECOND, instance_id(3)])) == {FIRST, SECOND}
    await pool.agent(OLD).write_signal(FIRST, epoch=claimed.epoch, signal=Signal.UD_REG_OK)
    assert set(await pool.control_plane().get_reports([FIRST, SECOND])) == {FIRST}


async def test_a_process_that_lives_on_learns_of_the_new_role_in_time(pool: Pool) -> None:
    await pool.control_plane().prepare()
    sweeper = pool.control_plane()
    assert await sweeper.get(SECOND) is None
    pool.role = NEW
    other = pool.control_plane()
    await other.prepare()
    await other.apply(birth(instance(2)))
    pool.clock.ahead_s += CACHE_TTL_S
    assert await sweeper.get(SECOND) is not None


async def test_a_former_role_is_forgotten_with_the_last_records_that_it_can_have(pool: Pool) -> None:
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
    assert await pool.is_at(pool.role, SECOND)


async def test_two_refreshes_at_once_agree(pool: Pool) -> None:
    await pool.control_plane().prepare()
    pool.role = NEW
    stores = [pool.control_plane() for _ in range(4)]
    noted = await asyncio.gather(*(store.prepare() for store in stores))
    assert sum(map(len, noted)) == 1


async def test_a_profile_that_cannot_be_read_leaves_everything_as_it_was(pool: Pool) -> None:
    async def newest() -> str:
        raise UserError("there is no instance profile")

    with pytest.raises(UserError, match="instance profile"):
        await pool._open(None, newest_prefix=newest).prepare()
    with pytest.raises(UserError, match="no table"):
        await pool.agent(OLD).get(FIRST)


@pytest.mark.parametrize("use", [DynamoInstanceStore.get, DynamoInstanceStore.get_report])
async def test_a_table_that_was_never_refreshed_says_so(
    pool: Pool, use: Callable[[DynamoInstanceStore, str], Awaitable[object]]
) -> None:
    await pool.agent("").prepare()
    with pytest.raises(UserError, match="role") as caught:
        await use(pool.control_plane(), FIRST)
    assert caught.value.fix == "run remuda refresh"


async def test_what_cannot_be_read_is_told(pool: Pool) -> None:
    await pool.control_plane().prepare()
    await pool.spoil()
    with pytest.raises(Unavailable, match="key prefixes"):
        await pool.control_plane().get(FIRST)
