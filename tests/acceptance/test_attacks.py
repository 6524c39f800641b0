"""Attacks of one run on its machine and on the next run there, as root of the sandbox.

The table in the docs lists the outcomes of this test.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from remuda.agent.mounts import ID_COUNT
from remuda.agent.sandbox import FIRST_ID
from tests.support import attacks, blocked_readers
from tests.support.attacks import ESCAPES, PERSISTENT, Attack, AttackOutcome
from tests.support.aws.ec2_machines import LIMIT_S, MachineStack
from tests.support.namespace_machine.machine import NamespaceMachine
from tests.support.namespace_machine.requirements import unsupported_reason
from tests.support.virtual_time import until

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason()),
    pytest.mark.timeout(900),
]

TABLE = Path(__file__).parents[2] / "docs" / "reference" / "attacks.md"
BEGIN, END = "<!-- generated: attacks -->", "<!-- end of attacks -->"
#: Set by `make attacks`: write the outcomes to the docs instead of comparing them.
WRITE = "REMUDA_WRITE_ATTACKS"
STORAGE = "/var/lib/remuda/sandboxes"
#: MiB by which the storage of sandboxes may grow from one idle sandbox to the next.
GROWTH_MIB = 30


@pytest.fixture(autouse=True)
def no_process_outlives_its_machine() -> Iterator[None]:
    yield
    subprocess.run(["unshare", "--mount", "sh", "-c", blocked_readers.ABORT], check=True)


async def exit_codes(stack: MachineStack, machine: NamespaceMachine, run_id: str, step: str) -> dict[str, int]:
    """Run a job and return the exit code per attack."""
    job = await stack.run_job(run_id, step)
    assert job.conclusion == "success", f"{job} {machine.console}"
    return attacks.parse_exit_codes(job.log)


def names(codes: Mapping[str, int], among: Iterable[Attack], *, succeeded: bool) -> list[str]:
    return [attack.name for attack in among if attack.name in codes and (codes[attack.name] == 0) == succeeded]


def state_of_kernel(machine: NamespaceMachine) -> str:
    """Kernel state of the machine that a job must not change."""
    settings = "/proc/sys/kernel/core_pattern /proc/sys/kernel/modprobe /proc/sys/kernel/hostname /proc/swaps"
    script = (
        f"cat {settings}; cut -d' ' -f1 /proc/modules | sort; iptables-save | grep ^-A; ipcs | grep ^0x; ls /dev/mqueue"
    )
    return machine.run("sh", "-c", script).stdout


def storage_mib(machine: NamespaceMachine) -> int:
    return int(machine.run("du", "-smx", STORAGE).stdout.split()[0])


def left_of_sandbox(machine: NamespaceMachine, number: int) -> list[str]:
    """Remains of a sandbox on the machine: processes, mounts, network, files, cgroups, connections."""
    first = FIRST_ID + number * ID_COUNT
    ids = range(first, first + ID_COUNT)
    processes = [
        line for line in machine.run("ps", "-eo", "uid=,args=").stdout.splitlines() if int(line.split()[0]) in ids
    ]
    mounts = [
        line
        for line in machine.run("cat", "/proc/self/mountinfo").stdout.splitlines()
        if f"{STORAGE}/{number}/" in line
    ]
    networks = [name for name in machine.run("ls", "/sys/class/net").stdout.split() if name == f"ve-remuda-{number}"]
    files = [name for name in machine.run("ls", STORAGE).stdout.split() if name == str(number)]
    cgroups = machine.run("find", "/sys/fs/cgroup/remuda", "-name", f"remuda-{number}").stdout.split()
    # Of any sandbox: no other one has had a connection.
    connections = machine.run("grep", "-F", " src=198.18.", "/proc/net/nf_conntrack").stdout.splitlines()
    return [*processes, *mounts, *networks, *files, *cgroups, *connections]


async def test_next_run_sees_no_attack_and_none_escapes(machine_stack: MachineStack) -> None:
    await machine_stack.refresh(REMUDA_MARGIN_SEC="0.5")
    async with machine_stack.booting():
        assert (await machine_stack.provision("1"))["created"] == 1
        ((name, machine),) = machine_stack.machines.items()
        await until(lambda: machine.has_sandbox, within_s=LIMIT_S)
        kernel, disk = state_of_kernel(machine), storage_mib(machine)

        attempted = await exit_codes(machine_stack, machine, "1", attacks.plant_step(PERSISTENT))
        assert names(attempted, PERSISTENT, succeeded=False) == [], "these attacks do not work"
        supported = tuple(attack for attack in PERSISTENT if attack.name in attempted)
        # Without a reset, the checks find all of them.
        seen = await exit_codes(machine_stack, machine, "1", attacks.look_step(supported))
        assert names(seen, supported, succeeded=False) == [], "the checks do not find these"
        assert storage_mib(machine) >= disk + 64

        tried = await exit_codes(machine_stack, machine, "1", attacks.plant_step(ESCAPES))
        assert names(tried, ESCAPES, succeeded=True) == [], "jobs can do these"

        assert (await machine_stack.remuda("release", "--run-id", "1"))["released"] == [name], machine.console
        assert left_of_sandbox(machine, 1) == []
        assert state_of_kernel(machine) == kernel
        await until(lambda: machine.run("ls", f"{STORAGE}/trash").stdout == "", within_s=LIMIT_S)

        assert (await machine_stack.provision("2"))["reused"] == 1
        seen = await exit_codes(machine_stack, machine, "2", attacks.look_step(PERSISTENT))
        assert len(seen) == len(PERSISTENT)
        assert names(seen, PERSISTENT, succeeded=True) == [], "the next run sees these"
        assert storage_mib(machine) <= disk + GROWTH_MIB
    outcomes = {attack.name: AttackOutcome.REMOVED if seen[attack.name] else AttackOutcome.SEEN for attack in supported}
    outcomes |= {
        attack.name: AttackOutcome.REFUSED if tried[attack.name] else AttackOutcome.ESCAPED
        for attack in ESCAPES
        if attack.name in tried
    }
    compare_with_docs(outcomes)


def compare_with_docs(outcomes: Mapping[str, AttackOutcome]) -> None:
    """Attacks that this computer does not support keep their row in the docs."""
    text = TABLE.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    old, _, tail = rest.partition(END)
    every = {attack.name: outcome_in_docs(old, attack.name) for group in attacks.GROUPS.values() for attack in group}
    fresh = f"{head}{BEGIN}\n\n{attacks.table({**every, **outcomes})}\n\n{END}{tail}"
    if os.environ.get(WRITE):
        TABLE.write_text(fresh, encoding="utf-8")
    assert TABLE.read_text(encoding="utf-8") == fresh, "the docs differ; run make attacks"


def outcome_in_docs(rows: str, name: str) -> AttackOutcome:
    for row in rows.splitlines():
        if row.startswith(f"| {name} |"):
            return AttackOutcome(row.rpartition(" | ")[2].removesuffix(" |"))
    return AttackOutcome.NOT_SUPPORTED
