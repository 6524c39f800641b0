"""A model of the host of an agent: processes, cgroups, mounts, network interfaces, timers, and files below a folder.

It outlives agents. `ModelHost.effect` is called before each effect of an agent, and cuts it or lets it fail once.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from simulation.loop import VirtualLoop, current_process
from tests.support.virtual_time import Killed

if TYPE_CHECKING:
    import asyncio

    from tests.support.effects.judge import Judge
    from tests.support.effects.programs import Programs

P = ParamSpec("P")
T = TypeVar("T")

#: What of the file system belongs to the model. The agent reads the rest of this computer's, and changes nothing there.
MODELLED = ("/var/lib/remuda", "/opt/remuda", "/sys/fs/cgroup", "/sys/class/net", "/run/systemd", "/run/remuda")
CGROUPS = "/sys/fs/cgroup"
INTERFACES = "/sys/class/net"
STATE = "/var/lib/remuda"
STORAGE = f"{STATE}/sandboxes"
#: What the kernel forgets with a reboot.
VOLATILE = (CGROUPS, INTERFACES, "/run/systemd", f"{STORAGE}/log")
CONTROL_FILES = frozenset({"memory.max", "pids.max"}) | {
    f"cgroup.{name}" for name in ("procs", "events", "kill", "subtree_control", "max.depth", "max.descendants")
}
#: Seconds until the interface of a container that has ended is gone.
INTERFACE_S = 0.03
#: Seconds that the bootstrap's timers leave at boot.
BOOT_LIFE_S = 1_800.0
BOOT_TIMER, REBOOT_TIMER = "remuda-dead-man-boot", "remuda-dead-man-reboot"
#: Bytes of the disk that are free, unless a life has less.
DISK_FREE = 10 * 1024**3
_NUMBER = re.compile(r"\d+")
PRODUCT = f"{os.sep}src{os.sep}remuda{os.sep}"
#: Seconds for which effects of a kind fail. Longer than a pause between two attempts of the agent.
FAILING_S = 8.0
#: Lines of the product that say where an effect comes from.
MAX_LINES = 5


class EffectCut(Enum):
    """What happens at the chosen effect of an agent."""

    #: The agent is killed before it.
    KILL = "agent killed"
    #: The computer reboots before it.
    REBOOT = "host rebooted"
    #: It fails, once.
    FAIL = "effect failed"
    #: It and all of its kind fail for `FAILING_S` seconds.
    KEEPS_FAILING = "effects of this kind failed"


@dataclass(frozen=True, slots=True)
class Effect:
    name: str
    target: str
    #: The lines of the product that caused it, the innermost first.
    lines: tuple[tuple[CodeType, int], ...]

    @property
    def kind(self) -> tuple[object, ...]:
        """Effects of one kind come from the same lines and differ in numbers only."""
        return self.name, _NUMBER.sub("#", self.target.rpartition("/")[2]), self.lines

    def __str__(self) -> str:
        where = " < ".join(f"{code.co_qualname}:{line}" for code, line in self.lines[:4])
        return f"{self.name} {self.target} in {where}"


@dataclass(eq=False, slots=True)
class HostProcess:
    pid: int
    ppid: int
    #: Start time in clock ticks.
    started: int
    command: tuple[str, ...]
    name: str
    user: int = 0
    cgroup: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    alive: bool = True
    exit_code: int | None = None
    #: Called at its end.
    watchers: list[Callable[[], object]] = field(default_factory=list)


@dataclass(slots=True)
class Mount:
    target: str
    kind: str
    source: str = ""


def outside(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method of the model: it runs as the kernel does, not as the agent that caused it."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if current_process() is None:
            return method(*args, **kwargs)
        host = cast("ModelHost", args[0])
        return host.loop.outside.copy().run(method, *args, **kwargs)

    return call


class ModelHost:
    judge: Judge
    programs: Programs

    def __init__(self, root: Path, loop: VirtualLoop, cuts: Mapping[int, EffectCut]) -> None:
        """Cut effects of the agents by their number, counted from 1."""
        self.root = str(root)
        self.loop = loop
        self._cuts = cuts
        #: The kind of effects that fail, and until when.
        self._failing, self._failing_until = "", 0.0
        self.effects: list[Effect] = []
        self.was_cut = False
        #: Why it is off, or empty.
        self.off = ""
        self.disk_free = DISK_FREE
        self.processes: dict[int, HostProcess] = {}
        self._last_pid = 100
        self.mounts: list[Mount] = []
        #: Times at which the host powers off, by unit.
        self.timers: dict[str, float] = {BOOT_TIMER: BOOT_LIFE_S, REBOOT_TIMER: BOOT_LIFE_S}
        #: Settings of the kernel that a job may have changed, and whether the guard blames the sandbox's jobs.
        self.kernel = {"fs/file-max": "1"}
        self.counts_as_used = False
        self.attributes: dict[str, list[str]] = {}
        #: User ids of files and folders, where `chown` has set them.
        self.owners: dict[str, int] = {}
        self.descriptors: dict[int, str] = {}
        self.pidfds: dict[int, HostProcess] = {}
        self.trees: dict[int, str] = {}
        self.sockets: dict[str, asyncio.Queue[bytes]] = {}
        self.watchers: dict[str, list[Callable[[], object]]] = {}
        #: Folders of cgroups, and whether their `cgroup.events` says that they have processes.
        self._cgroups: dict[str, None] = {}
        self._populated: dict[str, bool] = {}
        self._blocked_s = 0.0
        self._ns = 0
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._generation = 0
        self.on_reboot: Callable[[], None] = lambda: None
        for folder in (*MODELLED, f"{STATE}/job-image/etc", "/opt/remuda/runner/bin"):
            Path(self.real(folder)).mkdir(parents=True, exist_ok=True)
        self.made_folder(CGROUPS)

    # Effects

    def effect(self, name: str, target: object, content: bytes = b"") -> bool:
        """Announce an effect of an agent. Return whether it must fail. Raises `Killed` if the agent must end first."""
        process = current_process()
        assert process is not None
        if process.dead or self.off:
            raise Killed
        effect = Effect(name, str(target), _lines())
        self.effects.append(effect)
        self.judge.effect(effect, content)
        cut = self._cuts.get(len(self.effects))
        if cut is None:
            return name == self._failing and self.now() < self._failing_until
        self.was_cut = True
        if cut in {EffectCut.FAIL, EffectCut.KEEPS_FAILING}:
            if cut is EffectCut.KEEPS_FAILING:
                self._failing, self._failing_until = name, self.now() + FAILING_S
            return True
        process.crash()
        if cut is EffectCut.REBOOT:
            self.reboot()
        raise Killed

    # Time

    def now(self) -> float:
        return self.loop.time() + self._blocked_s

    def unique_ns(self) -> int:
        self._ns += 1
        return int(self.now() * 1e9) + self._ns

    def later(self, seconds: float, call: Callable[[], object]) -> None:
        """Call in the host's time, unless it reboots before."""
        generation = self._generation

        def due() -> None:
            if entry in self._due:
                self._due.remove(entry)
                if generation == self._generation and not self.off:
                    call()

        entry = (self.now() + seconds, self.unique_ns(), due)
        self._due.append(entry)
        self.loop.call_later(seconds, due, context=self.loop.outside.copy())

    @outside
    def block(self, seconds: float) -> None:
        """Let time pass for everything but the event loop, which a blocking wait stops."""
        self._blocked_s += seconds
        for at, _, due in sorted(self._due):
            if at <= self.now():
                due()

    # Power

    def power_off(self, why: str) -> None:
        if self.off:
            return
        self.judge.powers_off(why)
        self.off = why
        for process in list(self.processes.values()):
            self.end(process)

    @outside
    def reboot(self) -> None:
        self.judge.reboots()
        for process in list(self.processes.values()):
            self.end(process)
        # Nothing that the processes would have done later happens.
        self._generation += 1
        self.mounts.clear()
        self.sockets.clear()
        self._cgroups.clear()
        self._populated.clear()
        for folder in filter(self.exists, VOLATILE):
            shutil.rmtree(self.real(folder))
            Path(self.real(folder)).mkdir()
        self.made_folder(CGROUPS)
        self.kernel = {"fs/file-max": "1"}
        self.counts_as_used = False
        self.timers = {REBOOT_TIMER: self.now() + BOOT_LIFE_S}
        self.on_reboot()

    @property
    def armed(self) -> float | None:
        """The time of the first timer."""
        return min(self.timers.values(), default=None)

    # Files

    def real(self, path: Any) -> Any:
        """Where a path of the host is on this computer."""
        if isinstance(path, int) or path is None:
            return path
        text = os.fsdecode(path)
        return self.root + text if text.startswith(MODELLED) else text

    def name(self, path: Any) -> str:
        """The path as the agent means it. `os.walk` makes paths from what `os.scandir` returned."""
        return os.fsdecode(path).removeprefix(self.root)

    def write(self, path: str, descriptor: int, content: bytes) -> None:
        os.write(descriptor, content)
        if path.endswith("cgroup.kill"):
            self.kill_cgroup(path.rpartition("/")[0])
        self.changed(path)

    def changed(self, path: str) -> None:
        for call in list(self.watchers.get(path, ())):
            call()

    @outside
    def append(self, path: str, text: str) -> None:
        """What a process of the host writes."""
        with Path(self.real(path)).open("a") as file:
            file.write(text)
        self.changed(path)

    @outside
    def put(self, path: str, text: str) -> None:
        Path(self.real(path)).write_text(text)
        self.changed(path)

    @outside
    def exists(self, path: str) -> bool:
        return Path(self.real(path)).exists()

    def before_rename(self, path: str) -> None:
        if self.is_mount(path):
            raise OSError(errno.EBUSY, "a mount point", path)

    def renamed(self, source: str, target: str) -> None:
        for each in self.mounts:
            if each.target.startswith(f"{source}/"):
                each.target = target + each.target.removeprefix(source)
        for path in [each for each in self.owners if each == source or each.startswith(f"{source}/")]:
            self.owners[target + path.removeprefix(source)] = self.owners.pop(path)

    @outside
    def delete(self, path: str) -> None:
        """`rm -rf`, which follows mounts."""
        through = [each.target for each in self.mounts if each.target == path or each.target.startswith(f"{path}/")]
        if through:
            self.judge.violate(f"{path} is deleted while {through} is mounted in it")
        shutil.rmtree(self.real(path), ignore_errors=True)

    # Mounts

    def is_mount(self, path: str) -> bool:
        return any(each.target == path for each in self.mounts)

    def mount(self, target: str, kind: str, source: str = "") -> None:
        self.mounts.append(Mount(target, kind, source))

    def unmount(self, target: str) -> str:
        """Return the error, or empty."""
        if not self.is_mount(target):
            return "not mounted"
        if any(each.target.startswith(f"{target}/") for each in self.mounts):
            return "target is busy"
        self.mounts.remove(next(each for each in reversed(self.mounts) if each.target == target))
        return ""

    def mount_table(self) -> bytes:
        return "".join(f"1 1 0:1 / {each.target} rw - x x rw\n" for each in self.mounts).encode()

    # Cgroups

    def is_cgroup(self, path: str) -> bool:
        return path.startswith(CGROUPS)

    def is_control_file(self, path: str) -> bool:
        return self.is_cgroup(path) and path.rpartition("/")[2].split(".")[0] in {"cgroup", "memory", "pids"}

    def has_control_file(self, path: str) -> bool:
        """Whether the kernel has made it: with its folder."""
        folder, _, name = path.rpartition("/")
        return self.real(folder) in self._cgroups and name in CONTROL_FILES

    @outside
    def made_folder(self, path: str) -> None:
        if self.is_cgroup(path):
            real = self.real(path)
            # The others appear when they are written: most files of a life would be these.
            os.close(os.open(f"{real}/cgroup.procs", os.O_CREAT | os.O_WRONLY))
            self._cgroups[real] = None
            self._note_populated()
        self.judge_folder(path)

    def judge_folder(self, path: str) -> None:
        if hasattr(self, "judge"):
            self.judge.made_folder(path)

    @outside
    def remove_cgroup(self, path: str) -> None:
        if any(each.cgroup.startswith(path) for each in self.processes.values()):
            raise OSError(errno.EBUSY, "has processes", path)
        real = Path(self.real(path))
        if any(each.is_dir() for each in real.iterdir()):
            raise OSError(errno.EBUSY, "has children", path)
        shutil.rmtree(real)
        self._cgroups.pop(str(real))
        self._populated.pop(str(real), None)

    @outside
    def kill_cgroup(self, path: str) -> None:
        for process in list(self.processes.values()):
            if process.cgroup == path or process.cgroup.startswith(f"{path}/"):
                self.end(process)

    def _note_populated(self) -> None:
        for folder in self._cgroups:
            path = folder.removeprefix(self.root)
            populated = any(
                each.cgroup == path or each.cgroup.startswith(f"{path}/") for each in self.processes.values()
            )
            if self._populated.get(folder) is not populated:
                self._populated[folder] = populated
                Path(folder, "cgroup.events").write_text(f"populated {populated:d}\n")

    # Processes

    @outside
    def spawn(self, command: tuple[str, ...], name: str, *, parent: int = 1, **given: Any) -> HostProcess:
        self._last_pid += 1
        process = HostProcess(self._last_pid, parent, int(self.now() * 100) + self._last_pid, command, name, **given)
        self.processes[process.pid] = process
        if process.cgroup:
            self._note_populated()
        return process

    @outside
    def join(self, process: HostProcess, cgroup: str) -> None:
        process.cgroup = cgroup
        self._note_populated()

    @outside
    def end(self, process: HostProcess, code: int = -9) -> None:
        if not process.alive:
            return
        process.alive, process.exit_code = False, code
        del self.processes[process.pid]
        for child in self.processes.values():
            if child.ppid == process.pid:
                child.ppid = 1
        if process.cgroup:
            self._note_populated()
        for call in list(process.watchers):
            call()

    def end_by_pid(self, pid: int) -> None:
        if pid in self.processes:
            self.end(self.processes[pid])

    def descendants(self, root: int) -> list[HostProcess]:
        found, level = [], [root]
        while level:
            children = [each for each in self.processes.values() if each.ppid in level]
            found += children
            level = [each.pid for each in children]
        return found

    @outside
    def signal(self, pid: int, number: signal.Signals) -> None:
        process = self.processes[pid]
        if number is signal.SIGKILL:
            self.end(process)
        else:
            self.programs.terminate(process)


def _lines() -> tuple[tuple[CodeType, int], ...]:
    """Where the effect comes from. All its callers until the event loop are looked through."""
    frame: FrameType | None = sys._getframe(3)
    lines: list[tuple[CodeType, int]] = []
    while frame is not None and len(lines) < MAX_LINES:
        if PRODUCT in frame.f_code.co_filename:
            lines.append((frame.f_code, frame.f_lineno))
        elif frame.f_code.co_name == "_run_ready":
            break
        frame = frame.f_back
    return tuple(lines)
