"""The guard as the agent sees it: a process that it starts, replaces and restarts, and whose kills it records."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from remuda import procfs
from remuda.agent import guard

#: Seconds until the guard must work. Machines under emulation need several.
START_LIMIT_S = 60.0
#: Seconds between two starts of a guard that ends again.
RESTART_PAUSE_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Reserves:
    """What jobs must leave to the machine. Below, the guard kills their sandbox."""

    #: Bytes of memory that the kernel could give to new programs.
    memory: int
    #: Bytes by which memory of the kernel may grow that it cannot take back.
    kernel: int
    #: Bytes and files on the disk.
    disk: int
    files: int
    #: Bytes on the memory disk with the logs.
    log: int


class GuardProcess:
    """`cgroup` is that of all sandboxes, `log` a folder on a memory disk. `record` takes an event's name and text."""

    def __init__(
        self, *, cgroup: Path, storage: Path, log: Path, reserves: Reserves, record: Callable[..., None]
    ) -> None:
        self._cgroup = cgroup
        self._storage = storage
        self._log = log
        self._reserves = reserves
        self._record = record
        self._page: mmap.mmap | None = None
        self._pid = 0
        #: The end of the guard's pipe: readable after kills and when it has ended.
        self._pipe = -1
        self._restart: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start a guard, and end that of an earlier agent when the new one works. Blocks. Raises `OSError`."""
        path = self._log / "guard"
        self._page = self._page or guard.open_page(str(path))
        former = procfs.read_process(self._number(guard.PID))
        former_started = self._number(guard.STARTED)
        reserves = self._reserves
        values = (reserves.memory, reserves.kernel, reserves.disk, reserves.files, reserves.log)
        paths = (self._cgroup, self._storage, self._log, path)
        process = subprocess.Popen(
            [sys.executable, "-IS", guard.__file__, *map(str, paths), *map(str, values)],
            env={},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
        )
        assert process.stdout is not None  # noqa: S101  # opened with PIPE
        # An unfinished Popen object would emit a ResourceWarning: the guard outlives this agent.
        process.returncode = 0
        pipe = os.dup(process.stdout.fileno())
        process.stdout.close()
        readable, _, _ = select.select([pipe], [], [], START_LIMIT_S)
        if not readable or os.read(pipe, 1) != guard.READY:
            os.close(pipe)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            _reap(process.pid)
            raise OSError("the guard does not start")
        os.set_blocking(pipe, False)
        self._pid, self._pipe = process.pid, pipe
        if former is not None and former.started == former_started:
            procfs.kill([former], 0)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(former.pid, os.WNOHANG)

    def watch(self) -> None:
        """Record kills, and start the guard again if it ends, while the event loop runs."""
        asyncio.get_running_loop().add_reader(self._pipe, self._take)

    async def close(self) -> None:
        """Leave the guard alone. It ends when there is no sandbox."""
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.gather(self._restart, return_exceptions=True)
        self._unwatch()

    def set_used(self, *, used: bool) -> None:
        """Say whether the sandbox is used: from then on its jobs are to blame for a full disk."""
        if self._page is not None:
            guard.NUMBER.pack_into(self._page, guard.USED, used)

    def kills(self) -> int:
        """Return how often guards of this machine have killed, all of it recorded."""
        kills = self._number(guard.KILLS)
        if self._page is not None and kills != self._number(guard.RECORDED):
            event, text = guard.REASONS[self._number(guard.REASON)]
            self._record(event, f"killed the sandbox: {text.format(self._number(guard.AMOUNT))}")
            guard.NUMBER.pack_into(self._page, guard.RECORDED, kills)
        return kills

    def _number(self, offset: int) -> int:
        return 0 if self._page is None else int(guard.NUMBER.unpack_from(self._page, offset)[0])

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(self._pipe, guard.PAGE):
                self._unwatch()
                self._restart = asyncio.create_task(self._start_again())
        self.kills()

    async def _start_again(self) -> None:
        self._record("guard-ended", "the guard has ended; starting another")
        _reap(self._pid)
        while self._pipe < 0:
            try:
                await asyncio.to_thread(self.start)
            except OSError as problem:
                self._record("guard-ended", str(problem))
            await asyncio.sleep(RESTART_PAUSE_S)
        self.watch()

    def _unwatch(self) -> None:
        if self._pipe >= 0:
            asyncio.get_running_loop().remove_reader(self._pipe)
            os.close(self._pipe)
            self._pipe = -1


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
