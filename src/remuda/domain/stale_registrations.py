"""Detection of stale registrations: runners on GitHub whose instance does not use them any more.

The list of runners must be read before the records: then a stale registration stays stale, whatever other processes do.
A registration without a record is stale only if it has no machine either, because just-in-time registrations are made
before the record is written.
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
    """Return why a registration is stale, for people. None if it is not, or not yet.

    `unrecorded_since` is the time since which it is known to have neither a record nor a machine.
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
        return f"its epoch is {epoch}, the instance's is {record.epoch}"
    if epoch == record.epoch and record.state is State.IDLE:
        return "its instance is idle"
    return None
