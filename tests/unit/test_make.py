"""Targets of the Makefile that check what they need before they install anything."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.aws.servers import ROOT

REQUIREMENTS = "tests.support.namespace_machine.requirements"


def test_the_check_of_the_requirements_needs_no_installed_package(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-m", REQUIREMENTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env={"PATH": str(tmp_path)})
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("this cannot run here: machines in namespaces need ")
    assert done.stderr.endswith("; nothing was installed\n")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_demo_aws_refuses_before_it_installs_anything(tmp_path: Path) -> None:
    interpreter, called = tmp_path / "python", tmp_path / "called"
    interpreter.write_text(f'#!/bin/sh\necho "$@" >>{called}\nexit 2\n')
    interpreter.chmod(0o755)
    command = ["make", "demo-aws", f"PYTHON={interpreter}", f"VENV={tmp_path / 'venv'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert called.read_text() == f"-m {REQUIREMENTS}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["called", "python"]
