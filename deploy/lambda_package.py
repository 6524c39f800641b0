"""Builder of the Lambda package: `lambda_package.py --to build/remuda-lambda.zip`. Builds are reproducible.

Dependencies are installed as wheels for the platform of Lambda, in the versions of requirements/constraints.txt.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "requirements" / "constraints.txt"
ARCHITECTURES = ("x86_64", "arm64")
#: Wheel platforms that Amazon Linux 2023 supports, newest glibc first.
PLATFORMS = ("manylinux_2_34", "manylinux_2_28", "manylinux_2_17", "manylinux2014")
#: AWS services whose models the function needs, out of hundreds.
SERVICES = ("dynamodb", "ec2", "iam", "secretsmanager", "sqs", "ssm", "sts")
#: Files that contain local paths or that a function does not need.
EXCLUDED = ("__pycache__", "bin", "RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "tests", "docs.json.gz")
#: The earliest timestamp in a zip file.
EPOCH = (1980, 1, 1, 0, 0, 0)
FILE_MODE = 0o100644 << 16
#: Limits of Lambda in bytes.
MAX_ZIPPED = 50 * 1024 * 1024
MAX_UNPACKED = 250 * 1024 * 1024


def requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["aws"]]


def install(folder: Path, *, architecture: str, python: str) -> None:
    """Install wheels only: a build here would be for this computer, not for Lambda."""
    machine = {"arm64": "aarch64"}.get(architecture, architecture)
    platforms = [word for platform in PLATFORMS for word in ("--platform", f"{platform}_{machine}")]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"),
            *("--target", str(folder), "--only-binary", ":all:", "--implementation", "cp", "--python-version", python),
            *platforms,
            *("--constraint", str(CONSTRAINTS)),
            *requirements(),
        ],
        check=True,
    )


def contents(installed: Path) -> Iterator[tuple[str, Path]]:
    """The files of the package by name: Remuda from its source, then the installed dependencies."""
    source = ROOT / "src"
    for file in (source / "remuda").rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            yield file.relative_to(source).as_posix(), file
    for file in installed.rglob("*"):
        name = file.relative_to(installed)
        if file.is_file() and not set(name.parts) & set(EXCLUDED) and _is_used(name.parts):
            yield name.as_posix(), file


def _is_used(parts: Sequence[str]) -> bool:
    """Whether a file is needed. botocore has models of all services; the unused ones are nine tenths of it."""
    is_model = parts[:2] == ("botocore", "data") and len(parts) > 3
    return not is_model or parts[2] in SERVICES


def pack(files: Sequence[tuple[str, Path]], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    unpacked = sum(file.stat().st_size for _, file in files)
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in sorted(files):
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.create_system = 3
            entry.external_attr = FILE_MODE
            archive.writestr(entry, file.read_bytes())
    zipped = target.stat().st_size
    if zipped > MAX_ZIPPED or unpacked > MAX_UNPACKED:
        sys.exit(
            f"{target}: {zipped} bytes, {unpacked} unpacked; the limits of Lambda are {MAX_ZIPPED} and {MAX_UNPACKED}"
        )
    print(f"{target}: {zipped / 1e6:.1f} MB, {unpacked / 1e6:.1f} MB unpacked, {len(files)} files")  # noqa: T201


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "remuda-lambda.zip")
    parser.add_argument("--architecture", choices=ARCHITECTURES, default=ARCHITECTURES[0])
    parser.add_argument("--python", default="3.13", help="version of the function's runtime")
    given = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="remuda-lambda-"))
    try:
        install(folder, architecture=given.architecture, python=given.python)
        pack(list(contents(folder)), given.to)
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
