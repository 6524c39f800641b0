"""The firewall of machines on a real kernel: namespaces for machine, cloud, sandbox and a container in the sandbox."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.user_data import BootstrapBox, fake_imds

#: The metadata service, by IPv4 and IPv6.
METADATA = {"169.254.169.254", "fd00:ec2::254"}
#: Another server of the cloud, and the machine, by the addresses of its interfaces.
INTERNET = {"10.0.0.2"}
MACHINE = {"10.0.0.1", "198.18.0.5", "fd00:2::1"}
EVERY = METADATA | INTERNET | MACHINE
LIMIT_S = 120
JOB_USER_ID = 1001
#: Accepts connections on all addresses of its network.
SERVICE = """
import socket, time
server = socket.create_server(("", 80), family=socket.AF_INET6, backlog=100, dualstack_ipv6=True)
print("ready", flush=True)
time.sleep(1000)
"""
#: Prints the addresses that a user can reach. Arguments: user id, seconds, addresses.
PROBE = """
import encodings.idna, os, select, socket, sys, time
os.setgroups([])
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
limit = time.monotonic() + float(sys.argv[2])
calls = {}
for address in sys.argv[3:]:
    call = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    call.setblocking(False)
    if call.connect_ex((address, 80)) == 115:
        calls[call] = address
while calls and (left := limit - time.monotonic()) > 0:
    for call in select.select([], list(calls), [], left)[1]:
        address = calls.pop(call)
        if not call.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            print(address)
"""
#: Sends a datagram in as many connections as its argument says.
FLOOD = """
import socket, sys
for number in range(int(sys.argv[1])):
    if number % 50_000 == 0:
        source = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    source.sendto(b"x", ("10.0.0.2", 1_024 + number % 50_000))
