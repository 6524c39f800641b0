"""Paths of the host that a sandbox hides."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import pytest

from remuda.agent.sandbox_root import build_layer


@pytest.mark.skipif(os.geteuid() != 0, reason="whiteouts need root")
def test_nothing_is_listed_below_a_hidden_path(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("etc", "srv/keys", "var/lib/remuda/sandboxes"):
        (root / name).mkdir(parents=True)
    hidden = ("/srv", "/srv/keys", "/var/lib/remuda/sandboxes", "/var/lib/remuda")
    layer = tmp_path / "layer"
    build_layer(layer, root=root, first_id=0, software=PurePosixPath("/opt/remuda"), hidden=hidden)
    assert (layer / "srv").is_char_device()
    assert list((layer / "var/lib/remuda").iterdir()) == []
