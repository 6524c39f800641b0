"""The software of a test run: the agent of the current source and the fake runner, as a disk with a tar archive."""

from __future__ import annotations

import compileall
import io
import py_compile
import shutil
import sys
import tarfile
import tempfile
from importlib.metadata import distribution
from pathlib import Path

import remuda
from remuda.fake_github import PROGRAMS, install_runner
from tests.support.virtual_machine.image import PYTHON as PYTHON_VERSION
from tests.support.virtual_machine.image import SITE_PACKAGES, VENV

PYTHON = "/usr/bin/python3"
#: Block devices have a whole number of sectors; tar ignores the zeros at the end.
SECTOR = 512
_COMMAND = f"""#!/{VENV}/bin/python3 -I
import sys
from remuda.__main__ import main
sys.exit(main())
"""


def write_software_disk(path: Path) -> None:
    """Write the archive that the machine unpacks in its root folder before it runs the user data."""
    source = Path(remuda.__file__).parent
    with tempfile.TemporaryDirectory() as folder, tarfile.open(path, "w") as archive:
        runner, package = Path(folder) / "runner", Path(folder) / "remuda"
        _write_runner(runner)
        shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
        _compile(package)
        archive.add(package, f"{SITE_PACKAGES}/remuda", filter=_of_root)
        _add_metadata(archive)
        archive.add(runner, "opt/remuda/runner", filter=_of_root)
        command = tarfile.TarInfo("opt/remuda/bin/remuda")
        command.mode, command.size = 0o755, len(_COMMAND)
        archive.addfile(command, io.BytesIO(_COMMAND.encode()))
    with path.open("ab") as disk:
        disk.truncate(-(-path.stat().st_size // SECTOR) * SECTOR)


def _write_runner(folder: Path) -> None:
    install_runner(folder)
    for name in PROGRAMS:
        program = folder / "bin" / name
        lines = program.read_text().splitlines(keepends=True)
        program.write_text("".join([f"#!{PYTHON} -ISB\n", *lines[1:]]))
    shutil.rmtree(folder / "bin" / "fake_runner" / "__pycache__", ignore_errors=True)


def _compile(package: Path) -> None:
    """Compile as pip does, if this computer has the Python version of the machine. Emulated machines are slow at it."""
    if f"{sys.version_info.major}.{sys.version_info.minor}" != PYTHON_VERSION:
        return
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(
        package, quiet=1, stripdir=str(package.parent), prependdir=f"/{SITE_PACKAGES}", invalidation_mode=mode
    )


def _add_metadata(archive: tarfile.TarFile) -> None:
    """The metadata of the installed package, which may be an editable one."""
    found = distribution("remuda")
    text = (found.read_text("METADATA") or "").encode()
    member = tarfile.TarInfo(f"{SITE_PACKAGES}/remuda-{found.version}.dist-info/METADATA")
    member.mode, member.size = 0o644, len(text)
    archive.addfile(member, io.BytesIO(text))


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mode = (member.mode & ~0o022) | 0o444
    if member.isdir() or member.mode & 0o100:
        member.mode |= 0o111
    return member
