"""Contents of the wheel and of the bundles, and their requirements."""

from __future__ import annotations

import ast
import io
import shutil
import struct
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import bundles

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETTINGS = PROJECT["tool"]["setuptools"]
#: The dashboard and the local GitHub, which machines, steps and functions do not run.
NOT_IN_BUNDLES = ("remuda/web/", "remuda/fake_github/", "remuda/cli/workflow_file.py")
#: Names of packages whose modules have another name.
PACKAGES = {"jwt": "pyjwt"}
LIMIT_S = 60


def test_the_wheel_contains_no_simulation_and_no_test_code():
    assert SETTINGS["packages"]["find"] == {"where": ["src"]}
    modules = list(SOURCE.rglob("*.py"))
    assert {path.relative_to(SOURCE).parts[0] for path in modules} == {"remuda"}
    assert not {path.stem for path in modules if path.stem.startswith(("test_", "conftest", "simulat"))}
    # setuptools skips folders without an __init__.py.
    assert not {path.parent for path in modules if not (path.parent / "__init__.py").exists()}


def test_package_data_are_the_files_of_the_package_that_are_not_modules():
    named: set[Path] = set()
    for pattern in SETTINGS["package-data"]["remuda"]:
        assert ".." not in pattern
        files = set((SOURCE / "remuda").glob(pattern))
        assert files, pattern
        named |= files
    files = {path for path in (SOURCE / "remuda").rglob("*") if path.is_file()}
    assert {path for path in files - named if path.suffix not in {".py", ".pyc"}} == set()


# Requirements


def required(lines: list[str]) -> set[str]:
    return {bundles.normalized(Requirement(line).name) for line in lines}


def listed() -> list[str]:
    text = (ROOT / "requirements" / "bundle.in").read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def pinned() -> dict[str, Requirement]:
    """The requirements of the bundles by name, without their hashes."""
    return {name: Requirement(entry.partition("\\")[0]) for name, entry in bundles.requirements().items()}


FIX = "run make bundle-requirements"


def test_requirements_are_pinned_as_in_the_constraints_and_have_hashes():
    constraints = (ROOT / "requirements" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    versions = {bundles.normalized(line.partition("==")[0]): line.partition("==")[2] for line in constraints}
    for name, requirement in pinned().items():
        assert str(requirement.specifier) == f"=={versions[name]}", FIX
        assert requirement.marker is None, "pip would evaluate it for the interpreter that builds"
        assert bundles.requirements()[name].count("--hash=sha256:") >= 1, FIX


def test_requirements_are_a_part_of_the_project():
    project = PROJECT["project"]
    everything = required([*project["dependencies"], *project["optional-dependencies"]["aws"]])
    assert required(listed()) <= everything, "add the package to pyproject.toml"
    assert required(project["optional-dependencies"]["aws"]) <= required(listed()), "add the package to bundle.in"


def needed_packages(python: str, machine: str) -> set[str]:
    """Direct and indirect dependencies of the listed packages on a platform."""
    environment = {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": machine,
        "sys_platform": "linux",
        "os_name": "posix",
        "platform_system": "Linux",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    found: set[str] = set()
    waiting = [Requirement(line) for line in listed()]
    while waiting:
        requirement = waiting.pop()
        name = bundles.normalized(requirement.name)
        if name in found:
            continue
        found.add(name)
        extras = [{**environment, "extra": extra} for extra in ("", *requirement.extras)]
        waiting += [
            needed
            for needed in map(Requirement, requires(name) or ())
            if needed.marker is None or any(needed.marker.evaluate(each) for each in extras)
        ]
    return found


def test_requirements_are_what_the_listed_packages_need_on_any_platform():
    needed = [
        needed_packages(python, machine) for python in bundles.PYTHONS for machine in bundles.ARCHITECTURES.values()
    ]
    assert set(pinned()) == set().union(*needed), FIX


def imported(path: Path) -> set[str]:
    """Top-level modules that a module imports, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def test_bundles_have_every_package_that_agent_action_and_functions_import():
    names = {
        PACKAGES.get(name, name)
        for path in SOURCE.rglob("*.py")
        if not path.relative_to(SOURCE).as_posix().startswith(NOT_IN_BUNDLES)
        for name in imported(path) - sys.stdlib_module_names - {"remuda"}
        # Imported by type checkers only.
        if not name.startswith("types_")
    }
    assert {"aiobotocore", "click", "httpx", "pyjwt"} <= names
    assert {bundles.normalized(name) for name in names} <= set(pinned()), f"add it to requirements/bundle.in; {FIX}"


# Contents


def installation(folder: Path, **more: str) -> Path:
    files = {
        "botocore/data/dynamodb/2012-08-10/service-2.json.gz": "model",
        "botocore/data/s3/2006-03-01/service-2.json.gz": "model",
        "botocore/data/endpoints.json": "{}",
        "botocore/__init__.py": "",
        "botocore/__pycache__/__init__.cpython-311.pyc": "compiled",
        "multidict/_multidict.pyi": "",
        "multidict/_testcapi.cpython-311-x86_64-linux-gnu.so": "extension",
        "bin/httpx": "#!/usr/bin/python",
        "httpx-0.28.1.dist-info/RECORD": "../../bin/httpx,sha256=…",
        "httpx-0.28.1.dist-info/METADATA": "Version: 0.28.1",
        "aiohttp-3.14.5.dist-info/WHEEL": "Tag: cp311-cp311-manylinux_2_28_x86_64",
        "cryptography-50.0.2.dist-info/WHEEL": "Tag: cp311-abi3-manylinux_2_34_x86_64",
        **more,
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


class FakePip:
    """Installs one extension module per version of Python, and records the packages of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, set[str]]] = []
        self.shared = ""
        self.code = 0

    def __call__(self, command: list[str], *, input: str, **_options: object) -> subprocess.CompletedProcess[str]:  # noqa: A002 - subprocess.run
        python = command[command.index("--python-version") + 1]
        self.calls.append((python, {line.partition("==")[0] for line in input.splitlines() if "==" in line}))
        assert command[command.index("--requirement") + 1] == "/dev/stdin"
        assert {"--no-deps", "--require-hashes", "--only-binary"} <= set(command)
        tag = "cp" + python.replace(".", "")
        installation(
            Path(command[command.index("--target") + 1]),
            **{
                f"aiohttp/_http_parser.{tag}.so": tag,
                "aiohttp/__init__.py": self.shared and tag,
                "aiohttp-3.14.5.dist-info/WHEEL": f"Tag: {tag}-{tag}-manylinux_2_28_x86_64",
            },
        )
        return subprocess.CompletedProcess(command, self.code)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr("subprocess.run", fake)
    return fake


