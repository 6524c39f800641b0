"""The release: its version in all places, and the digests that the action knows."""

from __future__ import annotations

import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest

import bundles
import fork
import release

ROOT = Path(__file__).parents[3]
VERSION = bundles.version()
TAG = {"GITHUB_REF_TYPE": "tag", "GITHUB_REF_NAME": f"v{VERSION}"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the files that name the version."""
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "src/remuda/__init__.py", "deploy/repository.txt"):
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
        ("deploy/workflows/refresh.yml", f"remuda@v{VERSION}", "remuda@v9.9.9"),
        ("docs/howto/github-action.md", f"remuda@v{VERSION}", "remuda@v9.9.9"),
    ],
)
def test_another_version_is_reported(project: Path, name: str, old: str, new: str):
    change(project / name, old, new)
    (problem,) = release.version_problems({}, project)
    assert name in problem


SECTION = f"## {VERSION} - 2026-11-17"


def test_a_tag_needs_its_version():
    # The changelog of the present tree may have later changes, which is a problem of its own.
    problems = release.version_problems({**TAG, "GITHUB_REF_NAME": "v9.9.9"})
    assert f"the tag is 'v9.9.9', but the version is {VERSION}" in problems


@pytest.mark.parametrize(
    ("text", "is_tag", "expected"),
    [
        (f"{SECTION}\n\n- One.\n", True, []),
        (f"## Unreleased\n\n- Two.\n\n{SECTION}\n\n- One.\n", False, []),
        (
            f"## Unreleased\n\n- Two.\n\n{SECTION}\n\n- One.\n",
            True,
            [f"the newest heading of CHANGELOG.md must be {VERSION}"],
        ),
        (
            f"## {VERSION}\n\n- One.\n",
            False,
            [f"CHANGELOG.md must have a heading '## {VERSION} - YYYY-MM-DD'"],
        ),
        (
            f"{SECTION}\n{'- One.' + chr(10)}" + "- More.\n" * 40,
            False,
            [f"the section {VERSION} of CHANGELOG.md has 41 lines, at most 40 are read"],
        ),
    ],
    ids=["release", "later changes", "unreleased tag", "no date", "too long"],
)
def test_a_version_has_a_dated_section_that_people_read(text: str, expected: list[str], *, is_tag: bool):
    assert release.changelog_problems(text, VERSION, is_tag=is_tag) == expected


def test_the_release_check_names_every_step(tmp_path: Path):
    for command in ("init -q", "remote add origin git@github.com:acme/remuda.git"):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
    for name in ("pyproject.toml", "deploy/repository.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "deploy" / "repository.txt").write_text("YOUR_ORG/remuda\n")
    run = partial(subprocess.run, cwd=tmp_path, check=True)
    identity = ("-c", "user.name=a", "-c", "user.email=a@b.example")
    run(["git", "add", "."])
    run(["git", *identity, "commit", "-q", "-m", "one"])
    steps = release.release_problems(tmp_path)
    assert [step.partition(" ")[0] for step in steps] == ["files", "deploy/action/SHA256SUMS", "HEAD"]
    assert fork.write_address("acme/remuda", tmp_path) == []
    (tmp_path / "deploy" / "action").mkdir()
    for folder in ("dist", "deploy/action"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "SHA256SUMS").write_text("same")
    (tmp_path / ".gitignore").write_text("dist\n")
    run(["git", "add", "."])
    run(["git", *identity, "commit", "-q", "-m", "two"])
    run(["git", "tag", f"v{VERSION}"])
    assert release.release_problems(tmp_path) == []
    (tmp_path / "dist" / "SHA256SUMS").write_text("other")
    (step,) = release.release_problems(tmp_path)
    assert step == "deploy/action/SHA256SUMS differs from dist/SHA256SUMS: copy it again"


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
