"""What a job left outside of its folders is found by its owner, and nothing else is touched."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from remuda.agent.leftovers import Leftovers
from remuda.domain.errors import Unavailable
from support.other_user import ROOT_ONLY, SUBORDINATE, UID, other_user

pytestmark = ROOT_ONLY


class Computer:
    def __init__(self, root: Path) -> None:
        self.root = root
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

    async def sweep(self, why_not: str = "") -> list[str]:
        leftovers = Leftovers(
            user=other_user(self.home),
            own=(self.home,),
            shared=(str(self.tmp), str(self.root / "missing")),
            searched=(str(self.root),),
            privileged=lambda _user: why_not,
        )
        await leftovers.prepare()
        return [name.removeprefix(f"{self.root}/") for name in leftovers.remove()]


@pytest.fixture
def computer(tmp_path: Path) -> Computer:
    return Computer(tmp_path)


async def test_what_the_user_owns_goes_and_all_else_stays(computer: Computer) -> None:
    mine = computer.file("tmp/mine")
    theirs = computer.file("tmp/theirs", 0)
    inside = computer.file("tmp/daemon/mine")
    computer.file("tmp/deep/er/left", 0)
    deep = computer.give(computer.tmp / "deep")
    deep.chmod(0)
    assert sorted(await computer.sweep()) == ["tmp/daemon/mine", "tmp/deep", "tmp/mine"]
    assert not any(path.exists() for path in (mine, inside, deep))
    assert theirs.exists()
    assert await computer.sweep() == []


async def test_links_are_removed_and_never_followed(computer: Computer) -> None:
    precious = computer.file("precious/file", 0)
    link = computer.tmp / "link"
    link.symlink_to(precious.parent)
    computer.give(link)
    computer.file("precious/mine-by-chance")
    assert await computer.sweep() == ["tmp/link"]
    assert precious.exists()
    assert (computer.root / "precious" / "mine-by-chance").exists()


async def test_ids_that_its_containers_use_are_its_own(computer: Computer) -> None:
    first, count = SUBORDINATE
    computer.file("tmp/inside", first + count - 1)
    computer.file("tmp/outside", first + count)
    assert await computer.sweep() == ["tmp/inside"]


async def test_other_folders_that_everybody_may_write_to_are_found(computer: Computer) -> None:
    spool = computer.var / "lib" / "spool"
    spool.mkdir(parents=True)
    spool.chmod(0o1777)
    computer.file("var/lib/spool/mine")
    assert await computer.sweep() == ["var/lib/spool/mine"]


async def test_its_own_folders_are_left_to_the_reset(computer: Computer) -> None:
    kept = computer.file("home/kept")
    assert await computer.sweep() == []
    assert kept.exists()


async def test_a_folder_that_an_image_gives_to_jobs_cannot_be_made_clean(computer: Computer) -> None:
    cache = computer.var / "toolcache"
    cache.mkdir()
    computer.give(cache)
    with pytest.raises(Unavailable, match=r"only a new machine is clean: .*toolcache"):
        await computer.sweep()
    assert cache.exists()


async def test_with_roots_rights_only_a_new_machine_is_clean(computer: Computer) -> None:
    with pytest.raises(Unavailable, match="only a new machine is clean: it may use sudo"):
        await computer.sweep("it may use sudo")


@pytest.fixture
def memory() -> Iterator[str]:
    made = subprocess.run(
        ["ipcmk", "-M", "4096"], capture_output=True, text=True, check=True, user=UID, group=UID, extra_groups=[]
    )
    number = made.stdout.split()[-1]
    yield number
    subprocess.run(["ipcrm", "-m", number], capture_output=True, check=False)


async def test_shared_memory_goes_too(computer: Computer, memory: str) -> None:
    assert await computer.sweep() == [f"shm {memory}"]
    assert await computer.sweep() == []
