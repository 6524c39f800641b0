"""The kernel of a machine after jobs: which modules it has loaded for them, and what it ran when they crashed."""

from __future__ import annotations

from tests.support.virtual_machine.jobs import DOCKER
from tests.support.virtual_machine.machine import VirtualMachine
from tests.support.virtual_machine.stack import VirtualMachineStack

#: As services for crash reports do: the kernel starts a program of the machine for each process that crashes.
SCRIPT = """#!/bin/sh
printf '#!/bin/sh\\ntouch /run/dumped\\n' >/usr/local/bin/dump
chmod 755 /usr/local/bin/dump
echo '|/usr/local/bin/dump' >/proc/sys/kernel/core_pattern
"""
#: Everything by which root of a user namespace makes the kernel load a module. All of it may fail.
LOAD_MODULES = """
set +e
for system in nfs cifs btrfs vfat iso9660 9p udf; do sudo mount -t $system none /mnt; done
for kind in dummy wireguard gre gretap sit ipip vti bond team ifb vcan macsec geneve; do
  sudo ip link add type $kind
done
for kind in fq_codel sfq netem htb cake; do sudo tc qdisc add dev host0 root $kind; done
sudo python3 -ISc '
import socket
for family in range(46):
    for kind in (1, 2, 3, 5):
        for protocol in (0, 1, 132):
            try: socket.socket(family, kind, protocol)
            except OSError: pass
'
true
"""
#: The limits of the job and of the service differ, which does not matter to a program that the kernel starts.
CRASH = """
set +e
sh -c 'kill -SEGV $$'
sudo systemd-run --quiet --wait -p LimitCORE=infinity python3 -ISc 'import os; os.abort()'
true
"""


def modules(machine: VirtualMachine) -> list[str]:
    return sorted(line.split()[0] for line in machine.run("cat", "/proc/modules").stdout.splitlines())


async def test_jobs_load_no_modules_and_start_no_programs(stack: VirtualMachineStack) -> None:
    await stack.refresh("--pre-runner-script", SCRIPT)
    async with stack.booting():
        assert (await stack.provision("1"))["created"] == 1
        ((name, machine),) = stack.virtual_machines.items()
        loaded, interfaces = modules(machine), machine.run("ls", "/sys/class/net").stdout
        assert {"bridge", "overlay", "veth"} <= set(loaded)
        job = await stack.run_job("1", LOAD_MODULES)
        assert job.conclusion == "success", f"{job.log}\n{machine.console}"
        assert modules(machine) == loaded
        assert machine.run("ls", "/sys/class/net").stdout == interfaces
        # The modules that docker needs were there before.
        job = await stack.run_job("1", CRASH, DOCKER)
        assert job.conclusion == "success", f"{job.log}\n{machine.console}"
        assert machine.run("ls", "/run/dumped").returncode != 0
        assert machine.run("cat", "/proc/sys/kernel/core_pattern").stdout == "core\n"
        assert (await stack.release("1"))["released"] == [name], machine.console
