"""Speed of the simulation: simulated seconds per CPU second, with twenty agents."""

from __future__ import annotations

import gc
import sys
import time

from simulation.campaign import simulate
from simulation.faults import FaultChoice, Swarm
from simulation.plan import draw_plan

INSTANCES = 20
SEEDS = 5


def main() -> None:
    gc.freeze()
    kinds: dict[str, FaultChoice] = {"no faults": frozenset(), "half of the faults": Swarm.HALF}
    for name, faults in kinds.items():
        started, simulated, agents = time.process_time(), 0.0, 0
        for seed in range(SEEDS):
            result = simulate(draw_plan(seed, hours=0.5, instances=INSTANCES, faults=faults))
            simulated += result.seconds
            agents += result.stats["machines"]
        rate = simulated / (time.process_time() - started)
        sys.stdout.write(
            f"{name}: {rate:.0f} simulated seconds per CPU second "
            f"(at most {INSTANCES} agents at a time, {agents} machines in total, {SEEDS} seeds)\n"
        )


if __name__ == "__main__":
    main()
