"""Memory that no cgroup counts: what remains of a machine when a job takes it, and when nothing stops the job."""

from __future__ import annotations

import re

from remuda.domain.instance import State
from remuda.domain.thresholds import HEARTBEAT_DEAD_AFTER_S
from tests.support.virtual_machine.heartbeat import pauses_of_heartbeat
from tests.support.virtual_machine.jobs import IS_CLEAN
from tests.support.virtual_machine.machine import VirtualMachine
from tests.support.virtual_machine.stack import VirtualMachineStack

#: Takes 4.5 MB of the kernel's memory per interface, for which no process pays: 3.1 GB of 2 GB.
TAKE_MEMORY = """
take_memory() {
  for i in $(seq 350); do
    ip link add "a$i" type veth peer name "b$i" || return
    for name in "a$i" "b$i"; do tc qdisc add dev "$name" root fq_codel flows 65536 || return; done
  done
}
"""
#: After the job, whose end GitHub must see before the runner can be removed.
ATTACK = f"""cat >/tmp/attack <<'END'
{TAKE_MEMORY}
sleep 10; take_memory; sleep 1000
END
sudo setsid bash /tmp/attack >/dev/null 2>&1 </dev/null &
"""
#: The network exists until somebody removes it, so that the end of a process frees nothing.
EXHAUST = f"""{TAKE_MEMORY}
export -f take_memory
ip netns add exhausted
nsenter --net=/run/netns/exhausted bash -c 'take_memory; sleep 1000' >/dev/null 2>&1 </dev/null &
"""
#: Writes the available memory to the console, without a new process.
WATCH_MEMORY = r"""
cat >/run/watch <<'END'
mkfifo /run/never
exec 3<>/run/never
while :; do
  while read -r name value _; do
    [ "$name" != MemAvailable: ] || echo "<1>available: $value" >/dev/kmsg
  done </proc/meminfo
  read -rt 2 <&3
done
END
setsid bash /run/watch >/dev/null 2>&1 </dev/null &
"""
AVAILABLE = re.compile(r"available: (\d+)")
#: KiB of available memory with which the machine counts as one without.
EXHAUSTED = 64 * 1024
#: Enough for the steps between the end of a release and the exhausted memory, also on a busy computer.
IDLE_S = 300


def guard_pid(machine: VirtualMachine) -> str:
    return machine.run("pgrep", "-f", "agent/guard.py").stdout.strip()


def agent_pid(machine: VirtualMachine) -> str:
    return machine.run("systemctl", "show", "--property=MainPID", "--value", "remuda-agent").stdout.strip()


async def test_job_that_takes_the_memory_of_the_kernel_ends_and_the_machine_goes_on(
    stack: VirtualMachineStack,
) -> None:
    await stack.refresh()
    async with stack.booting():
        assert (await stack.provision("1"))["created"] == 1
        ((name, machine),) = stack.virtual_machines.items()
        guard = f"/proc/{guard_pid(machine)}"
        assert machine.run("cat", f"{guard}/oom_score_adj").stdout.strip() == "-1000"
        assert int(machine.shell(f"grep ^VmLck: {guard}/status").stdout.split()[1]) > 1000

        async with pauses_of_heartbeat(stack, name) as pauses:
            job = await stack.run_job("1", ATTACK)
            assert job.conclusion == "success", f"{job.log}\n{machine.console}"

            async def is_killed() -> bool:
                return "memory-low" in machine.console

            await stack.until(is_killed, "the guard kills the sandbox")
            released = await stack.release("1")
        assert released["released"] == [name], machine.console
        assert max(pauses) < HEARTBEAT_DEAD_AFTER_S, (pauses, machine.console)
        assert (await stack.provision("2"))["reused"] == 1
        job = await stack.run_job("2", IS_CLEAN)
        assert job.conclusion == "success", f"{job.log}\n{machine.console}"
        assert "Out of memory: Killed process" not in machine.console
        assert len(machine.boots) == 1

        # systemd starts an agent again that no longer reports.
        stopped = agent_pid(machine)
        assert machine.run("kill", "-STOP", stopped).returncode == 0

        async def is_another() -> bool:
            return agent_pid(machine) not in {"0", stopped}

        await stack.until(is_another, "systemd restarts the agent")


async def test_dead_man_timer_powers_off_a_machine_without_memory(stack: VirtualMachineStack) -> None:
    await stack.refresh("--idle-time-sec", str(IDLE_S), REMUDA_MARGIN_SEC="0.5")
    async with stack.booting():
        assert (await stack.provision("1"))["created"] == 1
        ((name, machine),) = stack.virtual_machines.items()
        assert (await stack.release("1"))["released"] == [name], machine.console

        async def is_idle() -> bool:
            return f"record state is {State.IDLE}" in machine.console

        await stack.until(is_idle, "the agent sets the timer to the end of the idle time")
        # Nothing stops what follows.
        assert machine.run("systemctl", "stop", "remuda-agent").returncode == 0
        assert machine.run("kill", "-KILL", guard_pid(machine)).returncode == 0
        assert machine.shell(WATCH_MEMORY).returncode == 0
        assert machine.shell(EXHAUST).returncode == 0

        async def is_off() -> bool:
            return not machine.is_on

        await stack.until(is_off, "the dead-man timer powers the machine off")
        assert "Power down" in machine.console
        assert min(map(int, AVAILABLE.findall(machine.console))) < EXHAUSTED, machine.console
