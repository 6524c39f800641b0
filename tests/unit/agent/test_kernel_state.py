"""Modules, and changes of the kernel during a run. tests/conformance and tests/machine use real kernels."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from remuda.agent import kernel_modules, kernel_state, shared_limits, socket_filter
from remuda.agent.kernel_modules import KernelModules
from remuda.agent.kernel_state import KernelState, State, compare

BEFORE: State = {
    "module": {"veth": "loaded"},
    "interface": {"lo": "exists", "ens5": "exists"},
    "setting": {"kernel/modprobe": "/sbin/modprobe", "kernel/tainted": "0"},
}


def changed(kind: str, **values: str | None) -> State:
    state = {name: dict(items) for name, items in BEFORE.items()}
    for name, value in values.items():
        if value is None:
            del state[kind][name]
        else:
            state[kind][name.replace("__", "/")] = value
    return state


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (BEFORE, ""),
        (changed("module", nfs="loaded"), "the kernel has changed: module nfs: loaded"),
        (changed("interface", ens5=None), "the kernel has changed: interface ens5: gone, was exists"),
        (
            changed("setting", kernel__modprobe="/x", kernel__tainted="8"),
            "the kernel has changed: setting kernel/modprobe: /x, was /sbin/modprobe; setting kernel/tainted: 8, was 0",
        ),
    ],
)
def test_differences_are_named(after: State, expected: str) -> None:
    assert compare(BEFORE, after) == expected


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelState:
    monkeypatch.setattr(kernel_state, "read_state", lambda: BEFORE)
    monkeypatch.setattr(kernel_state, "_boot_id", lambda: "boot-1")
    return KernelState(tmp_path / "kernel.json")


def test_a_record_stays_until_nothing_has_changed(state: KernelState, monkeypatch: pytest.MonkeyPatch) -> None:
    assert state.changes() == "", "nothing was recorded"
    state.record()
    monkeypatch.setattr(kernel_state, "read_state", lambda: changed("module", nfs="loaded"))
    state.record()
    assert "nfs" in state.changes()
    assert "nfs" in state.changes()
    monkeypatch.setattr(kernel_state, "read_state", lambda: BEFORE)
    assert state.changes() == ""
    monkeypatch.setattr(kernel_state, "read_state", lambda: changed("module", xfs="loaded"))
    assert state.changes() == "", "the record was forgotten"


def test_after_a_reboot_the_kernel_is_another(state: KernelState, monkeypatch: pytest.MonkeyPatch) -> None:
    state.record()
    monkeypatch.setattr(kernel_state, "_boot_id", lambda: "boot-2")
    monkeypatch.setattr(kernel_state, "read_state", lambda: changed("module", nfs="loaded"))
    assert state.changes() == ""
    state.record()
    assert state.changes() == ""


@pytest.mark.parametrize("content", ["", "{", "null", "[]", '{"boot": "boot-1"}'])
def test_unreadable_record_is_no_proof(state: KernelState, tmp_path: Path, content: str) -> None:
    (tmp_path / "kernel.json").write_text(content)
    assert "cannot be read" in state.changes()


# Modules --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel settings of a machine of its own."""
    (tmp_path / "core_pattern").write_text("|/usr/share/apport/apport %p\n")
    (tmp_path / "modules_disabled").write_text("0\n")
    monkeypatch.setattr(kernel_modules, "_SETTINGS", tmp_path)
    monkeypatch.setattr(shared_limits, "_SYS", tmp_path / "sys")
    monkeypatch.setattr(kernel_modules, "_owns_kernel", lambda: True)
    return tmp_path


@pytest.fixture
def commands(settings: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Commands that were run while modules could still be loaded."""
    run: list[tuple[str, ...]] = []

    def record(command: tuple[str, ...], **_: object) -> None:
        assert (settings / "modules_disabled").read_text() == "0\n"
        run.append(command)

    monkeypatch.setattr(subprocess, "run", record)
    monkeypatch.setattr(shutil, "which", lambda name, **_: f"/sbin/{name}")
    return run


def test_modules_are_loaded_once_and_then_none(settings: Path, commands: list[tuple[str, ...]]) -> None:
    modules = KernelModules(further=("sch_netem",))
    modules.prepare()
    assert (settings / "modules_disabled").read_text() == "1"
    ((program, *words),) = commands
    assert program == "/sbin/modprobe"
    assert words[-1] == "sch_netem"
    assert {"bridge", "overlay", "veth", "xt_conntrack"} <= set(words)
    modules.prepare()
    assert len(commands) == 1


def test_loading_stays_open_if_the_pool_wants_it(settings: Path, commands: list[tuple[str, ...]]) -> None:
    KernelModules(are_open=True).prepare()
    assert (settings / "modules_disabled").read_text() == "0\n"
    assert commands == []
    assert (settings / "core_pattern").read_text() == "core"


@pytest.mark.usefixtures("commands")
def test_modules_that_do_not_load_in_time_are_a_failure(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: tuple[str, ...], *, timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(OSError, match="not loaded after 120 s"):
        KernelModules().prepare()
    assert (settings / "modules_disabled").read_text() == "0\n"


@pytest.mark.usefixtures("commands")
def test_core_dumps_start_no_program_even_if_a_service_changes_the_pattern_later(settings: Path) -> None:
    for pattern in ("|/usr/share/apport/apport %p", "@/run/dumps"):
        (settings / "core_pattern").write_text(pattern)
        KernelModules().prepare()
        assert (settings / "core_pattern").read_text() == "core"


@pytest.mark.usefixtures("commands")
def test_limits_that_sandboxes_share_with_the_machine_are_raised(settings: Path) -> None:
    watches, neighbours = (settings / "sys" / name for name in ("fs/inotify", "net/ipv4/neigh/default"))
    for path in (watches / "max_user_instances", neighbours / "gc_thresh1", neighbours / "gc_thresh3"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("128\n")
    KernelModules().prepare()
    assert (watches / "max_user_instances").read_text() == "2147483647"
    assert [path.read_text() for path in sorted(neighbours.iterdir())] == ["128\n", "2147483647"]
    assert sorted(path.name for path in watches.iterdir()) == ["max_user_instances"], "not in this kernel"


def test_a_container_leaves_the_kernel_alone(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_modules, "_owns_kernel", lambda: False)
    before = [path.read_text() for path in settings.iterdir()]
    KernelModules().prepare()
    assert [path.read_text() for path in settings.iterdir()] == before


@pytest.mark.parametrize(
    ("disabled", "exist", "permitted"),
    [("1\n", False, True), ("1\n", True, False), ("0\n", False, False), (None, False, True), (None, True, False)],
)
def test_socketcall_needs_a_kernel_that_can_have_no_vm_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disabled: str | None, *, exist: bool, permitted: bool
) -> None:
    path = tmp_path / "modules_disabled"
    if disabled is not None:
        path.write_text(disabled)
    monkeypatch.setattr(socket_filter, "_MODULES_DISABLED", path)
    monkeypatch.setattr(socket_filter, "_exists", lambda family: exist and family == 40)
    assert socket_filter.permits_socketcall() is permitted
