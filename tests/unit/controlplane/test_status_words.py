"""The words for the end of a run, lost machines and dead agents: the same in status, explanations and on the page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from remuda.cli.rendering.status import status_document
from remuda.controlplane.operator import terminate
from remuda.controlplane.read.explain import explain
from remuda.controlplane.read.status import status
from remuda.controlplane.refresh import refresh
from remuda.domain.errors import Interrupted, RemudaError
from remuda.domain.instance import State
from remuda.domain.resources import TypePatterns
from remuda.domain.thresholds import HEARTBEAT_DEAD_AFTER_S, HEARTBEAT_INTERVAL_S
from remuda.web.dashboard import serialize
from tests.support.virtual_time import Cut, CutKind, EventRecorder
from tests.support.world import LIFETIMES, PoolWorld
from tests.unit.controlplane.test_read import shown

RUN = "7"


async def fail(world: PoolWorld) -> None:
    world.cloud.capacity = {"c6i.large": 0}
    with suppress(RemudaError):
        await world.provision(RUN, patterns=TypePatterns(("c6i.large",)))


async def cancel(world: PoolWorld) -> None:
    provisioning = asyncio.create_task(world.provision(RUN))
    await asyncio.sleep(1)
    provisioning.cancel()
    with suppress(asyncio.CancelledError, Interrupted):
        await provisioning


async def kill(world: PoolWorld) -> None:
    cut = Cut(12, CutKind.CRASH_BEFORE)
    await cut.run(world.provision(RUN, process=world.process(cut)))
    await world.pass_time(world.lifetimes.provision_timeout_s + 20)
    await cut.discard()


async def release_early(world: PoolWorld) -> None:
    provisioning = asyncio.create_task(world.provision(RUN))
    await asyncio.sleep(1)
    await world.release(RUN)
    with suppress(RemudaError):
        await provisioning


async def forget(world: PoolWorld) -> None:
    await world.provision(RUN)
    await world.pass_time(world.lifetimes.max_runtime_s + 20)


async def release_late(world: PoolWorld) -> None:
    """The agents have ended their machines, and no sweep has run yet."""
    await world.provision(RUN)
    await asyncio.sleep(world.lifetimes.max_runtime_s + 1)
    await world.release(RUN)


async def release_in_time(world: PoolWorld) -> None:
    await world.provision(RUN)
    await world.release(RUN)


async def shown_statuses(world: PoolWorld) -> set[str]:
    """The status of the run in JSON, in its explanation and on the page."""
    (stored,) = world.database.provisions.values()
    process = world.process()
    (run,) = status_document(await status(process))["runs"]
    title = (await explain(process, RUN)).title
    page = json.loads(serialize.provision_text(stored))
    assert title.startswith(f"Run {RUN}: {page['status']} (")
    return {run["status"], page["status"]}


@pytest.mark.parametrize(
    ("end", "status_word"),
    [
        (fail, "failed"),
        (cancel, "interrupted"),
        (kill, "interrupted"),
        (release_early, "interrupted"),
        (forget, "expired"),
        (release_late, "expired"),
        (release_in_time, "released"),
    ],
)
async def test_status_says_how_the_run_ended(
    world: PoolWorld, end: Callable[[PoolWorld], Awaitable[None]], status_word: str
) -> None:
    await end(world)
    assert await shown_statuses(world) == {status_word}
    await world.pass_time(300)
    (stored,) = world.database.provisions.values()
    assert (stored.settled, await shown_statuses(world)) == (True, {status_word})


async def lost(world: PoolWorld) -> tuple[list[str], str, str]:
    """The lost machines in JSON, in the explanation and on the page."""
    process = world.process()
    found = await status(process)
    (run,) = status_document(found)["runs"]
    page = json.loads(serialize.status_texts(found)["lost"])
    return run["lost_ids"], (await explain(process, RUN)).title, "".join(page.values())


async def test_run_that_lost_one_of_three_machines_says_so(world: PoolWorld) -> None:
    await world.provision(RUN, count=3)
    assert await lost(world) == ([], "Run 7: committed (all instances started)", "")
    process = world.process()
    (victim, *_) = world.in_state(State.RUNNING)
    await terminate(process, [world.record(victim)], reason="enough", dry_run=False)
    says = f"it lost 1 of its 3 instances: {victim}"
    assert await lost(world) == ([victim], f"Run 7: committed ({says})", says)
    await asyncio.sleep(1)
    await world.release(RUN)
    assert await lost(world) == ([victim], f"Run 7: released (by attempt 1; {says})", f"by attempt 1; {says}")
    # The other two end after the release: they are not lost. The record of the run remembers it.
    await world.pass_time(world.lifetimes.idle_time_s + 200)
    assert set(world.states().values()) == {State.TERMINATED}
    (stored,) = world.database.provisions.values()
    assert stored.settled
    assert await lost(world) == ([victim], f"Run 7: released (by attempt 1; {says})", f"by attempt 1; {says}")


async def test_dead_agent_is_dead_everywhere(world: PoolWorld) -> None:
    """The page has its own test, with the feed."""
    instance_id = (await world.one(RUN)).instance_id
    assert await deaths(world, instance_id) == {False}
    world.stop_agent(instance_id)
    await asyncio.sleep(HEARTBEAT_DEAD_AFTER_S + LIFETIMES.margin_s + HEARTBEAT_INTERVAL_S)
    assert await deaths(world, instance_id) == {True}


async def deaths(world: PoolWorld, instance_id: str) -> set[bool]:
    """Whether the agent is dead: in the warnings, in JSON, in the table and in explanations."""
    found = await status(world.process())
    (document,) = status_document(found)["instances"]
    return {
        "stale-heartbeat" in {item.kind for item in found.warnings},
        document["agent_dead"],
        "agent dead" in shown(found),
        "its agent is dead" in (await explain(world.process(), instance_id)).title,
        "its agent or its machine is dead" in (await explain(world.process(), RUN)).next_steps[1],
    }


async def test_job_that_exceeds_the_maximum_runtime_is_announced_and_recorded(world: PoolWorld) -> None:
    instance_id = (await world.one(RUN)).instance_id
    world.github.queue(run_id=RUN, labels=[RUN], seconds=10_000)
    runtime_s = world.lifetimes.max_runtime_s
    await world.pass_time(runtime_s * 0.85)
    assert not (await status(world.process())).warnings
    await asyncio.sleep(runtime_s * 0.1)
    (warning,) = (await status(world.process())).warnings
    assert (warning.kind, warning.subject) == ("expires-soon", instance_id)
    # Logged once.
    logged = []
    for _ in range(2):
        process = world.process(credentialed=True)
        assert isinstance(process.event_log, EventRecorder)
        await refresh(process, None)
        logged += [why for action, why in process.event_log.lines if action == "expiry-warning"]
    assert len(logged) == 1
    await world.pass_time(runtime_s * 0.1 + 10)
    assert world.record(instance_id).retire_text == "expired: a job was running"
    assert await shown_statuses(world) == {"expired"}
    result = await world.release(RUN)
    assert result.warnings == ("run 7 expired: its max-runtime-min was over before it was released",)


async def test_release_names_lost_machines(world: PoolWorld) -> None:
    await world.provision(RUN, count=2)
    (victim, _) = world.in_state(State.RUNNING)
    await terminate(world.process(), [world.record(victim)], reason="enough", dry_run=False)
    assert (await world.release(RUN)).warnings == (f"run 7: by attempt 1; it lost 1 of its 2 instances: {victim}",)
