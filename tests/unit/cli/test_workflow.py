"""Workflows of `run-workflow`: parsing, and the cancellation of an interrupted run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from remuda.adapters.system.clock import SystemClock
from remuda.cli.run_workflow import LastRun, WorkflowRun, kept_jobs
from remuda.cli.workflow_file import WorkflowJob, WorkflowStep, parse_workflow
from remuda.domain.errors import UserError
from remuda.fake_github.client import JobView

GITHUB = {"run_id": "77", "run_attempt": "2", "repository": "owner/repo", "workflow_ref": "owner/repo/w.yml@main"}
STEPS = [{"run": "true"}]


def parse(jobs: Any, **workflow: Any) -> list[WorkflowJob]:
    return parse_workflow({"name": "w", **workflow, "jobs": jobs}, GITHUB)


def one(**job: Any) -> WorkflowJob:
    (parsed,) = parse({"a": {"runs-on": "x", "steps": STEPS, **job}})
    return parsed


def test_matrix_expands_to_one_job_per_combination() -> None:
    jobs = parse(
        {
            "test": {
                "runs-on": ["${{ github.run_id }}", "${{ matrix.size }}"],
                "strategy": {"matrix": {"size": ["large", "xlarge"], "shard": [1, 2]}},
                "steps": [{"run": "echo ${{ matrix.shard }} ${{github.run_attempt}}"}],
            }
        }
    )
    assert [job.name for job in jobs] == ["test (large, 1)", "test (large, 2)", "test (xlarge, 1)", "test (xlarge, 2)"]
    assert jobs[0].labels == ("77", "large")
    assert jobs[3].steps[0].run == "echo 2 2"


def test_env_of_step_overrides_job_and_workflow() -> None:
    (job,) = parse(
        {
            "a": {
                "runs-on": "x",
                "env": {"B": "${{ env.A }}-job"},
                "steps": [{"run": "echo ${{ env.A }} ${{ env.B }} ${{ env.C }}", "env": {"A": "step", "C": "c"}}],
            }
        },
        env={"A": "workflow"},
    )
    assert job.env == {"A": "workflow", "B": "workflow-job"}
    assert job.steps[0].run == "echo step workflow-job c"


def test_ubuntu_jobs_run_locally_and_others_are_queued() -> None:
    assert one(**{"runs-on": "ubuntu-latest"}).hosted
    assert not one(**{"runs-on": "${{ github.run_id }}"}).hosted


@pytest.mark.parametrize(
    ("workflow", "job", "allowed"),
    [
        ({}, {}, False),
        ({"permissions": {"id-token": "write"}}, {}, True),
        ({"permissions": {"id-token": "write"}}, {"permissions": {"contents": "read"}}, False),
        ({"permissions": {"id-token": "write"}}, {"permissions": {}}, False),
        ({"permissions": "read-all"}, {"permissions": {"id-token": "write"}}, True),
        ({"permissions": "write-all"}, {}, True),
        ({"permissions": {"id-token": "none"}}, {}, False),
    ],
)
def test_permissions_of_a_job_replace_those_of_the_workflow(
    workflow: dict[str, Any],
    job: dict[str, Any],
    allowed: bool,  # noqa: FBT001
) -> None:
    (parsed,) = parse({"a": {"runs-on": "x", "steps": STEPS, **job}}, **workflow)
    assert parsed.may_request_tokens is allowed


def test_environment_of_a_job() -> None:
    assert one().environment == ""
    assert one(environment="prod-${{ github.run_id }}").environment == "prod-77"
    assert one(environment={"name": "prod", "url": "https://example.com"}).environment == "prod"


@pytest.mark.parametrize(
    ("condition", "after_success", "after_failure", "after_skip"),
    [
        (None, True, False, False),
        ("success()", True, False, False),
        ("always()", True, True, True),
        ("${{ always() }}", True, True, True),
        ("failure()", False, True, False),
    ],
)
def test_conditions(condition: str | None, after_success: bool, after_failure: bool, after_skip: bool):  # noqa: FBT001
    job = one(**({"if": condition} if condition else {}))
    assert job.runs_after(["success", "success"]) is after_success
    assert job.runs_after(["success", "failure"]) is after_failure
    assert job.runs_after(["skipped"]) is after_skip


@pytest.mark.parametrize(
    ("jobs", "where"),
    [
        ({}, "jobs"),
        ([], "jobs"),
        ({"a": []}, "jobs.a"),
        ({"a": {"steps": STEPS}}, "jobs.a.runs-on"),
        ({"a": {"runs-on": "x"}}, "jobs.a.steps"),
        ({"a": {"runs-on": "x", "steps": [{"uses": "actions/checkout@v4"}]}}, "jobs.a.steps[0]"),
        ({"a": {"runs-on": "x", "steps": [{"name": "nothing"}]}}, "jobs.a.steps[0]"),
        ({"a": {"runs-on": "x", "steps": STEPS, "needs": "b"}}, "jobs.a.needs"),
        ({"a": {"runs-on": "x", "steps": STEPS, "services": {}}}, "jobs.a"),
        ({"a": {"runs-on": "x", "steps": STEPS, "if": "github.ref == 'x'"}}, "jobs.a.if"),
        ({"a": {"runs-on": "${{ secrets.X }}", "steps": STEPS}}, "jobs.a.runs-on"),
        ({"a": {"runs-on": "x", "steps": STEPS, "timeout-minutes": -1}}, "jobs.a.timeout-minutes"),
        ({"a": {"runs-on": "x", "steps": STEPS, "strategy": {"matrix": {"n": 3}}}}, "jobs.a.strategy.matrix.n"),
        (
            {"a": {"runs-on": "x", "steps": STEPS, "strategy": {"matrix": {"n": list(range(300))}}}},
            "jobs.a.strategy.matrix",
        ),
        ({"a": {"runs-on": "x", "steps": STEPS, "permissions": "all"}}, "jobs.a.permissions"),
        ({"a": {"runs-on": "x", "steps": STEPS, "permissions": {"id-token": True}}}, "jobs.a.permissions.id-token"),
        ({str(n): {"runs-on": "x", "steps": STEPS} for n in range(300)}, "jobs"),
    ],
)
def test_unsupported_keys_are_rejected_by_name(jobs: Any, where: str):
    with pytest.raises(UserError) as raised:
        parse(jobs)
    assert raised.value.field == where
    assert raised.value.fix


def test_cyclic_needs_are_rejected() -> None:
    job = {"runs-on": "x", "steps": STEPS}
    with pytest.raises(UserError, match="wait for each other: a, b"):
        parse({"a": {**job, "needs": "b"}, "b": {**job, "needs": ["a"]}, "c": job})


@pytest.mark.parametrize(
    ("conclusions", "kept"),
    [
        ({"build": "success", "test": "failure", "report": "skipped"}, {"build"}),
        ({"build": "failure", "test": "success", "report": "success"}, set()),
        ({"build": "success", "test": "success"}, {"build", "test"}),
        ({"build": "cancelled"}, set()),
    ],
)
def test_failed_jobs_and_those_that_need_them_run_again(conclusions: dict[str, str], kept: set[str]) -> None:
    jobs = [job("report", "test"), job("test", "build"), job("build")]
    assert kept_jobs(jobs, LastRun(run_id="1", attempt=1, conclusions=conclusions)) == kept


def test_run_without_failed_jobs_is_not_run_again() -> None:
    with pytest.raises(UserError, match="run 1 has no failed job"):
        kept_jobs([job("build")], LastRun(run_id="1", attempt=1, conclusions={"build": "success"}))


# Interrupted runs -----------------------------------------------------------------------------------------------------

#: Event loop iterations that the cancellation of each job takes. The first must not interrupt the others.
ITERATIONS = {"one": 20, "two": 60}


class SilentOutput:
    def say(self, *_texts: Any, **_style: Any) -> None:
        """Discard the text."""


class SlowGitHub:
    """A GitHub whose jobs only end when they are cancelled."""

    def __init__(self) -> None:
        self.followed: asyncio.Queue[str] = asyncio.Queue()
        self.cancelled: set[str] = set()

    async def queue_job(self, *, name: str, **_given: Any) -> JobView:
        return _job(name)

    async def job(self, name: str, **_given: Any) -> JobView:
        self.followed.put_nowait(name)
        await asyncio.Event().wait()
        return _job(name)

    async def runners(self) -> list[Any]:
        return []

    async def cancel_job(self, name: str) -> JobView:
        for _ in range(ITERATIONS[name]):
            await asyncio.sleep(0)
        self.cancelled.add(name)
        return _job(name)


def _job(name: str) -> JobView:
    known = dict.fromkeys(JobView.__dataclass_fields__)
    return JobView(**{**known, "id": name, "name": name, "status": "queued"})  # type: ignore[arg-type]


def job(key: str, *needs: str, on: str = "1") -> WorkflowJob:
    return WorkflowJob(
        key=key,
        name=key,
        needs=needs,
        labels=(on,),
        condition="",
        steps=(WorkflowStep(run="true"),),
        env={},
        timeout_s=600,
    )


@pytest.mark.parametrize("without_dependent", [True, False])
async def test_an_interrupted_run_cancels_all_its_jobs(*, without_dependent: bool) -> None:
    github = SlowGitHub()
    run = WorkflowRun(None, SilentOutput(), github, SystemClock(), GITHUB)  # type: ignore[arg-type]
    jobs = [job("one"), job("two"), *([] if without_dependent else [job("after", "one", "two", on="ubuntu-latest")])]
    running = asyncio.create_task(run.run(jobs))
    assert {await github.followed.get() for _ in ITERATIONS} == set(ITERATIONS)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert github.cancelled == set(ITERATIONS)
