"""The firewall of machines on a real kernel, with network namespaces for machine, metadata service and container."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest

from tests.support.user_data import JOB_USER, BootstrapBox, fake_imds

V4, V6 = "169.254.169.254", "fd00:ec2::254"
LIMIT_S = 120
JOB = pwd.getpwnam(JOB_USER).pw_uid
#: First and last of two ranges of subordinate ids of the job user; and an id outside them.
SUBORDINATE = (200_000, 265_535, 300_000, 300_000)
OTHER = 199_999
SUBUID = f"other:100000:50\n{JOB_USER}:200000:65536\n{JOB_USER}:x:1\n{JOB}:300000:1\n{JOB_USER}:5:0\n"
#: Accepts connections on both addresses.
SERVICE = """
import socket, sys, time
servers = [socket.create_server((address, 80), family=family, backlog=100)
         for family, address in ((socket.AF_INET, sys.argv[1]), (socket.AF_INET6, sys.argv[2]))]
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
#: Seconds to wait for a connection that must succeed, and for one that must fail.
REACHED_S, REFUSED_S = 60, 0.4


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

    def run(self, *command: str, mounts: str = "") -> str:
        inside = ["nsenter", f"--net=/proc/{self.pid}/ns/net"]
        # In a mount namespace, in which files can be replaced.
        with_mounts = ["unshare", "--mount", "sh", "-ec", f'{mounts}; exec "$@"', "sh"] if mounts else []
        done = subprocess.run(
            [*inside, *with_mounts, *command],
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
            env=os.environ,
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def reaches(self, uid: int = 0, within_s: float = REACHED_S) -> set[str]:
        return set(self.run(sys.executable, "-ISc", PROBE, str(uid), str(within_s), V4, V6).split())


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


#: Commands that set up each network. The machine connects its metadata service and a container.
HOST = f"""
ip link add name ens5 type veth peer name eth0 netns $cloud
ip link add name docker0 type veth peer name eth0 netns $container
ip address add 10.0.0.1/24 dev ens5; ip address add fd00:1::1/64 dev ens5 nodad
ip address add 172.17.0.1/24 dev docker0; ip address add fd00:2::1/64 dev docker0 nodad
ip link set ens5 up; ip link set docker0 up
ip route add {V4} via 10.0.0.2; ip route add {V6} via fd00:1::2
sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
"""
CLOUD = f"""
ip address add 10.0.0.2/24 dev eth0; ip address add fd00:1::2/64 dev eth0 nodad
ip link set eth0 up
ip address add {V4}/32 dev lo; ip address add {V6}/128 dev lo nodad
ip route add default via 10.0.0.1; ip route add default via fd00:1::1
"""
CONTAINER = """
ip address add 172.17.0.2/24 dev eth0; ip address add fd00:2::2/64 dev eth0 nodad
ip link set eth0 up
ip route add default via 172.17.0.1; ip route add default via fd00:2::1
"""


@pytest.fixture
def machine() -> Iterator[tuple[Network, Network]]:
    """A machine that can reach its metadata service, and a container on it."""
    with ExitStack() as stack:
        host, cloud, container = (stack.enter_context(network()) for _ in range(3))
        host.run("sh", "-ec", f"cloud={cloud.pid} container={container.pid}\n{HOST}")
        cloud.run("sh", "-ec", CLOUD)
        container.run("sh", "-ec", CONTAINER)
        enter = ["nsenter", f"--net=/proc/{cloud.pid}/ns/net", sys.executable, "-ISc", SERVICE, V4, V6]
        service = stack.enter_context(subprocess.Popen(enter, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
        stack.callback(service.kill)
        assert service.stdout is not None
        assert service.stdout.readline() == b"ready\n"
        # Neighbour discovery in a new network takes a moment.
        limit = time.monotonic() + LIMIT_S
        while host.reaches() != {V4, V6} or container.reaches() != {V4, V6}:
            assert time.monotonic() < limit, "without rules all must reach it"
        yield host, container


@pytest.mark.namespaces
@pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason())
def test_jobs_and_containers_cannot_reach_the_metadata_service(
    machine: tuple[Network, Network], tmp_path: Path
) -> None:
    host, container = machine
    both = {V4, V6}
    # Without the rules all users can reach it, so the checks below are meaningful.
    assert [host.reaches(uid) for uid in (JOB, SUBORDINATE[0], OTHER)] == [both] * 3

    with fake_imds() as imds:
        box = BootstrapBox(tmp_path, imds)
        box.preinstall()
        assert box.boot().returncode == 0
    subuid = tmp_path / "subuid"
    subuid.write_text(SUBUID)
    # Twice: at boot and before the agent starts.
    for _ in range(2):
        host.run(str(box.opt / "bin" / "remuda-firewall"), mounts=f"mount --bind {subuid} /etc/subuid")

    assert host.reaches() == both, "the agent needs it"
    assert host.reaches(OTHER) == both
    assert [host.reaches(uid, REFUSED_S) for uid in (JOB, *SUBORDINATE)] == [set()] * 5
    assert container.reaches(within_s=REFUSED_S) == set()
    # Container software starts later and inserts rules that accept before all existing rules.
    for command in ("iptables", "ip6tables"):
        host.run(command, "-I", "FORWARD", "-j", "ACCEPT")
    assert container.reaches(within_s=REFUSED_S) == set()
    assert host.run("iptables", "-t", "mangle", "-S", "FORWARD").count("-j DROP") == 1, "the rule is not duplicated"
