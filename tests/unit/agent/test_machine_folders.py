"""Folders of a machine whose agent runs as root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remuda.agent.machine_folders import MachineFolders
from remuda.domain.errors import UserError
from tests.support.other_user import ROOT_ONLY, UID, other_user

pytestmark = ROOT_ONLY
ID = "i-0123456789abcdef0"


def folders(root: Path, home: str = "home") -> MachineFolders:
    pristine = root / "opt" / "runner"
    (pristine / "bin").mkdir(parents=True, exist_ok=True)
    (pristine / "bin" / "Runner.Listener").write_text("listener")
    (pristine / "link").symlink_to("bin")
    user = other_user(root / home)
    return MachineFolders(state=root / "state", jobs=root / "jobs", pristine=pristine, user=user)


def test_state_is_private_and_jobs_can_traverse_to_their_folders(tmp_path: Path) -> None:
    made = folders(tmp_path)
    made.make()
    made.make_registrar()
    modes = {
        path.name: path.stat().st_mode & 0o777 for path in (made.state, made.log.parent, made.jobs, made.registrar)
    }
    assert modes == {"state": 0o700, "logs": 0o700, "jobs": 0o711, "registrar": 0o700}
    made.state.chmod(0o777)
    made.make()
    assert made.state.stat().st_mode & 0o777 == 0o700


def test_registrar_is_a_copy_of_the_pristine_software_and_can_be_recreated(tmp_path: Path) -> None:
    made = folders(tmp_path)
    made.make()
    made.make_registrar()
    (made.registrar / ".runner").write_text("{}")
    made.make_registrar()
    assert sorted(path.name for path in made.registrar.rglob("*")) == ["Runner.Listener", "bin", "link"]
    assert (made.registrar / "bin" / "Runner.Listener").samefile(made.pristine / "bin" / "Runner.Listener")
    assert (made.registrar / "link").is_symlink()


def test_folders_of_another_instance_do_not_count_as_ready(tmp_path: Path) -> None:
    made = folders(tmp_path)
    made.make()
    assert not made.were_prepared_for(ID)
    made.mark_prepared_for(ID)
    assert made.were_prepared_for(ID)
    assert not made.were_prepared_for("i-1" + ID[3:])


def test_home_of_another_user_is_an_error(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    made = folders(tmp_path)
    made.make()  # as an interrupted reset leaves it
    (home / "precious").touch()
    with pytest.raises(UserError, match="does not belong to"):
        made.make()
    os.chown(home, UID, UID)
    made.make()
