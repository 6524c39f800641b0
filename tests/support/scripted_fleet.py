"""Fleets for scale-down: scripted in memory, and scenarios observed on terraform-aws-github-runner.

A scripted fleet has machines with the tags of terraform-aws-github-runner and a GitHub with outdated lists.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, timedelta
from pathlib import Path
from typing import Any

from remuda.domain.errors import Unavailable
from remuda.domain.instance import Credential
from remuda.domain.pool_config import DEFAULT_GROUP_ID
from remuda.domain.runner_release import RunnerRelease
from remuda.domain.scale_down.fleet import FleetMachine
from remuda.domain.scale_down.idle_config import IdleWindow, parse_cron
from remuda.ports.calls import CallCounter
from remuda.ports.github import Deletion, GitHubRun, GitHubRunner, JitRunner, JobList, RunList
from tests.support.records import NOW, instance_id

ENVIRONMENT = "ci"
ORG = "acme"


def tags(owner: str = ORG, **more: str) -> dict[str, str]:
    kind = "Repo" if "/" in owner else "Org"
    base = {
        "ghr:environment": ENVIRONMENT,
        "ghr:Application": "github-action-runner",
        "ghr:Owner": owner,
        "ghr:Type": kind,
    }
    named = {f"ghr:{key}": value for key, value in more.items()}
    return {**base, **named}


def machine(number: int, *, age_s: float | None = 3_600, owner: str = ORG, **more: Any) -> FleetMachine:
    """A machine with tags from keywords such as `orphan="true"`, `github_runner_id="11"` and `bypass`."""
    if "bypass" in more:
        more["bypass-removal"] = more.pop("bypass")
    system = more.pop("os", "linux")
    launched_at = None if age_s is None else NOW - timedelta(seconds=age_s)
    return FleetMachine(instance_id=instance_id(number), launched_at=launched_at, tags=tags(owner, **more), os=system)


def idle_window(idle_count: int, cron: str = "* * * * * *", **changed: Any) -> IdleWindow:
    """A window in UTC, by default always open."""
    return IdleWindow(cron=parse_cron(cron), zone=UTC, zone_name="UTC", idle_count=idle_count, **changed)


@dataclass(kw_only=True)
class ScriptedRunner:
    """A runner, and its possibly different entry in the list of its owner."""

    runner_id: int
    name: str
    scope: str = ORG
    online: bool = True
    busy: bool = False
    listed: bool = True
    listed_online: bool | None = None
    listed_busy: bool | None = None
    #: Lookups after which the runner gets a job.
    busy_after_lookups: int | None = None

    def lookup(self) -> GitHubRunner:
        if self.busy_after_lookups is not None:
            self.busy_after_lookups -= 1
        view = GitHubRunner(runner_id=self.runner_id, name=self.name, online=self.online, busy=self.busy)
        if self.busy_after_lookups == 0 and not self.busy:
            self.busy = self.online = True
        return view

    def list_entry(self) -> GitHubRunner:
        online = self.online if self.listed_online is None else self.listed_online
        busy = self.busy if self.listed_busy is None else self.listed_busy
        return GitHubRunner(runner_id=self.runner_id, name=self.name, online=online, busy=busy)


@dataclass(kw_only=True)
class ScriptedGitHub:
    """The GitHub port over scripted runners. `fails` selects failing calls by operation, scope and runner id."""

    runners: dict[int, ScriptedRunner] = field(default_factory=dict)
    fails: Callable[[str, str, int], bool] = lambda _operation, _scope, _runner_id: False
    calls: CallCounter = field(default_factory=CallCounter)
    requests: list[tuple[str, str, int]] = field(default_factory=list)

    def add(self, runner: ScriptedRunner) -> ScriptedRunner:
        self.runners[runner.runner_id] = runner
        return runner

    async def close(self) -> None:
        pass

    async def list_runners(self, scope: str) -> Sequence[GitHubRunner]:
        mine = [runner for runner in self.runners.values() if runner.scope == scope and runner.listed]
        for _ in range(0, max(1, len(mine)), 100):
            self._enter("list", scope, 0)
        return [runner.list_entry() for runner in mine]

    async def get_runner(self, scope: str, runner_id: int) -> GitHubRunner | None:
        self._enter("get", scope, runner_id)
        runner = self.runners.get(runner_id)
        return runner.lookup() if runner is not None and runner.scope == scope else None

    async def get_run(self, scope: str, repository: str, run_id: int, *, etag: str = "") -> GitHubRun | None:
        raise NotImplementedError

    async def rerun_failed_jobs(self, scope: str, repository: str, run_id: int) -> None:
        raise NotImplementedError

    async def delete_runner(self, scope: str, runner_id: int) -> Deletion:
        self._enter("delete", scope, runner_id)
        runner = self.runners.get(runner_id)
        if runner is None or runner.scope != scope:
            return Deletion.GONE
        if runner.busy:
            return Deletion.BUSY
        del self.runners[runner_id]
        return Deletion.DELETED

    async def registration_token(self, scope: str) -> Credential:
        raise NotImplementedError

    async def removal_token(self, scope: str) -> Credential:
        raise NotImplementedError

    async def jit_config(
        self, scope: str, *, name: str, labels: Sequence[str], group_id: int = DEFAULT_GROUP_ID
    ) -> JitRunner:
        raise NotImplementedError

    async def runner_group_id(self, scope: str, name: str) -> int:
        raise NotImplementedError

    async def runner_downloads(self, scope: str) -> RunnerRelease:
        raise NotImplementedError

    async def list_runs(self, scope: str, repository: str, *, status: str, etag: str = "") -> RunList | None:
        raise NotImplementedError

    async def list_jobs(self, scope: str, repository: str, run_id: int, *, etag: str = "") -> JobList | None:
        raise NotImplementedError

    def _enter(self, operation: str, scope: str, runner_id: int) -> None:
        self.calls.add("github", operation)
        self.requests.append((operation, scope, runner_id))
        if self.fails(operation, scope, runner_id):
            raise Unavailable(f"{operation} of {scope} fails")


# Scenarios of tests/data/scale_down, with the result expected of Remuda -----------------------------------------------

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
