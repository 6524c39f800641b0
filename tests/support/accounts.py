"""The accounts of test hosts: those of this computer's packages, but none of its people.

Jobs run as the user 1001 if no account of the host has that number, so the tests would depend on who uses the computer.
"""

from __future__ import annotations

from pathlib import Path

#: The first id that Debian and Ubuntu give to people (FIRST_UID in adduser.conf), and that of `nobody`.
FIRST_PERSON = 1000
NOBODY = 65_534


def account_files(etc: Path = Path("/etc")) -> dict[str, str]:
    """The contents of /etc/passwd and /etc/group, by path, without the accounts of people."""
    return {f"/etc/{name}": _of_packages((etc / name).read_text(encoding="utf-8")) for name in ("passwd", "group")}


def _of_packages(text: str) -> str:
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if (number := int(line.split(":")[2])) < FIRST_PERSON or number == NOBODY)
