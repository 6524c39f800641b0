"""Pool configuration, which `refresh` writes and the other commands read, and the names of its runners."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from remuda.domain.errors import UserError
from remuda.domain.instance import Credential
from remuda.domain.resources import ResourceClass, Reuse, is_instance_id
from remuda.domain.thresholds import Lifetimes

#: GitHub's limit for a runner's name.
MAX_RUNNER_NAME = 64

_EPOCH = re.compile(r"[1-9][0-9]{0,18}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScopeTokens:
    """Registration and removal token of one scope. Both are valid for an hour."""

    scope: str
    registration: Credential
    removal: Credential


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    pool: str
    classes: tuple[ResourceClass, ...]
    lifetimes: Lifetimes
    max_instances: int
    #: URL that runners register with, without the scope: https://github.com.
    github_url: str
    applied_at: datetime
    #: Rises with each write, so that concurrent refreshes do not overwrite each other.
    revision: int = 1
    tokens: tuple[ScopeTokens, ...] = ()
    #: Launch parameters of the backend: image, subnets, script, …
    launch: Mapping[str, str] = field(default_factory=dict)
    #: Which instances a run may reuse.
    reuse: Reuse = Reuse.SAME_TRUST

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
            f"resource-class {name!r} is not a class of this pool",
            field="resource-class",
            fix=f"use one of {known}, or add it with --resource-class-config and run remuda refresh",
        )

    def tokens_for(self, scope: str) -> ScopeTokens:
        for candidate in self.tokens:
            if candidate.scope.lower() == scope.lower():
                return candidate
        raise UserError(
            f"the pool has no registration token for {scope!r}",
            field="github-scope",
            fix=f"run remuda refresh --github-scope {scope}",
        )


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
