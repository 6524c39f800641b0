"""Entry point of `remuda` and `python -m remuda`. Imports only what the command needs, so that it starts fast."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    if sys.argv[1:2] == ["agent"]:
        from remuda.cli.agent import main as run_agent  # noqa: PLC0415 - see above

        sys.exit(run_agent(sys.argv[2:]))
    # Imports create no garbage. `cli.main` enables the collection again when it runs the command.
    gc.disable()
    from remuda.cli.main import main as run_cli  # noqa: PLC0415 - see above
    from remuda.cli.run import exit_process  # noqa: PLC0415 - see above

    exit_process(run_cli(sys.argv[1:]))


if __name__ == "__main__":
    main()
