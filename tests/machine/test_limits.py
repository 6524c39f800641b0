"""What jobs can take of a machine's connection table, disk and limits, with the kernel and the disks of a machine."""

from __future__ import annotations

from remuda.domain.thresholds import HEARTBEAT_DEAD_AFTER_S
from tests.support.virtual_machine.heartbeat import pauses_of_heartbeat
from tests.support.virtual_machine.jobs import IS_CLEAN
from tests.support.virtual_machine.stack import VirtualMachineStack

#: More connections than a small machine's table holds by default.
FLOOD = """
python3 - <<'END'
import socket
for number in range(80_000):
    if number % 50_000 == 0:
        source = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        source.sendto(b"x", ("169.254.0.2", 1_024 + number % 50_000))
    except OSError:
        pass
END
"""
#: Connections that may be open, plus those that may begin within the minutes of the test.
CONNECTIONS = 16_384 + 500 * 120
#: A disk with project quotas, and a folder in it with a limit of 50 MiB and 500 files, which has the upper layer of an
#: overlay as a sandbox's folder has. An ordinary user writes to both.
QUOTAS = """
set -e
truncate -s 200M /root/disk
mkfs.ext4 -q -O quota,project -E quotatype=prjquota /root/disk
mkdir /root/mounted
mount -o loop,prjquota /root/disk /root/mounted
mkdir -m 777 /root/mounted/limited /root/mounted/other
chmod 755 /root /root/mounted
export PYTHONPATH=/opt/remuda/lib
cat >/root/quotas.py <<'END'
import sys
from pathlib import Path
from remuda.agent import mounts, quotas
from remuda.agent.disk_space import Space
limited, other = Path("/root/mounted/limited"), Path("/root/mounted/other")
if sys.argv[1:]:
    assert quotas.usage(limited) is None
    assert quotas.limit(limited, 589_824, Space(bytes=50 * 1024**2, files=500))
    assert not quotas.limit(Path("/var/lib/remuda"), 589_824, Space(bytes=1, files=1))
    layers = {name: limited / name for name in ("upper", "work")}
    lower, overlay = Path("/root/lower"), Path("/root/overlay")
    for folder in (*layers.values(), lower, overlay):
        folder.mkdir()
    layers["upper"].chmod(0o777)
    mounts.mount_overlay(overlay, lower=lower, **layers)
taken = quotas.usage(limited)
assert quotas.usage(other) is None
print(taken.bytes, taken.files)
END
python3 /root/quotas.py limit
as_user() { setpriv --reuid=1000 --regid=1000 --clear-groups "$@"; }
for folder in /root/mounted/limited /root/overlay; do
  ! as_user sh -c "head -c 100M /dev/zero >$folder/large"
  python3 /root/quotas.py
  as_user rm $folder/large
  as_user sh -c "mkdir $folder/many && cd $folder/many && seq 1000 | xargs touch || true"
  python3 /root/quotas.py
  as_user rm -r $folder/many
done
as_user sh -c 'head -c 100M /dev/zero >/root/mounted/other/large'
"""
#: Takes what counts for root of the machine, or for all networks together, and keeps it: the address of each neighbour
#: changes, so that none gets old.
TAKE_LIMITS = """
cat >/tmp/take.py <<'END'
import ctypes, os, resource, signal
libc = ctypes.CDLL(None)
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
kept = [libc.inotify_init() for _ in range(1_000)]
while len(kept) < 21_000 and not libc.unshare(0x04000000):
    kept.append(os.open("/proc/self/ns/uts", os.O_RDONLY))
open("/tmp/taken", "w").close()
signal.pause()
END
cat >/tmp/neighbours <<'END'
ip link add d0 type veth peer name d1; ip link set d0 up; ip address add 10.0.0.1/8 dev d0
for mac in 1 2; do
  for i in $(seq 4000); do
    echo "neigh replace 10.1.$((i / 250)).$((i % 250 + 1)) lladdr 02:00:00:00:00:0$mac dev d0 nud reachable"
  done >/tmp/$mac
done
while :; do for mac in 1 2; do ip -force -batch /tmp/$mac; done; done
END
sudo setsid python3 -IS /tmp/take.py >/dev/null 2>&1 </dev/null &
sudo setsid bash /tmp/neighbours >/dev/null 2>&1 </dev/null &
until [ -e /tmp/taken ]; do sleep 1; done
sleep 60
"""
#: What the machine itself needs of them.
NEED_LIMITS = """
set -e
python3 -ISc 'import ctypes, sys; sys.exit(ctypes.CDLL(None).inotify_init() < 0)'
unshare --uts true
ip link add need0 type veth peer name need1
ip neigh add 203.0.113.1 lladdr 02:00:00:00:00:01 dev need0 nud reachable
ip link del need0
"""


async def test_connections_and_quotas(stack: VirtualMachineStack) -> None:
    await stack.refresh()
    async with stack.booting():
        assert (await stack.provision("1"))["created"] == 1
        ((name, machine),) = stack.virtual_machines.items()

        def tracked() -> int:
            return int(machine.run("cat", "/proc/sys/net/netfilter/nf_conntrack_count").stdout)

        assert int(machine.run("cat", "/proc/sys/net/netfilter/nf_conntrack_max").stdout) >= 262_144
        job = await stack.run_job("1", FLOOD)
        assert job.conclusion == "success", f"{job.log}\n{machine.console}"
        assert 1_000 < tracked() < CONNECTIONS
        assert (await stack.release("1"))["released"] == [name], machine.console
        assert tracked() < 500, "the flood is gone"

        done = machine.shell(QUOTAS)
        assert done.returncode == 0, done
        empty, *filled = ([int(word) for word in line.split()] for line in done.stdout.splitlines())
        assert empty[1] < 10
        assert len(filled) == 4
        for size, _ in filled[::2]:
            assert 40 * 1024**2 < size <= 50 * 1024**2
        assert [files for _, files in filled[1::2]] == [500, 500]


async def test_limits_that_the_machine_shares_with_jobs(stack: VirtualMachineStack) -> None:
    await stack.refresh()
    async with stack.booting():
        assert (await stack.provision("1"))["created"] == 1
        ((name, machine),) = stack.virtual_machines.items()
        async with pauses_of_heartbeat(stack, name) as pauses:
            job = await stack.run_job("1", TAKE_LIMITS)
            assert job.conclusion == "success", f"{job.log}\n{machine.console}"
            needs = machine.shell(NEED_LIMITS)
            assert needs.returncode == 0, needs
            released = await stack.release("1")
        assert released["released"] == [name], machine.console
        assert max(pauses) < HEARTBEAT_DEAD_AFTER_S, (pauses, machine.console)
        assert (await stack.provision("2"))["reused"] == 1
        job = await stack.run_job("2", IS_CLEAN)
        assert job.conclusion == "success", f"{job.log}\n{machine.console}"
