"""What belongs to others and lets jobs write: found at any depth, and missed where it is not as it was."""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from remuda.adapters.system.clock import SystemClock
from remuda.agent import shared_places
from remuda.agent.job_user import JobUser
from remuda.agent.shared_places import Places, SharedPlaces
from tests.support.other_user import ROOT_ONLY, UID, other_user

pytestmark = ROOT_ONLY

#: The owner and the group may do anything, and so may our user, by name.
GIVEN = ((0x01, 7, 2**32 - 1), (0x02, 7, UID), (0x04, 7, 2**32 - 1), (0x10, 7, 2**32 - 1), (0x20, 5, 2**32 - 1))


class Disk:
    def __init__(self, root: Path) -> None:
        self.root = root / "disk"
        self.root.mkdir()
        self.memory = root / "memory.json"
        self.deep = self.root / "a/b/c/d/e/f/g"
        self.deep.mkdir(parents=True)

    def file(self, path: Path, mode: int = 0o644) -> Path:
        path.write_text("as it was")
        path.chmod(mode)
        return path

    def folder(self, path: Path, mode: int) -> Path:
        path.mkdir()
        path.chmod(mode)
        return path

    def tick(self) -> None:
        """Until the clock that files are stamped with has moved on."""
        probe = self.memory.with_name("probe")
        probe.touch()
        before = probe.stat().st_ctime_ns
        while probe.stat().st_ctime_ns == before:
            probe.touch()

    def found(self, *, anew: bool = True) -> Places:
        """As searched by an agent, which is not the one that was there before."""
        self.tick()
        places = SharedPlaces(
            user=other_user(self.root / "home"),
            own=(self.root / "own",),
            shared=(self.root / "shared",),
            memory=self.memory,
            clock=SystemClock(),
            searched=(str(self.root),),
        )
        places.begin(anew=anew)
        return places.wait()


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    os.umask(0o022)
    return Disk(tmp_path)


def test_a_disk_on_which_nobody_else_may_write_has_none(disk: Disk) -> None:
    disk.file(disk.deep / "file")
    assert disk.found() == Places()


def test_a_file_that_everybody_may_write_to_is_missed_once_it_is_written_to(disk: Disk) -> None:
    path = disk.file(disk.deep / "log", 0o666)
    found = disk.found()
    assert list(found.files) == [str(path)]
    assert found.changes() == []
    with path.open("a") as file:
        file.write("planted")
    assert found.changes() == [f"{path}, which it may write to, is not as it was"]


def test_a_change_that_is_taken_back_is_one_too(disk: Disk) -> None:
    path = disk.file(disk.deep / "log", 0o666)
    found = disk.found()
    before = path.stat()
    path.write_text("planted")
    path.write_text("as it was")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert found.changes()


def test_notes_on_a_file_of_others_are_changes(disk: Disk) -> None:
    path = disk.file(disk.deep / "log", 0o666)
    found = disk.found()
    os.setxattr(path, "user.planted", b"1")
    assert found.changes()


def test_where_a_job_cannot_come_to_it_cannot_write(disk: Disk) -> None:
    disk.file(disk.deep / "log", 0o666)
    (disk.root / "a").chmod(0o700)
    assert disk.found() == Places()


def test_the_uppermost_folder_stands_for_those_in_it(disk: Disk) -> None:
    upper = disk.folder(disk.deep / "upper", 0o1777)
    disk.folder(upper / "lower", 0o1777)
    path = disk.file(upper / "lower" / "log", 0o666)
    found = disk.found()
    assert (found.folders, list(found.files), found.loose) == ([str(upper)], [str(path)], {})


def test_in_a_folder_without_a_sticky_bit_names_of_others_must_stay(disk: Disk) -> None:
    loose = disk.folder(disk.deep / "loose", 0o777)
    kept = disk.file(loose / "kept")
    found = disk.found()
    disk.file(loose / "somebody-made-it-later")
    assert found.changes() == []
    kept.rename(loose / "moved")
    assert found.changes() == [f"kept in {loose}, where it may rename all, is not what it was"]
    (loose / "moved").rename(kept)
    assert found.changes() == []
    kept.unlink()
    kept.write_text("as it was")
    disk.file(loose / "another")
    assert found.changes() or kept.stat().st_ino == found.loose[str(loose)]["kept"]


def test_notes_on_such_a_folder_are_changes(disk: Disk) -> None:
    loose = disk.folder(disk.deep / "loose", 0o777)
    found = disk.found()
    os.setxattr(loose, "user.planted", b"1")
    assert found.changes() == [f"{loose}, which it may write to, has other attributes than before"]


@pytest.mark.parametrize("kind", ["owner", "group", "list"])
def test_what_the_image_gives_to_jobs_by_name_makes_no_machine_clean(disk: Disk, kind: str) -> None:
    folder = disk.folder(disk.deep / "given", 0o775)
    if kind == "list":
        text = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in GIVEN)
        os.setxattr(folder, "system.posix_acl_access", text)
    else:
        os.chown(folder, UID if kind == "owner" else 0, UID)
    assert "what a job puts there, the next one finds" in disk.found().why_not


