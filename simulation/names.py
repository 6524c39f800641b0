"""The simulated pool's names, read by the judge's own eyes: a bug in the product's reading must not blind it."""

from __future__ import annotations

import re

POOL = "sim"
SCOPE = "octo/repo"
#: Whose runs come.
REPOSITORIES = ("octo/repo", "octo/other", "octo/third")
#: Names that look like this pool's at first sight, and are not.
STRANGERS = ("remuda-sim-2-1-i-00000000000000001", "remuda-simulation-1-i-00000000000000001")

_OURS = re.compile(rf"remuda-{POOL}-([1-9][0-9]*)-(i-[0-9a-f]{{8,17}})")


def runner_of(name: str) -> tuple[int, str] | None:
    """(epoch, instance id) of one of this pool's runners, or None for anybody else's."""
    found = _OURS.fullmatch(name)
    return (int(found.group(1)), found.group(2)) if found else None
