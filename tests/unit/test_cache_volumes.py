"""Eviction of cache volumes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from remuda.agent.cache_volumes import CacheVolumes
from remuda.agent.disk_space import Space

MIB = 1024**2


def test_eviction_of_cache_volumes(tmp_path: Path) -> None:
    volumes = CacheVolumes(folder=tmp_path / "caches", paths=("/x",), max_bytes=3 * MIB)
    assert volumes.evict() == []
    for name in ("new", "middle", "old"):
        (volumes.folder / name).mkdir(parents=True)
        (volumes.folder / name / "file").write_bytes(bytes(MIB))
    # Deeper than Python's recursion limit, as a job can make it.
    subprocess.run(["mkdir", "-p", "d/" * 1_200], cwd=volumes.folder / "old", check=True)
    for age, name in enumerate(("new", "middle", "old")):
        os.utime(volumes.folder / name, (1_000 - age, 1_000 - age))
    assert volumes.evict() == ["old"]
    assert sorted(path.name for path in volumes.folder.glob("[!.]*")) == ["middle", "new"]
    assert volumes.evict() == []
    free = shutil.disk_usage(volumes.folder).free
    # More must be free than the older volume takes.
    assert volumes.evict(min_free=Space(bytes=free + MIB // 2, files=0)) == ["middle"]
