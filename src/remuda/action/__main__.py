from __future__ import annotations

from remuda.action.step import main as run_step
from remuda.cli.run import exit_process


def main() -> None:
    exit_process(run_step())


if __name__ == "__main__":
    main()
