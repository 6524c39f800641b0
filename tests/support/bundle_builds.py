"""Bundles for this computer and this Python, built once per test run and without the package index."""

from __future__ import annotations

import fcntl
import os
import platform
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

import bundles
import release
from tests.support.action_steps import offline_index

ARCHITECTURE = {"aarch64": "arm64"}.get(platform.machine(), platform.machine())
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


def build_bundles(folder: Path, *kinds: str) -> None:
    """Build bundles with extension modules for this Python only."""
    folder.mkdir(parents=True, exist_ok=True)
    with patch.dict(os.environ, offline_index(folder.parent)):
        bundles.build(kinds, architecture=ARCHITECTURE, folder=folder, pythons=(PYTHON,))


def shared_bundles(factory: pytest.TempPathFactory) -> Path:
    """A folder with all bundles and SHA256SUMS, shared by the processes of a test run."""
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "bundles" / "dist"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / release.SUMS).exists():
            build_bundles(folder, *bundles.KINDS)
            release.write_sums(folder)
    return folder
