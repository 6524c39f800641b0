"""Requirements of a smoke run before its first call: permission, a budget that covers it, and its settings."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from remuda.adapters.system.prices import shipped_prices
from remuda.domain.errors import UserError
from tests.smoke import __main__ as smoke_main
from tests.smoke.budget import (
    CLEANUP_HOURS,
    MACHINES,
    RUN_HOURS,
    TYPES,
    BudgetExceeded,
    Meter,
    check_budget,
    fixed_items,
    machine_hour_usd,
    upper_limit,
)
from tests.smoke.sequence import SmokeFailure
from tests.smoke.settings import read_settings

PRICES = shipped_prices()
ROOT = Path(__file__).parents[3]
#: What the run costs at most, with the shipped prices.
MOST = sum(item.usd for item in upper_limit(PRICES))


@pytest.fixture
def given_variables(tmp_path) -> dict[str, str]:
    (tmp_path / "SHA256SUMS").write_text("")
    return {
        "REMUDA_SMOKE": "yes",
        "REMUDA_SMOKE_BUDGET_USD": "5",
        "REMUDA_SMOKE_REPOSITORY": "octo/demo",
        "REMUDA_SMOKE_BUNDLES": str(tmp_path),
        "REMUDA_GITHUB_TOKEN": "ghp_secret",
        "AWS_REGION": "us-east-1",
    }


def test_settings_are_complete_and_hide_the_token(given_variables):
    settings = read_settings(given_variables)
    assert (settings.budget_usd, settings.repository, settings.region) == (5.0, "octo/demo", "us-east-1")
    assert "ghp_secret" not in repr(settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("REMUDA_SMOKE", ""),
        ("REMUDA_SMOKE", "true"),
        ("REMUDA_SMOKE", "YES"),
        ("REMUDA_SMOKE_BUDGET_USD", ""),
        ("REMUDA_SMOKE_BUDGET_USD", "0"),
        ("REMUDA_SMOKE_BUDGET_USD", "-1"),
        ("REMUDA_SMOKE_BUDGET_USD", "nan"),
        ("REMUDA_SMOKE_BUDGET_USD", "inf"),
        ("REMUDA_SMOKE_BUDGET_USD", "5 USD"),
        ("REMUDA_SMOKE_BUDGET_USD", "1000"),
        ("REMUDA_SMOKE_REPOSITORY", ""),
        ("REMUDA_SMOKE_REPOSITORY", "octo"),
        ("REMUDA_SMOKE_REPOSITORY", "octo/demo/x"),
        ("REMUDA_GITHUB_TOKEN", " "),
        ("AWS_REGION", ""),
        ("REMUDA_SMOKE_BUNDLES", "no/such/folder"),
    ],
)
def test_a_missing_or_wrong_setting_is_named(given_variables, name, value):
    with pytest.raises(UserError) as error:
        read_settings({**given_variables, name: value})
    assert error.value.field == name


@pytest.mark.parametrize("changed", [{"REMUDA_SMOKE": "no"}, {"REMUDA_SMOKE_BUDGET_USD": "0.01"}], ids=str)
def test_the_command_refuses_with_one_sentence_and_exit_code_2(given_variables, changed):
    environment = {**os.environ, **given_variables, **changed}
    # Any call would fail: nothing listens there.
    environment |= {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "HTTPS_PROXY": "http://127.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.smoke"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("smoke-aws: ")
    assert next(iter(changed)) in sentence


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EndpointConnectionError(endpoint_url="https://ec2.example"), 1),
        (ClientError({"Error": {"Code": "UnauthorizedOperation", "Message": "no"}}, "DescribeInstances"), 1),
        (SmokeFailure("the job failed"), 1),
        (asyncio.CancelledError(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_failed_run_ends_with_one_sentence_and_its_exit_code(given_variables, monkeypatch, capsys, error, code):
    async def fail(*_: Any) -> None:
        raise error

    for name, value in given_variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(smoke_main, "smoke", fail)
    assert smoke_main.main() == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("smoke-aws: failed: " if code == 1 else "smoke-aws: interrupted")


def test_the_upper_limit_covers_the_most_expensive_machines_for_the_whole_time():
    dearest = max(PRICES.on_demand[name] for name in TYPES)
    machines = upper_limit(PRICES)[0].usd
    assert machines > MACHINES * (RUN_HOURS + CLEANUP_HOURS) * dearest * 1.9
    assert all(item.usd > 0 for item in upper_limit(PRICES))
    # A few dollars, so that the figure in the docs stays right.
    assert 2 < MOST < 4


def test_a_run_costs_at_most_three_dollars():
    assert MOST <= 3


def test_a_budget_below_the_upper_limit_is_refused():
    assert check_budget(PRICES, MOST) == MOST
    with pytest.raises(UserError, match=f"up to {MOST:.2f} USD, more than REMUDA_SMOKE_BUDGET_USD=1"):
        check_budget(PRICES, 1.0)


def test_the_meter_stops_the_run_while_the_clean_up_is_still_paid_for():
    meter = Meter(limit_usd=MOST, prices=PRICES)
    meter.check()
    meter.add(machines=0, seconds=RUN_HOURS * 3_600 - 60)
    meter.check()
    meter.add(machines=0, seconds=120)
    with pytest.raises(BudgetExceeded):
        meter.check()
    assert meter.spent_usd + MACHINES * CLEANUP_HOURS * machine_hour_usd(PRICES) <= MOST + 0.05


def test_more_machines_than_planned_use_up_the_budget_earlier():
    meter = Meter(limit_usd=MOST, prices=PRICES)
    meter.add(machines=50, seconds=300)
    with pytest.raises(BudgetExceeded, match="USD"):
        meter.check()
    assert meter.spent_usd > sum(item.usd for item in fixed_items()) + 50 * machine_hour_usd(PRICES) / 12.1


def test_a_large_budget_does_not_make_the_run_longer():
    meter = Meter(limit_usd=100.0, prices=PRICES)
    meter.add(machines=1, seconds=RUN_HOURS * 3_600 + 1)
    with pytest.raises(BudgetExceeded, match="hours"):
        meter.check()
