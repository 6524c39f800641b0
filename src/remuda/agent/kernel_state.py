"""State of the machine's kernel that belongs to no sandbox, compared before and after a run.

A job cannot change any of it, unless the kernel has a flaw, or the pool lets jobs load modules. An administrator or a
service of the machine who changes something while a run uses the machine looks the same: the instance ends as well.
Changes between two runs do not count.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

#: Interfaces of sandboxes themselves.
SANDBOX_INTERFACES = "ve-remuda-"
#: Settings that decide what the kernel executes, whom it trusts and where packets go. None counts anything.
SETTINGS = (
    *("fs/protected_fifos", "fs/protected_hardlinks", "fs/protected_regular", "fs/protected_symlinks"),
    *("fs/suid_dumpable", "fs/file-max", "fs/nr_open", "fs/pipe-max-size", "fs/mount-max"),
    *("kernel/core_pattern", "kernel/hotplug", "kernel/kexec_load_disabled", "kernel/modprobe"),
    *("kernel/modules_disabled", "kernel/randomize_va_space", "kernel/sysrq", "kernel/yama/ptrace_scope"),
    *("kernel/dmesg_restrict", "kernel/kptr_restrict", "kernel/perf_event_paranoid", "kernel/panic"),
    *("kernel/panic_on_oops", "kernel/unprivileged_bpf_disabled", "kernel/unprivileged_userns_clone"),
    *("kernel/apparmor_restrict_unprivileged_userns", "kernel/keys/maxkeys", "kernel/keys/maxbytes"),
    *("vm/overcommit_memory", "vm/panic_on_oom", "vm/mmap_min_addr", "vm/max_map_count"),
    *("vm/unprivileged_userfaultfd", "user/max_user_namespaces"),
    *("net/core/bpf_jit_enable", "net/core/bpf_jit_harden", "net/ipv4/ip_forward", "net/ipv4/conf/all/rp_filter"),
    *("net/ipv4/conf/all/accept_redirects", "net/ipv4/conf/all/route_localnet", "net/ipv6/conf/all/forwarding"),
    *("net/netfilter/nf_conntrack_max", "net/bridge/bridge-nf-call-iptables"),
)
#: TAINT_BAD_PAGE and TAINT_DIE of Documentation/admin-guide/tainted-kernels.rst: the kernel has found its memory
#: damaged, or has killed a process in the middle of kernel code.
_DAMAGED = 1 << 5 | 1 << 7
_SYS = Path("/proc/sys")

State = dict[str, dict[str, str]]


class KernelState:
    """The state before a run, on disk: an agent that starts during the run must not take the state of then for it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def record(self) -> None:
        """Call this before the first program of a run starts. Keeps a record that was not compared yet."""
        if not self._is_recorded():
            draft = self._path.with_name(f".{self._path.name}.new")
            draft.write_text(json.dumps({"boot": _boot_id(), "state": read_state()}), encoding="utf-8")
            draft.replace(self._path)

    def _is_recorded(self) -> bool:
        # What cannot be read stays, for `changes`.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return self._load() is not None
        return True

    def changes(self) -> str:
        """Describe what has changed since `record`, or return empty and forget the record."""
        try:
            recorded = self._load()
        except (ValueError, TypeError, KeyError):
            return f"{self._path} cannot be read"
        if recorded is None:
            return ""
        found = compare(recorded, read_state())
        if not found:
            self._path.unlink()
        return found

    def _load(self) -> State | None:
        """Return the record of this boot, or None."""
        try:
            document: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        state: State = document["state"]
        return state if document["boot"] == _boot_id() else None


def read_state() -> State:
    """Read the state of the kernel: names and values of each kind."""
    settings = {name: value for name in SETTINGS if (value := _value(_SYS / name)) is not None}
    damaged = int(_value(_SYS / "kernel/tainted") or "0") & _DAMAGED
    return {
        "module": dict.fromkeys(_modules(), "loaded"),
        "interface": {
            path.name: "exists"
            for path in Path("/sys/class/net").iterdir()
            if not path.name.startswith(SANDBOX_INTERFACES)
        },
        "setting": {**settings, "kernel/tainted": str(damaged)},
    }


def compare(before: State, after: State) -> str:
    """Describe the differences, such as `module nfs: loaded`, or return empty."""
    differences = []
    for kind, old in before.items():
        new = after[kind]
        for name in sorted(old.keys() | new.keys()):
            if old.get(name) != new.get(name):
                change = new.get(name, "gone")
                differences.append(f"{kind} {name}: {change}" + (f", was {old[name]}" if name in old else ""))
    return f"the kernel has changed: {'; '.join(differences)}" if differences else ""


def _modules() -> list[str]:
    with contextlib.suppress(FileNotFoundError), Path("/proc/modules").open(encoding="ascii") as file:
        return [line.split(" ", 1)[0] for line in file]
    return []


def _value(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        # Not in this kernel, or write-only.
        return None


def _boot_id() -> str:
    return _value(_SYS / "kernel/random/boot_id") or ""
