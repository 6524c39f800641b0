"""Speed of the simulation with twenty agents: CPU time relative to that of as many empty steps of the event loop."""

from __future__ import annotations

import asyncio
import gc
import sys
import time

from simulation.campaign import CampaignSettings, run_batch
from simulation.faults import Swarm
from simulation.loop import new_loop

INSTANCES = 20
SEEDS = 5


async def empty_steps(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def main() -> None:
    gc.freeze()
    for name, faults in (("no faults", frozenset()), ("half of the faults", Swarm.HALF)):
        started = time.process_time()
        done = run_batch(range(SEEDS), CampaignSettings(hours=0.5, instances=INSTANCES, faults=faults))
        simulated = time.process_time()
        new_loop().run(empty_steps(done.steps))
        floor_s = time.process_time() - simulated
        sys.stdout.write(
            f"{name}: {(simulated - started) / floor_s:.1f} × the time of {done.steps:,} empty steps, "
            f"{done.simulated_s / (simulated - started):.0f} simulated seconds per CPU second "
            f"(at most {INSTANCES} agents at a time, {done.stats['machines']} machines in total, {SEEDS} seeds)\n"
        )


if __name__ == "__main__":
    main()
