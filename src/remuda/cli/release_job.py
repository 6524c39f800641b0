"""Search of a workflow for what would keep its instances: a provision without a release that always runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from remuda.cli.step_commands import runs_remuda
from remuda.cli.workflow_file import WorkflowJob
from remuda.fake_github.client import JobStep
from remuda.fake_github.fake_runner.expressions import ExpressionError, Node, parse_condition


@dataclass(frozen=True, kw_only=True, slots=True)
class MissingRelease:
    #: One sentence.
    text: str
    #: What the workflow should have, as YAML with the indentation of its jobs.
    yaml: str


def find_missing_release(jobs: Sequence[WorkflowJob]) -> MissingRelease | None:
    """None if the workflow provisions nothing, or releases whatever the other jobs do.

    Example: a release job without `if: always()` is skipped if a test fails, and the run keeps its instances.
    """
    if not any(job.provisions for job in jobs):
        return None
    releases = [(job, step) for job in jobs for step in job.steps if runs_remuda(step.run, "release")]
    if not releases:
        others = ", ".join(dict.fromkeys(job.key for job in jobs))
        yaml = (
            f"  release:\n    needs: [{others}]\n    if: always()\n    runs-on: ubuntu-latest\n    steps:\n"
            "      - run: remuda release"
        )
        text = (
            "the workflow runs remuda provision and never remuda release: its instances stay with the run until a "
            "sweep releases them, minutes after its end; add this job"
        )
        return MissingRelease(text=text, yaml=yaml)
    if any(_is_certain(job, step) for job, step in releases):
        return None
    job, _ = releases[0]
    text = (
        f"the job {job.key} releases the instances only if the jobs before it succeed: after a failure they stay with "
        "the run until a sweep releases them; add this condition"
    )
    return MissingRelease(text=text, yaml=f"  {job.key}:\n    if: always()")


def _is_certain(job: WorkflowJob, step: JobStep) -> bool:
    """Whether the step runs although others have failed: by the condition of its job, or by its own in the same job."""
    if _calls_always(job.condition):
        return True
    try:
        return job.provisions and _calls_always(parse_condition(step.condition))
    except ExpressionError:
        return False


def _calls_always(condition: Node) -> bool:
    return any(node.kind == "call" and str(node.value).lower() == "always" for node in condition.walk())
