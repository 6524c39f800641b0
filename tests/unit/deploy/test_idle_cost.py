"""The cost of an idle pool: which resources and settings add what."""

from __future__ import annotations

from typing import Any

import pytest

from remuda.deployment.idle_cost import METRIC, METRICS, idle_cost

FUNCTIONS = ["Table", "RefreshFunction", "ScaleDownFunction", "BrokerFunction"]
ALARMS = ["RefreshAlarm", "BudgetAlarm"]
SETS: dict[str, Any] = {"RunnerSets": "[]", "ListenerInstanceType": "t3.micro"}


def cost(resources: list[str], *, owns_secret: bool = True, **parameters: Any) -> dict[str, Any]:
    document = idle_cost(resources, {"ScaleDown": "true", **parameters}, owns_secret=owns_secret).document()
    items: dict[str, Any] = document["items"]
    assert document["monthly"] == pytest.approx(sum(items.values()), abs=0.02)
    return items


def test_a_pool_without_functions_costs_nothing_that_is_counted() -> None:
    assert cost(["Table"], owns_secret=False) == {}


def test_functions_write_metrics_and_run_every_five_minutes() -> None:
    items = cost(FUNCTIONS)
    assert items == {"metrics": pytest.approx(METRIC * (METRICS["refresh"] + METRICS["scale-down"])), "secret": 0.4} | {
        "functions": 0.44
    }
    without = cost(FUNCTIONS, ScaleDown="false")
    assert without["metrics"] == pytest.approx(METRIC * METRICS["refresh"])
    assert without["functions"] == 0.22


def test_alarms_cost_ten_cents_each() -> None:
    assert cost([*FUNCTIONS, *ALARMS])["alarms"] == 0.2


def test_a_listener_costs_its_instance_disk_address_metrics_and_calls() -> None:
    with_sets = cost([*FUNCTIONS, "ListenerGroup"], **SETS)
    assert {name: with_sets[name] for name in with_sets if "listener" in name or "its" in name} == {
        "listener (t3.micro)": 7.59,
        "its disk": 0.64,
        "its address (in a public subnet)": 3.65,
    }
    more = with_sets["metrics"] - cost(FUNCTIONS)["metrics"]
    assert more == pytest.approx(METRIC * METRICS["listen"] + 0.53, abs=0.01)
    # In a container, it costs the metrics only.
    elsewhere = cost(FUNCTIONS, **SETS)
    assert (elsewhere["metrics"], "its disk" in elsewhere) == (with_sets["metrics"], False)


def test_a_type_without_a_price_is_named_and_not_guessed() -> None:
    found = idle_cost(["ListenerGroup"], {**SETS, "ListenerInstanceType": "m9.huge"}, owns_secret=False)
    assert found.unpriced == ("the listener (m9.huge)",)
    assert "and the listener (m9.huge)" in " ".join(map(str.strip, found.lines()))
    assert max(map(len, found.lines())) <= 80
