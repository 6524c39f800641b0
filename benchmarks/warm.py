"""Warm provisions and releases: machines that are there, and how soon they are a run's and the pool's again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks import floor as floors
from benchmarks.figures import Figure, Kind, Results, middle
from benchmarks.floor import Floor
from benchmarks.world import Pool, World

#: By how many machines are asked for.
PROVISION_MOST_S = {1: 0.35, 10: 0.5, 50: 0.9}
RELEASE_MOST_S = {1: 0.5, 10: 0.6, 50: 1.2}
PROVISION_BEFORE = {1: "0.9 s", 10: "1.15 s", 50: "2.0 s"}
MOST_FLOORS = 3.0
#: On top of the registration itself.
REGISTRATION_OVERHEAD_S = 0.4
DYNAMODB_MOST = 160
DYNAMODB_MACHINES = 50


@dataclass
class Rounds:
    provisions: list[float] = field(default_factory=list)
    releases: list[float] = field(default_factory=list)
    #: DynamoDB calls of each provision: all, and those while it waited.
    calls: list[int] = field(default_factory=list)
    polls: list[int] = field(default_factory=list)
    told: str = ""
    #: Machines that were not claimable the moment that a release had ended.
    missing: int = 0


async def run(world: World, floor: Floor) -> Results:
    results = Results()
    for machines in world.size.counts:
        await world.clear()
        # Nobody else is at the servers.
        provision_floor = await floor.seconds(floors.warm_provision(machines))
        release_floor = await floor.seconds(floors.release(machines))
        pool = await world.pool()
        await pool.fill(machines)
        rounds = await play(world, pool, machines, world.size.samples)
        made = figures(rounds, machines, provision_floor=provision_floor, release_floor=release_floor)
        results += Results(figures=tuple(made))
    return results + await registering(world, floor)


async def play(world: World, pool: Pool, machines: int, times: int) -> Rounds:
    """The same machines again and again: each release must leave them all claimable."""
    rounds = Rounds()
    for _ in range(times):
        with world.wire.during() as counted:
            made = await pool.provision(machines)
        rounds.missing += made.created
        rounds.provisions.append(made.seconds)
        rounds.calls.append(counted.of("dynamodb"))
        rounds.polls.append(polls(made.calls))
        rounds.told = counted.told()
        rounds.releases.append((await pool.release(made.run_id)).seconds)
    return rounds


def polls(calls: Mapping[str, Mapping[str, int]]) -> int:
    """Looks while it waited."""
    return sum(count for name, count in calls["dynamodb"].items() if name.startswith("poll:"))


def figures(rounds: Rounds, machines: int, *, provision_floor: float, release_floor: float) -> Sequence[Figure]:
    wait_s = floors.poll_wait_s(machines)
    made = [
        Figure(
            name=f"warm provision, N = {machines}, registration 0",
            unit="s",
            before=PROVISION_BEFORE.get(machines, ""),
            most=_limit(PROVISION_MOST_S, machines),
            ours=middle(rounds.provisions),
            kind=Kind.TIME,
            floor=provision_floor,
            floor_with_waits=provision_floor + wait_s,
            most_floors=MOST_FLOORS,
            samples=len(rounds.provisions),
        ),
        Figure(
            name=f"release, N = {machines}, deregistration 0",
            unit="s",
            before="10–11 s",
            most=_limit(RELEASE_MOST_S, machines),
            ours=middle(rounds.releases),
            kind=Kind.TIME,
            floor=release_floor,
            floor_with_waits=release_floor + wait_s,
            samples=len(rounds.releases),
        ),
        Figure(
            name=f"not claimable right after a release, N = {machines}",
            unit="machines",
            before="all, for 3 s",
            most=0,
            ours=rounds.missing,
            kind=Kind.COUNT,
        ),
    ]
    if machines == DYNAMODB_MACHINES:
        made.append(
            Figure(
                name=f"DynamoDB calls, warm provision, N = {machines}",
                unit="calls",
                before="227–585",
                most=DYNAMODB_MOST,
                ours=max(rounds.calls),
                kind=Kind.COUNT,
                samples=len(rounds.calls),
                note=f"of these {max(rounds.polls)} while it waited; {rounds.told}",
            )
        )
    return made


def _limit(limits: dict[int, float], machines: int) -> float:
    """That of the next larger number."""
    return min((most for number, most in limits.items() if number >= machines), default=max(limits.values()))


async def registering(world: World, floor: Floor) -> Results:
    machines, registration_s = min(10, max(world.size.counts)), world.size.registration_s
    await world.clear()
    least = registration_s + await floor.seconds(floors.warm_provision(machines))
    pool = await world.pool()
    pool.registration_s = registration_s
    await pool.fill(machines)
    rounds = await play(world, pool, machines, min(3, world.size.samples))
    return Results(
        figures=(
            Figure(
                name=f"warm provision, N = {machines}, registration {registration_s:g} s",
                unit="s",
                before="3.6 s (5.0 s with its real agent)",
                most=registration_s + REGISTRATION_OVERHEAD_S,
                ours=middle(rounds.provisions),
                kind=Kind.TIME,
                floor=round(least, 4),
                floor_with_waits=round(least + floors.poll_wait_s(machines), 4),
                samples=len(rounds.provisions),
            ),
        )
    )
