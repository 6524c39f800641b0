"""The ledger: hours by state are the lifetime, every cut of the cost adds up, and savings say only what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.domain.instance import HistoryEntry, Instance, RetireReason, State
from remuda.domain.provision import Provision
from remuda.domain.provision_outcome import AcquiredRunner, ProvisionOutcome, RunnerSource
from remuda.domain.reporting.prices import PriceTable
from remuda.domain.reporting.timeline import MachinePhase, clip, lifetime, mean_counts, spans_of
from remuda.domain.reporting.usage import UsageReport, instance_cost, quantile, usage_report, usage_summary
from remuda.domain.resources import UsageClass
from tests.support.records import at, entry, instance, instance_id, provision

PRICES = PriceTable(on_demand={"c6i.large": 1.0, "m6i.large": 2.0}, spot={"c6i.large": 0.25})
BEFORE, AFTER = at(-100), at(4_000)


def lived(*steps: tuple[float, State, str]) -> list[HistoryEntry]:
    """A history: at which second it entered which state, for which run."""
    found = []
    source = None
    for seconds, state, run_id in steps:
        found.append(entry("step", at=at(seconds), source=source, target=state, run_id=run_id))
        source = state
    return found


LIFE = lived(
    (0, State.CREATED, "1"),
    (60, State.RUNNING, "1"),
    (660, State.RELEASING, "1"),
    (690, State.IDLE, "1"),
    (1_290, State.CLAIMED, "2"),
    (1_300, State.RUNNING, "2"),
    (1_900, State.TERMINATING, "2"),
    (1_960, State.TERMINATED, "2"),
)
ENDED = instance(state=State.TERMINATED, created_at=at(0), threshold=at(1_900))


def made(
    provisions: Sequence[Provision] = (),
    lives: Sequence[tuple[Instance, Sequence[HistoryEntry]]] = ((ENDED, LIFE),),
    since: datetime = BEFORE,
    until: datetime = AFTER,
) -> UsageReport:
    histories = {item.instance_id: entries for item, entries in lives}
    return usage_report(provisions, [item for item, _ in lives], histories, PRICES, since=since, until=until)


def outcome(reused: int = 0, created: int = 0, seconds: float = 1.0, **changed: Any) -> ProvisionOutcome:
    sources = [RunnerSource.POOL] * reused + [RunnerSource.CREATED] * created
    acquired = tuple(AcquiredRunner(instance_id=instance_id(1), source=source, seconds=seconds) for source in sources)
    values: dict[str, Any] = {
        "ended_at": at(9),
        "seconds": seconds,
        "reused": reused,
        "created": created,
        "acquired": acquired,
    }
    return ProvisionOutcome(**{**values, **changed})


def test_a_life_is_cut_into_what_was_paid_for() -> None:
    assert [(span.phase, span.seconds, span.run_id) for span in spans_of(ENDED, LIFE, now=at(4_000))] == [
        (MachinePhase.BOOTING, 60, "1"),
        (MachinePhase.RUNNING, 600, "1"),
        (MachinePhase.RELEASING, 30, "1"),
        (MachinePhase.IDLE, 600, ""),
        (MachinePhase.CLAIMED, 10, "2"),
        (MachinePhase.RUNNING, 600, "2"),
        (MachinePhase.ENDING, 60, ""),
    ]


def test_costs_go_to_the_runs_that_caused_them_and_idle_to_none() -> None:
    costs = made().costs
    assert costs.total == pytest.approx(1_960 / 3_600)
    assert costs.by_run == {
        "1": pytest.approx(690 / 3_600),
        "": pytest.approx(660 / 3_600),
        "2": pytest.approx(610 / 3_600),
    }
    assert costs.by_phase["idle"] == pytest.approx(600 / 3_600)
    assert costs.by_class == {"large": pytest.approx(costs.total)}


def test_only_the_time_asked_for_counts() -> None:
    assert made(since=at(630), until=at(700)).hours == {
        "running": pytest.approx(30 / 3_600),
        "releasing": pytest.approx(30 / 3_600),
        "idle": pytest.approx(10 / 3_600),
    }


def test_a_machine_that_lives_is_counted_until_now() -> None:
    young = instance(state=State.CREATED, created_at=at(0))
    assert made(lives=[(young, LIFE[:1])], until=at(360)).hours == {"booting": pytest.approx(0.1)}


def test_a_life_whose_history_is_gone_is_unknown_not_lost() -> None:
    assert made(lives=[(ENDED, [])]).hours == {"unknown": pytest.approx(1_900 / 3_600)}
    cut = made(lives=[(ENDED, LIFE[3:])]).hours
    assert cut["unknown"] == pytest.approx(690 / 3_600)
    assert sum(cut.values()) == pytest.approx(1_960 / 3_600)


def test_spot_has_its_own_price_and_an_unknown_type_is_named() -> None:
    spot = instance(1, state=State.TERMINATED, usage_class=UsageClass.SPOT, threshold=at(1_900))
    odd = instance(2, state=State.TERMINATED, instance_type="x9.large", threshold=at(1_900))
    found = made(lives=[(spot, LIFE), (odd, LIFE)])
    assert found.costs.total == pytest.approx(0.25 * 1_960 / 3_600)
    assert found.costs.unpriced_hours == {"x9.large on-demand": pytest.approx(1_960 / 3_600)}


def test_reuse_and_waiting_times_by_kind() -> None:
    courses = [outcome(created=3, seconds=40.0), outcome(reused=2, created=1, seconds=30.0)]
    courses += [outcome(reused=3, seconds=float(seconds)) for seconds in (1, 2, 3)]
    courses += [outcome(created=1, seconds=9.0, error="no room")]
    found = made([provision(number, outcome=item) for number, item in enumerate(courses)] + [provision(9)])
    assert (found.reused, found.created, found.provisions) == (11, 4, 7)
    assert found.reuse_rate == pytest.approx(11 / 15)
    assert found.kinds == {"cold": 1, "mixed": 1, "warm": 3, "failed": 1, "unknown": 1}
    assert found.provision_times["warm"].p50 == pytest.approx(2.0)
    assert found.provision_times["warm"].p95 == pytest.approx(2.9)
    assert found.provision_times["cold"].count == 1
    assert found.failures == {"no room": 1}


def test_reuse_saves_boots_and_costs_idle_time() -> None:
    courses = [outcome(created=1, seconds=60.0), outcome(reused=2, seconds=10.0)]
    savings = made([provision(number, outcome=item) for number, item in enumerate(courses)]).savings
    assert (savings.boot_s, savings.waiting_s) == (60.0, 50.0)
    assert savings.boot_cost == pytest.approx(2 * 60 / 3_600)
    assert savings.idle_cost == pytest.approx(600 / 3_600)
    assert savings.net == pytest.approx(savings.boot_cost - savings.idle_cost)


def test_without_a_boot_to_compare_with_nothing_is_claimed() -> None:
    savings = made([provision(1, outcome=outcome(reused=2))]).savings
    assert (savings.boot_s, savings.waiting_s, savings.boot_cost) == (None, 0.0, 0.0)


def test_what_is_told_of_many_stands_for_all() -> None:
    many = outcome(reused=500, seconds=1.0)
    told = ProvisionOutcome(ended_at=at(9), seconds=1.0, reused=500, acquired=many.acquired[:100])
    found = made([provision(1, outcome=outcome(created=1, seconds=36.0)), provision(2, outcome=told)])
    assert found.savings.boot_hours == pytest.approx(500 * 36 / 3_600)


def test_terminations_are_counted_by_state_and_reason() -> None:
    ends = [
        entry("end-idle", at=at(5), target=State.TERMINATING, retire_reason=RetireReason.USED_UP, why=f"{number} uses")
        for number in (50, 51)
    ]
    assert made(lives=[(ENDED, ends)]).retirements == {"idle: used-up": 2}


def test_nothing_at_all_is_a_ledger_too() -> None:
    found = made(lives=[])
    assert (found.reuse_rate, found.costs.total, found.hours, found.points) == (None, 0, {}, ())


@pytest.mark.parametrize(
    ("values", "part", "expected"), [([1], 0.95, 1), ([1, 3], 0.5, 2), ([1, 2, 3, 4, 5], 0.95, 4.8), ([3, 1], 0, 1)]
)
def test_quantiles(values: list[float], part: float, expected: float) -> None:
    assert quantile(values, part) == pytest.approx(expected)


# Whatever histories look like -------------------------------------------------------------------------------------

entries = st.builds(
    lambda seconds, source, target, run_id: entry("step", at=at(seconds), source=source, target=target, run_id=run_id),
    st.integers(-1_000, 10_000),
    st.none() | st.sampled_from(State),
    st.sampled_from(State),
    st.sampled_from(["", "1", "2"]),
)
records = st.builds(
    lambda number, state, created, ended, name, usage: instance(
        number,
        state=state,
        created_at=at(created),
        threshold=at(created + ended),
        instance_type=name,
        usage_class=usage,
        resource_class=name.partition(".")[2],
    ),
    st.integers(1, 5),
    st.sampled_from(State),
    st.integers(-2_000, 8_000),
    st.integers(0, 3_000),
    st.sampled_from(["c6i.large", "m6i.large", "x9.xlarge"]),
    st.sampled_from(UsageClass),
)
NOW = at(9_000)


@given(records, st.lists(entries, max_size=12))
def test_hours_by_state_sum_to_the_lifetime(record: Instance, history: list[HistoryEntry]) -> None:
    begin, end = lifetime(record, history, now=NOW)
    spans = spans_of(record, history, now=NOW)
    assert begin <= end <= NOW
    assert sum(span.seconds for span in spans) == pytest.approx((end - begin).total_seconds())
    assert all(before.end == after.begin for before, after in pairwise(spans))


@given(
    st.lists(st.tuples(records, st.lists(entries, max_size=8)), max_size=5, unique_by=lambda life: life[0].instance_id),
    st.integers(-3_000, 9_000),
    st.integers(1, 5_000),
)
def test_every_cut_of_the_cost_adds_up(
    lives: list[tuple[Instance, list[HistoryEntry]]], since_s: int, length_s: int
) -> None:
    since, until = at(since_s), at(since_s + length_s)
    found = made(lives=lives, since=since, until=until)
    costs = found.costs
    for cut in (costs.by_phase, costs.by_class, costs.by_usage, costs.by_type, costs.by_run):
        assert sum(cut.values()) == pytest.approx(costs.total)
    spans = [
        span for item, history in lives for span in clip(spans_of(item, history, now=until), since=since, until=until)
    ]
    assert sum(found.hours.values()) == pytest.approx(sum(span.seconds for span in spans) / 3_600)
    assert sum(found.hours.values()) <= len(lives) * length_s / 3_600 + 1e-9


@given(st.lists(st.tuples(records, st.lists(entries, max_size=8)), max_size=4), st.integers(1, 5))
def test_what_fits_a_glance_is_what_the_ledger_says(
    lives: list[tuple[Instance, list[HistoryEntry]]], reused: int
) -> None:
    lives = [(replace(record, instance_id=instance_id(number)), each) for number, (record, each) in enumerate(lives)]
    provisions = [provision(1, outcome=outcome(created=1, seconds=60.0)), provision(2, outcome=outcome(reused=reused))]
    told = made(provisions, lives)
    bills = [instance_cost(record, history, PRICES, since=BEFORE, until=AFTER) for record, history in lives]
    found = usage_summary(provisions, [record for record, _ in lives], bills, PRICES, since=BEFORE, until=AFTER)
    assert (found.reused, found.created, found.runs) == (told.reused, told.created, 2)
    assert found.cost == pytest.approx(told.costs.total)
    assert set(found.unpriced) == set(told.costs.unpriced_hours)
    for name in ("boot_s", "waiting_s", "boot_hours", "boot_cost", "idle_cost", "net"):
        assert getattr(found.savings, name) == pytest.approx(getattr(told.savings, name)), name


@given(st.lists(st.tuples(records, st.lists(entries, max_size=8)), max_size=4), st.integers(1, 50))
def test_levels_hold_all_the_time_there_was(lives: list[tuple[Instance, list[HistoryEntry]]], steps: int) -> None:
    since, until = at(0), at(5_000)
    spans = [span for item, history in lives for span in spans_of(item, history, now=NOW)]
    found = mean_counts(spans, since=since, until=until, steps=steps)
    assert len(found) == steps
    width = (until - since) / steps
    inside = sum(span.seconds for span in clip(spans, since=since, until=until))
    assert sum(sum(step.values()) for step in found) * width.total_seconds() == pytest.approx(inside, abs=1e-3)
    assert all(sum(step.values()) <= len(lives) + 1e-6 for step in found)


def test_a_time_without_length_has_no_levels() -> None:
    assert mean_counts([], since=NOW, until=NOW, steps=3) == [{}, {}, {}]
