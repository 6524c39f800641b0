"""The user that jobs run as, where the agent itself runs as root."""

from __future__ import annotations

import grp
import os
import pwd
from dataclasses import dataclass
from pathlib import Path

from remuda import scripts
from remuda.domain.errors import UserError

#: Ids that its user namespaces may use: what runs in a rootless container has one of these.
SUBORDINATE = (Path("/etc/subuid"), Path("/etc/subgid"))


@dataclass(frozen=True, kw_only=True, slots=True)
class JobUser:
    name: str
    uid: int
    gid: int
    home: Path
    #: First and how many.
    subordinate: tuple[tuple[int, int], ...] = ()

    @classmethod
    def find(cls, name: str) -> JobUser:
        try:
            known = pwd.getpwnam(name)
        except KeyError:
            raise UserError(f"there is no user {name!r} to run jobs as", fix="let the bootstrap make it") from None
        if known.pw_uid in {0, os.getuid()}:
            raise UserError(f"jobs would run as {name!r}, who is the agent itself", fix="give jobs a user of their own")
        return cls(
            name=name,
            uid=known.pw_uid,
            gid=known.pw_gid,
            home=Path(known.pw_dir),
            subordinate=tuple(part for path in SUBORDINATE for part in _ranges(path, name, known.pw_uid)),
        )

    def owns_uid(self, uid: int) -> bool:
        """Whether this number is the user, or may be used by it."""
        return uid == self.uid or any(first <= uid < first + count for first, count in self.subordinate)

    def groups(self) -> set[int]:
        """All that it is a member of, or could become one by itself."""
        return {self.gid, *(group.gr_gid for group in grp.getgrall() if self.name in group.gr_mem)}

    def environment(self) -> dict[str, str]:
        return {
            "PATH": scripts.SYSTEM_PATH,
            "LANG": "C.UTF-8",
            "HOME": str(self.home),
            "USER": self.name,
            "LOGNAME": self.name,
            "SHELL": "/bin/bash",
        }


def _ranges(path: Path, name: str, uid: int) -> list[tuple[int, int]]:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    fields = [line.split(":") for line in lines]
    return [
        (int(each[1]), int(each[2]))
        for each in fields
        if len(each) == 3 and each[0] in {name, str(uid)} and each[1].isdecimal() and each[2].isdecimal()
    ]
