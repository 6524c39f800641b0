"""The hook that every job meets first: it refuses those that are not of this machine's run and repository."""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from urllib.parse import urlsplit

from remuda.agent import job_files
from remuda.domain.errors import Unavailable
from remuda.domain.instance import Assignment

STARTED = "ACTIONS_RUNNER_HOOK_JOB_STARTED"
_NAMED = f"{STARTED}=".encode()
#: What the listener reads in its folder before anything else. It wins over the environment that it is given.
ENVIRONMENT_FILES = (".env", ".path")
#: Where the path of a runner's address says nothing about repositories.
ENTERPRISES = "enterprises"
#: The name of the notes, wherever they are.
REFUSED = ".remuda-refused"
READABLE = 0o444
MAX_NOTES_BYTES = 4096
MAX_NAMED = 3
_NOTE = re.compile(r"(?P<run>[\w.-]{1,64}) (?P<repository>[\w.-]{1,100}/[\w.-]{1,100})", re.ASCII)


@cache
def _script() -> bytes:
    return resources.files("remuda.agent").joinpath("job-started.sh").read_bytes()


class JobHook:
    """`folder` is the agent's own, and jobs can read it. `pristine` is the runner's software as no job has seen it.
    `notes` is a file that the hook, a job's process, can write to: in a folder that each reset empties.
    """

    def __init__(self, *, folder: Path, pristine: Path, notes: Path) -> None:
        self._folder = folder
        self._pristine = pristine
        self._notes = notes

    def put(self, assignment: Assignment, *, runner: Path, environment: Mapping[str, str]) -> dict[str, str]:
        """Write it for the listener in the folder `runner`, which starts next; returns what its environment needs.

        What the pool has for a hook of its own, in the `.env` of its image or in `environment`, is called by ours.
        """
        theirs = self._restore(runner) or environment.get(STARTED, "")
        lines = (assignment.labels[0] if assignment.labels else "", _repository(assignment), str(self._notes), theirs)
        if any(not line.isprintable() for line in lines):
            raise Unavailable("the assignment's labels or repository cannot be handed to the job-started hook")
        script = self._folder / "job-started.sh"
        try:
            self._folder.mkdir(mode=0o755, exist_ok=True)
            self._folder.chmod(0o755)
            with job_files.opened(self._folder) as folder:
                job_files.put(folder, "assigned", "".join(f"{line}\n" for line in lines).encode(), mode=READABLE)
                job_files.put(folder, script.name, _script(), mode=READABLE)
        except OSError as problem:
            raise Unavailable(f"the job-started hook cannot be written: {problem}") from problem
        return {STARTED: str(script)}

    def refused(self) -> str:
        """Who was turned away. The file is in a job's hands: it is read with care, and only what fits is told."""
        notes = filter(None, map(_NOTE.fullmatch, self._lines()))
        found = Counter(f"run {note['run']} of {note['repository']}" for note in notes)
        if not found:
            return ""
        shown = ", ".join(list(found)[:MAX_NAMED])
        more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        jobs = "1 foreign job" if found.total() == 1 else f"{found.total()} foreign jobs"
        return f"refused {jobs}: {shown}{more}"

    def _lines(self) -> list[str]:
        try:
            descriptor = os.open(self._notes, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return []
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return []
            return os.read(descriptor, MAX_NOTES_BYTES).decode(errors="replace").splitlines()
        finally:
            os.close(descriptor)

    def _restore(self, runner: Path) -> str:
        """Give the listener the pristine files, without a hook in them: an earlier job of the run may have changed
        them, and its processes may still do. Returns the hook that was named there.
        """
        theirs = ""
        try:
            with job_files.opened(runner) as folder:
                for name in ENVIRONMENT_FILES:
                    source = self._pristine / name
                    if not source.is_file():
                        job_files.drop(folder, name)
                        continue
                    lines = source.read_bytes().splitlines(keepends=True)
                    named = [line for line in lines if line.startswith(_NAMED)]
                    theirs = os.fsdecode(named[-1].removeprefix(_NAMED).strip()) if named else theirs
                    kept = b"".join(line for line in lines if line not in named)
                    job_files.put(folder, name, kept, mode=stat.S_IMODE(source.stat().st_mode))
        except OSError as problem:
            raise Unavailable(f"the listener's environment cannot be restored: {problem}") from problem
        return theirs


def _repository(assignment: Assignment) -> str:
    """owner/name; `owner/` for all of an owner's; empty where the runner's address names neither."""
    if assignment.repository:
        return assignment.repository.lower()
    parts = [part for part in urlsplit(assignment.url).path.lower().split("/") if part]
    if not parts or parts[0] == ENTERPRISES:
        return ""
    return "/".join(parts[:2]) if len(parts) > 1 else f"{parts[0]}/"
