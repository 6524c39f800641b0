"""Refreshes: the first one, the next one, and one that terminates expired instances."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from benchmarks import floor as floors
from benchmarks.environment import BenchmarkEnvironment
from benchmarks.figures import Figure, Results, timed
from benchmarks.floor import Floor
from remuda.adapters.system.clock import SystemClock
from remuda.domain.timestamps import to_milliseconds

FIRST_LIMIT_S = 2.0
NEXT_LIMIT_S = 0.5
TERMINATING_LIMIT_S = 1.0
TERMINATING_DYNAMODB_LIMIT = 110


async def run(environment: BenchmarkEnvironment, floor: Floor) -> Results:
    return Results(figures=await refreshes(environment, floor) + await terminating(environment, floor))


async def refreshes(environment: BenchmarkEnvironment, floor: Floor) -> tuple[Figure, ...]:
    await environment.clear()
    first, following = [], []
    for _ in range(min(3, environment.size.samples)):
        pool = environment.new_pool()
        first.append((await pool.refresh()).seconds)
        following.append((await pool.refresh()).seconds)
    first_floor = await floor.seconds(floors.first_refresh())
    floor_s = await floor.seconds(floors.next_refresh())
    return (
        timed("first refresh", first, limit=FIRST_LIMIT_S, predecessor="21 s", floor=first_floor),
        timed("next refresh", following, limit=NEXT_LIMIT_S, predecessor="0.3–0.85 s", floor=floor_s),
    )


async def terminating(environment: BenchmarkEnvironment, floor: Floor) -> tuple[Figure, ...]:
    """Refresh with instances that expired an hour ago."""
    number, seconds, calls, note = environment.size.expired, [], [], ""
    for _ in range(min(3, environment.size.samples)):
        await environment.clear()
        pool = await environment.pool()
        ids = [record.instance_id for record in await pool.fill(number)]
        await environment.clear()
        async with pool.context() as context:
            records = (await context.store.get_many(ids)).values()
        past = to_milliseconds(SystemClock().now() - timedelta(hours=1))
        await pool.write([replace(record, threshold=past) for record in records])
        with environment.requests.during() as counted:
            done = await pool.refresh()
        if len(done.terminated) != number:
            raise RuntimeError(f"{len(done.terminated)} of {number} were terminated: {done}")
        seconds.append(done.seconds)
        calls.append(counted.of("dynamodb"))
        note = counted.describe()
    floor_s = await floor.seconds(floors.terminating_refresh(number))
    name = f"refresh terminating {number} instances"
    return (
        timed(name, seconds, limit=TERMINATING_LIMIT_S, predecessor="10.8 s", floor=floor_s),
        Figure(
            *(f"{name}: DynamoDB calls", "calls", max(calls)),
            limit=TERMINATING_DYNAMODB_LIMIT,
            predecessor="162",
            samples=len(calls),
            note=note,
        ),
    )
