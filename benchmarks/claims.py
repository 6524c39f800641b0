"""Very many claims at once from a warm pool, by as many provisions, and by one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from benchmarks import floor as floors
from benchmarks.figures import Figure, Kind, Results, percentile
from benchmarks.floor import Floor
from benchmarks.world import Pool, World, beating, idle
from remuda.adapters.system.clock import SystemClock
from remuda.controlplane.context import Context
from remuda.controlplane.provision import ProvisionResult, provision

P99_MOST_S = 5.0
CONFLICTS_MOST_PERCENT = 10.0


class ClaimEventLog:
    """Hears of claims as they are won and lost."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self.started = self._clock.monotonic()
        self.won_s: list[float] = []
        self.lost = 0

    def record(self, action: str, why: str = "", **facts: Any) -> None:  # noqa: ARG002 - the port's
        if action == "claim-won":
            self.won_s.append(self._clock.monotonic() - self.started)
        elif action == "claim-lost":
            self.lost += 1


async def run(world: World, floor: Floor) -> Results:
    claims = world.size.claims

    async def many(context: Context, pool: Pool) -> list[ProvisionResult]:
        return await asyncio.gather(*(provision(context, pool.order(1)) for _ in range(claims)))

    async def one(context: Context, pool: Pool) -> list[ProvisionResult]:
        return [await provision(context, pool.order(claims))]

    await world.clear()
    apart = await floor.seconds(floors.claims(claims, 1))
    together = await floor.seconds(floors.claims(1, claims))
    return await _measure(world, f"{claims} provisions of 1", many, apart) + await _measure(
        world, f"one provision of {claims}", one, together
    )


async def _measure(
    world: World, name: str, work: Callable[[Context, Pool], Awaitable[list[ProvisionResult]]], least: float
) -> Results:
    claims, warm = world.size.claims, world.size.warm
    await world.clear()
    pool = await world.pool()
    herd = [idle(number) for number in range(warm)]
    await pool.write(herd, [beating(record) for record in herd])
    await pool.follow([record.instance_id for record in herd])
    async with pool.context() as context:
        await context.pool.send([record.message() for record in herd])
    # One process makes them all: its looks for reports are shared, as they are within one provision.
    async with pool.context() as context:
        event_log = ClaimEventLog()
        made = await work(replace(context, event_log=event_log), pool)
    reused = sum(item.reused for item in made)
    tried = len(event_log.won_s) + event_log.lost
    what = f"{name} at once, {warm} warm"
    return Results(
        figures=(
            Figure(
                name=f"{what}: not claimed",
                unit="machines",
                before="—",
                most=0,
                ours=claims - reused,
                kind=Kind.COUNT,
                note=f"all running after {max(item.seconds for item in made):.2f} s",
            ),
            Figure(
                name=f"{what}: p99 of a claim",
                unit="s",
                before="—",
                most=P99_MOST_S,
                ours=round(percentile(event_log.won_s, 0.99), 4),
                kind=Kind.TIME,
                floor=least,
                floor_with_waits=least,
                samples=len(event_log.won_s),
            ),
            Figure(
                name=f"{what}: conflicts",
                unit="%",
                before="—",
                most=CONFLICTS_MOST_PERCENT,
                ours=round(100 * event_log.lost / tried, 2),
                kind=Kind.COUNT,
                samples=tried,
            ),
        )
    )
