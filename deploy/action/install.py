"""Installs Remuda into a virtualenv of its own in the runner's tool cache, once for each version and Python.

It runs on a bare Python before anything is installed: standard library alone.
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
#: Written last: without it an installation is half done.
COMPLETE = ".complete"
EXIT_UNAVAILABLE = 4
EXIT_INTERRUPTED = 130


def main() -> int:
    source = Path(os.environ["GITHUB_ACTION_PATH"]).resolve()
    place = cache() / f"{project(source)['version']}-{fingerprint(source)}"
    if not (place / COMPLETE).exists():
        with locked(place.parent / f"{place.name}.lock"):
            # Another job on this machine may have been first.
            if not (place / COMPLETE).exists() and not install(source, place):
                tell("::error title=remuda::pip could not install remuda; see its own words in the log above")
                return EXIT_UNAVAILABLE
    python = place / "bin" / "python"
    with Path(os.environ["GITHUB_OUTPUT"]).open("a", encoding="utf-8") as out:
        out.write(f"python={python}\n")
    return 0


def cache() -> Path:
    """The tool cache outlives a job on machines that do; where it cannot be written, the job's own folder."""
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
    """A branch changes under the same version; a virtualenv belongs to one Python."""
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
    """What it needs by pip, and the package as it is: nothing has to be built."""
    wanted = project(source)
    tell(f"::group::install remuda {wanted['version']}")
    try:
        shutil.rmtree(place, ignore_errors=True)
        # Its own pip: that of this Python would start the other without -I, and with modules of the workspace.
        venv.create(place, with_pip=True)
        needs = [*wanted["dependencies"], *wanted["optional-dependencies"]["aws"]]
        done = pip(needs, source / CONSTRAINTS, place / "bin" / "python")
        if done:
            (packages,) = place.glob("lib/python3.*/site-packages")
            shutil.copytree(source / PACKAGE, packages / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
            (place / COMPLETE).touch()
    finally:
        tell("::endgroup::")
    return done


def pip(needs: list[str], constraints: Path, python: Path) -> bool:
    words = [
        str(python),
        "-I",
        "-m",
        "pip",
        "install",
        # What is used is compiled then: most of it is not.
        "--no-compile",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        "--constraint",
        str(constraints),
        *needs,
    ]
    # A virtualenv knows no user's folder.
    environment = {**os.environ, "PIP_USER": "0"}
    return subprocess.run(words, env=environment, check=False).returncode == 0


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        # Half done, and not marked as complete: the next one starts anew.
        sys.exit(EXIT_INTERRUPTED)
