"""Builder of the bundles for the agent, the action in direct mode and the functions. Builds are reproducible.

All have the same files: Remuda and its dependencies as wheels with the hashes of requirements/bundle.txt, for every
supported version of Python. Extension modules have the version in their names, so one folder serves all of them.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUIREMENTS = ROOT / "requirements" / "bundle.txt"
LAUNCHER = ROOT / "deploy" / "launcher.sh"
#: Architectures with the names of their wheels.
ARCHITECTURES = {"x86_64": "x86_64", "arm64": "aarch64"}
#: Field e_machine in the header of ELF files.
ELF_MACHINES = {"x86_64": 62, "arm64": 183}
#: Versions of CPython with extension modules in a bundle.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
#: Wheel platforms that Amazon Linux 2023, Debian 12 and Ubuntu 22.04 support: glibc 2.34 or newer.
PLATFORMS = ("manylinux_2_34", "manylinux_2_28", "manylinux_2_17", "manylinux2014")
#: AWS services whose models Remuda needs, out of hundreds.
SERVICES = frozenset({"cloudwatch", "dynamodb", "ec2", "iam", "secretsmanager", "sqs", "ssm", "sts"})
#: Files that contain local paths, or that no one imports.
EXCLUDED = frozenset(
    {"__pycache__", "bin", "RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "tests", "docs.json.gz"}
)
EXCLUDED_SUFFIXES = (".c", ".h", ".pxd", ".pyi", ".pyx")
#: The earliest timestamp in a zip file.
EPOCH = (1980, 1, 1, 0, 0, 0)
FILE_MODE, PROGRAM_MODE = 0o644, 0o755
MB = 1_000_000
#: Limit of Lambda in bytes.
MAX_UNPACKED = 250 * 1024 * 1024
_REQUIREMENT = re.compile(r"^[^\s#].*?(?=^\S|\Z)", re.MULTILINE | re.DOTALL)


#: The programs of a bundle with the modules of their function `main`.
PROGRAMS = {"remuda": "remuda.__main__", "remuda-action": "remuda.action.__main__"}
PROGRAM = """import os.path
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))
from {module} import main

sys.exit(main())
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleFormat:
    suffix: str
    #: Bytes.
    limit: int


KINDS = {
    "agent": BundleFormat(suffix=".tar.gz", limit=25 * MB),
    "direct": BundleFormat(suffix=".tar.gz", limit=25 * MB),
    "lambda": BundleFormat(suffix=".zip", limit=30 * MB),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleFile:
    data: bytes
    mode: int = FILE_MODE
    #: Target of a symbolic link, or empty.
    link: str = ""


def version(root: Path = ROOT) -> str:
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def requirements() -> dict[str, str]:
    """The entries of the requirements file by name, with their hashes."""
    text = REQUIREMENTS.read_text(encoding="utf-8")
    return {entry.partition("==")[0]: entry for entry in _REQUIREMENT.findall(text)}


def libraries(architecture: str, pythons: Sequence[str]) -> dict[str, BundleFile]:
    """Remuda and its dependencies by file name."""
    source = ROOT / "src"
    files = {
        file.relative_to(source).as_posix(): BundleFile(data=file.read_bytes())
        for file in (source / "remuda").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    wanted = requirements()
    for python in pythons:
        with tempfile.TemporaryDirectory(prefix="remuda-bundle-") as folder:
            installed = Path(folder, "installed")
            install(wanted, installed, architecture, python)
            _merge(files, installed)
            # The other packages have the same files for every version.
            wanted = {name: entry for name, entry in wanted.items() if name in _versioned(installed, python)}
    return files


def install(wanted: Mapping[str, str], folder: Path, architecture: str, python: str) -> None:
    """Install wheels only: a build here would be for this computer.

    pip evaluates markers for this interpreter, not for `python`. So the file lists all packages without markers.
    """
    machine = ARCHITECTURES[architecture]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"),
            *("--no-deps", "--require-hashes", "--only-binary", ":all:", "--requirement", "/dev/stdin"),
            *("--target", str(folder), "--implementation", "cp", "--python-version", python),
            *(word for platform in PLATFORMS for word in ("--platform", f"{platform}_{machine}")),
        ],
        input="".join(wanted.values()),
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"pip could not install the packages of {REQUIREMENTS.name}; its output is above")


