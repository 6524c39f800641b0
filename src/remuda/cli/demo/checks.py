"""What a demo checks in the records: whose machine a job ran on, what lives, what was retired and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from remuda.cli.demo.report import Retired
from remuda.domain.instance import HistoryEntry, Instance, State
from remuda.domain.pool_config import parse_runner_name
from remuda.fake_github.client import JobView
from remuda.ports.store import InstanceStore

Histories = Mapping[str, tuple[Instance, Sequence[HistoryEntry]]]


async def histories(store: InstanceStore) -> Histories:
    """Every instance that is known, with its story."""
    instances = await store.find(frozenset(State))
    return {item.instance_id: (item, await store.history(item.instance_id)) for item in instances}


def foreign_jobs(jobs: Iterable[JobView], known: Histories, *, pool: str) -> list[str]:
    """Jobs whose machine was, at the epoch in its runner's name, assigned to another run."""
    return [f"{job.name} of run {job.run_id}" for job in jobs if _is_foreign(job, known, pool)]


def _is_foreign(job: JobView, known: Histories, pool: str) -> bool:
    parsed = parse_runner_name(pool, job.runner_name or "")
    if parsed is None:
        return job.runner_name is not None
    epoch, instance_id = parsed
    if instance_id not in known:
        return True
    return not any(
        entry.epoch == epoch and entry.run_id == job.run_id and entry.target in {State.CREATED, State.CLAIMED}
        for entry in known[instance_id][1]
    )


def living(known: Histories) -> list[str]:
    return [key for key, (instance, _) in known.items() if instance.state is not State.TERMINATED]


def retirements(known: Histories, last_word: Callable[[str], str]) -> list[Retired]:
    return [
        Retired(instance_id=key, state=entry.source, why=entry.why, machine_said=last_word(key))
        for key, (_, entries) in known.items()
        for entry in entries
        if entry.target == State.TERMINATING and entry.source != entry.target
    ]
