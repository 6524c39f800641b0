"""Warnings about a pool, and none about a healthy one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from remuda.domain.instance import Credential, Instance, State
from remuda.domain.pool_config import ScopeTokens
from remuda.domain.provision import ProvisionStatus
from remuda.domain.reporting.warnings import MAX_TERMINATION_S, PoolWarning, find_warnings
from remuda.domain.signals import Report
from tests.support.records import NOW, at, in_state, instance, instance_id, pool_config, provision

CONFIG = pool_config()
MARGIN_S = CONFIG.lifetimes.margin_s


def beating(record: Instance, age_s: float = 1.0, notice: str = "") -> dict[str, Report]:
    beat = Report(instance_id=record.instance_id, beat=5, beat_at=at(-age_s), notice=notice)
    return {record.instance_id: beat}


def warnings_of(record: Instance, reports: dict[str, Report] | None = None) -> list[PoolWarning]:
    return find_warnings(CONFIG, [record], beating(record) if reports is None else reports, [], now=NOW)


@pytest.mark.parametrize("state", State)
def test_healthy_instance_causes_no_warning(state: State) -> None:
    assert warnings_of(in_state(state)) == []


@pytest.mark.parametrize(("over_s", "kinds"), [(MARGIN_S - 1, []), (MARGIN_S + 1, ["expired"])])
def test_expired_means_past_threshold_plus_margin(over_s: float, kinds: list[str]) -> None:
    late = warnings_of(in_state(State.RUNNING, threshold=at(-over_s)))
    assert [item.kind for item in late] == kinds
    assert all("running" in item.text and item.subject == instance_id(1) for item in late)


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
    assert [item.subject for item in find_warnings(CONFIG, [], {}, [late], now=NOW)] == ["1234"]
    done = replace(late, status=ProvisionStatus.COMMITTED)
    assert find_warnings(CONFIG, [], {}, [done, provision()], now=NOW) == []


def test_token_that_expires_within_a_provision_causes_a_warning() -> None:
    short = Credential(token="t0ken", expires_at=at(CONFIG.lifetimes.provision_timeout_s - 1))
    config = replace(CONFIG, tokens=(ScopeTokens(scope="octo/repo", registration=short, removal=short),))
    (warning,) = find_warnings(config, [], {}, [], now=NOW)
    assert (warning.kind, warning.subject) == ("token", "octo/repo")
    assert "t0ken" not in warning.text


def test_missing_configuration_is_the_only_warning() -> None:
    assert [item.kind for item in find_warnings(None, [instance()], {}, [], now=NOW)] == ["unconfigured"]
