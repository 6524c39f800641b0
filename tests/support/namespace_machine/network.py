"""Network namespaces of tests, and the network of namespace machines: test servers and a metadata service each."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Range of the addresses at which machines and their sandboxes reach test servers (RFC 5737, for documentation).
SERVERS = "198.51.100.0/24"
ATTEMPTS = 100
METADATA_ADDRESS = "169.254.169.254"
METADATA_ADDRESS_V6 = "fd00:ec2::254"
_CLONE_NEWNET = 0x40000000


def _enter_new_network() -> None:
    """Move this thread, and what it starts from now on, to a new network namespace."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")


def _current_network() -> int:
    return os.open(f"/proc/self/task/{threading.get_native_id()}/ns/net", os.O_RDONLY | os.O_CLOEXEC)


@contextmanager
def own_network() -> Iterator[None]:
    """Run the block in a network with nothing but a loopback interface. Needs root."""
    outer = _current_network()
    try:
        _enter_new_network()
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        yield
    finally:
        ctypes.CDLL(None, use_errno=True).setns(outer, _CLONE_NEWNET)
        os.close(outer)


@contextmanager
def server_address() -> Iterator[str]:
    """Add an unused address of the range `SERVERS` to this computer, for servers that machines need. Needs root."""
    for _ in range(ATTEMPTS):
        # At random: tests in other processes take addresses at the same time.
        address = f"{SERVERS.rpartition('.')[0]}.{1 + secrets.randbelow(254)}"
        command = ["ip", "address", "add", f"{address}/32", "dev", "lo"]
        if subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0:
            break
    else:
        raise OSError(f"cannot add an address of {SERVERS}")
    try:
        yield address
    finally:
        subprocess.run(["ip", "address", "del", f"{address}/32", "dev", "lo"], check=True)


class MetadataNetwork:
    """A network namespace with listening sockets at the addresses of the metadata service. Needs root.

    The namespace exists as long as the descriptor `file` or a socket in it is open.
    """

    def __init__(self) -> None:
        self.file = -1
        self.sockets: list[socket.socket] = []
        # Only this thread enters the namespace.
        thread = threading.Thread(target=self._create)
        thread.start()
        thread.join()
        if len(self.sockets) != 2:
            self.close()
            raise OSError("cannot create the network of a metadata service")

    def _create(self) -> None:
        _enter_new_network()
        self.file = _current_network()
        commands = (
            "link set lo up",
            f"address add {METADATA_ADDRESS}/32 dev lo",
            f"address add {METADATA_ADDRESS_V6}/128 dev lo nodad",
        )
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True)
        for family, address in ((socket.AF_INET, METADATA_ADDRESS), (socket.AF_INET6, METADATA_ADDRESS_V6)):
            self.sockets.append(socket.create_server((address, 80), family=family, backlog=100))

    @property
    def path(self) -> str:
        """A path of the namespace for `nsenter` and `ip`."""
        return f"/proc/{os.getpid()}/fd/{self.file}"

    def close(self) -> None:
        for each in self.sockets:
            each.close()
        if self.file >= 0:
            os.close(self.file)
