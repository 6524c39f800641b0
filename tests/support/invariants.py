"""The invariants of the contract (lifecycle, section 6), judged at every write of a record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from remuda.domain.instance import ABSORBING, Instance, RetireReason, State
from remuda.domain.signals import Verdict, registration_verdict, removal_verdict
from remuda.domain.thresholds import expired
from remuda.ports.compute import MachineState
from simulation.memory.github import MemoryJob
from simulation.memory.store import ChangeNotifier

if TYPE_CHECKING:
    from tests.support.world import World


class Law(ChangeNotifier):
    """Sees every write of a record as it happens, and notes what must not be (lifecycle, section 6)."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self._known: dict[str, Instance] = {}
        self.broken: list[str] = []

    def notify(self, key: tuple[type, str]) -> None:
        if key[0] is Instance:
            after = self._world.database.instances.get(key[1])
            before = self._known.get(key[1])
            if after is not None:
                self._known[key[1]] = after
                self.broken += [f"{key[1]}: {what}" for what in self._judge(before, after)]
        super().notify(key)

    def job_starts(self, job: MemoryJob, instance_id: str) -> None:
        record = self._world.database.instances[instance_id]
        if record.state not in {State.RUNNING, State.RELEASING} or job.run_id not in {
            record.run_id,
            record.last_run_id,
        }:
            self.broken.append(f"S2: job of run {job.run_id} on {instance_id}, {record.state} for {record.run_id!r}")

    def _judge(self, before: Instance | None, after: Instance) -> Iterator[str]:
        world = self._world
        if before is None:
            return
        if before.state is State.TERMINATED or (before.state is State.TERMINATING and after.state not in ABSORBING):
            yield f"S5: {before.state} became {after.state}"
        claimed = (before.state, after.state) == (State.IDLE, State.CLAIMED)
        if after.epoch != before.epoch + claimed or (after.owner != before.owner and not claimed):
            yield f"S1: epoch {before.epoch} to {after.epoch}, owner {before.owner} to {after.owner}"
        if after.state is State.IDLE and before.state is State.RELEASING:
            yield from self._judge_clean(after)
        ordered = after.retire_reason is RetireReason.TERMINATED_BY_OPERATOR
        if after.state is State.TERMINATING and before.state in {State.RUNNING, State.RELEASING} and not ordered:
            yield from self._judge_end(before)
        if after.state is State.TERMINATED and world.cloud.state(after.instance_id) not in {
            None,
            MachineState.TERMINATED,
        }:
            yield "S9: terminated, and the machine is not"

    def _judge_clean(self, record: Instance) -> Iterator[str]:
        host = self._world.hosts[record.instance_id]
        online = [item.name for item in self._world.registrations(record.instance_id) if item.take is not None]
        if online or host.dirty or host.state().listening or host.state().configured_as:
            yield f"S3: idle with {online or host.state()}, dirty: {host.dirty}"
        if removal_verdict(self._world.database.reports.get(record.instance_id), record.epoch) is not Verdict.OK:
            yield "S4: idle without the OK of this epoch"

    def _judge_end(self, before: Instance) -> Iterator[str]:
        """S6: nobody ends a run or a release before its time."""
        world = self._world
        report = world.database.reports.get(before.instance_id)
        verdicts = {removal_verdict(report, before.epoch)}
        if before.state is State.RUNNING:
            verdicts = {registration_verdict(report, before.epoch)} - {Verdict.OK}
        late = expired(before.threshold, now=world.clock.now(), margin_s=world.lifetimes.margin_s)
        gone = not world.cloud.is_alive(before.instance_id)
        if not late and not gone and not verdicts & {Verdict.FAILED, Verdict.OK}:
            yield f"S6: {before.state} ended at {world.clock.now()}, threshold {before.threshold}, {report}"
