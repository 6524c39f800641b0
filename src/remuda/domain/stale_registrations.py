"""Which registrations are ghosts: nobody's runner, left on GitHub.

The list of runners must have been read *before* the records: then a ghost stays one, whatever happens meanwhile. One
without a record stays one only if it has no machine either: those for one job are registered before their record is
written.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from remuda.domain.instance import ABSORBING, Instance, State
from remuda.domain.pool_config import parse_runner_name


def stale_registration_reason(
    name: str,
    record: Instance | None,
    *,
    pool: str,
    unrecorded_since: datetime | None,
    now: datetime,
    grace_s: float,
) -> str | None:
    """Why a registration is a ghost, or None where it is none, or not yet. `unrecorded_since`: since when there was
    neither a record nor a machine for it, as far as it is known.
    """
    parsed = parse_runner_name(pool, name)
    if parsed is None:
        return None
    epoch, _ = parsed
    if record is None:
        if unrecorded_since is not None and now - unrecorded_since >= timedelta(seconds=grace_s):
            return "its instance has no record"
        return None
    if record.state in ABSORBING:
        return f"its instance is {record.state}"
    if epoch < record.epoch:
        return f"of assignment {epoch}; the instance is at {record.epoch}"
    if epoch == record.epoch and record.state is State.IDLE:
        return "its instance is idle"
    return None