def _merge(files: dict[str, BundleFile], installed: Path) -> None:
    for file in installed.rglob("*"):
        parts = file.relative_to(installed).parts
        if not file.is_file() or not is_used(parts):
            continue
        name, found = "/".join(parts), BundleFile(data=without_sections(file.read_bytes()))
        # Metadata name the platform of the wheel.
        if files.setdefault(name, found) != found and not parts[0].endswith(".dist-info"):
            sys.exit(f"{name} differs between versions of Python, so one bundle cannot serve them all")


def without_sections(data: bytes) -> bytes:
    """An extension module without the parts that are not loaded: debug information, two thirds of most.

    Loaders use the segments only (elf(5)), so sections can go together with their table at the end of the file.
    """
    if not data.startswith(b"\x7fELF\x02\x01"):
        return data
    (table,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    # Fields p_offset and p_filesz of the program headers.
    segments = [struct.unpack_from("<Q16xQ", data, table + number * size + 8) for number in range(count)]
    kept = bytearray(data[: max(offset + length for offset, length in segments)])
    struct.pack_into("<Q", kept, 40, 0)
    struct.pack_into("<HH", kept, 60, 0, 0)
    return bytes(kept)


def is_used(parts: Sequence[str]) -> bool:
    """Whether a file is needed. botocore has models of all services; the unused ones are nine tenths of it."""
    if set(parts) & EXCLUDED or parts[-1].endswith(EXCLUDED_SUFFIXES) or parts[-1].startswith("_testcapi."):
        return False
    is_model = parts[:2] == ("botocore", "data") and len(parts) > 3
    return not is_model or parts[2] in SERVICES


def _versioned(installed: Path, python: str) -> set[str]:
    """Names of the packages whose wheels are for one version of Python."""
    tag = f"-{_tag(python)}-"
    return {
        normalized(metadata.parent.name.partition("-")[0])
        for metadata in installed.glob("*.dist-info/WHEEL")
        if tag in metadata.read_text(encoding="utf-8")
    }


def _tag(python: str) -> str:
    return "cp" + python.replace(".", "")


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def interpreter(archive: Path, architecture: str) -> tuple[str, dict[str, BundleFile]]:
    """Version and files of an `install_only` archive of python-build-standalone, below the folder `python`."""
    files: dict[str, BundleFile] = {}
    with tarfile.open(archive) as content:
        for member in content:
            name = member.name.removeprefix("./")
            if not name.startswith("python/") or "/../" in f"/{name}/" or "__pycache__" in name.split("/"):
                continue
            if member.issym():
                files[name] = BundleFile(data=b"", link=member.linkname)
            elif member.isfile() or member.islnk():
                opened = content.extractfile(member)
                data = opened.read() if opened else b""
                files[name] = BundleFile(data=data, mode=PROGRAM_MODE if member.mode & 0o100 else FILE_MODE)
    for python in PYTHONS:
        program = files.get(f"python/bin/python{python}")
        if program is not None:
            if int.from_bytes(program.data[18:20], "little") != ELF_MACHINES[architecture]:
                sys.exit(f"{archive} is not for {architecture}; give an archive for this architecture")
            return python, files
    sys.exit(f"{archive} has no python/bin/python{PYTHONS[0]} to {PYTHONS[-1]}; give an install_only archive")


def programs(pythons: Sequence[str]) -> dict[str, BundleFile]:
    """The launchers for these versions of Python, and what they run."""
    text = LAUNCHER.read_text(encoding="utf-8")
    line = re.compile(r"^versions='[0-9. ]*'$", re.MULTILINE)
    text, replaced = line.subn(f"versions='{' '.join(reversed(pythons))}'", text)
    if replaced != 1:
        sys.exit(f"{LAUNCHER} must have one line versions='…'")
    launcher = BundleFile(data=text.encode(), mode=PROGRAM_MODE)
    files = {}
    for name, module in PROGRAMS.items():
        files[f"bin/{name}"] = launcher
        files[f"lib/bin/{name}"] = BundleFile(data=PROGRAM.format(module=module).encode())
    return files


def tar_bundle(files: Mapping[str, BundleFile]) -> bytes:
    packed = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=packed, mtime=0) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        folders = {parent for name in files for parent in _parents(name)}
        for name in sorted({*files, *folders}):
            entry = tarfile.TarInfo(name)
            file = files.get(name)
            if file is None:
                entry.type, entry.mode = tarfile.DIRTYPE, PROGRAM_MODE
            elif file.link:
                entry.type, entry.linkname = tarfile.SYMTYPE, file.link
            else:
                entry.mode, entry.size = file.mode, len(file.data)
            archive.addfile(entry, io.BytesIO(file.data) if file else None)
    return packed.getvalue()


