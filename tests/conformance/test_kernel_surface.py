"""What root of a sandbox reaches of this computer's kernel, and changes of the kernel that a reset notices."""

from __future__ import annotations

import base64
import errno
import platform
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from remuda.agent import socket_filter
from tests.support import kernel_resources
from tests.support.kernel_resources import Payer
from tests.support.sandbox_host import Driver, SandboxHost, driver, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"sandboxes in namespaces: {missing()}")

PYTHON = "/usr/bin/python3"
#: AF_MAX of Linux 6.18.
FAMILIES = 46
AF_NETLINK, AF_VSOCK = 16, 40
MIB = 1024**2
#: The share of a resource's memory from which its sandbox counts as the payer. The processes that create it need some.
ENOUGH = 0.6
#: Prints the families, and protocols of netlink, of which a socket can be opened.
OPEN_SOCKETS = f"""
import ctypes, platform, socket
def opens(*words):
    try: socket.socket(*words).close()
    except OSError as problem: return problem.errno == 1
    return True
families = [n for n in range({FAMILIES}) if any(opens(n, kind) for kind in (1, 2, 3, 5))]
pairs = [n for n in range({FAMILIES}) if n != 1 and not ctypes.CDLL(None).socketpair(n, 1, 0, (ctypes.c_int * 2)())]
print("sockets", *families, *pairs)
print("netlink", *(n for n in range(32) if opens({AF_NETLINK}, 3, n)))
libc = ctypes.CDLL(None, use_errno=True)
for name, number in (("io_uring", 425), ("userfaultfd", {{"x86_64": 323, "aarch64": 282}}[platform.machine()])):
    print(name, ctypes.get_errno() if libc.syscall(number, 1, bytes(128)) < 0 else 0)
"""
#: Name, words of the system call, and the expected error. This computer's kernel may have VM sockets.
I386_CALLS = (
    ("socket-unix", (359, 1, 1, 0), 0),
    ("socket-vm", (359, AF_VSOCK, 1, 0), errno.EAFNOSUPPORT),
    ("socketcall-vm", (102, 1, -1), errno.EAFNOSUPPORT),
    ("io_uring", (425, 1, 0), errno.ENOSYS),
)


@pytest.fixture(scope="module", params=["kernel-of-this-computer-in-namespaces"])
def host(request: pytest.FixtureRequest) -> Iterator[SandboxHost]:
    with SandboxHost("surface") as made:
        yield made


@pytest.fixture
def agent(host: SandboxHost, tmp_path: Path) -> Iterator[Driver]:
    with driver(host, folder=str(tmp_path)) as made:
        yield made
        made("open", prepare=False)
        assert made("discard") == ""
        assert made("left") == {}


def i386_program(*words: int) -> bytes:
    """A 32-bit x86 program that makes the system call `words`, and exits with its error number or 0.

    `words` are its number and up to three arguments. An argument of -1 is the address of the words 40, 1, 0: AF_VSOCK,
    SOCK_STREAM, and no protocol.
    """
    base, header = 0x08048000, 52 + 32
    code = b""
    number, *arguments = words
    data = base + header + 64
    for opcode, value in zip((0xB8, 0xBB, 0xB9, 0xBA), (number, *arguments, 0, 0, 0), strict=False):
        code += struct.pack("<BI", opcode, data if value == -1 else value)
    # int 0x80; test eax, eax; jns +4; neg eax; jmp +2; xor eax, eax; mov ebx, eax; mov eax, 1; int 0x80
    code += bytes.fromhex("cd80 85c0 7904 f7d8 eb02 31c0 89c3 b801000000 cd80")
    body = code.ljust(64, b"\x90") + struct.pack("<III", AF_VSOCK, 1, 0)
    size = header + len(body)
    elf = struct.pack("<16sHHIIIIIHHHHHH", b"\x7fELF\x01\x01\x01", 2, 3, 1, base + header, 52, 0, 0, 52, 32, 1, 0, 0, 0)
    return elf + struct.pack("<IIIIIIII", 1, 0, base, base, size, size, 5, 0x1000) + body


def test_jobs_have_few_families_of_sockets(agent: Driver) -> None:
    """As root of the sandbox, in a user namespace of a job's own, and as a 32-bit program."""
    script = f"exec 2>&1; sudo {PYTHON} -ISc '{OPEN_SOCKETS}'; unshare -Urn {PYTHON} -ISc '{OPEN_SOCKETS}'\n"
    expected = 2 * [
        f"sockets {' '.join(map(str, socket_filter.FAMILIES))}",
        f"netlink {' '.join(map(str, socket_filter.NETLINK_PROTOCOLS))}",
        f"io_uring {errno.ENOSYS}",
        f"userfaultfd {errno.EPERM}",
    ]
    if platform.machine() == "x86_64":
        for name, words, code in I386_CALLS:
            program = base64.b64encode(i386_program(*words)).decode()
            script += f"echo {program} | base64 -d >/tmp/p; chmod +x /tmp/p; /tmp/p; echo {name} $?\n"
            expected.append(f"{name} {code}")
    agent("open")
    assert agent("run", name="r1", script=script)["output"].splitlines() == expected


