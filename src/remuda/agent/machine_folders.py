"""The folders of a machine whose agent is root: the agent's own, and those of jobs."""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from remuda.agent.job_user import JobUser
from remuda.agent.reset import PRIVATE, erase
from remuda.domain.errors import Unavailable, UserError

#: Jobs must get through to their folders, and may not put anything beside them.
PASSABLE = 0o711


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineFolders:
    #: Only root may look.
    state: Path
    #: Root's, with the jobs' folders in it.
    jobs: Path
    #: The runner's software as it was before any job: root's, for all to read.
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
        """Root's, for jobs to run."""
        return self.jobs / "hook"

    @property
    def log(self) -> Path:
        return self.state / "logs" / "runner.log"

    @property
    def shared_places(self) -> Path:
        """Where jobs may write among what is not theirs, as it was before them."""
        return self.state / "shared-places.json"

    @property
    def registrar(self) -> Path:
        """Beside the pristine one: so both can be the same files."""
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
            raise Unavailable(f"the machine's folders cannot be made: {problem}") from problem

    def _check_home(self) -> None:
        """It is emptied with every reset: so it must not be anybody else's."""
        home = self.user.home
        try:
            place = home.lstat()
        except FileNotFoundError:
            return
        # A reset that was cut has made it, and not handed it over yet.
        is_new = place.st_uid == 0 and stat.S_ISDIR(place.st_mode) and not any(home.iterdir())
        if home == home.parent or (place.st_uid != self.user.uid and not is_new):
            raise UserError(
                f"the home of {self.user.name} is {home}, which is not its own",
                fix=f"give {self.user.name} a home of its own in the image, or let the bootstrap make the user",
            )

    def make_registrar(self) -> None:
        """The runner's software once more, for root alone. It costs no space: the files are the pristine ones."""
        try:
            erase(self.registrar.parent.resolve() / self.registrar.name)
            shutil.copytree(self.pristine, self.registrar, symlinks=True, copy_function=_linked)
            self.registrar.chmod(PRIVATE)
        except (OSError, shutil.Error) as problem:
            raise Unavailable(f"{self.registrar} cannot be made: {problem}") from problem

    def are_of(self, instance_id: str) -> bool:
        """Whether the folders are ready, and this machine's: an image may have been made of a machine in use."""
        try:
            return self._owner_file.read_text(encoding="utf-8").strip() == instance_id
        except (OSError, ValueError):
            return False

    def are_now_of(self, instance_id: str) -> None:
        self._owner_file.write_text(f"{instance_id}\n", encoding="utf-8")


def _linked(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
