"""The job-started hook: refuses jobs that do not belong to the run and repository of this machine's assignment."""

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
_STARTED_PREFIX = f"{STARTED}=".encode()
#: Files in the listener's folder that override its environment.
ENVIRONMENT_FILES = (".env", ".path")
#: First path segment of an enterprise URL, which names no owner or repository.
ENTERPRISES = "enterprises"
#: Name of the file in which the hook lists refused jobs.
REFUSED = ".remuda-refused"
READABLE = 0o444
MAX_REFUSED_BYTES = 4096
#: Refused jobs that the summary names; it counts the others.
MAX_NAMED = 3
_REFUSED_LINE = re.compile(r"(?P<run>[\w.-]{1,64}) (?P<repository>[\w.-]{1,100}/[\w.-]{1,100})", re.ASCII)


@cache
def _script() -> bytes:
    return resources.files("remuda.agent").joinpath("job-started.sh").read_bytes()


class JobHook:
    """Installs the hook and reads which jobs it refused.

    `folder` holds the hook; the agent owns it and jobs can read it. `pristine` is the unmodified runner software.
    `refused_file` is written by the hook, which runs as a job's process; it lies in a folder that each reset empties.
    """

    def __init__(self, *, folder: Path, pristine: Path, refused_file: Path) -> None:
        self._folder = folder
        self._pristine = pristine
        self._refused_file = refused_file

    def put(self, assignment: Assignment, *, runner: Path, environment: Mapping[str, str]) -> dict[str, str]:
        """Write the hook for the listener in the folder `runner`. Return the variables that the listener needs.

        If the image's `.env` or `environment` names a hook, our hook calls it after its own check.
        """
        image_hook = self._restore_environment_files(runner) or environment.get(STARTED, "")
        label = assignment.labels[0] if assignment.labels else ""
        lines = (label, _repository(assignment), str(self._refused_file), image_hook)
        if any(not line.isprintable() for line in lines):
            raise Unavailable("the assignment's label or repository contains unprintable characters")
        script = self._folder / "job-started.sh"
        try:
            self._folder.mkdir(mode=0o755, exist_ok=True)
            self._folder.chmod(0o755)
            with job_files.opened(self._folder) as folder:
                job_files.put(folder, "assigned", "".join(f"{line}\n" for line in lines).encode(), mode=READABLE)
                job_files.put(folder, script.name, _script(), mode=READABLE)
        except OSError as problem:
            raise Unavailable(f"cannot write the job-started hook: {problem}") from problem
        return {STARTED: str(script)}

    def refused(self) -> str:
        """Return a summary of the refused jobs, or an empty string. Ignores malformed lines."""
        lines = filter(None, map(_REFUSED_LINE.fullmatch, self._refused_lines()))
        found = Counter(f"run {line['run']} of {line['repository']}" for line in lines)
        if not found:
            return ""
        shown = ", ".join(list(found)[:MAX_NAMED])
        more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        jobs = "1 foreign job" if found.total() == 1 else f"{found.total()} foreign jobs"
        return f"refused {jobs}: {shown}{more}"

    def _refused_lines(self) -> list[str]:
        try:
            descriptor = os.open(self._refused_file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return []
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return []
            return os.read(descriptor, MAX_REFUSED_BYTES).decode(errors="replace").splitlines()
        finally:
            os.close(descriptor)

    def _restore_environment_files(self, runner: Path) -> str:
        """Restore the pristine environment files without their hook variable, because an earlier job of the run may
        have changed them. Return the hook that the pristine files name.
        """
        image_hook = ""
        try:
            with job_files.opened(runner) as folder:
                for name in ENVIRONMENT_FILES:
                    source = self._pristine / name
                    if not source.is_file():
                        job_files.drop(folder, name)
                        continue
                    lines = source.read_bytes().splitlines(keepends=True)
                    named = [line for line in lines if line.startswith(_STARTED_PREFIX)]
                    if named:
                        image_hook = os.fsdecode(named[-1].removeprefix(_STARTED_PREFIX).strip())
                    kept = b"".join(line for line in lines if line not in named)
                    job_files.put(folder, name, kept, mode=stat.S_IMODE(source.stat().st_mode))
        except OSError as problem:
            raise Unavailable(f"cannot restore the listener's environment files: {problem}") from problem
        return image_hook


def _repository(assignment: Assignment) -> str:
    """Return `owner/name`, `owner/` for all repositories of an owner, or an empty string for an enterprise."""
    if assignment.repository:
        return assignment.repository.lower()
    parts = [part for part in urlsplit(assignment.url).path.lower().split("/") if part]
    if not parts or parts[0] == ENTERPRISES:
        return ""
    return "/".join(parts[:2]) if len(parts) > 1 else f"{parts[0]}/"
