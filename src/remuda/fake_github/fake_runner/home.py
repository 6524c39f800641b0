"""The runner's folder, its command-line inputs and its output."""

import json
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from . import VERSION

RUNNER_FILE = ".runner"
CREDENTIALS_FILE = ".credentials"
KEY_FILE = ".credentials_rsaparams"
VERSION_FILE = "VERSION"
INPUT_PREFIX = "ACTIONS_RUNNER_INPUT_"
#: Flags without a value.
SWITCHES = frozenset(
    {
        *("unattended", "nodefaultlabels", "disableupdate", "ephemeral", "replace", "local", "once", "check"),
        *("help", "version", "commit"),
    }
)
TRUE = frozenset({"1", "true", "y", "yes"})


class RunnerHome:
    def __init__(self, root: pathlib.Path, programs: pathlib.Path | None = None) -> None:
        self.root = root
        #: Folder of the programs of this version.
        self.programs = programs or root / "bin"

    @property
    def version(self) -> str:
        """The version of the programs. Tests and updates write the file to get another one."""
        try:
            return (self.programs / VERSION_FILE).read_text().strip() or VERSION
        except OSError:
            return VERSION

    def configured(self) -> bool:
        return (self.root / RUNNER_FILE).exists()

    def work_folder(self, path: str) -> pathlib.Path:
        """The folder of jobs: an absolute path, or a path relative to the runner's folder.

        Runner.Common/HostContext.cs, GetDirectory.
        """
        if not path:
            raise ValueError("Value cannot be null. (Parameter 'WorkFolder')")
        return pathlib.Path(os.path.normpath(self.root / path))

    def load(self, name: str) -> dict[str, Any] | None:
        try:
            loaded = json.loads((self.root / name).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError):
            return None
        return loaded if isinstance(loaded, dict) else None

    def save(self, name: str, document: dict[str, Any]) -> None:
        # Like the real runner, start the file with a byte order mark, which readers must handle.
        self.write(name, json.dumps(document, indent=2).encode("utf-8-sig"))

    def write(self, name: str, content: bytes) -> None:
        path = self.root / name
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)

    def forget(self) -> None:
        """Remove the local configuration, with the output of the real runner.

        Runner.Listener/Configuration/ConfigurationManager.cs, DeleteLocalRunnerConfig.
        """
        if (self.root / CREDENTIALS_FILE).exists():
            (self.root / KEY_FILE).unlink(missing_ok=True)
        for name in (CREDENTIALS_FILE, RUNNER_FILE):
            path = self.root / name
            if path.exists():
                # A `config.sh remove` at the same time may be faster.
                path.unlink(missing_ok=True)
                say(f"√ Removed {name}")
            else:
                say(f"Does not exist. Skipping Removing {name}")

    def load_environment(self) -> None:
        """Set the variables of the `.env` file for the runner and its jobs.

        Runner.Listener/Program.cs, LoadAndSetEnv: an empty value removes the variable.
        """
        try:
            lines = (self.root / ".env").read_text().splitlines()
        except OSError:
            return
        for line in lines:
            name, equals, value = line.partition("=")
            if equals and name and value:
                os.environ[name] = value
            elif equals and name:
                os.environ.pop(name, None)

    def diagnose(self, process: str, text: str) -> None:
        """Write a line to `_diag`, the log folder of the real runner."""
        folder = self.root / "_diag"
        folder.mkdir(exist_ok=True)
        with (folder / f"{process}_{os.getpid()}-utc.log").open("a") as file:
            file.write(f"[{utc()} INFO {process}] {text}\n")


class RunnerInputs:
    """Inputs from the command line, and from the environment otherwise. Dashes and case are ignored in names."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._values: dict[str, str] = {}
        self.commands: list[str] = []
        for name in [name for name in os.environ if name.upper().startswith(INPUT_PREFIX)]:
            # Removed from the environment, so that no job inherits a token.
            self._values[_normalized(name[len(INPUT_PREFIX) :])] = os.environ.pop(name)
        waiting: str | None = None
        for argument in arguments:
            if argument.startswith("--"):
                name, equals, value = argument[2:].partition("=")
                self._values[_normalized(name)] = value if equals else "true"
                waiting = None if equals or _normalized(name) in SWITCHES else _normalized(name)
            elif waiting is not None:
                self._values[waiting], waiting = argument, None
            else:
                self.commands.append(argument)

    def text(self, name: str) -> str | None:
        return self._values.get(_normalized(name)) or None

    def switch(self, name: str) -> bool:
        return (self.text(name) or "").lower() in TRUE


def _normalized(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def check_readable(folder: pathlib.Path) -> None:
    """Raise `PermissionError` if the folder or one above it cannot be listed (Runner.Sdk/Util/IOUtil.cs,
    ValidateExecutePermission). The real listener makes this check at every start.
    """
    for each in (folder, *folder.parents):
        try:
            with os.scandir(each) as entries:
                next(entries, None)
        except PermissionError as problem:
            raise PermissionError(
                f"Permission to read the directory contents is required for '{folder}' and each directory up the "
                f"hierarchy. Access to the path '{each}' is denied."
            ) from problem


def say(text: str, descriptor: int = 1) -> None:
    """Write a line to stdout, unbuffered and as UTF-8. Errors are ignored, because stdout may be closed."""
    try:
        os.write(descriptor, f"{text}\n".encode())
    except OSError:
        return


def say_error(text: str) -> None:
    """Write a line to stderr (Runner.Common/Terminal.cs, WriteError)."""
    say(text, 2)


def say_with_time(text: str) -> None:
    say(f"{utc()}: {text}")


def utc() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime())
