"""Waste is a violation (W1 to W6): machines, claims and messages that are given up or withheld without a reason.

A process is prompt if no fault affected it. Rules about what a process must have seen apply to prompt ones, and to the
others where a fault cannot be the reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING

from remuda.domain.errors import UserError
from remuda.domain.instance import HistoryEntry, Instance, RetireReason, State
from remuda.domain.provision import Provision, ProvisionStatus
from remuda.domain.resources import PoolMessage, Reuse, Tier
from remuda.domain.signals import Report, Signal
from remuda.ports.compute import LaunchRequest
from simulation.faults import Fault
from simulation.loop import START
from simulation.threshold_invariants import PROMPT_S, PolicyHistory

if TYPE_CHECKING:
    from simulation.fake_machine import FakeMachine
    from simulation.world import SimulatedProcess, World

Found = Iterable[tuple[str, str]]

#: Seconds within which an agent finishes a release whose job is over, unless a fault affects it.
RELEASE_WORK_S = 60.0
#: Seconds after which the heartbeat of an agent that was paused is fresh again.
HEARTBEAT_S = 10.0
#: Seconds that a claimed machine has to register.
REGISTRATION_S = 60.0
#: Faults by which a search misses records.
_SEARCH_FAULTS = frozenset({Fault.STALE_INDEX, Fault.SHORT_PAGES})
#: Seconds that must be left of an idle instance's time, besides the margin, for a claim to be certain.
CLAIM_S = 5.0


class WasteInvariants:
    def __init__(self, world: World, policies: PolicyHistory) -> None:
        self._world = world
        self._policies = policies
        #: When each record was written first, and when each instance entered its state.
        self._recorded_at: dict[str, float] = {}
        self._entered_at: dict[str, float] = {}
        self._epoch_began_at: dict[tuple[str, int], float] = {}
        #: Number of live instances after each change of it.
        self._live: list[tuple[float, int]] = [(-1e9, 0)]
        #: When a report first had a spot notice.
        self._noticed_at: dict[str, float] = {}
        #: Reasons to retire each instance that its record has had.
        self._reasons: dict[str, set[RetireReason]] = {}
        #: The process that released each provision.
        self._released_by: dict[str, SimulatedProcess] = {}

    # Facts

    @staticmethod
    def _is_prompt(process: SimulatedProcess) -> bool:
        return process.task is not None and process.is_undisturbed

    def is_healthy(self, instance_id: str, since: float) -> bool:
        """Whether the machine and its agent run, and no fault has affected them since a time."""
        machine = self._world.machines.get(instance_id)
        if machine is None or not machine.alive or not machine.has_agent:
            return False
        affected_at = self._world.faults.affected_at.get(instance_id, -1e9)
        return max(affected_at, self._world.disturbed_at(machine)) < since

    def entered_at(self, instance_id: str) -> float:
        """When the instance entered its state."""
        return self._entered_at.get(instance_id, -1e9)

    def epoch_began_at(self, instance_id: str, epoch: int) -> float:
        return self._epoch_began_at.get((instance_id, epoch), -1e9)

    def _is_live(self, record: Instance) -> bool:
        return record.state is not State.TERMINATED

    # Writes

    def record_written(
        self, before: Instance | None, after: Instance, entry: HistoryEntry, process: SimulatedProcess
    ) -> Found:
        now = self._world.loop.time()
        entered_at = self._entered_at.get(after.instance_id, now)
        self._epoch_began_at.setdefault((after.instance_id, after.epoch), now)
        change = (after.state is not State.TERMINATED) - (before is not None and before.state is not State.TERMINATED)
        if change:
            self._live.append((now, self._live[-1][1] + change))
        if before is None:
            self._recorded_at[after.instance_id] = now
        if before is None or (before.state, before.epoch) != (after.state, after.epoch):
            self._entered_at[after.instance_id] = now
        if after.state in {State.CREATED, State.CLAIMED}:
            process.held.add(after.instance_id)
        if before is None:
            return
        if before.retire_reason is not None:
            self._reasons.setdefault(after.instance_id, set()).add(before.retire_reason)
        if after.state is State.TERMINATING and before.state is not State.TERMINATING:
            yield from self._ended(before, entry, process, entered_at)
        if after.state is State.IDLE and before.state is not State.IDLE:
            yield from self._pooled(after, entry, process)

    def _ended(self, before: Instance, entry: HistoryEntry, process: SimulatedProcess, entered_at: float) -> Found:
        reason, healthy = entry.retire_reason, self.is_healthy(before.instance_id, entered_at)
        if reason is RetireReason.GONE and self._world.cloud.is_alive(before.instance_id):
            yield "W1", f"{process} ended it as gone, but it runs"
        elif reason is RetireReason.TIMED_OUT and self.is_healthy(before.instance_id, entered_at - HEARTBEAT_S):
            # A process that cannot read reports gives up after a while, not at once.
            is_early = self._world.loop.time() - entered_at < REGISTRATION_S
            if is_early or process.last_fault_at < entered_at:
                yield "W2", f"{process} gave up a healthy {before.state} machine"
        elif reason is RetireReason.EXPIRED and before.state is State.RELEASING and healthy:
            yield from self._release_expired(before)
        elif reason not in _CHECKED_ELSEWHERE and not self._holds(before, entry, process):
            yield "W1", f"{process} ended it: {reason}, which is not so"

    def _release_expired(self, before: Instance) -> Found:
        """A healthy machine without a job ends its release long before the threshold."""
        machine = self._world.machines[before.instance_id]
        report = self._world.database.reports.get(before.instance_id)
        is_reset = report is not None and report.signal is Signal.UD_REMOVE_REG_REMOVE_RUN_OK
        ended_at = max(machine.job_ended_at, self._entered_at[before.instance_id])
        if machine.job is None and not is_reset and self._world.loop.time() - ended_at > RELEASE_WORK_S:
            yield "W1", "the release of a healthy machine expired"

    def _holds(self, before: Instance, entry: HistoryEntry, process: SimulatedProcess) -> bool:
        """Whether a reason to retire an instance is true."""
        reason = entry.retire_reason
        if reason in self._reasons.get(before.instance_id, ()):
            # Checked when it was recorded. A quarantine that is over by now may have replaced it.
            return True
        policies = self._policies.may_have_read(process)
        uses = before.uses + (before.state is State.RELEASING)
        age_s = (entry.at - before.created_at).total_seconds()
        machine = self._world.machines.get(before.instance_id)
        return (
            {
                RetireReason.SPOT_NOTICE: machine is not None and bool(machine.notice),
                RetireReason.TOO_OLD: any(age_s >= config.lifetimes.max_age_s for config in policies),
                RetireReason.USED_UP: any(uses >= config.lifetimes.max_uses for config in policies),
                RetireReason.NEVER_REUSED: any(config.reuse is Reuse.NEVER for config in policies),
                RetireReason.OUTDATED: any(config.runner_version != before.runner_version for config in policies),
            }.get(reason, False)
            if reason is not None
            else False
        )

    def _pooled(self, after: Instance, entry: HistoryEntry, process: SimulatedProcess) -> Found:
        if after.retire_reason is not None:
            # It is in quarantine.
            return
        policies = [config.lifetimes for config in self._policies.may_have_read(process)]
        if policies and not any(after.uses < limits.max_uses for limits in policies):
            yield "W4", f"pooled after {after.uses} uses"
        age_s = (entry.at - after.created_at).total_seconds() - PROMPT_S
        if policies and self._is_prompt(process) and not any(age_s < limits.max_age_s for limits in policies):
            yield "W4", f"pooled at the age of {age_s:.0f} s"
        noticed_at = self._noticed_at.get(after.instance_id, 1e9)
        read_at = self._world.loop.time() - PROMPT_S if self._is_prompt(process) else process.started_at
        if noticed_at < max(read_at, process.started_at) and entry.transition == "pool":
            yield "W5", "pooled although its report has a spot notice"

    def report_written(self, before: Report | None, after: Report) -> None:
        if after.notice and not (before and before.notice):
            self._noticed_at[after.instance_id] = self._world.loop.time()

    def signal_sent(self, machine: FakeMachine, epoch: int, signal: Signal) -> Found:
        """A signal of a failure needs a step that failed in its epoch, or an agent that was disturbed meanwhile."""
        since = self._epoch_began_at.get((machine.instance_id, epoch), -1e9)
        failed = machine.script_failed if signal is Signal.UD_FAILED else machine.step_failed_at >= since
        if signal.failed and not failed and self._world.disturbed_at(machine) < since:
            yield "W1", f"{machine.instance_id} signals {signal} of epoch {epoch}, and nothing has failed"

    # Launches

    def launch_requested(self, request: LaunchRequest, process: SimulatedProcess) -> Found:
        now = self._world.loop.time()
        policies = self._policies.may_have_read(process)
        if not self._is_prompt(process) or not policies:
            return
        live = [
            record
            for record in self._world.database.instances.values()
            if self._is_live(record) and self._recorded_at[record.instance_id] < now - PROMPT_S
        ]
        limit = max(config.max_instances for config in policies)
        if len(live) + request.count > limit:
            yield "W4", f"{process} launches {request.count} machines besides {len(live)}, and the maximum is {limit}"
        if process.request is None or process.request.ephemeral:
            return
        for item in self._world.queues.named(request.request.resource_class.name).messages:
            visible_since = (item.visible_at - START).total_seconds()
            if item.message is None or visible_since > process.started_at:
                continue
            if all(self._can_claim(item.message, process, config.reuse) for config in policies):
                yield "W3", f"{process} launches a machine although {item.message.id} is idle and fits"

    def _can_claim(self, message: PoolMessage, process: SimulatedProcess, reuse: Reuse) -> bool:
        request = process.request
        record = self._world.database.instances.get(message.id)
        if record is None or request is None or record.message() != message:
            return False
        left = record.threshold - self._world.clock.now() - self._world.max_skew - self._world.safety.margin
        is_free = record.state is State.IDLE and record.retire_reason is None and left > timedelta(seconds=CLAIM_S)
        lower = reuse is Reuse.ALWAYS and request.tier is Tier.UNTRUSTED
        return (
            is_free
            and record.usage_class is request.usage_class
            and (record.tier is request.tier or lower)
            and reuse is not Reuse.NEVER
            and (reuse is not Reuse.SAME_REPO or record.repository == request.repository.lower())
        )

    # Provisions and processes

    def provision_changed(self, provision: Provision, process: SimulatedProcess) -> Found:
        """A new machine is committed only if there are fewer than the maximum before it."""
        if provision.status is ProvisionStatus.RELEASED:
            self._released_by.setdefault(provision.provision_id, process)
            return
        policies = self._policies.may_have_read(process)
        if not policies or _SEARCH_FAULTS.intersection(process.faults):
            return
        limit = max(config.max_instances for config in policies)
        records = self._world.database.instances
        for ours in (records[key] for key in provision.instance_ids if key in records and records[key].epoch == 1):
            older = [
                item
                for item in records.values()
                if self._is_live(item)
                and item.created_at < ours.created_at
                and self._recorded_at[item.instance_id] < self._recorded_at[ours.instance_id]
            ]
            if len(older) >= limit:
                yield "W4", f"{ours.instance_id} was committed besides {len(older)} older ones; the maximum is {limit}"

    def process_ended(self, process: SimulatedProcess) -> Found:
        task = process.task
        if process.dead or task is None or not task.done() or not self._is_prompt(process):
            return
        yield from self._hidden(process)
        error = None if task.cancelled() else task.exception()
        if process.kind == "provision" and error is not None and not self._may_fail(process, error):
            yield "W2", f"{process} failed without a fault: {error}"

    def _hidden(self, process: SimulatedProcess) -> Found:
        now = self._world.clock.now()
        for name in self._world.queues.names:
            for item in self._world.queues.named(name).messages:
                if item.receipt not in process.receipts or item.visible_at <= now or item.message is None:
                    continue
                record = self._world.database.instances.get(item.message.id)
                if record is not None and record.state is State.IDLE and record.message() == item.message:
                    yield "W6", f"{process} ended and leaves the message about {item.message.id} hidden"

    def _may_fail(self, process: SimulatedProcess, error: BaseException) -> bool:
        """Whether a provision has a reason to fail although no fault affected it."""
        world, request = self._world, process.request
        policies = self._policies.may_have_read(process)
        if any(self._released_by.get(key, process) is not process for key in process.provisions):
            return True
        if any(not self.is_healthy(key, process.started_at - HEARTBEAT_S) for key in process.held):
            return True
        before = next(live for at, live in reversed(self._live) if at <= process.started_at)
        most = max([before, *(live for at, live in self._live if at > process.started_at)])
        count = request.count if request is not None else 0
        if any(most + count > config.max_instances for config in policies):
            return True
        soon = world.clock.now() + timedelta(seconds=process.skew_s + PROMPT_S)
        return isinstance(error, UserError) and any(
            tokens.registration.expires_at < soon + timedelta(seconds=config.lifetimes.provision_timeout_s)
            for config in policies
            for tokens in config.tokens
        )


#: Reasons that other rules check: the threshold, the signal, the provision, the machine, or an order.
_CHECKED_ELSEWHERE = frozenset(
    {
        RetireReason.EXPIRED,
        RetireReason.FAILED,
        RetireReason.TIMED_OUT,
        RetireReason.RELEASED,
        RetireReason.GONE,
        RetireReason.TERMINATED_BY_OPERATOR,
    }
)
