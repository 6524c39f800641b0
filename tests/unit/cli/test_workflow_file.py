"""Small workflows: what is understood, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from remuda.cli.workflow_file import Job, parse_workflow
from remuda.domain.errors import UserError

GITHUB = {"run_id": "77", "run_attempt": "2", "repository": "owner/repo"}
STEPS = [{"run": "true"}]


def parse(jobs: Any, **workflow: Any) -> list[Job]:
    return parse_workflow({"name": "w", **workflow, "jobs": jobs}, GITHUB)


def one(**job: Any) -> Job:
    (parsed,) = parse({"a": {"runs-on": "x", "steps": STEPS, **job}})
    return parsed


def test_a_matrix_makes_a_job_for_each_cell() -> None:
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


def test_env_of_step_lies_over_job_lies_over_workflow() -> None:
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


def test_ubuntu_labels_run_here_and_others_are_queued() -> None:
    assert one(**{"runs-on": "ubuntu-latest"}).hosted
    assert not one(**{"runs-on": "${{ github.run_id }}"}).hosted


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
        ({str(n): {"runs-on": "x", "steps": STEPS} for n in range(300)}, "jobs"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(jobs: Any, where: str):
    with pytest.raises(UserError) as refused:
        parse(jobs)
    assert refused.value.field == where
    assert refused.value.fix


def test_a_circle_of_needs_is_refused() -> None:
    job = {"runs-on": "x", "steps": STEPS}
    with pytest.raises(UserError, match="wait for each other: a, b"):
        parse({"a": {**job, "needs": "b"}, "b": {**job, "needs": ["a"]}, "c": job})
