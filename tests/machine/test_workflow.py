"""One boot: jobs with sudo, docker, services and cron, and reuse of their machine by another run."""

from __future__ import annotations

from tests.support.virtual_machine.jobs import IS_CLEAN, IS_CONFINED, TYPICAL
from tests.support.virtual_machine.stack import VirtualMachineStack


async def test_machine_boots_runs_a_typical_workflow_and_is_reused_clean(stack: VirtualMachineStack) -> None:
    await stack.refresh()
    async with stack.booting():
        assert (await stack.provision("1"))["created"] == 1
        ((name, machine),) = stack.virtual_machines.items()
        assert machine.run("systemctl", "is-active", "remuda-agent").stdout.strip() == "active"

        job = await stack.run_job("1", *TYPICAL)
        assert job.conclusion == "success", f"{job.log}\n{machine.console}"
        assert (await stack.release("1"))["released"] == [name], machine.console
        # Nothing of the job is on the machine itself.
        assert machine.shell("ls /usr/bin/job-package /etc/left /etc/cron.d/job").stdout == ""
        assert machine.run("pgrep", "-f", "sleep 10000").stdout == ""

        assert (await stack.provision("2"))["reused"] == 1
        job = await stack.run_job("2", IS_CLEAN, IS_CONFINED)
        assert job.conclusion == "success", f"{job.log}\n{machine.console}"
        assert (await stack.release("2"))["released"] == [name], machine.console
        assert len(machine.boots) == 1
