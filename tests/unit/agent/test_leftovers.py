"""What a job left outside of its folders is found by its owner, and nothing else is touched."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

import pytest

from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.agent import keyrings, shared_places
from remuda.agent.findings import Finding, Kind
from remuda.agent.leftovers import RECORDS, Leftovers, why_unseen
from remuda.domain.errors import Unavailable
from tests.support.other_user import ROOT_ONLY, SUBORDINATE, UID, other_user

pytestmark = ROOT_ONLY


class Computer:
    def __init__(self, root: Path) -> None:
        self.root = root
        root.chmod(0o755)
        self.memory = root / "memory.json"
        self.tmp, self.home, self.var = (root / name for name in ("tmp", "home", "var"))
        for folder in (self.tmp, self.home, self.var):
            folder.mkdir()
        self.tmp.chmod(0o1777)
        self.give(self.home)

    def give(self, path: Path, uid: int = UID) -> Path:
        os.chown(path, uid, uid, follow_symlinks=False)
        return path

    def file(self, name: str, uid: int = UID) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
        return self.give(path, uid)

    def leftovers(self, why_not: str = "", **changed: object) -> Leftovers:
        given = {
            "user": other_user(self.home),
            "own": (self.home,),
            "memory": self.memory,
            "clock": SystemClock(),
            "shared": (str(self.tmp), str(self.root / "missing")),
            "searched": (str(self.root),),
            "spools": (str(self.root / "spool"),),
            "linger": self.root / "linger",
            "records": (f"{self.root}/records/core.*.{{uid}}.*",),
            "privileged": lambda _user: why_not,
            "unseen": lambda: "",
        }
        return Leftovers(**{**given, **changed})  # type: ignore[arg-type]

    def sweep(self, why_not: str = "") -> list[str]:
        """As of a machine whose jobs have left all that is there now."""
        leftovers = self.leftovers(why_not)
        leftovers.prepare(anew=True)
        return self.names(leftovers.remove())

    def names(self, found: Sequence[Finding]) -> list[str]:
        return [item.name.removeprefix(f"{self.root}/") for item in found]


@pytest.fixture
def computer(tmp_path: Path) -> Computer:
    return Computer(tmp_path)


def test_what_the_user_owns_goes_and_all_else_stays(computer: Computer) -> None:
    mine = computer.file("tmp/mine")
    theirs = computer.file("tmp/theirs", 0)
    inside = computer.file("tmp/daemon/mine")
    computer.file("tmp/deep/er/left", 0)
    deep = computer.give(computer.tmp / "deep")
    deep.chmod(0)
    assert sorted(computer.sweep()) == ["tmp/daemon/mine", "tmp/deep", "tmp/mine"]
    assert not any(path.exists() for path in (mine, inside, deep))
    assert theirs.exists()
    assert computer.sweep() == []


def test_links_are_removed_and_never_followed(computer: Computer) -> None:
    precious = computer.file("precious/file", 0)
    link = computer.tmp / "link"
    link.symlink_to(precious.parent)
    computer.give(link)
    computer.file("precious/mine-by-chance")
    precious.parent.chmod(0o700)
    assert computer.sweep() == ["tmp/link"]
    assert precious.exists()
    assert (computer.root / "precious" / "mine-by-chance").exists()


def test_ids_that_its_containers_use_are_its_own(computer: Computer) -> None:
    first, count = SUBORDINATE
    computer.file("tmp/inside", first + count - 1)
    computer.file("tmp/outside", first + count)
    assert computer.sweep() == ["tmp/inside"]


def test_other_folders_that_everybody_may_write_to_are_found(computer: Computer) -> None:
    spool = computer.var / "lib" / "spool"
    spool.mkdir(parents=True)
    spool.chmod(0o1777)
    computer.file("var/lib/spool/mine")
    assert computer.sweep() == ["var/lib/spool/mine"]


def test_its_own_folders_are_left_to_the_reset(computer: Computer) -> None:
    kept = computer.file("home/kept")
    assert computer.sweep() == []
    assert kept.exists()


def test_a_folder_that_an_image_gives_to_jobs_cannot_be_made_clean(computer: Computer) -> None:
    cache = computer.var / "toolcache"
    cache.mkdir()
    computer.give(cache)
    with pytest.raises(Unavailable, match=r"only a new machine is clean: .*toolcache"):
        computer.sweep()
    assert cache.exists()


def test_with_roots_rights_only_a_new_machine_is_clean(computer: Computer) -> None:
    with pytest.raises(Unavailable, match="only a new machine is clean: it may use sudo"):
        computer.sweep("it may use sudo")


@pytest.fixture
def memory() -> Iterator[str]:
    made = subprocess.run(
        ["ipcmk", "-M", "4096"], capture_output=True, text=True, check=True, user=UID, group=UID, extra_groups=[]
    )
    number = made.stdout.split()[-1]
    yield number
    subprocess.run(["ipcrm", "-m", number], capture_output=True, check=False)


def test_shared_memory_goes_too(computer: Computer, memory: str) -> None:
    assert computer.sweep() == [f"shm {memory}"]
    assert computer.sweep() == []


def test_what_the_system_notes_about_its_programs_goes_too(computer: Computer) -> None:
    computer.file(f"records/core.make.{UID}.1.2.3.zst", 0)
    kept = computer.file("records/core.make.1.1.2.3.zst", 0)
    assert computer.sweep() == [f"records/core.make.{UID}.1.2.3.zst"]
    assert kept.exists()


def test_dumps_of_every_kind_are_known() -> None:
    for name in (
        "/var/lib/apport/coredump/core._usr_bin_make.{uid}.boot.1.2",
        "/var/lib/systemd/coredump/core.m.{uid}.1",
    ):
        assert any(fnmatch(name.format(uid=UID), pattern.format(uid=UID)) for pattern in RECORDS)
        assert not any(fnmatch(name.format(uid=1), pattern.format(uid=UID)) for pattern in RECORDS)


def test_what_starts_by_itself_goes_before_all_else(computer: Computer) -> None:
    (computer.root / "linger").mkdir()
    computer.file("linger/remuda-other", 0)
    computer.file("spool/crontabs/remuda-other", 0)
    computer.file("spool/atjobs/a0001")
    kept = [computer.file("spool/crontabs/root", 0), computer.file("tmp/mine")]
    removed = computer.names(computer.leftovers().disarm())
    assert sorted(removed) == ["remuda-other", "spool/atjobs/a0001", "spool/crontabs/remuda-other"]
    assert not (computer.root / "linger" / "remuda-other").exists()
    assert all(path.exists() for path in kept)


def test_what_comes_back_is_found_at_the_end(computer: Computer, memory: str) -> None:
    leftovers = computer.leftovers()
    leftovers.prepare(anew=True)
    leftovers.remove()
    assert leftovers.left() == []
    computer.file("tmp/again")
    computer.file("spool/crontabs/remuda-other", 0)
    computer.file(f"records/core.make.{UID}.1.2.3.zst", 0)
    made = subprocess.run(
        ["ipcmk", "-M", "4096"], capture_output=True, text=True, check=True, user=UID, group=UID, extra_groups=[]
    )
    number = made.stdout.split()[-1]
    try:
        assert number != memory
        assert sorted(name.removeprefix(f"{computer.root}/") for name in leftovers.left()) == [
            f"records/core.make.{UID}.1.2.3.zst cannot be removed",
            f"shm {number} cannot be removed",
            "spool/crontabs/remuda-other cannot be removed",
            "tmp/again cannot be removed",
        ]
    finally:
        subprocess.run(["ipcrm", "-m", number], check=True)


def test_what_a_removal_that_was_cut_has_put_aside_goes(computer: Computer) -> None:
    computer.file("tmp/.erase-0/0/secret")
    assert computer.sweep() == ["tmp/.erase-0"]
    assert list(computer.tmp.iterdir()) == []


class TestMounts:
    """Each is a line in the kernel's list; what is mounted is not looked at."""

    LINE = "{number} 1 0:{number} / {path} rw - {kind} x rw\n"

    def play(self, computer: Computer, monkeypatch: pytest.MonkeyPatch, *places: tuple[Path | str, str]) -> None:
        table = computer.root / "mountinfo"
        lines = (self.LINE.format(number=number, path=path, kind=kind) for number, (path, kind) in enumerate(places))
        table.write_text("".join(lines))
        monkeypatch.setattr(shared_places, "MOUNTS", table)

    def test_that_are_new_make_no_machine_clean(self, computer: Computer, monkeypatch: pytest.MonkeyPatch) -> None:
        before = (("/", "ext4"), (computer.home, "ext4"), ("/efi", "autofs"))
        session = Path(f"/run/user/{UID}")
        self.play(computer, monkeypatch, *before)
        leftovers = computer.leftovers()
        leftovers.prepare(anew=True)
        self.play(computer, monkeypatch, *before, (session, "tmpfs"), ("/efi", "vfat"))
        assert leftovers.remove() == []
        for place in (computer.tmp / "hidden", computer.home, session):
            computer.file("tmp/hidden/secret")
            self.play(computer, monkeypatch, *before, (session, "tmpfs"), (place, "fuse.sshfs"))
            with pytest.raises(Unavailable, match=f"only a new machine is clean: something is mounted at {place}"):
                leftovers.remove()
            assert leftovers.left() == [f"something is mounted at {place}"] + [
                f"{computer.tmp}/hidden/secret cannot be removed"
            ] * (place != computer.tmp / "hidden")

    def test_are_remembered_by_an_agent_that_is_started_again(
        self, computer: Computer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.play(computer, monkeypatch, ("/", "ext4"))
        first = computer.leftovers()
        first.prepare(anew=True)
        first.remove()
        self.play(computer, monkeypatch, ("/", "ext4"), (computer.tmp / "hidden", "fuse"))
        second = computer.leftovers()
        second.prepare(anew=False)
        with pytest.raises(Unavailable, match="something is mounted at"):
            second.remove()


def test_what_is_found_is_told_by_its_kind(computer: Computer) -> None:
    computer.file("tmp/mine")
    leftovers = computer.leftovers()
    leftovers.prepare(anew=True)
    assert leftovers.remove() == [Finding(kind=Kind.FILE, name=f"{computer.tmp}/mine")]


def test_before_any_job_only_known_places_are_swept(computer: Computer) -> None:
    computer.file("tmp/mine")
    assert computer.names(computer.leftovers("it may use sudo").sweep()) == ["tmp/mine"]


def test_queues_that_nobody_sees_cannot_be_removed(computer: Computer) -> None:
    leftovers = computer.leftovers(unseen=lambda: "message queues cannot be looked at")
    leftovers.prepare(anew=True)
    with pytest.raises(Unavailable, match="only a new machine is clean: message queues cannot be looked at"):
        leftovers.remove()


def test_links_that_the_kernel_allows_leave_no_trace(tmp_path: Path) -> None:
    setting, none = tmp_path / "protected_hardlinks", tmp_path / "none"
    setting.write_text("0\n")
    assert "fs.protected_hardlinks = 1" in why_unseen(setting, none)
    setting.write_text("1\n")
    assert why_unseen(setting, none) == ""
    assert why_unseen(none, none) == ""


#: A key in the user's keyring, and then the keyring's rights.
KEY = """
import ctypes, os
os.setgroups([])
os.setresgid({uid}, {uid}, {uid})
os.setresuid({uid}, {uid}, {uid})
libc = ctypes.CDLL(None, use_errno=True)
assert libc.syscall(248, b"user", b"planted", b"x", 1, -4) > 0
assert libc.syscall(250, 5, -4, {rights}) == 0
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers of these calls are of x86_64")
@pytest.mark.parametrize("rights", [0x3F3F0000, 0])
def test_keys_go_or_the_machine_does(tmp_path: Path, rights: int) -> None:
    # One that nobody had: a keyring that is closed for good stays so as long as the computer runs.
    uid = 100_000_000 + int(SystemIds().new("")[:6], 16)
    user = other_user(tmp_path, uid=uid, gid=uid)
    assert keyrings.empty(user) == 0
    code = KEY.format(rights=rights, uid=uid)
    subprocess.run([sys.executable, "-ISc", code], check=True)
    if rights:
        assert keyrings.empty(user) == 1
        assert keyrings.empty(user) == 0
    else:
        with pytest.raises(Unavailable, match="keys of remuda-other cannot be removed"):
            keyrings.empty(user)
