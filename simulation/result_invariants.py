"""Results of commands (R2): what a command returns agrees with the records at a moment while it ran.

A command that goes on with a record which it has read before says what is not so any more. Each statement of a result
must be true of a version of the record that was stored between the start and the end of the command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from remuda.controlplane.operator import ActionOutcome, OperatorAction, OperatorResult
from remuda.controlplane.provision import ProvisionResult
from remuda.controlplane.refresh import RefreshResult
from remuda.controlplane.release import ReleaseOutcome, ReleaseResult, ReleaseStatus
from remuda.controlplane.scale_down import ScaleDownResult
from remuda.domain.instance import Instance, RetireReason, State
from remuda.domain.provision import ProvisionStatus
from remuda.domain.scale_down.decisions import Action
from simulation.invariants import ABSORBING

if TYPE_CHECKING:
    from simulation.world import SimulatedProcess, World

Found = Iterable[tuple[str, str]]

#: States in which a release takes an instance from its run, or has taken it.
_LEAVES = frozenset({State.CREATED, State.CLAIMED, State.RUNNING, State.RELEASING})
#: Seconds in which a release reads a record again that it waits for, with its read and a failed one.
RECHECKED_S = 7.0
#: Seconds without a heartbeat after which an agent counts as dead.
SILENT_S = 15.0


class ResultInvariants:
    def __init__(self, world: World) -> None:
        self._world = world
        self.checks = 0

    def ended(self, process: SimulatedProcess) -> Found:
        """Check the result of a command that has ended by itself."""
        task = process.task
        if process.dead or task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return
        self.checks += 1
        match task.result():
            case ReleaseResult() as result:
                for outcome in result.outcomes:
                    yield from self._release(outcome, process)
            case OperatorResult() as result:
                for item in result.outcomes:
                    yield from self._operator(result.action, item, process)
            case RefreshResult() as result:
                yield from self._refresh(result, process)
            case ScaleDownResult() as result:
                for done in result.outcomes:
                    if done.done and done.decision.action is Action.TERMINATE:
                        instance_id = done.decision.instance_id
                        yield from self._never(instance_id, process, _is_over, "terminated by scale-down")
            case ProvisionResult() as result:
                for acquired in result.instances:
                    yield from self._acquired(acquired.instance, process)

    def _acquired(self, shown: Instance, process: SimulatedProcess) -> Found:
        what = f"{shown.state} at epoch {shown.epoch} until {shown.threshold}"
        yield from self._never(shown.instance_id, process, lambda item: item == shown, what)

    # What was stored

    def _never(
        self, instance_id: str, process: SimulatedProcess, holds: Callable[[Instance], bool], what: str
    ) -> Found:
        """A violation if no version of a record since the start of the process is as said."""
        versions = self._world.versions_since(instance_id, process.reads_since)
        if versions and not any(item is None or holds(item) for item in versions):
            last = versions[-1]
            state = f"{last.state} at epoch {last.epoch}" if last else "gone"
            yield "R2", f"{process} says that {instance_id} is {what}; it was never, and is {state}"

    # Releases

    def _release(self, outcome: ReleaseOutcome, process: SimulatedProcess) -> Found:
        instance_id = outcome.instance_id
        holds: Mapping[ReleaseStatus, Callable[[Instance], bool]] = {
            ReleaseStatus.RELEASED: lambda item: item.state is State.IDLE or not self._is_ours(item, process),
            ReleaseStatus.RETIRED: _is_over,
            ReleaseStatus.EXPIRED: lambda item: (
                item.retire_reason is RetireReason.EXPIRED or self._is_given_up(item, process)
            ),
            ReleaseStatus.SKIPPED: lambda item: (
                item.state not in _LEAVES
                or not self._is_ours(item, process)
                or item.retire_reason is not None
                or self._is_past(item)
            ),
        }
        yield from self._never(instance_id, process, holds[outcome.status], f"{outcome.status.value}: {outcome.why}")
        if outcome.status is ReleaseStatus.EXPIRED:
            yield from self._expired(instance_id, process)

    def _expired(self, instance_id: str, process: SimulatedProcess) -> Found:
        """The record as it was read last is past its time. Another process may have extended it just before."""
        since = self._world.loop.time() - RECHECKED_S - self._delay_s(process)
        recent = self._world.versions_since(instance_id, since)
        if recent and not any(item is None or _is_over(item) or self._is_given_up(item, process) for item in recent):
            yield "R2", f"{process} says that {instance_id} did not finish in time, and it has time left"

    def _is_given_up(self, item: Instance, process: SimulatedProcess) -> bool:
        since = self._world.loop.time() - 2 * SILENT_S - self._delay_s(process)
        return self._is_past(item) or not self._world.safety.waste.is_healthy(item.instance_id, since)

    def _delay_s(self, process: SimulatedProcess) -> float:
        """Seconds by which faults may have delayed what the process has read last."""
        return 0.0 if process.is_undisturbed else self._world.loop.time() - process.started_at

    def _is_ours(self, item: Instance, process: SimulatedProcess) -> bool:
        provision = self._world.database.provisions.by_id(item.provision_id)
        is_released = provision is None or provision.status is ProvisionStatus.RELEASED
        return is_released and (provision is None or process.may_release(provision))

    def _is_past(self, item: Instance) -> bool:
        tolerance = self._world.max_skew + self._world.max_latency + timedelta(seconds=1)
        return item.threshold <= self._world.clock.now() + tolerance

    # Other commands

    def _operator(self, action: OperatorAction, outcome: ActionOutcome, process: SimulatedProcess) -> Found:
        instance_id = outcome.instance_id
        shown = outcome.state, outcome.holder
        yield from self._never(
            instance_id, process, lambda item: (item.state, item.holder) == shown, f"{outcome.state} {outcome.holder}"
        )
        effects: Mapping[OperatorAction, Callable[[Instance], bool]] = {
            OperatorAction.DRAIN: lambda item: item.retire_reason is not None,
            OperatorAction.QUARANTINE: lambda item: item.quarantined_until is not None,
            OperatorAction.TERMINATE: _is_over,
        }
        if outcome.done:
            yield from self._never(instance_id, process, effects[action], f"the object of a {action}")
        else:
            yield from self._never(
                instance_id,
                process,
                lambda item: _is_over(item) or item.retire_reason is not None or self._is_past(item),
                f"not the object of a {action}: {outcome.why}",
            )

    def _refresh(self, result: RefreshResult, process: SimulatedProcess) -> Found:
        said: Iterable[tuple[Iterable[str], Callable[[Instance], bool], str]] = (
            (result.retired, _is_over, "retired"),
            (result.terminated, lambda item: item.state is State.TERMINATED, "terminated"),
            (result.rolled_back, lambda item: item.state not in {State.CLAIMED, State.CREATED}, "rolled back"),
            (result.published, lambda item: item.state is State.IDLE, "in the pool"),
            (result.finished_releases, lambda item: item.state is State.IDLE or _is_over(item), "released"),
        )
        for ids, holds, what in said:
            for instance_id in ids:
                yield from self._never(instance_id, process, holds, what)


def _is_over(item: Instance) -> bool:
    return item.state in ABSORBING
