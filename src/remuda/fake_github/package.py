"""Lays out the stand-in's folder, as the archive of actions/runner would."""

import importlib.util
import pathlib
import py_compile
import sys

from remuda.fake_github.fake_runner import VERSION

_HERE = pathlib.Path(__file__).parent
SCRIPTS = ("config.sh", "run.sh")
#: Executable in `bin`, and the module that it runs.
PROGRAMS = {"Runner.Listener": "program", "Runner.Worker": "worker"}
#: Linux takes interpreter lines of 127 characters everywhere, and none with a blank in the path.
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
    """Make the folder a runner's folder. What is there already and right is left alone."""
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
    """Whether something had to be written."""
    if path.exists() and path.read_bytes() == content:
        return False
    draft = path.with_name(f".{path.name}.new")
    draft.write_bytes(content)
    draft.chmod(mode)
    draft.replace(path)
    return True


def _compile(source: pathlib.Path) -> None:
    """Ahead of time and not checked against the source's date: a copied folder has other dates."""
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
    raise OSError(f"no interpreter line can be made of {sys.executable!r}")
