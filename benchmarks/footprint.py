"""What starting the command costs, and what an agent holds in memory."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.agents import IdleMachine, TimedRunner
from benchmarks.figures import Figure, Kind, Results, middle
from benchmarks.floor import Floor
from benchmarks.world import World, beating, idle
from remuda.adapters.system.clock import SystemClock

HELP_MOST_S = 0.25
AGENT_MOST_MB = 90.0
#: How long an agent lives before its memory is looked at.
SETTLED_S = 4.0
COMMAND = Path(sys.executable).with_name("remuda")


async def run(world: World, _floor: Floor) -> Results:
    await world.clear()
    return Results(figures=(*starts(world.size.starts), await memory(world)))


def starts(times: int) -> list[Figure]:
    bare = middle([_seconds([sys.executable, "-c", "pass"]) for _ in range(times)])
    figures = []
    for arguments in (["--help"], ["provision", "--help"]):
        name = f"remuda {' '.join(arguments)}"
        figures += [
            Figure(
                name=name,
                unit="s",
                before="—",
                most=HELP_MOST_S,
                ours=middle([_seconds([str(COMMAND), *arguments]) for _ in range(times)]),
                kind=Kind.TIME,
                floor=bare,
                floor_with_waits=bare,
                samples=times,
                note="the floor is an interpreter that does nothing",
            ),
            Figure(
                name=f"{name}: AWS modules imported",
                unit="modules",
                before="—",
                most=0,
                ours=_aws_modules(arguments),
                kind=Kind.COUNT,
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


async def memory(world: World) -> Figure:
    """A process that has opened what the agent of a machine on EC2 opens, and lives in the pool."""
    pool = await world.pool()
    record = idle(1)
    await pool.write([record], [beating(record)])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.footprint", pool.name, pool.prefix, record.instance_id),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        env=dict(os.environ),
    )
    try:
        assert process.stdout is not None  # noqa: S101 - it was started with one
        if not await process.stdout.readline():
            raise RuntimeError("the agent did not start")
        await asyncio.sleep(min(SETTLED_S, 2 * world.size.starts))
        held = resident_mb(process.pid)
    finally:
        process.kill()
        await process.wait()
    return Figure(
        name="memory of an agent process",
        unit="MB",
        before="—",
        most=AGENT_MOST_MB,
        ours=held,
        kind=Kind.COUNT,
        note="resident, in the pool, with its clients for DynamoDB and STS and its metadata service",
    )


def resident_mb(pid: int) -> float:
    """The most that it has ever held."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return round(int(line.split()[1]) * 1024 / 1e6, 1)


async def live(pool: str, prefix: str, instance_id: str) -> None:
    """As `remuda agent` on EC2, but for the machine and its runner."""
    # Imported here: this is what the process is weighed for.
    from remuda.adapters.aws.clients import AwsClients, config  # noqa: PLC0415 - as above
    from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore  # noqa: PLC0415 - as above
    from remuda.adapters.aws.imds import Imds, imds_endpoint  # noqa: PLC0415 - as above
    from remuda.adapters.system.clock import SystemIds  # noqa: PLC0415 - as above
    from remuda.agent.loop import Agent  # noqa: PLC0415 - as above
    from remuda.cli import agent_ec2  # noqa: PLC0415 - as above
    from remuda.ports.calls import CallCounter  # noqa: PLC0415 - as above
    from remuda.ports.event_log import SilentEventLog  # noqa: PLC0415 - as above

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
            machine=IdleMachine(instance_id, pool),
            runner=TimedRunner(0.0, {}),
            clock=clock,
            ids=SystemIds(),
            event_log=SilentEventLog(),
            version="1",
        ).run()


if __name__ == "__main__":
    asyncio.run(live(*sys.argv[1:]))
