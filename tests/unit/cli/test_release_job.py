"""Workflows that provision and do not release, or only if all goes well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from remuda.cli.release_job import MissingRelease, find_missing_release
from remuda.cli.step_commands import remuda_commands
from remuda.cli.workflow_file import load_workflow, parse_workflow

HEAD = """
jobs:
  provision:
    runs-on: ubuntu-latest
    steps: [{run: remuda provision --instance-count 1}]
  test:
    needs: provision
    runs-on: ${{ github.run_id }}
    steps: [{run: "true"}]
"""
RELEASE = """
  release:
    needs: [provision, test]
    if: %s
    runs-on: ubuntu-latest
    steps: [{run: %s}]
"""


def find(text: str) -> MissingRelease | None:
    return find_missing_release(parse_workflow(load_workflow(text.encode()), {"run_id": "1"}))


def test_workflow_without_a_release_gets_one_that_works():
    found = find(HEAD)
    assert found is not None
    assert "never remuda release" in found.text
    assert yaml.safe_load(found.yaml)["release"]["needs"] == ["provision", "test"]
    assert find(HEAD + found.yaml + "\n") is None, "the printed job is the fix"


@pytest.mark.parametrize("condition", ["success()", "${{ !cancelled() }}", "failure()", "github.ref == 'always()'"])
def test_release_that_may_be_skipped(condition: str):
    found = find(HEAD + RELEASE % (f'"{condition}"', "remuda release"))
    assert found is not None
    assert "the job release releases the instances only if" in found.text
    assert found.yaml == "  release:\n    if: always()"


@pytest.mark.parametrize(
    "condition", ["always()", "${{ always() }}", "Always() && needs.provision.result != 'skipped'"]
)
@pytest.mark.parametrize(
    "step", ["remuda release", '"python3 -m remuda release"', '"true && /opt/bin/remuda --dir x release; echo"']
)
def test_release_that_always_runs(condition: str, step: str):
    assert find(HEAD + RELEASE % (f'"{condition}"', step)) is None


def test_release_in_the_job_of_the_provision():
    job = """
jobs:
  all:
    runs-on: ubuntu-latest
    steps:
      - run: |
          remuda provision \\
            --instance-count 1
      - {run: remuda release, if: %s}
"""
    assert find(job % "always()") is None
    assert find(job % "success()") is not None


@pytest.mark.parametrize("script", ["'true'", "echo provision", '"# remuda provision"', "'remuda status # provision'"])
def test_workflow_that_provisions_nothing(script: str):
    assert find(f"jobs:\n  one:\n    runs-on: ubuntu-latest\n    steps: [{{run: {script}}}]\n") is None


@pytest.mark.parametrize(
    ("script", "commands"),
    [
        ("remuda provision", ["provision"]),
        ("remuda --json provision | tee out", ["provision"]),
        ("remuda --dir 'a b' release; remuda status", ["release", "status"]),
        ("sudo '/opt/a b/remuda' provision \\\n  --instance-count 1", ["provision"]),
        ("label=$(remuda provision)", ["provision"]),
        ('echo "label=$(python3 -m remuda provision)" >> "$GITHUB_OUTPUT"', ["provision"]),
        ('echo "label=`remuda provision`"', ["provision"]),
        ("echo it's; remuda provision", ["provision"]),
        ("echo ${#x}; remuda provision", ["provision"]),
        ("if ! remuda provision; then exit 1; fi", ["provision"]),
        ("# remuda provision", []),
        ("true # then remuda provision", []),
        ("true;# remuda provision", []),
        ("echo 'later: remuda provision'", []),
        ('echo "later: remuda provision"', []),
        ("remuda explain release", ["explain"]),
        ("pip install remuda\nprovision", []),
        ("my-remuda provision; remuda provisional", []),
    ],
)
def test_commands_of_a_script(script: str, commands: list[str]):
    """The search for a missing release and the re-run of failed jobs see the same commands."""
    assert list(remuda_commands(script)) == commands
    text = f"jobs:\n  one:\n    runs-on: ubuntu-latest\n    steps: [{json.dumps({'run': script})}]\n"
    (job,) = parse_workflow(load_workflow(text.encode()), {"run_id": "1"})
    assert job.provisions == ("provision" in commands)
    assert (find(text) is not None) == ("provision" in commands)


def test_workflow_of_the_tutorial_releases():
    assert find((Path(__file__).parents[3] / "docs/tutorial/provision.yml").read_text()) is None
