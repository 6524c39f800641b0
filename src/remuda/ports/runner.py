"""The actions runner on a machine, as the agent drives it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from remuda.domain.instance import Assignment
from remuda.ports.machine import StepResult


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerState:
    """What is on disk and what runs, whoever started it."""

    #: The name under which it is registered, or empty.
    configured_as: str = ""
    #: A listener process is alive.
    listening: bool = False
    #: A job is running on it.
    busy: bool = False
    #: The exit code of the last listener this agent started, where it ended by itself.
    exit_code: int | None = None
    #: It was registered for one job, and its listener has ended with it: there is nothing to start again.
    spent: bool = False
    #: Of a spent one: that its job was turned away, or empty.
    refused: str = ""


class RemovalStatus(Enum):
    REMOVED = "removed"
    BUSY = "runs a job"
    #: The github did not answer: it may do so later.
    UNREACHABLE = "out of reach"
    FAILED = "failed"


class RunnerSoftware(Protocol):
    def state(self) -> RunnerState: ...

    async def configure(self, assignment: Assignment) -> StepResult:
        """Register with the github; the listener stays off. A half registration of the same name is replaced."""
        ...

    async def start(self, assignment: Assignment) -> None:
        """Start the listener. It outlives the agent; a later agent finds it. It runs jobs of the assignment alone."""
        ...

    def refused(self) -> str:
        """What jobs of others were turned away since the last reset, for people; empty where none was. A job may have
        written it: at the most it costs that job's own machine, once the job is over.
        """
        ...

    async def remove(self, assignment: Assignment) -> tuple[RemovalStatus, str]:
        """Remove the registration on the github; REMOVED only when it is gone there. With a detail for people."""
        ...

    async def stop(self) -> None:
        """Stop the listener, by force if need be. Only after the registration is gone: there is no drain."""
        ...

    async def wait_for_change(self, since: RunnerState, timeout_s: float) -> RunnerState:
        """Returns as soon as the state differs from `since`, else after `timeout_s`."""
        ...
