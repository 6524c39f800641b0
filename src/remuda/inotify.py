"""Changes of files, as the kernel reports them (inotify). Linux only.

All watches of an event loop share one inotify instance: by default a user may have only 128, and closing one takes
milliseconds. It is closed when the loop is deleted or the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: The file was written or truncated; its times or number of links changed.
_IN_MODIFY, _IN_ATTRIB = 0x2, 0x4
#: Watch number of the event that others were lost.
_ALL = -1
#: Watch number, kind, cookie, and length of the name, which follows for folders only.
_EVENT = struct.Struct("iIII")
_MAX_READ = 64 * 1024


@contextlib.contextmanager
def watch(path: Path, on_change: Callable[[], object]) -> Iterator[bool]:
    """Call `on_change` in the running event loop after changes of the file, until the end of the context.

    Yields False if the kernel cannot report them; the caller must poll then. A watch ends with the file: a new file of
    the same name is not watched.
    """
    loop = asyncio.get_running_loop()
    try:
        inotify = _instances.get(loop) or _Inotify(loop)
        number = inotify.add(path, on_change)
    except (OSError, AttributeError):  # the limits are reached, the file is missing, or the system has no inotify
        yield False
        return
    try:
        yield True
    finally:
        inotify.remove(number, on_change)


class _Inotify:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        import ctypes  # noqa: PLC0415 - for processes that wait only

        self._libc: Any = ctypes.CDLL(None, use_errno=True)
        self._errno = ctypes.get_errno
        self._descriptor = self._checked(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        #: The kernel has one watch per file, whatever the number of calls.
        self._callbacks: dict[int, list[Callable[[], object]]] = {}
        weakref.finalize(loop, os.close, self._descriptor).atexit = False
        loop.add_reader(self._descriptor, self._read)
        _instances[loop] = self

    def add(self, path: Path, callback: Callable[[], object]) -> int:
        added = self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), _IN_MODIFY | _IN_ATTRIB)
        number = self._checked(added)
        self._callbacks.setdefault(number, []).append(callback)
        return number

    def remove(self, number: int, callback: Callable[[], object]) -> None:
        callbacks = self._callbacks[number]
        callbacks.remove(callback)
        if not callbacks:
            del self._callbacks[number]
            # Fails if the file was deleted; the watch has ended then.
            self._libc.inotify_rm_watch(self._descriptor, number)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            events = os.read(self._descriptor, _MAX_READ)
            changed = {number for number, _, _, _ in _EVENT.iter_unpack(events)}
            for number in list(self._callbacks) if _ALL in changed else changed:
                for callback in list(self._callbacks.get(number, ())):
                    callback()

    def _checked(self, result: int) -> int:
        if result < 0:
            code = self._errno()
            raise OSError(code, os.strerror(code))
        return result


_instances: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Inotify] = weakref.WeakKeyDictionary()
