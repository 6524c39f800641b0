"""`python -m simulation`: run many simulated worlds, or one of them with its trace."""

import sys
from typing import Annotated

import typer

from remuda.cli.main import run_app
from remuda.cli.output import Output
from simulation.cli import Request, run_simulate

app = typer.Typer(
    name="simulation",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "default_map": {"help": False}},
)


@app.command()
def simulate(
    seeds: Annotated[int, typer.Option("--seeds", min=1, max=10_000_000, help="Number of worlds.")] = 100,
    hours: Annotated[float, typer.Option("--hours", min=0.01, max=1_000, help="Simulated hours per world.")] = 0.5,
    instances: Annotated[int, typer.Option("--instances", min=1, max=500, help="Maximum instances per world.")] = 10,
    faults: Annotated[
        str,
        typer.Option(
            "--faults",
            help="swarm (each seed draws half of the faults), few (one to six), all, none, or comma-separated names.",
        ),
    ] = "swarm",
    seed: Annotated[int | None, typer.Option("--seed", min=0, max=2**63, help="Run this seed only.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Print every event; requires --seed.")] = False,
    first_seed: Annotated[
        int | None, typer.Option("--first-seed", min=0, max=2**63, help="First seed (default: random).")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, max=256, help="Worker processes (default: 2).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the result only.")] = False,
) -> int:
    """Run the control plane and its agents in virtual time under faults and check every invariant."""
    request = Request(
        seeds=seeds,
        hours=hours,
        instances=instances,
        faults=faults,
        seed=seed,
        trace=trace,
        first=first_seed,
        workers=workers,
    )
    return run_simulate(request, Output(as_json=as_json, quiet=quiet))


if __name__ == "__main__":
    sys.exit(run_app(app, sys.argv[1:]))
