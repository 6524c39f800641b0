"""Snapshots of the local repository for actions/checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from remuda.cli import checkout
from remuda.cli.checkout import find_repository, take_snapshot
from remuda.domain.errors import UserError


def git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), "-c", "user.name=n", "-c", "user.email=e", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    (made / ".github" / "workflows").mkdir(parents=True)
    (made / "file").write_text("one")
    return made


async def test_folder_without_git_is_copied_without_the_state_of_the_backend(folder: Path, tmp_path: Path) -> None:
    state = folder / ".remuda"
    state.mkdir()
    (state / "remuda.db").write_text("secret")
    (folder / "link").symlink_to("file")
    repository = await find_repository(folder / ".github" / "workflows")
    assert (repository.folder, repository.commit) == (folder, "")
    source = await take_snapshot(repository, tmp_path / "copy", state=state)
    assert source == {"kind": "files", "path": str(tmp_path / "copy")}
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [".github", "file", "link"]
    assert (tmp_path / "copy" / "link").is_symlink()


async def test_large_folder_without_git_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkout, "MAX_FOLDER_BYTES", 2)
    with pytest.raises(UserError, match="is no git repository"):
        await take_snapshot(await find_repository(folder), tmp_path / "copy", state=tmp_path)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("with_history", [True, False])
async def test_commit_is_copied_without_uncommitted_changes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, with_history: bool
) -> None:
    git(folder, "init", "--quiet", "--initial-branch", "topic")
    for text in ("one", "two"):
        (folder / "file").write_text(text)
        git(folder, "add", ".")
        git(folder, "commit", "--quiet", "-m", text)
    (folder / "file").write_text("changed")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "of-a-hook"))
    repository = await find_repository(folder / ".github" / "workflows")
    monkeypatch.delenv("GIT_DIR")
    assert (repository.folder, repository.commit) == (folder, git(folder, "rev-parse", "HEAD"))
    assert (repository.branch, repository.has_changes) == ("topic", True)
    target = tmp_path / "copy"
    source = await take_snapshot(repository, target, state=tmp_path, with_history=with_history)
    assert source["kind"] == "git"
    assert git(target, "show", "HEAD:file") == "two"
    assert git(target, "rev-list", "--count", "HEAD") == ("2" if with_history else "1")
