"""The machine reset against what jobs leave behind, by accident or not."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from remuda import procfs
from remuda.adapters.system.clock import SystemClock
from remuda.agent import processes
from remuda.agent.findings import MAX_DETAIL, Finding, Kind
from remuda.agent.reset import Reset, erase, manifest
from remuda.domain.errors import Unavailable
from tests.support.other_user import ROOT_ONLY, UID, other_user
from tests.support.records import LONG_S

SUBREAPER = """
import ctypes, signal, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
for line in sys.stdin:
    subprocess.run(line, shell=True)
    print("done", flush=True)
"""
#: Forks twice, in a session of its own, with an empty environment and nothing open: all that a daemon can do to hide.
DAEMON = """env -i setsid {python} -c '
import os
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
os.chdir("/")
for descriptor in range(10):
    try: os.close(descriptor)
    except OSError: pass
import signal
signal.pause()
'"""


class Supervisor:
    """Adopts the orphans of the commands that it is told to run."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SUBREAPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._process.pid
        self._wait("ready")

    def run(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()
        self._wait("done")

    def _wait(self, word: str) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline().strip() == word

    def close(self) -> None:
        processes.kill_descendants(self.pid, keep=(), clock=SystemClock(), limit_s=LONG_S)
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    made = Supervisor()
    yield made
    made.close()


class Machine:
    def __init__(self, root: Path, supervisor: Supervisor) -> None:
        self.pristine = root / "pristine"
        (self.pristine / "bin" / "deep").mkdir(parents=True)
        (self.pristine / "config.sh").write_text("#!/bin/sh\n")
        (self.pristine / "config.sh").chmod(0o755)
        (self.pristine / "bin" / "Runner.Listener").write_bytes(b"\0" * 5000)
        (self.pristine / "bin" / "node").symlink_to("deep/node")
        self.folder = root / "machine"
        self.folder.mkdir()
        self.runner = self.folder / "runner"
        shutil.copytree(self.pristine, self.runner, symlinks=True)
        self.rooms = [self.folder / name for name in ("home", "work", "tmp")]
        for room in self.rooms:
            room.mkdir(mode=0o700)
        self.outside = root / "outside"
        self.outside.mkdir()
        (self.outside / "precious").write_text("precious")
        self.reset = Reset(
            kill=partial(processes.kill_descendants, supervisor.pid, keep=(), clock=SystemClock(), limit_s=LONG_S),
            runner_folder=self.runner,
            pristine=self.pristine,
            recreate=self.rooms,
        )

    def is_clean(self) -> bool:
        names = {path.name for path in self.folder.iterdir()}
        rooms = all(not room.is_symlink() and list(room.iterdir()) == [] for room in self.rooms)
        modes = all(room.stat().st_mode & 0o777 == 0o700 for room in self.rooms)
        return names == {"runner", "home", "work", "tmp"} and rooms and modes and self.runner_is_pristine()

    def runner_is_pristine(self) -> bool:
        return manifest(self.runner) == manifest(self.pristine)

    def nothing_outside_was_touched(self) -> bool:
        precious = (self.outside / "precious").read_text()
        return precious == "precious" and self.outside.stat().st_mode & 0o777 == 0o755


@pytest.fixture
def machine(tmp_path: Path, supervisor: Supervisor) -> Machine:
    os.umask(0o022)
    return Machine(tmp_path, supervisor)


async def test_a_clean_machine_stays_so(machine: Machine) -> None:
    outcome = await machine.reset.run()
    assert outcome.ok
    assert outcome.detail == "nothing was left"
    assert machine.is_clean()


async def test_what_jobs_leave_is_removed_and_told(machine: Machine) -> None:
    (machine.rooms[0] / ".bashrc").write_text("alias sudo=…")
    (machine.rooms[1] / "repo" / "src").mkdir(parents=True)
    (machine.rooms[1] / "repo" / "src" / "a.c").write_text("")
    (machine.runner / "bin" / "Runner.Listener").write_bytes(b"\0" * 4999 + b"\1")
    (machine.runner / "config.sh").chmod(0o777)
    (machine.runner / ".runner").write_text("{}")
    (machine.runner / "bin" / "node").unlink()

    outcome = await machine.reset.run()

    assert outcome.ok, outcome.detail
    assert outcome.found == {
        "files in home": 1,
        "files in work": 1,
        "changed runner files": 4,
    }
    for name in (".bashrc", "repo", "Runner.Listener", ".runner", "and 1 more"):
        assert name in outcome.detail
    assert machine.is_clean()


async def test_what_the_runner_makes_for_every_job_is_removed_without_a_word(machine: Machine) -> None:
    work = machine.rooms[1]
    usual = [work / name for name in ("_tool", "_temp", "_actions", "_PipelineMapping")]
    usual += [machine.runner / "_diag", machine.runner / "_work"]
    for folder in usual:
        folder.mkdir()
        (folder / "file").write_text("")
    (work / ".remuda-refused").write_text("9 evil/corp")
    outcome = await machine.reset.run()
    assert (outcome.ok, outcome.detail, outcome.found) == (True, "nothing was left", {})
    assert machine.is_clean()
    # The same names elsewhere are a job's.
    (machine.rooms[0] / "_diag").mkdir()
    (machine.runner / "bin" / "_work").mkdir()
    assert (await machine.reset.run()).found == {"files in home": 1, "changed runner files": 1}


async def test_many_files_and_long_names(machine: Machine) -> None:
    for number in range(10_000):
        (machine.rooms[1] / f"{number:03d}{'x' * 200}").touch()
    outcome = await machine.reset.run()
    assert outcome.ok
    assert "10000 files in work" in outcome.detail
    assert len(outcome.detail) <= MAX_DETAIL
    assert machine.is_clean()


async def test_names_that_are_no_text(machine: Machine) -> None:
    for name in (b"new\nline", b"\xff\xfe", b"\x1b[2J", b"-rf", "ü".encode()):
        (machine.rooms[0] / os.fsdecode(name)).touch()
        (machine.runner / os.fsdecode(name)).mkdir()
    outcome = await machine.reset.run()
    assert outcome.ok
    assert outcome.detail.isprintable()
    assert machine.is_clean()


async def test_pipes_sockets_and_the_like(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(machine.rooms[2] / "fifo")
    (machine.runner / "config.sh").unlink()
    os.mkfifo(machine.runner / "config.sh")
    with socket.socket(socket.AF_UNIX) as server:
        # By a short name: socket paths are limited.
        monkeypatch.chdir(machine.rooms[0])
        server.bind("s")
        monkeypatch.undo()
    assert (await machine.reset.run()).ok
    assert machine.is_clean()


async def test_links_are_not_followed(machine: Machine) -> None:
    (machine.rooms[0] / "link").symlink_to(machine.outside)
    (machine.rooms[1]).rmdir()
    machine.rooms[1].symlink_to(machine.outside)
    shutil.rmtree(machine.runner / "bin")
    (machine.runner / "bin").symlink_to(machine.outside)
    (machine.runner / "config.sh").unlink()
    (machine.runner / "config.sh").symlink_to(machine.outside / "precious")
    (machine.runner / "more").symlink_to("/")

    assert (await machine.reset.run()).ok
    assert machine.is_clean()
    assert machine.nothing_outside_was_touched()


async def test_the_runner_folder_replaced_by_a_link(machine: Machine) -> None:
    shutil.rmtree(machine.runner)
    machine.runner.symlink_to(machine.outside)
    assert (await machine.reset.run()).ok
    assert machine.is_clean()
    assert machine.nothing_outside_was_touched()


async def test_the_machine_folder_replaced_is_no_machine(machine: Machine, tmp_path: Path) -> None:
    machine.folder.rename(tmp_path / "moved")
    machine.folder.symlink_to(machine.outside)
    outcome = await machine.reset.run()
    assert not outcome.ok
    assert "not the folder it was" in outcome.detail
    assert machine.nothing_outside_was_touched()


async def test_a_second_name_of_a_file_is_cut_off(machine: Machine) -> None:
    (machine.outside / "config.sh").hardlink_to(machine.runner / "config.sh")
    assert (await machine.reset.run()).ok
    assert (machine.runner / "config.sh").stat().st_nlink == 1


async def test_attributes_are_part_of_what_must_be_the_same(machine: Machine) -> None:
    os.setxattr(machine.pristine / "config.sh", "user.kept", b"1")
    os.setxattr(machine.pristine / "bin", "user.kept", b"1")
    os.setxattr(machine.runner / "config.sh", "user.planted", b"1")
    os.setxattr(machine.runner / "bin", "user.planted", b"1")
    # Read and write for user 1: what is made in the folder later would get it.
    rights = ((0x01, 7, 2**32 - 1), (0x02, 7, 1), (0x04, 5, 2**32 - 1), (0x10, 7, 2**32 - 1), (0x20, 5, 2**32 - 1))
    text = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in rights)
    os.setxattr(machine.runner / "bin" / "deep", "system.posix_acl_default", text)
    os.setxattr(machine.runner / "bin" / "Runner.Listener", "system.posix_acl_access", text)
    outcome = await machine.reset.run()
    assert outcome.ok, outcome.detail
    assert outcome.found == {"changed runner files": 4}
    assert machine.is_clean()
    assert os.listxattr(machine.runner / "bin") == ["user.kept"]
    assert os.listxattr(machine.runner / "bin" / "deep") == []


async def test_a_changed_pristine_copy_is_noticed(machine: Machine) -> None:
    await machine.reset.prepare()
    (machine.pristine / "config.sh").write_text("evil")
    (machine.runner / "config.sh").write_text("evil")
    outcome = await machine.reset.run()
    assert not outcome.ok
    assert "not as the pristine one" in outcome.detail


async def test_without_a_pristine_copy_it_fails(machine: Machine) -> None:
    shutil.rmtree(machine.pristine)
    outcome = await machine.reset.run()
    assert not outcome.ok
    assert "reset failed" in outcome.detail


async def test_a_reset_that_was_cut_is_finished_by_the_next(machine: Machine) -> None:
    (machine.folder / ".erase-0" / "secret").mkdir(parents=True)
    assert (await machine.reset.run()).ok
    assert machine.is_clean()


async def test_daemons_that_shed_everything_are_killed(machine: Machine, supervisor: Supervisor) -> None:
    script = machine.rooms[1] / "job.sh"
    script.write_text(DAEMON.format(python=sys.executable))
    supervisor.run(f"sh {script}")
    supervisor.run("env -i setsid sleep 1000 >/dev/null 2>&1 </dev/null &")
    assert procfs.descendants(supervisor.pid)

    outcome = await machine.reset.run()

    assert outcome.ok, outcome.detail
    # Either may not have come further than the program that starts it.
    assert " processes (" in outcome.detail
    assert "1000" not in outcome.detail, "an argument may be a secret"
    assert procfs.descendants(supervisor.pid) == []


async def test_what_cannot_be_killed_is_told(machine: Machine, supervisor: Supervisor) -> None:
    supervisor.run("sleep 1000 >/dev/null &")
    hasty = Reset(
        kill=partial(processes.kill_descendants, supervisor.pid, keep=(), clock=SystemClock(), limit_s=0),
        runner_folder=machine.runner,
        pristine=machine.pristine,
        recreate=machine.rooms,
    )
    outcome = await hasty.run()
    assert not outcome.ok
    assert outcome.detail.startswith("cannot be killed: ")
    assert "1000" not in outcome.detail, "an argument may be a secret"


@ROOT_ONLY
async def test_a_user_of_their_own_gets_the_folders_and_nothing_above(machine: Machine, tmp_path: Path) -> None:
    machine.folder.chmod(0o711)
    shutil.rmtree(machine.runner)
    left = [Finding(kind=Kind.CRONTAB, name="remuda-job")]
    reset = Reset(
        kill=lambda: processes.KillResult(killed=(), survivors=()),
        runner_folder=machine.runner,
        pristine=machine.pristine,
        recreate=machine.rooms,
        owner=other_user(tmp_path),
        elsewhere=Places(left),
    )
    outcome = await reset.make()
    assert outcome.ok, outcome.detail
    assert machine.runner_is_pristine()
    shutil.rmtree(machine.runner)
    outcome = await reset.run()
    assert outcome.ok
    assert "1 crontab (remuda-job)" in outcome.detail
    places = [machine.runner, *machine.runner.rglob("*"), *machine.rooms]
    assert {(path.lstat().st_uid, path.lstat().st_gid) for path in places} == {(UID, UID)}
    assert machine.is_clean()
    assert (machine.folder.stat().st_uid, machine.folder.stat().st_mode & 0o777) == (0, 0o711)
    # A file that is right but another's is not left so.
    os.chown(machine.runner / "config.sh", 0, 0)
    assert (await reset.run()).ok
    assert (machine.runner / "config.sh").stat().st_uid == UID


class Places:
    """Plays what is outside of the folders, and notes what is asked of it."""

    def __init__(self, removed: Sequence[Finding] = (), left: Sequence[str] = (), armed: int = 0) -> None:
        self.removed, self.still = removed, left
        #: How often something is armed, by processes that are killed right after.
        self.armed = armed
        self.asked: list[str] = []

    def kill(self) -> processes.KillResult:
        self.asked.append("kill")
        return processes.KillResult(killed=("cron",) if self.armed > 0 else (), survivors=())

    def disarm(self) -> Sequence[Finding]:
        self.asked.append("disarm")
        self.armed -= 1
        return [Finding(kind=Kind.CRONTAB, name="remuda-job")] if self.armed >= 0 else ()

    def remove(self) -> Sequence[Finding]:
        self.asked.append("remove")
        return self.removed

    def left(self) -> Sequence[str]:
        self.asked.append("left")
        return self.still

    def reset(self, machine: Machine) -> Reset:
        return Reset(
            kill=self.kill,
            runner_folder=machine.runner,
            pristine=machine.pristine,
            recreate=machine.rooms,
            elsewhere=self,
        )


async def test_what_starts_by_itself_goes_first_and_all_is_looked_for_again_at_the_end(machine: Machine) -> None:
    places = Places()
    assert (await places.reset(machine).run()).ok
    assert places.asked == ["disarm", "kill", "remove", "kill", "left"]


async def test_what_was_armed_while_it_was_killed_goes_before_any_file(machine: Machine) -> None:
    places = Places(armed=2)
    outcome = await places.reset(machine).run()
    assert outcome.ok, outcome.detail
    assert places.asked == ["disarm", "kill", "disarm", "kill", "remove", "kill", "left"]
    assert outcome.found == {"processes": 1, "crontabs": 2}


async def test_what_is_armed_again_and_again_ends_the_machine(machine: Machine) -> None:
    outcome = await Places(armed=9).reset(machine).run()
    assert not outcome.ok
    assert outcome.detail.startswith("processes came back; ")


async def test_what_came_back_without_a_process_ends_the_machine(machine: Machine) -> None:
    outcome = await Places(left=["/tmp/again cannot be removed"]).reset(machine).run()  # noqa: S108 - a name
    assert (outcome.ok, outcome.detail) == (False, "left again: /tmp/again cannot be removed; nothing was left")


async def test_a_machine_that_cannot_be_made_clean_is_told(machine: Machine) -> None:
    class Hopeless(Places):
        def remove(self) -> Sequence[Finding]:
            raise Unavailable("only a new machine is clean: it may use sudo")

    outcome = await Hopeless().reset(machine).run()
    assert (outcome.ok, outcome.detail) == (False, "reset failed: only a new machine is clean: it may use sudo")


@pytest.fixture
def place_for_deep_trees() -> Iterator[Path]:
    """Not below pytest's own folder: pytest could not remove what an interrupted run left there."""
    place = Path(tempfile.mkdtemp(prefix="remuda-deep-"))
    yield place
    subprocess.run(["rm", "-rf", str(place)], check=True)


