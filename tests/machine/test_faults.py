"""Restarts, reboots and ends of a machine: what systemd, the dead-man timer and the agent do on a real kernel."""

from __future__ import annotations

from remuda.domain.instance import RetireReason, State
from tests.support.virtual_machine.jobs import IS_CLEAN, LEAVE_TRACES
from tests.support.virtual_machine.machine import VirtualMachine
from tests.support.virtual_machine.stack import VirtualMachineStack

#: Enough for the steps between the end of a release and the stop of the agent.
IDLE_S = 90


def agent_pid(machine: VirtualMachine) -> str:
    return machine.run("systemctl", "show", "--property=MainPID", "--value", "remuda-agent").stdout.strip()


def terminations(stack: VirtualMachineStack) -> int:
    return stack.stack.ec2.requests().get("TerminateInstances", 0)


async def test_machine_survives_a_killed_agent_and_reboots_and_terminates_itself(stack: VirtualMachineStack) -> None:
    await stack.refresh()
    async with stack.booting():
        assert (await stack.provision("1"))["created"] == 1
        ((name, machine),) = stack.virtual_machines.items()

        # The agent is killed in the middle of a job: the job goes on, and the next agent takes it over.
        job = await stack.start_job("1", "sleep 30; echo finished")
        killed = agent_pid(machine)
        assert machine.run("kill", "-9", killed).returncode == 0
        job = await stack.finish_job(job)
        assert job.conclusion == "success", f"{job.log}\n{machine.console}"

        async def next_agent_runs() -> bool:
            return agent_pid(machine) not in {"0", killed}

        await stack.until(next_agent_runs, "systemd starts the next agent")
        assert (await stack.release("1"))["released"] == [name], machine.console

        # A job reboots what it sees as its machine: only its sandbox restarts.
        assert (await stack.provision("2"))["reused"] == 1
        listener = machine.run("pgrep", "-f", "Runner.Listener run").stdout.split()
        await stack.start_job("2", LEAVE_TRACES, "sudo reboot; sleep 600")

        async def listener_is_gone() -> bool:
            return not set(listener) & set(machine.run("pgrep", "-f", "Runner.Listener run").stdout.split())

        await stack.until(listener_is_gone, "the reboot ends the listener")
        assert (await stack.release("2"))["released"] == [name], machine.console
        assert len(machine.boots) == 1

        # The machine reboots: user data does not run again; the agent, the firewall and the dead-man timer start.
        machine.run("systemctl", "--no-block", "reboot")
        machine.wait_for_boot(2)

        async def agent_runs() -> bool:
            return machine.run("systemctl", "is-active", "remuda-agent").stdout.strip() == "active"

        await stack.until(agent_runs, "the agent starts after a reboot")
        assert machine.run("systemctl", "is-active", "remuda-dead-man-reboot.timer").stdout.strip() == "active"
        assert machine.run("systemctl", "is-active", "remuda-firewall").stdout.strip() == "active"
        assert machine.console.count("remuda: agent started") == 1
        assert (await stack.provision("3"))["reused"] == 1
        job = await stack.run_job("3", IS_CLEAN)
        assert job.conclusion == "success", f"{job.log}\n{machine.console}"

        # An unused machine terminates its instance itself, with the permissions of its role.
        before = terminations(stack)
        await stack.refresh("--idle-time-sec", "5", REMUDA_MARGIN_SEC="0.5")
        assert (await stack.release("3"))["released"] == [name], machine.console

        async def terminated() -> bool:
            return terminations(stack) > before

        await stack.until(terminated, "the machine terminates its instance")


async def test_job_finishes_after_a_spot_notice_and_the_instance_is_terminated(stack: VirtualMachineStack) -> None:
    await stack.refresh()
    async with stack.booting():
        assert (await stack.provision("1", "--usage-class", "spot"))["created"] == 1
        ((name, machine),) = stack.virtual_machines.items()
        job = await stack.start_job("1", "sleep 30; echo finished")
        stack.runner.metadata[name].set_spot_notice("terminate", "2030-01-01T00:00:00Z")

        async def notice_is_reported() -> bool:
            report = await stack.report(name)
            return report is not None and bool(report.notice)

        await stack.until(notice_is_reported, "the agent reports the notice")
        job = await stack.finish_job(job)
        assert job.conclusion == "success", f"{job.log}\n{machine.console}"
        await stack.release("1")
        record = await stack.record(name)
        assert record.state in {State.TERMINATING, State.TERMINATED}
        assert record.retire_reason is RetireReason.SPOT_NOTICE


async def test_dead_man_timer_powers_off_a_machine_without_agent(stack: VirtualMachineStack) -> None:
    await stack.refresh("--idle-time-sec", str(IDLE_S), REMUDA_MARGIN_SEC="0.5")
    async with stack.booting():
        assert (await stack.provision("1"))["created"] == 1
        ((name, machine),) = stack.virtual_machines.items()
        assert (await stack.release("1"))["released"] == [name], machine.console
        before = terminations(stack)
        assert machine.run("systemctl", "mask", "--runtime", "--now", "remuda-agent").returncode == 0

        async def is_off() -> bool:
            return not machine.is_on

        await stack.until(is_off, "the dead-man timer powers the machine off")
        assert terminations(stack) == before
        assert "Power down" in machine.console
