"""`remuda scale-down --backend aws` on a fleet that Remuda did not launch, with only its tags and GitHub.

There is no table and no queue. The settings are the environment variables of terraform-aws-github-runner, and the wall
clock is frozen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import CommandResult, run_cli
from tests.support.emf import check_emf
from tests.support.fleet_servers import TOKEN, FleetInstance, FleetState, FleetUrls, serve_fleet
from tests.support.records import NOW
from tests.support.scripted_fleet import SCENARIOS, expected, tags, variables

REMUDA = Path(sys.executable).with_name("remuda")
LIMIT_S = 120
#: Seconds for a cycle with a hanging call, which would hang for much longer.
CYCLE_LIMIT_S = 100
#: One scenario of each kind. The conformance tests run all of them with the same adapters.
SAMPLE = (
    "A2_orphan_id_online_busy_org",
    "A6_active_quota_full_idle_repo",
    "B07_orphan_id_get_500_aborts_phase1",
    "B10_orphan_id_get_hangs",
    "E10_tz_weekday_shift_monday",
    "F25_get_429_secondary_retry_after",
    "G04_list_403_middle_owner",
    "G19_phase2_listing_fails",
    "H04_late_registration_with_id_saved",
)


def environment(urls: FleetUrls, more: Mapping[str, str]) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "eu-central-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        # All other AWS services are unreachable.
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ENDPOINT_URL_EC2": urls.ec2_url,
        "GITHUB_API_URL": urls.github_url,
        "REMUDA_GITHUB_TOKEN": TOKEN,
        **more,
    }


def run(
    urls: FleetUrls, folder: Path, now: str, *arguments: str, **more: str
) -> tuple[int, dict[str, Any], CommandResult]:
    done = run_cli(
        ["scale-down", "--backend", "aws", "--json", *arguments],
        environment=environment(urls, more),
        timeout_s=LIMIT_S,
        cwd=folder,
        frozen_at=now,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert TOKEN not in done.stdout + done.stderr
    return done.code, done.document, done


@pytest.mark.parametrize(
    "scenario", [item for item in SCENARIOS if item["name"] in SAMPLE], ids=lambda item: item["name"]
)
def test_scenario_gives_the_expected_result(scenario: Mapping[str, Any], tmp_path: Path) -> None:
    fleet = FleetState.from_scenario(scenario)
    with serve_fleet(fleet) as urls:
        for cycle in scenario["cycles"]:
            fleet.begin_cycle(changes=cycle["changes"], faults=cycle["faults"])
            began = time.monotonic()
            code, document, _ = run(urls, tmp_path, cycle["now"], **variables(scenario))
            wanted = expected(scenario, cycle)
            assert set(fleet.effects.terminated) == wanted.terminated, document
            assert set(fleet.effects.tagged) == wanted.tagged, document
            assert set(fleet.effects.untagged) == wanted.untagged, document
            assert not fleet.effects.killed_busy
            assert code == (4 if document["errors"] else 0)
            assert time.monotonic() - began < CYCLE_LIMIT_S, "a hanging call does not block a cycle"
            assert sum(document["calls"].get("github", {}).values()) == fleet.effects.github_calls()
            for decision in document["decisions"]:
                assert set(decision) == {"instance_id", "owner", "action", "reason", "phase", "done"}
                assert decision["phase"] in {1, 2}
                assert decision["reason"]


def test_thousand_busy_runners_need_at_most_eleven_github_calls(tmp_path: Path) -> None:
    fleet = FleetState()
    fleet.owners.add("acme")
    for number in range(1_000):
        fleet.add_machine(FleetInstance(f"i-{number:017x}", NOW, "running", tags()))
        fleet.add_runner({"id": number + 1, "name": f"x-i-{number:017x}", "busy": True, "owner": "acme"})
    with serve_fleet(fleet) as urls:
        code, document, _ = run(urls, tmp_path, "2026-03-11T10:00:00Z", ENVIRONMENT="ci")
    assert (code, len(document["decisions"])) == (0, 1_000)
    assert fleet.effects.github_calls() <= 11
    assert not fleet.effects.terminated


def test_dry_run_prints_a_table_and_changes_nothing(tmp_path: Path) -> None:
    fleet = FleetState.from_scenario(
        next(item for item in SCENARIOS if item["name"] == "B07_orphan_id_get_500_aborts_phase1")
    )
    config = {"ENVIRONMENT": "oracle-ci", "SCALE_DOWN_CONFIG": "[]"}
    with serve_fleet(fleet) as urls:
        done = run_cli(
            ["scale-down", "--backend", "aws", "--dry-run"],
            environment={**environment(urls, config), "COLUMNS": "160"},
            timeout_s=LIMIT_S,
            cwd=tmp_path,
            frozen_at="2026-03-11T10:00:00Z",
        )
    assert done.code == 0, done.stderr
    assert "(dry run)" in done.stdout
    assert done.stdout.count("terminate") == 4
    assert "offline and busy" in done.stdout
    assert not fleet.effects.terminated + fleet.effects.tagged + fleet.effects.untagged
    assert not fleet.effects.deregistered


@pytest.mark.parametrize(
    ("name", "value", "has_fix"),
    [
        ("SCALE_DOWN_CONFIG", "nonsense", True),
        ("SCALE_DOWN_CONFIG", '[{"cron": "not a cron", "idleCount": 1}]', True),
        # The message itself states the allowed values and the given one.
        ("MINIMUM_RUNNING_TIME_IN_MINUTES", "soon", False),
        ("RUNNER_BOOT_TIME_IN_MINUTES", "-1", False),
        ("ENVIRONMENT", "ci-*", False),
    ],
)
def test_invalid_settings_are_a_one_line_error_before_any_call(
    tmp_path: Path, name: str, value: str, *, has_fix: bool
) -> None:
    fleet = FleetState()
    with serve_fleet(fleet) as urls:
        code, document, done = run(urls, tmp_path, "2026-03-11T10:00:00Z", **{"ENVIRONMENT": "ci", name: value})
    assert (code, document["error"]["field"]) == (2, name)
    message = document["error"]["message"]
    assert bool(document["error"]["fix"]) is has_fix
    assert has_fix or (" must be " in message and message.endswith(f"got {value!r}"))
    assert len(done.stderr.splitlines()) == 1
    assert not fleet.effects.calls


def test_rejected_token_is_reported_per_owner_and_changes_nothing(tmp_path: Path) -> None:
    scenario = next(item for item in SCENARIOS if item["name"] == "G01_org_and_two_repos")
    fleet = FleetState.from_scenario(scenario)
    with serve_fleet(fleet) as urls:
        code, document, _ = run(
            urls, tmp_path, scenario["config"]["now"], **variables(scenario), REMUDA_GITHUB_TOKEN="no"
        )
    assert code == 4
    assert len(document["errors"]) == 3
    assert all("401" in error for error in document["errors"])
    assert {item["action"] for item in document["decisions"]} == {"skip"}


def test_missing_credential_is_an_error(tmp_path: Path) -> None:
    fleet = FleetState()
    with serve_fleet(fleet) as urls:
        code, document, _ = run(urls, tmp_path, "2026-03-11T10:00:00Z", ENVIRONMENT="ci", REMUDA_GITHUB_TOKEN="")
    assert (code, document["error"]["field"]) == (2, "REMUDA_GITHUB_TOKEN")
    assert not fleet.effects.calls


def test_installed_command_has_scale_down() -> None:
    done = subprocess.run(
        [str(REMUDA), "scale-down", "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert "--dry-run" in done.stdout


_INVOKE = """
import json, sys
from datetime import datetime
from remuda.adapters.system.clock import SystemClock
from remuda.aws_lambda.handler import handler

