"""Start-up time of the command line, and memory of an agent."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.agents import BenchmarkMachine, TimedRunner
from benchmarks.environment import BenchmarkEnvironment, fresh_report, idle
from benchmarks.figures import Figure, FigureKind, Results, median
from benchmarks.floor import Floor
from remuda.adapters.system.clock import SystemClock

HELP_LIMIT_S = 0.25
AGENT_LIMIT_MB = 90.0
#: Seconds before an agent's memory is measured.
SETTLED_S = 4.0
COMMAND = Path(sys.executable).with_name("remuda")


async def run(environment: BenchmarkEnvironment, _floor: Floor) -> Results:
    await environment.clear()
    return Results(figures=(*starts(environment.size.starts), await memory(environment)))


def starts(times: int) -> list[Figure]:
    bare = median([_seconds([sys.executable, "-c", "pass"]) for _ in range(times)])
    figures = []
    for arguments in (["--help"], ["provision", "--help"]):
        name = f"remuda {' '.join(arguments)}"
        figures += [
            Figure(
                name=name,
                unit="s",
                predecessor="—",
                limit=HELP_LIMIT_S,
                measured=median([_seconds([str(COMMAND), *arguments]) for _ in range(times)]),
                kind=FigureKind.TIME,
                floor=bare,
                floor_with_waits=bare,
                samples=times,
                note="the floor is a Python interpreter without a program",
            ),
            Figure(
                name=f"{name}: AWS modules imported",
                unit="modules",
                predecessor="—",
                limit=0,
                measured=_aws_modules(arguments),
                kind=FigureKind.COUNT,
            ),
        ]
    return figures


def _seconds(command: Sequence[str]) -> float:
    clock = SystemClock()
    started = clock.monotonic()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return clock.monotonic() - started


def _aws_modules(arguments: Sequence[str]) -> int:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "remuda", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=True,
        text=True,
    )
    return sum("boto" in line.rpartition("|")[2] for line in done.stderr.splitlines())


# Memory -----------------------------------------------------------------------------------------------------------


async def memory(environment: BenchmarkEnvironment) -> Figure:
    """Memory of a process with the clients of an EC2 agent and an idle instance."""
    pool = await environment.pool()
    record = idle(1)
    await pool.write([record], [fresh_report(record)])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.footprint", pool.name, pool.prefix, record.instance_id),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env=dict(os.environ),
    )
    try:
        assert process.stdout is not None  # noqa: S101 - started with a pipe
        if not await process.stdout.readline():
            raise RuntimeError("the agent did not start")
        await asyncio.sleep(min(SETTLED_S, 2 * environment.size.starts))
        used = resident_mb(process.pid)
    finally:
        process.kill()
        await process.wait()
    return Figure(
        name="memory of an agent process",
        unit="MB",
        predecessor="—",
        limit=AGENT_LIMIT_MB,
        measured=used,
        kind=FigureKind.COUNT,
        note="resident memory of an idle agent with clients for DynamoDB, STS and the metadata service",
    )


def resident_mb(pid: int) -> float:
    """Return the peak resident memory."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return round(int(line.split()[1]) * 1024 / 1e6, 1)


async def run_agent(pool: str, prefix: str, instance_id: str) -> None:
    """Run an agent like `remuda agent` on EC2, with a fake machine and runner."""
    # Imported here, because the memory of these modules is measured.
    from remuda.adapters.aws.clients import AwsClients, config  # noqa: PLC0415
    from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore  # noqa: PLC0415
    from remuda.adapters.aws.imds import Imds, imds_endpoint  # noqa: PLC0415
    from remuda.adapters.system.clock import SystemIds  # noqa: PLC0415
    from remuda.agent.loop import Agent  # noqa: PLC0415
    from remuda.cli import agent_ec2  # noqa: PLC0415
    from remuda.ports.calls import CallCounter  # noqa: PLC0415
    from remuda.ports.event_log import SilentEventLog  # noqa: PLC0415

    clock = SystemClock()
    async with AwsClients() as clients:
        await clients.client("sts", "STS", config())
        imds = Imds(endpoint=imds_endpoint({}), clock=clock)
        store = DynamoInstanceStore(
            client=await clients.dynamodb(),
            table=f"remuda-{pool}",
            clock=clock,
            ids=SystemIds(),
            calls=CallCounter(),
            key_prefix=prefix,
        )
        sys.stdout.write(f"{agent_ec2.__name__} {imds is not None}\n")
        sys.stdout.flush()
        await Agent(
            store=store,
            machine=BenchmarkMachine(instance_id, pool),
            runner=TimedRunner(0.0, {}),
            clock=clock,
            ids=SystemIds(),
            event_log=SilentEventLog(),
            version="1",
        ).run()


if __name__ == "__main__":
    asyncio.run(run_agent(*sys.argv[1:]))
