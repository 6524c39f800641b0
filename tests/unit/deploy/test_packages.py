"""Contents of the wheel and of the Lambda package."""

from __future__ import annotations

import os
import tomllib
import zipfile
from pathlib import Path

import pytest

import lambda_package

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src"
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]


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


def package_files(folder: Path) -> list[tuple[str, Path]]:
    installed = folder / "installed"
    files = {
        "botocore/data/dynamodb/2012-08-10/service-2.json.gz": "model",
        "botocore/data/s3/2006-03-01/service-2.json.gz": "model",
        "botocore/data/endpoints.json": "{}",
        "botocore/__init__.py": "",
        "botocore/__pycache__/__init__.cpython-311.pyc": "compiled",
        "bin/httpx": "#!/usr/bin/python",
        "httpx-0.28.1.dist-info/RECORD": "../../bin/httpx,sha256=…",
        "httpx-0.28.1.dist-info/METADATA": "Version: 0.28.1",
    }
    for name, text in files.items():
        (installed / name).parent.mkdir(parents=True, exist_ok=True)
        (installed / name).write_text(text)
    return list(lambda_package.contents(installed))


def test_the_package_contains_only_what_a_function_needs(tmp_path: Path):
    names = {name for name, _ in package_files(tmp_path)}
    assert {name for name in names if not name.startswith("remuda/")} == {
        "botocore/__init__.py",
        "botocore/data/dynamodb/2012-08-10/service-2.json.gz",
        "botocore/data/endpoints.json",
        "httpx-0.28.1.dist-info/METADATA",
    }
    assert {"remuda/aws_lambda/handler.py", "remuda/adapters/aws/bootstrap.sh", "remuda/py.typed"} <= names
    assert not any("__pycache__" in name for name in names)


def test_the_package_does_not_depend_on_times_and_order_of_files(tmp_path: Path):
    files = package_files(tmp_path)
    first, second = tmp_path / "first.zip", tmp_path / "second.zip"
    lambda_package.pack(files, first)
    for _, file in files:
        if file.is_relative_to(tmp_path):
            os.utime(file, (1, 1))
            file.chmod(0o600)
    lambda_package.pack(files[::-1], second)
    assert first.read_bytes() == second.read_bytes()
    assert {entry.date_time for entry in zipfile.ZipFile(first).infolist()} == {lambda_package.EPOCH}


def test_a_package_beyond_the_limits_of_lambda_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lambda_package, "MAX_ZIPPED", 1_000)
    with pytest.raises(SystemExit, match="limits of Lambda"):
        lambda_package.pack(package_files(tmp_path), tmp_path / "big.zip")


def test_requirements_contain_the_aws_extra_and_no_test_tools():
    words = " ".join(lambda_package.requirements())
    assert "aiobotocore" in words
    assert "pytest" not in words