class Invocation:
    aws_request_id = "r-1"
    def get_remaining_time_in_millis(self):
        return 60_000

at = datetime.fromisoformat(sys.argv[1])
SystemClock.now = lambda self: at
json.dump(handler(json.loads(sys.argv[2]), Invocation()), sys.stderr)
"""


@pytest.mark.parametrize("dry_run", [True, False])
def test_lambda_function_runs_scale_down(tmp_path: Path, *, dry_run: bool) -> None:
    scenario = next(item for item in SCENARIOS if item["name"] == "G01_org_and_two_repos")
    fleet = FleetState.from_scenario(scenario)
    event = json.dumps({"command": "scale-down", "dry_run": dry_run})
    with serve_fleet(fleet) as urls:
        done = subprocess.run(
            [sys.executable, "-c", _INVOKE, scenario["config"]["now"], event],
            cwd=tmp_path,
            env=environment(urls, variables(scenario)),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
    document = json.loads(done.stderr)
    assert {item["action"] for item in document["decisions"]} == {"terminate"}
    assert len(fleet.effects.terminated) == (0 if dry_run else 3)
    *log, metrics = [json.loads(line) for line in done.stdout.splitlines()]
    check_emf(metrics)
    assert (metrics["Command"], metrics["InstancesExamined"], metrics["Failed"]) == ("scale-down", 3, 0)
    assert metrics["Terminated"] == (0 if dry_run else 3)
    assert metrics["GithubCalls"] == sum(document["calls"]["github"].values())
    assert sum(line["event"] == ("would-terminate" if dry_run else "scale-terminate") for line in log) == 3
