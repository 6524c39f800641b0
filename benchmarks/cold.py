"""Provisions that must create machines, alone or beside warm ones, and many that share a pool."""

from __future__ import annotations

import asyncio

from benchmarks import floor as floors
from benchmarks.figures import Figure, Kind, Results, middle
from benchmarks.floor import Floor
from benchmarks.world import CLASS, World
from remuda.domain.resources import UsageClass
from tests.support.records import message

COLD_OVERHEAD_S = 0.4
MIXED_OVERHEAD_S = 0.3
MIXED_BOOT_S = 2.0
MISFIT_CALLS_MOST = 30
MISFIT_MOST_S = 1.0


async def run(world: World, floor: Floor) -> Results:
    return await cold(world, floor) + await mixed(world, floor) + await sharing(world) + await misfits(world, floor)


async def cold(world: World, floor: Floor) -> Results:
    """New machines: as soon as the agents are there, it goes on."""
    figures = []
    for boot_s in world.size.boots_s:
        for machines in sorted({1, min(10, max(world.size.counts))}):
            await world.clear()
            pool = await world.pool()
            pool.boot_s = boot_s
            made = await pool.provision(machines)
            least = boot_s + await floor.seconds(floors.cold_provision(machines))
            figures.append(
                Figure(
                    name=f"cold provision, N = {machines}, agent ready after {boot_s:g} s",
                    unit="s",
                    before="10·⌈t/10⌉ s",
                    most=boot_s + COLD_OVERHEAD_S,
                    ours=made.seconds,
                    kind=Kind.TIME,
                    floor=round(least, 4),
                    floor_with_waits=round(least, 4),
                )
            )
    return Results(figures=tuple(figures))


async def mixed(world: World, floor: Floor) -> Results:
    """Half of it warm, half created: no slower than the slower half."""
    half = min(5, max(world.size.counts))
    boot_s = min(MIXED_BOOT_S, *world.size.boots_s)
    seconds: dict[str, float] = {}
    await world.clear()
    least = boot_s + await floor.seconds(floors.cold_provision(half))
    for name, warm, asked in (("warm", half, half), ("cold", 0, half), ("mixed", half, 2 * half)):
        await world.clear()
        pool = await world.pool()
        if warm:
            await pool.fill(warm)
        pool.boot_s = boot_s
        made = await pool.provision(asked)
        if (made.reused, made.created) != (warm, asked - warm):
            raise RuntimeError(f"{name}: {made.reused} reused and {made.created} created")
        seconds[name] = made.seconds
    slower = max(seconds["warm"], seconds["cold"])
    return Results(
        figures=(
            Figure(
                name=f"mixed: pool {half}, asked {2 * half}, agents ready after {boot_s:g} s",
                unit="s",
                before="11.1–14.8 s",
                most=round(slower + MIXED_OVERHEAD_S, 4),
                ours=seconds["mixed"],
                kind=Kind.TIME,
                floor=round(least, 4),
                floor_with_waits=round(least, 4),
                note=f"the cold half alone {seconds['cold']:.2f} s, the warm half alone {seconds['warm']:.2f} s",
            ),
        )
    )


async def sharing(world: World) -> Results:
    """Ten at once on a pool that has half of what they ask for."""
    provisions, each = 10, min(5, max(world.size.counts))
    warm = provisions * each // 2
    await world.clear()
    pool = await world.pool()
    await pool.fill(warm)
    made = await asyncio.gather(*(pool.provision(each) for _ in range(provisions)))
    name = f"{provisions} provisions of {each} on a pool of {warm}"
    return Results(
        figures=(
            Figure(
                name=f"{name}: warm machines left out",
                unit="machines",
                before="5–8 of 10 provisions create",
                most=0,
                ours=warm - sum(item.reused for item in made),
                kind=Kind.COUNT,
            ),
            Figure(
                name=f"{name}: created",
                unit="machines",
                before="",
                most=provisions * each - warm,
                ours=sum(item.created for item in made),
                kind=Kind.COUNT,
                note=f"the slowest took {max(item.seconds for item in made):.2f} s (its predecessor: 11.5 s)",
            ),
        )
    )


async def misfits(world: World, floor: Floor) -> Results:
    """A pool that is full of machines of the wrong kind."""
    number, calls, seconds = world.size.misfits, [], []
    await world.clear()
    least = await floor.seconds(floors.misfits(number))
    for _ in range(min(3, world.size.samples)):
        await world.clear()
        pool = await world.pool()
        async with pool.context() as context:
            spots = [message(each, usage_class=UsageClass.SPOT, resource_class=CLASS) for each in range(number)]
            await context.pool.send(spots)
        with world.wire.during() as counted:
            made = await pool.provision(1)
        calls.append(counted.of("sqs"))
        seconds.append(made.seconds)
    return Results(
        figures=(
            Figure(
                name=f"{number} misfits in the pool, N = 1: SQS calls",
                unit="calls",
                before="1,503",
                most=MISFIT_CALLS_MOST,
                ours=max(calls),
                kind=Kind.COUNT,
                samples=len(calls),
            ),
            Figure(
                name=f"{number} misfits in the pool, N = 1",
                unit="s",
                before="34–106 s",
                most=MISFIT_MOST_S,
                ours=middle(seconds),
                kind=Kind.TIME,
                floor=least,
                floor_with_waits=least,
                samples=len(seconds),
                note="the machine is created: its agent is ready at once",
            ),
        )
    )
