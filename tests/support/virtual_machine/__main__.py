"""Builds the image of the virtual machines, or says why this computer cannot run them.

python -m tests.support.virtual_machine
"""

from __future__ import annotations

import sys

from tests.support.virtual_machine.image import build_image, is_built
from tests.support.virtual_machine.machine import unsupported_reason


def main() -> None:
    if reason := unsupported_reason():
        sys.stdout.write(f"the tests in virtual machines will be skipped: {reason}\n")
    elif not is_built():
        sys.stdout.write("building the image of the virtual machines (once, some minutes)\n")
        sys.stdout.flush()
        build_image()


if __name__ == "__main__":
    main()
