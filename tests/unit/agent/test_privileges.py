"""Whether a user is as good as root."""

from __future__ import annotations

import grp
import os
from pathlib import Path

import pytest

from remuda import scripts
from remuda.agent import privileges
from remuda.agent.privileges import GROUPS, why_privileged
from tests.support.other_user import UID, other_user

SUDO = """#!/bin/sh
case $USER_MAY in
  yes) echo "User $5 may run the following commands on host:" ;;
  no) echo "User $5 is not allowed to run sudo on host." ;;
  *) exit 1 ;;
esac
"""


@pytest.fixture(autouse=True)
def _no_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What this computer itself has is not asked."""
    monkeypatch.setattr(scripts, "SYSTEM_PATH", str(tmp_path))
    monkeypatch.setattr(privileges, "SOCKETS", (str(tmp_path / "socket"),))


def test_a_plain_user_is_not(tmp_path: Path) -> None:
    assert why_privileged(other_user(tmp_path)) == ""


def test_members_of_some_groups_are(tmp_path: Path) -> None:
    group = next(group for group in grp.getgrall() if group.gr_name in GROUPS)
    assert why_privileged(other_user(tmp_path, gid=group.gr_gid)) == f"remuda-other is in group {group.gr_name}"


@pytest.mark.parametrize(
    ("owner", "mode", "may"),
    [((0, 0), 0o660, False), ((0, 0), 0o666, True), ((0, UID), 0o660, True), ((0, UID), 0o606, False)],
)
def test_who_may_write_to_a_runtimes_socket_is(tmp_path: Path, owner: tuple[int, int], mode: int, *, may: bool) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root gives files away")
    socket = tmp_path / "socket"
    socket.touch()
    os.chown(socket, *owner)
    socket.chmod(mode)
    assert bool(why_privileged(other_user(tmp_path))) is may


@pytest.mark.parametrize(("answer", "may"), [("yes", True), ("no", False), ("nothing", True)])
def test_sudo_is_asked(tmp_path: Path, answer: str, *, may: bool) -> None:
    sudo = tmp_path / "sudo"
    sudo.write_text(SUDO.replace("$USER_MAY", answer))
    sudo.chmod(0o755)
    assert bool(why_privileged(other_user(tmp_path))) is may
