"""Jobs as plain processes: files for the listener, and the reset of a local machine."""

# Blocking calls are acceptable in these tests.
# ruff: noqa: ASYNC221, ASYNC240

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from remuda import procfs
from remuda.agent.job_folders import JobFolders
from remuda.agent.processes import KillResult
from remuda.domain.errors import Unavailable
from remuda.domain.instance import Assignment
from tests.support.records import LONG_S

ASSIGNMENT = Assignment(url="https://github.com/acme/widgets", runner_name="runner", labels=("123",))
CLEAN = KillResult(killed=(), survivors=())
#: Makes a tree with folders that are nested more deeply than a path can be long.
DIG = 'i=0; while [ $i -lt 300 ]; do mkdir "$0" && cd -P "$0" || exit 1; i=$((i+1)); done; touch file'


class LocalFolders:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "machine"
        self.pristine = folder / "pristine"
        self.outside = folder / "outside"
        for path in (self.folder / "runner", self.pristine / "bin", self.outside):
            path.mkdir(parents=True)
        (self.pristine / "config.sh").write_text("original")
        (self.pristine / "config.sh").chmod(0o755)
        (self.pristine / "bin" / "link").symlink_to("../config.sh")
        (self.outside / "file").write_text("as it was")
        #: Results of the next kills.
        self.kills = [CLEAN, CLEAN]
        self.jobs = JobFolders(self.folder, pristine=self.pristine, processes=list, kill=lambda: self.kills.pop(0))

    def names(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()}


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalFolders]:
    made = LocalFolders(tmp_path)
    yield made
    # Deep trees of a failed test would prevent pytest's own cleaning.
    subprocess.run(["chmod", "-R", "u+rwx", str(tmp_path)], check=False)
    subprocess.run(["rm", "-rf", str(made.folder)], check=False)


