"""Snapshots of the local repository, which steps with actions/checkout copy. Jobs never get the user's own folder."""

from __future__ import annotations

import asyncio
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from remuda.domain.errors import UserError

#: Limits of a folder that is no git repository.
MAX_FILES = 20_000
MAX_FOLDER_BYTES = 512 * 1024 * 1024
#: Seconds that one git command may take.
GIT_LIMIT_S = 300.0
NO_COMMIT = "0" * 40
DEFAULT_BRANCH = "main"
_WORKFLOWS = (".github", "workflows")


@dataclass(frozen=True, kw_only=True, slots=True)
class Repository:
    """The folder that contains the workflow: the root of its git repository, if it has one."""

    folder: Path
    #: Empty if it is no git repository, or has no commit.
    commit: str = ""
    branch: str = DEFAULT_BRANCH
    #: Whether there are changes that HEAD does not contain.
    has_changes: bool = False

    @property
    def summary(self) -> str:
        if not self.commit:
            return f"the files of {self.folder}"
        changes = "; uncommitted changes are not included" if self.has_changes else ""
        return f"commit {self.commit[:10]} of {self.folder}{changes}"


async def find_repository(folder: Path) -> Repository:
    """The repository of the folder that contains the workflow."""
    root = (await _git(folder, "rev-parse", "--show-toplevel") or "").strip()
    commit = (await _git(folder, "rev-parse", "--verify", "HEAD^{commit}") or "").strip()
    if root and commit:
        branch = (await _git(folder, "symbolic-ref", "--quiet", "--short", "HEAD") or "").strip()
        changes = await _git(folder, "status", "--porcelain")
        return Repository(
            folder=Path(root), commit=commit, branch=branch or DEFAULT_BRANCH, has_changes=bool((changes or "").strip())
        )
    if folder.parts[-len(_WORKFLOWS) :] == _WORKFLOWS:
        folder = folder.parent.parent
    return Repository(folder=folder)


async def take_snapshot(
    repository: Repository, target: Path, *, state: Path, with_history: bool = False
) -> dict[str, str]:
    """Copy HEAD or the files to `target`. Return the description that the runner's checkout step reads."""
    if repository.commit:
        depth = () if with_history else ("--depth", "1")
        words = ("clone", "--quiet", "--bare", *depth, f"file://{repository.folder}", str(target))
        done = await _git(repository.folder, *words, show_error=True)
        if done is None:
            raise _error(repository, "cannot be cloned", "run git clone there to see why")
        return {"kind": "git", "path": str(target)}
    await asyncio.to_thread(_copy_files, repository, target, state)
    return {"kind": "files", "path": str(target)}


def _copy_files(repository: Repository, target: Path, state: Path) -> None:
    files = size = 0
    for folder, folders, names in os.walk(repository.folder):
        here = Path(folder)
        folders[:] = [name for name in folders if here / name not in {state, target}]
        files += len(names)
        size += sum((here / name).lstat().st_size for name in names)
        if files > MAX_FILES or size > MAX_FOLDER_BYTES:
            limit = f"{MAX_FILES} files or {MAX_FOLDER_BYTES // 1024**2} MiB"
            raise _error(repository, f"has more than {limit} and is no git repository", "run git init and commit there")
    skipped = {str(state), str(target)}
    shutil.copytree(
        repository.folder,
        target,
        symlinks=True,
        ignore=lambda folder, names: [name for name in names if str(Path(folder) / name) in skipped],
    )


def _error(repository: Repository, what: str, fix: str) -> UserError:
    return UserError(f"{repository.folder} {what}, so actions/checkout cannot copy it", field="FILE", fix=fix)


async def _git(folder: Path, *words: str, show_error: bool = False) -> str | None:
    """The output of a git command, or None if it fails or git is missing."""
    try:
        process = await asyncio.create_subprocess_exec(
            "git",
            *words,
            cwd=folder,
            # A git hook that calls run-workflow sets variables that name another repository.
            env={name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=None if show_error else asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return None
    try:
        async with asyncio.timeout(GIT_LIMIT_S):
            output, _ = await process.communicate()
    except BaseException:
        process.kill()
        raise
    return output.decode(errors="replace") if process.returncode == 0 else None
