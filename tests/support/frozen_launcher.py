"""`remuda` with a wall clock that stands still: `python frozen_launcher.py 2026-03-11T10:00:00Z scale-down …`.

Only the wall clock: seconds still pass, as they do on a machine whose date is wrong.
"""

from __future__ import annotations

import sys
from datetime import datetime

from remuda.__main__ import main
from remuda.adapters.system.clock import SystemClock

if __name__ == "__main__":
    at = datetime.fromisoformat(sys.argv[1])
    SystemClock.now = lambda self: at  # type: ignore[method-assign] # noqa: ARG005 - the port's own name
    sys.argv = ["remuda", *sys.argv[2:]]
    main()
