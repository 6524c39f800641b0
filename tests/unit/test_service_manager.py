"""Reports to systemd, on a socket as systemd has one."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from remuda.adapters.system.service_manager import REPORTS_PER_LIMIT, ServiceManager
from tests.support.records import LONG_S

LIMIT_S = 0.2


@pytest.fixture
def server(tmp_path: Path) -> Iterator[socket.socket]:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as made:
        made.bind(str(tmp_path / "notify"))
        made.settimeout(LONG_S)
        yield made


def variables(address: str, **changed: str) -> dict[str, str]:
    """As systemd sets them for a service with WatchdogSec=200ms."""
    limit = {"WATCHDOG_USEC": str(round(LIMIT_S * 1e6)), "WATCHDOG_PID": str(os.getpid())}
    return {"NOTIFY_SOCKET": address, **limit, **changed}


async def test_reports_while_it_is_healthy(server: socket.socket) -> None:
    states = [True, False, True, False]
    reporting = asyncio.create_task(
        ServiceManager(variables(server.getsockname())).keep_alive(lambda: bool(states) and states.pop(0))
    )
    await asyncio.sleep(LIMIT_S / REPORTS_PER_LIMIT * 6)
    reporting.cancel()
    server.setblocking(False)  # noqa: FBT003  # it takes no keyword
    assert [server.recv(100), server.recv(100)] == [b"WATCHDOG=1"] * 2
    with pytest.raises(BlockingIOError):
        server.recv(100)


async def test_reports_to_an_abstract_address() -> None:
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as server:
        server.bind(f"\0remuda-test-{os.getpid()}")
        server.settimeout(LONG_S)
        manager = ServiceManager(variables(f"@remuda-test-{os.getpid()}"))
        reporting = asyncio.create_task(manager.keep_alive(lambda: True))
        await asyncio.sleep(0)
        assert server.recv(100) == b"WATCHDOG=1"
        reporting.cancel()


async def test_goes_on_if_systemd_is_not_there(tmp_path: Path) -> None:
    reporting = asyncio.create_task(ServiceManager(variables(str(tmp_path / "missing"))).keep_alive(lambda: True))
    await asyncio.sleep(LIMIT_S)
    assert not reporting.done()
    reporting.cancel()


@pytest.mark.parametrize(
    "changed", [{"NOTIFY_SOCKET": ""}, {"WATCHDOG_USEC": ""}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_PID": "1"}]
)
async def test_does_nothing_if_nobody_expects_reports(server: socket.socket, changed: dict[str, str]) -> None:
    manager = ServiceManager(variables(server.getsockname(), **changed))
    async with asyncio.timeout(LONG_S):
        await manager.keep_alive(lambda: True)
