"""Every row of the decision table, with its reason, and cron expressions. Observed scenarios cover the other rules."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.domain.errors import UserError
from remuda.domain.instance import RetireReason, State
from remuda.domain.scale_down.decisions import (
    Action,
    Decision,
    Lookup,
    ScaleDownPhase,
    decide_active,
    decide_bypassed,
    decide_orphan,
    decide_recorded,
    renewals,
    within_budget,
)
from remuda.domain.scale_down.fleet import FleetMachine, Registration, match_registrations
from remuda.domain.scale_down.idle_config import MAX_IDLE, Eviction, Quota, parse_cron, parse_idle_config, quota_at
from remuda.domain.scale_down.policy import IdleScope, ScaleDownPolicy
from tests.support.records import NOW, at, instance, instance_id
from tests.support.scripted_fleet import idle_window, machine

MINUTE = 60.0


def registration(number: int, *, online: bool = True, busy: bool = False, runner_id: int = 0) -> Registration:
    return Registration(runner_id=runner_id or number, name=f"x-{instance_id(number)}", online=online, busy=busy)


def judge(
    machines: list[FleetMachine],
    runners: list[Registration] | None,
    policy: ScaleDownPolicy | None = None,
    quota: Quota | None = None,
) -> list[Decision]:
    ids = [item.instance_id for item in machines]
    scopes = {item.scope for item in machines if item.scope}
    known = {scope: None if runners is None else match_registrations(ids, runners) for scope in scopes}
    return decide_active(machines, known, policy or ScaleDownPolicy(), quota or Quota(), NOW)


# Phase 1


@pytest.mark.parametrize(
    ("lookup", "action", "word"),
    [
        (Lookup(found=registration(1, online=False, busy=True)), Action.TERMINATE, "offline and busy"),
        (Lookup(found=None), Action.TERMINATE, "has no runner"),
        (Lookup(found=registration(1, online=True, busy=True)), Action.UNMARK_ORPHAN, "online and busy"),
        (Lookup(found=registration(1, online=True)), Action.UNMARK_ORPHAN, "online and idle"),
        (Lookup(found=registration(1, online=False)), Action.UNMARK_ORPHAN, "offline and idle"),
        (Lookup(found=registration(2, busy=True)), Action.TERMINATE, "another machine's"),
        (Lookup(failed="500"), Action.SKIP, "request to GitHub failed"),
    ],
)
def test_orphan_with_a_runner_id(lookup: Lookup, action: Action, word: str) -> None:
    made = decide_orphan(machine(1, orphan="true", github_runner_id="1"), lookup, ())
    assert (made.action, made.phase) == (action, ScaleDownPhase.ORPHANS)
    assert word in made.reason


@pytest.mark.parametrize("name", [f"x-{instance_id(1).upper()}", "my-runner", "ip-10-0-0-1"])
def test_runner_name_without_another_instance_id_does_not_contradict_the_tag(name: str) -> None:
    orphan = machine(1, orphan="true", github_runner_id="1")
    for online, busy, action in (
        (True, True, Action.SKIP),
        (True, False, Action.SKIP),
        (False, False, Action.SKIP),
        (False, True, Action.TERMINATE),
    ):
        runner = Registration(runner_id=1, name=name, online=online, busy=busy)
        assert decide_orphan(orphan, Lookup(found=runner), ()).action is action, (online, busy)


def test_orphan_without_an_id_is_terminated_unless_busy() -> None:
    orphan = machine(1, orphan="true")
    assert decide_orphan(orphan, None, ()).action is Action.TERMINATE
    idle = decide_orphan(orphan, None, [registration(1)])
    assert (idle.action, idle.registrations) == (Action.TERMINATE, (registration(1),))
    assert decide_orphan(orphan, None, [registration(1, busy=True)]).action is Action.UNMARK_ORPHAN
    assert decide_orphan(orphan, None, None).action is Action.SKIP


def test_confirmed_orphan_with_a_busy_second_runner_is_not_an_orphan() -> None:
    orphan = machine(1, orphan="true", github_runner_id="1")
    crashed = Lookup(found=registration(1, online=False, busy=True))
    again = registration(1, busy=True, runner_id=9)
    assert decide_orphan(orphan, crashed, [registration(1, online=False, busy=True), again]).action is (
        Action.UNMARK_ORPHAN
    )
    # The confirmation does not need the list.
    assert decide_orphan(orphan, crashed, None).action is Action.TERMINATE


def test_crashed_runner_itself_does_not_keep_a_confirmed_orphan() -> None:
    crashed = registration(1, online=False, busy=True)
    orphan = machine(1, orphan="true", github_runner_id=str(crashed.runner_id))
    assert decide_orphan(orphan, Lookup(found=crashed), [crashed]).action is Action.TERMINATE


@pytest.mark.parametrize(
    ("text", "runner_id"), [("7", 7), ("9" * 19, int("9" * 19)), ("9" * 20, None), ("\u0663", None), ("x", None)]
)
def test_tagged_runner_id_has_at_most_19_ascii_digits(text: str, runner_id: int | None) -> None:
    assert machine(1, github_runner_id=text).runner_id == runner_id


def test_unknown_runner_id_needs_a_complete_list() -> None:
    """GitHub responds 404 for everything that a credential may not see."""
    made = decide_orphan(machine(1, orphan="true", github_runner_id="1"), Lookup(found=None), None)
    assert made.action is Action.SKIP


@pytest.mark.parametrize("owner", ["", "acme/x/y", "a b", "acme/.."])
def test_orphan_with_an_id_and_contradictory_tags_is_skipped(owner: str) -> None:
    assert decide_orphan(machine(1, owner=owner, orphan="true", github_runner_id="7"), None, ()).action is Action.SKIP
    assert decide_orphan(machine(1, owner=owner, orphan="true"), None, ()).action is Action.TERMINATE


# Phase 2


@pytest.mark.parametrize(
    ("age_s", "runner", "idle_count", "action", "word"),
    [
        (4 * MINUTE, registration(1), 0, Action.KEEP, "too young"),
        (6 * MINUTE, registration(1), 1, Action.KEEP, "kept as idle: 1 of 1"),
        (6 * MINUTE, registration(1, busy=True), 1, Action.KEEP, "kept as idle"),
        (6 * MINUTE, registration(1, busy=True), 0, Action.KEEP, "busy"),
        (6 * MINUTE, registration(1), 0, Action.TERMINATE, "idle"),
        (5 * MINUTE, registration(1), 0, Action.TERMINATE, "idle"),
        (6 * MINUTE, None, 9, Action.MARK_ORPHAN, "not registered"),
        (5 * MINUTE, None, 0, Action.MARK_ORPHAN, "not registered"),
        (4 * MINUTE, None, 0, Action.KEEP, "booting"),
        (None, registration(1), 0, Action.KEEP, "unknown age"),
        (None, None, 0, Action.KEEP, "unknown age"),
        (-60, registration(1), 0, Action.KEEP, "too young"),
    ],
)
def test_active_machine(
    age_s: float | None, runner: Registration | None, idle_count: int, action: Action, word: str
) -> None:
    quota = Quota(idle_count=idle_count, window="w")
    (made,) = judge([machine(1, age_s=age_s)], [runner] if runner else [], quota=quota)
    assert (made.action, made.phase) == (action, ScaleDownPhase.ACTIVE)
    assert word in made.reason
    assert (made.registrations == (runner,)) is (action is Action.TERMINATE)


def test_default_minimum_running_time_depends_on_the_operating_system() -> None:
    on_windows = machine(1, age_s=10 * MINUTE, os="windows")
    assert judge([on_windows], [registration(1)])[0].action is Action.KEEP
    assert judge([machine(1, age_s=10 * MINUTE)], [registration(1)])[0].action is Action.TERMINATE
    assert judge([on_windows], [registration(1)], ScaleDownPolicy(minimum_min=10))[0].action is Action.TERMINATE


@pytest.mark.parametrize(
    ("eviction", "kept"), [(Eviction.OLDEST_FIRST, [1, 3]), (Eviction.NEWEST_FIRST, [2, 3])], ids=str
)
def test_eviction_strategy_orders_the_removals(eviction: Eviction, kept: list[int]) -> None:
    ages = {1: 600, 2: 1_800, 3: 1_200}
    machines = [machine(number, age_s=age) for number, age in ages.items()]
    quota = Quota(idle_count=2, eviction=eviction, window="w")
    made = judge(machines, [registration(number) for number in ages], quota=quota)
    assert sorted(item.instance_id for item in made if item.action is Action.KEEP) == list(map(instance_id, kept))


def test_quota_applies_to_the_environment_or_per_owner() -> None:
    machines = [machine(number, owner=owner) for number, owner in enumerate(("acme", "acme", "solo/x", "solo/x"), 1)]
    runners = [registration(number) for number in range(1, 5)]
    quota = Quota(idle_count=1, window="w")
    kept = [item.instance_id for item in judge(machines, runners, quota=quota) if item.action is Action.KEEP]
    assert kept == [instance_id(1)]
    by_owner = judge(machines, runners, ScaleDownPolicy(idle_scope=IdleScope.OWNER), quota)
    assert [item.action for item in by_owner].count(Action.KEEP) == 2


def test_machines_of_an_owner_with_an_incomplete_list_are_skipped() -> None:
    assert [item.action for item in judge([machine(1), machine(2, age_s=1)], None)] == [Action.SKIP] * 2


def test_machine_with_contradictory_tags_is_skipped() -> None:
    (made,) = judge([machine(1, owner="acme", Type="Enterprise")], [registration(1)])
    assert made.action is Action.SKIP
    assert "acme" in made.reason


def test_bypassed_machine_is_skipped() -> None:
    made = decide_bypassed(machine(1, orphan="true", bypass="true"), ScaleDownPhase.ORPHANS)
    assert made is not None
    assert made.action is Action.SKIP
    assert decide_bypassed(machine(1, bypass="yes"), ScaleDownPhase.ACTIVE) is None


def test_budget_limits_the_removals_in_eviction_order() -> None:
    ages = {1: 600, 2: 1_800, 3: 1_200}
    machines = [machine(number, age_s=age) for number, age in ages.items()]
    made = within_budget(judge(machines, [registration(number) for number in ages]), 1)
    assert [item.instance_id for item in made if item.action is Action.TERMINATE] == [instance_id(2)]
    assert all("next cycle" in item.reason for item in made if item.action is Action.KEEP)


def test_runner_belongs_to_the_machine_whose_id_ends_its_name() -> None:
    own, other = registration(1), registration(2)
    found = match_registrations([instance_id(1), instance_id(3)], [own, other, registration(1, runner_id=9)])
    assert found == {instance_id(1): (own, registration(1, runner_id=9))}
    upper = Registration(runner_id=1, name=instance_id(10).upper(), online=True, busy=False)
    assert not match_registrations([instance_id(10)], [upper])


# Windows


def test_first_open_window_applies() -> None:
    closed = idle_window(5, "* * 3 * * *")
    assert quota_at([closed, idle_window(2), idle_window(3)], NOW).idle_count == 2
    assert quota_at([idle_window(0), idle_window(3)], NOW).idle_count == 0
    assert quota_at([closed], NOW) == Quota()


def test_idle_count_has_a_maximum() -> None:
    def parse(count: int) -> int:
        (window,) = parse_idle_config([{"cron": "* * * * * *", "idleCount": count}], zone_of=lambda _: UTC)
        return window.idle_count

    assert (parse(0), parse(MAX_IDLE)) == (0, MAX_IDLE)
    for count in (-1, MAX_IDLE + 1):
        with pytest.raises(UserError, match="idleCount"):
            parse(count)


# The pool


def test_machine_with_a_record_is_kept() -> None:
    assert decide_recorded(machine(1), instance(1), ScaleDownPhase.ACTIVE).action is Action.KEEP
    assert (
        decide_recorded(machine(1, orphan="true"), instance(1), ScaleDownPhase.ORPHANS).action is Action.UNMARK_ORPHAN
    )


def test_idle_instances_are_renewed_up_to_the_quota_per_class() -> None:
    records = [instance(number, created_at=at(-number * 60), threshold=at(60)) for number in range(1, 5)]
    records += [instance(9, resource_class="xlarge", threshold=at(60))]
    due = renewals(records, Quota(idle_count=2, window="w"), now=NOW, idle_time_s=420, max_age_s=86_400)
    assert [item.instance.instance_id for item in due] == list(map(instance_id, (1, 2, 9)))
    assert {item.until for item in due} == {at(420)}


def test_renewal_is_limited_by_the_maximum_age() -> None:
    old = instance(1, created_at=at(-86_300), threshold=at(60))
    (due,) = renewals([old], Quota(idle_count=1), now=NOW, idle_time_s=420, max_age_s=86_400)
    assert due.until == at(100)
    assert not renewals([old], Quota(idle_count=1), now=NOW + timedelta(seconds=50), idle_time_s=420, max_age_s=86_350)
    longer = instance(1, created_at=at(-86_300), threshold=at(200))
    assert not renewals([longer], Quota(idle_count=1), now=NOW, idle_time_s=420, max_age_s=86_400)


@pytest.mark.parametrize(
    "changed",
    [
        {"state": State.CLAIMED},
        {"state": State.RUNNING},
        {"retire_reason": RetireReason.SPOT_NOTICE},
        {"threshold": NOW},
    ],
    ids=str,
)
def test_only_idle_usable_instances_are_renewed(changed: dict[str, object]) -> None:
    record = instance(1, **{"threshold": at(60), **changed})
    assert not renewals([record], Quota(idle_count=1), now=NOW, idle_time_s=420, max_age_s=86_400)


# Cron expressions -----------------------------------------------------------------------------------------------------


def is_open(cron: str, at: str, zone: str = "UTC") -> bool:
    return parse_cron(cron).is_open(datetime.fromisoformat(at).astimezone(UTC), ZoneInfo(zone))


@pytest.mark.parametrize(
    ("cron", "at", "zone", "wanted"),
    [
        ("* * 9-17 * * 1-5", "2026-03-11T09:00:00Z", "UTC", True),
        ("* * 9-17 * * 1-5", "2026-03-11T17:59:58Z", "UTC", True),
        # A window opens five seconds early and closes a second early, as in terraform-aws-github-runner.
        ("* * 9-17 * * 1-5", "2026-03-11T08:59:55.001Z", "UTC", True),
        ("* * 9-17 * * 1-5", "2026-03-11T08:59:55Z", "UTC", False),
        ("* * 9-17 * * 1-5", "2026-03-11T17:59:59Z", "UTC", False),
        ("* * 9-17 * * 1-5", "2026-03-14T10:00:00Z", "UTC", False),
        ("* * 9-17 * * 1-5", "2026-03-15T21:00:00Z", "Pacific/Auckland", True),
        ("* * 9-17 * * 1-5", "2026-03-11T03:30:00Z", "Asia/Kolkata", True),
        ("* * 9 * * *", "2026-03-08T13:30:00Z", "America/New_York", True),
        ("* * 9 * * *", "2026-03-07T13:30:00Z", "America/New_York", False),
        # The hour that the end of summer time repeats matches twice.
        ("* * 1 * * *", "2026-11-01T05:30:00Z", "America/New_York", True),
        ("* * 1 * * *", "2026-11-01T06:30:00Z", "America/New_York", True),
        # Seconds in the expression are respected.
        ("0 * * * * *", "2026-03-11T10:00:30Z", "UTC", False),
        ("0 * * * * *", "2026-03-11T10:00:57Z", "UTC", True),
        # Without seconds, the whole minute and the seconds before it match.
        ("* 9-17 * * 1-5", "2026-03-11T10:00:30Z", "UTC", True),
        ("* 9-17 * * 1-5", "2026-03-11T17:59:59.9Z", "UTC", True),
        ("* 9-17 * * 1-5", "2026-03-11T08:59:57Z", "UTC", True),
        ("* 9-17 * * 1-5", "2026-03-11T18:00:00Z", "UTC", False),
        ("*/15 * * * *", "2026-03-11T10:45:20Z", "UTC", True),
        ("*/15 * * * *", "2026-03-11T10:46:20Z", "UTC", False),
        ("* * * 11 * 1", "2026-03-11T10:00:00Z", "UTC", True),
        ("* * * 12 * 3", "2026-03-11T10:00:00Z", "UTC", True),
        ("* * * 12 * 1", "2026-03-11T10:00:00Z", "UTC", False),
        ("* * * ? * WED", "2026-03-11T10:00:00Z", "UTC", True),
        ("* * * 11 MAR ?", "2026-03-11T10:00:00Z", "UTC", True),
        ("* * * * * mon-fri", "2026-03-11T10:00:00Z", "UTC", True),
        ("* * * * * 7", "2026-03-15T10:00:00Z", "UTC", True),
        ("* * * * * 5-7", "2026-03-15T10:00:00Z", "UTC", True),
        ("* * 22,23,0-6 * * *", "2026-03-11T23:00:00Z", "UTC", True),
        ("* * 8/4 * * *", "2026-03-11T12:00:00Z", "UTC", True),
        ("* * * L * *", "2026-02-28T10:00:00Z", "UTC", True),
        ("* * * L * *", "2026-02-27T10:00:00Z", "UTC", False),
        ("* * * * * 5L", "2026-03-27T10:00:00Z", "UTC", True),
        ("* * * * * 5L", "2026-03-20T10:00:00Z", "UTC", False),
        ("* * * * * FRI#2", "2026-03-13T10:00:00Z", "UTC", True),
        ("* * * * * FRI#2", "2026-03-20T10:00:00Z", "UTC", False),
    ],
)
def test_window_is_open(cron: str, at: str, zone: str, *, wanted: bool) -> None:
    assert is_open(cron, at, zone) is wanted


@pytest.mark.parametrize(
    "text",
    [
        *("", "not a cron", "* * * *", "* * * * * * *", "60 * * * *", "* 24 * * *", "* * 0 * *", "* * * 13 *"),
        "* * * * 8",
        *("a * * * *", "5-1 * * * *", "*/0 * * * *", "*/x * * * *", "1- * * * *", ", * * * *", "@daily", "1.5 * * * *"),
        *("-1 * * * *", "* * * * 5#6", "٣ * * * *", "00009999 * * * *", "9" * 300),
    ],
)
def test_invalid_cron_is_rejected_with_a_reason(text: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_cron(text)
    assert str(refused.value)


@given(
    st.datetimes(min_value=datetime(2000, 1, 1), max_value=datetime(2100, 1, 1)),  # noqa: DTZ001 - hypothesis wants so
    st.sampled_from(["UTC", "America/New_York", "Asia/Kolkata", "Pacific/Auckland", "Europe/London"]),
)
def test_window_of_a_second_is_open_at_that_second_in_its_zone(at: datetime, zone: str) -> None:
    now = at.replace(tzinfo=UTC)
    local = (now.replace(microsecond=0) + timedelta(seconds=1)).astimezone(ZoneInfo(zone))
    text = f"{local.second} {local.minute} {local.hour} {local.day} {local.month} *"
    assert parse_cron(text).is_open(now, ZoneInfo(zone))
    assert not parse_cron(text).is_open(now - timedelta(seconds=5), ZoneInfo(zone))
    assert not parse_cron(text).is_open(now + timedelta(seconds=1), ZoneInfo(zone))
