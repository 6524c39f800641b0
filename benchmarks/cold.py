"""Cold and mixed provisions, concurrent provisions on one pool, and a pool of instances that do not match."""

from __future__ import annotations

import asyncio

from benchmarks import floor as floors
from benchmarks.environment import CLASS, BenchmarkEnvironment
from benchmarks.figures import Figure, Results, timed
from benchmarks.floor import Floor
from remuda.domain.resources import UsageClass
from tests.support.records import message

COLD_OVERHEAD_S = 0.4
MIXED_OVERHEAD_S = 0.3
MIXED_BOOT_S = 2.0
MISMATCH_CALLS_LIMIT = 30
MISMATCH_LIMIT_S = 1.0


async def run(environment: BenchmarkEnvironment, floor: Floor) -> Results:
    return Results(
        figures=(
            *await cold(environment, floor),
            await mixed(environment, floor),
            *await sharing(environment),
            *await mismatches(environment, floor),
        )
    )


async def cold(environment: BenchmarkEnvironment, floor: Floor) -> list[Figure]:
    """Only new instances: the provision continues as soon as their agents are ready."""
    figures = []
    for boot_s in environment.size.boots_s:
        for count in sorted({1, min(10, max(environment.size.counts))}):
            await environment.clear()
            pool = await environment.pool()
            pool.boot_s = boot_s
            made = await pool.provision(count)
            floor_s = boot_s + await floor.seconds(floors.cold_provision(count))
            name = f"cold provision, N = {count}, agent ready after {boot_s:g} s"
            limit = boot_s + COLD_OVERHEAD_S
            figures.append(timed(name, made.seconds, limit=limit, predecessor="10·⌈t/10⌉ s", floor=floor_s))
    return figures


async def mixed(environment: BenchmarkEnvironment, floor: Floor) -> Figure:
    """Half from the pool, half created: not slower than the slower half."""
    half = min(5, max(environment.size.counts))
    boot_s = min(MIXED_BOOT_S, *environment.size.boots_s)
    seconds: dict[str, float] = {}
    await environment.clear()
    floor_s = boot_s + await floor.seconds(floors.cold_provision(half))
    for name, warm, requested in (("warm", half, half), ("cold", 0, half), ("mixed", half, 2 * half)):
        await environment.clear()
        pool = await environment.pool()
        if warm:
            await pool.fill(warm)
        pool.boot_s = boot_s
        made = await pool.provision(requested)
        if (made.reused, made.created) != (warm, requested - warm):
            raise RuntimeError(f"{name}: {made.reused} reused and {made.created} created")
        seconds[name] = made.seconds
    slower = max(seconds["warm"], seconds["cold"])
    return timed(
        f"mixed: pool {half}, requested {2 * half}, agents ready after {boot_s:g} s",
        seconds["mixed"],
        limit=round(slower + MIXED_OVERHEAD_S, 4),
        predecessor="11.1–14.8 s",
        floor=floor_s,
        note=f"the cold half alone {seconds['cold']:.2f} s, the warm half alone {seconds['warm']:.2f} s",
    )


async def sharing(environment: BenchmarkEnvironment) -> tuple[Figure, ...]:
    """Ten concurrent provisions on a pool that has half of the requested instances."""
    provisions, each = 10, min(5, max(environment.size.counts))
    warm = provisions * each // 2
    await environment.clear()
    pool = await environment.pool()
    await pool.fill(warm)
    made = await asyncio.gather(*(pool.provision(each) for _ in range(provisions)))
    name = f"{provisions} provisions of {each} on a pool of {warm}"
    return (
        Figure(
            *(f"{name}: warm instances not reused", "instances", warm - sum(item.reused for item in made)),
            limit=0,
            predecessor="5–8 of 10 provisions create",
        ),
        Figure(
            *(f"{name}: created", "instances", sum(item.created for item in made)),
            limit=provisions * each - warm,
            predecessor="",
            note=f"the slowest took {max(item.seconds for item in made):.2f} s (predecessor: 11.5 s)",
        ),
    )


async def mismatches(environment: BenchmarkEnvironment, floor: Floor) -> tuple[Figure, ...]:
    """A pool full of instances of the wrong usage class."""
    number, calls, seconds = environment.size.mismatches, [], []
    await environment.clear()
    floor_s = await floor.seconds(floors.mismatches(number))
    for _ in range(min(3, environment.size.samples)):
        await environment.clear()
        pool = await environment.pool()
        async with pool.context() as context:
            spots = [message(each, usage_class=UsageClass.SPOT, resource_class=CLASS) for each in range(number)]
            await context.pool.send(spots)
        with environment.requests.during() as counted:
            made = await pool.provision(1)
        calls.append(counted.of("sqs"))
        seconds.append(made.seconds)
    name = f"{number} mismatches in the pool, N = 1"
    return (
        Figure(
            *(f"{name}: SQS calls", "calls", max(calls)),
            limit=MISMATCH_CALLS_LIMIT,
            predecessor="1,503",
            samples=len(calls),
        ),
        timed(
            *(name, seconds),
            limit=MISMATCH_LIMIT_S,
            predecessor="34–106 s",
            floor=floor_s,
            note="the instance is created; its agent is ready at once",
        ),
    )
