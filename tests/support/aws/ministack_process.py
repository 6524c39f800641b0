"""Ministack with an adjustable clock. Runs in the interpreter of the servers' own virtualenv.

The first argument is a file with the seconds to add to the real time, as one double. Visibility timeouts and item
expiry follow that clock, so no test has to wait for them. Long pauses of background tasks are shortened.
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
        offset = mmap.mmap(file.fileno(), 8)
    time.time = lambda: real_time() + struct.unpack("<d", offset[:8])[0]  # noqa: TID251
    time.sleep = sleep  # noqa: TID251
    # Imported after the clock is replaced, because it binds `time.time`.
    importlib.import_module("ministack.app").main()


if __name__ == "__main__":
    main()
