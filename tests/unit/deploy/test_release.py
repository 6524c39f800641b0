"""The release: its version in all places, and the digests that the action knows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import bundles
import release

ROOT = Path(__file__).parents[3]
VERSION = bundles.version()
TAG = {"GITHUB_REF_TYPE": "tag", "GITHUB_REF_NAME": f"v{VERSION}"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the files that name the version."""
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "src/remuda/__init__.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("deploy/workflows", "docs/howto"):
        shutil.copytree(ROOT / name, tmp_path / name)
    return tmp_path


def change(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_the_version_is_the_same_everywhere(project: Path):
    assert release.version_problems({}) == []
    assert release.version_problems({}, project) == []


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("src/remuda/__init__.py", f'"{VERSION}"', '"9.9.9"'),
        ("CHANGELOG.md", "## Unreleased", "## 9.9.9"),
        ("deploy/workflows/refresh.yml", f"remuda@v{VERSION}", "remuda@v9.9.9"),
        ("docs/howto/github-action.md", f"remuda@v{VERSION}", "remuda@v9.9.9"),
    ],
)
def test_another_version_is_reported(project: Path, name: str, old: str, new: str):
    change(project / name, old, new)
    (problem,) = release.version_problems({}, project)
    assert name in problem


def test_a_tag_needs_its_version_and_a_dated_changelog(project: Path):
    (problem,) = release.version_problems(TAG, project)
    assert problem == f"the newest heading of CHANGELOG.md must be {VERSION}"
    change(project / "CHANGELOG.md", "## Unreleased", f"## [{VERSION}] - 2026-11-17")
    assert release.version_problems(TAG, project) == []
    (problem,) = release.version_problems({**TAG, "GITHUB_REF_NAME": "v9.9.9"}, project)
    assert problem == f"the tag is 'v9.9.9', but the version is {VERSION}"


def test_digests_are_listed_in_the_format_of_sha256sum(tmp_path: Path):
    for name in ("b", "a", release.SUMS):
        (tmp_path / name).write_bytes(b"")
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert release.write_sums(tmp_path) == f"{empty}  a\n{empty}  b\n"
    assert (tmp_path / release.SUMS).read_text(encoding="utf-8") == f"{empty}  a\n{empty}  b\n"


def test_a_tag_needs_the_digests_in_the_action(tmp_path: Path):
    release.check_action_sums("sums", {}, tmp_path)
    with pytest.raises(SystemExit, match="must be a copy of dist/SHA256SUMS"):
        release.check_action_sums("sums", TAG, tmp_path)
    known = tmp_path / release.ACTION_SUMS
    known.parent.mkdir(parents=True)
    known.write_text("older")
    with pytest.raises(SystemExit, match="must be a copy of dist/SHA256SUMS"):
        release.check_action_sums("sums", TAG, tmp_path)
    known.write_text("sums")
    release.check_action_sums("sums", TAG, tmp_path)
