"""`python -m simulation`: run many simulated worlds, or one of them with its trace."""

import sys

import click

from remuda.cli.main import run_app
from remuda.cli.output import Output
from simulation.cli import Request, run_simulate


@click.command("simulation", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seeds", type=click.IntRange(1, 10_000_000), default=100, help="Number of worlds. (default: 100)")
@click.option(
    "--hours", type=click.FloatRange(0.01, 1_000), default=0.5, help="Simulated hours per world. (default: 0.5)"
)
@click.option("--instances", type=click.IntRange(1, 500), default=10, help="Maximum instances per world. (default: 10)")
@click.option(
    "--faults",
    default="swarm",
    help="swarm (each seed draws half of the faults), few (one to six), all, none, or comma-separated names.",
)
@click.option("--seed", type=click.IntRange(0, 2**63), help="Run this seed only.")
@click.option("--trace", is_flag=True, help="Print every event; requires --seed.")
@click.option("--first-seed", "first", type=click.IntRange(0, 2**63), help="First seed. (default: random)")
@click.option("--workers", type=click.IntRange(1, 256), help="Worker processes. (default: 2)")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option("--quiet", "-q", is_flag=True, help="Print the result only.")
def simulate(
    *,
    seeds: int,
    hours: float,
    instances: int,
    faults: str,
    seed: int | None,
    trace: bool,
    first: int | None,
    workers: int | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Run the control plane and its agents in virtual time under faults and check every invariant."""
    request = Request(
        seeds=seeds,
        hours=hours,
        instances=instances,
        faults=faults,
        seed=seed,
        trace=trace,
        first=first,
        workers=workers,
    )
    return run_simulate(request, Output(as_json=as_json, quiet=quiet))


if __name__ == "__main__":
    sys.exit(run_app(simulate, sys.argv[1:]))
