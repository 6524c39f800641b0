"""Start-up time of the command line, and memory of an agent."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.agents import BenchmarkMachine, agent, agent_store
from benchmarks.environment import BenchmarkEnvironment, fresh_report, idle
from benchmarks.figures import Figure, Results, median, timed
from benchmarks.floor import Floor
from benchmarks.json_lines import json_process, respond
from remuda.adapters.aws.clients import AwsClients, config
from remuda.adapters.aws.imds import Imds, imds_endpoint
from remuda.adapters.system.clock import SystemClock
from remuda.cli import agent_ec2

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
            timed(
                *(name, [_seconds([str(COMMAND), *arguments]) for _ in range(times)]),
                limit=HELP_LIMIT_S,
                floor=bare,
                note="the floor is a Python interpreter without a program",
            ),
            Figure(f"{name}: AWS modules imported", "modules", _aws_modules(arguments), limit=0),
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
    async with json_process("benchmarks.footprint", pool.name, pool.prefix, record.instance_id) as process:
        await asyncio.sleep(min(SETTLED_S, 2 * environment.size.starts))
        used = resident_mb(process.pid)
    return Figure(
        *("memory of an agent process", "MB", used),
        limit=AGENT_LIMIT_MB,
        note="resident memory of an idle agent with clients for DynamoDB, STS and the metadata service",
    )


def resident_mb(pid: int) -> float:
    """Return the peak resident memory."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return round(int(line.split()[1]) * 1024 / 1e6, 1)


async def run_agent(pool: str, prefix: str, instance_id: str) -> None:
    """Run an agent like `remuda agent` on EC2, with a fake machine and runner."""
    async with AwsClients() as clients:
        await clients.service("sts", "STS", config())
        imds = Imds(endpoint=imds_endpoint({}), clock=SystemClock())
        store = agent_store(await clients.dynamodb(), pool, prefix)
        respond({"command": agent_ec2.__name__, "metadata": imds is not None})
        await agent(store, BenchmarkMachine(instance_id, pool)).run()


if __name__ == "__main__":
    asyncio.run(run_agent(*sys.argv[1:]))