def test_bundles_contain_only_what_is_imported(pip: FakePip):
    names = set(bundles.libraries("x86_64", ["3.11"]))
    assert {name for name in names if not name.startswith("remuda/")} == {
        "aiohttp/__init__.py",
        "aiohttp/_http_parser.cp311.so",
        "aiohttp-3.14.5.dist-info/WHEEL",
        "botocore/__init__.py",
        "botocore/data/dynamodb/2012-08-10/service-2.json.gz",
        "botocore/data/endpoints.json",
        "cryptography-50.0.2.dist-info/WHEEL",
        "httpx-0.28.1.dist-info/METADATA",
    }
    assert {"remuda/aws_lambda/handler.py", "remuda/adapters/aws/bootstrap.sh", "remuda/py.typed"} <= names
    assert not any("__pycache__" in name for name in names)


def test_one_bundle_serves_all_versions_of_python(pip: FakePip):
    files = bundles.libraries("x86_64", bundles.PYTHONS)
    tags = ["cp" + python.replace(".", "") for python in bundles.PYTHONS]
    assert [files[f"aiohttp/_http_parser.{tag}.so"].data.decode() for tag in tags] == tags
    first, *others = pip.calls
    assert first == (bundles.PYTHONS[0], set(bundles.requirements()))
    assert others == [(python, {"aiohttp"}) for python in bundles.PYTHONS[1:]], "the rest is the same for all versions"


def test_a_module_that_differs_between_versions_is_rejected(pip: FakePip):
    pip.shared = "differs"
    with pytest.raises(SystemExit, match=r"aiohttp/__init__\.py differs"):
        bundles.libraries("x86_64", bundles.PYTHONS)


def test_extension_modules_keep_only_what_is_loaded():
    header = (
        b"\x7fELF\x02\x01" + bytes(10) + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 200, 0, 64, 56, 2, 64, 5, 4)
    )
    segments = b"".join(
        struct.pack("<IIQQQQQQ", 1, 5, offset, offset, offset, size, size, 4096)
        for offset, size in ((0, 176), (176, 8))
    )
    module = header + segments + b"loaded!!" + b"debug information" * 10
    stripped = bundles.without_sections(module)
    assert stripped[64:] == segments + b"loaded!!"
    fields = struct.unpack_from("<HHIQQQIHHHHHH", stripped, 16)
    assert fields == (3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 64, 0, 0), "without a table of sections"
    assert bundles.without_sections(b"text") == b"text"


def test_packages_that_cannot_be_installed_end_the_build(pip: FakePip):
    pip.code = 1
    with pytest.raises(SystemExit, match="pip could not install"):
        bundles.libraries("x86_64", ["3.11"])