"""
#: Deletes the connections of sandboxes as a reset does.
DELETE = "from remuda.agent import connections; connections.delete_all()"
#: Connections that may be open, and that may begin within a moment.
OPEN_CONNECTIONS, BURST = 16_384, 10_000
#: Connections that begin per second at the permitted rate, times the seconds that a flood may take here.
SLACK = 500 * 20
#: Seconds to wait for a connection that must fail. Those that must succeed are tried until they do.
REFUSED_S = 0.4


@cache
def unsupported_reason() -> str:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    for name in ("iptables", "ip6tables", "ip"):
        if shutil.which(name) is None:
            return f"{name} is not installed (apt-get install iptables iproute2): the rules cannot be tested"
    probe = "ip link add name one type veth peer name two && iptables -t mangle -S && ip6tables -t mangle -S"
    done = subprocess.run(["unshare", "--net", "sh", "-c", probe], capture_output=True, text=True, check=False)
    return f"this kernel lacks network namespaces or iptables: {done.stderr.strip()}" if done.returncode else ""


class Network:
    """A network namespace, which exists as long as its process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid

    def run(self, *command: str) -> str:
        done = subprocess.run(
            ["nsenter", f"--net=/proc/{self.pid}/ns/net", *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
            env=os.environ,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def reaches(self, *, user: int = 0) -> set[str]:
        """The addresses that a user can reach, out of all."""
        return set(self.run(sys.executable, "-ISc", PROBE, str(user), str(REFUSED_S), *EVERY).split())

    def wait_until_reaches(self, addresses: set[str]) -> None:
        # Neighbour discovery in a new network takes a moment.
        limit = time.monotonic() + LIMIT_S
        while (reached := self.reaches()) != addresses:
            assert time.monotonic() < limit, reached


@contextmanager
def network() -> Iterator[Network]:
    with subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; exec sleep 1000"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        made = Network(process)
        made.run("ip", "link", "set", "lo", "up")
        try:
            yield made
        finally:
            process.kill()


class FirewallNetwork(NamedTuple):
    host: Network
    sandbox: Network
    #: A container in the sandbox, behind another address translation.
    container: Network


#: Commands that set up each network. The interface of the sandbox has the name that systemd-nspawn gives it.
HOST = """
ip link add name ens5 type veth peer name eth0 netns $cloud
ip link add name ve-remuda-1 type veth peer name host0 netns $sandbox
ip address add 10.0.0.1/24 dev ens5; ip address add fd00:1::1/64 dev ens5 nodad
ip address add 198.18.0.5/30 dev ve-remuda-1; ip address add fd00:2::1/64 dev ve-remuda-1 nodad
ip link set ens5 up; ip link set ve-remuda-1 up
ip route add 169.254.169.254 via 10.0.0.2; ip route add fd00:ec2::254 via fd00:1::2
sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
"""
CLOUD = """
ip address add 10.0.0.2/24 dev eth0; ip address add fd00:1::2/64 dev eth0 nodad
ip link set eth0 up
ip address add 169.254.169.254/32 dev lo; ip address add fd00:ec2::254/128 dev lo nodad
ip route add default via 10.0.0.1; ip route add default via fd00:1::1
"""
SANDBOX = """
ip address add 198.18.0.6/30 dev host0; ip address add fd00:2::2/64 dev host0 nodad
ip link set host0 up
ip route add default via 198.18.0.5; ip route add default via fd00:2::1
ip link add name docker0 type veth peer name eth0 netns $container
ip address add 172.17.0.1/24 dev docker0; ip address add fd00:3::1/64 dev docker0 nodad
ip link set docker0 up
iptables -t nat -I POSTROUTING -s 172.17.0.0/24 -j MASQUERADE
ip6tables -t nat -I POSTROUTING -s fd00:3::/64 -j MASQUERADE
sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
"""
CONTAINER = """
ip address add 172.17.0.2/24 dev eth0; ip address add fd00:3::2/64 dev eth0 nodad
ip link set eth0 up
ip route add default via 172.17.0.1; ip route add default via fd00:3::1
"""


@pytest.fixture
def machine() -> Iterator[FirewallNetwork]:
    """A machine without rules: all networks reach all servers."""
    with ExitStack() as stack:
        host, cloud, sandbox, container = (stack.enter_context(network()) for _ in range(4))
        host.run("sh", "-ec", f"cloud={cloud.pid} sandbox={sandbox.pid}\n{HOST}")
        cloud.run("sh", "-ec", CLOUD)
        sandbox.run("sh", "-ec", f"container={container.pid}\n{SANDBOX}")
        container.run("sh", "-ec", CONTAINER)
        for each in (host, cloud):
            enter = ["nsenter", f"--net=/proc/{each.pid}/ns/net", sys.executable, "-ISc", SERVICE]
            service = stack.enter_context(subprocess.Popen(enter, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
            stack.callback(service.kill)
            assert service.stdout is not None
            assert service.stdout.readline() == b"ready\n"
        yield FirewallNetwork(host, sandbox, container)


def set_rules(machine: FirewallNetwork, folder: Path) -> None:
    with fake_imds() as imds:
        box = BootstrapBox(folder, imds)
        box.preinstall()
        assert box.boot().returncode == 0
    # Twice: at boot and before the agent starts.
    for _ in range(2):
        machine.host.run(str(box.opt / "bin" / "remuda-firewall"))


@pytest.mark.namespaces
@pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason())
def test_sandboxes_reach_the_internet_but_neither_metadata_nor_machine(
    machine: FirewallNetwork, tmp_path: Path
) -> None:
    # Without the rules everything is reachable, so the checks below are meaningful.
    for each in machine:
        each.wait_until_reaches(EVERY)

    set_rules(machine, tmp_path)
    assert machine.host.reaches() == EVERY, "the agent needs the metadata service"
    machine.sandbox.wait_until_reaches(INTERNET)
    assert machine.sandbox.reaches(user=JOB_USER_ID) == INTERNET
    assert machine.container.reaches() == INTERNET
    # Other software starts later and inserts rules that accept before all existing rules.
    for command in ("iptables", "ip6tables"):
        machine.host.run(command, "-I", "FORWARD", "-j", "ACCEPT")
    assert machine.sandbox.reaches() == INTERNET
    assert machine.container.reaches() == INTERNET
    rules = machine.host.run("iptables", "-t", "mangle", "-S", "FORWARD")
    for action in ("-d 169.254.169.254/32 -j DROP", "-m connlimit", "hashlimit-name", "CONNMARK"):
        assert rules.count(action) == 1, "the rule is not duplicated"
    # A machine that forwards nothing by default, as docker configures it.
    for command in ("iptables", "ip6tables"):
        machine.host.run(command, "-D", "FORWARD", "-j", "ACCEPT")
        machine.host.run(command, "-P", "FORWARD", "DROP")
    assert machine.container.reaches() == INTERNET


@pytest.mark.namespaces
@pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason())
def test_sandbox_can_neither_fill_the_connection_table_nor_leave_connections(
    machine: FirewallNetwork, tmp_path: Path
) -> None:
    def tracked() -> int:
        return int(machine.host.run("cat", "/proc/sys/net/netfilter/nf_conntrack_count"))

    def flood(connections: int) -> int:
        machine.sandbox.run(sys.executable, "-ISc", FLOOD, str(connections))
        return tracked()

    set_rules(machine, tmp_path)
    assert BURST <= flood(BURST + 3 * SLACK) < BURST + SLACK, "many at once"
    # Without the limit of the rate, which would take longer to reach the number.
    rules = machine.host.run("iptables", "-t", "mangle", "-S").splitlines()
    (rate,) = (rule.split()[1:] for rule in rules if "hashlimit" in rule)
    machine.host.run("iptables", "-t", "mangle", "-D", *rate)
    assert OPEN_CONNECTIONS <= flood(2 * OPEN_CONNECTIONS) < OPEN_CONNECTIONS + SLACK, "many that are open"

    assert machine.sandbox.reaches() == set()
    assert machine.host.reaches() == EVERY, "the machine's own connections"
    own = tracked() - OPEN_CONNECTIONS
    assert own > 0
    machine.host.run(sys.executable, "-c", DELETE)
    assert tracked() <= own
    assert tracked() > 0, "only those of sandboxes are deleted"
    assert machine.sandbox.reaches() == INTERNET, "the next sandbox"
