"""Sandboxes: for every assignment a container with a fresh root file system, which is discarded as a whole.

The container is systemd-nspawn with `--boot` and its own user, process, mount, network, IPC, host name and cgroup
namespaces. Jobs may become root in it. Its user ids are different for each sandbox and belong to no one on the host.
The next sandbox is prepared ahead. A reset trusts nothing inside: it kills the container's cgroup, and takes the proof
that nothing is left from the host's kernel.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath

from remuda import procfs, scripts
from remuda.agent import (
    connections,
    enter_sandbox,
    fuse_connections,
    mounts,
    processes,
    quotas,
    sandbox_root,
    socket_filter,
    system_call_filter,
)
from remuda.agent.cache_volumes import CacheVolumes
from remuda.agent.disk_space import FILE_RESERVE, NONE, Space, delete, free_space, start_deletion
from remuda.agent.guard_process import GuardProcess, Reserves
from remuda.agent.job_hook import REFUSED
from remuda.agent.kernel_modules import KernelModules
from remuda.agent.kernel_state import KernelState
from remuda.agent.listener import WAIT_FOR_UPDATE, Files, StartCommand
from remuda.agent.sandbox_root import JobUser
from remuda.domain.errors import Unavailable
from remuda.domain.instance import Assignment
from remuda.ports.machine import StepResult
from remuda.procfs import Process

#: The user ids of sandbox `n` begin at FIRST_ID + (n mod ID_RANGES) * 65,536.
FIRST_ID = 524_288
ID_RANGES = 30_000
#: After this number the count begins again. With more digits, the name of the network interface would be too long.
MAX_NUMBER = 99_999
#: Sandbox `n` has the two addresses of the n-th block of four. The range is for tests of network devices (RFC 2544), so
#: that VPCs do not use it.
NETWORK = (198 << 24) + (18 << 16)
NETWORK_BLOCKS = 2**15
#: Seconds until a container must have booted. Machines under emulation need a minute.
BOOT_LIMIT_S = 240.0
#: Seconds until all processes and the network of a killed container must be gone.
END_LIMIT_S = 20.0
END_POLL_S = 0.01
#: Bytes and files that jobs must leave free on the disk. Below, the sandbox is killed: the agent needs some to work.
DISK_RESERVE = 512 * 1024**2
#: Bytes of memory that must stay available. Below, the sandbox is killed. Jobs get there only by memory that the kernel
#: does not count for their cgroup: that limits them earlier.
AVAILABLE_RESERVE = 64 * 1024**2
#: Share of the memory by which memory of the kernel may grow. What is counted for the cgroup stays far below it.
KERNEL_SHARE = 4
#: Memory and number of processes that jobs must leave to the host.
MEMORY_RESERVE = 384 * 1024**2
TASK_RESERVE = 1_000
OPEN_FILES = 1_048_576
#: Levels and number of cgroups that jobs may create, so that they can be removed.
CGROUP_DEPTH = 100
CGROUP_COUNT = 10_000
#: Size of the memory disk with the logs that jobs can write to.
LOG_BYTES = 32 * 1024**2
#: Bytes that must stay free on it: with a full log, the end of a job would go unnoticed.
LOG_RESERVE = 1024**2
#: Folders of container engines are outside the overlay: an overlay cannot be the upper layer of another.
ENGINE_FOLDERS = ("/var/lib/docker", "/var/lib/containerd", "/var/lib/containers")
#: System calls that docker needs in addition to those that systemd-nspawn permits.
SYSTEM_CALLS = "add_key keyctl"
#: All of them count inside the user namespace only. Without one, docker 20.10 starts no privileged container.
CAPABILITIES = "all"
DEVICES = ("/dev/fuse", "/dev/net/tun")
MAX_DETAIL = 500
#: What systemd becomes at the end of a shutdown (systemd-shutdown), as the kernel shortens it. From then on it ends all
#: processes, and waits for those that do not end.
SHUTDOWN_PROGRAM = "systemd-shutdow"
#: Also drops the agent's protection against a lack of memory: systemd-nspawn's option for it fails on Linux 6.1.
_JOIN = 'echo $$ >"$0" && echo 0 >/proc/self/oom_score_adj && exec "$@"'
#: Runs in the new sandbox, as root: unpack the files, wait for an update, become the job user, become the program.
_ENTER = (
    'cd "$1" && for file in .env .path; do [ ! -e $file ] && [ ! -L $file ] || rm -rf $file; done && '
    f'tar -xpf - -C / && {{ [ -z "$5" ] || {{ {WAIT_FOR_UPDATE}; }}; }} && '
    'exec setpriv --reuid="$2" --regid="$3" --init-groups -- "$4" run </dev/null'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxOptions:
    #: Root only. Holds what sandboxes write; can be on another disk than the root file system.
    storage: Path
    #: The unmodified runner software, and where it is in a sandbox.
    runner: Path
    #: The agent's own folder, which is hidden.
    software: PurePosixPath
    #: The root file system of jobs.
    root: Path = Path("/")
    #: Further paths that jobs must not see.
    hidden: tuple[str, ...] = ()
    caches: CacheVolumes | None = None
    #: None: the kernel belongs to others, and stays as it is.
    modules: KernelModules | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Running:
    """A booted container, as saved in `current.json`."""

    number: int
    #: The container manager: its pid and start time.
    pid: int
    started: int
    #: Ids of the job user inside.
    uid: int
    gid: int
    #: Name of the runner that it was used for, or empty.
    used_by: str = ""
    #: How often guards had killed before it was made.
    kills: int = 0

    @property
    def first_id(self) -> int:
        return _first_id(self.number)

    @property
    def user(self) -> JobUser:
        return JobUser(uid=self.uid, gid=self.gid)

    @property
    def interface(self) -> str:
        return _interface(self.number)

    @property
    def first_process(self) -> Process:
        """The container's first process, another one after a reboot of the container."""
        for child in procfs.children(self.pid):
            return child
        raise Unavailable("the sandbox has ended")

    @property
    def leader(self) -> int:
        """The pid of the container's first process."""
        return self.first_process.pid