def _parents(name: str) -> Iterator[str]:
    return (str(parent) for parent in Path(name).parents if str(parent) != ".")


def zip_bundle(files: Mapping[str, BundleFile]) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(files):
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3
            entry.external_attr = (0o100000 | files[name].mode) << 16
            archive.writestr(entry, files[name].data)
    return packed.getvalue()


def build(
    kinds: Sequence[str],
    *,
    architecture: str,
    folder: Path,
    pythons: Sequence[str] = PYTHONS,
    python_archive: Path | None = None,
) -> list[Path]:
    """Build these bundles for one architecture and print their digests."""
    carried: dict[str, BundleFile] = {}
    if python_archive is not None:
        python, carried = interpreter(python_archive, architecture)
        pythons = (python,)
    library = libraries(architecture, pythons)
    unpacked = sum(len(file.data) for file in library.values())
    if unpacked > MAX_UNPACKED:
        sys.exit(f"the libraries have {unpacked} bytes; the limit of Lambda is {MAX_UNPACKED}")
    machine = {**programs(pythons), **{f"lib/{name}": file for name, file in library.items()}, **carried}
    folder.mkdir(parents=True, exist_ok=True)
    built = []
    packed = tar_bundle(machine) if set(kinds) - {"lambda"} else b""
    for kind in kinds:
        data = zip_bundle(library) if kind == "lambda" else packed
        target = folder / f"remuda-{kind}-{version()}-{architecture}{KINDS[kind].suffix}"
        if len(data) > KINDS[kind].limit and not carried:
            sys.exit(f"{target.name} has {len(data)} bytes; the limit is {KINDS[kind].limit}")
        target.write_bytes(data)
        print(f"{hashlib.sha256(data).hexdigest()}  {target} ({len(data) / MB:.1f} MB)")  # noqa: T201
        built.append(target)
    return built


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="+", choices=list(KINDS), metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="folder of the bundles")
    parser.add_argument("--architecture", nargs="+", choices=list(ARCHITECTURES), default=list(ARCHITECTURES))
    parser.add_argument("--python", nargs="+", choices=PYTHONS, default=PYTHONS, help="versions of Python")
    parser.add_argument("--python-archive", type=Path, help="an interpreter for agent and direct: install_only.tar.gz")
    given = parser.parse_args(arguments)
    if given.python_archive and (len(given.architecture) > 1 or "lambda" in given.kinds):
        parser.error("--python-archive needs one --architecture, and is not for lambda")
    for architecture in given.architecture:
        build(
            given.kinds,
            architecture=architecture,
            folder=given.to,
            pythons=given.python,
            python_archive=given.python_archive,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