def test_a_tree_deeper_than_any_path(place_for_deep_trees: Path) -> None:
    top = place_for_deep_trees / "deep"
    top.mkdir()
    descriptor = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d" * 20, dir_fd=descriptor)
        below = os.open("d" * 20, os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(os.open("file", os.O_CREAT, dir_fd=descriptor))
    os.close(descriptor)

    erase(top)

    assert list(place_for_deep_trees.iterdir()) == []


@pytest.mark.parametrize("instead", ["link", "file"])
def test_what_becomes_something_else_meanwhile_is_removed_and_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instead: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o755)
    (outside / "precious").write_text("precious")
    top = tmp_path / "tree"
    (top / "folder" / "below").mkdir(parents=True)
    rename, moved = os.rename, []

    def swapped(source: str, target: str, **folders: int) -> None:
        """As a job would that was waiting for the moment between the look and the move."""
        moved.append(source)
        if source == "folder":
            place = tmp_path / ".erase-0" / "0" / "folder"
            rename(place, tmp_path / "kept")
            if instead == "link":
                place.symlink_to(outside)
            else:
                place.write_text("")
        rename(source, target, **folders)

    monkeypatch.setattr(os, "rename", swapped)
    erase(top)
    assert "folder" in moved
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "outside"]
    assert (outside / "precious").read_text() == "precious"
    assert outside.stat().st_mode & 0o777 == 0o755


