"""The cost of an idle pool: which resources and settings add what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from remuda.deployment.idle_cost import METRIC, METRICS, idle_cost
from remuda.deployment.template import template

DOCS = Path(__file__).parents[3] / "docs"
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
    assert items == {
        "metrics": pytest.approx(METRIC * (METRICS["refresh"] + METRICS["scale-down"])),
        "functions": 0.44,
        # With two reads every five minutes.
        "secret": 0.49,
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


def test_an_idle_instance_costs_its_disk_its_address_and_its_polls() -> None:
    """As in the documentation: docs/howto/alarms-and-budget.md."""
    found = idle_cost(FUNCTIONS, {}, owns_secret=True)
    document = found.document()
    assert document["per_instance"] == {
        "disk of 30 GiB": 2.4,
        "address (in a public subnet)": 3.65,
        # Two reads a second, and a heartbeat every five seconds.
        "polls and heartbeats": 0.99,
    }
    assert "each idle instance adds 7.04 $ per month to its own price:" in found.lines()
    larger = idle_cost(FUNCTIONS, {"VolumeSizeGib": "100"}, owns_secret=True).document()["per_instance"]
    assert larger["disk of 100 GiB"] == 8.0


def test_behind_a_nat_the_gateway_is_shown_and_no_address_is() -> None:
    found = idle_cost([*FUNCTIONS, "ListenerGroup"], SETS, owns_secret=True, outbound=["nat"])
    assert not [name for name in (*found.items, *found.per_instance) if "address" in name]
    assert found.lines()[-1] == "a NAT gateway of the subnets costs 32.85 $ per month and 0.045 $ per GB"
    assert found.document()["nat_gateway"] == 32.85
    assert idle_cost(FUNCTIONS, {}, owns_secret=True).document()["nat_gateway"] == 0.0
    # Functions in subnets need one, wherever the instances are.
    assert idle_cost(FUNCTIONS, {"FunctionSubnetIds": "subnet-1"}, owns_secret=True).has_nat


def test_the_totals_are_those_of_the_documentation() -> None:
    stack = [name for name, each in template()["Resources"].items() if each["Type"] == "AWS::CloudWatch::Alarm"]
    without = idle_cost([*FUNCTIONS, *stack], {"ScaleDown": "true"}, owns_secret=True).total
    with_sets = idle_cost([*FUNCTIONS, *stack, "ListenerGroup"], {"ScaleDown": "true", **SETS}, owns_secret=True).total
    text = (DOCS / "howto" / "alarms-and-budget.md").read_text(encoding="utf-8")
    assert f"about {without:.1f} $ without a listener and {with_sets:.1f} $ with one" in " ".join(text.split())


def test_a_type_without_a_price_is_named_and_not_guessed() -> None:
    found = idle_cost(["ListenerGroup"], {**SETS, "ListenerInstanceType": "m9.huge"}, owns_secret=False)
    assert found.unpriced == ("the listener (m9.huge)",)
    assert "and the listener (m9.huge)" in " ".join(map(str.strip, found.lines()))
    assert max(map(len, found.lines())) <= 80
