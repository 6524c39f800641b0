"""Restarts, reboots and ends of a machine: what systemd, the dead-man timer and the agent do on a real kernel."""

from __future__ import annotations

from remuda.domain.instance import RetireReason, State
from remuda.fake_github.client import JobView
from tests.support.virtual_machine.jobs import IS_CLEAN, LEAVE_TRACES
from tests.support.virtual_machine.machine import VirtualMachine
from tests.support.virtual_machine.stack import VirtualMachineStack

#: Enough for the steps between the end of a release and the stop of the agent.
IDLE_S = 120
#: A step that runs until the test calls `continue_job`.
WAIT_FOR_TEST = "echo begun; until [ -e /tmp/continue ]; do sleep 1; done; echo finished"


def agent_pid(machine: VirtualMachine) -> str:
    return machine.run("systemctl", "show", "--property=MainPID", "--value", "remuda-agent").stdout.strip()


def listeners(machine: VirtualMachine) -> set[str]:
    return set(machine.run("pgrep", "-f", "Runner.Listener run").stdout.split())


async def start_waiting_job(stack: VirtualMachineStack, run_id: str, *runs: str) -> JobView:
    """Start a job with the step `WAIT_FOR_TEST` and wait until its worker process runs."""
    job = await stack.start_job(run_id, *runs)

    async def worker_runs() -> bool:
        return stack.machine.run("pgrep", "-f", "Runner.Worker").returncode == 0

    await stack.until(worker_runs, "a worker process runs the job")
    return job


def continue_job(machine: VirtualMachine) -> None:
    """Let the step `WAIT_FOR_TEST` finish."""
    done = machine.shell("touch /proc/$(pgrep -f Runner.Worker | head -n 1)/root/tmp/continue")
    assert done.returncode == 0, done


def decisions(machine: VirtualMachine, state: State) -> int:
    """Number of changes of the record to this state that agents have read. A restarted agent counts again."""
    return machine.console.count(f"record state is {state}")


async def until_agent_reads(stack: VirtualMachineStack, state: State, before: int) -> None:
    """Wait until an agent reads a new state of the record. `before` is the earlier result of `decisions`."""

    async def has_read() -> bool:
        return decisions(stack.machine, state) > before

    await stack.until(has_read, f"the agent reads the state {state}")


def dead_man_timers(machine: VirtualMachine) -> list[str]:
    """The names of the timers that would power the machine off."""
    listing = machine.run("systemctl", "list-units", "--plain", "--no-legend", "remuda-dead-man-*.timer").stdout
    return [line.split()[0] for line in listing.splitlines()]


def terminations(stack: VirtualMachineStack) -> int:
    return stack.stack.ec2.requests().get("TerminateInstances", 0)


async def test_jobs_survive_a_killed_agent_and_may_reboot_their_sandbox(stack: VirtualMachineStack) -> None:
    await stack.refresh()
    async with stack.booting():
        assert (await stack.provision("1"))["created"] == 1
        ((name, machine),) = stack.virtual_machines.items()

        # The agent is killed in the middle of a job: the job goes on, and the next agent takes it over.
        job = await start_waiting_job(stack, "1", WAIT_FOR_TEST)
        killed, listening, read = agent_pid(machine), listeners(machine), decisions(machine, State.RUNNING)
        assert machine.run("kill", "-9", killed).returncode == 0
        await until_agent_reads(stack, State.RUNNING, read)
        assert agent_pid(machine) not in {"0", killed}
        assert listeners(machine) == listening
        continue_job(machine)
        job = await stack.finish_job(job)
        assert job.conclusion == "success", f"{job.log}\n{machine.console}"
        assert (await stack.release("1"))["released"] == [name], machine.console

        # A job reboots what it sees as its machine: only its sandbox ends. The next job gets another one.
        assert (await stack.provision("2"))["reused"] == 1
        await start_waiting_job(stack, "2", LEAVE_TRACES, WAIT_FOR_TEST, "sudo reboot; sleep 600")
        listening = listeners(machine)
        assert listening
        continue_job(machine)

        async def listener_is_gone() -> bool:
            return not listening & listeners(machine)

        await stack.until(listener_is_gone, "the reboot ends the listener")
        job = await stack.run_job("2", IS_CLEAN)
        assert job.conclusion == "success", f"{job.log}\n{machine.console}"
        assert (await stack.release("2"))["released"] == [name], machine.console
        assert len(machine.boots) == 1


async def test_agent_continues_after_a_reboot_and_terminates_its_instance(stack: VirtualMachineStack) -> None:
    await stack.refresh()
    async with stack.booting():
        assert (await stack.provision("1"))["created"] == 1
        ((name, machine),) = stack.virtual_machines.items()
        job = await stack.run_job("1", LEAVE_TRACES)
        assert job.conclusion == "success", f"{job.log}\n{machine.console}"

        # User data does not run again; the agent, the firewall and the dead-man timer start.
        read = decisions(machine, State.RUNNING)
        machine.run("systemctl", "--no-block", "reboot")
        machine.wait_for_boot(2)
        await until_agent_reads(stack, State.RUNNING, read)
        assert machine.run("systemctl", "is-active", "remuda-firewall").stdout.strip() == "active"
        # The agent has replaced the timer of the boot by its own.
        boot_timer = "remuda-dead-man-reboot.timer"
        started_at = machine.run("systemctl", "show", "--property=ActiveEnterTimestamp", "--value", boot_timer).stdout
        assert started_at.strip()
        (timer,) = dead_man_timers(machine)
        assert timer != boot_timer
        assert machine.console.count("remuda: agent started") == 1
        # The run goes on, in another sandbox.
        job = await stack.run_job("1", IS_CLEAN)
        assert job.conclusion == "success", f"{job.log}\n{machine.console}"

        # The agent terminates its instance at the end of the idle time. The default margin leaves it enough time to do
        # so before the dead-man timer, even under emulation.
        before = terminations(stack)
        await stack.refresh("--idle-time-sec", "5")
        assert (await stack.release("1"))["released"] == [name], machine.console

        async def terminated() -> bool:
            return terminations(stack) > before

        await stack.until(terminated, "the machine terminates its instance")


async def test_job_finishes_after_a_spot_notice_and_the_instance_is_terminated(stack: VirtualMachineStack) -> None:
    await stack.refresh()
    async with stack.booting():
        assert (await stack.provision("1", "--usage-class", "spot"))["created"] == 1
        ((name, machine),) = stack.virtual_machines.items()
        job = await start_waiting_job(stack, "1", WAIT_FOR_TEST)
        stack.runner.metadata[name].set_spot_notice("terminate", "2030-01-01T00:00:00Z")

        async def notice_is_reported() -> bool:
            report = await stack.report(name)
            return report is not None and bool(report.notice)

        await stack.until(notice_is_reported, "the agent reports the notice")
        assert (await stack.record(name)).state is State.RUNNING
        continue_job(machine)
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
        # The agent has set the timer to the end of the idle time.
        await until_agent_reads(stack, State.IDLE, 0)
        before = terminations(stack)
        assert machine.run("systemctl", "stop", "remuda-agent").returncode == 0

        async def is_off() -> bool:
            return not machine.is_on

        await stack.until(is_off, "the dead-man timer powers the machine off")
        assert terminations(stack) == before
        assert "Power down" in machine.console
