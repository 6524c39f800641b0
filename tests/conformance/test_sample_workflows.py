"""The sample workflows and those of the tutorial, in act: another engine for GitHub's workflows.

act runs all jobs on this machine, without Docker and without network. What only a pool can do is replaced: the steps
that provision and release do nothing, and the label of the runners is that of the run. `remuda run-workflow` must make
the same jobs and scripts of the file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from remuda.cli.workflow_file import WorkflowJob, load_workflow, parse_workflow
from remuda.fake_github.fake_runner.expressions import Scope, render

ACT = Path(sys.executable).with_name("act")
LIMIT_S = 60
ROOT = Path(__file__).parents[2]
#: act's default. Jobs of runs are on the label of their run.
RUN_ID = "1"
LABELS = (RUN_ID, f"{RUN_ID}/large", f"{RUN_ID}/8xlarge", "self-hosted", "remuda", "large", "ubuntu-latest")
#: Actions and commands that need a pool or an account, and one that takes time only.
OMITTED = ("aws-actions/configure-aws-credentials@", "/remuda@", "remuda ", "sleep ")
MAKEFILE = "test build style types docs benchmark:\n\t@echo make $@ $(SHARD)$(PART)\n"
#: Not in its own folder, from which act copies the files of a job.
SOURCES, HOME = "sources", "home"


def samples() -> dict[str, Path]:
    """Workflows with a part that needs no pool."""
    files = sorted([*ROOT.glob("deploy/workflows/*.yml"), *ROOT.glob("docs/tutorial/*.yml")])
    return {file.name: file for file in files if any(map(is_free, steps_of(yaml.safe_load(file.read_text()))))}


def steps_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in document["jobs"].values() for step in job["steps"]]


def is_free(step: dict[str, Any]) -> bool:
    text = step.get("uses") or step["run"]
    return not any(name in text for name in OMITTED)


def without_pool(document: dict[Any, Any]) -> dict[str, Any]:
    # YAML's `on` is true.
    jobs = {}
    for key, job in document["jobs"].items():
        steps = [step for step in job["steps"] if is_free(step)] or [{"run": "true"}]
        label = {"outputs": {"label": RUN_ID}} if "outputs" in job else {}
        jobs[key] = {**job, "steps": steps, **label}
    return {**{name: value for name, value in document.items() if name is not True}, "on": "push", "jobs": jobs}


def lines_in_act(folder: Path, document: dict[str, Any]) -> dict[str, list[str]]:
    """The output of each job that has some, by its name."""
    (folder / HOME).mkdir()
    sources = folder / SOURCES
    sources.mkdir()
    (sources / "workflow.yml").write_text(json.dumps(document))
    (sources / "Makefile").write_text(MAKEFILE)
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder / HOME), "ACT_DISABLE_VERSION_CHECK": "1"}
    author = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    for words in (["init", "--quiet"], ["add", "."], [*author, "commit", "--quiet", "--message", "x"]):
        subprocess.run(["git", *words], cwd=sources, env=environment, check=True)
    platforms = [word for label in LABELS for word in ("--platform", f"{label}=-self-hosted")]
    quiet = ("--no-cache-server", "--container-daemon-socket", "-", "--json")
    done = subprocess.run(
        [str(ACT), "push", "--workflows", "workflow.yml", *platforms, *quiet],
        cwd=sources,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, (done.stdout[-2_000:], done.stderr[-2_000:])
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        event = json.loads(line)
        if event.get("raw_output"):
            matrix = json.dumps(event["matrix"], sort_keys=True)
            found.setdefault(f"{event['jobID']} {matrix}", []).append(event["msg"].rstrip("\n"))
    return found


def lines_in_run_workflow(folder: Path, document: dict[str, Any]) -> dict[str, list[str]]:
    """The same of the jobs and scripts that `remuda run-workflow` finds in the workflow."""
    jobs = parse_workflow(load_workflow(json.dumps(document).encode()), {"run_id": RUN_ID, "ref": "refs/heads/main"})
    needs = {job.key: {"result": "success", "outputs": job.outputs} for job in jobs}
    output = {f"{job.key} {json.dumps(job.matrix, sort_keys=True)}": list(outputs(folder, job, needs)) for job in jobs}
    return {name: lines for name, lines in output.items() if lines}


def outputs(folder: Path, job: WorkflowJob, needs: dict[str, Any]) -> list[str]:
    resolved = job.resolve({"run_id": RUN_ID}, {need: needs[need] for need in job.needs})
    assert set(resolved.labels) <= set(LABELS)
    scope = Scope(resolved.contexts)
    lines = []
    for step in job.steps:
        if step.uses:
            continue
        environment = {**resolved.env, **{name: render(text, scope) for name, text in step.env.items()}}
        done = subprocess.run(
            ["bash", "-e", "-c", render(step.run, scope)],
            cwd=folder / SOURCES,
            env={"PATH": os.environ["PATH"], "GITHUB_RUN_ID": RUN_ID, **environment},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
        lines += done.stdout.splitlines()
    return lines


@pytest.mark.parametrize("name", samples())
def test_act_runs_the_jobs_and_scripts_of_run_workflow(tmp_path: Path, name: str) -> None:
    document = without_pool(yaml.safe_load(samples()[name].read_text(encoding="utf-8")))
    lines = lines_in_act(tmp_path, document)
    assert lines
    assert lines == lines_in_run_workflow(tmp_path, document)


def test_the_samples_are_found() -> None:
    assert set(samples()) == {"matrix.yml", "provision.yml", "runner-set.yml", "spot.yml", "two-classes.yml"}
