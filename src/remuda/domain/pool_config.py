"""Pool configuration, which `refresh` writes and the other commands read; names and registrations of its runners."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from remuda.domain.budget import Budget, Spending
from remuda.domain.decide.next_step import PoolPolicy
from remuda.domain.errors import UserError
from remuda.domain.instance import ABSORBING, Credential, Instance, State
from remuda.domain.resources import MAX_SHOWN, ResourceClass, Reuse, is_instance_id, is_repository
from remuda.domain.runner_release import RunnerRelease
from remuda.domain.runner_set import RunnerSet
from remuda.domain.text import quote
from remuda.domain.thresholds import Lifetimes

#: GitHub's id of the default runner group of an organisation, and of the only one of a repository.
DEFAULT_GROUP_ID = 1
#: Version of the records in a store. It rises with each change after which older records cannot be read.
RECORD_VERSION = 1
#: GitHub's limit for a runner's name.
MAX_RUNNER_NAME = 64

_EPOCH = re.compile(r"[1-9][0-9]{0,18}")
_GITHUB_RUN_ID = re.compile(r"[1-9][0-9]{0,18}")
#: A server with web pages. The local GitHub, which listens on the loopback address, has none.
_WEB_SERVER = re.compile(r"https?://(?!127\.0\.0\.1\b)[A-Za-z0-9.-]+(:[0-9]{1,5})?")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScopeTokens:
    """Registration and removal token of one scope. Both are valid for an hour."""

    scope: str
    registration: Credential
    removal: Credential
    #: The runner group that runners of this scope join: its name, empty for the default group, and its id.
    runner_group: str = ""
    runner_group_id: int = DEFAULT_GROUP_ID


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    pool: str
    classes: tuple[ResourceClass, ...]
    lifetimes: Lifetimes
    max_instances: int
    #: URL that runners register with, without the scope: https://github.com.
    github_url: str
    applied_at: datetime
    #: `RECORD_VERSION` of the Remuda that created the store. 0: it is older than such versions.
    record_version: int = 0
    #: Rises with each write, so that concurrent refreshes do not overwrite each other.
    revision: int = 1
    tokens: tuple[ScopeTokens, ...] = ()
    #: Launch parameters of the backend: image, subnets, script, …
    launch: Mapping[str, str] = field(default_factory=dict)
    #: Which instances a run may reuse.
    reuse: Reuse = Reuse.SAME_TRUST
    runner_sets: tuple[RunnerSet, ...] = ()
    #: The actions runner that new machines install. None if they use that of their image.
    runner: RunnerRelease | None = None
    #: What the pool's machines may cost in a month before no more are launched. 0 for no limit.
    monthly_budget: float = 0.0
    #: What they have cost. Known only if there is a budget.
    spending: Spending | None = None

    def check_record_version(self) -> None:
        """Raise `UserError` if the records of the store have another version than this Remuda reads and writes."""
        if self.record_version != RECORD_VERSION:
            raise UserError(
                f"the records of pool {self.pool} have version {self.record_version}, this Remuda has {RECORD_VERSION}",
                field="backend",
                fix="remove the pool with the Remuda that created it, and create it again with this one",
            )

    @property
    def budget(self) -> Budget:
        return Budget(limit=self.monthly_budget, spending=self.spending)

    @property
    def runner_version(self) -> str:
        """The version that new machines install, or empty."""
        return self.runner.version if self.runner else ""

    @property
    def policy(self) -> PoolPolicy:
        """The rules for the pool's instances."""
        return PoolPolicy(lifetimes=self.lifetimes, reuse=self.reuse, runner_version=self.runner_version)

    @property
    def runner_prefix(self) -> str:
        """Unique per pool; otherwise one pool's sweep would remove another's runners."""
        return runner_prefix(self.pool)

    def resource_class(self, name: str) -> ResourceClass:
        for candidate in self.classes:
            if candidate.name == name:
                return candidate
        known = ", ".join(candidate.name for candidate in self.classes)
        raise UserError(
            f"resource-class {quote(name, MAX_SHOWN)} is not a class of this pool",
            field="resource-class",
            fix=f"use one of {known}, or add it with --resource-class-config and run remuda refresh",
        )

    def run_url(self, repository: str, run_id: str) -> str:
        """Return the address of a run's page on GitHub. Empty if it has none that is safe to link to."""
        if not (
            _WEB_SERVER.fullmatch(self.github_url) and is_repository(repository) and _GITHUB_RUN_ID.fullmatch(run_id)
        ):
            return ""
        return f"{self.github_url}/{repository}/actions/runs/{run_id}"

    def find_set(self, name: str) -> RunnerSet | None:
        return next((item for item in self.runner_sets if item.name == name), None)

    def find_tokens(self, scope: str) -> ScopeTokens | None:
        return next((item for item in self.tokens if item.scope.lower() == scope.lower()), None)

    def tokens_for(self, scope: str) -> ScopeTokens:
        found = self.find_tokens(scope)
        if found is not None:
            return found
        raise UserError(
            f"the pool has no registration token for {scope!r}",
            field="github-scope",
            fix=f"run remuda refresh --github-scope {scope}",
        )


def may_hold_secret(launch_option: str) -> bool:
    """Whether the option's value must not be shown: a script, or a URL that may be signed."""
    return launch_option == "pre-runner-script" or launch_option.endswith("-url")


def runner_prefix(pool: str) -> str:
    return f"remuda-{pool}-"


def runner_name(pool: str, epoch: int, instance_id: str) -> str:
    """Return the name for an assignment: unique, and ending with the instance id."""
    name = f"{runner_prefix(pool)}{epoch}-{instance_id}"
    if len(name) > MAX_RUNNER_NAME:
        raise UserError(f"runner name {name!r} is longer than {MAX_RUNNER_NAME}", field="pool", fix="shorten the pool")
    return name


def parse_runner_name(pool: str, name: str) -> tuple[int, str] | None:
    """Return epoch and instance id of one of this pool's runners, or None for other runners."""
    prefix = runner_prefix(pool)
    if not name.startswith(prefix):
        return None
    epoch, _, instance_id = name[len(prefix) :].partition("-")
    # The check of the id tells the runners of pool `ci-1` from those of pool `ci`.
    if not _EPOCH.fullmatch(epoch) or not is_instance_id(instance_id):
        return None
    return int(epoch), instance_id


def stale_registration_reason(
    name: str,
    record: Instance | None,
    *,
    pool: str,
    unrecorded_since: datetime | None,
    now: datetime,
    grace_s: float,
) -> str | None:
    """Return why a registration is stale, for people. None if it is not, or not yet.

    The list of runners must be read before the records: then a stale registration stays stale, whatever other processes
    do. A registration without a record is stale only if it has no machine either, because just-in-time registrations
    are made before the record is written. `unrecorded_since` is the time since which it is known to have neither.
    """
    parsed = parse_runner_name(pool, name)
    if parsed is None:
        return None
    epoch, _ = parsed
    if record is None:
        if unrecorded_since is not None and now - unrecorded_since >= timedelta(seconds=grace_s):
            return "its instance has no record"
        return None
    if record.state in ABSORBING:
        return f"its instance is {record.state}"
    if epoch < record.epoch:
        return f"its epoch is {epoch}, the instance's is {record.epoch}"
    if epoch == record.epoch and record.state is State.IDLE:
        return "its instance is idle"
    return None