@pytest.mark.parametrize("kind", ["group", "list"])
def test_every_group_of_the_user_counts(disk: Disk, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    group = UID + 1
    monkeypatch.setattr(JobUser, "groups", lambda self: {self.gid, group})
    folder = disk.folder(disk.deep / "given", 0o775)
    if kind == "group":
        os.chown(folder, 0, group)
    else:
        entries = [entry if entry[0] != 0x02 else (0x08, 7, group) for entry in sorted(GIVEN)]
        text = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in sorted(entries))
        os.setxattr(folder, "system.posix_acl_access", text)
    assert "what a job puts there, the next one finds" in disk.found().why_not


def test_what_the_agent_has_put_aside_meanwhile_is_not_taken_for_the_images(disk: Disk) -> None:
    os.chown(disk.folder(disk.root / ".erase-0", 0o755), UID, UID)
    assert disk.found() == Places()
    os.chown(disk.folder(disk.deep / ".erase-0", 0o755), UID, UID)
    assert "what a job puts there, the next one finds" in disk.found().why_not


@pytest.fixture
def memory_disk() -> Iterator[Disk]:
    """In memory, where a mapping changes a file without a trace of time."""
    if all(mount.path != "/dev/shm" or mount.kind != "tmpfs" for mount in shared_places.mounts()):  # noqa: S108
        pytest.skip("shared memory has no disk of its own here")
    place = Path(tempfile.mkdtemp(dir="/dev/shm"))
    place.chmod(0o755)
    yield Disk(place)
    shutil.rmtree(place)


class TestInMemory:
    def test_a_change_by_a_mapping_is_one_too(self, memory_disk: Disk) -> None:
        path = memory_disk.file(memory_disk.deep / "log", 0o666)
        found = memory_disk.found()
        assert found.changes() == []
        before = path.stat().st_ctime_ns
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            assert mapped[0]
            mapped[0] = ord("X")
        assert path.stat().st_ctime_ns == before, "the kernel has learned to note it"
        assert found.changes() == [f"{path}, which it may write to, is not as it was"]
        assert memory_disk.found(anew=False).changes() == found.changes()

    def test_what_a_job_may_have_changed_before_the_look_is_not_trusted(self, memory_disk: Disk) -> None:
        path = memory_disk.file(memory_disk.deep / "log", 0o666)
        memory_disk.tick()
        since = path.stat().st_ctime_ns + 1
        memory_disk.memory.write_text(f'{{"since": {since}, "mounts": []}}', encoding="ascii")
        assert memory_disk.found(anew=False).changes() == [f"{path}, which it may write to, is not as it was"]

    def test_too_much_is_not_compared(self, memory_disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shared_places, "MAX_DIGESTED", 10)
        for name in ("x", "y"):
            memory_disk.file(memory_disk.deep / name, 0o666)
        assert "is too large to be compared" in memory_disk.found().why_not


def test_an_own_file_among_those_of_others_does_so_too(disk: Disk) -> None:
    os.chown(disk.file(disk.deep / "given"), UID, UID)
    assert "what a job puts there, the next one finds" in disk.found().why_not


@pytest.mark.parametrize("place", ["own", "shared", "everybodys"])
def test_an_own_file_where_it_is_removed_anyway_does_not(disk: Disk, place: str) -> None:
    folder = disk.folder(disk.root / place, 0o1777 if place == "everybodys" else 0o755)
    os.chown(disk.file(folder / "mine"), UID, UID)
    assert disk.found().why_not == ""


def test_an_agent_that_is_started_again_knows_how_it_was(disk: Disk) -> None:
    path = disk.file(disk.deep / "log", 0o666)
    before = disk.found()
    path.write_text("planted")
    assert disk.found(anew=False) == before
    assert before.changes()


def test_what_changed_before_it_was_looked_at_is_not_trusted(disk: Disk) -> None:
    log = disk.file(disk.deep / "log", 0o666)
    disk.memory.write_text('{"since": 1}', encoding="ascii")
    found = disk.found(anew=False)
    assert found.changes() == [f"{log}, which it may write to, is not as it was"]
    loose = disk.folder(disk.deep / "loose", 0o777)
    disk.memory.write_text('{"since": 1}', encoding="ascii")
    assert f"{loose}, where remuda-other may rename all, was changed" in disk.found(anew=False).why_not


@pytest.mark.parametrize("text", ["", "[]", '{"since": "x"}', '{"since": 5, "places": {"unknown": 1}}', "\xff"])
def test_a_memory_that_is_broken_is_no_proof(disk: Disk, text: str) -> None:
    path = disk.file(disk.deep / "log", 0o666)
    disk.memory.write_text(text, encoding="latin-1")
    assert disk.found(anew=False).changes() == [f"{path}, which it may write to, is not as it was"]


def test_too_much_is_not_looked_at(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_places, "MAX_MARKS", 1)
    for name in ("x", "y"):
        disk.file(disk.deep / name, 0o666)
    assert "too much to be looked at" in disk.found().why_not


def test_mounts_are_read_with_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/root rw",
        "23 22 0:5 / /a\\040b rw - tmpfs tmpfs rw",
        "24 22 0:6 / /ro ro,relatime - ext4 /dev/x rw",
        "25 22 0:7 / /nfs rw - nfs4 server:/ rw",
        "26 22 0:8 / /proc rw - proc proc rw",
        "27 22 0:9 / /h rw - fuse.sshfs x rw",
    )
    table = tmp_path / "mountinfo"
    table.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(shared_places, "MOUNTS", table)
    assert [mount.path for mount in shared_places.mounts() if mount.is_written_here] == ["/", "/a b"]
