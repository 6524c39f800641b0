"""What a job left outside of its folders is found by its owner, and nothing else is touched."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.agent import keyrings
from remuda.agent.findings import Finding, Kind
from remuda.agent.leftovers import Leftovers, why_unseen
from remuda.domain.errors import Unavailable
from support.other_user import ROOT_ONLY, SUBORDINATE, UID, other_user

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
