"""The machine that an agent runs on, and the actions runner on it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import Enum, StrEnum
from typing import Protocol

from remuda.domain.instance import Assignment
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
    #: The threshold while a job runs, if it is another one.
    busy_threshold: datetime | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Result of one step of the agent."""

    ok: bool
    #: Free text for people, without credentials.
    detail: str = ""
    #: Set if the step failed through no fault of the machine.
    failure: FailureKind | None = None


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
        """Kill all processes of past jobs and discard what they wrote. OK only if a check finds nothing left."""
        ...

    async def end(self, reason: str) -> None:
        """Shut down the machine. Idempotent; may return before it is down."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerState:
    """Configuration and processes of the runner, also those that an earlier agent started."""

    #: Name of its registration, or empty.
    registered_as: str = ""
    #: Whether a listener process is running.
    listening: bool = False
    #: Whether a job is running.
    busy: bool = False
    #: Exit code of the last listener that this agent started, if it exited by itself.
    exit_code: int | None = None
    #: The listener's last error message, if it failed. A job can forge this.
    exit_detail: str = ""
    #: Whether its listener may have run a job since its start. Trust depends on it, so it is also true if a job is only
    #: not excluded, for example if the listener exited while the agent was down.
    had_job: bool = False
    #: Whether a job of its listener was seen, in the listener's log or as a process.
    saw_job: bool = False
    #: Whether it was registered for one job and its listener has exited with code 0: it cannot be started again. The
    #: listener exits so after its job, and without one if GitHub sends it away.
    spent: bool = False
    #: Whether it was registered for one job and its listener has exited without one, because GitHub sent it away: its
    #: registration or its job does not exist any more.
    unused: bool = False
    #: If `spent`: description of the refused job of another run, or empty.
    refused: str = ""


class RemovalStatus(Enum):
    REMOVED = "removed"
    BUSY = "busy"
    #: GitHub did not respond; a later attempt may succeed.
    UNREACHABLE = "unreachable"
    FAILED = "failed"


class RunnerSoftware(Protocol):
    """Control of the runner software by the agent."""

    def state(self) -> RunnerState: ...

    async def register(self, assignment: Assignment) -> StepResult:
        """Register with GitHub without starting the listener. Replaces a partial registration of the same name."""
        ...

    async def start(self, assignment: Assignment) -> None:
        """Start the listener, which runs only jobs of the assignment. It survives a restart of the agent."""
        ...

    def refused(self) -> str:
        """Describe the jobs of other runs that were refused since the last reset, for people; empty if there were none.

        A job can forge this. The worst effect is that its own instance is terminated after the job.
        """
        ...

    async def remove(self, assignment: Assignment) -> tuple[RemovalStatus, str]:
        """Remove the registration. REMOVED only if GitHub confirms it. Also returns a detail for people."""
        ...

    async def stop(self) -> None:
        """Stop the listener, if necessary by force. Only after the registration is removed: it may kill a job."""
        ...

    async def wait_for_change(self, since: RunnerState, timeout_s: float) -> RunnerState:
        """Return the state as soon as it differs from `since`, or after `timeout_s`."""
        ...
