"""The pool's configuration, as `refresh` applies it and `provision` and `release` read it."""

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
    """What lets a runner register and deregister in one scope. Both live an hour."""

    scope: str
    registration: Credential
    removal: Credential


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolConfig:
    pool: str
    classes: tuple[ResourceClass, ...]
    lifetimes: Lifetimes
    max_instances: int
    #: Where runners register, without the scope: https://github.com.
    github_url: str
    applied_at: datetime
    #: Rises with each write, so that two refreshes at once do not undo each other.
    revision: int = 1
    tokens: tuple[ScopeTokens, ...] = ()
    #: What the backend needs to launch: image, subnets, script, …
    launch: Mapping[str, str] = field(default_factory=dict)
    #: Whose machines a run may be given.
    reuse: Reuse = Reuse.SAME_TRUST

    @property
    def runner_prefix(self) -> str:
        """Belongs to this pool alone, else one pool's sweep would hit another's runners."""
        return runner_prefix(self.pool)

    def resource_class(self, name: str) -> ResourceClass:
        for candidate in self.classes:
            if candidate.name == name:
                return candidate
        known = ", ".join(candidate.name for candidate in self.classes)
        raise UserError(
            f"resource-class {name!r} is not one of this pool's classes",
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
    """Unique for each assignment; ends with the instance id."""
    name = f"{runner_prefix(pool)}{epoch}-{instance_id}"
    if len(name) > MAX_RUNNER_NAME:
        raise UserError(f"runner name {name!r} is longer than {MAX_RUNNER_NAME}", field="pool", fix="shorten the pool")
    return name


def parse_runner_name(pool: str, name: str) -> tuple[int, str] | None:
    """(epoch, instance id) of one of this pool's runners, or None for anybody else's."""
    prefix = runner_prefix(pool)
    if not name.startswith(prefix):
        return None
    epoch, _, instance_id = name[len(prefix) :].partition("-")
    # The id is checked too: to pool `ci`, the names of pool `ci-1` look like its own.
    if not _EPOCH.fullmatch(epoch) or not is_instance_id(instance_id):
        return None
    return int(epoch), instance_id
