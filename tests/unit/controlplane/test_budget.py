"""The monthly budget: what machines cost, and that nothing but launches stops when it is spent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from remuda.aws_lambda import handler
from remuda.aws_lambda.handler import COMMANDS, LambdaCommand
from remuda.config.sources import load
from remuda.controlplane.budget import budget_status, set_budget
from remuda.controlplane.context import Context
from remuda.controlplane.read.status import status
from remuda.controlplane.refresh import refresh
from remuda.domain.budget import Budget, Spending, add_spending, month_start, next_month
from remuda.domain.errors import CapacityError
from remuda.domain.instance import Instance, State
from remuda.domain.reporting.prices import PriceTable
from remuda.domain.reporting.warnings import WarningKind
from remuda.domain.resources import UsageClass
from simulation.invariants import SCOPE
from tests.support.records import instance
from tests.support.virtual_time import Call
from tests.support.world import PoolWorld

NOW = datetime(2026, 11, 10, tzinfo=UTC)
START = datetime(2026, 11, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
PRICES = PriceTable(on_demand={"c6i.large": 2.0}, spot={"c6i.large": 1.0})
#: Dollars per hour of every machine, so that a minute costs one.
DEAR = 60.0


def machine(begin: datetime, *, state: State = State.IDLE, end: datetime = NOW, **changed: object) -> Instance:
    values = {"created_at": begin, "state": state, "threshold": end, "instance_type": "c6i.large"}
    return replace(instance(), **{**values, "usage_class": UsageClass.ON_DEMAND, **changed})  # type: ignore[arg-type]


def test_cost_begins_with_the_month() -> None:
    spent = add_spending(None, [machine(START - 5 * HOUR), machine(NOW - HOUR)], PRICES, now=NOW)
    assert spent.amount == 2.0 * (9 * 24 + 1)


def test_cost_is_added_to_what_is_known() -> None:
    known = Spending(until=NOW - HOUR, amount=100.0)
    spent = add_spending(known, [machine(START), machine(NOW - HOUR / 2)], PRICES, now=NOW)
    assert (spent.amount, spent.until) == (103.0, NOW)


def test_cost_of_last_month_is_not_counted() -> None:
    known = Spending(until=START - HOUR, amount=100.0)
    assert add_spending(known, [machine(START - 5 * HOUR)], PRICES, now=START + HOUR).amount == 2.0


def test_ended_machine_costs_until_its_end() -> None:
    ended = [machine(START, state=State.TERMINATED, end=START + 3 * HOUR)]
    ending = [machine(NOW - 2 * HOUR, state=State.TERMINATING, end=NOW - HOUR)]
    assert add_spending(None, ended + ending, PRICES, now=NOW).amount == 2.0 * (3 + 1)
    # An extended threshold of a live machine lies in the future.
    assert add_spending(None, [machine(NOW - HOUR, end=NOW + HOUR)], PRICES, now=NOW).amount == 2.0


def test_spot_and_unknown_types() -> None:
    machines = [
        machine(NOW - HOUR, usage_class=UsageClass.SPOT),
        machine(NOW - HOUR, instance_type="x9.huge"),
    ]
    spent = add_spending(None, machines, PRICES, now=NOW)
    assert (spent.amount, spent.unpriced) == (1.0, ("x9.huge on-demand",))


@pytest.mark.parametrize(
    ("amount", "is_used_up", "text"),
    [(79.9, False, ""), (80.0, False, "(80 %)"), (100.0, True, "before 2026-12-01")],
)
def test_warning_from_80_percent_on(amount: float, is_used_up: bool, text: str) -> None:  # noqa: FBT001
    budget = Budget(limit=100.0, spending=Spending(until=NOW, amount=amount))
    assert budget.is_used_up(NOW) is is_used_up
    assert bool(budget.warning(NOW)) is bool(text)
    assert text.replace(" %", "%") in budget.warning(NOW)


def test_budget_of_a_new_month_is_not_used_up() -> None:
    budget = Budget(limit=100.0, spending=Spending(until=NOW, amount=500.0))
    assert not budget.is_used_up(next_month(NOW))
    assert not budget.warning(next_month(NOW))


def test_without_a_limit_nothing_is_used_up() -> None:
    budget = Budget(limit=0.0, spending=Spending(until=NOW, amount=500.0))
    assert not budget.is_used_up(NOW)
    assert not budget.warning(NOW)


@pytest.mark.parametrize(
    ("now", "after"),
    [
        (NOW, datetime(2026, 12, 1, tzinfo=UTC)),
        (datetime(2026, 12, 31, 23, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC)),
    ],
)
def test_months_are_those_of_utc(now: datetime, after: datetime) -> None:
    assert next_month(now) == after
    assert month_start(after) == after


# In the pool --------------------------------------------------------------------------------------------------------


class EveryType(dict[str, float]):
    """The same price for all types."""

    def get(self, _name: str, _default: object = None) -> float:
        return DEAR


@pytest.fixture
def process(world: PoolWorld) -> Callable[[], Context]:
    return lambda: replace(world.process(credentialed=True), read_prices=lambda: PriceTable(on_demand=EveryType()))


async def test_used_up_budget_stops_launches_alone(world: PoolWorld, process: Callable[[], Context]) -> None:
    (warm,) = await world.warm(1)
    running = await world.one("running")
    assert running.instance_id == warm
    (idle,) = await world.warm(1)
    await set_budget(process(), 0.5)
    await world.pass_time(40.0, sweeps=False)
    swept = await refresh(process(), None)
    assert any("no machine is launched" in text for text in swept.warnings)
    reused = await world.one("reused")
    assert reused.instance_id == idle
    with pytest.raises(CapacityError, match="budget of the pool is used up"):
        await world.provision("refused")
    # Neither machine was ended, and the failed run left nothing.
    assert {world.states()[warm], world.states()[idle]} == {State.RUNNING}
    assert len(world.database.instances) == 2
    shown = await status(process())
    assert [item.kind for item in shown.warnings if item.kind is WarningKind.BUDGET]


async def test_raised_budget_lets_launches_continue(world: PoolWorld, process: Callable[[], Context]) -> None:
    await world.warm(1)
    await set_budget(process(), 0.5)
    await world.pass_time(60.0, sweeps=False)
    await refresh(process(), None)
    assert not (await budget_status(process())).is_launching
    changed = await set_budget(process(), 1_000.0)
    assert changed.is_launching
    assert (await world.provision("two", count=2)).created == 1


async def test_terminated_machines_of_the_month_count_when_a_budget_is_set(
    world: PoolWorld, process: Callable[[], Context]
) -> None:
    (first,) = await world.warm(1)
    began = world.clock.now()
    await world.pass_time(3_600.0, is_over=lambda: world.states()[first] is State.TERMINATED)
    assert world.states()[first] is State.TERMINATED
    found = await set_budget(process(), 1_000.0)
    lived_min = (world.clock.now() - began) / timedelta(minutes=1)
    assert 1.0 < found.spending.amount < lived_min + 5.0
    # It is not counted again.
    await world.pass_time(600.0)
    await refresh(process(), None)
    assert (await budget_status(process())).spending.amount == found.spending.amount


async def test_pool_without_a_budget_keeps_no_account(world: PoolWorld, process: Callable[[], Context]) -> None:
    await world.warm(1)
    before = world.database.config
    await refresh(process(), None)
    assert world.database.config == before
    shown = await budget_status(process())
    assert shown.spending.amount > 0
    assert (shown.limit, shown.is_launching, shown.warning) == (0.0, True, "")


async def test_function_that_applies_the_parameters_of_the_stack_keeps_the_budget(
    world: PoolWorld, process: Callable[[], Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def opened(*_: object, **__: object) -> AsyncIterator[Context]:
        yield process()

    monkeypatch.setattr(handler, "open_context", opened)
    await world.warm(1)
    await set_budget(process(), 0.5)
    await world.pass_time(40.0, sweeps=False)
    machines = {"ami": "ami-00000000", "subnet_ids": "subnet-00000000", "security_group_ids": "sg-00000000"}
    given = {"backend": "aws", "pool": "test", "github_scope": SCOPE, "max_instances": "7", **machines}
    settings = load({**given, "iam_instance_profile": "remuda"}, environ={})
    event_log, calls = process().event_log, process().calls
    outcome = await COMMANDS["refresh"](settings, event_log, LambdaCommand(name="refresh"), calls)
    assert world.database.config is not None
    assert (world.database.config.max_instances, world.database.config.monthly_budget) == (7, 0.5)
    assert (outcome.counts["BudgetWarnings"], outcome.counts["RunnerVersionWarnings"]) == (1, 0)


async def test_budget_that_refresh_sets_again_counts_what_ended_without_one(
    world: PoolWorld, process: Callable[[], Context]
) -> None:
    await set_budget(process(), 1_000.0)
    await set_budget(process(), 0.0)
    await world.warm(1)
    # It ends after its idle time, and its end is confirmed.
    await world.pass_time(150.0)
    assert world.in_state(State.TERMINATED)
    spent = (await budget_status(process())).spending.amount
    assert spent > 1.0
    await refresh(process(), world.configuration(monthly_budget=1_000.0))
    assert (await budget_status(process())).spending.amount >= spent


async def test_cost_is_counted_although_another_process_changes_the_configuration(
    world: PoolWorld, process: Callable[[], Context]
) -> None:
    await world.warm(1)
    await set_budget(process(), 1_000.0)
    # It ends after its idle time; its end is confirmed by the sweep whose account is disturbed.
    await world.pass_time(120.0, sweeps=False)
    changed = False

    async def renew_tokens(name: str, call: Call) -> Any:
        nonlocal changed
        answer = await call()
        if name == "store.find" and not changed:
            changed = True
            stored = world.database.config
            assert stored is not None
            await world.process().store.put_config(replace(stored, revision=stored.revision + 1))
        return answer

    disturbed = replace(
        world.process(renew_tokens, credentialed=True), read_prices=lambda: PriceTable(on_demand=EveryType())
    )
    expected = (await budget_status(process())).spending.amount
    swept = await refresh(disturbed, None)
    assert swept.terminated
    assert (await budget_status(process())).spending.amount == pytest.approx(expected, abs=0.2)
