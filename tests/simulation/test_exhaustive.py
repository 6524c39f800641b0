"""Every order of events in small worlds."""

from __future__ import annotations

import pytest

from remuda.agent.lifecycle import Do, Step, View, next_step
from remuda.simulation import exhaustive
from remuda.simulation.exhaustive import Bounds, explore


@pytest.mark.parametrize(
    ("bounds", "most"),
    [
        (Bounds(instances=1, runs=2), None),
        (Bounds(instances=2, runs=1), None),
        (Bounds(instances=1, runs=3, stale=False, jobs=False), None),
        # The whole of it takes long: `make simulate` goes further.
        (Bounds(instances=2, runs=3), 30_000),
    ],
    ids=[
        "one instance, two runs",
        "two instances, one run",
        "one instance, three runs",
        "two instances, three runs, the nearest",
    ],
)
def test_no_order_of_events_violates_anything(bounds: Bounds, most: int | None):
    search = explore(bounds, limit=most)
    assert not search.violation, "\n".join([search.violation, *search.path])
    assert search.complete or most is not None


def test_a_runner_that_starts_too_early_is_found(monkeypatch: pytest.MonkeyPatch):
    def hasty(view: View) -> Step:
        if view.runner.configured_as and not view.runner.listening:
            return Step(do=Do.START, why="at once")
        return next_step(view)

    monkeypatch.setattr(exhaustive, "next_step", hasty)
    search = explore(Bounds(instances=1, runs=1))
    assert search.violation.startswith("S2")
    assert search.path[:2] == ["run 0 begins", "run 0 creates 0"]
