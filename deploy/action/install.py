"""Installer of Remuda for the action: one virtualenv per version and Python in the runner's tool cache.

Uses the standard library only, because nothing is installed yet.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PROJECT = Path("pyproject.toml")
PACKAGE = Path("src", "remuda")
CONSTRAINTS = Path("requirements", "constraints.txt")
#: Marker file, written last: an installation without it is incomplete.
COMPLETE = ".complete"
EXIT_UNAVAILABLE = 4
EXIT_INTERRUPTED = 130


def main() -> int:
    source = Path(os.environ["GITHUB_ACTION_PATH"]).resolve()
    place = cache() / f"{project(source)['version']}-{fingerprint(source)}"
    if not (place / COMPLETE).exists():
        with locked(place.parent / f"{place.name}.lock"):
            # Another job on this runner may have installed it meanwhile.
            if not (place / COMPLETE).exists() and not install(source, place):
                say("::error title=remuda::pip could not install remuda; its output is in the log above")
                return EXIT_UNAVAILABLE
    python = place / "bin" / "python"
    with Path(os.environ["GITHUB_OUTPUT"]).open("a", encoding="utf-8") as out:
        out.write(f"python={python}\n")
    return 0


def cache() -> Path:
    """The tool cache, which persists on self-hosted runners, or else the temporary directory of the job."""
    for name in ("RUNNER_TOOL_CACHE", "RUNNER_TEMP"):
        folder = Path(os.environ.get(name) or os.devnull, "remuda")
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    return Path(tempfile.mkdtemp(prefix="remuda-"))


def project(source: Path) -> dict[str, Any]:
    document: dict[str, Any] = tomllib.loads((source / PROJECT).read_text(encoding="utf-8"))["project"]
    return document


def fingerprint(source: Path) -> str:
    """Hash of Python and the sources: the same version may have different sources on a branch."""
    digest = hashlib.sha256(f"{sys.version} {platform.machine()} {Path(sys.executable).resolve()}".encode())
    for file in sorted([source / PROJECT, source / CONSTRAINTS, *walk(source / PACKAGE)]):
        digest.update(f"\0{file.relative_to(source)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def walk(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts]


@contextmanager
def locked(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install(source: Path, place: Path) -> bool:
    """Install the dependencies with pip and copy the package, so that nothing is built."""
    wanted = project(source)
    say(f"::group::install remuda {wanted['version']}")
    try:
        shutil.rmtree(place, ignore_errors=True)
        # With its own pip: that of this Python would run the other one without -I, and import from the workspace.
        venv.create(place, with_pip=True)
        requirements = [*wanted["dependencies"], *wanted["optional-dependencies"]["aws"]]
        done = pip(requirements, source / CONSTRAINTS, place / "bin" / "python")
        if done:
            (packages,) = place.glob("lib/python3.*/site-packages")
            shutil.copytree(source / PACKAGE, packages / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
            (place / COMPLETE).touch()
    finally:
        say("::endgroup::")
    return done


def pip(requirements: list[str], constraints: Path, python: Path) -> bool:
    words = [
        str(python),
        "-I",
        "-m",
        "pip",
        "install",
        # Modules are compiled at their first import; most are never imported.
        "--no-compile",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        "--constraint",
        str(constraints),
        *requirements,
    ]
    # pip refuses a user installation in a virtualenv.
    environment = {**os.environ, "PIP_USER": "0"}
    return subprocess.run(words, env=environment, check=False).returncode == 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        # Not marked as complete, so the next run starts over.
        sys.exit(EXIT_INTERRUPTED)
