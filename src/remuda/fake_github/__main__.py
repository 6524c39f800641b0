"""`python -m remuda.fake_github --dir DIR`: run the local GitHub until SIGTERM or SIGINT."""

import argparse
import asyncio
import pathlib

from remuda.fake_github.clock import SystemTokenClock
from remuda.fake_github.server import serve


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m remuda.fake_github", description=__doc__)
    parser.add_argument("--dir", type=pathlib.Path, required=True, help="folder for state and endpoint.json")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: that of the earlier life, or a free one")
    parser.add_argument("--lease-s", type=float, help="how long a lost runner stays busy (default 600)")
    given = parser.parse_args()
    given.dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    given.dir.chmod(0o700)
    asyncio.run(serve(given.dir, host=given.host, port=given.port, clock=SystemTokenClock(), lease_s=given.lease_s))


if __name__ == "__main__":
    main()
