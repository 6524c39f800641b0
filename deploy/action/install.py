"""Installs Remuda into a virtualenv of its own in the runner's tool cache, once for each version and Python.

It runs on a bare Python before anything is installed: standard library alone.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: What the package is made of.
PARTS = ("pyproject.toml", "README.md", "LICENSE", "src")
CONSTRAINTS = Path("requirements", "constraints.txt")
#: Written last: without it an installation is half done.
COMPLETE = ".complete"
EXIT_UNAVAILABLE = 4
EXIT_INTERRUPTED = 130


def main() -> int:
    source = Path(os.environ["GITHUB_ACTION_PATH"]).resolve()
    place = cache() / f"{version(source)}-{fingerprint(source)}"
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


def version(source: Path) -> str:
    found = re.search(r'^version = "([0-9A-Za-z.+-]+)"$', (source / "pyproject.toml").read_text(), re.MULTILINE)
    return found[1] if found else "0"


def fingerprint(source: Path) -> str:
    """A branch changes under the same version; a virtualenv belongs to one Python."""
    digest = hashlib.sha256(f"{sys.version} {platform.machine()} {Path(sys.executable).resolve()}".encode())
    files = [path for part in (*PARTS, CONSTRAINTS) for path in walk(source / part)]
    for file in sorted(files):
        digest.update(f"\0{file.relative_to(source)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def walk(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [file for file in path.rglob("*") if file.is_file() and not leftover(file)]


def leftover(file: Path) -> bool:
    return any(part == "__pycache__" or part.endswith(".egg-info") for part in file.parts)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install(source: Path, place: Path) -> bool:
    tell(f"::group::install remuda {version(source)}")
    try:
        shutil.rmtree(place, ignore_errors=True)
        venv.create(place, with_pip=True)
        with tempfile.TemporaryDirectory() as folder:
            done = pip(copy(source, Path(folder)), source / CONSTRAINTS, place / "bin" / "python")
        if done:
            (place / COMPLETE).touch()
    finally:
        tell("::endgroup::")
    return done


def copy(source: Path, folder: Path) -> Path:
    """A build leaves files beside the source: not in the action's folder, which may be a checkout."""
    for part in PARTS:
        if (source / part).is_dir():
            shutil.copytree(source / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source / part, folder / part)
    return folder


def pip(package: Path, constraints: Path, python: Path) -> bool:
    words = ["install", "--quiet", "--disable-pip-version-check", "--no-input", f"{package}[aws]"]
    # As a variable it also pins what the build itself needs. A virtualenv knows no user's folder.
    environment = {**os.environ, "PIP_CONSTRAINT": str(constraints), "PIP_USER": "0"}
    command = [str(python), "-I", "-m", "pip", *words]
    return subprocess.run(command, env=environment, check=False, cwd=package).returncode == 0


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        # Half done, and not marked as complete: the next one starts anew.
        sys.exit(EXIT_INTERRUPTED)
