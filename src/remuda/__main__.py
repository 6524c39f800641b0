"""`python -m remuda` and the `remuda` command. Light: the agent must not pay for the CLI, nor help for AWS."""

from __future__ import annotations

import sys


def main() -> None:
    if sys.argv[1:2] == ["agent"]:
        from remuda.cli.agent import main as run_agent  # noqa: PLC0415 - only what this command needs

        sys.exit(run_agent(sys.argv[2:]))
    from remuda.cli.main import main as run_cli  # noqa: PLC0415 - only what this command needs

    sys.exit(run_cli(sys.argv[1:]))


if __name__ == "__main__":
    main()
