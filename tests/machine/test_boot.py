"""A virtual machine boots with the real user data: systemd units, firewall and agent, and registers with the pool."""

from __future__ import annotations

from tests.support.virtual_machine.stack import VirtualMachineStack


async def test_machine_boots_runs_a_job_and_is_reused(stack: VirtualMachineStack) -> None:
    await stack.refresh()
    async with stack.booting():
        assert (await stack.provision("1"))["created"] == 1
        ((name, machine),) = stack.virtual_machines.items()
        job = await stack.run_job("1", "echo hello; id; uname -a")
        assert job.conclusion == "success", f"{job} {machine.console}"
        released = await stack.remuda("release", "--run-id", "1")
        assert released["released"] == [name], machine.console
        assert (await stack.provision("2"))["reused"] == 1
