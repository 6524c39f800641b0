"""What a provision is asked for and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from remuda.domain.errors import UserError
from remuda.domain.instance import Instance
from remuda.domain.provision_outcome import RunnerSource
from remuda.domain.resources import Tier, TypePatterns, UsageClass


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionRequest:
    run_id: str
    attempt: int
    count: int
    resource_class: str
    usage_class: UsageClass
    patterns: TypePatterns
    scope: str
    tier: Tier
    #: Why it has this tier, for people.
    tier_why: str = ""
    #: The run's repository, owner/name, where it is known.
    repository: str = ""
    #: New instances for one job each, registered just in time. Needs a GitHub credential of the provision's own.
    ephemeral: bool = False
    #: None: the pool's.
    max_runtime_s: float | None = None
    timeout_s: float | None = None


def no_credential() -> UserError:
    """For an order of ephemeral instances by somebody who cannot register them."""
    return UserError(
        "ephemeral runners are registered one by one with a GitHub credential, and there is none",
        field="ephemeral",
        fix="set REMUDA_GITHUB_TOKEN, or REMUDA_GITHUB_APP_ID and REMUDA_GITHUB_APP_KEY, or leave --ephemeral out",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Provisioned:
    instance: Instance
    source: RunnerSource
    #: What the runner's own registration took on the machine, where it said so.
    registration_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionResult:
    run_id: str
    provision_id: str
    label: str
    instances: tuple[Provisioned, ...]
    tier: Tier
    tier_why: str
    ephemeral: bool
    seconds: float
    phases: Mapping[str, float]
    calls: Mapping[str, Mapping[str, int]]
    #: Messages that were looked at and not used, and why.
    refused: Mapping[str, int] = field(default_factory=dict)

    @property
    def reused(self) -> int:
        return sum(1 for item in self.instances if item.source is RunnerSource.POOL)

    @property
    def created(self) -> int:
        return len(self.instances) - self.reused
