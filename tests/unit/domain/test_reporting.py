"""Usage reports (hours per phase, costs and savings), price tables, and warnings about a pool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.adapters.system.prices import read_prices, shipped_prices
from remuda.domain.errors import UserError
from remuda.domain.holder import subject_of
from remuda.domain.instance import Credential, HistoryEntry, Instance, RetireReason, State
from remuda.domain.pool_config import PoolConfig, ScopeTokens
from remuda.domain.provision import (
    AcquiredRunner,
    Provision,
    ProvisionEnding,
    ProvisionOutcome,
    ProvisionStatus,
    RunnerSource,
)
from remuda.domain.reporting.explanation import (
    ExplanationInput,
    Severity,
    explain_entry,
    explain_instance,
    explain_run,
)
from remuda.domain.reporting.prices import PriceTable, SpotPrice, mean_spot_prices, parse_prices
from remuda.domain.reporting.timeline import MachinePhase, clip, lifetime, mean_counts, spans_of
from remuda.domain.reporting.usage import Savings, UsageReport, instance_cost, quantile, usage_report, usage_summary
from remuda.domain.reporting.warnings import (
    EXPIRY_WARNING_S,
    MAX_SWEEP_PAUSE_S,
    MAX_TERMINATION_S,
    RECENT_FAILURE_S,
    REPLACE_LOST,
    PoolWarning,
    find_warnings,
)
from remuda.domain.resources import UsageClass
from remuda.domain.signals import Report, Signal
from tests.support.records import (
    NOW,
    at,
    entry,
    in_set,
    in_state,
    instance,
    instance_id,
    job_record,
    pool_config,
    provision,
    set_holder,
)

PRICES = PriceTable(on_demand={"c6i.large": 1.0, "m6i.large": 2.0}, spot={"c6i.large": 0.25})
BEFORE, AFTER = at(-100), at(4_000)


def history_of(*steps: tuple[float, State, str]) -> list[HistoryEntry]:
    """Return a history from seconds, entered states and runs."""
    found = []
    source = None
    for seconds, state, run_id in steps:
        found.append(entry("step", at=at(seconds), source=source, target=state, run_id=run_id))
        source = state
    return found


HISTORY = history_of(
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


def report(
    provisions: Sequence[Provision] = (),
    machines: Sequence[tuple[Instance, Sequence[HistoryEntry]]] = ((ENDED, HISTORY),),
    since: datetime = BEFORE,
    until: datetime = AFTER,
) -> UsageReport:
    histories = {item.instance_id: entries for item, entries in machines}
    return usage_report(provisions, [item for item, _ in machines], histories, PRICES, since=since, until=until)


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


def test_lifetime_is_divided_into_phases() -> None:
    assert [
        (span.phase, span.seconds, subject_of(span.holder)) for span in spans_of(ENDED, HISTORY, now=at(4_000))
    ] == [
        (MachinePhase.BOOTING, 60, "1"),
        (MachinePhase.RUNNING, 600, "1"),
        (MachinePhase.RELEASING, 30, "1"),
        (MachinePhase.IDLE, 600, ""),
        (MachinePhase.CLAIMED, 10, "2"),
        (MachinePhase.RUNNING, 600, "2"),
        (MachinePhase.ENDING, 60, ""),
    ]


def test_costs_are_assigned_to_runs_and_idle_costs_to_none() -> None:
    costs = report().costs
    assert costs.total == pytest.approx(1_960 / 3_600)
    assert costs.by_run == {
        "1": pytest.approx(690 / 3_600),
        "": pytest.approx(660 / 3_600),
        "2": pytest.approx(610 / 3_600),
    }
    assert costs.by_phase["idle"] == pytest.approx(600 / 3_600)
    assert costs.by_class == {"large": pytest.approx(costs.total)}


def test_only_the_requested_period_counts() -> None:
    assert report(since=at(630), until=at(700)).hours == {
        "running": pytest.approx(30 / 3_600),
        "releasing": pytest.approx(30 / 3_600),
        "idle": pytest.approx(10 / 3_600),
    }


def test_live_machine_is_counted_until_now() -> None:
    young = instance(state=State.CREATED, created_at=at(0))
    assert report(machines=[(young, HISTORY[:1])], until=at(360)).hours == {"booting": pytest.approx(0.1)}


def test_lifetime_without_history_is_unknown() -> None:
    assert report(machines=[(ENDED, [])]).hours == {"unknown": pytest.approx(1_900 / 3_600)}
    cut = report(machines=[(ENDED, HISTORY[3:])]).hours
    assert cut["unknown"] == pytest.approx(690 / 3_600)
    assert sum(cut.values()) == pytest.approx(1_960 / 3_600)


def test_spot_price_applies_and_unpriced_type_is_named() -> None:
    spot = instance(1, state=State.TERMINATED, usage_class=UsageClass.SPOT, threshold=at(1_900))
    odd = instance(2, state=State.TERMINATED, instance_type="x9.large", threshold=at(1_900))
    found = report(machines=[(spot, HISTORY), (odd, HISTORY)])
    assert found.costs.total == pytest.approx(0.25 * 1_960 / 3_600)
    assert found.costs.unpriced_hours == {"x9.large on-demand": pytest.approx(1_960 / 3_600)}


def test_reuse_and_waiting_times_by_kind() -> None:
    outcomes = [outcome(created=3, seconds=40.0), outcome(reused=2, created=1, seconds=30.0)]
    outcomes += [outcome(reused=3, seconds=float(seconds)) for seconds in (1, 2, 3)]
    outcomes += [outcome(created=1, seconds=9.0, error="no room")]
    found = report([provision(number, outcome=item) for number, item in enumerate(outcomes)] + [provision(9)])
    assert (found.reused, found.created, found.provisions) == (11, 4, 7)
    assert found.reuse_rate == pytest.approx(11 / 15)
    assert found.kinds == {"cold": 1, "mixed": 1, "warm": 3, "failed": 1, "unknown": 1}
    assert found.provision_times["warm"].p50 == pytest.approx(2.0)
    assert found.provision_times["warm"].p95 == pytest.approx(2.9)
    assert found.provision_times["cold"].count == 1
    assert found.failures == {"no room": 1}


def test_savings_compare_boots_with_idle_time() -> None:
    outcomes = [outcome(created=1, seconds=60.0), outcome(reused=2, seconds=10.0)]
    savings = report([provision(number, outcome=item) for number, item in enumerate(outcomes)]).savings
    assert (savings.boot_s, savings.waiting_s) == (60.0, 50.0)
    assert savings.boot_cost == pytest.approx(2 * 60 / 3_600)
    assert savings.idle_cost == pytest.approx(600 / 3_600)
    assert savings.net == pytest.approx(savings.boot_cost - savings.idle_cost)


def test_each_runner_of_a_set_that_is_reused_saves_the_wait_of_its_own_job() -> None:
    booted = provision(1, outcome=outcome(created=1, seconds=60.0))
    burst = provision(2, runner_set="large", outcome=outcome(reused=3, seconds=10.0))
    assert report([booted, burst]).savings.waiting_s == 3 * (60.0 - 10.0)


@pytest.mark.parametrize(
    ("boot_cost", "idle_cost", "text"),
    [
        (0.0013, 0.0455, "idle instances cost 0.0442 USD more than reuse saved"),
        (1.5, 4.0, "idle instances cost 2.50 USD more than reuse saved"),
        (1.5, 0.25, "1.25 USD after the cost of idle instances"),
        (0.02, 0.0, "0.0200 USD after the cost of idle instances"),
        (0.0, 0.00001, "0.00 USD after the cost of idle instances"),
    ],
)
def test_a_negative_saving_is_a_cost(boot_cost: float, idle_cost: float, text: str) -> None:
    savings = Savings(boot_s=40.0, waiting_s=9.0, boot_hours=0.1, boot_cost=boot_cost, idle_cost=idle_cost)
    assert savings.describe_cost("USD") == text
    assert replace(savings, boot_s=None).describe_cost("USD") == "unknown: no boot time measured"


def test_savings_are_unknown_without_a_boot() -> None:
    savings = report([provision(1, outcome=outcome(reused=2))]).savings
    assert (savings.boot_s, savings.waiting_s, savings.boot_cost) == (None, 0.0, 0.0)


def test_listed_runners_stand_for_all() -> None:
    many = outcome(reused=500, seconds=1.0)
    bounded = ProvisionOutcome(ended_at=at(9), seconds=1.0, reused=500, acquired=many.acquired[:100])
    found = report([provision(1, outcome=outcome(created=1, seconds=36.0)), provision(2, outcome=bounded)])
    assert found.savings.boot_hours == pytest.approx(500 * 36 / 3_600)


def test_terminations_are_counted_by_state_and_reason() -> None:
    ends = [
        entry("end-idle", at=at(5), target=State.TERMINATING, retire_reason=RetireReason.USED_UP, why=f"{number} uses")
        for number in (50, 51)
    ]
    assert report(machines=[(ENDED, ends)]).retirements == {"idle: used-up": 2}


def test_jobs_are_counted_by_their_set() -> None:
    jobs = [job_record(1), job_record(2), job_record(3, runner_set="spot")]
    served = provision(1, runner_set="large", outcome=outcome(reused=1))
    found = usage_report([served], [], {}, PRICES, jobs=jobs, since=BEFORE, until=AFTER).jobs.by_set
    assert {name: (item.jobs, item.reuse_rate) for name, item in found.items()} == {
        "large": (2, 1.0),
        "spot": (1, None),
    }


def test_report_without_data_is_empty() -> None:
    found = report(machines=[])
    assert (found.reuse_rate, found.costs.total, found.hours, found.points) == (None, 0, {}, ())


@pytest.mark.parametrize(
    ("values", "part", "expected"), [([1], 0.95, 1), ([1, 3], 0.5, 2), ([1, 2, 3, 4, 5], 0.95, 4.8), ([3, 1], 0, 1)]
)
def test_quantiles(values: list[float], part: float, expected: float) -> None:
    assert quantile(values, part) == pytest.approx(expected)


# Random histories -------------------------------------------------------------------------------------------------

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
END = at(9_000)


@given(records, st.lists(entries, max_size=12))
def test_hours_by_state_sum_to_the_lifetime(record: Instance, history: list[HistoryEntry]) -> None:
    begin, end = lifetime(record, history, now=END)
    spans = spans_of(record, history, now=END)
    assert begin <= end <= END
    assert sum(span.seconds for span in spans) == pytest.approx((end - begin).total_seconds())
    assert all(before.end == after.begin for before, after in pairwise(spans))


@given(
    st.lists(st.tuples(records, st.lists(entries, max_size=8)), max_size=5, unique_by=lambda life: life[0].instance_id),
    st.integers(-3_000, 9_000),
    st.integers(1, 5_000),
)
def test_every_cost_breakdown_adds_up(
    machines: list[tuple[Instance, list[HistoryEntry]]], since_s: int, length_s: int
) -> None:
    since, until = at(since_s), at(since_s + length_s)
    found = report(machines=machines, since=since, until=until)
    costs = found.costs
    for cut in (costs.by_phase, costs.by_class, costs.by_usage, costs.by_type, costs.by_run):
        assert sum(cut.values()) == pytest.approx(costs.total)
    spans = [
        span
        for item, history in machines
        for span in clip(spans_of(item, history, now=until), since=since, until=until)
    ]
    assert sum(found.hours.values()) == pytest.approx(sum(span.seconds for span in spans) / 3_600)
    assert sum(found.hours.values()) <= len(machines) * length_s / 3_600 + 1e-9


@given(st.lists(st.tuples(records, st.lists(entries, max_size=8)), max_size=4), st.integers(1, 5))
def test_summary_equals_report(machines: list[tuple[Instance, list[HistoryEntry]]], reused: int) -> None:
    machines = [
        (replace(record, instance_id=instance_id(number)), each) for number, (record, each) in enumerate(machines)
    ]
    provisions = [provision(1, outcome=outcome(created=1, seconds=60.0)), provision(2, outcome=outcome(reused=reused))]
    full = report(provisions, machines)
    costs = [instance_cost(record, history, PRICES, since=BEFORE, until=AFTER) for record, history in machines]
    found = usage_summary(provisions, [record for record, _ in machines], costs, PRICES, since=BEFORE, until=AFTER)
    assert (found.reused, found.created, found.runs) == (full.reused, full.created, 2)
    assert found.cost == pytest.approx(full.costs.total)
    assert set(found.unpriced) == set(full.costs.unpriced_hours)
    for name in ("boot_s", "waiting_s", "boot_hours", "boot_cost", "idle_cost", "net"):
        assert getattr(found.savings, name) == pytest.approx(getattr(full.savings, name)), name


@given(st.lists(st.tuples(records, st.lists(entries, max_size=8)), max_size=4), st.integers(1, 50))
def test_mean_counts_add_up_to_the_total_time(machines: list[tuple[Instance, list[HistoryEntry]]], steps: int) -> None:
    since, until = at(0), at(5_000)
    spans = [span for item, history in machines for span in spans_of(item, history, now=END)]
    found = mean_counts(spans, since=since, until=until, steps=steps)
    assert len(found) == steps
    width = (until - since) / steps
    inside = sum(span.seconds for span in clip(spans, since=since, until=until))
    assert sum(sum(step.values()) for step in found) * width.total_seconds() == pytest.approx(inside, abs=1e-3)
    assert all(sum(step.values()) <= len(machines) + 1e-6 for step in found)


def test_empty_period_has_no_mean_counts() -> None:
    assert mean_counts([], since=END, until=END, steps=3) == [{}, {}, {}]


@pytest.mark.parametrize(
    ("region", "dated", "shown"),
    [("eu-central-1", "2026-11", "eu-central-1, 2026-11"), ("", "2026-11", "2026-11"), ("", "", "")],
)
def test_report_says_where_and_when_its_prices_apply(region: str, dated: str, shown: str) -> None:
    prices = replace(PRICES, region=region, dated=dated)
    assert usage_report((), (), {}, prices, since=BEFORE, until=AFTER).prices_as_of == shown


def explanation_input(*instances: Instance, **changed: Any) -> ExplanationInput:
    values: dict[str, Any] = {
        "now": NOW,
        "lifetimes": CONFIG.lifetimes,
        "instances": {item.instance_id: item for item in instances},
        "histories": {},
        "reports": {},
    }
    return ExplanationInput(**{**values, **changed})


def test_launch_of_an_instance_without_history_is_explained_by_its_record() -> None:
    record = instance(created_at=at(-60))
    (launch,) = explain_instance(record, explanation_input(record)).events
    assert (launch.at, launch.instance_id) == (at(-60), record.instance_id)
    assert launch.what == "launched; its history is not kept any more"


@pytest.mark.parametrize(
    ("run_id", "expected"),
    [
        (None, "listens for a job of set large; "),
        ("77", "runs a job of run 77 for set large, "),
        ("", "runs a job of a run that nobody has named for set large, "),
    ],
)
def test_instance_of_a_runner_set_is_explained_by_its_job(run_id: str | None, expected: str) -> None:
    record = in_set(State.RUNNING, holder=set_holder(run_id=run_id))
    (step,) = explain_instance(record, explanation_input(record)).next_steps
    assert step.startswith(f"{record.instance_id}: {expected}")


def test_committed_run_whose_instances_cannot_be_read_is_not_said_to_hold_none() -> None:
    committed = provision(status=ProvisionStatus.COMMITTED, instance_ids=(instance_id(1),))
    (step,) = explain_run(committed.run_id, [committed], explanation_input()).next_steps
    assert "the run keeps its runners" in step


def test_unknown_transition_is_explained_by_its_name() -> None:
    event = explain_entry(instance_id(1), entry("later-version"))
    assert (event.what, event.severity) == ("later-version", Severity.NORMAL)


# Prices: tables are validated, and spot prices are means over time and zones ------------------------------------------


TABLE = PriceTable(on_demand={"c6i.large": 0.085, "m6i.large": 0.096}, spot={"c6i.large": 0.03})


@pytest.mark.parametrize(
    ("instance_type", "usage", "price"),
    [
        ("c6i.large", UsageClass.ON_DEMAND, 0.085),
        ("c6i.large", UsageClass.SPOT, 0.03),
        ("m6i.large", UsageClass.SPOT, 0.096),
        ("x9.large", UsageClass.ON_DEMAND, None),
        ("x9.large", UsageClass.SPOT, None),
    ],
)
def test_hourly_price(instance_type: str, usage: UsageClass, price: float | None) -> None:
    assert TABLE.hourly(instance_type, usage) == price


def test_spot_prices_of_ec2_take_precedence() -> None:
    table = TABLE.with_spot({"c6i.large": 0.05})
    assert table.hourly("c6i.large", UsageClass.SPOT) == 0.05
    assert table.hourly("c6i.large", UsageClass.ON_DEMAND) == 0.085


@pytest.mark.parametrize(
    "document",
    [
        [],
        None,
        {"on-demand": []},
        {"on-demand": {"c6i.large": "0.1"}},
        {"on-demand": {"c6i.large": True}},
        {"on-demand": {"c6i.large": -1}},
        {"on-demand": {"c6i.large": float("nan")}},
        {"on-demand": {"c6i.large": float("inf")}},
        {"spot": {"c6i.large": 1e9}},
        {"currency": 5},
        {"currency": "x" * 41},
        {"dated": "a\x1bb"},
        {"ondemand": {}},
        {"on-demand": {str(number): 1 for number in range(5_001)}},
    ],
    ids=lambda value: str(value)[:40],
)
def test_invalid_table_is_rejected_with_a_fix(document: Any) -> None:
    with pytest.raises(UserError) as failure:
        parse_prices(document)
    assert failure.value.field == "--prices"
    assert failure.value.fix.startswith("give ")


def test_custom_table(tmp_path: Path) -> None:
    file = tmp_path / "prices.json"
    file.write_text(json.dumps({"currency": "EUR", "on-demand": {"c6i.large": 1}}))
    assert read_prices(file) == PriceTable(currency="EUR", on_demand={"c6i.large": 1.0})


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\xff"], ids=["empty", "cut", "deep", "odd"])
def test_file_that_is_not_a_table(tmp_path: Path, text: str) -> None:
    file = tmp_path / "prices.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(UserError, match="not JSON"):
        read_prices(file)


@pytest.mark.parametrize("name", ["missing.json", ".", "a\0b"])
def test_unreadable_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_prices(tmp_path / name)


def test_default_table_is_dated_and_has_the_common_types() -> None:
    shipped = shipped_prices()
    assert (shipped.currency, shipped.region, bool(shipped.dated)) == ("USD", "us-east-1", True)
    families = {name.partition(".")[0] for name in shipped.on_demand}
    assert {"t3", "m5", "m6i", "m7i", "m7g", "c5", "c6i", "c7i", "c7g", "r6i"} <= families
    assert shipped.on_demand["c6i.xlarge"] == pytest.approx(2 * shipped.on_demand["c6i.large"])


def point(price: float, seconds: float, zone: str = "a", name: str = "c6i.large") -> SpotPrice:
    return SpotPrice(instance_type=name, zone=zone, at=at(seconds), price=price)


def test_mean_over_time() -> None:
    """The price was 0.1 before the period and in its first half, then 0.3."""
    points = [point(0.3, 50), point(0.1, -1_000)]
    assert mean_spot_prices(points, since=at(0), until=at(100)) == {"c6i.large": pytest.approx(0.2)}


@pytest.mark.parametrize("points", [[point(0.1, -50)], [point(0.3, -10), point(0.1, -50)]])
def test_mean_of_an_empty_period_is_the_last_price(points: list[SpotPrice]) -> None:
    last = max(points, key=lambda item: item.at)
    assert mean_spot_prices(points, since=at(0), until=at(0)) == {"c6i.large": last.price}


def test_mean_over_zones_and_by_type() -> None:
    points = [point(0.1, 0), point(0.3, 0, "b"), point(7.0, 0, name="m6i.large")]
    assert mean_spot_prices(points, since=at(0), until=at(100)) == {
        "c6i.large": pytest.approx(0.2),
        "m6i.large": pytest.approx(7.0),
    }


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(-500, 500), st.sampled_from("ab")), min_size=1),
    st.floats(0, 300),
)
def test_mean_lies_between_the_prices(changes: list[tuple[float, float, str]], length_s: float) -> None:
    points = [point(price, seconds, zone) for price, seconds, zone in changes]
    found = mean_spot_prices(points, since=at(0), until=at(length_s))["c6i.large"]
    assert min(item[0] for item in changes) - 1e-9 <= found <= max(item[0] for item in changes) + 1e-9


# Warnings, and none about a healthy pool ------------------------------------------------------------------------------


CONFIG = pool_config()
MARGIN_S = CONFIG.lifetimes.margin_s


def beating(record: Instance, age_s: float = 1.0, notice: str = "") -> dict[str, Report]:
    beat = Report(instance_id=record.instance_id, beat=5, beat_at=at(-age_s), notice=notice)
    return {record.instance_id: beat}


def found_warnings(
    config: PoolConfig | None,
    instances: Sequence[Instance] = (),
    reports: dict[str, Report] | None = None,
    provisions: Sequence[Provision] = (),
    **more: Any,
) -> list[PoolWarning]:
    options = {"lost": {}, "ended": {}, "sweep_due": None, "now": NOW} | more
    return find_warnings(config, instances, reports or {}, provisions, **options)


def warnings_of(record: Instance, reports: dict[str, Report] | None = None) -> list[PoolWarning]:
    return found_warnings(CONFIG, [record], beating(record) if reports is None else reports)


@pytest.mark.parametrize("state", State)
def test_healthy_instance_causes_no_warning(state: State) -> None:
    assert warnings_of(in_state(state)) == []


@pytest.mark.parametrize(("over_s", "kinds"), [(MARGIN_S - 1, []), (MARGIN_S + 1, ["expired"])])
def test_expired_means_past_threshold_plus_margin(over_s: float, kinds: list[str]) -> None:
    late = warnings_of(in_state(State.RUNNING, threshold=at(-over_s)))
    assert [item.kind for item in late] == kinds
    assert all("running" in item.text and item.subject == instance_id(1) for item in late)


@pytest.mark.parametrize(("busy", "kinds"), [(True, []), (False, ["expired"])])
def test_unrecorded_job_of_a_set_is_not_expired_before_its_deadline(*, busy: bool, kinds: list[str]) -> None:
    record = in_set(State.RUNNING, threshold=at(-MARGIN_S - 1), run_deadline=at(600))
    reports = {name: replace(each, busy=busy) for name, each in beating(record).items()}
    assert [item.kind for item in warnings_of(record, reports)] == kinds


@pytest.mark.parametrize(("age_s", "kinds"), [(74, []), (76, ["stale-heartbeat"])])
def test_heartbeat_is_stale_after_its_limit_plus_margin(age_s: float, kinds: list[str]) -> None:
    record = in_state(State.IDLE)
    assert [item.kind for item in warnings_of(record, beating(record, age_s))] == kinds


def test_booting_machine_needs_no_heartbeat() -> None:
    assert warnings_of(in_state(State.CREATED, created_at=at(-200)), {}) == []
    assert [item.kind for item in warnings_of(in_state(State.RUNNING, created_at=at(-200)), {})] == ["stale-heartbeat"]


def test_unconfirmed_termination_is_stuck() -> None:
    assert warnings_of(in_state(State.TERMINATING, threshold=at(-MAX_TERMINATION_S + 1))) == []
    assert [item.kind for item in warnings_of(in_state(State.TERMINATING, threshold=at(-MAX_TERMINATION_S - 1)))] == [
        "stuck"
    ]


def test_spot_notice_causes_a_warning() -> None:
    record = instance()
    (warning,) = warnings_of(record, beating(record, notice="terminate at noon"))
    assert (warning.kind, "terminate at noon" in warning.text) == ("spot-notice", True)


def test_open_provision_past_its_deadline_is_overdue() -> None:
    late = provision(deadline=at(-MARGIN_S - 1))
    assert [item.subject for item in found_warnings(CONFIG, [], {}, [late])] == ["1234"]
    done = replace(late, status=ProvisionStatus.COMMITTED)
    assert found_warnings(CONFIG, [], {}, [done, provision()]) == []


def test_token_that_expires_within_a_provision_causes_a_warning() -> None:
    short = Credential(token="t0ken", expires_at=at(CONFIG.lifetimes.provision_timeout_s - 1))
    config = replace(CONFIG, tokens=(ScopeTokens(scope="octo/repo", registration=short, removal=short),))
    (warning,) = found_warnings(config, [], {}, [])
    assert (warning.kind, warning.subject) == ("token", "octo/repo")
    assert "t0ken" not in warning.text


def test_missing_configuration_is_the_only_warning() -> None:
    assert [item.kind for item in found_warnings(None, [instance()], {}, [])] == ["unconfigured"]


def ended(number: int, ending: ProvisionEnding, *, ago_s: float = 60.0, **changed: Any) -> Provision:
    return provision(
        number, status=ProvisionStatus.RELEASED, ending=ending, released_at=at(-ago_s), why="no capacity", **changed
    )


@pytest.mark.parametrize(
    ("ending", "ago_s", "kinds"),
    [
        (ProvisionEnding.FAILED, 60, ["provision-failed"]),
        (ProvisionEnding.FAILED, RECENT_FAILURE_S + 1, []),
        (ProvisionEnding.EXPIRED, 60, ["run-expired"]),
        (ProvisionEnding.INTERRUPTED, 60, []),
        (ProvisionEnding.RELEASED, 60, []),
    ],
)
def test_runs_that_failed_or_expired_lately_are_warnings(
    ending: ProvisionEnding, ago_s: float, kinds: list[str]
) -> None:
    found = found_warnings(CONFIG, provisions=[ended(1, ending, ago_s=ago_s)])
    assert [(item.kind, item.subject) for item in found] == [(kind, "1234") for kind in kinds]
    assert all("no capacity" in item.text for item in found)


def test_failed_run_that_was_provisioned_again_is_no_warning() -> None:
    failed = ended(1, ProvisionEnding.FAILED, created_at=at(-100))
    again = provision(2, created_at=at(-50), status=ProvisionStatus.COMMITTED, instance_ids=("i-1", "i-2", "i-3"))
    assert found_warnings(CONFIG, provisions=[failed, again]) == []
    (warning,) = found_warnings(CONFIG, provisions=[failed, again], lost={again.provision_id: ("i-2",)})
    assert (warning.kind, warning.text) == ("lost-instance", f"it lost 1 of its 3 instances: i-2; {REPLACE_LOST}")


def test_lost_instances_are_a_warning_with_their_reasons() -> None:
    run = provision(1, status=ProvisionStatus.COMMITTED, instance_ids=("i-1", "i-2", "i-3"))
    record = in_state(State.TERMINATED, retire_reason=RetireReason.FAILED, retire_detail="no job")
    known = {"i-1": replace(record, instance_id="i-1"), "i-2": replace(record, instance_id="i-2")}
    (warning,) = found_warnings(CONFIG, provisions=[run], lost={run.provision_id: ("i-1", "i-2", "i-3")}, ended=known)
    assert (warning.kind, warning.subject) == ("lost-instance", run.run_id)
    assert warning.text == f"it lost all 3 of its instances; failed: no job; {REPLACE_LOST}"


def failed_runner(record: Instance, *, epoch: int, signal: Signal = Signal.UD_REG_FAILED) -> list[PoolWarning]:
    (report,) = beating(record).values()
    failed = report.with_signal(epoch=epoch, signal=signal, detail="no job")
    return warnings_of(record, {record.instance_id: failed})


def test_failed_runner_is_a_warning_until_its_instance_ends() -> None:
    record = in_state(State.RUNNING)
    (warning,) = failed_runner(record, epoch=record.epoch)
    assert (warning.kind, warning.subject) == ("failed-runner", record.instance_id)
    what = "its runner failed: no job; the next refresh terminates it"
    assert warning.text == f"{what}; {REPLACE_LOST}"
    (warning,) = failed_runner(in_set(State.RUNNING), epoch=in_set(State.RUNNING).epoch)
    assert warning.text == what, "a set replaces it itself"
    assert failed_runner(record, epoch=record.epoch - 1) == []
    assert failed_runner(record, epoch=record.epoch, signal=Signal.UD_REG_OK) == []
    assert failed_runner(in_state(State.RELEASING), epoch=record.epoch) == []


@pytest.mark.parametrize(
    ("due", "applied_s", "kinds"),
    [(1, 0, []), (-1, 0, ["sweeper"]), (None, 0, []), (None, -MAX_SWEEP_PAUSE_S - 1, ["sweeper"])],
)
def test_sweeper_that_does_not_run_is_the_first_warning(due: int | None, applied_s: float, kinds: list[str]) -> None:
    config = replace(CONFIG, applied_at=at(applied_s))
    late = in_state(State.RUNNING, threshold=at(-MARGIN_S - 1))
    found = found_warnings(config, [late], beating(late), sweep_due=None if due is None else at(due))
    assert [item.kind for item in found] == [*kinds, "expired"]


@pytest.mark.parametrize(
    ("over_s", "text"),
    [(119, "119 s"), (120, "2 min"), (7_199, "120 min"), (7_200, "2 h"), (172_799, "48 h"), (172_800, "2 d")],
)
def test_age_of_a_warning_has_a_fitting_unit(over_s: float, text: str) -> None:
    (found,) = found_warnings(CONFIG, [], {}, sweep_due=at(-over_s))
    assert f"a sweep was due {text} ago;" in found.text


@pytest.mark.parametrize(
    ("left_s", "busy", "own_runtime_s", "is_near"),
    [
        (EXPIRY_WARNING_S + 1, True, None, False),
        (EXPIRY_WARNING_S - 1, True, None, True),
        (EXPIRY_WARNING_S - 1, False, None, False),
        (EXPIRY_WARNING_S - 1, True, 1_000.0, False),
        (99.0, True, 1_000.0, True),
    ],
)
def test_job_near_its_time_limit_is_a_warning(
    *, left_s: float, busy: bool, own_runtime_s: float | None, is_near: bool
) -> None:
    """Less than ten minutes and less than a tenth of the maximum runtime, which a run may choose."""
    record = in_state(State.RUNNING, threshold=at(left_s), provision_id="p-1")
    report = replace(beating(record)[record.instance_id], busy=busy, epoch=record.epoch)
    provisions = []
    if own_runtime_s is not None:
        outcome = ProvisionOutcome(ended_at=at(left_s - own_runtime_s), seconds=1.0)
        provisions = [provision(1, status=ProvisionStatus.COMMITTED, deadline=at(left_s), outcome=outcome)]
    found = found_warnings(CONFIG, [record], {record.instance_id: report}, provisions)
    assert [item.kind for item in found] == ["expires-soon"] * is_near
    assert all("max-runtime-min" in item.text for item in found)
