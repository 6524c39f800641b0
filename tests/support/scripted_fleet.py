"""A fleet in memory: machines with the tags of terraform-aws-github-runner, and a GitHub with outdated lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, timedelta
from typing import Any

from remuda.domain.errors import Unavailable
from remuda.domain.instance import Credential
from remuda.domain.scale_down.fleet import FleetMachine
from remuda.domain.scale_down.idle_config import IdleWindow, parse_cron
from remuda.ports.calls import CallCounter
from remuda.ports.github import Deletion, GitHubRunner, JitRunner
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

    async def jit_config(self, scope: str, *, name: str, labels: Sequence[str]) -> JitRunner:
        raise NotImplementedError

    def _enter(self, operation: str, scope: str, runner_id: int) -> None:
        self.calls.add("github", operation)
        self.requests.append((operation, scope, runner_id))
        if self.fails(operation, scope, runner_id):
            raise Unavailable(f"{operation} of {scope} fails")
