"""The job-started hook: refuses jobs that do not belong to the run and repository of this machine's assignment.

A runner of a set accepts any run of its scope. If the assignment says so, it refuses jobs that are not proven to be
trusted. What earlier jobs of the machine were is in the control record, which no job can write; the agent writes it
into the hook's folder, which no job can change. What this job is comes from the variables and the event file that the
runner sets for the hook before any step of the job (Runner.Worker/JobHookProvider.cs).
"""

from __future__ import annotations

import os
import re
import stat
from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path, PurePath
from urllib.parse import urlsplit

from remuda.domain.errors import Unavailable
from remuda.domain.instance import Assignment
from remuda.domain.trust import OWN_CODE

STARTED = "ACTIONS_RUNNER_HOOK_JOB_STARTED"
_STARTED_PREFIX = f"{STARTED}=".encode()
#: Files in the listener's folder with its environment, which `config.sh` writes in an image.
PATH_FILE = ".path"
ENVIRONMENT_FILES = (".env", PATH_FILE)
#: First path segment of an enterprise URL, which names no owner or repository.
ENTERPRISES = "enterprises"
#: Name of the file in which the hook lists refused jobs.
REFUSED = ".remuda-refused"
READABLE = 0o444
#: In place of a run's label. No label is empty or contains spaces only.
ANY_RUN = " "
MAX_REFUSED_BYTES = 4096
#: Refused jobs that the summary names; it counts the others.
MAX_NAMED = 3
_REFUSED_LINE = re.compile(
    r"(?P<run>[\w.-]{1,64}) (?P<repository>[\w.-]{1,100}/[\w.-]{1,100})(?P<untrusted> untrusted)?", re.ASCII
)


@cache
def _script() -> bytes:
    return resources.files("remuda.agent").joinpath("job-started.sh").read_bytes()


class JobHook:
    """Provides the hook and reads which jobs it refused.

    `folder` is the hook's folder as jobs see it. `pristine` is the unmodified runner software. The hook, which runs as
    a job's process, writes to `refused_file`; the agent reads the same file at `refused_file_outside`.
    """

    def __init__(
        self, *, folder: PurePath, pristine: Path, refused_file: PurePath, refused_file_outside: Path | None = None
    ) -> None:
        self._folder = folder
        self._pristine = pristine
        self._refused_file = refused_file
        self._refused_file_outside = refused_file_outside or Path(refused_file)

    def files(
        self, assignment: Assignment, *, runner: PurePath, environment: Mapping[str, str]
    ) -> tuple[dict[PurePath, tuple[bytes, int]], dict[str, str]]:
        """Return the files of the hook and of the listener in the folder `runner`, and the variables of the listener.

        If the image's `.env` or `environment` names a hook, our hook calls it after its own check. PATH comes from the
        image's `.path`: of actions/runner 2.336.0, only src/Misc/layoutbin/runsvc.sh reads that file, not the listener.
        """
        files, image_hook = self._environment_files(runner)
        label = assignment.labels[0] if assignment.labels else ""
        image_hook = image_hook or environment.get(STARTED, "")
        run = ANY_RUN if assignment.any_run else label
        trusted = " ".join(("", *sorted(OWN_CODE), "")) if assignment.only_trusted else ""
        lines = (run, _repository(assignment), str(self._refused_file), image_hook, trusted)
        if any(not line.isprintable() for line in lines):
            raise Unavailable("the assignment's label or repository contains unprintable characters")
        script = self._folder / "job-started.sh"
        files |= {
            self._folder / "assigned": ("".join(f"{line}\n" for line in lines).encode(), READABLE),
            script: (_script(), READABLE),
        }
        variables = {STARTED: str(script)}
        path = os.fsdecode(files.get(runner / PATH_FILE, (b"", 0))[0]).strip()
        if path:
            # The start of the listener needs the system's programs, which the image's PATH may lack.
            folders = dict.fromkeys((*path.split(":"), *environment.get("PATH", "").split(":")))
            variables["PATH"] = ":".join(filter(None, folders))
        return files, variables

    def refused(self) -> str:
        """Return a summary of the refused jobs, or an empty string. Ignores malformed lines."""
        lines = list(filter(None, map(_REFUSED_LINE.fullmatch, self._refused_lines())))
        found = Counter(f"run {line['run']} of {line['repository']}" for line in lines)
        if not found:
            return ""
        shown = ", ".join(list(found)[:MAX_NAMED])
        more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        kind = "untrusted" if all(line["untrusted"] for line in lines) else "foreign"
        jobs = f"1 {kind} job" if found.total() == 1 else f"{found.total()} {kind} jobs"
        return f"refused {jobs}: {shown}{more}"

    def _refused_lines(self) -> list[str]:
        try:
            descriptor = os.open(self._refused_file_outside, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return []
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return []
            return os.read(descriptor, MAX_REFUSED_BYTES).decode(errors="replace").splitlines()
        finally:
            os.close(descriptor)

    def _environment_files(self, runner: PurePath) -> tuple[dict[PurePath, tuple[bytes, int]], str]:
        """Return the pristine environment files without their hook variable, and the hook that they name. An earlier
        job of the run may have changed those of the listener.
        """
        image_hook = ""
        files: dict[PurePath, tuple[bytes, int]] = {}
        try:
            for source in (self._pristine / name for name in ENVIRONMENT_FILES):
                if not source.is_file():
                    continue
                lines = source.read_bytes().splitlines(keepends=True)
                named = [line for line in lines if line.startswith(_STARTED_PREFIX)]
                if named:
                    image_hook = os.fsdecode(named[-1].removeprefix(_STARTED_PREFIX).strip())
                kept = b"".join(line for line in lines if line not in named)
                files[runner / source.name] = (kept, stat.S_IMODE(source.stat().st_mode))
        except OSError as problem:
            raise Unavailable(f"cannot read the runner's environment files: {problem}") from problem
        return files, image_hook


def _repository(assignment: Assignment) -> str:
    """Return `owner/name`, `owner/` for all repositories of an owner, or an empty string for an enterprise."""
    if assignment.repository:
        return assignment.repository.lower()
    parts = [part for part in urlsplit(assignment.url).path.lower().split("/") if part]
    if not parts or parts[0] == ENTERPRISES:
        return ""
    return "/".join(parts[:2]) if len(parts) > 1 else f"{parts[0]}/"
