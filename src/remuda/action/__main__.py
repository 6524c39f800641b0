from __future__ import annotations

from remuda.action.step import main
from remuda.cli.run import exit_process

if __name__ == "__main__":
    exit_process(main())
