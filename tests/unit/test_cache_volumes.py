"""Eviction of cache volumes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from remuda.agent.cache_volumes import CacheVolumes

MIB = 1024**2


def test_eviction_of_cache_volumes(tmp_path: Path) -> None:
    volumes = CacheVolumes(folder=tmp_path / "caches", paths=("/x",), max_bytes=3 * MIB)
    assert volumes.evict() == []
    for age, name in enumerate(("new", "middle", "old")):
        (volumes.folder / name).mkdir(parents=True)
        (volumes.folder / name / "file").write_bytes(bytes(MIB))
        os.utime(volumes.folder / name, (1_000 - age, 1_000 - age))
    deep = volumes.folder / "old"
    for _ in range(3):
        # Deeper than Python's recursion limit, as a job can make it.
        subprocess.run(["sh", "-c", 'p=d; for i in $(seq 600); do p=$p/d; done; mkdir -p "$p"'], cwd=deep, check=True)
        deep = deep / "/".join(["d"] * 601)
    assert volumes.evict() == ["old"]
    assert sorted(path.name for path in volumes.folder.iterdir()) == ["middle", "new"]
    assert volumes.evict() == []
