"""The machine that an agent runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from remuda.domain.signals import FailureKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    instance_id: str
    pool: str
    #: The pool's clock margin.
    margin_s: float


class ScriptStatus(StrEnum):
    """Status of the pre-runner script."""

    PENDING = "pending"
    OK = "ok"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentState:
    """State that the agent keeps on disk, so that it can continue after a restart at any point."""

    script: ScriptStatus = ScriptStatus.PENDING
    script_detail: str = ""
    #: The last threshold that was read. It applies while the store is unreachable.
    threshold: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Result of one step of the agent."""

    ok: bool
    #: Free text for people, without credentials.
    detail: str = ""
    #: Set if the step failed through no fault of the machine.
    failure: FailureKind | None = None
    #: Number of removed leftovers per kind.
    found: Mapping[str, int] = field(default_factory=dict, repr=False)


class Machine(Protocol):
    """Access of the agent to its own machine."""

    async def identity(self) -> Identity: ...

    def load(self) -> AgentState:
        """Return the saved state, or a new one if it is missing or cannot be read."""
        ...

    def save(self, state: AgentState) -> None:
        """Save the state durably. A crash leaves the old or the new state."""
        ...

    def set_dead_man_timer(self, at: datetime) -> None:
        """Make the machine shut down at that time, even if the agent has died. Replaces the former time."""
        ...

    async def spot_notice(self) -> str:
        """Return the cloud's announcement that it will reclaim the machine, or empty."""
        ...

    async def run_script(self, timeout_s: float) -> StepResult:
        """Run the pre-runner script to its end. The result is OK without a script."""
        ...

    async def reset(self) -> StepResult:
        """Kill all processes of past jobs and restore the runner's folder, home, work and temp.

        The result is OK only if a check afterwards finds no leftovers.
        """
        ...

    async def end(self, reason: str) -> None:
        """Shut down the machine. Idempotent; may return before it is down."""
        ...
