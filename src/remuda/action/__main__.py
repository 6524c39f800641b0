from __future__ import annotations

import sys

from remuda.action.step import main

if __name__ == "__main__":
    sys.exit(main())
