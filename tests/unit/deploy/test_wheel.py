"""Content of the wheel: the package alone, without simulation and test code."""

from __future__ import annotations

import tomllib
from pathlib import Path

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


def test_package_data_are_files_of_the_package():
    for pattern in SETTINGS["package-data"]["remuda"]:
        assert ".." not in pattern
        assert any((SOURCE / "remuda").glob(pattern)), pattern