def test_a_reset_notices_changes_of_the_machine(host: SandboxHost, tmp_path: Path) -> None:
    options = {"folder": str(tmp_path)}
    with driver(host, **options) as agent:
        agent("open")
        agent("ready")
        # Nobody uses the sandbox yet: a service of the machine has started late.
        host.run("ip", "link", "add", "early", "type", "bridge")
        agent("run", name="r1", script="exit 0")
        host.run("sh", "-c", "ip link add late type bridge; echo 1 >/proc/sys/net/ipv4/conf/all/route_localnet")
    # Neither another agent nor another sandbox of the same run makes it the state of before.
    with driver(host, **options) as agent:
        agent("open")
        agent("run", name="r2", script="exit 0")
        failed = agent("reset")
        assert failed["ok"] is False
        assert failed["detail"] == (
            "reset failed: the kernel has changed: interface late: exists; "
            "setting net/ipv4/conf/all/route_localnet: 1, was 0"
        )
        agent("ready")
        assert agent("reset")["ok"] is False, "the sandbox was not used, but an earlier one was"
        host.run("sh", "-c", "ip link del late; echo 0 >/proc/sys/net/ipv4/conf/all/route_localnet")
        assert agent("reset")["ok"]
        assert agent("reset")["detail"] == "the sandbox was not used"
        host.run("ip", "link", "del", "early")
        assert agent("reset")["ok"]
        agent("open", prepare=False)
        assert agent("discard") == ""
        assert agent("left") == {}


def test_who_pays_for_memory_of_the_kernel(host: SandboxHost, agent: Driver) -> None:
    """What the cgroup of a sandbox does not count cannot reach its limit, but uses up the memory of the machine."""
    if host.charged_bytes is None:
        pytest.skip("no cgroup of this computer counts memory")
    measured = [(each, each.probe) for each in kernel_resources.RESOURCES if each.probe is not None]
    codes = ["", "", *(probe.code for _, probe in measured)]
    script = "set -e; cd /tmp; mkfifo next\n"
    for number, code in enumerate(codes):
        program = f"{kernel_resources.PREAMBLE}{code}\nimport signal\nprint('done', flush=True)\nsignal.pause()"
        script += f"""
            echo 'done {number}.'; read -r _ <next
            cat >probe.py <<'END'\n{program}\nEND
            sudo {PYTHON} -IS probe.py >{number}.log 2>&1 &
            until grep -q done {number}.log; do sleep 0.05; [ -e /proc/$! ]; done || {{ cat {number}.log; exit 1; }}
        """
    agent("open")
    agent("start", name="r1", script=f"{script}echo 'done {len(codes)}.'; read -r _ <next")
    charged = []
    for number in range(len(codes) + 1):
        agent("wait_for", text=f"done {number}.")
        charged.append(host.charged_bytes)
        agent("inside", command="echo >/tmp/next")
    # Two probes create nothing: the first reads the files, and the second is what the process itself takes.
    _, own, *taken = [after - before for before, after in pairwise(charged)]
    for (resource, probe), total in zip(measured, taken, strict=True):
        share = (total - own) / MIB / probe.mib
        assert share > ENOUGH if resource.payer is Payer.SANDBOX else share < 1 - ENOUGH, (resource.name, share)
    # What no one pays for ends with the sandbox, too.
    assert agent("reset")["ok"]


#: What jobs do that needs rights or rare system calls. `needs` ends a script without the command or the device.
#: Docker is used in tests/machine.
TOOLS = {
    "user namespaces, as bazel has for its sandboxes": "unshare -Urmpnif --mount-proc sh -ec '"
    "mount -t tmpfs t /mnt; mount --bind /usr /mnt; ip link set lo up; ip route'",
    "capabilities of a file": "needs setcap; cp /bin/sleep .; sudo setcap cap_net_bind_service+ep sleep; ./sleep 0",
    "tun device": "needs -w /dev/net/tun; sudo ip tuntap add dev tun7 mode tun; sudo ip link set tun7 up",
    "package": "needs dpkg-deb; mkdir -p p/DEBIAN; "
    r"printf '%s: p\n' Package Maintainer Description >p/DEBIAN/control; "
    r"printf 'Version: 1\nArchitecture: all\n' >>p/DEBIAN/control; dpkg-deb -b p p.deb; sudo dpkg -i p.deb",
    "Node.js with io_uring": 'needs node; UV_USE_IO_URING=1 node -e \'require("fs").promises.readFile("/etc/passwd")\'',
    "virtual environment": f"{PYTHON} -m venv --without-pip venv; venv/bin/python -c 'import asyncio, multiprocessing'",
    "sockets of the machine": "ss -antux; sudo ss -antp",
    "packet filter": "sudo iptables -t nat -A POSTROUTING -m conntrack --ctstate NEW -j MASQUERADE",
    "debugger": "needs strace; strace -f -o trace sh -c 'sleep 0; sleep 0'; sudo strace -f -o trace sleep 0",
    "core dump of a service": "case $(cat /proc/sys/kernel/core_pattern) in [@/\\|]*) exit 0;; esac; mkdir crash; "
    "! sudo systemd-run --wait -p LimitCORE=infinity -p WorkingDirectory=/tmp/crash "
    f"{PYTHON} -c 'import os; os.abort()'; "
    "[ -n \"$(find crash -name 'core*' -size +0)\" ]",
    "services": "sudo systemd-run --wait --quiet -p PrivateTmp=yes -p ProtectSystem=strict true",
    "socket of IPv6": f"{PYTHON} -c 'import socket; socket.create_server((\"::1\", 0), family=socket.AF_INET6)'",
}


def test_tools_of_jobs_work(agent: Driver) -> None:
    script = "cd /tmp; echo 'needs() { [ $# = 2 ] && [ $1 $2 ] || command -v $1 || exit 0; }' >needs\n"
    for name, use in TOOLS.items():
        script += (
            f"cat >use <<'END'\n{use}\nEND\nbash -ec '. ./needs; . ./use' >log 2>&1 || {{ echo '{name}'; cat log; }}\n"
        )
    agent("open")
    assert agent("run", name="r1", script=f"exec 2>&1\n{script}")["output"] == ""
