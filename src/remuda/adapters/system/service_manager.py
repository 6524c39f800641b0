"""The service manager of this machine, systemd, which restarts a service that does not report for too long.

Protocol: sd_notify(3) and sd_watchdog_enabled(3) of systemd.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable, Mapping

#: Reports per time limit, so that the loss or delay of some does no harm.
REPORTS_PER_LIMIT = 4


class ServiceManager:
    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment.get("NOTIFY_SOCKET", "")
        watched, limit = environment.get("WATCHDOG_PID", ""), environment.get("WATCHDOG_USEC", "")
        #: Seconds within which it expects a report; 0 if it expects none from this process.
        self._limit_s = int(limit) / 1e6 if limit.isdecimal() and watched in {"", str(os.getpid())} else 0.0

    async def keep_alive(self, is_healthy: Callable[[], bool]) -> None:
        """Report while this process is healthy and its event loop runs. Returns at once if no one expects reports."""
        while self._address and self._limit_s:
            if is_healthy():
                self._send(b"WATCHDOG=1")
            await asyncio.sleep(self._limit_s / REPORTS_PER_LIMIT)

    def _send(self, message: bytes) -> None:
        # A leading @ stands for the zero byte of an abstract address. No report is awaited: the next follows soon.
        address = f"\0{self._address[1:]}" if self._address.startswith("@") else self._address
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out,
        ):
            out.sendto(message, socket.MSG_DONTWAIT, address)
