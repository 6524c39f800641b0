"""Resources of the kernel that root of a sandbox can create or change, for the table in the docs.

`tests/conformance/test_kernel_surface.py` creates those with a `probe` and looks who pays. A unit test checks that the
attacks and tests that a row names exist.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Payer(StrEnum):
    SANDBOX = "the sandbox"
    PART = "the sandbox, in part"
    #: The cgroup does not count it, and only the guard sees that memory gets short.
    NO_ONE = "**no one**"
    #: A namespace or the kernel has a limit on the number.
    LIMIT = "a fixed limit"
    NOTHING = "nothing to pay"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Python code that creates a resource and keeps it, as root of a sandbox."""

    code: str
    #: What it takes at least of the kernel's memory.
    mib: int


@dataclass(frozen=True, kw_only=True)
class Resource:
    name: str
    payer: Payer
    #: What limits it.
    limit: str
    #: What removes it at the reset.
    end: str
    #: Names of attacks, `path::test`, or empty: from the kernel's source, not shown by a test.
    shown: tuple[str, ...] = ()
    probe: Probe | None = None


_SURFACE = "conformance/test_kernel_surface.py"
_SANDBOX = "conformance/test_sandbox.py"
_FAMILIES = f"{_SURFACE}::test_jobs_have_few_families_of_sockets"
_CHARGED = f"{_SURFACE}::test_who_pays_for_memory_of_the_kernel"
_LIMITS = f"{_SANDBOX}::test_processes_that_do_not_want_to_end"
_MODULES = "machine/test_kernel.py::test_jobs_load_no_modules_and_start_no_programs"
_SHARED_LIMITS = "machine/test_limits.py::test_limits_that_the_machine_shares_with_jobs"
_ITSELF = f"{_SANDBOX}::test_job_that_blocks_its_readers_does_not_block_the_agent"
_CHANGES = f"{_SURFACE}::test_a_reset_notices_changes_of_the_machine"

#: Limits.
_MEMORY = "memory of the sandbox"
_GUARD = "the guard"
#: What removes them.
_PROCESSES = "end of the processes"
_NETWORK = "end of the network namespace"
_MOUNTS = "end of the mount namespace"
_USERS = "end of the user namespace"
_IPC = "end of the IPC namespace"
_CGROUP = "removal of the cgroup"
_FOLDER = "deletion of the sandbox's folder"

#: Runs before each probe.
PREAMBLE = """
import subprocess
kept = []
def batch(program, lines):
    with subprocess.Popen([program, "-force", "-batch", "-"], stdin=-1, text=True) as running:
        for line in lines: print(line, file=running.stdin)
def sh(command):
    subprocess.run(command, shell=True)
def addresses(count):
    return ("10.%d.%d.%d" % (n >> 16, n >> 8 & 255, n & 255) for n in range(1, count))
def stations(count):
    return ("02:00:00:%02x:%02x:%02x" % (n >> 16, n >> 8 & 255, n & 255) for n in range(1, count))
"""

