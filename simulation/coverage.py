"""Which fault met an instance in which state; which cells of that table cannot be filled, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from remuda.domain.instance import State
from simulation.faults import NO_RECORD, Fault

Cell = tuple[Fault, str]

STATES = (NO_RECORD, *(state.value for state in State))
_OF_HINTS = (
    Fault.MESSAGE_LOST,
    Fault.MESSAGE_TWICE,
    Fault.MESSAGE_LATE,
    Fault.MESSAGE_REORDERED,
    Fault.RECEIVE_SHORT,
    Fault.DELETE_LOST,
    Fault.POOL_FAILED,
)
_OF_MACHINES = (
    Fault.AGENT_CRASH,
    Fault.AGENT_PAUSE,
    Fault.SPOT_NOTICE,
    Fault.POWER_CUT,
    Fault.SCRIPT_FAILED,
    Fault.REGISTRATION_FAILED,
    Fault.RESET_FAILED,
    Fault.LISTENER_DIES,
)
_OF_LAUNCHES = (Fault.FLEET_PARTIAL, Fault.NEVER_BOOTS)
_RECORDED = STATES[1:]


def _cells(reason: str, faults: Iterable[Fault], *states: str) -> dict[Cell, str]:
    return {(fault, state): reason for fault in faults for state in states}


#: Cells that no seed can fill.
IMPOSSIBLE: Mapping[Cell, str] = {
    **_cells("what nobody can read is about no instance", [Fault.MESSAGE_MALFORMED], *STATES),
    **_cells("nothing is launched: there is no instance", [Fault.NO_CAPACITY], *STATES),
    **_cells("a machine has no record before its launch has answered", _OF_LAUNCHES, *_RECORDED),
    **_cells(
        "the record is written by whoever launches, after the answer; only a sweep may bury the machine before",
        [Fault.LAUNCH_UNSURE],
        State.CREATED,
        State.CLAIMED,
        State.RUNNING,
        State.RELEASING,
        State.IDLE,
    ),
    **_cells("the first hint about an instance is sent when it is idle", _OF_HINTS, State.CREATED),
    **_cells("only what has a record is in the list", [Fault.SHORT_PAGES], NO_RECORD),
    **_cells("EC2 has confirmed its end: nothing runs on it any more", _OF_MACHINES, State.TERMINATED),
    **_cells(
        "the script runs once, before the first registration, and that comes before any other state",
        [Fault.SCRIPT_FAILED],
        State.CLAIMED,
        State.RUNNING,
        State.RELEASING,
        State.IDLE,
    ),
    **_cells("an agent registers by its record", [Fault.REGISTRATION_FAILED], NO_RECORD),
    **_cells(
        "while an agent registers it has not signalled what these states need",
        [Fault.REGISTRATION_FAILED],
        State.RUNNING,
        State.IDLE,
    ),
    **_cells("an agent resets what was released", [Fault.RESET_FAILED], NO_RECORD, State.CREATED),
    **_cells("the agent that resets would have to register first", [Fault.RESET_FAILED], State.RUNNING),
    **_cells(
        "a listener starts by a record that is running, and is stopped before the machine is clean",
        [Fault.LISTENER_DIES],
        NO_RECORD,
        State.CREATED,
        State.CLAIMED,
        State.IDLE,
    ),
    **_cells(
        "an operator's order names an instance by its record, and any other name is refused",
        [Fault.DRAIN, Fault.QUARANTINE, Fault.TERMINATE],
        NO_RECORD,
    ),
}


def empty_cells(coverage: Mapping[Cell, int]) -> list[Cell]:
    """Those that could be filled, and are not."""
    cells = ((fault, state) for fault in Fault for state in STATES)
    return [cell for cell in cells if not coverage.get(cell) and cell not in IMPOSSIBLE]


def wonders(coverage: Mapping[Cell, int]) -> list[Cell]:
    """Those that were called impossible, and happened."""
    return [cell for cell in IMPOSSIBLE if coverage.get(cell)]
