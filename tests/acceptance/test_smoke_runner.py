"""`make smoke-runner`, with the fake runner."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from remuda.fake_github.fake_runner import VERSION
from tests.support import smoke_runner
from tests.support.namespace_machine.machine import bake_image
from tests.support.sandbox_host import missing

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.skipif(bool(missing()), reason=f"sandboxes in namespaces: {missing()}"),
]


@pytest.fixture
def runner(tmp_path: Path) -> Path:
    bake_image(tmp_path / "image")
    return tmp_path / "image" / "runner"


def archive(runner: Path) -> str:
    path = runner.with_name("actions-runner.tar.gz")
    with tarfile.open(path, "w:gz", compresslevel=1) as opened:
        opened.add(runner, ".")
    return str(path)


def test_runner_of_an_archive_starts_in_a_sandbox(runner: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert smoke_runner.main([archive(runner), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [item["command"] for item in results] == [command for command, _ in smoke_runner.CHECKS]
    assert "Configures the runner" in results[0]["output"]
    assert results[1]["output"] == VERSION


def test_runner_that_does_not_start_is_reported(runner: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runner / "bin" / "Runner.Listener").write_text("#!/bin/sh\necho libicu is missing\nexit 134\n")
    assert smoke_runner.main([archive(runner)]) == 1
    output = capsys.readouterr().out
    assert output.count("FAIL") == 3
    assert "exit code 134\nlibicu is missing" in output


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), (b"not an archive", "cannot be read"), ("empty", "has no bin/Runner.Listener")],
)
def test_unusable_archive_is_rejected(
    content: bytes | str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "runner.tar.gz"
    if content == "empty":
        with tarfile.open(path, "w:gz"):
            pass
    elif isinstance(content, bytes):
        path.write_bytes(content)
    assert smoke_runner.main([str(path)]) == 2
    assert message in capsys.readouterr().err
