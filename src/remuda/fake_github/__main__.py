"""`python -m remuda.fake_github --dir DIR`: run the fake GitHub until SIGTERM or SIGINT."""

import argparse
import asyncio
import fcntl
import os
import pathlib
import secrets
import time

from remuda.fake_github.server import serve


class SystemTokenClock:
    def now(self) -> float:
        return time.time()  # noqa: TID251  # the only use of the real time in this package

    def token(self, prefix: str) -> str:
        return prefix + secrets.token_hex(16)


def lock_folder(folder: pathlib.Path) -> int:
    """Keep a second process from serving the same state, until this one ends: both would run each job."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise SystemExit(f"another local GitHub uses {folder}: stop it first") from None
    return descriptor


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m remuda.fake_github", description=__doc__)
    parser.add_argument("--dir", type=pathlib.Path, required=True, help="folder for the state and endpoint.json")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 (default): the port of the last run, or a free one")
    parser.add_argument("--lease-s", type=float, help="seconds that a lost runner stays busy (default 600)")
    arguments = parser.parse_args()
    arguments.dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    arguments.dir.chmod(0o700)
    lock_folder(arguments.dir)
    asyncio.run(
        serve(
            arguments.dir, host=arguments.host, port=arguments.port, clock=SystemTokenClock(), lease_s=arguments.lease_s
        )
    )


if __name__ == "__main__":
    main()
