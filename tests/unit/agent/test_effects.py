"""Every function through which host code can act is known to the crash points: cut, replaced, or without an effect.

If one of these tests fails, a module of the host uses a function that no table knows. Whoever added it decides: what
changes the host goes into the seam (`tests/support/effects/seam.py`), which lets the crash points cut it; what only
looks, or concerns the agent's own process, goes into one of the lists below. New commands go into `programs.py` there,
without which the crash points fail and name the command.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import remuda
from tests.support.effects import seam

SOURCE = Path(remuda.__file__).parent
#: The code that runs on an instance, as root.
HOST_CODE = sorted(
    path.relative_to(SOURCE).as_posix()
    for path in (
        *(SOURCE / "agent").glob("*.py"),
        *(SOURCE / name for name in ("procfs.py", "scripts.py", "inotify.py", "adapters/aws/imds.py")),
        SOURCE / "cli" / "agent_ec2.py",
    )
    if path.name != "__init__.py"
)
#: Modules of the host that the model replaces as a whole where agents call them, and programs that run elsewhere.
REPLACED_MODULES = {
    "agent/enter_sandbox.py": "runs in a process of its own, the listener's",
    "agent/guard.py": "runs in a process of its own",
    "agent/guard_process.py": "starts the guard and looks at what it did; replaced by the seam",
    "agent/system_call_filter.py": "looks, and starts programs with a filter; replaced by the seam",
    "agent/quotas.py": "its functions are replaced by the seam",
    "agent/connections.py": "its function is replaced by the seam",
    "agent/fuse_connections.py": "its function is replaced by the seam",
    "agent/kernel_modules.py": "changes the kernel, which the model has not; replaced by the seam",
    "agent/shared_limits.py": "called by the module above",
    "agent/socket_filter.py": "only looks; replaced by the seam",
    "agent/job_folders.py": "the local backend, which is no instance",
    "procfs.py": "its functions are replaced by the seam",
    "inotify.py": "only looks; replaced by the seam",
}
#: Modules through which a program can act.
ACTING = frozenset(
    {"asyncio", "builtins", "ctypes", "fcntl", "io", "os", "resource", "select", "shutil", "signal", "socket"}
    | {"subprocess", "tarfile", "tempfile", "threading", "multiprocessing", "mmap", "pty"}
)
#: Modules without effects.
PURE = frozenset(
    {"__future__", "base64", "collections", "contextlib", "dataclasses", "datetime", "errno", "functools", "hashlib"}
    | {"importlib", "json", "math", "pathlib", "platform", "re", "remuda", "stat", "struct", "sys", "time", "typing"}
    | {"enum", "gc", "urllib", "weakref"}
)
#: Functions and types of these modules that change nothing outside the agent's process.
HARMLESS = frozenset(
    {
        *(
            "os.close",
            "os.fsdecode",
            "os.fsencode",
            "os.geteuid",
            "os.getpid",
            "os.makedev",
            "os.strerror",
            "os.sysconf",
        ),
        *("os.walk", "os.path.lexists", "os.path.relpath", "os.fstat", "os.read", "os.memfd_create", "os.getuid"),
        # Its parts are functions of the seam.
        *("tempfile.TemporaryFile", "io.BytesIO", "io.FileIO", "tarfile.open", "tarfile.TarInfo", "shutil.which"),
        # Only for a folder that the image of jobs has; its parts are functions of the seam.
        "shutil.copytree",
        *("subprocess.CompletedProcess", "select.poll"),
        *("asyncio.Event", "asyncio.create_task", "asyncio.ensure_future", "asyncio.gather", "asyncio.shield"),
        *("asyncio.get_running_loop", "asyncio.timeout", "asyncio.to_thread", "asyncio.wait", "asyncio.run"),
        *("asyncio.Task", "asyncio.AbstractEventLoop", "subprocess.TimeoutExpired", "signal.Signals"),
        *("ctypes.CDLL", "ctypes.c_size_t", "ctypes.sizeof", "ctypes.byref", "ctypes.get_errno", "ctypes.c_uint64"),
        *("ctypes.Structure", "os.defpath"),
    }
)
#: Functions of the product through which the system calls go that Python does not have, with the file that may.
SYSTEM_CALLS = {
    "agent/mounts.py": {"_libc.syscall": "in `_call`, which the seam replaces"},
    "agent/processes.py": {
        "_libc.syscall": "in `join_new_session_keyring`: the agent's own keyring",
        "resource.setrlimit": "in `disable_core_dumps`: the agent's own limit",
    },
}
#: Methods of paths and files that change the host, and those that only look. All end in functions of the seam.
PATH_METHODS = frozenset(
    {
        *("chmod", "exists", "glob", "hardlink_to", "is_char_device", "is_dir", "is_file", "is_mount", "is_symlink"),
        *("iterdir", "lchmod", "lstat", "mkdir", "open", "read_bytes", "read_text", "readlink", "rename", "replace"),
        *("resolve", "rglob", "rmdir", "stat", "symlink_to", "touch", "unlink", "write_bytes", "write_text"),
    }
)


def references(file: str) -> Iterator[tuple[str, int]]:
    """Yield the names of acting modules that a file uses, such as `os.unlink`, with their lines. Without constants."""
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
    names: dict[str, str] = {"open": "builtins.open", "exec": "builtins.exec", "_libc": "_libc"}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                names |= {alias.asname or alias.name: alias.name for alias in aliases}
            case ast.ImportFrom(module=str(module), names=aliases):
                names |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in aliases}
    inner = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and node not in inner:
            name = _full_name(node, names)
            module, _, function = name.rpartition(".")
            if module.split(".")[0] in ACTING | {"_libc"} and not function.isupper():
                yield name, node.lineno


def imported(file: str) -> set[str]:
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                found |= {alias.name.split(".")[0] for alias in aliases}
            case ast.ImportFrom(module=str(module)):
                found.add(module.split(".")[0])
    return found


def _full_name(node: ast.expr, names: dict[str, str]) -> str:
    match node:
        case ast.Name(id=name):
            return names.get(name, "")
        case ast.Attribute(value=value, attr=attribute):
            owner = _full_name(value, names)
            return f"{owner}.{attribute}" if owner else ""
    return ""


def known_functions() -> set[str]:
    return {f"{owner.__name__}.{name}" for owner, name, _ in seam.REDIRECTED if hasattr(owner, "__name__")}


@pytest.mark.parametrize("file", [file for file in HOST_CODE if file not in REPLACED_MODULES])
def test_host_code_acts_only_through_the_seam(file: str) -> None:
    replaced = {
        f"{name}.{part}"
        for owner, name, value in seam.REPLACED
        if owner.__name__ == f"remuda.{file.removesuffix('.py').replace('/', '.')}"
        for part in vars(value)
    }
    known = known_functions() | HARMLESS | set(SYSTEM_CALLS.get(file, ())) | replaced
    unknown = [f"{file}:{line}: {name}" for name, line in references(file) if name not in known]
    assert unknown == [], "known neither in tests/support/effects/seam.py nor in the lists of this file"


@pytest.mark.parametrize("file", [file for file in HOST_CODE if file not in REPLACED_MODULES])
def test_host_code_uses_known_methods_of_paths(file: str) -> None:
    tree = ast.parse((SOURCE / file).read_text(encoding="utf-8"))
    named = {
        node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    methods = {name for name in dir(Path) if not name.startswith("_")} - set(dir(str))
    pure = {name for name in dir(Path.__mro__[1]) if not name.startswith("_")}
    assert (named & methods) - pure - PATH_METHODS == set()


@pytest.mark.parametrize("file", [file for file in HOST_CODE if file not in REPLACED_MODULES])
def test_host_code_imports_known_modules(file: str) -> None:
    assert imported(file) <= PURE | ACTING


@pytest.mark.parametrize("file", REPLACED_MODULES)
def test_replaced_modules_exist(file: str) -> None:
    assert file in HOST_CODE
