"""The machine an agent runs on: who it is, what it remembers, how it ends."""

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
    """What became of the pre-runner script."""

    PENDING = "pending"
    OK = "ok"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentState:
    """What the agent keeps on disk, so that a restart at any point goes on rightly."""

    script: ScriptStatus = ScriptStatus.PENDING
    script_detail: str = ""
    #: The last threshold read: it rules while the store is out of reach.
    threshold: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    ok: bool
    #: The story for a person. Never a credential.
    detail: str = ""
    #: Set if the step failed through no fault of the machine.
    failure: FailureKind | None = None
    #: Number of removed things per kind.
    found: Mapping[str, int] = field(default_factory=dict, repr=False)


class Machine(Protocol):
    async def identity(self) -> Identity: ...

    def load(self) -> AgentState:
        """What was remembered last; a fresh memory where there is none or it cannot be read."""
        ...

    def save(self, state: AgentState) -> None:
        """Durable when it returns: a crash leaves the old or the new one."""
        ...

    def set_dead_man_timer(self, at: datetime) -> None:
        """The dead-man timer: at that time the machine ends, whatever the agent does or fails to do by then."""
        ...

    async def spot_notice(self) -> str:
        """What the cloud says about taking the machine away, or empty."""
        ...

    async def run_script(self, timeout_s: float) -> StepResult:
        """The pre-runner script, to its end. OK where there is none."""
        ...

    async def reset(self) -> StepResult:
        """Kill every process of past jobs, restore the runner's folder, home, work and temp. OK only where a check
        afterwards found nothing left.
        """
        ...

    async def end(self, reason: str) -> None:
        """End the machine. Idempotent; may return before it has ended."""
        ...
