"""kill -9 at chosen calls of real processes (lifecycle, section 7). Sweeps and time then finish what was cut.

All points share one local backend and run at the same time, each in a resource class of its own, so that none takes
another's machines.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from remuda.fake_github.client import JobStep
from tests.support.cli import CommandResult
from tests.support.local_backend import LIMIT_S, REPO, LocalBackend

KILLED = -9
#: How long a provision that will be killed has: enough to get to its point, little enough to wait for its end.
CUT_TIMEOUT_S = 15
#: The same where machines have to register before. These are played first, so that nobody waits for their ends.
REGISTERED_TIMEOUT_S = 30
#: How many points are at work at a time.
AT_ONCE = 3
#: The first test waits for the whole story.
pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True, kw_only=True)
class Point:
    name: str
    crash: str = ""
    agent_crash: str = ""
    #: Idle instances beforehand, and how many the run asks for.
    warm: int = 0
    count: int = 1
    #: What is cut.
    command: str = "provision"
    #: A job is queued for the run.
    job: bool = False
    #: In which states its instances are just after the kill.
    leaves: tuple[str, ...] = ()
    #: Or in these: writes go side by side, and the next one may have been under way.
    or_leaves: tuple[str, ...] | None = None
    timeout_s: float = CUT_TIMEOUT_S

    @property
    def run_id(self) -> str:
        return f"run-{self.name}"


#: Machines have to register before these.
REGISTERED = (
    Point(name="signal", crash="store.wait_for_report:2:after", leaves=("created",)),
    Point(
        name="first-running",
        crash="store.apply:3:after",
        count=2,
        leaves=("created", "running"),
        or_leaves=("running", "running"),
    ),
    Point(name="before-commit", crash="store.replace_provision:1:before", count=2, leaves=("running", "running")),
    Point(name="delete-message", crash="pool.delete:1:after", warm=1, leaves=("claimed",)),
    Point(name="commit", crash="store.replace_provision:1:after", leaves=("running",)),
)
PROVISION = (
    *(replace(point, timeout_s=REGISTERED_TIMEOUT_S) for point in REGISTERED),
    Point(name="intent", crash="store.put_provision:1:after", leaves=()),
    Point(name="receive", crash="pool.receive:1:after", warm=1, leaves=("idle",)),
    Point(name="claim", crash="store.apply:1:after", warm=1, leaves=("claimed",)),
    Point(
        name="claim-of-two",
        crash="store.apply:1:after",
        warm=2,
        count=2,
        leaves=("claimed", "idle"),
        or_leaves=("claimed", "claimed"),
    ),
    Point(name="launch-asked", crash="compute.launch:1:before", leaves=()),
    Point(name="launch", crash="compute.launch:1:after", count=2, leaves=()),
    Point(
        name="record-ids", crash="store.apply:1:after", count=2, leaves=("created",), or_leaves=("created", "created")
    ),
)
RELEASE = (
    Point(name="mark", command="release", crash="store.replace_provision:1:after", leaves=("running",)),
    Point(name="releasing", command="release", crash="store.apply:1:after", leaves=("releasing",)),
    Point(name="idle", command="release", crash="store.apply:2:after", leaves=("idle",)),
    Point(name="announce", command="release", crash="pool.send:1:after", leaves=("idle",)),
)
AGENT = (
    Point(name="configure", agent_crash="runner.configure:1:before"),
    Point(name="registered", agent_crash="runner.configure:1:after"),
    Point(name="listening", agent_crash="runner.start:1:after", job=True),
    Point(name="job", agent_crash="store.beat?busy=True:1:after", job=True),
    Point(name="deregistered", agent_crash="runner.remove:1:after"),
    Point(name="reset", agent_crash="machine.reset:1:before"),
    Point(name="clean", agent_crash="machine.reset:1:after"),
)
#: One after the other, on all that the others left behind.
REFRESH = ("store.apply:1:after", "compute.terminate:1:before", "compute.terminate:1:after", "store.apply_all:1:before")


@dataclass
class Story:
    """What happened at the points."""

    backend: LocalBackend
    killed: dict[str, CommandResult] = field(default_factory=dict)
    left: dict[str, list[str]] = field(default_factory=dict)
    released: dict[str, CommandResult] = field(default_factory=dict)
    jobs: dict[str, str | None] = field(default_factory=dict)
    sweeps: dict[str, int] = field(default_factory=dict)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    backend = LocalBackend(tmp_path_factory.mktemp("crash") / "state")
    told = Story(backend)
    with asyncio.Runner() as runner:
        try:
            runner.run(_play(told, tmp_path_factory.mktemp("marks")))
            yield told
        finally:
            runner.run(backend.down())


async def _play(story: Story, marks: Path) -> None:
    points = (*PROVISION, *RELEASE, *AGENT)
    names = [point.name for point in points] + ["old"]
    classes = {name: {"cpu": 2, "mmem": 4096} for name in names}
    await story.backend.up(idle_time_sec=1800, release_time_sec=600, resource_class_config=json.dumps(classes))
    limit = asyncio.Semaphore(AT_ONCE)

    async def play(point: Point) -> None:
        async with limit:
            folder = marks / point.name
            folder.mkdir()
            await (_cut_agent if point.agent_crash else _cut_command)(story, point, folder)

    async with asyncio.TaskGroup() as group:
        for point in points:
            group.create_task(play(point))
    await story.backend.provision("run-old", 2, "--resource-class", "old", "--max-runtime-min", "0.05")
    await story.backend.until(lambda: len(story.backend.machines()) > 0, "machines")
    for crash in REFRESH:
        story.sweeps[crash] = await _sweep_until_killed(story.backend, crash)
    # The run of which only the commit is known is released by its workflow. Before the sweeps, which would help.
    story.released["commit"] = await story.backend.release("run-commit")
    async with story.backend.sweeping():
        await story.backend.until(
            lambda: (
                not any(item["status"] == "open" for point in points for item in story.backend.provisions(point.run_id))
            ),
            "no provision open",
        )
        await story.backend.until_settled(states=("idle", "terminated"))
        await story.backend.until(lambda: not _stale_hints(story.backend), "no stale hints")
        # A sweep tells the pool a moment after the record says so.
        await story.backend.until(lambda: _hinted(story.backend) == _idle(story.backend), "all that is idle is told of")
    # A sweep that ends while it looks at hints may have hidden some for a while.
    await story.backend.until(lambda: not story.backend.hidden_pool_messages(), "all hints can be received")


async def _sweep_until_killed(backend: LocalBackend, crash: str) -> int:
    """The machines that it ends take their time: before they are gone there is nothing to confirm."""
    code, limit = 0, time.monotonic() + LIMIT_S
    while code != KILLED and time.monotonic() < limit:
        code = (await backend.sweep(crash=crash, code=None)).code
    return code


async def _cut_command(story: Story, point: Point, _marks: Path) -> None:
    backend, name = story.backend, point.name
    if point.warm:
        await backend.provision(f"{name}-before", point.warm, "--resource-class", name)
        await backend.release(f"{name}-before")
    if point.command == "release":
        await backend.provision(point.run_id, point.count, "--resource-class", name)
        story.killed[name] = await backend.release(point.run_id, crash=point.crash, code=None)
    else:
        more = ("--resource-class", name, "--provision-timeout-sec", f"{point.timeout_s:g}")
        story.killed[name] = await backend.provision(point.run_id, point.count, *more, crash=point.crash, code=None)
    story.left[name] = backend.states(name)


async def _cut_agent(story: Story, point: Point, marks: Path) -> None:
    backend, name = story.backend, point.name
    await backend.provision(point.run_id, 1, "--resource-class", name, agent_crash=point.agent_crash, once=marks)
    if point.job:
        async with backend.github() as github:
            # It lasts until the agent was killed: who stood still meanwhile would not have seen a short one.
            step = JobStep(run=f'until [ "$(ls {marks})" ]; do sleep 0.1; done; echo done')
            job = await github.queue_job(repo=REPO, run_id=point.run_id, labels=[point.run_id], steps=[step])
            while job.status != "completed":
                before = job.status
                job = await github.job(job.id, wait_s=LIMIT_S, since=before)
                assert job.status != before, "the job does not end"
            story.jobs[name] = job.conclusion
    story.released[name] = await backend.release(point.run_id, code=None)
    assert _is_marked(marks), f"no agent was killed at {point.agent_crash}"


def _is_marked(folder: Path) -> bool:
    return any(folder.iterdir())


def _stale_hints(backend: LocalBackend) -> list[Any]:
    records = backend.records()
    return [
        hint
        for hint in backend.pool_messages()
        if (record := records.get(hint["id"])) is None or (record["state"], record["epoch"]) != ("idle", hint["epoch"])
    ]


def _idle(backend: LocalBackend) -> set[str]:
    return {key for key, item in backend.records().items() if item["state"] == "idle"}


def _hinted(backend: LocalBackend) -> set[str]:
    return {hint["id"] for hint in backend.pool_messages()}


@pytest.mark.parametrize("point", [*PROVISION, *RELEASE], ids=lambda point: f"{point.command}-{point.name}")
def test_a_command_is_killed(story: Story, point: Point) -> None:
    assert story.killed[point.name].code == KILLED
    assert story.left[point.name] in [sorted(point.leaves), sorted(point.or_leaves or point.leaves)]
    assert set(story.backend.states(point.name)) <= {"idle", "terminated"}
    assert {item["status"] for item in story.backend.provisions(point.run_id)} <= {"released"}


@pytest.mark.parametrize("point", AGENT, ids=lambda point: f"agent-{point.name}")
def test_an_agent_is_killed_and_its_machine_goes_on(story: Story, point: Point) -> None:
    released = story.released[point.name]
    assert (released.code, len(released.document["released"])) == (0, 1), released
    assert story.backend.states(point.name) == ["idle"]
    if point.job:
        assert story.jobs[point.name] == "success"


@pytest.mark.parametrize("crash", REFRESH)
def test_a_refresh_is_killed(story: Story, crash: str) -> None:
    assert story.sweeps[crash] == KILLED
    assert story.backend.states("old") == ["terminated", "terminated"]


def test_a_committed_run_is_released_by_its_workflow(story: Story) -> None:
    """The commit was written, the process died before it could say so: the release finds it by the record."""
    assert len(story.released["commit"].document["released"]) == 1


def test_an_idle_machine_survives_what_was_cut_before_or_after_it_was_used(story: Story) -> None:
    for name in ("receive", "mark", "releasing", "idle", "announce", "commit"):
        assert story.backend.states(name) == ["idle"], name


def test_nothing_is_left_that_should_not_be(story: Story) -> None:
    backend = story.backend
    idle = _idle(backend)
    assert set(backend.machines()) == idle
    assert not asyncio.run(backend.registrations())
    assert not _stale_hints(backend)
    assert _hinted(backend) == idle
    for instance_id in idle:
        assert len(backend.processes(instance_id)) == 2, "a supervisor and an agent"


def test_what_was_left_idle_serves_the_next_run(story: Story) -> None:
    names = ("idle", "announce", "receive")

    async def provision() -> list[CommandResult]:
        return await asyncio.gather(
            *(story.backend.provision(f"{name}-next", 1, "--resource-class", name) for name in names)
        )

    documents = [done.document for done in asyncio.run(provision())]
    assert [document["reused"] for document in documents] == [1, 1, 1], documents