def _name(number: int) -> str:
    return f"remuda-{number}"


def _interface(number: int) -> str:
    """The host's end of the network; systemd-nspawn makes it from the container's name."""
    return f"ve-{_name(number)}"


def _first_id(number: int) -> int:
    return FIRST_ID + number % ID_RANGES * mounts.ID_COUNT


def _ids(number: int) -> range:
    """The user ids of a sandbox."""
    first = _first_id(number)
    return range(first, first + mounts.ID_COUNT)


class Sandboxes:
    """Makes sandboxes one after the other. Sandbox `n` is in the folder `<storage>/<n>`."""

    def __init__(self, options: SandboxOptions, *, record: Callable[..., None]) -> None:
        """`record` takes an event's name and text."""
        self._options = options
        self._storage = options.storage
        self._record = record
        self._current: _Running | None = None
        self._preparation: asyncio.Task[None] | None = None
        #: Processes that this agent started and must reap.
        self._children: set[int] = set()
        self._cgroup = Path()
        self._guard: GuardProcess | None = None
        self._kernel = KernelState(options.storage / "kernel.json")

    @property
    def log_folder(self) -> Path:
        return self._storage / "log"

    @property
    def outbox(self) -> Path:
        """The folder with the file that jobs write and the agent reads.

        On the memory disk: on others, whoever may write to a file or a folder can keep its lock for ever, by a page
        fault during the call. Readers of a file in memory need no lock, nor do lookups of one that exists. No job can
        remove it.
        """
        return self.log_folder / "outbox"

    @property
    def _trash(self) -> Path:
        """Discarded folders until they are deleted."""
        return self._storage / "trash"

    def _filter(self, number: int) -> Path:
        return self._storage / str(number) / "system-call-filter"

    async def open(self, *, prepare: bool = True) -> None:
        """Find the sandbox of an earlier agent and discard all others. If none exists, `prepare` one."""
        try:
            await asyncio.to_thread(self._open)
        except OSError as problem:
            raise Unavailable(f"sandboxes do not work: {problem}") from problem
        if self._guard is not None:
            self._guard.watch()
        if prepare:
            self.prepare()

    def prepare(self) -> None:
        """Begin to prepare a sandbox, unless there is one or one is being prepared."""
        if self._current is None and (self._preparation is None or self._preparation.done()):
            self._preparation = asyncio.create_task(self._prepare())
            # Its failure is recorded there, and raised to those who wait for it.
            self._preparation.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def close(self) -> None:
        if self._preparation is not None:
            self._preparation.cancel()
            await asyncio.gather(self._preparation, return_exceptions=True)
        if self._guard is not None:
            await self._guard.close()

    @property
    def runner_folder(self) -> PurePosixPath:
        return self._options.software / "runner"

    async def ready(self) -> None:
        await self._prepared()

    async def prepare_start(self, assignment: Assignment, files: Files) -> StartCommand:
        running = await self._ready(assignment)
        group = self._runner_cgroup(running.number)
        try:
            group.mkdir(exist_ok=True)
            archive = _archive(files, self.runner_folder, running.user)
            # The listener inherits the agent's keyring, in which a job could leave keys for the next run.
            processes.join_new_session_keyring()
        except OSError as problem:
            raise Unavailable(f"cannot start the listener: {problem}") from problem
        listener = str(self.runner_folder / "bin" / "Runner.Listener")
        return StartCommand(
            arguments=(
                *(
                    sys.executable,
                    "-IS",
                    enter_sandbox.__file__,
                    str(running.leader),
                    str(self._filter(running.number)),
                ),
                *("/bin/sh", "-c", _ENTER, "sh"),
                *(str(self.runner_folder), str(running.uid), str(running.gid), listener),
            ),
            stdin=archive,
            cgroup=group / "cgroup.procs",
        )

    def is_alive(self) -> bool:
        """Whether the sandbox can run a listener. One that shuts down cannot, although its end may take minutes."""
        running = self._current
        if running is None or not procfs.is_alive(running.pid, running.started):
            return False
        if running.kills != self._kills():
            # It counts as ended from then on, although its processes need a moment.
            return False
        try:
            return running.first_process.name != SHUTDOWN_PROGRAM
        except Unavailable:
            return False

    def processes(self) -> list[Process]:
        """The processes in the cgroup that the listener has started in. Their names come from `stat`, which no job can
        block.
        """
        if self._current is None:
            return []
        try:
            pids = (self._runner_cgroup(self._current.number) / "cgroup.procs").read_text().split()
        except OSError:
            return []
        found = (procfs.read_process(int(pid)) for pid in pids)
        return [process for process in found if process is not None]

    def _runner_cgroup(self, number: int) -> Path:
        return self._cgroup / _name(number) / "payload" / "remuda-runner"

    def _kills(self) -> int:
        return 0 if self._guard is None else self._guard.kills()

    def _set_used(self, *, used: bool) -> None:
        if self._guard is not None:
            self._guard.set_used(used=used)

    async def reset(self) -> StepResult:
        """Discard the sandbox. The result is OK only if the kernel shows that nothing of it is left."""
        if self._preparation is not None:
            await asyncio.gather(asyncio.shield(self._preparation), return_exceptions=True)
        is_unused = self._current is not None and not self._current.used_by and self.is_alive()
        try:
            detail = "" if is_unused else await asyncio.to_thread(self._discard_all)
            # Also for an unused sandbox: the run may have ended another one before.
            detail = detail or await asyncio.to_thread(self._kernel.changes)
        except OSError as problem:
            detail = str(problem)
        if detail:
            return StepResult(ok=False, detail=f"reset failed: {detail}"[:MAX_DETAIL])
        self.prepare()
        return StepResult(ok=True, detail="the sandbox was not used" if is_unused else "")

    # Preparation

    def _open(self) -> None:
        self._storage.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._storage.chmod(0o700)
        self._cgroup = _cgroup_root() / "remuda"
        self._cgroup.mkdir(exist_ok=True)
        for folder in (_cgroup_root(), self._cgroup):
            for controller in ("memory", "pids", "cpu", "io"):
                # Each one for itself: one that the kernel does not have must not prevent the others.
                with contextlib.suppress(OSError):
                    (folder / "cgroup.subtree_control").write_text(f"+{controller}")
        for folder in (self.log_folder, self._trash):
            folder.mkdir(mode=0o700, exist_ok=True)
        if not self.log_folder.is_mount():
            mounts.run(
                "mount", "-t", "tmpfs", "-o", f"size={LOG_BYTES},mode=0700,nodev,nosuid", "remuda", self.log_folder
            )
        self._guard = GuardProcess(
            cgroup=self._cgroup,
            storage=self._storage,
            log=self.log_folder,
            reserves=Reserves(
                memory=AVAILABLE_RESERVE,
                kernel=_memory() // KERNEL_SHARE,
                disk=DISK_RESERVE,
                files=FILE_RESERVE,
                log=LOG_RESERVE,
            ),
            record=self._record,
        )
        self._guard.start()
        self._current = self._load()
        self._set_used(used=self._current is not None and bool(self._current.used_by))
        problem = self._discard_all(keep=self._current)
        if problem:
            raise OSError(problem)

    async def _prepare(self) -> None:
        started = time.monotonic()
        await self._evict_caches()
        number = await asyncio.to_thread(self._next_number)
        try:
            if self._options.modules is not None:
                await asyncio.to_thread(self._options.modules.prepare)
            user = await asyncio.to_thread(self._mount, number)
            running = await self._boot(number, user)
            await asyncio.to_thread(self._save_filter, running)
            self._save(running)
            self._current = running
        except (OSError, Unavailable) as problem:
            text = str(problem)
            self._record("sandbox-failed", f"{text}: {self._console_end()}"[:MAX_DETAIL])
            with contextlib.suppress(OSError):
                await asyncio.to_thread(self._discard, number)
            raise Unavailable(f"cannot prepare a sandbox: {text}"[:MAX_DETAIL]) from problem
        self._record("sandbox-ready", f"sandbox {number} is ready", seconds=round(time.monotonic() - started, 3))

    async def _evict_caches(self) -> None:
        if self._options.caches is None:
            return
        try:
            for name in await asyncio.to_thread(self._options.caches.evict, min_free=_reserve() + _reserve()):
                self._record("cache-evicted", f"deleted the cache volume {name}: the volumes are larger than permitted")
        except OSError as problem:
            self._record("cache-failed", str(problem)[:MAX_DETAIL])

    async def _ready(self, assignment: Assignment) -> _Running:
        """Return the sandbox for this assignment, and make a new one if it has ended or belonged to another runner."""
        running = self._current
        if running is not None and (not self.is_alive() or running.used_by not in {"", assignment.runner_name}):
            problem = await asyncio.to_thread(self._discard_all)
            if problem:
                raise Unavailable(f"cannot discard the last sandbox: {problem}")
        running = await self._prepared()
        if not running.used_by:
            self._kernel.record()
            # Saved first: after a crash the volumes of this repository must not be in a sandbox that counts as unused.
            running = self._current = replace(running, used_by=assignment.runner_name)
            self._save(running)
            self._set_used(used=True)
            await self._mount_caches(running, assignment)
        return running

    async def _prepared(self) -> _Running:
        self.prepare()
        if self._current is None and self._preparation is not None:
            await asyncio.shield(self._preparation)
        if self._current is None:
            raise Unavailable("there is no sandbox")
        return self._current

    async def _mount_caches(self, running: _Running, assignment: Assignment) -> None:
        caches = self._options.caches
        if caches is None:
            return
        try:
            await asyncio.to_thread(
                caches.mount,
                assignment,
                leader=running.leader,
                first_id=running.first_id,
                user=running.user,
            )
        except (OSError, subprocess.TimeoutExpired) as problem:
            # Jobs work without a cache, only slower.
            self._record("cache-failed", str(problem)[:MAX_DETAIL])

    def _next_number(self) -> int:
        """Count the sandboxes of this machine. The number is saved before its use, so that it is never used twice."""
        path = self._storage / "number"
        try:
            number = int(path.read_text()) % MAX_NUMBER + 1
        except (OSError, ValueError):
            number = 1
        _write(path, str(number))
        return number

    def _mount(self, number: int) -> JobUser:
        """Mount the root of a new sandbox, and in it the runner software. Return the job user."""
        folder = self._storage / str(number)
        first_id = _first_id(number)
        folder.mkdir(mode=0o700)
        self._limit_disk(number)
        for name in ("host", "root", "work", "runner-original", "runner-work", "runner-upper"):
            (folder / name).mkdir(mode=0o700)
        user = sandbox_root.build_layer(
            folder / "upper",
            root=self._options.root,
            first_id=first_id,
            software=self._options.software,
            hidden=(str(self._storage), *self._options.hidden),
            resolver=sandbox_root.host_resolver(),
        )
        (folder / "runner-upper").chmod(0o755)
        os.chown(folder / "runner-upper", first_id + user.uid, first_id + user.gid)
        for path in ENGINE_FOLDERS:
            engine = folder / path.rpartition("/")[2]
            engine.mkdir()
            engine.chmod(0o711)
            os.chown(engine, first_id, first_id)
        shutil.rmtree(self.outbox, ignore_errors=True)
        self.outbox.mkdir()
        self.outbox.chmod(0o755)
        (self.outbox / REFUSED).touch()
        os.chown(self.outbox / REFUSED, first_id + user.uid, first_id + user.gid)
        mounts.mount_idmapped(self._options.root, folder / "host", first_id)
        mounts.mount_overlay(folder / "root", lower=folder / "host", upper=folder / "upper", work=folder / "work")
        runner = folder / "root" / str(self._options.software).lstrip("/") / "runner"
        mounts.mount_idmapped(self._options.runner, folder / "runner-original", first_id)
        mounts.mount_overlay(
            runner, lower=folder / "runner-original", upper=folder / "runner-upper", work=folder / "runner-work"
        )
        for name in ("host", "runner-original"):
            # The overlays keep their layers.
            mounts.unmount(folder / name)
        return user

    def _limit_disk(self, number: int) -> None:
        """Leave the reserve free, where the disk has quotas. What is being deleted counts as free."""
        discarded = (quotas.usage(path) for path in self._trash.iterdir() if path.name[0].isdecimal())
        space = free_space(self._storage) + sum((taken for taken in discarded if taken), NONE) - _reserve()
        space = Space(bytes=max(space.bytes, quotas.MIN_BYTES), files=max(space.files, 1))
        quotas.limit(self._storage / str(number), _first_id(number), space)

    async def _boot(self, number: int, user: JobUser) -> _Running:
        """Start the container and wait until its services run."""
        loop = asyncio.get_running_loop()
        path = self._storage / "notify"
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications:
            notifications.setblocking(False)  # noqa: FBT003  # it takes no keyword
            notifications.bind(str(path))
            kills = self._kills()
            pid = await asyncio.to_thread(self._start_container, number, path)
            process = procfs.read_process(pid)
            if process is None:
                raise Unavailable("systemd-nspawn has ended at once")
            running = _Running(number=number, pid=pid, started=process.started, uid=user.uid, gid=user.gid, kills=kills)
            descriptor = os.pidfd_open(pid)
            ended = asyncio.ensure_future(processes.wait_for_end(descriptor, BOOT_LIMIT_S))
            received = asyncio.ensure_future(loop.sock_recv(notifications, 4096))
            try:
                has_network = False
                while True:
                    await asyncio.wait({received, ended}, return_when=asyncio.FIRST_COMPLETED)
                    if not received.done():
                        raise Unavailable("systemd-nspawn has ended" if ended.result() else "the boot takes too long")
                    if not has_network:
                        has_network = await asyncio.to_thread(self._connect, running)
                    if b"READY=1" in received.result().splitlines():
                        return running
                    received = asyncio.ensure_future(loop.sock_recv(notifications, 4096))
            finally:
                for waiting in (ended, received):
                    waiting.cancel()
                await asyncio.gather(ended, received, return_exceptions=True)
                os.close(descriptor)

    def _start_container(self, number: int, notify: Path) -> int:
        folder = self._storage / str(number)
        first_id = _first_id(number)
        cgroup = self._cgroup / _name(number)
        cgroup.mkdir()
        _limit(cgroup)
        binds = {path: folder / path.rpartition("/")[2] for path in ENGINE_FOLDERS}
        binds[str(sandbox_root.OUTBOX)] = self.outbox
        command = [
            "systemd-nspawn",
            "--quiet",
            "--boot",
            f"--directory={folder / 'root'}",
            f"--machine={_name(number)}",
            f"--hostname={sandbox_root.HOST_NAME}",
            f"--private-users={first_id}:{mounts.ID_COUNT}",
            "--private-users-ownership=off",
            "--network-veth",
            "--register=no",
            "--keep-unit",
            "--console=pipe",
            "--link-journal=no",
            "--resolv-conf=off",
            "--timezone=off",
            "--notify-ready=yes",
            f"--capability={CAPABILITIES}",
            f"--rlimit=RLIMIT_NOFILE={OPEN_FILES}",
            "--rlimit=RLIMIT_CORE=infinity",
            f"--system-call-filter={SYSTEM_CALLS}",
            *(f"--bind={source}:{target}" for target, source in binds.items()),
            *(f"--bind={device}" for device in DEVICES if Path(device).exists()),
        ]
        with (self.log_folder / "console.log").open("wb") as console:
            program = socket_filter.build(socketcall=socket_filter.permits_socketcall())
            process = system_call_filter.start_filtered(
                program,
                lambda: subprocess.Popen(
                    ["sh", "-c", _JOIN, str(cgroup / "cgroup.procs"), *command],
                    env={"PATH": scripts.SYSTEM_PATH, "NOTIFY_SOCKET": str(notify), "SYSTEMD_NSPAWN_TMPFS_TMP": "0"},
                    stdin=subprocess.DEVNULL,
                    stdout=console,
                    stderr=console,
                    cwd="/",
                    start_new_session=True,
                ),
            )
        return self._leave_running(process)

    def _save_filter(self, running: _Running) -> None:
        """Save the system call filter of the container for the listener. Later, a job could be its first process."""
        programs = system_call_filter.read(running.leader)
        self._filter(running.number).write_text("".join(f"{program.hex()}\n" for program in programs))

    def _connect(self, running: _Running) -> bool:
        """Give both ends of the network their addresses. Return False if the container has no network yet."""
        try:
            inside = ("nsenter", f"--target={running.leader}", "--net", "ip")
        except Unavailable:
            return False
        first = NETWORK + running.number % NETWORK_BLOCKS * 4
        host, container = (".".join(str(first + end >> shift & 255) for shift in (24, 16, 8, 0)) for end in (1, 2))
        mounts.run("ip", "address", "replace", f"{host}/30", "dev", running.interface)
        mounts.run("ip", "link", "set", running.interface, "up")
        mounts.run(*inside, "address", "replace", f"{container}/30", "dev", "host0")
        mounts.run(*inside, "link", "set", "host0", "up")
        mounts.run(*inside, "route", "replace", "default", "via", host)
        return True

    # End

    def _discard_all(self, keep: _Running | None = None) -> str:
        """Discard all sandboxes but one. Return what prevents it, or empty."""
        if keep is None:
            self._current = None
            (self._storage / "current.json").unlink(missing_ok=True)
            self._set_used(used=False)
        numbers = {int(path.name) for path in self._storage.iterdir() if path.name.isdecimal()}
        numbers |= {
            int(path.name.removeprefix("remuda-"))
            for path in self._cgroup.glob("remuda-*")
            if path.name.removeprefix("remuda-").isdecimal()
        }
        for number in sorted(numbers - {keep.number if keep else None}):
            problem = self._discard(number)
            if problem:
                return f"sandbox {number}: {problem}"
        if keep is None:
            shutil.rmtree(self.outbox, ignore_errors=True)
            connections.delete_all()
        self._start_deletion()
        return ""

    def _discard(self, number: int) -> str:
        """End a sandbox and move its files aside. Return what is left of it, or empty."""
        self._kill(number)
        folder = self._storage / str(number)
        if not _wait_until(lambda: self._has_no_processes(number)):
            return "processes cannot be killed"
        _remove_cgroup(self._cgroup / _name(number))
        # A container manager that was killed leaves its mounts, too.
        nspawn = [Path(f"/run/systemd/nspawn/{kind}/{_name(number)}") for kind in ("propagate", "unix-export")]
        left = ""

        def has_ended() -> bool:
            nonlocal left
            left = _unmount(folder, *nspawn) or self._left_of(number)
            return not left

        # Killed processes leave their cgroup before their other resources, and a host process can hold a mount briefly.
        if not _wait_until(has_ended):
            return left
        for path in nspawn:
            shutil.rmtree(path, ignore_errors=True)
        self._discard_folder(folder)
        return ""

    def _discard_folder(self, path: Path) -> None:
        if path.exists():
            path.rename(self._trash / f"{path.name}-{time.monotonic_ns()}")

    def _kill(self, number: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self._cgroup / _name(number) / "cgroup.kill").write_text("1")

    def _has_no_processes(self, number: int) -> bool:
        """Whether the killed processes have ended. Some wait for an answer of a FUSE daemon that was killed, too."""
        if not _populated(self._cgroup / _name(number)):
            return True
        fuse_connections.abort(_ids(number))
        return False

    def _left_of(self, number: int) -> str:
        """Describe what the kernel still has of a sandbox, or return empty."""
        ids = _ids(number)
        for process in procfs.all_processes().values():
            if any(user in ids for user in procfs.users(process.pid)):
                return f"process {process.pid} has a user id of the sandbox"
        # The kernel removes it together with the network namespace, which no other process can keep.
        if Path("/sys/class/net", _interface(number)).exists():
            return "the network of the sandbox still exists"
        return ""

    def _start_deletion(self) -> None:
        """Delete what was discarded, with low priority and not awaited: the machine is clean already."""
        discarded = list(self._trash.iterdir())
        if not discarded:
            return
        if free_space(self._storage).covers(_reserve()):
            start_deletion(discarded)
        else:
            # The next job must not be killed for the files of the last one.
            delete(discarded)

    def _leave_running(self, process: subprocess.Popen[bytes]) -> int:
        """Let a process outlive this agent. An unfinished Popen object would emit a ResourceWarning."""
        process.returncode = 0
        for pid in list(self._children):
            try:
                ended = bool(os.waitpid(pid, os.WNOHANG)[0])
            except ChildProcessError:
                ended = True
            if ended:
                self._children.discard(pid)
        self._children.add(process.pid)
        return process.pid

    # State on disk

    def _load(self) -> _Running | None:
        try:
            document = json.loads((self._storage / "current.json").read_text())
            running = _Running(**document)
        except (OSError, ValueError, TypeError):
            return None
        return running if procfs.is_alive(running.pid, running.started) else None

    def _save(self, running: _Running) -> None:
        _write(self._storage / "current.json", json.dumps(asdict(running)))

    def _console_end(self) -> str:
        with contextlib.suppress(OSError):
            text = (self.log_folder / "console.log").read_bytes()[-1000:].decode(errors="replace")
            return " | ".join(line.strip() for line in text.splitlines() if line.strip())
        return ""


