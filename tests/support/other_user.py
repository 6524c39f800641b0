"""A user that is nobody else's, for tests that run as root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remuda.agent.job_user import JobUser

#: Far from all that systems give out, and another one for each process: all that a user runs and has is ended here,
#: while other tests have theirs.
UID = 1_000_000 + 100 * os.getpid()
SUBORDINATE = (UID + 10, 50)
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def other_user(home: Path, **changed: object) -> JobUser:
    given = {"name": "remuda-other", "uid": UID, "gid": UID, "home": home, "subordinate": (SUBORDINATE,)}
    return JobUser(**{**given, **changed})  # type: ignore[arg-type]
