"""The request and the result of a provision."""

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
    #: Why the run has this tier, for people.
    tier_reason: str = ""
    #: The run's repository as owner/name; empty if unknown.
    repository: str = ""
    #: Create new instances with a just-in-time registration for one job each. Requires a GitHub credential.
    ephemeral: bool = False
    #: None: the pool's value.
    max_runtime_s: float | None = None
    timeout_s: float | None = None


def missing_credential() -> UserError:
    """The error for ephemeral runners without a GitHub credential."""
    return UserError(
        "ephemeral runners need a GitHub credential to register, and none is configured",
        field="ephemeral",
        fix="set REMUDA_GITHUB_TOKEN, or REMUDA_GITHUB_APP_ID and REMUDA_GITHUB_APP_KEY, or leave --ephemeral out",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionedInstance:
    instance: Instance
    source: RunnerSource
    #: Seconds that the registration took on the machine; None if the agent did not report it.
    registration_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionResult:
    run_id: str
    provision_id: str
    label: str
    instances: tuple[ProvisionedInstance, ...]
    tier: Tier
    tier_reason: str
    ephemeral: bool
    seconds: float
    #: Seconds per phase.
    phases: Mapping[str, float]
    calls: Mapping[str, Mapping[str, int]]
    #: Number of pool messages that did not become a runner, by kind.
    rejected: Mapping[str, int] = field(default_factory=dict)

    @property
    def reused(self) -> int:
        return sum(1 for item in self.instances if item.source is RunnerSource.POOL)

    @property
    def created(self) -> int:
        return len(self.instances) - self.reused
