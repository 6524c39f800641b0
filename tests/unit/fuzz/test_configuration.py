"""Random configuration: every invalid value is a `UserError`, raised before any call."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from remuda.action.output import plain_lines
from remuda.action.step import SETTINGS_BY_MODE, input_variable, read_inputs
from remuda.adapters.aws.ec2.options import Ec2LaunchOptions
from remuda.adapters.local.options import LocalOptions
from remuda.adapters.system.prices import read_prices
from remuda.aws_lambda.handler import parse_event
from remuda.cli.workflow_file import MAX_STEPS, MAX_TEXT, load_workflow, parse_workflow
from remuda.config.declaration import InvalidValue, parse_duration, variable
from remuda.config.settings import SETTINGS, time_zone
from remuda.config.sources import load
from remuda.domain.errors import UserError
from remuda.domain.reporting.prices import parse_prices
from remuda.domain.resources import TypePatterns, check_run_id, check_scope, parse_classes
from remuda.domain.runner_set import parse_runner_sets
from remuda.domain.scale_down.idle_config import parse_cron, parse_idle_config, quota_at
from remuda.fake_github.fake_runner.expressions import MAX_TEXT as MAX_RENDERED
from tests.support.mutations import (
    DEEP,
    ESCAPES,
    LONE,
    TEXTS,
    any_json,
    check_told,
    extremes,
    fuzzed,
    mutated,
    spoiled_text,
)
from tests.support.records import NOW

#: Limit for the time that one input may take, on a slow computer.
MAX_SECONDS = 20.0

texts = st.text(max_size=40) | st.sampled_from(TEXTS) | st.text(alphabet="*/,-#?L0123456789 SUNMON", max_size=30)


def result_or_rejected(work: Callable[[], Any]) -> Any:
    """The result, or None if it raised a well-formed `UserError`."""
    began = time.monotonic()
    try:
        return work()
    except UserError as error:
        check_told(error)
        return None
    finally:
        assert time.monotonic() - began < MAX_SECONDS


# Settings ---------------------------------------------------------------------------------------------------------

NAMES = list(SETTINGS)
CLASSES = {"large": {"cpu": 2, "mmem": 4_096}, "xlarge": {"cpu": 4, "mmem": 8_192}}
WINDOWS = [
    {"cron": "* * 9-17 * * 1-5", "timeZone": "Europe/Berlin", "idleCount": 2, "evictionStrategy": "newest_first"}
]
SETS = [
    {
        "name": "large",
        "labels": ["self-hosted", "large"],
        "max": 4,
        "trust": "trusted",
        "windows": [{"cron": "* 9-17 * * 1-5", "time-zone": "Europe/Berlin", "hot": 1, "warm": 2}],
    },
    {"name": "forks", "labels": ["forks"], "max": 2, "scope": "acme", "usage-class": "spot", "strict": True},
]
PRICES = {
    "dated": "2025-05-31",
    "region": "eu-central-1",
    "on-demand": {"c6i.large": 0.097},
    "spot": {"c6i.large": 0.04},
}


@fuzzed(80)
@given(values=st.dictionaries(st.sampled_from(NAMES), texts | extremes, min_size=1, max_size=3), flags=st.booleans())
@example(values={"resource_class_config": "[" * 100_000}, flags=True)
@example(values={"idle_config": "[" * 100_000}, flags=False)
@example(values={"resource_class_config": '{"' + LONE + '": {"cpu": 1, "mmem": 1}}'}, flags=True)
@example(values={"github_api_url": "http://[::1"}, flags=True)
@example(values={"dir": "\x00"}, flags=True)
def test_random_flags_and_variables_are_accepted_or_rejected_cleanly(values: dict[str, Any], flags: bool) -> None:  # noqa: FBT001 - drawn
    if flags:
        result_or_rejected(lambda: load(values, environ={}))
    else:
        environ = {
            variable(name): str(value)
            for name, value in values.items()
            if not isinstance(value, int) or abs(value) < 10**99
        }
        result_or_rejected(lambda: load({}, environ=environ))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "file"


toml_values = st.sampled_from(
    [
        *('"x"', "1", "-1", "1e400", "nan", "inf", "true", "[]", "{}", "2025-05-31", "9" * 5_000, "[" * DEEP),
        *('"\\ud800"', "["),
    ]
)


@fuzzed()
@given(
    data=st.lists(
        st.tuples(st.sampled_from([*(name.replace("_", "-") for name in NAMES), "scale_down", "x" * 200]), toml_values),
        max_size=3,
    ).map(lambda pairs: "\n".join(f"{name} = {value}" for name, value in pairs).encode())
    | st.binary(max_size=60)
)
@example(data=b"pool = 7\n[scale_down]\nidle_config = 7")
@example(data=b"\xff")
def test_random_settings_files_are_accepted_or_rejected_cleanly(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    result_or_rejected(lambda: load({}, environ={}, file=file))


@fuzzed()
@given(mutated(CLASSES) | any_json)
@example({"large": {"cpu": 10**5_000, "mmem": 1}})
def test_random_resource_classes(document: Any) -> None:
    classes = result_or_rejected(lambda: parse_classes(document))
    assert all(each.cpu >= 1 and each.memory_mib >= 1 for each in classes or ())


@fuzzed()
@given(mutated(WINDOWS) | any_json)
@example([{**WINDOWS[0], "idleCount": 10**5_000}])
@example([{**WINDOWS[0], "timeZone": "../../../etc/passwd"}])
@example([{**WINDOWS[0], "timeZone": "\x00"}])
@example([{**WINDOWS[0], "timeZone": "x" * 5_000}])
@example([{**WINDOWS[0], "evictionStrategy": []}])
def test_random_idle_windows(document: Any) -> None:
    windows = result_or_rejected(lambda: parse_idle_config(document, zone_of=time_zone))
    assert quota_at(windows or (), NOW).idle_count >= 0


@fuzzed()
@given(mutated(SETS) | any_json)
@example([{**SETS[0], "max": 10**5_000}])
@example([{**SETS[0], "labels": [LONE]}])
@example([{**SETS[0], "windows": [{"cron": [], "time-zone": {}}]}])
def test_random_runner_sets(document: Any) -> None:
    sets = result_or_rejected(lambda: parse_runner_sets(document, default_scope="acme/app", zone_of=time_zone))
    for item in sets or ():
        item.check()
        assert item.capacity_at(NOW, zone_of=time_zone).hot <= item.max
        assert item.describe().isprintable()


@fuzzed(100)
@given(texts)
@example("*/0 * * * *")
@example("0-59/9999 " * 6)
@example("\u0661 * * * *")
@example("ß * * * *")
@example(("," * 199) + " ")
def test_random_cron_expressions(text: str) -> None:
    try:
        cron = parse_cron(text)
    except ValueError:
        return
    cron.is_open(NOW, UTC)


@fuzzed()
@given(data=spoiled_text(PRICES))
@example(data=json.dumps({**PRICES, "spot": {"a": 10**400}}).encode())
@example(data=json.dumps({**PRICES, "spot": {ESCAPES: "x" * 5_000}}).encode())
def test_random_price_files(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    table = result_or_rejected(lambda: read_prices(file))
    if table is not None:
        assert all(0 <= price < 1e9 for price in {**table.on_demand, **table.spot}.values())


@fuzzed()
@given(mutated(PRICES) | any_json)
@example({**PRICES, "spot": {"a": 10**5_000}})
def test_random_price_tables(document: Any) -> None:
    result_or_rejected(lambda: parse_prices(document))


@fuzzed()
@given(texts)
def test_random_arguments(text: str) -> None:
    for parse in (TypePatterns.parse, check_run_id, check_scope):
        result_or_rejected(lambda parse=parse: parse(text))  # type: ignore[misc]
    with suppress(InvalidValue):
        assert isinstance(parse_duration(text), float)


@fuzzed()
@given(
    st.dictionaries(st.sampled_from(["ami", "subnet-ids", "security-group-ids", "machines", "boot-delay", "x"]), texts)
)
def test_random_launch_options(launch: dict[str, str]) -> None:
    """Launch options are parsed again from the stored configuration at every launch."""
    result_or_rejected(lambda: Ec2LaunchOptions.parse(launch))
    result_or_rejected(lambda: LocalOptions.parse(launch))


# Action inputs and Lambda events ----------------------------------------------------------------------------------


@fuzzed()
@given(st.dictionaries(st.sampled_from(["mode", "aws-region", "dry-run", "run-id", "config", "pool"]), texts))
def test_random_action_inputs(given_ones: dict[str, str]) -> None:
    inputs = read_inputs({input_variable(name): value for name, value in given_ones.items()})
    result_or_rejected(lambda: (inputs.mode, inputs.flags(), inputs.unused()))
    result_or_rejected(lambda: inputs.region)
    result_or_rejected(lambda: inputs.switch("dry-run"))
    assert all(name in SETTINGS_BY_MODE for name in [result_or_rejected(lambda: inputs.mode)] if name)


@fuzzed()
@given(st.text(max_size=60) | st.sampled_from(TEXTS))
def test_log_lines_contain_no_commands_or_control_characters(text: str) -> None:
    """No line is a workflow command or contains an escape sequence."""
    for line in plain_lines(text):
        assert not line.lstrip().startswith("::")
        assert "##[" not in line
        assert "\x1b" not in line


@fuzzed()
@given(
    mutated({"command": "refresh", "sweep_only": True, "detail": {"command": "scale-down", "dry_run": False}})
    | any_json
)
@example({"command": "refresh", "dry_run": 10**5_000})
@example({"command": 10**5_000})
def test_random_lambda_events(event: Any) -> None:
    order = result_or_rejected(lambda: parse_event(event))
    assert order is None or order.name in {"refresh", "scale-down"}


# Workflows --------------------------------------------------------------------------------------------------------

WORKFLOW = {
    "name": "w",
    "on": "push",
    "env": {"A": "1"},
    "jobs": {
        "a": {"runs-on": "ubuntu-latest", "steps": [{"run": "echo ${{ github.run_id }}"}]},
        "b": {
            "needs": ["a"],
            "if": "${{ always() }}",
            "runs-on": ["${{ github.run_id }}/large"],
            "strategy": {"matrix": {"n": [1, 2], "m": ["x"]}},
            "timeout-minutes": 5,
            "env": {"B": "${{ github.run_id }}"},
            "outputs": {"o": "${{ steps.s.outputs.o }}"},
            "continue-on-error": False,
            "defaults": {"run": {"shell": "sh"}},
            "steps": [
                {"uses": "actions/checkout@v4", "with": {"path": "sub"}},
                {
                    "id": "s",
                    "name": "s",
                    "if": "contains(env.B, '7') && matrix.n == 1",
                    "run": "echo ${{ matrix.n }}",
                    "env": {"C": "${{ env.B }}"},
                    "timeout-minutes": 1,
                },
            ],
        },
    },
}
GITHUB = {"run_id": "77", "run_attempt": "1", "repository": "octo/repo"}


def check_workflow(document: Any) -> None:
    for job in result_or_rejected(lambda: parse_workflow(document, GITHUB)) or ():
        resolved = result_or_rejected(partial(job.resolve, GITHUB, {}))
        if resolved is not None:
            assert 0 < resolved.timeout_s <= 86_400
            assert all(len(text) <= MAX_RENDERED for text in (*resolved.labels, *resolved.env.values()))
        assert all(len(text) <= MAX_TEXT for text in (job.name, *(step.run for step in job.steps)))


@fuzzed(120)
@given(mutated(WORKFLOW) | any_json)
@example({"jobs": {"a": {"runs-on": 5, "needs": 5, "steps": [{"run": "x"}]}}})
@example({"jobs": {"a": {"runs-on": {"group": "x"}, "steps": [{"run": "x"}]}}})
@example({"jobs": {"a": {"runs-on": "x", "timeout-minutes": 10**5_000, "steps": [{"run": "x"}]}}})
@example(
    {
        "jobs": {
            "a": {
                "runs-on": "x",
                "strategy": {"matrix": {str(n): list(range(20)) for n in range(20)}},
                "steps": [{"run": "x"}],
            }
        }
    }
)
@example({"jobs": {"a": {"runs-on": "x", "steps": [{"run": "${{" + " " * 100_000}]}}})
@example({"jobs": {"a": {"runs-on": "x", "steps": [{"run": "${{" * 50_000}]}}})
@example(
    {
        "env": {"A": "x" * 60_000},
        "jobs": {
            "a": {"runs-on": "x", "env": {"B": "${{ github }}" * 9_000}, "steps": [{"run": "${{ env.B }}" * 9_000}]}
        },
    }
)
@example({"jobs": {str(n): {"runs-on": "x", "steps": [{"run": "x"}] * MAX_STEPS} for n in range(2)}})
@example({"jobs": {"a": {"runs-on": "${{ " + "!" * 1_000 + "true }}", "if": "(" * 1_000, "steps": [{"run": "x"}]}}})
@example({"jobs": {"a": {"runs-on": f"${{{{ fromJSON('1{'0' * 5_000}') }}}}", "steps": [{"run": "x"}]}}})
def test_random_workflows(document: Any) -> None:
    check_workflow(document)


LAUGHS = "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))])
MERGES = "\n".join(["a0: &a0 {x: 1}", *(f"a{n}: &a{n}\n  <<: [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))])
GOOD_TEXT = yaml.safe_dump(WORKFLOW).encode()


@fuzzed()
@given(
    st.tuples(
        st.integers(0, len(GOOD_TEXT)),
        st.sampled_from([b"", b"&a ", b"*a ", b"!!python/object:os.system ", b"- ", b"\xff", b"? ", b"<<: "]),
    ).map(lambda cut: GOOD_TEXT[: cut[0]] + cut[1] + GOOD_TEXT[cut[0] :])
    | st.binary(max_size=60)
)
@example(b"[" * 100_000)
@example(b"a: " * 10_000)
@example(LAUGHS.encode() + b"\njobs: {a: {runs-on: x, env: {A: *a39}, steps: [{run: x}]}}")
@example(MERGES.encode())
@example(b"jobs: &a {b: *a}")
@example(b"on: 2025-99-99")
@example(b"on: 99999999999999:1")
@example(b"? 0x" + b"f" * 9_000 + b"\n: 1")
@example(b"on: " + b"9" * 9_000)
@example(b"on: 1" + b":59" * 5_000)
@example(b"? [a, b]\n: 1")
@example(b"\x00")
def test_random_workflow_files(text: bytes) -> None:
    began = time.monotonic()
    try:
        document = load_workflow(text)
    except ValueError:
        document = None
    check_workflow(document)
    assert time.monotonic() - began < MAX_SECONDS
