"""A user that is nobody else's, for tests that run as root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from remuda.agent.job_user import JobUser

#: Far from all that systems give out.
UID = 54_321
SUBORDINATE = (900_000, 1_000)
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


def other_user(home: Path, **changed: object) -> JobUser:
    given = {"name": "remuda-other", "uid": UID, "gid": UID, "home": home, "subordinate": (SUBORDINATE,)}
    return JobUser(**{**given, **changed})  # type: ignore[arg-type]
