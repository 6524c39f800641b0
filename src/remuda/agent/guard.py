"""The guard of a machine: kills the sandbox before its jobs use up the memory or the disk. Standard library only.

A process of its own, because it must work when nothing else does: it looks at no job, waits for nothing, and its memory
is locked. What it needs is open before the first sandbox. From a look to a kill it opens no file and starts no process.
Python objects come from blocks that it has already, and the kernel needs two bytes for the write that kills. Memory
matters because some of the kernel's is not counted for the cgroup whose processes ask for it, such as queues of network
interfaces. No limit of a cgroup ends that.

It ends if there is neither an agent nor a sandbox. An agent that starts replaces the guard of the one before.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import select
import struct
import sys
from contextlib import suppress

#: The reasons for a kill: the event in the agent's log, and its text with an amount in KiB.
REASONS = (
    ("memory-low", "{} KiB of memory are available"),
    ("memory-low", "the kernel itself has {} KiB of memory"),
    ("disk-full", "{} KiB are free on the disk"),
    ("log-full", "{} KiB are free for logs"),
)
AVAILABLE_LOW, KERNEL_HIGH, DISK_FULL, LOG_FULL = range(len(REASONS))
#: Guard and agent share a file in memory of one page, with numbers of eight bytes: pid and start time of the guard,
#: number of kills, index and amount of the last one's reason; and from the agent, the number of kills that it has
#: recorded and whether the sandbox is used. One that is not used yet has filled no disk.
NUMBER = struct.Struct("=Q")
PID, STARTED, KILLS, REASON, AMOUNT, RECORDED, USED = range(0, 7 * NUMBER.size, NUMBER.size)
PAGE = mmap.PAGESIZE
#: The first byte that the agent reads; one more follows each kill.
READY = b"."
#: Faster than any job can use up memory, in KiB per second.
FILL_RATE = 8 * 1024**2
#: Shortest and longest time in seconds between two looks.
MIN_PAUSE_S, MAX_PAUSE_S = 0.005, 0.2
#: The lines of /proc/meminfo with memory of the kernel that it cannot take back, in KiB.
KERNEL = (b"SUnreclaim:", b"VmallocUsed:", b"Percpu:")
_MCL_CURRENT, _MCL_FUTURE = 1, 2


class Guard:
    """`cgroup` is the folder of the cgroup of all sandboxes.

    `memory`, `disk` and `log_space` are bytes that must stay available, `files` the number of files. Memory of the
    kernel that it cannot take back may grow by `kernel` bytes.
    """

    def __init__(
        self,
        *,
        cgroup: str,
        storage: str,
        log: str,
        page: mmap.mmap,
        memory: int,
        kernel: int,
        disk: int,
        files: int,
        log_space: int,
        meminfo: str = "/proc/meminfo",
    ) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC
        self._kill = os.open(f"{cgroup}/cgroup.kill", os.O_WRONLY | os.O_CLOEXEC)
        self._events = os.open(f"{cgroup}/cgroup.events", flags)
        self._meminfo = os.open(meminfo, flags)
        self._storage = os.open(storage, flags | os.O_DIRECTORY)
        self._log = os.open(log, flags | os.O_DIRECTORY)
        self._page = page
        self._memory, self._disk, self._log_space = memory // 1024, disk // 1024, log_space // 1024
        self._files = files
        self._buffer = bytearray(PAGE)
        #: Whether it has killed, and processes of that sandbox are still there.
        self._killing = False
        self._look()
        self._kernel_limit = self._kernel() + kernel // 1024

    def check(self) -> tuple[bool, float]:
        """Kill if something is short. Return whether that is a new kill, and the seconds until the next check."""
        self._look()
        available, kernel = self._value(b"MemAvailable:"), self._kernel()
        used = NUMBER.unpack_from(self._page, USED)[0]
        disk, log = os.fstatvfs(self._storage), os.fstatvfs(self._log)
        free, free_log = disk.f_bavail * disk.f_frsize // 1024, log.f_bavail * log.f_frsize // 1024
        headroom = available - self._memory
        if headroom < 0:
            return self._kill_for(AVAILABLE_LOW, available)
        if kernel > self._kernel_limit:
            return self._kill_for(KERNEL_HIGH, kernel)
        if used and (free < self._disk or (disk.f_files and disk.f_favail < self._files)):
            return self._kill_for(DISK_FULL, free)
        if used and free_log < self._log_space:
            return self._kill_for(LOG_FULL, free_log)
        self._killing = False
        return False, min(MAX_PAUSE_S, max(MIN_PAUSE_S, headroom / FILL_RATE))

    def _kill_for(self, reason: int, amount: int) -> tuple[bool, float]:
        if not self.has_sandbox():
            self._killing = False
            return False, MAX_PAUSE_S
        is_new = not self._killing
        if is_new:
            self._killing = True
            # First, so that whoever sees the end of a process finds the reason.
            page = self._page
            NUMBER.pack_into(page, REASON, reason)
            NUMBER.pack_into(page, AMOUNT, amount)
            NUMBER.pack_into(page, KILLS, NUMBER.unpack_from(page, KILLS)[0] + 1)
        os.write(self._kill, b"1")
        return is_new, MIN_PAUSE_S

    def has_sandbox(self) -> bool:
        length = os.preadv(self._events, (self._buffer,), 0)
        return self._buffer.find(b"populated 1", 0, length) >= 0

    def _look(self) -> None:
        self._length = os.preadv(self._meminfo, (self._buffer,), 0)

    def _value(self, name: bytes) -> int:
        """Return a line's value in KiB; 0 if the kernel has no such line."""
        begin = self._buffer.find(name, 0, self._length)
        return int(self._buffer[begin + len(name) : self._buffer.index(b"kB", begin)]) if begin >= 0 else 0

    def _kernel(self) -> int:
        return sum(map(self._value, KERNEL))


