"""Limits of all numeric settings, and values that text settings reject."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.config.declaration import flag, key, variable
from remuda.config.settings import AWS_MARGIN_S, LOCAL_MARGIN_S, SETTINGS
from remuda.config.sources import load, mistyped_variables
from remuda.domain.errors import UserError
from remuda.wiring import desired

WEEK_S, DAY_S = 604_800, 86_400

#: Minimum and maximum.
FRACTIONS: dict[str, tuple[float, float]] = {
    "idle_time_sec": (1, WEEK_S),
    "release_time_sec": (5, DAY_S),
    "provision_timeout_sec": (2, 2_400),
    "max_age_sec": (10, 365 * DAY_S),
    "margin_sec": (0.1, 3_600),
    "listening_time_sec": (5, DAY_S),
    "surplus_grace_sec": (0, DAY_S),
    "ended_run_grace_sec": (1, DAY_S),
    "unrecorded_grace_sec": (1, DAY_S),
    "stale_registration_grace_sec": (1, DAY_S),
    "gone_after_sec": (1, DAY_S),
    "republish_sec": (1, DAY_S),
    "keep_records_sec": (1, 3_650 * DAY_S),
    "boot_delay_sec": (0, 600),
    "max_runtime_min": (0.05, 7 * 1_440),
    "minimum_running_time_in_minutes": (0, 7 * 1_440),
    "runner_boot_time_in_minutes": (0, 7 * 1_440),
    "monthly_budget": (0, 10_000_000),
}
WHOLE: dict[str, tuple[int, int]] = {
    "run_attempt": (1, 1_000_000),
    "instance_count": (1, 1_000),
    "max_uses": (1, 100_000),
    "max_instances": (1, 100_000),
    "max_removals_per_cycle": (0, 100_000),
}
NUMBERS: dict[str, tuple[float, float]] = {**FRACTIONS, **WHOLE}

NEVER = [
    "",
    " ",
    "NaN",
    "nan",
    "inf",
    "-inf",
    "Infinity",
    "-1",
    "1e9",
    "1e400",
    "abc",
    "1,5",
    "0x10",
    "5y",
    "s",
    "-5s",
    "1e3s",
    "5 5s",
    "9999999w",
]
NEVER += ["9" * 5_000, "1" * 100_000, "\u0663", "None", "true", "1 2", "--", "s", "-5s", "1e3s", "5 5s", "9999999w"]


def refused(name: str, value: Any) -> UserError:
    with pytest.raises(UserError) as error:
        load({name: value}, environ={})
    return error.value


def test_the_table_contains_every_numeric_setting() -> None:
    assert {name for name, declared in SETTINGS.items() if declared.kind.is_number} == set(NUMBERS)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("text", NEVER, ids=lambda text: repr(text[:12]))
def test_text_that_is_no_number_in_range_is_rejected(name: str, text: str) -> None:
    if text == "1e9" and NUMBERS[name][1] >= 1e9:
        pytest.skip("in range")
    error = refused(name, text)
    assert error.field == flag(name)
    assert error.message.startswith(f"{flag(name)} must be a")
    assert ", got '" in error.message
    assert len(error.message) < 200


@pytest.mark.parametrize("name", NUMBERS)
def test_the_limits_are_accepted_and_values_beyond_are_rejected(name: str) -> None:
    least, most = NUMBERS[name]
    for value in (least, most):
        assert getattr(load({name: f"{value}"}, environ={}), name) == value
    step = 1 if name in WHOLE else 0.001
    for value in (least - step, most + step):
        assert f"from {least:g} to {most:.15g}, " in refused(name, f"{value}").message


@pytest.mark.parametrize("name", [name for name in NUMBERS if NUMBERS[name][0] > 0])
def test_zero_is_rejected(name: str) -> None:
    assert refused(name, "0").field == flag(name)
    assert refused(name, "-0.0").field == flag(name)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("idle_time_sec", "900", 900),
        ("idle_time_sec", "15m", 900),
        ("idle_time_sec", " 1.5 h ", 5_400),
        ("max_age_sec", "7d", WEEK_S),
        ("max_age_sec", "2w", 2 * WEEK_S),
        ("max_runtime_min", "30", 30),
        ("max_runtime_min", "6h", 360),
        ("max_runtime_min", "90s", 1.5),
        ("minimum_running_time_in_minutes", "1h", 60),
    ],
)
def test_a_duration_has_the_unit_of_its_suffix_or_else_of_its_name(
    name: str, text: str, value: float, tmp_path: Path
) -> None:
    file = tmp_path / "remuda.toml"
    file.write_text(f'{key(name)} = "{text}"')
    for loaded in (
        load({name: text}, environ={}),
        load({}, environ={variable(name): text}),
        load({}, environ={}, file=file),
    ):
        assert getattr(loaded, name) == value


@pytest.mark.parametrize("name", [name for name in FRACTIONS if name != "monthly_budget"])
def test_the_error_for_a_duration_says_what_to_write(name: str) -> None:
    error = refused(name, "soon")
    assert (error.field, error.exit_code) == (flag(name), 2)
    unit = "seconds" if name.endswith("_sec") else "minutes"
    assert error.message.startswith(f"{flag(name)} must be a number of {unit} from ")
    assert error.message.endswith("or a time such as 90s, 30m or 7d, got 'soon'")


@pytest.mark.parametrize("name", WHOLE)
def test_an_integer_setting_rejects_a_fraction(name: str) -> None:
    assert "must be an integer" in refused(name, "1.5").message


@given(st.sampled_from(sorted(NUMBERS)), st.text(max_size=30) | st.floats().map(str) | st.integers().map(str))
def test_any_text_is_a_number_in_range_or_a_user_error(name: str, text: str) -> None:
    try:
        value = getattr(load({name: text}, environ={}), name)
    except UserError:
        return
    least, most = NUMBERS[name]
    assert math.isfinite(value)
    assert least <= value <= most


# Words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("backend", ""),
        ("backend", "azure"),
        ("backend", "AWS"),
        ("usage_class", "cheap"),
        ("usage_class", "x" * 10_000),
        ("tier", "admin"),
        ("pool", ""),
        ("pool", "Upper"),
        ("pool", "two words"),
        ("pool", "x" * 21),
        ("pool", "x" * 10_000),
        ("pool", "../x"),
        ("pool", "-x"),
        ("github_scope", ""),
        ("github_scope", "a/b/c"),
        ("github_scope", "octo/.."),
        ("run_id", "1 2"),
        ("run_id", "1,2"),
        ("run_id", "self-hosted"),
        ("run_id", "x" * 10_000),
        ("allowed_instance_types", ""),
        ("allowed_instance_types", "c?"),
        ("allowed_instance_types", "c*" * 5_000),
        ("idle_scope", "team"),
        ("environment", "ci-*"),
        ("environment", "x" * 257),
        ("idle_config", ""),
        ("idle_config", "{}"),
        ("idle_config", "[1]"),
        ("idle_config", '[{"cron": "* * *", "idleCount": 1}]'),
        ("idle_config", '[{"cron": "* * 9-17 * * 1-8", "idleCount": 1}]'),
        ("idle_config", '[{"cron": "* * 22-6 * * *", "idleCount": 1}]'),
        ("idle_config", '[{"cron": "* * * * * *", "timeZone": "Mars/Base", "idleCount": 1}]'),
        ("idle_config", '[{"cron": "* * * * * *", "timeZone": "../etc/passwd", "idleCount": 1}]'),
        ("idle_config", '[{"cron": "* * * * * *", "idleCount": -1}]'),
        ("idle_config", '[{"cron": "* * * * * *", "idleCount": "2"}]'),
        ("idle_config", '[{"cron": "* * * * * *"}]'),
        ("idle_config", '[{"cron": "* * * * * *", "idleCount": 1, "evictionStrategy": "any"}]'),
    ],
    ids=lambda value: repr(value[:15]),
)
def test_invalid_text_is_rejected_with_the_flag_and_a_fix(name: str, text: str) -> None:
    error = refused(name, text)
    assert error.field == flag(name)
    assert error.fix or "must be" in error.message
    assert len(error.message) < 200
    assert "\n" not in error.message


def test_the_default_margin_depends_on_the_backend() -> None:
    assert load({}, environ={}).lifetimes.margin_s == LOCAL_MARGIN_S
    assert load({"backend": "aws"}, environ={}).lifetimes.margin_s == AWS_MARGIN_S
    assert load({"backend": "aws", "margin_sec": "2"}, environ={}).lifetimes.margin_s == 2


def test_lifetimes_have_the_values_of_the_settings() -> None:
    given_ones = {"max_runtime_min": "2", "idle_time_sec": "3", "release_time_sec": "6", "max_uses": "5"}
    life = load(given_ones, environ={}).lifetimes
    assert (life.max_runtime_s, life.idle_time_s, life.release_time_s, life.max_uses) == (120, 3, 6, 5)


def test_launch_options_contain_only_values_that_are_set() -> None:
    assert load({}, environ={}).launch_options() == {}
    options = load({"boot_delay_sec": "1.5", "pre_runner_script": "true"}, environ={}).launch_options()
    assert options == {"boot-delay-s": "1.5", "pre-runner-script": "true"}


def test_runner_group_requires_an_organization() -> None:
    settings = load({"github_scope": "octo/repo", "runner_group": "warm"}, environ={})
    with pytest.raises(UserError, match="runner-group is 'warm', but octo/repo is a repository") as caught:
        desired(settings, pool="default")
    assert caught.value.field == "--runner-group"
    assert "github-scope" in caught.value.fix


def test_settings_that_no_source_sets_keep_their_stored_values() -> None:
    flags = {"backend": "aws", "github_scope": "octo", "idle_time_sec": "900", "reuse": "never", "key_name": ""}
    unset = desired(load(flags, environ={"REMUDA_MAX_USES": "3"}), pool="default").unset
    assert not {"idle_time_s", "reuse", "max_uses", "key-name"} & unset
    assert {"max_runtime_s", "ami", "classes", "max_instances", "runner_sets", "runner_group", "github_url"} <= unset


def test_launch_options_that_the_pool_may_have_are_not_required() -> None:
    given = {"backend": "aws", "github_scope": "octo"}
    assert "ami" in desired(load(given, environ={}), pool="default").unset
    with pytest.raises(UserError, match="subnet-ids is invalid"):
        desired(load({**given, "ami": "ami-00000000", "subnet_ids": "x"}, environ={}), pool="default")
    with pytest.raises(UserError, match="ami is missing"):
        desired(load(given, environ={}), pool="default", keeps_unset=False)


def test_a_run_may_by_default_take_as_long_as_a_job_on_github() -> None:
    assert load({}, environ={}).max_runtime_min == 360


def test_mistyped_variables_are_reported_with_a_guess() -> None:
    environ = {
        "REMUDA_IDLE_TIME": "9",
        "REMUDA_IDLE_TIME_SEC": "9",
        "REMUDA_CONFIG": "x",
        "REMUDA_ZZZ": "",
        "HOME": "/",
    }
    assert mistyped_variables(environ) == [
        "REMUDA_IDLE_TIME is not a setting and has no effect; did you mean REMUDA_IDLE_TIME_SEC?"
    ]
