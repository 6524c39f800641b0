"""Liveness invariants (L1 to L5), checked after each sweep once the faults have ended."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from remuda.controlplane.refresh.ended_runs import CHECK_INTERVAL_S
from remuda.domain.instance import State
from remuda.domain.provision import ProvisionStatus
from remuda.ports.compute import POOL_TAG
from simulation.invariants import ABSORBING, SCOPE, parse_runner
from simulation.loop import START

if TYPE_CHECKING:
    from remuda.domain.instance import Instance
    from simulation.world import World

#: Default seconds between two sweeps, and of a sweep itself.
SWEEP_S = 65.0
SWEEP_DURATION_S = 15.0
HELD = frozenset({State.CREATED, State.CLAIMED, State.RUNNING})


class LivenessInvariants:
    def __init__(self, world: World, *, sweep_s: float = SWEEP_S, sweep_duration_s: float = SWEEP_DURATION_S) -> None:
        self._world = world
        self._sweep_s = sweep_s
        self._sweep_duration_s = sweep_duration_s
        #: When faults ended and regular sweeps began.
        self._quiet_at = world.clock.now()
        #: When each stale registration was first seen.
        self._stale: dict[int, datetime] = {}
        #: Last check at which some repository's runs could not be read.
        self._unreadable_at = self._quiet_at
        self.checks = 0

    def swept(self) -> None:
        """Check everything after a sweep."""
        for invariant, text, instance_id in (
            *self._overdue(),
            *self._unrecorded(),
            *self._stale_registrations(),
            *self._messages(),
            *self._provisions(),
            *self._ended_runs(),
        ):
            self._world.safety.violated(invariant, text, instance_id)

    def is_at_rest(self) -> bool:
        """Whether nothing of the world is left."""
        world = self._world
        return (
            all(record.state is State.TERMINATED for record in world.database.instances.values())
            and not any(machine.alive for machine in world.machines.values())
            and not world.registrations()
            and all(item.settled for item in world.database.provisions.values())
            and all(
                process.dead or process.ended.done() for process in world.processes.values() if process.kind != "agent"
            )
        )

    def describe_rest(self) -> str:
        world = self._world
        records = [
            f"{key} {item.state}" for key, item in world.database.instances.items() if item.state not in ABSORBING
        ]
        stuck = [
            process.name for process in world.processes.values() if process.kind != "agent" and not process.ended.done()
        ]
        open_ones = [item.provision_id for item in world.database.provisions.values() if not item.settled]
        return (
            f"records {records}, commands {stuck}, provisions {open_ones}, {len(world.registrations())} registrations"
        )

    def _overdue(self) -> Iterable[tuple[str, str, str]]:
        world = self._world
        now = world.clock.now()
        # The first sweep after the threshold ends the instance, the second one confirms it.
        first = timedelta(seconds=self._sweep_s + self._sweep_duration_s + world.lifetimes.margin_s)
        second = (
            timedelta(seconds=2 * (self._sweep_s + self._sweep_duration_s)) + world.max_skew + world.cloud.shutting_down
        )
        missing = timedelta(seconds=world.lifetimes.missing_after_s + self._sweep_s)
        for record in world.database.instances.values():
            self.checks += 1
            if record.state is State.TERMINATED:
                continue
            patience = second if record.state is State.TERMINATING else first
            # A machine that EC2 no longer lists must be missing twice.
            if world.cloud.state(record.instance_id) is None:
                patience += missing
            since = record.threshold
            if record.state in {State.CREATED, State.TERMINATING}:
                # A process that was paused past its deadline may still launch: that instance expires at its creation.
                # One that was paused between its decision and its write ends an instance with the time of the decision.
                since = max(since, START + timedelta(seconds=world.safety.written_at(record.instance_id)))
            if now > self._since(since) + patience:
                yield "L1", f"{record.instance_id} is {record.state} long after its threshold", record.instance_id

    def _unrecorded(self) -> Iterable[tuple[str, str, str]]:
        world = self._world
        grace = timedelta(seconds=world.lifetimes.unrecorded_grace_s + 2 * self._sweep_s)
        for instance_id, machine in world.cloud.machines.items():
            self.checks += 1
            if machine.tags.get(POOL_TAG) != world.pool_name or instance_id in world.database.instances:
                continue
            if world.cloud.is_alive(instance_id) and world.clock.now() > self._since(machine.launched_at) + grace:
                yield "L2", f"{instance_id} has no record", instance_id

    def _stale_registrations(self) -> Iterable[tuple[str, str, str]]:
        world = self._world
        now = world.clock.now()
        for runner in world.registrations():
            self.checks += 1
            parsed = parse_runner(runner.name)
            record = world.database.instances.get(parsed[1]) if parsed else None
            # The registration of an unrecorded machine is stale only once the machine has a tombstone.
            is_unrecorded = parsed is not None and record is None and world.cloud.is_alive(parsed[1])
            if parsed is None or is_unrecorded or runner.job is not None or not _is_stale(parsed[0], record):
                self._stale.pop(runner.runner_id, None)
                continue
            since = self._stale.setdefault(runner.runner_id, now)
            grace_s = (
                world.most("registration_stale_after_s") + world.max_skew.total_seconds() if record is None else 0.0
            )
            if now > since + timedelta(seconds=2 * self._sweep_s + self._sweep_duration_s + grace_s):
                yield "L3", f"{runner.name} is stale and still registered", parsed[1]

    def _messages(self) -> Iterable[tuple[str, str, str]]:
        world = self._world
        now = world.clock.now()
        patience = (
            timedelta(seconds=world.lifetimes.republish_s + self._sweep_s + self._sweep_duration_s) + world.max_skew
        )
        for record in world.database.instances.values():
            if record.state is not State.IDLE or record.retire_reason:
                continue
            if record.threshold < now + timedelta(seconds=world.lifetimes.margin_s):
                continue
            self.checks += 1
            queued = [item.message for item in world.queues.named(record.resource_class).messages]
            since = START + timedelta(seconds=world.safety.written_at(record.instance_id))
            if record.message() not in queued and now > self._since(since) + patience:
                yield "L4", f"{record.instance_id} is idle without a pool message", record.instance_id

    def _provisions(self) -> Iterable[tuple[str, str, str]]:
        world = self._world
        now = world.clock.now()
        sweeps = (
            timedelta(seconds=2 * (self._sweep_s + self._sweep_duration_s) + world.lifetimes.margin_s) + world.max_skew
        )
        for provision in world.database.provisions.values():
            self.checks += 1
            if provision.status is not ProvisionStatus.RELEASED:
                written_at = START + timedelta(seconds=world.safety.intended_at(provision.provision_id))
                if now > self._since(max(provision.deadline, written_at)) + sweeps:
                    yield "L5", f"{provision.provision_id} is {provision.status} long after its deadline", ""
                continue
            if provision.runner_set:
                # A set holds its machines by their own records, which other rules judge.
                continue
            written_at = START + timedelta(seconds=world.safety.released_at(provision.provision_id))
            released_at = max(provision.released_at or provision.deadline, written_at)
            if now <= self._since(released_at) + sweeps:
                continue
            for record in world.database.instances.values():
                if record.provision_id == provision.provision_id and record.state in HELD:
                    yield (
                        "L5",
                        f"{provision.provision_id} is released and holds {record.instance_id}",
                        record.instance_id,
                    )

    def _ended_runs(self) -> Iterable[tuple[str, str, str]]:
        """The first sweep after the end records it, the first one after the grace period releases the run."""
        world = self._world
        patience_s = world.most("ended_run_grace_s") + CHECK_INTERVAL_S + 2 * (self._sweep_s + self._sweep_duration_s)
        # A repository whose runs could not be read is asked about again later: the time of both sweeps begins then.
        if world.database.sweep.unreadable:
            self._unreadable_at = world.clock.now()
            return
        for provision in world.database.provisions.values():
            key = provision.repository.lower(), int(provision.run_id) if provision.run_id.isdecimal() else 0
            run, ended_at = world.github.runs.get(key), world.github.ended_at.get(provision.run_id)
            if run is None or ended_at is None or provision.status is not ProvisionStatus.COMMITTED:
                continue
            self.checks += 1
            since = max(self._since(START + timedelta(seconds=ended_at)), self._unreadable_at)
            late = world.clock.now() - since > timedelta(seconds=patience_s) + world.max_skew
            if run.has_ended and key[0] == SCOPE and late and self._holds(provision.provision_id):
                yield "L8", f"run {provision.run_id} has ended, and {provision.provision_id} holds its instances", ""

    def _holds(self, provision_id: str) -> bool:
        records = self._world.database.instances.values()
        return any(item.provision_id == provision_id and item.state in HELD for item in records)

    def _since(self, at: datetime) -> datetime:
        return max(at, self._quiet_at)


def _is_stale(epoch: int, record: Instance | None) -> bool:
    if record is None or record.state in ABSORBING:
        return True
    return epoch < record.epoch or (epoch == record.epoch and record.state is State.IDLE)
