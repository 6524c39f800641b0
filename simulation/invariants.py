"""The invariants, the names of the simulated pool, and the rules that simulation, unit tests and search share.

The checks use no decision of the control plane, not even its parser of runner names, so that a bug there does not hide
itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from remuda.domain.instance import Instance, RetireReason, State
from remuda.domain.resources import Reuse, Tier
from remuda.domain.runner_set import RunnerSet
from simulation.memory.github import MemoryDemandJob

if TYPE_CHECKING:
    from simulation.threshold_invariants import PolicyHistory
    from simulation.world import SimulatedProcess

POOL = "test"
SCOPE = "octo/repo"
#: Repositories that workflow runs belong to.
REPOSITORIES = ("octo/repo", "octo/other", "octo/third")
#: Runners of other pools whose names begin like this pool's.
FOREIGN_RUNNERS = ("remuda-test-2-1-i-00000000000000001", "remuda-testing-1-i-00000000000000001")
_OURS = re.compile(rf"remuda-{POOL}-([1-9][0-9]*)-(i-[0-9a-f]{{8,17}})")

INVARIANTS: Mapping[str, str] = {
    "S1": "at most one provision owns an instance",
    "S2": "a job runs only on an instance whose current or last assignment is its run, or the set that GitHub assigned "
    "it to, never on an idle one",
    "S3": "an idle instance has no listener and no online registration, and its machine is reset",
    "S4": "a signal counts only for its epoch and step; it and every heartbeat are true when they are sent",
    "S5": "an instance never leaves terminating and terminated",
    "S6": "no machine, job or registration in use is ended before its time",
    "S7": "only machines with this pool's tags and runners with its names are removed",
    "S8": "the intent is recorded before a machine is launched",
    "S9": "an instance is terminated only after EC2 confirmed it",
    "S10": "every operation can be interrupted at any await and finished by another process; none fails unexpectedly",
    "S11": "the trust tier of an instance never rises, and falls only if it is given to a run of the lower tier",
    "S12": "no credential is in logs, tags, messages or history, or on a record after its step",
    "S13": "safety does not depend on clocks: nothing expires early, nothing is claimed late",
    "S14": "a machine serves only runs that the pool's reuse policy allows; an ephemeral one serves one run",
    "S15": "a sweep releases a run before its deadline only if it read its end, which was a grace period ago",
    "S16": "a registration that failed is never followed by a runner in its epoch",
    "S17": "a write changes only the fields that its operation owns, and takes over only what the record says then",
    "S18": "a pool message is sent only about an instance that is idle in that epoch",
    "L1": "every live state ends by its threshold and two sweeps",
    "L2": "no machine is without a record for longer than its grace period and a sweep",
    "L3": "stale registrations are removed within a sweep after GitHub allows it",
    "L4": "a lost pool message is sent again within a sweep of its time; no message is deleted before its claim",
    "L5": "every provision ends with a typed result and holds nothing after that, even if faults affected it",
    "L6": "a sweep, release or scale-down that meets no fault leaves nothing undone that was due when it began",
    "L7": "an agent reports a runner of a run that exited without its only job, and does not wait for its release",
    "L8": "a run that has ended on GitHub holds nothing after the grace period and a sweep",
    "L9": "a listener begins within seconds what is due by what it knows, without waiting for its next reading",
    "T1": "each write sets the times and counters that its event and the policy give, by the writer's clock",
    "W1": "a healthy machine is ended only for a reason that is true, and signals no failure",
    "W2": "a provision that meets no fault succeeds, and no one gives up a claimed machine that is alive",
    "W3": "no machine is launched for a run while an idle one that fits can be claimed",
    "W4": "uses, age and number of instances stay within their maximum",
    "W5": "a machine with a spot notice does not return to the pool",
    "W6": "no process ends and leaves a valid pool message hidden, unless a fault keeps it from that",
    "P1": "a healthy runner that a set does not need is given up only after an unbroken grace period",
    "P2": "a set launches again after no longer pause than its own failures in a row give",
    "P3": "an agent acts within seconds on what its record asks for, and gives up only after failures of that step",
    "P4": "the lease of a listener is taken only after it has expired, and soon then",
    "P5": "a runner of a set that does not listen is given up within its limit",
    "P6": "what failed is tried again after the pause that its own failures in a row give, not earlier or much later",
    "P7": "in the pause after failed launches, a set acquires no more machines than came to the pool",
    "P8": "an agent that nothing wakes sleeps until its threshold or for two minutes",
    "P9": "a listener acts no longer than its limit after the last renewal of its lease",
    "R1": "the recorded outcome of a provision and the events of an agent are true",
    "R2": "the result of a command agrees with the records at a moment while it ran",
    "D1": "a machine of a set listens in time while the set has an assigned job and room for another runner",
    "D2": "no machine of a set that has, or may get, a job is deregistered, released or terminated before its time",
    "D3": "a set has more runners than its maximum only until the next reconciliation",
    "D4": "a registration of a set serves one job",
    "D5": "a listener that is killed loses no job, and leaves no machine, registration, session or set behind",
    "D6": "a listener always announces the set's maximum, never 0",
    "D7": "a job that a spot interruption ended is run again at most once, and only after its run has ended",
    "D8": "no machine is launched for a lost job, or for one that a machine can serve that is returning to the pool",
    "D9": "a configured set is served and never deleted, whatever its configuration was before",
    "D10": "a job that a spot interruption ended is run again, or a true reason says why not",
    "D11": "what an acknowledged message said is stored",
    "D12": "as many idle machines as the open windows ask for are there, or are being launched",
}

ABSORBING = frozenset({State.TERMINATING, State.TERMINATED})
#: Order of the states within an epoch.
STATE_ORDER = {
    State.CREATED: 0,
    State.CLAIMED: 0,
    State.RUNNING: 1,
    State.RELEASING: 2,
    State.IDLE: 3,
    State.TERMINATING: 4,
    State.TERMINATED: 5,
}
_SECRETS = ("AREGISTRATION", "AREMOVAL", "AJITCONFIG", "github_pat_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    invariant: str
    text: str
    instance_id: str
    at: float

    def __str__(self) -> str:
        return f"{self.invariant} at {self.at:.3f} s: {self.text}"


def transition_violations(before: Instance, after: Instance) -> Iterator[tuple[str, str]]:
    """Violations by a write to a record by any process: invariant and text."""
    if before.state in ABSORBING and (after.state not in ABSORBING or before.state is State.TERMINATED):
        yield "S5", f"{before.state} became {after.state}"
        return
    if (after.epoch, STATE_ORDER[after.state]) < (before.epoch, STATE_ORDER[before.state]):
        yield "S5", f"{before.state} at epoch {before.epoch} became {after.state} at epoch {after.epoch}"
    claimed = after.state is State.CLAIMED and before.state is not State.CLAIMED
    if claimed and before.state is not State.IDLE:
        yield "S1", f"claimed while {before.state}"
    if after.epoch != before.epoch + claimed:
        yield "S1", f"epoch {before.epoch} became {after.epoch} at {before.state} to {after.state}"
    if not claimed and (after.claim, after.provision_id) != (before.claim, before.provision_id):
        yield "S1", f"claim {before.claim} became {after.claim} at {before.state} to {after.state}"
    if after.state is State.TERMINATED and before.state is not State.TERMINATING:
        yield "S9", f"{before.state} became terminated"


def is_secret(text: str) -> bool:
    return any(map(text.__contains__, _SECRETS))


@lru_cache(maxsize=4_096)
def parse_runner(name: str) -> tuple[int, str] | None:
    """(epoch, instance id) of a runner of this pool, or None for any other runner."""
    found = _OURS.fullmatch(name)
    return (int(found.group(1)), found.group(2)) if found else None


Found = Iterable[tuple[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedRun:
    """A run that a machine has served."""

    tier: Tier
    repository: str


class ReuseInvariant:
    """Which runs a machine may serve, given the runs that it has served (S11, S14).

    Keeps its own record of served runs. It does not rely on the tier and repository of a record.
    """

    def __init__(self, policies: PolicyHistory) -> None:
        self._policies = policies
        self._served: dict[str, list[ServedRun]] = {}
        self._ephemeral: set[str] = set()

    def may_have_read(self, process: SimulatedProcess) -> list[Reuse]:
        return [config.reuse for config in self._policies.may_have_read(process)]

    def created(self, record: Instance, process: SimulatedProcess, *, runner_set: RunnerSet | None) -> Found:
        request = process.request
        if runner_set is not None:
            # It has served no one until a job starts, but the tier of its set is that of an untrusted machine.
            served = [ServedRun(tier=Tier.UNTRUSTED, repository=runner_set.scope)]
            self._served[record.instance_id] = served if record.tier is Tier.UNTRUSTED else []
            if record.retire_reason not in _initial_reasons(self.may_have_read(process)):
                yield "S14", f"created with {record.retire_text!r} for set {runner_set.name}"
        if request is None:
            return
        self._served[record.instance_id] = [_run(process)]
        if request.ephemeral:
            self._ephemeral.add(record.instance_id)
        allowed = {RetireReason.EPHEMERAL} if request.ephemeral else _initial_reasons(self.may_have_read(process))
        if record.retire_reason not in allowed:
            yield "S14", f"created with {record.retire_text!r} for {process}"
        yield from self._repository(record)

    def job_starts(self, instance_id: str, job: MemoryDemandJob, runner_set: RunnerSet | None) -> Found:
        """A job of a set: which one a machine gets is decided by GitHub."""
        is_untrusted = job.is_fork or (runner_set is not None and runner_set.trust is Tier.UNTRUSTED)
        tier = Tier.UNTRUSTED if is_untrusted else Tier.TRUSTED
        before = self._served.setdefault(instance_id, [])
        is_trusted = all(item.tier is Tier.TRUSTED for item in before)
        is_strict = runner_set is not None and runner_set.strict and runner_set.trust is Tier.TRUSTED
        if runner_set is not None and is_strict and job.is_fork and is_trusted:
            yield "S14", f"the strict set {runner_set.name} runs an untrusted job on a trusted instance"
        before.append(ServedRun(tier=tier, repository=job.repository))

    def _claimed_by_set(self, record: Instance, process: SimulatedProcess, runner_set: RunnerSet) -> Found:
        """The set is the boundary of trust: what its jobs may be, the machine must be allowed to serve."""
        before = self._served.setdefault(record.instance_id, [])
        # The set's trust as the listener has read it: the machine serves no job of another one.
        run = ServedRun(tier=record.tier, repository=runner_set.scope)
        if run.tier is Tier.TRUSTED and any(item.tier is Tier.UNTRUSTED for item in before):
            yield "S11", f"the trusted set {runner_set.name} gets a machine that served an untrusted job"
        policies = self.may_have_read(process)
        if not any(_admits(reuse, run, before) or not before for reuse in policies):
            served = ", ".join(sorted({f"{item.tier} {item.repository}" for item in before}))
            yield "S14", f"given to set {runner_set.name} after {served}; the policy is {policies}"

    def claimed(self, record: Instance, process: SimulatedProcess, *, runner_set: RunnerSet | None) -> Found:
        if runner_set is not None:
            yield from self._claimed_by_set(record, process, runner_set)
        if process.request is None:
            return
        run = _run(process)
        before = self._served.setdefault(record.instance_id, [])
        if run.tier is Tier.TRUSTED and any(item.tier is Tier.UNTRUSTED for item in before):
            yield "S11", "a trusted run gets a machine that served an untrusted one"
        policies = self.may_have_read(process)
        if process.request.ephemeral or not any(_admits(reuse, run, before) for reuse in policies):
            served = ", ".join(sorted({f"{item.tier} {item.repository}" for item in before}))
            yield "S14", f"given to a {run.tier} run of {run.repository} after {served}; the policy is {policies}"
        before.append(run)
        if record.tier is not run.tier:
            yield "S11", f"its tier is {record.tier} while it serves a {run.tier} run"
        yield from self._repository(record)

    def pooled(self, record: Instance) -> Found:
        # In quarantine it may be idle, but it is not claimed.
        if record.instance_id in self._ephemeral and not record.retire_reason:
            yield "S14", "pooled although it is ephemeral"

    def _repository(self, record: Instance) -> Found:
        """A record may name a repository only if the machine served no other."""
        repositories = {item.repository for item in self._served[record.instance_id]}
        if record.repository and repositories != {record.repository}:
            yield "S14", f"its only repository is {record.repository}, but it served {sorted(repositories)}"


def _run(process: SimulatedProcess) -> ServedRun:
    request = process.request
    assert request is not None  # noqa: S101 - checked by the callers
    return ServedRun(tier=request.tier, repository=request.repository)


def _initial_reasons(policies: Sequence[Reuse]) -> set[RetireReason | None]:
    return {RetireReason.NEVER_REUSED if reuse is Reuse.NEVER else None for reuse in policies}


def _admits(reuse: Reuse, run: ServedRun, before: Sequence[ServedRun]) -> bool:
    # A machine that `always` gave to both tiers keeps the lower one.
    is_untrusted = any(item.tier is Tier.UNTRUSTED for item in before)
    same_tier = is_untrusted is (run.tier is Tier.UNTRUSTED)
    match reuse:
        case Reuse.ALWAYS:
            return True
        case Reuse.SAME_TRUST:
            return same_tier
        case Reuse.SAME_REPO:
            return same_tier and all(item.repository == run.repository for item in before)
        case Reuse.NEVER:
            return False
