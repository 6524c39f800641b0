"""Ownership of fields (S17): a write changes only what its operation may change.

A process that writes back what it read before the write of another one undoes that write. Conditions of writes cover
the fields that decide; here, every field of every record has operations that may change it, and every other change is a
violation. What a write takes over from the record must be what the record says at that moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from remuda.domain.demand import DemandRecord, JobRecord
from remuda.domain.instance import HistoryEntry, Instance, State
from remuda.domain.pool_config import PoolConfig, ScopeTokens
from remuda.domain.provision import Provision, ProvisionStatus
from simulation.faults import Fault

if TYPE_CHECKING:
    from simulation.world import SimulatedProcess, World

Found = Iterable[tuple[str, str]]

_HOLDER = {"holder", "last_holder"}
_RETIREMENT = {"retire_reason", "retire_detail"}
_STEP_INPUT = {"assignment.credential", "assignment.jit_config"}
_TRUST = {"tier", "repository"}
_END = {"state", *_HOLDER, "assignment", "announced_at", *_RETIREMENT, "threshold"}
#: Fields of an instance that each row of the transition table may change.
OWNED_BY_ROW: Mapping[str, set[str]] = {
    "claim": {"state", "epoch", *_TRUST, *_HOLDER, "claim", "scope", "threshold"}
    | {"assignment", "announced_at", "run_deadline"},
    "commit": {"state", "threshold", *_STEP_INPUT},
    "equip": {"state", "threshold", "run_deadline", *_STEP_INPUT}
    | {"assignment.runner_id", "assignment.any_run", "assignment.only_trusted"},
    "bind": {"holder", *_TRUST, "threshold", "run_deadline", *_RETIREMENT, *_STEP_INPUT}
    | {f"assignment.{name}" for name in _TRUST},
    "listen-on": {"threshold", "run_deadline", *_STEP_INPUT},
    "fill": {"state", *_HOLDER, "assignment", "announced_at", "threshold"},
    "release": {"state", *_HOLDER, "run_deadline", "threshold", "assignment.runner_id", *_STEP_INPUT},
    "extend": {"threshold"},
    "credential": _STEP_INPUT,
    "pool": {"state", "assignment", "announced_at", "run_deadline", "uses", "threshold"},
    "announce": {"announced_at"},
    "renew": {"threshold"},
    "retire": _RETIREMENT,
    "quarantine": {*_RETIREMENT, "quarantined_until", "threshold"},
    **{f"end-{source}": _END for source in State},
    "confirm": {"state", "forget_at"},
}
_RELEASED = {"status", "ending", "released_at", "deadline", "why", "outcome"}
_SETTLED = {"settled", "lost_ids", "forget_at"}
#: Fields of a provision that a change of its status may change. That of a set is settled when it is closed.
_OF_STATUS: Mapping[tuple[ProvisionStatus, ProvisionStatus], set[str]] = {
    (ProvisionStatus.OPEN, ProvisionStatus.COMMITTED): {"status", "instance_ids", "deadline", "why", "outcome"},
    (ProvisionStatus.OPEN, ProvisionStatus.RELEASED): {*_RELEASED, *_SETTLED},
    (ProvisionStatus.COMMITTED, ProvisionStatus.RELEASED): {*_RELEASED, *_SETTLED},
    # A provision whose run was released meanwhile adds its outcome.
    (ProvisionStatus.RELEASED, ProvisionStatus.RELEASED): {*_SETTLED, "outcome"},
}
#: Fields of the configuration that a process may change without a new configuration, and those that no user gives.
_OF_SWEEP = {"revision", "applied_at", "tokens", "spending"}
_DERIVED = {*_OF_SWEEP, "runner", "launch", "lifetimes"}
#: What messages say about a job. A message that comes later adds to it.
_OF_MESSAGES = ("run_id", "repository", "queued_at", "assigned_at", "started_at", "completed_at", "result")
#: Faults by which a message about an old job comes when its record is not expected, or an old write is applied late.
_CONFUSING = frozenset({Fault.EVENT_LATE, Fault.EVENT_TWICE, Fault.EVENT_LOST, Fault.WRITE_UNSURE})


class Ownership:
    def __init__(self, world: World) -> None:
        self._world = world
        #: The process that wrote each set's record and each job last; None if that is not certain.
        self._writers: dict[tuple[str, str], SimulatedProcess | None] = {}
        #: The process by whose clock the counts of each set were told.
        self._counted_by: dict[str, SimulatedProcess] = {}
        self._queues_read_by: dict[str, dict[str, SimulatedProcess]] = {}
        self.checks = 0

    # Instances and provisions

    def instance_written(self, before: Instance | None, after: Instance, entry: HistoryEntry) -> Found:
        row = entry.transition
        if before is None or row not in OWNED_BY_ROW:
            return
        self.checks += 1
        if foreign := changed_fields(before, after) - OWNED_BY_ROW[row]:
            yield "S17", f"{row} changed {_describe(before, after, foreign)}"
        if row in {"release", "fill"}:
            expected = before.holder
        elif row.startswith("end-"):
            expected = before.latest_holder
        else:
            return
        if after.holder is not None or after.last_holder != expected:
            yield "S17", f"{row} of an instance of {expected} says that the last holder was {after.last_holder}"

    def provision_written(self, before: Provision, after: Provision) -> Found:
        self.checks += 1
        change = before.status, after.status
        if foreign := changed_fields(before, after) - _OF_STATUS.get(change, set()):
            yield "S17", f"from {before.status} to {after.status} changed {_describe(before, after, foreign)}"
        # A provision that is cancelled with its commit rolls back what was committed.
        may_fail = change == (ProvisionStatus.COMMITTED, ProvisionStatus.RELEASED) and after.outcome is not None
        if before.outcome is not None and after.outcome != before.outcome and not may_fail:
            yield "S17", "its outcome was replaced"

    # The configuration

    def configured(self, before: PoolConfig | None, after: PoolConfig, process: SimulatedProcess) -> Found:
        """A sweep changes no configuration; a refresh sets what it was given, and nothing becomes older."""
        if before is None:
            return
        self.checks += 1
        changed = changed_fields(before, after) - _OF_SWEEP
        if process.desired is None and process.task is not None and changed:
            yield "S17", f"{process} without a configuration changed {_describe(before, after, changed)}"
        if process.desired is not None:
            given = {name for name in changed - _DERIVED if getattr(after, name) != getattr(process.desired, name)}
            if given:
                yield "S17", f"{process} was not given {_describe(before, after, given)}"
        for tokens in before.tokens:
            found = after.find_tokens(tokens.scope)
            is_same = found is not None and found.runner_group == tokens.runner_group
            if found is None or (is_same and _expires_at(found) < _expires_at(tokens)):
                yield "S17", f"{process} replaced the tokens of {tokens.scope} by older ones"

    # Runner sets

    def demand_written(self, before: DemandRecord | None, after: DemandRecord, process: SimulatedProcess) -> Found:
        """The record of a set, as the process that wrote it last changes it."""
        is_next = self._is_next("set", after.runner_set, process)
        counted_by = self._counted_by.get(after.runner_set)
        if before is None or before.counted_at != after.counted_at:
            self._counted_by[after.runner_set] = process
        queues_read_by = self._note_queues(before, after, process)
        if before is None or not is_next:
            return
        self.checks += 1
        if before.has_created and not after.has_created:
            yield "S17", f"{process} forgets that it has created set {after.runner_set}"
        same_session = bool(after.session_id) and after.session_id == before.session_id
        if same_session and after.last_message_id < before.last_message_id:
            yield "S17", f"message {before.last_message_id} was the last one, then {after.last_message_id}"
        if after.scale_set_id < before.scale_set_id:
            yield "S17", f"scale set {before.scale_set_id} became the earlier one {after.scale_set_id}"
        is_older = before.counted_at and (after.counted_at is None or after.counted_at < before.counted_at)
        if is_older and counted_by is process:
            yield "S17", f"the counts of {before.counted_at} became those of {after.counted_at}"
        # Two counts may come in the same millisecond.
        is_recent = after.counted_at is not None and self._is_recent(after.counted_at, process)
        if after.counted_at == before.counted_at and after.statistics != before.statistics and not is_recent:
            yield "S17", f"{before.statistics} became {after.statistics} without a new count"
        read_at = {queue.repository: queue.read_at for queue in before.queues}
        for queue in after.queues:
            is_own = queues_read_by.get(queue.repository) is process
            if is_own and queue.read_at < read_at.get(queue.repository, queue.read_at):
                yield "S17", f"the queue of {queue.repository} became that of {queue.read_at}"
        if (after.failing_since is None) is bool(after.error or after.shortage):
            yield "S17", f"set {after.runner_set} fails since {after.failing_since}: {after.error or after.shortage!r}"

    def _is_recent(self, at: datetime, process: SimulatedProcess) -> bool:
        """Whether it was a second ago at most, by the true time or by the clock of the process."""
        now = self._world.clock.now()
        return any(abs(now + timedelta(seconds=skew_s) - at) <= timedelta(seconds=1) for skew_s in (0, process.skew_s))

    def _note_queues(
        self, before: DemandRecord | None, after: DemandRecord, process: SimulatedProcess
    ) -> dict[str, SimulatedProcess]:
        """Return who had read each queue before this write: another process may have another time."""
        read_by = dict(self._queues_read_by.get(after.runner_set, {}))
        known = {queue.repository: queue.read_at for queue in before.queues} if before else {}
        changed = {item.repository: process for item in after.queues if known.get(item.repository) != item.read_at}
        self._queues_read_by[after.runner_set] = read_by | changed
        return read_by

    def job_written(self, before: JobRecord | None, after: JobRecord, process: SimulatedProcess) -> Found:
        """What a process has written about a job, it does not take back."""
        is_next = self._is_next("job", after.job_id, process)
        if before is None or not is_next or not _CONFUSING.isdisjoint(self._world.faults.counts):
            return
        self.checks += 1
        for name in _OF_MESSAGES:
            known = getattr(before, name)
            if known and not getattr(after, name):
                yield "S17", f"{process} forgets that {name} of job {after.job_id} is {known}"

    def _is_next(self, kind: str, name: str, process: SimulatedProcess) -> bool:
        """Whether the process wrote this record last, too. A write that was delayed counts for nobody."""
        is_known = process.task is not None and self._world.delayed_writer is None
        before, self._writers[kind, name] = self._writers.get((kind, name)), process if is_known else None
        return is_known and before is process


def changed_fields(before: Any, after: Any) -> set[str]:
    """Names of the fields that differ; of those of an assignment that both records have, with a prefix."""
    found = {item.name for item in fields(before) if getattr(before, item.name) != getattr(after, item.name)}
    if "assignment" in found and before.assignment is not None and after.assignment is not None:
        inner = changed_fields(before.assignment, after.assignment)
        if before.epoch == after.epoch:
            found = found - {"assignment"} | {f"assignment.{name}" for name in inner}
    return found


def _describe(before: Any, after: Any, names: Iterable[str]) -> str:
    return ", ".join(f"{name} from {_value(before, name)!r} to {_value(after, name)!r}" for name in sorted(names))


def _value(record: Any, name: str) -> object:
    for part in name.split("."):
        record = getattr(record, part)
    return record


def _expires_at(tokens: ScopeTokens) -> datetime:
    return min(tokens.registration.expires_at, tokens.removal.expires_at)
