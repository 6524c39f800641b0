"""Search of a workflow for what would keep its instances: a provision without a release that always runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    if not any(_runs(step, "provision") for job in jobs for step in job.steps):
        return None
    releases = [(job, step) for job in jobs for step in job.steps if _runs(step, "release")]
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
    provisions_here = any(_runs(other, "provision") for other in job.steps)
    try:
        return provisions_here and _calls_always(parse_condition(step.condition))
    except ExpressionError:
        return False


def _calls_always(condition: Node) -> bool:
    return any(node.kind == "call" and str(node.value).lower() == "always" for node in condition.walk())


def _runs(step: JobStep, name: str) -> bool:
    return any(name in words for words in _remuda_commands(step.run))


def _remuda_commands(script: str) -> Iterator[list[str]]:
    """The words after `remuda` of each command of a script, without comments."""
    for line in script.replace("\\\n", " ").splitlines():
        for command in re.split(r"&&|\|\||[;|&()]", line.partition("#")[0]):
            words = command.split()
            for index, word in enumerate(words):
                if word.strip("'\"").rpartition("/")[2] == "remuda":
                    yield words[index + 1 :]
                    break
