"""Folders of a machine whose agent runs as root: the agent's private folders and those of jobs."""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from remuda.agent.job_user import JobUser
from remuda.agent.reset import PRIVATE, erase
from remuda.domain.errors import Unavailable, UserError

#: Jobs can traverse this folder to reach theirs, but cannot create files in it.
PASSABLE = 0o711


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineFolders:
    #: Readable by root only.
    state: Path
    #: Owned by root; contains the jobs' folders.
    jobs: Path
    #: The unmodified runner software: owned by root, readable by all.
    pristine: Path
    user: JobUser

    @property
    def runner(self) -> Path:
        return self.jobs / "runner"

    @property
    def work(self) -> Path:
        return self.jobs / "work"

    @property
    def tmp(self) -> Path:
        return self.jobs / "tmp"

    @property
    def hook(self) -> Path:
        """Owned by root; jobs execute the hook in it."""
        return self.jobs / "hook"

    @property
    def log(self) -> Path:
        return self.state / "logs" / "runner.log"

    @property
    def shared_places(self) -> Path:
        """Record of the writable system paths as they were before any job."""
        return self.state / "shared-places.json"

    @property
    def registrar(self) -> Path:
        """Next to the pristine folder, so that hard links between the two are possible."""
        return self.pristine.with_name("registrar")

    @property
    def _owner_file(self) -> Path:
        return self.state / "instance-id"

    def make(self) -> None:
        self._check_home()
        try:
            for folder, mode in ((self.state, PRIVATE), (self.log.parent, PRIVATE), (self.jobs, PASSABLE)):
                folder.mkdir(mode=mode, parents=True, exist_ok=True)
                folder.chmod(mode)
            self.user.home.parent.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise Unavailable(f"cannot create the machine's folders: {problem}") from problem

    def _check_home(self) -> None:
        """Check that the home folder belongs to the job user, because each reset empties it."""
        home = self.user.home
        try:
            place = home.lstat()
        except FileNotFoundError:
            return
        # An interrupted reset creates the folder as root before it changes the owner.
        is_new = place.st_uid == 0 and stat.S_ISDIR(place.st_mode) and not any(home.iterdir())
        if home == home.parent or (place.st_uid != self.user.uid and not is_new):
            raise UserError(
                f"the home folder {home} does not belong to the user {self.user.name}",
                fix=f"give {self.user.name} a separate home folder in the image, or let the bootstrap create the user",
            )

    def make_registrar(self) -> None:
        """Make a copy of the runner software that only root can read. Hard links to the pristine files save space."""
        try:
            erase(self.registrar.parent.resolve() / self.registrar.name)
            shutil.copytree(self.pristine, self.registrar, symlinks=True, copy_function=_link_or_copy)
            self.registrar.chmod(PRIVATE)
        except (OSError, shutil.Error) as problem:
            raise Unavailable(f"cannot create {self.registrar}: {problem}") from problem

    def belong_to(self, instance_id: str) -> bool:
        """Whether the folders are ready for this machine. They are not if the image was made from a used machine."""
        try:
            return self._owner_file.read_text(encoding="utf-8").strip() == instance_id
        except (OSError, ValueError):
            return False

    def assign_to(self, instance_id: str) -> None:
        self._owner_file.write_text(f"{instance_id}\n", encoding="utf-8")


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
