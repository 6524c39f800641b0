"""The software of a test run: the agent of the current source and the fake runner, as a disk with a tar archive."""

from __future__ import annotations

import compileall
import io
import py_compile
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

import bundles
import remuda
from remuda.fake_github import PROGRAMS, install_runner
from tests.support.virtual_machine.image import LIBRARIES
from tests.support.virtual_machine.image import PYTHON as PYTHON_VERSION

PYTHON = "/usr/bin/python3"
#: Block devices have a whole number of sectors; tar ignores the zeros at the end.
SECTOR = 512


def write_software_disk(path: Path) -> None:
    """Write the archive that the machine unpacks in its root folder before it runs the user data."""
    source = Path(remuda.__file__).parent
    with tempfile.TemporaryDirectory() as folder, tarfile.open(path, "w") as archive:
        runner, package = Path(folder) / "runner", Path(folder) / "remuda"
        _write_runner(runner)
        shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
        _compile(package, LIBRARIES)
        archive.add(package, f"{LIBRARIES}/remuda", filter=_of_root)
        archive.add(runner, "opt/remuda/runner", filter=_of_root)
        for name, file in bundles.programs((PYTHON_VERSION,)).items():
            program = tarfile.TarInfo(f"opt/remuda/{name}")
            program.mode, program.size = file.mode, len(file.data)
            archive.addfile(program, io.BytesIO(file.data))
    with path.open("ab") as disk:
        disk.truncate(-(-path.stat().st_size // SECTOR) * SECTOR)


def _write_runner(folder: Path) -> None:
    install_runner(folder)
    for name in PROGRAMS:
        program = folder / "bin" / name
        lines = program.read_text().splitlines(keepends=True)
        program.write_text("".join([f"#!{PYTHON} -ISB\n", *lines[1:]]))
    package = folder / "bin" / "fake_runner"
    shutil.rmtree(package / "__pycache__", ignore_errors=True)
    _compile(package, "opt/remuda/runner/bin")


def _compile(package: Path, place: str) -> None:
    """Compile as pip does, if this computer has the Python version of the machine. Emulated machines are slow at it.

    `place` is the folder of the package on the machine.
    """
    if f"{sys.version_info.major}.{sys.version_info.minor}" != PYTHON_VERSION:
        return
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(
        package, quiet=1, stripdir=str(package.parent), prependdir=f"/{place}", invalidation_mode=mode
    )


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mode = (member.mode & ~0o022) | 0o444
    if member.isdir() or member.mode & 0o100:
        member.mode |= 0o111
    return member
