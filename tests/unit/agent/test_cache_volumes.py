"""Cache volumes: their folders, and eviction by size and time of use. Mounts are tested with real sandboxes."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from remuda.agent import cache_volumes, mounts
from remuda.agent.cache_volumes import CacheVolumes
from remuda.agent.disk_space import Space
from remuda.agent.sandbox_root import JobUser
from remuda.domain.resources import Tier
from tests.support.records import assignment

MIB = 1024**2


def volumes(folder: Path, *, max_mib: int) -> CacheVolumes:
    return CacheVolumes(folder=folder, paths=("/home/runner/.cache",), max_bytes=max_mib * MIB)


def make_volume(folder: Path, name: str, *, mib: int, used_at: int) -> Path:
    volume = folder / name
    (volume / "home%runner%.cache").mkdir(parents=True)
    (volume / "home%runner%.cache" / "file").write_bytes(b"x" * mib * MIB)
    os.utime(volume, (used_at, used_at))
    return volume


def test_folder_of_a_volume_is_made_once_and_belongs_to_the_job_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners: list[tuple[Path, int, int]] = []
    monkeypatch.setattr(os, "chown", lambda *given: owners.append(given))
    monkeypatch.setattr(mounts, "open_idmapped", lambda source, *_, **__: os.open(source, os.O_RDONLY))
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0))
    assigned = replace(assignment(1), repository="acme/widgets")
    for _ in range(2):
        volumes(tmp_path, max_mib=1).mount(assigned, leader=1, first_id=0, user=JobUser(uid=1001, gid=1001))
    (folder,) = tmp_path.glob("acme-widgets-*/home%runner%.cache")
    assert folder.stat().st_mode & 0o777 == 0o755
    # Before it gets its name: a folder that exists has its owner.
    assert owners == [(folder.with_name(f".{folder.name}.new"), 1001, 1001)]


@pytest.mark.parametrize(
    ("assigned", "is_mounted"),
    [
        ({"tier": Tier.TRUSTED}, True),
        ({"tier": Tier.TRUSTED, "any_run": True, "only_trusted": True}, True),
        # A job of a fork could get it.
        ({"tier": Tier.TRUSTED, "any_run": True}, False),
        ({"tier": Tier.UNTRUSTED, "any_run": True}, True),
        ({"tier": Tier.UNTRUSTED}, True),
    ],
)
def test_no_volume_is_mounted_while_the_tier_of_the_job_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, assigned: dict[str, Any], *, is_mounted: bool
) -> None:
    mounted: list[str] = []
    monkeypatch.setattr(cache_volumes, "_mount", lambda _, path, **__: mounted.append(path))
    known = replace(assignment(1), repository="o/r", **assigned)
    volumes(tmp_path, max_mib=1).mount(known, leader=1, first_id=0, user=JobUser(uid=1001, gid=1001))
    assert bool(mounted) is is_mounted
    assert bool(list(tmp_path.iterdir())) is is_mounted


def test_nothing_is_evicted_before_the_first_volume_exists(tmp_path: Path) -> None:
    assert volumes(tmp_path / "none", max_mib=1).evict() == []


def test_volumes_used_longest_ago_are_evicted_first(tmp_path: Path) -> None:
    for name, used_at in (("newest", 300), ("oldest", 100), ("middle", 200)):
        make_volume(tmp_path, name, mib=2, used_at=used_at)
    assert volumes(tmp_path, max_mib=7).evict() == []
    assert volumes(tmp_path, max_mib=5).evict() == ["oldest"]
    assert sorted(path.name for path in tmp_path.glob("[!.]*")) == ["middle", "newest"]


def test_single_volume_above_the_limit_is_evicted(tmp_path: Path) -> None:
    make_volume(tmp_path, "large", mib=3, used_at=100)
    assert volumes(tmp_path, max_mib=2).evict() == ["large"]
    assert list(tmp_path.glob("[!.]*")) == []


def test_deeply_nested_folders_are_evicted(tmp_path: Path) -> None:
    volume = make_volume(tmp_path, "deep", mib=2, used_at=100)
    home = Path.cwd()
    os.chdir(volume / "home%runner%.cache")
    try:
        for _ in range(3_000):
            os.mkdir("nested")  # noqa: PTH102  # the full path would be too long
            os.chdir("nested")
        assert volumes(tmp_path, max_mib=1).evict() == ["deep"]
        assert not volume.exists()
    finally:
        os.chdir(home)
        # After a failure: pytest cannot remove such a folder.
        subprocess.run(["rm", "-rf", str(volume)], check=True)


def test_volumes_with_millions_of_files_are_measured_in_the_background(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, done, programs = tmp_path / "volumes", tmp_path / "done", tmp_path / "bin"
    volume = make_volume(folder, "large", mib=3, used_at=100)
    programs.mkdir()
    du = programs / "du"
    du.write_text(f'#!/bin/sh\nuntil [ -e {done} ]; do sleep 0.01; done\nPATH={os.environ["PATH"]}\nexec du "$@"\n')
    du.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.setattr(cache_volumes, "MEASURE_LIMIT_S", 0.05)
    assert volumes(folder, max_mib=2).evict() == []
    done.touch()
    monkeypatch.setattr(cache_volumes, "MEASURE_LIMIT_S", 60.0)
    assert volumes(folder, max_mib=4).evict() == []
    # Measured again only after its next use.
    done.unlink()
    assert volumes(folder, max_mib=4).evict() == []
    monkeypatch.setattr(cache_volumes, "MEASURE_LIMIT_S", 0.05)
    os.utime(volume, (200, 200))
    assert volumes(folder, max_mib=2).evict() == ["large"], "the last measurement counts meanwhile"
    done.touch()


def test_volumes_leave_files_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, used_at in (("newest", 300), ("oldest", 100)):
        make_volume(tmp_path, name, mib=1, used_at=used_at)
    monkeypatch.setattr(cache_volumes, "free_space", lambda _: Space(bytes=10**9, files=5))
    # Each has three files and folders.
    assert volumes(tmp_path, max_mib=100).evict(min_free=Space(bytes=0, files=5)) == []
    assert volumes(tmp_path, max_mib=100).evict(min_free=Space(bytes=0, files=6)) == ["oldest"]
