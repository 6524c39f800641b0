"""Wake-ups of a listener (L9): what is due by what it knows is begun within seconds.

Regular readings and long pauses heal a lost wake-up after a minute, so limits on results never show one. Here, the
listener is asked what it would decide now: what was due at the last check, and still is, has waited for no reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from remuda.controlplane.demand import DemandListener
from remuda.controlplane.demand.listener import ListenerService
from remuda.domain.demand import LISTENER_LEASE
from remuda.domain.errors import RemudaError
from remuda.domain.instance import State

if TYPE_CHECKING:
    from simulation.world import SimulatedProcess, World

#: Something that a listener has to do: its kind, and what it is about.
_Work = tuple[str, str]

#: Steps of a plan for single machines.
_STEPS = ("end", "bind", "release", "withdraw", "renew", "fill", "equip")
#: Seconds without a fault after which a listener is prompt again.
PROMPT_AFTER_S = 40.0
#: Seconds by which its readings may be late.
LATE_S = 10.0


class ListenerLiveness:
    def __init__(self, world: World, listeners: Mapping[str, DemandListener]) -> None:
        """`listeners` are those that run, by the names of their processes."""
        self._world = world
        self._listeners = listeners
        #: What was due at the last check, by process.
        self._due: dict[str, set[_Work]] = {}
        self.checks = 0

    def check(self) -> None:
        """Compare what is due with what was due. Called regularly, every few seconds."""
        before, self._due = self._due, {}
        for name, listener in self._listeners.items():
            process, service = self._world.processes[name], listener._service  # noqa: SLF001 - what it would decide
            lease = self._world.database.leases.get(LISTENER_LEASE)
            serves = service is not None and lease is not None and lease.owner == name
            if service is None or not serves or not self._is_prompt(process):
                continue
            self.checks += 1
            due = self._due[name] = set(self._find_due(service))
            for kind, subject in sorted(due & before.get(name, set())):
                self._world.safety.violated("L9", f"{process} has not begun to {kind} {subject}, which is due")

    def _is_prompt(self, process: SimulatedProcess) -> bool:
        return process.runnable and process.last_fault_at < self._world.loop.time() - PROMPT_AFTER_S

    def _find_due(self, service: ListenerService) -> Iterable[_Work]:
        reconciler, table, observer = service._reconciler, service._table, service._observer  # noqa: SLF001
        monotonic, now = service._context.clock.monotonic(), service._context.clock.now()  # noqa: SLF001
        if observer._search_due_in() < -LATE_S:  # noqa: SLF001
            yield "search", "the records"
        for machine in table:
            instance_id = machine.instance.instance_id
            if machine.read_at < monotonic - LATE_S:
                yield "read", f"the report of {instance_id}"
            is_free = not machine.handled and machine.retry_at <= monotonic
            is_releasing = is_free and machine.instance.state is State.RELEASING
            if is_releasing and reconciler._can_advance(service.config(), machine, now):  # noqa: SLF001
                yield "advance", instance_id
        for name, state in service._states().items():  # noqa: SLF001
            try:
                plan = reconciler.decide(state)
            except RemudaError:
                continue
            for kind in _STEPS if state.scale_set_id else _STEPS[:-1]:
                for step in getattr(plan, kind):
                    yield kind, step.machine.instance.instance_id
            if plan.acquire and state.scale_set_id and state.retry_at <= monotonic and not state.acquiring:
                yield "acquire", f"machines for {name}"
