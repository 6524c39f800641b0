"""Whom a machine may serve, judged by whom it has served in truth.

The judge keeps its own book: the runs that machines were given to, as those who asked know them, and the policies that
a provision may have read. It believes no record's tier and no record's repository.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from remuda.domain.instance import EPHEMERAL, NEVER_REUSED, Instance
from remuda.domain.resources import Reuse, Tier

if TYPE_CHECKING:
    from simulation.world import SimulatedProcess

Found = Iterable[tuple[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedRun:
    """A run that a machine was given to."""

    tier: Tier
    repository: str


class ReuseInvariant:
    def __init__(self) -> None:
        #: Since when each policy was in force.
        self._policies: list[tuple[float, Reuse]] = []
        self._served: dict[str, list[ServedRun]] = {}
        self._ephemeral: set[str] = set()

    def configured(self, reuse: Reuse, at: float) -> None:
        if not self._policies or self._policies[-1][1] is not reuse:
            self._policies.append((at, reuse))

    def may_have_read(self, process: SimulatedProcess) -> list[Reuse]:
        """What was in force when a process began, or since."""
        since = [reuse for at, reuse in self._policies if at > process.started_at]
        before = [reuse for at, reuse in self._policies if at <= process.started_at]
        return [*before[-1:], *since]

    def born(self, record: Instance, process: SimulatedProcess) -> Found:
        order = process.order
        if order is None:
            return
        self._served[record.instance_id] = [_run(process)]
        if order.ephemeral:
            self._ephemeral.add(record.instance_id)
        allowed = {EPHEMERAL} if order.ephemeral else _births(self.may_have_read(process))
        if record.retire not in allowed:
            yield "S14", f"born with {record.retire!r} for {process}"
        yield from self._believed(record)

    def claimed(self, record: Instance, process: SimulatedProcess) -> Found:
        if process.order is None:
            return
        run = _run(process)
        before = self._served.setdefault(record.instance_id, [])
        if run.tier is Tier.TRUSTED and any(item.tier is Tier.UNTRUSTED for item in before):
            yield "S11", "a trusted run is given a machine that an untrusted one had"
        policies = self.may_have_read(process)
        if process.order.ephemeral or not any(_admits(reuse, run, before) for reuse in policies):
            told = ", ".join(sorted({f"{item.tier} {item.repository}" for item in before}))
            yield "S14", f"given to a {run.tier} run of {run.repository} after {told}; the policy is {policies}"
        before.append(run)
        if record.tier is not run.tier:
            yield "S11", f"it is {record.tier} after it was given to a {run.tier} run"
        yield from self._believed(record)

    def pooled(self, record: Instance) -> Found:
        # In quarantine it lies idle as well, and nobody is given it.
        if record.instance_id in self._ephemeral and not record.retire:
            yield "S14", "pooled although it was for one job"

    def _believed(self, record: Instance) -> Found:
        """What a record says of repositories may be less than the truth, never more."""
        repositories = {item.repository for item in self._served[record.instance_id]}
        if record.repository and repositories != {record.repository}:
            yield "S14", f"it names {record.repository} as the only one, and served {sorted(repositories)}"


def _run(process: SimulatedProcess) -> ServedRun:
    order = process.order
    assert order is not None  # noqa: S101 - the callers looked
    return ServedRun(tier=order.tier, repository=order.repository)


def _births(policies: Sequence[Reuse]) -> set[str]:
    return {NEVER_REUSED if reuse is Reuse.NEVER else "" for reuse in policies}


def _admits(reuse: Reuse, run: ServedRun, before: Sequence[ServedRun]) -> bool:
    # What `always` has mixed before is of the lower tier, and stays there.
    fallen = any(item.tier is Tier.UNTRUSTED for item in before)
    same_tier = fallen is (run.tier is Tier.UNTRUSTED)
    match reuse:
        case Reuse.ALWAYS:
            return True
        case Reuse.SAME_TRUST:
            return same_tier
        case Reuse.SAME_REPO:
            return same_tier and all(item.repository == run.repository for item in before)
        case Reuse.NEVER:
            return False
