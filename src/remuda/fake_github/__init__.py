"""A fake GitHub for the local backend: the REST API for runners, a job queue, and a fake actions runner.

This module holds the endpoint file, which says where a server listens, and the installation of the fake runner. It
imports the standard library only because commands that must start quickly read it.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import sys

from remuda.fake_github.fake_runner import VERSION

FILE_NAME = "endpoint.json"
_HERE = pathlib.Path(__file__).parent
SCRIPTS = ("config.sh", "env.sh", "run.sh")
#: Executables in `bin`, and the modules that they run.
PROGRAMS = {"Runner.Listener": "program", "Runner.Worker": "worker"}
#: Linux supports interpreter lines of at least 127 characters, without spaces in the path.
MAX_INTERPRETER_CHARS = 110

_PROGRAM = """\
#!{interpreter} -ISB
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from fake_runner.{module} import main

sys.exit(main())
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    url: str
    pid: int
    #: The administrator's access token.
    token: str


def read_endpoint(folder: pathlib.Path) -> Endpoint | None:
    """Read the endpoint of the server that uses, or last used, this folder. The server may be down."""
    try:
        document = json.loads((folder / FILE_NAME).read_text())
        return Endpoint(url=str(document["url"]), pid=int(document["pid"]), token=str(document["token"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_endpoint(folder: pathlib.Path, endpoint: Endpoint) -> None:
    """Write the file atomically."""
    draft = folder / f".{FILE_NAME}.{endpoint.pid}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(dataclasses.asdict(endpoint), file)
    draft.replace(folder / FILE_NAME)


def install_runner(folder: pathlib.Path, *, version: str = VERSION) -> None:
    """Create a folder with the layout of the actions/runner archive. Files that are up to date are left alone."""
    package = folder / "bin" / "fake_runner"
    package.mkdir(parents=True, exist_ok=True)
    for name in SCRIPTS:
        _put(folder / name, (_HERE / "runner_files" / name).read_bytes(), mode=0o755)
    for source in sorted((_HERE / "fake_runner").glob("*.py")):
        if _put(package / source.name, source.read_bytes(), mode=0o644):
            _compile(package / source.name)
    interpreter = _interpreter()
    for name, module in PROGRAMS.items():
        text = _PROGRAM.format(interpreter=interpreter, module=module)
        _put(folder / "bin" / name, text.encode(), mode=0o755)
    _put(folder / "bin" / "VERSION", f"{version}\n".encode(), mode=0o644)


def _put(path: pathlib.Path, content: bytes, *, mode: int) -> bool:
    """Write the file if its content differs. Return whether it was written."""
    if path.exists() and path.read_bytes() == content:
        return False
    draft = path.with_name(f".{path.name}.new")
    draft.write_bytes(content)
    draft.chmod(mode)
    draft.replace(path)
    return True


def _compile(source: pathlib.Path) -> None:
    """Compile without a check of the source's date, because copies of the folder have other dates."""
    import py_compile  # noqa: PLC0415 - only an installation needs it

    target = importlib.util.cache_from_source(str(source))
    py_compile.compile(
        str(source),
        cfile=target,
        dfile=source.name,
        doraise=True,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )


def _interpreter() -> str:
    for candidate in (sys.executable, getattr(sys, "_base_executable", "")):
        if candidate and " " not in candidate and len(candidate) <= MAX_INTERPRETER_CHARS:
            return str(candidate)
    raise OSError(f"the path {sys.executable!r} is too long or contains spaces; it cannot be an interpreter line")