@ROOT_ONLY
def test_what_is_on_its_way_out_is_in_a_folder_that_nobody_else_may_enter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = tmp_path / "tree"
    (top / "below").mkdir(parents=True)
    for path in (top, top / "below"):
        os.chown(path, UID, UID)
        path.chmod(0o777)
    scandir, seen = os.scandir, []

    def looking(folder: int) -> Iterator[os.DirEntry[str]]:
        place = (tmp_path / ".erase-0").stat()
        seen.append((place.st_uid, place.st_mode & 0o777))
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", looking)
    erase(top)
    monkeypatch.undo()
    assert seen == [(0, 0o700)] * 2
    assert list(tmp_path.iterdir()) == []


def test_a_mount_inside_is_not_emptied(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    place = tmp_path / "tree" / "mounted"
    place.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "t", str(place)], capture_output=True, check=False).returncode:
        pytest.skip("this computer does not let us mount")
    try:
        (place / "precious").write_text("precious")
        with pytest.raises(OSError, match="busy"):
            erase(tmp_path / "tree")
        left = next(tmp_path.glob(".erase-*/*/mounted/precious"))
        assert left.read_text() == "precious"
    finally:
        for line in Path("/proc/self/mounts").read_text().splitlines():
            if str(tmp_path) in line:
                subprocess.run(["umount", line.split()[1]], check=True)


#: For a user to whom modes mean something.
AS_NOBODY = """
import os, tempfile
from pathlib import Path
from remuda.agent.reset import erase
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
top = Path(tempfile.mkdtemp()) / "tree"
(top / "a" / "b").mkdir(parents=True)
(top / "a" / "b" / "file").write_text("")
(top / "a" / "b" / "file").chmod(0)
(top / "a" / "b").chmod(0)
(top / "a").chmod(0o111)
top.chmod(0o555)
erase(top)
top.parent.rmdir()
"""


def test_modes_do_not_protect() -> None:
    source = Path(processes.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY],
        env={"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
