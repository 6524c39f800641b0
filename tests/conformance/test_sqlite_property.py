"""Property tests of the memory and SQLite stores: after any sequence of changes the records are those of
`Change.applied_to`.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remuda.domain.errors import Conflict
from remuda.domain.instance import Instance, RetireReason, State
from remuda.domain.resources import Tier
from remuda.domain.transitions import Change, WriteCondition
from remuda.ports.store import InstanceStore
from tests.conformance.conftest import STORES, Stores
from tests.support.records import assignment, at, birth, change, instance, instance_id

PROCESSES = 3
INSTANCES = 2

# Few values per field, so that guards hold about as often as they fail.
STATES = st.sampled_from([State.IDLE, State.CLAIMED])
EPOCHS = st.sampled_from([1, 2])
OWNERS = st.sampled_from(["", "a"])
TIMES = st.sampled_from([at(1), at(2), at(2.0005)])
TIERS = st.sampled_from(list(Tier))
REPOSITORIES = st.sampled_from(["", "octo/one"])
SETS = st.fixed_dictionaries(
    {},
    optional={
        "state": STATES,
        "epoch": EPOCHS,
        "owner": OWNERS,
        "threshold": TIMES,
        "tier": TIERS,
        "repository": REPOSITORIES,
        "retire_reason": st.none() | st.sampled_from(RetireReason),
        "retire_detail": st.text(max_size=5),
        "quarantined_until": st.sampled_from([None, at(1), at(2)]),
        "assignment": st.sampled_from([None, assignment()]),
        "uses": st.integers(0, 9),
    },
)
GUARDS = st.builds(
    WriteCondition,
    state=STATES,
    epoch=EPOCHS,
    owner=st.none() | OWNERS,
    threshold_after=st.none() | TIMES,
    threshold_at_or_before=st.none() | TIMES,
    not_retired=st.booleans(),
    max_quarantined_until=st.none() | TIMES,
    tiers=st.lists(TIERS, max_size=2).map(tuple),
    repository=st.none() | REPOSITORIES,
)


@dataclass(frozen=True, kw_only=True)
class StoreStep:
    number: int
    process: int
    creates: bool
    guard: WriteCondition
    sets: dict[str, Any]

    def change(self, name: str) -> Change:
        record = instance(self.number, **self.sets)
        made = birth(record) if self.creates else change(record, self.guard, **self.sets)
        return replace(made, entry=replace(made.entry, transition=name))


STEPS = st.lists(
    st.builds(
        StoreStep,
        number=st.integers(1, INSTANCES),
        process=st.integers(0, PROCESSES - 1),
        # One in four steps: most steps should find an existing record.
        creates=st.integers(0, 3).map(lambda number: number == 0),
        guard=GUARDS,
        sets=SETS,
    ),
    max_size=25,
).map(lambda steps: [replace(step, creates=True) if index < INSTANCES else step for index, step in enumerate(steps)])


def model(stored: Instance | None, step: Change) -> Instance | None:
    """Return the record after the step, or None if the step is rejected."""
    if not step.condition.is_met_by(stored):
        return None
    after = step.applied_to(stored)
    # The stores keep milliseconds.
    return replace(after, threshold=after.threshold.replace(microsecond=after.threshold.microsecond // 1000 * 1000))


async def attempt(store: InstanceStore, step: Change) -> tuple[bool, Instance | None]:
    """Apply the change. Return whether it was admitted, and the current record."""
    try:
        return True, await store.apply(step)
    except Conflict as conflict:
        return False, conflict.current


async def apply_sequentially(stores: Stores, steps: list[StoreStep]) -> None:
    processes = [stores.open() for _ in range(PROCESSES)]
    await processes[0].prepare()
    expected: dict[str, Instance] = {}
    names: dict[str, list[str]] = {}
    for index, step in enumerate(steps):
        wanted = step.change(f"step-{index}")
        before = expected.get(wanted.instance_id)
        after = model(before, wanted)
        assert await attempt(processes[step.process], wanted) == (after is not None, after or before)
        if after is not None:
            expected[wanted.instance_id] = after
            names.setdefault(wanted.instance_id, []).append(wanted.entry.transition)
    ids = [instance_id(number) for number in range(1, INSTANCES + 1)]
    assert await processes[-1].get_many(ids) == expected
    for each in ids:
        assert [entry.transition for entry in await processes[0].history(each)] == names.get(each, [])
    await asyncio.gather(*(process.close() for process in processes))


async def apply_concurrently(stores: Stores, steps: list[StoreStep]) -> None:
    processes = [stores.open() for _ in range(PROCESSES)]
    await processes[0].prepare()
    changes = {f"step-{index}": step.change(f"step-{index}") for index, step in enumerate(steps)}
    outcomes = await asyncio.gather(
        *(attempt(processes[step.process], wanted) for step, wanted in zip(steps, changes.values(), strict=True))
    )
    # The history shows the order in which the changes were applied. The model must agree in that order.
    answers = dict(zip(changes, outcomes, strict=True))
    admitted = set()
    for number in range(1, INSTANCES + 1):
        record: Instance | None = None
        for entry in await processes[0].history(instance_id(number)):
            record = model(record, changes[entry.transition])
            assert record is not None
            assert answers[entry.transition] == (True, record)
            admitted.add(entry.transition)
        assert await processes[-1].get(instance_id(number)) == record
    assert admitted == {name for name, (applied, _) in answers.items() if applied}
    # A rejected change does not match the record that the conflict returned.
    for name, (applied, shown) in answers.items():
        assert applied or not changes[name].condition.is_met_by(shown)
    await asyncio.gather(*(process.close() for process in processes))


@pytest.mark.parametrize("adapter", list(STORES))
@settings(max_examples=50, deadline=None)
@given(steps=STEPS)
def test_sequential_changes_match_the_model(adapter: str, steps: list[StoreStep]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(apply_sequentially(STORES[adapter](Path(folder)), steps))


@pytest.mark.parametrize("adapter", list(STORES))
@settings(max_examples=30, deadline=None)
@given(steps=STEPS)
def test_concurrent_changes_match_the_model_in_some_order(adapter: str, steps: list[StoreStep]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(apply_concurrently(STORES[adapter](Path(folder)), steps))
