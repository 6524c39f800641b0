"""Scenarios observed on terraform-aws-github-runner (tests/data/scale_down), with the result expected of Remuda."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "scale_down" / "examples.json"
SCENARIOS: list[dict[str, Any]] = json.loads(DATA.read_text(encoding="utf-8"))
#: Flags of observed behaviour that Remuda does not reproduce.
DOUBTFUL = frozenset({"suspect", "livelock", "raises", "error"})

#: Where the peer's behaviour is doubtful and the specification silent: ours (docs/adr/0013-scale-down-open-cases).
OURS: dict[str, dict[str, list[str]]] = {
    # The runner id belongs to another instance: ignored, and an orphan without a runner id is terminated.
    "B28_orphan_id_belongs_to_other_runner": {"terminated": ["i-000000000a0000001"], "tagged": [], "untagged": []},
    # The owner of the runner is unknown: skipped with a reason.
    "B34_orphan_no_type_with_id": {"terminated": [], "tagged": [], "untagged": []},
    # An instance of unknown age counts as too young: it is neither kept as idle nor terminated.
    "D_missing_launch_time_sort_newest": {
        "terminated": ["i-000000000a0000001", "i-000000000a0000004"],
        "tagged": [],
        "untagged": [],
    },
    # Without a field for seconds, the window covers the whole minute.
    "E19_five_field_cron_at_0s": {"terminated": ["i-000000000a0000002"], "tagged": [], "untagged": []},
    # Invalid settings are rejected before any call.
    "E48_invalid_cron_orphan_first": {"terminated": [], "tagged": [], "untagged": []},
    # A runner that no longer exists counts as deregistered.
    "F07_get_404_delete_404": {"terminated": ["i-000000000a0000001"], "tagged": [], "untagged": []},
    # Owners that could be listed are processed.
    "G19_phase2_listing_fails": {"terminated": ["i-000000000a0000001"], "tagged": [], "untagged": []},
    # An instance with malformed tags does not affect the others.
    "G25_repo_owner_without_slash": {"terminated": ["i-000000000a0000002"], "tagged": [], "untagged": []},
}
#: Scenarios with invalid settings: exit code 2.
REFUSED = frozenset({"E48_invalid_cron_orphan_first"})


@dataclass(frozen=True)
class ExpectedResult:
    terminated: set[str]
    tagged: set[str]
    untagged: set[str]


def expected(scenario: Mapping[str, Any], cycle: Mapping[str, Any]) -> ExpectedResult:
    """The expected result of a cycle, by the verdict of its scenario."""
    observed = cycle["observed"]
    seen = {
        "terminated": observed["terminated"],
        "tagged": observed["tagged_orphan"],
        "untagged": observed["untagged_orphan"],
    }
    if scenario["verdict"] in {"peer_contradicts_spec", "peer_aborts_where_spec_continues", "peer_bug"}:
        wanted = scenario["spec_expected"]
        names = {"terminated": "terminated", "tagged_orphan": "tagged", "untagged_orphan": "untagged"}
        seen |= {names[key]: value for key, value in wanted.items() if key in names}
    elif scenario["verdict"] in {"spec_silent", "spec_ambiguous"} and DOUBTFUL & set(scenario["flags"]):
        seen = OURS[scenario["name"]]
    return ExpectedResult(**{key: set(value) for key, value in seen.items()})


def variables(scenario: Mapping[str, Any]) -> dict[str, str]:
    """The settings as environment variables of terraform-aws-github-runner."""
    config = scenario["config"]
    return {
        "ENVIRONMENT": config["environment"],
        "SCALE_DOWN_CONFIG": json.dumps(config["idle_config"]),
        "MINIMUM_RUNNING_TIME_IN_MINUTES": str(config["minimum_running_time_in_minutes"]),
        "RUNNER_BOOT_TIME_IN_MINUTES": str(config["runner_boot_time_in_minutes"]),
    }
