"""Names of the simulated pool, and its own parser of runner names.

The invariants use this parser, not the product's, so that a bug there does not hide itself.
"""

from __future__ import annotations

import re

POOL = "test"
SCOPE = "octo/repo"
#: Repositories that workflow runs belong to.
REPOSITORIES = ("octo/repo", "octo/other", "octo/third")
#: Runners of other pools whose names begin like this pool's.
FOREIGN_RUNNERS = ("remuda-test-2-1-i-00000000000000001", "remuda-testing-1-i-00000000000000001")

_OURS = re.compile(rf"remuda-{POOL}-([1-9][0-9]*)-(i-[0-9a-f]{{8,17}})")


def parse_runner(name: str) -> tuple[int, str] | None:
    """(epoch, instance id) of a runner of this pool, or None for any other runner."""
    found = _OURS.fullmatch(name)
    return (int(found.group(1)), found.group(2)) if found else None