MEMORY = (
    Resource(
        name="processes, threads, page tables, kernel stacks",
        payer=Payer.SANDBOX,
        limit="memory and `pids.max` of the sandbox",
        end="`cgroup.kill`",
        shown=(_LIMITS, "constantly forking process", "process without main thread"),
    ),
    Resource(
        name="memory, locked memory (`mlock`), tmpfs, System V and POSIX shared memory",
        payer=Payer.SANDBOX,
        limit=_MEMORY,
        end=f"{_PROCESSES}, {_IPC}, {_MOUNTS}",
        shown=("shared memory", "System V shared memory", "memory disk"),
    ),
    Resource(
        name="pipes",
        payer=Payer.SANDBOX,
        limit="memory of the sandbox; `fs.pipe-max-size` each",
        end=_PROCESSES,
        shown=(_CHARGED, "named pipe"),
        probe=Probe(
            code="""
import fcntl, os
for _ in range(60):
    reader, writer = os.pipe()
    fcntl.fcntl(writer, 1031, 1 << 20)
    os.set_blocking(writer, False)
    kept.append((reader, writer))
    try:
        while True: os.write(writer, bytes(65536))
    except BlockingIOError: pass
""",
            mib=60,
        ),
    ),
    Resource(
        name="buffers of Unix sockets",
        payer=Payer.SANDBOX,
        limit="memory of the sandbox; `net.core.wmem_max` each",
        end=_PROCESSES,
        shown=(_CHARGED, "listening socket", "abstract socket"),
        probe=Probe(
            code="""
import socket
for _ in range(400):
    pair = socket.socketpair()
    pair[0].setblocking(False)
    kept.append(pair)
    try:
        while True: pair[0].send(bytes(65536))
    except BlockingIOError: pass
""",
            mib=60,
        ),
    ),
    Resource(
        name="buffers of TCP and UDP",
        payer=Payer.SANDBOX,
        limit="memory of the sandbox, for TCP; `net.ipv4.tcp_mem` and `udp_mem`, which all of the machine share",
        end=_PROCESSES,
        shown=("TCP server",),
    ),
    Resource(
        name="files, epoll, eventfd, timerfd, signalfd, pidfd, POSIX timers, asynchronous I/O (`io_setup`)",
        payer=Payer.SANDBOX,
        limit="memory of the sandbox; open files of a process; `fs.aio-max-nr`",
        end=_PROCESSES,
        shown=("deleted file",),
    ),
    Resource(
        name="inotify instances and watches, which count for root of the machine as well",
        payer=Payer.SANDBOX,
        limit=f"{_MEMORY}; the limits of the kernel are [raised](#shared-limits)",
        end=_PROCESSES,
        shown=(_SHARED_LIMITS,),
    ),
    Resource(
        name="POSIX message queues, System V queues and semaphores",
        payer=Payer.SANDBOX,
        limit="memory of the sandbox; limits of the IPC namespace",
        end=_IPC,
        shown=("POSIX message queue", "System V queue", "System V semaphores"),
    ),
    Resource(
        name="keys and keyrings",
        payer=Payer.LIMIT,
        limit="`kernel.keys.maxkeys` and `maxbytes` per user id, which each sandbox has for itself",
        end="user ids that are not used again; a new session keyring",
        shown=("inherited session key", "kernel key of root", "persistent key", "key quota"),
    ),
    Resource(
        name="pseudo-terminals",
        payer=Payer.SANDBOX,
        limit="`kernel.pty.max`, with a reserve for the machine's own instance",
        end=_MOUNTS,
    ),
)
NETWORK = (
    Resource(
        name="network interfaces: veth, bridge, vxlan",
        payer=Payer.SANDBOX,
        limit=_MEMORY,
        end=_NETWORK,
        shown=(_CHARGED, "network interface"),
        probe=Probe(
            code="""
for number in range(150):
    sh("ip link add probe%d type veth peer name other%d" % (number, number))
""",
            mib=8,
        ),
    ),
    Resource(
        name="tap and tun devices",
        payer=Payer.SANDBOX,
        limit=_MEMORY,
        end=_NETWORK,
        shown=("tap device",),
    ),
    Resource(
        name="queueing disciplines and classes (`tc`), per interface and per queue of it",
        payer=Payer.NO_ONE,
        limit=f"{_GUARD}; those of modules that are not loaded do not exist",
        end=_NETWORK,
        shown=("traffic control",),
    ),
    Resource(
        name="neighbours (`ip neigh`), which count together for all network namespaces; permanent ones do not count",
        payer=Payer.NO_ONE,
        limit=f"{_GUARD}; the limits of the kernel are [raised](#shared-limits)",
        end=_NETWORK,
        shown=(_CHARGED, _SHARED_LIMITS, "neighbours, routes and rules"),
        probe=Probe(
            code="""
sh("ip link add neigh0 type veth peer name neigh1; ip link set neigh0 up")
batch("ip", ("neigh add %s lladdr 02:00:00:00:00:01 dev neigh0 nud permanent" % each for each in addresses(50000)))
""",
            mib=40,
        ),
    ),
    Resource(
        name="forwarding database of bridges",
        payer=Payer.NO_ONE,
        limit=_GUARD,
        end=_NETWORK,
        shown=(_CHARGED, "bridge with a forwarding database"),
        probe=Probe(
            code="""
sh("ip link add fdb0 type bridge; ip link set fdb0 up")
batch("bridge", ("fdb add %s dev fdb0 self permanent" % each for each in stations(100000)))
""",
            mib=12,
        ),
    ),
    Resource(
        name="packet sockets: rings (`PACKET_RX_RING`), up to 4 GiB per call, visible in `MemAvailable` only",
        payer=Payer.NO_ONE,
        limit=_GUARD,
        end=_PROCESSES,
        shown=(_CHARGED,),
        probe=Probe(
            code="""
import socket, struct
kept.append(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))
kept[-1].setsockopt(263, 5, struct.pack("IIII", 1 << 20, 64, 2048, (64 << 20) // 2048))
""",
            mib=64,
        ),
    ),
    Resource(
        name="addresses, routes and rules",
        payer=Payer.SANDBOX,
        limit=_MEMORY,
        end=_NETWORK,
        shown=(_CHARGED, "neighbours, routes and rules"),
        probe=Probe(
            code="""
sh("ip link set lo up")
batch("ip", ("route add %s dev lo" % each for each in addresses(50000)))
""",
            mib=5,
        ),
    ),
    Resource(
        name="rules and sets of netfilter (iptables, nft, ipset)",
        payer=Payer.SANDBOX,
        limit=_MEMORY,
        end=_NETWORK,
        shown=("packet filter",),
    ),
    Resource(
        name="`net.*` settings of the sandbox",
        payer=Payer.NOTHING,
        limit="the network namespace",
        end=_NETWORK,
        shown=("network settings",),
    ),
    Resource(
        name="network namespaces",
        payer=Payer.SANDBOX,
        limit="memory of the sandbox; `user.max_net_namespaces`",
        end=f"{_PROCESSES} and mounts; the reset waits until all are gone (11,400: 2 s)",
        shown=(_CHARGED, "network namespace", "many network namespaces"),
        probe=Probe(
            code="""
import ctypes, os, signal
libc = ctypes.CDLL(None)
for _ in range(60):
    reader, writer = os.pipe()
    if not os.fork():
        libc.unshare(0x40000000)
        os.write(writer, b"x")
        signal.pause()
    os.read(reader, 1)
""",
            mib=10,
        ),
    ),
    Resource(
        name="IPsec (`NETLINK_XFRM`): states and policies, which the kernel charges to no one",
        payer=Payer.REFUSED,
        limit="system call filter",
        end="none",
        shown=(_FAMILIES,),
    ),
    Resource(
        name="VM sockets, and all families but Unix, IPv4, IPv6, netlink and packet; netlink of audit, crypto, RDMA",
        payer=Payer.REFUSED,
        limit="system call filter; for 32-bit x86 programs, that the kernel has no VM sockets",
        end="none",
        shown=(_FAMILIES, "families of sockets"),
    ),
)
FILES = (
    Resource(
        name="mounts",
        payer=Payer.PART,
        limit=f"`fs.mount-max` per namespace; {_GUARD}",
        end=_MOUNTS,
        shown=("memory disk", "mounts that multiply"),
    ),
    Resource(
        name="dentries, inodes, page cache",
        payer=Payer.SANDBOX,
        limit="memory of the sandbox, from which the kernel reclaims them",
        end=_FOLDER,
        shown=("tree deeper than the maximum path",),
    ),
    Resource(
        name="bytes of the disk",
        payer=Payer.LIMIT,
        limit=_GUARD,
        end=_FOLDER,
        shown=(f"{_SANDBOX}::test_a_full_disk_ends_the_job_and_not_the_machine", "blocks beyond the end of a file"),
    ),
    Resource(
        name="FUSE file systems",
        payer=Payer.SANDBOX,
        limit=_MEMORY,
        end="the agent aborts the connections of the sandbox: some processes do not end before",
        shown=(_ITSELF, "process that waits for itself"),
    ),
    Resource(
        name="formats of programs (`binfmt_misc`), from Linux 6.7",
        payer=Payer.SANDBOX,
        limit="the user namespace; older kernels refuse",
        end=_USERS,
        shown=("format of programs",),
    ),
    Resource(
        name="loop and block devices, device nodes, quotas",
        payer=Payer.REFUSED,
        limit="no rights outside the user namespace; device cgroup of systemd-nspawn",
        end="none",
        shown=("disk of the machine",),
    ),
    Resource(
        name="fanotify, file handles",
        payer=Payer.REFUSED,
        limit="system call filter",
        end="none",
        shown=("file handles",),
    ),
)
KERNEL = (
    Resource(
        name="modules: by `mount`, `ip link`, `socket`, `iptables`, `tc`",
        payer=Payer.REFUSED,
        limit="`kernel.modules_disabled` after boot; with `kernel-modules` = `any`, the instance ends",
        end="none",
        shown=(_MODULES, _CHANGES),
    ),
    Resource(
        name="settings of the machine (sysctl), interfaces of the machine",
        payer=Payer.REFUSED,
        limit="no rights outside the user namespace; the reset compares them",
        end="the instance ends",
        shown=(_CHANGES, "core_pattern", "modprobe", "masked /proc/sys", "settings in /sys"),
    ),
    Resource(
        name="core dumps",
        payer=Payer.LIMIT,
        limit="disk: `kernel.core_pattern` is `core`, a file in the sandbox; no program of the machine runs",
        end=_FOLDER,
        shown=(_MODULES,),
    ),
    Resource(
        name="cgroups",
        payer=Payer.SANDBOX,
        limit="`cgroup.max.descendants` 10,000, `cgroup.max.depth` 100",
        end=_CGROUP,
        shown=("cgroups", "limits of the sandbox"),
    ),
    Resource(
        name="user, PID, time and other namespaces",
        payer=Payer.SANDBOX,
        limit=f"{_MEMORY}; the limits of the kernel are [raised](#shared-limits)",
        end=_PROCESSES,
        shown=(_SHARED_LIMITS, "container without a runtime", "user namespace"),
    ),
    Resource(
        name="BPF programs and maps, performance events",
        payer=Payer.REFUSED,
        limit="no rights outside the user namespace; system call filter",
        end="none",
        shown=("BPF program and performance events",),
    ),
    Resource(
        name="io_uring, `userfaultfd`",
        payer=Payer.REFUSED,
        limit="system call filter: a ring opens sockets that the filter cannot see",
        end="none",
        shown=(_FAMILIES, "io_uring and userfaultfd"),
    ),
    Resource(
        name="kernel log, clock, kexec, swap, reboot of the machine",
        payer=Payer.REFUSED,
        limit="no rights outside the user namespace; system call filter",
        end="none",
        shown=("kernel log", "kexec, swap and clock", "sysrq"),
    ),
)
GROUPS = {
    "Memory, processes and IPC": MEMORY,
    "Network": NETWORK,
    "Files": FILES,
    "The kernel itself": KERNEL,
}
RESOURCES = tuple(resource for group in GROUPS.values() for resource in group)


def table() -> str:
    """The tables of the docs."""
    columns = "| resource | who pays | what limits it | what removes it | shown by |"
    lines = []
    for group, resources in GROUPS.items():
        lines += [f"### {group}", "", columns, "|---|---|---|---|---|"]
        for each in resources:
            shown = "; ".join(map(_shown, each.shown)) or "no test"
            lines.append(f"| {each.name} | {each.payer} | {each.limit} | {each.end} | {shown} |")
        lines.append("")
    return "\n".join(lines).strip()


def _shown(name: str) -> str:
    path, is_test, test = name.partition("::")
    return f"[`{test}`](../../tests/{path})" if is_test else name