class TestReset:
    async def test_runner_folder_is_restored(self, local: LocalFolders) -> None:
        (local.folder / "runner" / "config.sh").write_text("changed")
        (local.folder / "runner" / ".runner").write_text("{}")
        result = await local.jobs.reset()
        assert result.ok, result.detail
        runner = local.folder / "runner"
        assert {str(path.relative_to(runner)) for path in runner.rglob("*")} == {"config.sh", "bin", "bin/link"}
        assert (runner / "config.sh").read_text() == "original"
        assert os.access(runner / "config.sh", os.X_OK)
        assert (runner / "bin" / "link").readlink() == Path("../config.sh")

    async def test_folders_of_jobs_are_empty_and_private(self, local: LocalFolders) -> None:
        (local.folder / "home").mkdir(mode=0o777)
        for name in ("home/.profile", "work", "tmp"):
            (local.folder / name).write_text("left by a job")
        (local.folder / "logs").mkdir()
        assert (await local.jobs.reset()).ok
        for name in ("home", "work", "tmp"):
            assert list((local.folder / name).iterdir()) == []
            assert (local.folder / name).stat().st_mode & 0o777 == 0o700
        assert local.names() == {"runner", "home", "work", "tmp", "logs"}

    async def test_process_that_cannot_be_killed_fails_the_reset(self, local: LocalFolders) -> None:
        own = procfs.read_process(os.getpid())
        assert own is not None
        local.kills = [KillResult(killed=("stuck",), survivors=(own,))]
        (local.folder / "work").mkdir()
        result = await local.jobs.reset()
        assert not result.ok
        assert result.detail == f"cannot be killed: {Path('/proc/self/comm').read_text().strip()}"
        assert local.names() == {"runner", "work"}, "files are left alone while a process could change them"

    async def test_process_that_comes_back_fails_the_reset(self, local: LocalFolders) -> None:
        local.kills = [KillResult(killed=("sleep",), survivors=()), KillResult(killed=("sleep",), survivors=())]
        result = await local.jobs.reset()
        assert (result.ok, result.detail) == (False, "processes of a job came back")

    async def test_unreadable_folders_are_removed(self, local: LocalFolders) -> None:
        closed = local.folder / "work" / "closed" / "inner"
        closed.mkdir(parents=True)
        (closed / "file").touch()
        for path in (closed, closed.parent, local.folder / "work"):
            path.chmod(0)
        result = await local.jobs.reset()
        assert result.ok, result.detail
        assert list((local.folder / "work").iterdir()) == []

    async def test_deep_trees_are_removed(self, local: LocalFolders) -> None:
        (local.folder / "work").mkdir()
        subprocess.run(["/bin/sh", "-c", DIG, "d" * 100], cwd=local.folder / "work", check=True, timeout=LONG_S)
        result = await local.jobs.reset()
        assert result.ok, result.detail
        assert list((local.folder / "work").iterdir()) == []

    @pytest.mark.parametrize("name", ["home", "work", "runner"])
    async def test_links_are_not_followed(self, local: LocalFolders, name: str) -> None:
        (local.outside / "file").chmod(0o400)
        if name == "runner":
            (local.folder / name).rmdir()
        (local.folder / name).symlink_to(local.outside)
        (local.folder / "tmp").mkdir()
        (local.folder / "tmp" / "link").symlink_to(local.outside)
        assert (await local.jobs.reset()).ok
        assert (local.outside / "file").read_text() == "as it was"
        assert (local.outside / "file").stat().st_mode & 0o777 == 0o400
        assert [path.name for path in local.outside.iterdir()] == ["file"]
        assert not (local.folder / name).is_symlink()

    async def test_names_that_look_like_options_are_removed(self, local: LocalFolders) -> None:
        (local.folder / "work").mkdir()
        for name in ("-rf", "--no-preserve-root", "a\nb"):
            (local.folder / "work" / name).touch()
        assert (await local.jobs.reset()).ok
        assert list((local.folder / "work").iterdir()) == []

    async def test_file_that_cannot_be_removed_fails_the_reset(
        self, local: LocalFolders, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PATH", str(local.outside))
        (local.outside / "chmod").symlink_to("/bin/true")
        (local.outside / "rm").write_text("#!/bin/sh\necho rm: no >&2\nexit 1\n")
        (local.outside / "rm").chmod(0o755)
        result = await local.jobs.reset()
        assert (result.ok, result.detail) == (False, "reset failed: rm: no")

    async def test_missing_software_fails_the_reset(self, local: LocalFolders) -> None:
        subprocess.run(["rm", "-r", str(local.pristine)], check=True)
        result = await local.jobs.reset()
        assert not result.ok
        assert str(local.pristine) in result.detail


class TestStartInFolder:
    async def test_files_get_their_modes_and_replace_links(self, local: LocalFolders) -> None:
        runner = local.jobs.runner_folder
        (runner / ".runner").symlink_to(local.outside / "file")
        await local.jobs.prepare_start(
            ASSIGNMENT, {runner / ".runner": (b"{}", 0o600), local.folder / "hook" / "script": (b"exit", 0o444)}
        )
        assert (runner / ".runner").read_text() == "{}"
        assert (local.outside / "file").read_text() == "as it was"
        assert (runner / ".runner").stat().st_mode & 0o777 == 0o600
        assert (local.folder / "hook" / "script").stat().st_mode & 0o777 == 0o444

    async def test_environment_files_of_an_earlier_job_are_removed(self, local: LocalFolders) -> None:
        runner = local.jobs.runner_folder
        (runner / ".env").symlink_to(local.outside)
        (runner / ".path").mkdir()
        (runner / ".path" / "file").touch()
        await local.jobs.prepare_start(ASSIGNMENT, {runner / ".path": (b"/usr/bin", 0o644)})
        assert {path.name for path in runner.iterdir()} == {".path"}
        assert (runner / ".path").read_text() == "/usr/bin"
        assert (local.outside / "file").read_text() == "as it was"

    async def test_folder_in_place_of_a_file_is_an_error(self, local: LocalFolders) -> None:
        (local.jobs.runner_folder / ".runner").mkdir()
        with pytest.raises(Unavailable, match="cannot start the listener"):
            await local.jobs.prepare_start(ASSIGNMENT, {local.jobs.runner_folder / ".runner": (b"{}", 0o600)})

    async def test_command_runs_the_listener_in_its_folder(self, local: LocalFolders) -> None:
        program = local.jobs.runner_folder / "bin" / "Runner.Listener"
        program.parent.mkdir()
        program.write_text('#!/bin/sh\necho "$0 $1 in $PWD"\n')
        program.chmod(0o755)
        command = await local.jobs.prepare_start(ASSIGNMENT, {})
        done = subprocess.run(command.arguments, capture_output=True, text=True, check=True, timeout=LONG_S)
        assert done.stdout == f"{program} run in {local.jobs.runner_folder}\n"
        assert (command.stdin, command.cgroup) == (None, None)
