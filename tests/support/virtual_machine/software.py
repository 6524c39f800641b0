"""The software of a test run: the agent of the current source and the fake runner, as a disk with a tar archive."""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
from importlib.metadata import distribution
from pathlib import Path

import remuda
from remuda.fake_github import PROGRAMS, install_runner
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
        runner = Path(folder) / "runner"
        _write_runner(runner)
        archive.add(source, f"{SITE_PACKAGES}/remuda", filter=_without_bytecode)
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


def _add_metadata(archive: tarfile.TarFile) -> None:
    """The metadata of the installed package, which may be an editable one."""
    found = distribution("remuda")
    text = (found.read_text("METADATA") or "").encode()
    member = tarfile.TarInfo(f"{SITE_PACKAGES}/remuda-{found.version}.dist-info/METADATA")
    member.mode, member.size = 0o644, len(text)
    archive.addfile(member, io.BytesIO(text))


def _without_bytecode(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if Path(member.name).name == "__pycache__" else _of_root(member)


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    member.mode = (member.mode & ~0o022) | 0o444
    if member.isdir() or member.mode & 0o100:
        member.mode |= 0o111
    return member
