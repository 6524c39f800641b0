"""Files with which the steps of a job set outputs, variables, PATH and the summary."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remuda.fake_github.fake_runner import job_context
from remuda.fake_github.fake_runner.expressions import ExpressionError
from remuda.fake_github.fake_runner.job_context import FileCommandError, JobContext, StepCommandFiles


@pytest.fixture
def context() -> JobContext:
    return JobContext({"env": {"A": "job"}}, github={"run_id": "7"}, runner={"os": "Linux"})


def apply(context: JobContext, folder: Path, **texts: str) -> StepCommandFiles:
    files = StepCommandFiles(folder / "files", 1)
    for name, text in texts.items():
        Path(files.variables[f"GITHUB_{name.upper()}"]).write_text(text)
    files.apply(context)
    return files


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a=1\nb=x=y\n\nc=", {"a": "1", "b": "x=y", "c": ""}),
        ("a<<END\none\n  two=2\nEND\nb=3", {"a": "one\n  two=2", "b": "3"}),
        ("a<<END\nEND\n", {"a": ""}),
        ("a=b<<END", {"a": "b<<END"}),
        ("a=1\r\nb=2\r\n", {"a": "1", "b": "2"}),
        ("a=1\na=2", {"a": "2"}),
    ],
)
def test_outputs(context: JobContext, tmp_path: Path, text: str, values: dict[str, str]) -> None:
    assert apply(context, tmp_path, output=text).outputs == values


@pytest.mark.parametrize("text", ["a", "=1", "<<END\nx\nEND", "a<<END\nx\nEND2"])
def test_invalid_lines_are_errors(context: JobContext, tmp_path: Path, text: str) -> None:
    with pytest.raises(FileCommandError):
        apply(context, tmp_path, output=text)


def test_variables_paths_and_summary_of_a_step(context: JobContext, tmp_path: Path) -> None:
    apply(context, tmp_path, env="B=2\nA=step", path="/one\n/two\n", step_summary="# one\n")
    apply(context, tmp_path, path="/one\n", step_summary="two")
    assert context.env == {"A": "step", "B": "2"}
    assert context.paths == ["/one", "/two"]
    assert context.summary == "# one\ntwo"
    assert context.step_env({"env": {"C": "${{ env.A }}"}}) == {"A": "step", "B": "2", "C": "step"}


def test_node_options_are_refused_as_on_github(context: JobContext, tmp_path: Path) -> None:
    with pytest.raises(FileCommandError, match="NODE_OPTIONS"):
        apply(context, tmp_path, env="NODE_OPTIONS=--require evil")


def test_large_files_and_pipes_are_harmless(
    context: JobContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = StepCommandFiles(tmp_path / "files", 1)
    path = Path(files.variables["GITHUB_OUTPUT"])
    path.unlink()
    os.mkfifo(path)
    files.apply(context)
    assert files.outputs == {}
    monkeypatch.setattr(job_context, "MAX_SUMMARY_BYTES", 1024)
    with pytest.raises(FileCommandError, match="up to a size of 1k"):
        apply(context, tmp_path, step_summary="x" * 1025)


def test_outputs_of_a_job_have_a_limit(context: JobContext) -> None:
    context.record_step({"id": "one"}, outcome="success", conclusion="success", outputs={"x": "y" * 1000})
    assert context.job_outputs({"a": "${{ steps.one.outputs.x }}!"})["a"].endswith("y!")
    with pytest.raises(ExpressionError, match="longer than"):
        context.job_outputs({str(number): "${{ steps.one.outputs.x }}" for number in range(2000)})
