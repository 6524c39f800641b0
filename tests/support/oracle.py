"""Observed behaviour of terraform-aws-github-runner (tests/data/scale_down), and what Remuda must do in its place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DATA = Path(__file__).parents[1] / "data" / "scale_down" / "examples.json"
SCENARIOS: list[dict[str, Any]] = json.loads(DATA.read_text(encoding="utf-8"))
#: Observed, but not worth repeating.
DOUBTFUL = frozenset({"suspect", "livelock", "raises", "error"})

#: Where the peer's behaviour is doubtful and the specification silent: ours (docs/adr/0013-scale-down-open-cases).
OURS: dict[str, dict[str, list[str]]] = {
    # The runner id is another machine's: it says nothing of this one, and an orphan without one is terminated.
    "B28_orphan_id_belongs_to_other_runner": {"terminated": ["i-000000000a0000001"], "tagged": [], "untagged": []},
    # Whose runner it is cannot be told: left alone, with the reason.
    "B34_orphan_no_type_with_id": {"terminated": [], "tagged": [], "untagged": []},
    # One whose age is not known is too young: it neither takes a place nor goes.
    "D_missing_launch_time_sort_newest": {
        "terminated": ["i-000000000a0000001", "i-000000000a0000004"],
        "tagged": [],
        "untagged": [],
    },
    # Without seconds the window is open in the whole minute.
    "E19_five_field_cron_at_0s": {"terminated": ["i-000000000a0000002"], "tagged": [], "untagged": []},
    # Bad input is refused before any call.
    "E48_invalid_cron_orphan_first": {"terminated": [], "tagged": [], "untagged": []},
    # Already gone counts as deregistered.
    "F07_get_404_delete_404": {"terminated": ["i-000000000a0000001"], "tagged": [], "untagged": []},
    # What could be listed is done.
    "G19_phase2_listing_fails": {"terminated": ["i-000000000a0000001"], "tagged": [], "untagged": []},
    # One machine with tags that make no sense does not stop the others.
    "G25_repo_owner_without_slash": {"terminated": ["i-000000000a0000002"], "tagged": [], "untagged": []},
}
#: Settings that cannot be used: exit code 2.
REFUSED = frozenset({"E48_invalid_cron_orphan_first"})


@dataclass(frozen=True)
class Expected:
    terminated: set[str]
    tagged: set[str]
    untagged: set[str]


def expected(scenario: Mapping[str, Any], cycle: Mapping[str, Any]) -> Expected:
    """By the verdict's rule."""
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
    return Expected(**{key: set(value) for key, value in seen.items()})


def variables(scenario: Mapping[str, Any]) -> dict[str, str]:
    """The peer's own environment variables."""
    config = scenario["config"]
    return {
        "ENVIRONMENT": config["environment"],
        "SCALE_DOWN_CONFIG": json.dumps(config["idle_config"]),
        "MINIMUM_RUNNING_TIME_IN_MINUTES": str(config["minimum_running_time_in_minutes"]),
        "RUNNER_BOOT_TIME_IN_MINUTES": str(config["runner_boot_time_in_minutes"]),
    }
