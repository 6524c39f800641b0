"""Installation of the fake runner: creates a folder with the layout of the actions/runner archive."""

import importlib.util
import pathlib
import py_compile
import sys

from remuda.fake_github.fake_runner import VERSION

_HERE = pathlib.Path(__file__).parent
SCRIPTS = ("config.sh", "run.sh")
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


def install(folder: pathlib.Path) -> None:
    """Install the fake runner in the folder. Files that are up to date are not written again."""
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
    _put(folder / "VERSION", f"{VERSION}\n".encode(), mode=0o644)


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
