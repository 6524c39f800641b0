"""Refreshes: the first one, the next, and one that has much to reap."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from benchmarks import floor as floors
from benchmarks.figures import Figure, Kind, Results, middle
from benchmarks.floor import Floor
from benchmarks.world import World
from remuda.adapters.system.clock import SystemClock
from remuda.domain.timestamps import to_milliseconds

FIRST_MOST_S = 2.0
NEXT_MOST_S = 0.5
REAPING_MOST_S = 1.0
REAPING_DYNAMODB_MOST = 110


async def run(world: World, floor: Floor) -> Results:
    return await refreshes(world, floor) + await reaping(world, floor)


async def refreshes(world: World, floor: Floor) -> Results:
    await world.clear()
    first, following = [], []
    for _ in range(min(3, world.size.samples)):
        pool = world.new_pool()
        first.append((await pool.refresh()).seconds)
        following.append((await pool.refresh()).seconds)
    first_least = await floor.seconds(floors.first_refresh())
    least = await floor.seconds(floors.next_refresh())
    return Results(
        figures=(
            Figure(
                name="first refresh",
                unit="s",
                before="21 s",
                most=FIRST_MOST_S,
                ours=middle(first),
                kind=Kind.TIME,
                floor=first_least,
                floor_with_waits=first_least,
                samples=len(first),
            ),
            Figure(
                name="next refresh",
                unit="s",
                before="0.3–0.85 s",
                most=NEXT_MOST_S,
                ours=middle(following),
                kind=Kind.TIME,
                floor=least,
                floor_with_waits=least,
                samples=len(following),
            ),
        )
    )


async def reaping(world: World, floor: Floor) -> Results:
    """Machines whose time was up an hour ago, and that live on."""
    number, seconds, calls, told = world.size.reaped, [], [], ""
    for _ in range(min(3, world.size.samples)):
        await world.clear()
        pool = await world.pool()
        ids = [record.instance_id for record in await pool.fill(number)]
        await world.clear()
        async with pool.context() as context:
            records = (await context.store.get_many(ids)).values()
        past = to_milliseconds(SystemClock().now() - timedelta(hours=1))
        await pool.write([replace(record, threshold=past) for record in records])
        with world.wire.during() as counted:
            done = await pool.refresh()
        if len(done.terminated) != number:
            raise RuntimeError(f"{len(done.terminated)} of {number} were reaped: {done}")
        seconds.append(done.seconds)
        calls.append(counted.of("dynamodb"))
        told = counted.told()
    least = await floor.seconds(floors.reaping(number))
    return Results(
        figures=(
            Figure(
                name=f"refresh reaping {number}",
                unit="s",
                before="10.8 s",
                most=REAPING_MOST_S,
                ours=middle(seconds),
                kind=Kind.TIME,
                floor=least,
                floor_with_waits=least,
                samples=len(seconds),
            ),
            Figure(
                name=f"refresh reaping {number}: DynamoDB calls",
                unit="calls",
                before="162",
                most=REAPING_DYNAMODB_MOST,
                ours=max(calls),
                kind=Kind.COUNT,
                samples=len(calls),
                note=told,
            ),
        )
    )
