"""Hooks that interrupt a process at its n-th port call, or lose the answers of calls."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from enum import Enum
from typing import Any

from remuda.domain.errors import Unavailable
from simulation.fake_machine import FakeMachine
from tests.support.virtual_time import Call, Hook, Killed


class CutKind(Enum):
    CANCEL_BEFORE = "cancelled, the call not made"
    CANCEL_AFTER = "cancelled, the call made and its answer lost"
    CRASH_BEFORE = "killed, the call not made"
    CRASH_AFTER = "killed, the call made and its answer lost"


CRASHES = (CutKind.CRASH_BEFORE, CutKind.CRASH_AFTER)


class Cut:
    """Interrupts a process at its n-th call. A killed process makes no further call."""

    def __init__(self, at: int, kind: CutKind) -> None:
        self._at = at
        self._kind = kind
        self.calls: list[str] = []
        self.dead = asyncio.Event()
        self._discarded = False
        self._task: asyncio.Task[Any] | None = None

    async def run(self, work: Coroutine[Any, Any, Any]) -> BaseException | None:
        """Run a use case until it ends or is killed. Return its exception; None if it was killed or succeeded."""
        self._task = asyncio.create_task(work)
        dead = asyncio.create_task(self.dead.wait())
        await asyncio.wait({self._task, dead}, return_when=asyncio.FIRST_COMPLETED)
        dead.cancel()
        if not self._task.done():
            return None
        return asyncio.CancelledError() if self._task.cancelled() else self._task.exception()

    async def discard(self) -> None:
        """Cancel the tasks of a killed process without letting them make a call."""
        self._discarded = True
        while self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=1)

    async def __call__(self, name: str, call: Call) -> Any:
        if self.dead.is_set():
            await self._hang_forever()
        self.calls.append(name)
        if len(self.calls) != self._at:
            answer = await call()
            if self.dead.is_set():
                await self._hang_forever()
            return answer
        if self._kind is CutKind.CRASH_BEFORE:
            await self._die()
        if self._kind is CutKind.CANCEL_BEFORE:
            await self._cancel()
        answer = await call()
        if self._kind is CutKind.CRASH_AFTER:
            await self._die()
        if self._kind is CutKind.CANCEL_AFTER:
            await self._cancel()
        return answer

    async def _die(self) -> None:
        self.dead.set()
        await self._hang_forever()

    async def _hang_forever(self) -> None:
        if self._discarded:
            raise Killed
        try:
            await asyncio.Future[None]()
        except asyncio.CancelledError:
            raise Killed from None

    async def _cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()
        # Let the cancellation arrive. Shielded code continues.
        for _ in range(3):
            await asyncio.sleep(0)


class AmbiguousAnswer:
    """Selected calls raise `Unavailable`, whether or not they were applied."""

    def __init__(self, operation: str, *, applied: bool, at: Collection[int] = (1,)) -> None:
        self._operation = operation
        self._applied = applied
        self._at = at
        self.count = 0

    async def __call__(self, name: str, call: Call) -> Any:
        if name != self._operation:
            return await call()
        self.count += 1
        if self.count not in self._at:
            return await call()
        if self._applied:
            await call()
        raise Unavailable(f"no answer to {name}")


class AgentCut:
    """Kills the agent that makes the n-th call of all agents. Its machine starts a new one."""

    def __init__(self, at: int, *, applied: bool) -> None:
        self._at = at
        self._applied = applied
        self.calls: list[str] = []

    def __call__(self, machine: FakeMachine) -> Hook:
        alive = True

        async def hook(name: str, call: Call) -> Any:
            nonlocal alive
            if not alive:
                raise Killed
            self.calls.append(name)
            if len(self.calls) != self._at:
                return await call()
            if self._applied:
                await call()
            alive = False
            if machine.agent is not None and machine.agent.task is not None:
                machine.agent.task.cancel()
            raise Killed

        return hook