def _reserve() -> Space:
    return Space(bytes=DISK_RESERVE, files=FILE_RESERVE)


def _cgroup_root() -> Path:
    path = Path("/sys/fs/cgroup")
    if not (path / "cgroup.procs").exists():
        raise OSError(f"{path} is not a cgroup v2 hierarchy")
    return path


def _memory() -> int:
    """Bytes of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limit(cgroup: Path) -> None:
    """Leave memory and processes to the host. The kernel may lack a controller."""
    tasks = min(int(Path(f"/proc/sys/kernel/{name}").read_text()) for name in ("pid_max", "threads-max"))
    limits = {
        "memory.max": _memory() - MEMORY_RESERVE,
        "pids.max": tasks - TASK_RESERVE,
        "cgroup.max.depth": CGROUP_DEPTH,
        "cgroup.max.descendants": CGROUP_COUNT,
    }
    for name, value in limits.items():
        with contextlib.suppress(FileNotFoundError, PermissionError):
            (cgroup / name).write_text(str(value))


def _populated(cgroup: Path) -> bool:
    try:
        return "populated 1" in (cgroup / "cgroup.events").read_text()
    except OSError:
        return False


def _remove_cgroup(cgroup: Path) -> None:
    for folder, _, _ in os.walk(cgroup, topdown=False):
        Path(folder).rmdir()


def _unmount(*folders: Path) -> str:
    """Unmount all in some folders and the folders themselves. Return what prevents it, or empty."""
    for folder in folders:
        for point in (*mounts.mounts_below(folder), *([folder] if folder.is_mount() else [])):
            try:
                mounts.unmount(point)
            except OSError as problem:
                return str(problem)
    return ""


def _wait_until(condition: Callable[[], bool]) -> bool:
    give_up_at = time.monotonic() + END_LIMIT_S
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        select.select([], [], [], END_POLL_S)
    return True


def _archive(files: Files, runner: PurePosixPath, user: JobUser) -> io.FileIO:
    """Pack files for the sandbox, in memory: they contain the runner's credentials."""
    archive = io.FileIO(os.memfd_create("files", os.MFD_CLOEXEC), "r+")
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path, (content, mode) in files.items():
            entry = tarfile.TarInfo(str(path).lstrip("/"))
            entry.size, entry.mode = len(content), mode
            if path.is_relative_to(runner):
                entry.uid, entry.gid = user.uid, user.gid
            tar.addfile(entry, io.BytesIO(content))
    archive.seek(0)
    return archive


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.new")
    draft.write_text(text)
    draft.replace(path)