def open_page(path: str) -> mmap.mmap:
    """Map the page that guard and agent share. Its memory exists from now on."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, PAGE)
        return mmap.mmap(descriptor, PAGE)
    finally:
        os.close(descriptor)


def protect() -> None:
    """Keep this process in memory, alive and in time, whatever jobs do. Each part may need a right that root lacks."""
    # A collection could ask for memory at any time. The loop makes no cycles.
    gc.disable()
    for part, otherwise in (
        (_escape_the_oom_killer, "lack of memory may end it"),
        (_go_first, "it may have to wait for a processor"),
        (_lock_memory, "it may have to wait for its own memory"),
    ):
        try:
            part()
        except OSError as problem:
            sys.stderr.write(f"guard: {otherwise}: {problem}\n")


def _escape_the_oom_killer() -> None:
    # In binary mode without a buffer: the write fails here, and not once more at the end of the block.
    with open("/proc/self/oom_score_adj", "wb", buffering=0) as file:  # noqa: PTH123  # pathlib is slow to import
        file.write(b"-1000")


def _go_first() -> None:
    os.setpriority(os.PRIO_PROCESS, 0, -20)


def _lock_memory() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mlockall(_MCL_CURRENT | _MCL_FUTURE):
        raise OSError(ctypes.get_errno(), "the memory cannot be locked")


def introduce(page: mmap.mmap) -> None:
    """Say in the page who guards."""
    with open("/proc/self/stat", "rb") as file:  # noqa: PTH123  # as above
        text = file.read()
    NUMBER.pack_into(page, STARTED, int(text[text.rindex(b")") + 2 :].split()[19]))
    NUMBER.pack_into(page, PID, os.getpid())


def main(cgroup: str, storage: str, log: str, page_path: str, *reserves: str) -> None:
    """`reserves` are the last parameters of `Guard`."""
    memory, kernel, disk, files, log_space = map(int, reserves)
    page = open_page(page_path)
    guard = Guard(
        cgroup=cgroup,
        storage=storage,
        log=log,
        page=page,
        memory=memory,
        kernel=kernel,
        disk=disk,
        files=files,
        log_space=log_space,
    )
    protect()
    introduce(page)
    os.set_blocking(1, False)
    agent = select.poll()
    # Readable for an error only: the agent has closed its end.
    agent.register(1, 0)
    os.write(1, READY)
    has_agent = True
    while has_agent or guard.has_sandbox():
        is_new, pause_s = guard.check()
        if is_new:
            # Fails if the agent has ended, or has not read for a long time. It will see the page.
            with suppress(OSError):
                os.write(1, READY)
        if has_agent:
            has_agent = not agent.poll(round(pause_s * 1000))
        else:
            select.select((), (), (), pause_s)


if __name__ == "__main__":
    main(*sys.argv[1:])
