"""The agent's bundle, unpacked and run without other packages, and its second build."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import remuda
from tests.support.bundle_builds import build_bundles, shared_bundles

#: The first test builds the bundles, which takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(900)
LIMIT_S = 60
#: An interpreter of this version, as the launcher's check sees it.
OTHER_PYTHON = """#!/bin/sh
exec {python} -ISc "import sys; sys.version_info = {version}; sys.argv[:] = sys.argv[1:]; exec(sys.argv[1])" "$@"
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (found,) = shared_bundles(tmp_path_factory).glob("remuda-agent-*.tar.gz")
    return found


@pytest.fixture(scope="module")
def unpacked(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("opt")
    with tarfile.open(bundle) as archive:
        archive.extractall(folder, filter="tar")
    return folder


def run(program: Path, *arguments: str, path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the bundle with the interpreters of this folder only. A module there must not be imported."""
    path.mkdir(exist_ok=True)
    (path / "remuda.py").write_text("raise SystemExit('imported from the working directory')")
    with contextlib.suppress(FileExistsError):
        (path / "readlink").symlink_to("/usr/bin/readlink")
    return subprocess.run(
        [program, *arguments],
        env={"PATH": str(path), "PYTHONPATH": str(path), **variables},
        cwd=path,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


def interpreter(folder: Path, name: str, version: tuple[int, int] | None = None) -> Path:
    """The interpreter of this process under another name, optionally with another version."""
    folder.mkdir(exist_ok=True)
    python = Path(sys.executable).resolve()
    if version is None:
        (folder / name).symlink_to(python)
    else:
        (folder / name).write_text(OTHER_PYTHON.format(python=python, version=version))
        (folder / name).chmod(0o755)
    return folder / name


@pytest.mark.parametrize("name", ["python3", f"python3.{sys.version_info.minor}"])
def test_bundle_runs_without_other_packages(unpacked: Path, tmp_path: Path, name: str):
    interpreter(tmp_path / "bin", name)
    version = run(unpacked / "bin" / "remuda", "--version", path=tmp_path / "bin")
    assert (version.stdout, version.stderr, version.returncode) == (f"remuda {remuda.__version__}\n", "", 0)
    usage = run(unpacked / "bin" / "remuda", "agent", "--help", path=tmp_path / "bin")
    assert usage.stdout.startswith("usage: remuda agent"), usage.stderr
    action = run(unpacked / "bin" / "remuda-action", path=tmp_path / "bin")
    assert action.stdout.startswith("::error title=remuda::mode is ''"), action.stderr


def test_bundle_has_everything_that_agent_and_steps_import_later(unpacked: Path, tmp_path: Path):
    modules = "remuda.cli.agent_ec2, remuda.wiring.aws, remuda.adapters.github.auth, jwt.algorithms, cryptography"
    program = f"import sys; sys.path.insert(0, sys.argv[1]); import {modules}"
    command = [str(Path(sys.executable).resolve()), "-ISBc", program, str(unpacked / "lib")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert (done.stderr, done.returncode) == ("", 0)


def test_launcher_ignores_interpreters_that_are_too_old(unpacked: Path, tmp_path: Path):
    interpreter(tmp_path / "bin", "python3", (3, 10))
    done = run(unpacked / "bin" / "remuda", "--version", path=tmp_path / "bin")
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"remuda: this machine has no CPython 3\.\d+ to 3\.\d+; install one, .*\n", done.stderr)
    cache = tmp_path / "cache" / "Python" / "3.11.9" / "x64" / "bin"
    cache.mkdir(parents=True)
    interpreter(cache, "python3")
    found = run(
        unpacked / "bin" / "remuda", "--version", path=tmp_path / "bin", RUNNER_TOOL_CACHE=str(tmp_path / "cache")
    )
    assert (found.returncode, found.stderr) == (0, "")


def test_launcher_uses_the_named_interpreter_or_none(unpacked: Path, tmp_path: Path):
    interpreter(tmp_path / "bin", "python3")
    old = interpreter(tmp_path / "bin", "other", (3, 10))
    done = run(unpacked / "bin" / "remuda", "--version", path=tmp_path / "bin", REMUDA_PYTHON=str(old))
    assert done.returncode == 2
    assert re.fullmatch(rf"remuda: REMUDA_PYTHON is {old}, but this bundle needs CPython .*\n", done.stderr)


def test_a_second_build_gives_the_same_bundle(bundle: Path, tmp_path: Path):
    build_bundles(tmp_path / "again", "agent")
    assert (tmp_path / "again" / bundle.name).read_bytes() == bundle.read_bytes()
