"""Folders of a machine whose agent runs as root: the agent's private folders and those of jobs.

The runner software exists three times: `pristine` is the unmodified original, `runner` is the copy that listens and
runs jobs and that each reset makes anew, and `registrar` is the private copy that registers and deregisters the runner.
"""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from remuda.agent.job_user import JobUser
from remuda.agent.reset import PRIVATE, erase
from remuda.domain.errors import Unavailable, UserError

#: Mode of a folder that jobs can traverse to reach their own folders, but can neither list nor write.
TRAVERSE_ONLY = 0o711


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineFolders:
    #: Readable by root only.
    state: Path
    #: Owned by root; contains the jobs' folders.
    jobs: Path
    #: The original runner software: owned by root, readable by all.
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
        """The agent's private copy of the runner software, which registers and deregisters the runner.

        It lies next to the pristine folder, on the same file system, so that its files can be hard links.
        """
        return self.pristine.with_name("registrar")

    @property
    def _instance_id_file(self) -> Path:
        return self.state / "instance-id"

    def make(self) -> None:
        self._check_home()
        try:
            for folder, mode in ((self.state, PRIVATE), (self.log.parent, PRIVATE), (self.jobs, TRAVERSE_ONLY)):
                folder.mkdir(mode=mode, parents=True, exist_ok=True)
                folder.chmod(mode)
            self.user.home.parent.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise Unavailable(f"cannot create the machine's folders: {problem}") from problem

    def _check_home(self) -> None:
        """Check that the home folder belongs to the job user, because each reset empties it."""
        home = self.user.home
        try:
            status = home.lstat()
        except FileNotFoundError:
            return
        # A reset creates the folder as root and then changes its owner. After an interruption in between, root owns an
        # empty folder.
        is_empty_new = status.st_uid == 0 and stat.S_ISDIR(status.st_mode) and not any(home.iterdir())
        if home == home.parent or (status.st_uid != self.user.uid and not is_empty_new):
            raise UserError(
                f"the home folder {home} does not belong to the user {self.user.name}",
                fix=f"give {self.user.name} a separate home folder in the image, or let the bootstrap create the user",
            )

    def make_registrar(self) -> None:
        """Make the registrar anew, as hard links to the pristine files to save space.

        Only its folder is private: files that `config.sh` creates in it cannot be reached by jobs, while the linked
        files keep the mode of the pristine ones.
        """
        try:
            # Only the parent is resolved: if the registrar itself is a link, the link is deleted and not its target.
            erase(self.registrar.parent.resolve() / self.registrar.name)
            shutil.copytree(self.pristine, self.registrar, symlinks=True, copy_function=_link_or_copy)
            self.registrar.chmod(PRIVATE)
        except (OSError, shutil.Error) as problem:
            raise Unavailable(f"cannot create {self.registrar}: {problem}") from problem

    def were_prepared_for(self, instance_id: str) -> bool:
        """Whether the folders were prepared for this instance.

        An image of a used instance contains folders that were prepared for that instance.
        """
        try:
            return self._instance_id_file.read_text(encoding="utf-8").strip() == instance_id
        except (OSError, ValueError):
            return False

    def mark_prepared_for(self, instance_id: str) -> None:
        self._instance_id_file.write_text(f"{instance_id}\n", encoding="utf-8")


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
