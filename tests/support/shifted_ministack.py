"""Ministack with a clock that tests can move: run by the interpreter of the servers' own environment.

Its first argument is a file that holds the seconds to add to the real time, as one double. Messages come back and
items expire by that clock, so no test has to wait for them. What it does once a minute it does more often, too.
"""

import importlib
import mmap
import struct
import sys
import time
from pathlib import Path
from typing import Any

real_time = time.time  # noqa: TID251 - the clock to move
real_sleep = time.sleep  # noqa: TID251
LONGEST_SLEEP_S = 0.5


def sleep(seconds: Any) -> None:
    real_sleep(min(float(seconds), LONGEST_SLEEP_S))


def main() -> None:
    with Path(sys.argv.pop(1)).open("r+b") as file:
        ahead = mmap.mmap(file.fileno(), 8)
    time.time = lambda: real_time() + struct.unpack("<d", ahead[:8])[0]  # noqa: TID251
    time.sleep = sleep  # noqa: TID251
    # Only now: it must find the moved clock.
    importlib.import_module("ministack.app").main()


if __name__ == "__main__":
    main()