FILES = {
    "lib/one.py": bundles.BundleFile(data=b"1"),
    "bin/remuda": bundles.BundleFile(data=b"#!/bin/sh", mode=0o755),
    "python/bin/python3": bundles.BundleFile(data=b"", link="python3.12"),
}


@pytest.mark.parametrize("pack", [bundles.tar_bundle, bundles.zip_bundle])
def test_bundles_do_not_depend_on_the_order_of_files_and_the_time(pack, monkeypatch: pytest.MonkeyPatch):
    first = pack(FILES)
    monkeypatch.setattr("time.time", lambda: 2_000_000_000.0)
    assert pack(dict(reversed(FILES.items()))) == first


def test_entries_have_fixed_owners_times_and_modes():
    with tarfile.open(fileobj=io.BytesIO(bundles.tar_bundle(FILES))) as archive:
        entries = {entry.name: entry for entry in archive}
    assert sorted(entries) == ["bin", "bin/remuda", "lib", "lib/one.py", "python", "python/bin", "python/bin/python3"]
    assert {(entry.uid, entry.gid, entry.uname, entry.gname, entry.mtime) for entry in entries.values()} == {
        (0, 0, "", "", 0)
    }
    assert (entries["lib"].mode, entries["lib/one.py"].mode, entries["bin/remuda"].mode) == (0o755, 0o644, 0o755)
    assert entries["python/bin/python3"].linkname == "python3.12"
    with zipfile.ZipFile(io.BytesIO(bundles.zip_bundle(FILES))) as packed:
        assert {entry.date_time for entry in packed.infolist()} == {bundles.EPOCH}
        assert packed.getinfo("bin/remuda").external_attr >> 16 == 0o100755


def test_bundles_beyond_their_limits_are_rejected(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    small = bundles.BundleFormat(suffix=".zip", limit=1_000)
    monkeypatch.setitem(bundles.KINDS, "lambda", small)
    with pytest.raises(SystemExit, match="the limit is 1000"):
        bundles.build(["lambda"], architecture="x86_64", folder=tmp_path)
    monkeypatch.setattr(bundles, "MAX_UNPACKED", 1_000)
    with pytest.raises(SystemExit, match="limit of Lambda"):
        bundles.build(["lambda"], architecture="x86_64", folder=tmp_path)


def python_archive(folder: Path, *, version: str = "3.12", machine: int = 62) -> Path:
    """An archive like those of python-build-standalone."""
    header = b"\x7fELF" + bytes(14) + struct.pack("<H", machine)
    path = folder / "cpython.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, data in ((f"python/bin/python{version}", header), ("python/lib/__pycache__/os.pyc", b"compiled")):
            entry = tarfile.TarInfo(name)
            entry.mode, entry.size = 0o755, len(data)
            archive.addfile(entry, io.BytesIO(data))
        link = tarfile.TarInfo("python/bin/python3")
        link.type, link.linkname = tarfile.SYMTYPE, f"python{version}"
        archive.addfile(link)
    return path


def test_an_interpreter_that_is_given_is_part_of_the_bundle(pip: FakePip, tmp_path: Path):
    (built,) = bundles.build(["agent"], architecture="x86_64", folder=tmp_path, python_archive=python_archive(tmp_path))
    assert [python for python, _ in pip.calls] == ["3.12"]
    with tarfile.open(built) as archive:
        assert archive.getmember("python/bin/python3.12").mode == 0o755
        assert archive.getmember("python/bin/python3").linkname == "python3.12"
        assert not [name for name in archive.getnames() if "__pycache__" in name]
        launcher = archive.extractfile("bin/remuda")
        assert launcher is not None
        assert "versions='3.12'" in launcher.read().decode().splitlines()


@pytest.mark.parametrize(
    ("archive", "problem"),
    [({"machine": 183}, "is not for x86_64"), ({"version": "3.10"}, r"no python/bin/python3\.11")],
)
def test_an_interpreter_that_cannot_run_it_is_rejected(tmp_path: Path, archive: dict[str, object], problem: str):
    with pytest.raises(SystemExit, match=problem):
        bundles.interpreter(python_archive(tmp_path, **archive), "x86_64")  # type: ignore[arg-type]


def test_the_launcher_knows_every_version_and_shellcheck_accepts_it():
    launcher = bundles.programs(bundles.PYTHONS)["bin/remuda"]
    assert launcher.data == bundles.LAUNCHER.read_bytes(), "its line versions= must list all versions"
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (apt-get install shellcheck): the launcher is not linted")
    command = ["shellcheck", "--severity=style", str(bundles.LAUNCHER)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.stdout == ""
