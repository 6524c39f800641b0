"""The actions runner on a machine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from remuda.domain.instance import Assignment
from remuda.ports.machine import StepResult


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
    #: Whether it was registered for one job and its listener has exited after it.
    spent: bool = False
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

    async def configure(self, assignment: Assignment) -> StepResult:
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
