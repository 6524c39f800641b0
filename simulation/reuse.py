"""The reuse invariants (S11, S14): which runs a machine may serve, given the runs that it has served.

The checks keep their own record of served runs and of the policies that a provision may have read. They do not rely on
the tier and repository of a record.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remuda.domain.instance import Instance, RetireReason
from remuda.domain.resources import Reuse, Tier

if TYPE_CHECKING:
    from simulation.world import SimulatedProcess

Found = Iterable[tuple[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedRun:
    """A run that a machine has served."""

    tier: Tier
    repository: str


class ReuseInvariant:
    def __init__(self) -> None:
        #: Each policy with the time from which it applied.
        self._policies: list[tuple[float, Reuse]] = []
        self._served: dict[str, list[ServedRun]] = {}
        self._ephemeral: set[str] = set()

    def configured(self, reuse: Reuse, at: float) -> None:
        if not self._policies or self._policies[-1][1] is not reuse:
            self._policies.append((at, reuse))

    def may_have_read(self, process: SimulatedProcess) -> list[Reuse]:
        """Policies that applied when a process began or later."""
        since = [reuse for at, reuse in self._policies if at > process.started_at]
        before = [reuse for at, reuse in self._policies if at <= process.started_at]
        return [*before[-1:], *since]

    def created(self, record: Instance, process: SimulatedProcess) -> Found:
        request = process.request
        if request is None:
            return
        self._served[record.instance_id] = [_run(process)]
        if request.ephemeral:
            self._ephemeral.add(record.instance_id)
        allowed = {RetireReason.EPHEMERAL} if request.ephemeral else _initial_reasons(self.may_have_read(process))
        if record.retire_reason not in allowed:
            yield "S14", f"created with {record.retire_text!r} for {process}"
        yield from self._repository(record)

    def claimed(self, record: Instance, process: SimulatedProcess) -> Found:
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
