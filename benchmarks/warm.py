"""Warm provisions, and releases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks import floor as floors
from benchmarks.environment import BenchmarkEnvironment, BenchmarkPool
from benchmarks.figures import Figure, Results, timed
from benchmarks.floor import Floor

#: By number of instances.
PROVISION_LIMIT_S = {1: 0.35, 10: 0.5, 50: 0.9}
RELEASE_LIMIT_S = {1: 0.5, 10: 0.6, 50: 1.2}
PROVISION_PREDECESSOR = {1: "0.9 s", 10: "1.15 s", 50: "2.0 s"}
MAX_FLOORS = 3.0
#: Allowed seconds in addition to the registration.
REGISTRATION_OVERHEAD_S = 0.4
DYNAMODB_LIMIT = 160
DYNAMODB_COUNT = 50


@dataclass
class WarmRounds:
    provisions: list[float] = field(default_factory=list)
    releases: list[float] = field(default_factory=list)
    #: DynamoDB calls of each provision: all, and those of polling.
    calls: list[int] = field(default_factory=list)
    polls: list[int] = field(default_factory=list)
    requests: str = ""
    #: Instances that were not claimable immediately after a release.
    missing: int = 0


async def run(environment: BenchmarkEnvironment, floor: Floor) -> Results:
    made: list[Figure] = []
    for count in environment.size.counts:
        await environment.clear()
        # Measured while nothing else uses the servers.
        provision_floor = await floor.seconds(floors.warm_provision(count))
        release_floor = await floor.seconds(floors.release(count))
        pool = await environment.pool()
        await pool.fill(count)
        rounds = await run_rounds(environment, pool, count, environment.size.samples)
        made += figures(rounds, count, provision_floor=provision_floor, release_floor=release_floor)
    return Results(figures=(*made, await registering(environment, floor)))


async def run_rounds(environment: BenchmarkEnvironment, pool: BenchmarkPool, count: int, times: int) -> WarmRounds:
    """Provision and release the same instances repeatedly; each release must leave all of them claimable."""
    rounds = WarmRounds()
    for _ in range(times):
        with environment.requests.during() as counted:
            made = await pool.provision(count)
        rounds.missing += made.created
        rounds.provisions.append(made.seconds)
        rounds.calls.append(counted.of("dynamodb"))
        rounds.polls.append(polls(made.calls))
        rounds.requests = counted.describe()
        rounds.releases.append((await pool.release(made.run_id)).seconds)
    return rounds


def polls(calls: Mapping[str, Mapping[str, int]]) -> int:
    """Number of polling calls."""
    return sum(count for name, count in calls["dynamodb"].items() if name.startswith("poll:"))


def figures(rounds: WarmRounds, count: int, *, provision_floor: float, release_floor: float) -> Sequence[Figure]:
    wait_s = floors.poll_wait_s(count)
    made = [
        timed(
            *(f"warm provision, N = {count}, registration 0", rounds.provisions),
            limit=_limit(PROVISION_LIMIT_S, count),
            predecessor=PROVISION_PREDECESSOR.get(count, ""),
            floor=provision_floor,
            wait_s=wait_s,
            max_floors=MAX_FLOORS,
        ),
        timed(
            *(f"release, N = {count}, deregistration 0", rounds.releases),
            limit=_limit(RELEASE_LIMIT_S, count),
            predecessor="10–11 s",
            floor=release_floor,
            wait_s=wait_s,
        ),
        Figure(
            *(f"not claimable right after a release, N = {count}", "instances", rounds.missing),
            limit=0,
            predecessor="all, for 3 s",
        ),
    ]
    if count == DYNAMODB_COUNT:
        made.append(
            Figure(
                *(f"DynamoDB calls, warm provision, N = {count}", "calls", max(rounds.calls)),
                limit=DYNAMODB_LIMIT,
                predecessor="227–585",
                samples=len(rounds.calls),
                note=f"{max(rounds.polls)} of them for polling; {rounds.requests}",
            )
        )
    return made


def _limit(limits: dict[int, float], count: int) -> float:
    """Return the limit of the next larger number."""
    return min((limit for number, limit in limits.items() if number >= count), default=max(limits.values()))


async def registering(environment: BenchmarkEnvironment, floor: Floor) -> Figure:
    count, registration_s = min(10, max(environment.size.counts)), environment.size.registration_s
    await environment.clear()
    floor_s = registration_s + await floor.seconds(floors.warm_provision(count))
    pool = await environment.pool()
    pool.registration_s = registration_s
    await pool.fill(count)
    rounds = await run_rounds(environment, pool, count, min(3, environment.size.samples))
    return timed(
        f"warm provision, N = {count}, registration {registration_s:g} s",
        rounds.provisions,
        limit=registration_s + REGISTRATION_OVERHEAD_S,
        predecessor="3.6 s (5.0 s with its real agent)",
        floor=floor_s,
        wait_s=floors.poll_wait_s(count),
    )
