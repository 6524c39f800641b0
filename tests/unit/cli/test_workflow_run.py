"""A workflow's run that is interrupted, on a GitHub that takes its time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from remuda.adapters.system.clock import SystemClock
from remuda.cli.run_workflow import WorkflowRun
from remuda.cli.workflow_file import Job, Step
from remuda.fake_github.client import JobView

GITHUB = {"run_id": "1", "run_attempt": "1", "repository": "o/r"}
#: Turns of the loop that a call takes, by its job: who is done first must not cut the others short.
TURNS = {"one": 20, "two": 60}


class Quiet:
    def say(self, *_words: Any, **_style: Any) -> None:
        """Nobody reads it."""


class SlowGitHub:
    """Its jobs never end by themselves."""

    def __init__(self) -> None:
        self.followed: asyncio.Queue[str] = asyncio.Queue()
        self.cancelled: set[str] = set()

    async def queue_job(self, *, name: str, **_given: Any) -> JobView:
        return _job(name)

    async def job(self, name: str, **_given: Any) -> JobView:
        self.followed.put_nowait(name)
        await asyncio.Event().wait()
        return _job(name)

    async def cancel_job(self, name: str) -> JobView:
        for _ in range(TURNS[name]):
            await asyncio.sleep(0)
        self.cancelled.add(name)
        return _job(name)


def _job(name: str) -> JobView:
    known = dict.fromkeys(JobView.__dataclass_fields__)
    return JobView(**{**known, "id": name, "name": name, "status": "queued"})  # type: ignore[arg-type]


def job(key: str, *needs: str, on: str = "1") -> Job:
    return Job(
        key=key, name=key, needs=needs, labels=(on,), condition="", steps=(Step(run="true"),), env={}, timeout_s=600
    )


@pytest.mark.parametrize("alone", [True, False])
async def test_an_interrupted_run_cancels_all_its_jobs(*, alone: bool) -> None:
    github = SlowGitHub()
    run = WorkflowRun(None, Quiet(), github, SystemClock(), GITHUB)  # type: ignore[arg-type]
    jobs = [job("one"), job("two"), *([] if alone else [job("after", "one", "two", on="ubuntu-latest")])]
    running = asyncio.create_task(run.run(jobs))
    assert {await github.followed.get() for _ in TURNS} == set(TURNS)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert github.cancelled == set(TURNS)
