"""Many concurrent claims from a warm pool, by one provision each and by a single provision."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from benchmarks import floor as floors
from benchmarks.environment import BenchmarkEnvironment, BenchmarkPool, fresh_report, idle
from benchmarks.figures import Figure, Results, percentile, timed
from benchmarks.floor import Floor
from remuda.adapters.system.clock import SystemClock
from remuda.controlplane.context import Context
from remuda.controlplane.provision import ProvisionResult, provision

P99_LIMIT_S = 5.0
CONFLICTS_LIMIT_PERCENT = 10.0


class ClaimEventLog:
    """Event log that records won and lost claims."""

    def __init__(self) -> None:
        self._clock = SystemClock()
        self.started = self._clock.monotonic()
        self.won_s: list[float] = []
        self.lost = 0

    def record(self, action: str, why: str = "", **facts: Any) -> None:  # noqa: ARG002 - signature of the port
        if action == "claim-won":
            self.won_s.append(self._clock.monotonic() - self.started)
        elif action == "claim-lost":
            self.lost += 1


async def run(environment: BenchmarkEnvironment, floor: Floor) -> Results:
    claims = environment.size.claims

    async def many(context: Context, pool: BenchmarkPool) -> list[ProvisionResult]:
        return await asyncio.gather(*(provision(context, pool.request(1)) for _ in range(claims)))

    async def one(context: Context, pool: BenchmarkPool) -> list[ProvisionResult]:
        return [await provision(context, pool.request(claims))]

    await environment.clear()
    separate = await floor.seconds(floors.claims(claims, 1))
    combined = await floor.seconds(floors.claims(1, claims))
    return Results(
        figures=await _measure(environment, f"{claims} provisions of 1", many, separate)
        + await _measure(environment, f"one provision of {claims}", one, combined)
    )


async def _measure(
    environment: BenchmarkEnvironment,
    name: str,
    work: Callable[[Context, BenchmarkPool], Awaitable[list[ProvisionResult]]],
    floor_s: float,
) -> tuple[Figure, ...]:
    claims, warm = environment.size.claims, environment.size.warm
    await environment.clear()
    pool = await environment.pool()
    records = [idle(number) for number in range(warm)]
    await pool.write(records, [fresh_report(record) for record in records])
    await pool.start_agents([record.instance_id for record in records])
    async with pool.context() as context:
        await context.pool.send([record.message() for record in records])
    # In one process, so that the provisions share the polling for reports, as the workers of one provision do.
    async with pool.context() as context:
        event_log = ClaimEventLog()
        made = await work(replace(context, event_log=event_log), pool)
    reused = sum(item.reused for item in made)
    attempts = len(event_log.won_s) + event_log.lost
    label = f"{name} at once, {warm} warm"
    p99_s, conflicts = percentile(event_log.won_s, 0.99), round(100 * event_log.lost / attempts, 2)
    return (
        Figure(
            *(f"{label}: not claimed", "instances", claims - reused),
            limit=0,
            note=f"all running after {max(item.seconds for item in made):.2f} s",
        ),
        timed(f"{label}: p99 of a claim", p99_s, limit=P99_LIMIT_S, floor=floor_s, samples=len(event_log.won_s)),
        Figure(f"{label}: conflicts", "%", conflicts, limit=CONFLICTS_LIMIT_PERCENT, samples=attempts),
    )
