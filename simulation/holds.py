"""Holds: a process waits before one of its calls until others have finished whole operations.

Random schedules seldom let a whole operation happen between two calls of a process. A hold does: what the process has
read before is old then, and every check that it made must be made again, or be part of a conditional write.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from remuda.domain.errors import RemudaError
from simulation.faults import Fault
from simulation.plan import Operation, PlannedHold

if TYPE_CHECKING:
    from simulation.world import SimulatedProcess, World

#: Maximum seconds of a hold of one call, which a timeout would end, and of a whole process: an operation may wait for
#: the process that is held.
MAX_WAIT_S = 25.0
MAX_STOP_S = 240.0
#: Heartbeats are not counted: nothing depends on their order, and there are so many.
_UNCOUNTED = frozenset({"beat", "spot_notice"})
#: How a process is held, by its kind.
_STOPPED = {"agent": Fault.AGENT_PAUSE, "listener": Fault.LISTENER_PAUSE}


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberedCall:
    """A call that a process is about to make."""

    process: str
    number: int
    operation: str
    at: float
    #: Number of writes to records and provisions until then.
    writes: int

    def __str__(self) -> str:
        return f"{self.process}, call {self.number} ({self.operation})"


class NumberedCalls:
    """The calls of all processes of a world, and the holds of its plan."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._numbers: Counter[str] = Counter()
        self._holds = {
            (item.process, item.call): item for item in world.plan.operations if isinstance(item, PlannedHold)
        }
        #: Performs an operation to its end. Set by the workload.
        self.perform: Callable[[Operation], Awaitable[None]] | None = None
        self.made: list[NumberedCall] = []
        self.writes = 0
        #: The call at which a process was held.
        self.held: NumberedCall | None = None

    async def before(self, process: SimulatedProcess, operation: str) -> NumberedCall:
        """Number a call that a process is about to make, and hold it if it is to be held."""
        self._numbers[process.name] += 1
        number = self._numbers[process.name]
        at = self._world.loop.time()
        call = NumberedCall(process=process.name, number=number, operation=operation, at=at, writes=self.writes)
        self.made.append(call)
        hold = self._holds.get((process.name, number))
        if hold is not None and not hold.late and self._world.faults.active:
            await self._hold(process, hold, call)
        return call

    async def after(self, process: SimulatedProcess, call: NumberedCall) -> None:
        """The call has taken effect: hold its answer if that is to be late."""
        hold = self._holds.get((process.name, call.number))
        if hold is not None and hold.late and self._world.faults.active:
            await self._hold(process, hold, call)

    async def _hold(self, process: SimulatedProcess, hold: PlannedHold, call: NumberedCall) -> None:
        world, loop = self._world, self._world.loop
        self.held = call
        world.trace.add(process.name, f"held {'after' if hold.late else 'before'} {call}")
        over: asyncio.Future[None] = loop.create_future()
        loop.keep_task(loop.create_task(self._others(process, hold, over), context=loop.outside))
        if hold.whole:
            process.stop()
        await over

    async def _others(self, process: SimulatedProcess, hold: PlannedHold, over: asyncio.Future[None]) -> None:
        world = self._world
        began, limit_s = world.loop.time(), MAX_STOP_S if hold.whole else MAX_WAIT_S
        fault = _STOPPED.get(process.kind, Fault.PAUSE) if hold.whole else Fault.SLOW_CALL
        process.faults.append(fault)
        world.faults.record(fault, process.subjects)
        # Until then, nobody expects anything of it.
        self._disturb(process, began + limit_s)
        work = asyncio.ensure_future(self._perform_all(hold.until))
        await asyncio.wait({work}, timeout=limit_s)
        if work.done() and (error := work.exception()) is not None:
            world.loop.errors.append(error)
        self._disturb(process, world.loop.time())
        world.trace.add(process.name, "goes on")
        if not over.done():
            over.set_result(None)
        if hold.whole:
            process.pause_s += world.loop.time() - began
            process.resume()

    def _disturb(self, process: SimulatedProcess, until: float) -> None:
        process.last_fault_at = self._world.faults.last_at = until
        self._world.faults.affected_at.update(dict.fromkeys(process.subjects, until))

    async def _perform_all(self, operations: Sequence[Operation]) -> None:
        assert self.perform is not None  # noqa: S101 - set before the first process starts
        for item in operations:
            await self.perform(item)


class NumberedPort:
    """Numbers the calls to a port of one process."""

    def __init__(self, port: Any, calls: NumberedCalls, process: SimulatedProcess) -> None:
        self._port = port
        self._calls = calls
        self._process = process

    def __getattr__(self, operation: str) -> Any:
        inner = getattr(self._port, operation)
        if operation in _UNCOUNTED or not inspect.iscoroutinefunction(inner):
            return inner

        async def call(*given: Any, **named: Any) -> Any:
            made = await self._calls.before(self._process, operation)
            try:
                answer = await inner(*given, **named)
            except RemudaError:
                await self._calls.after(self._process, made)
                raise
            await self._calls.after(self._process, made)
            return answer

        return call
