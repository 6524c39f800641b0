"""What an operator should look at: found in the records and reports, each with a sentence that says what it means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from remuda.domain.instance import Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision, ProvisionStatus
from remuda.domain.signals import Report
from remuda.domain.thresholds import HEARTBEAT_DEAD_AFTER_S

#: EC2 confirms an end within a minute or two; sweeps on AWS come every five.
ENDING_TAKES_S = 900.0


#: What a concern may be about.
KINDS = (
    "expired",
    "stale-heartbeat",
    "stuck",
    "spot-notice",
    "overdue",
    "stale-registration",
    "token",
    "unconfigured",
    "unreadable",
    "github",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolWarning:
    #: One of `KINDS`.
    kind: str
    #: An instance, a run, a runner, or empty.
    subject: str
    text: str


def find_warnings(
    config: PoolConfig | None,
    instances: Sequence[Instance],
    reports: Mapping[str, Report],
    provisions: Sequence[Provision],
    *,
    now: datetime,
) -> list[PoolWarning]:
    """The pool's first, then one instance after the other."""
    if config is None:
        text = "the pool has no configuration yet: run remuda refresh"
        return [PoolWarning(kind="unconfigured", subject="", text=text)]
    margin_s = config.lifetimes.margin_s
    found = [*_tokens(config, now), *_overdue(provisions, now, margin_s)]
    for instance in instances:
        found += _of_instance(instance, reports.get(instance.instance_id), now, margin_s)
    return found


def _tokens(config: PoolConfig, now: datetime) -> Iterator[PoolWarning]:
    for tokens in config.tokens:
        left_s = (tokens.registration.expires_at - now).total_seconds()
        if left_s < config.lifetimes.provision_timeout_s:
            word = "has expired" if left_s <= 0 else f"is good for {left_s:.0f} s more"
            text = f"the pool's registration token {word}: provisions without a credential fail until refresh renews it"
            yield PoolWarning(kind="token", subject=tokens.scope, text=text)


def _overdue(provisions: Sequence[Provision], now: datetime, margin_s: float) -> Iterator[PoolWarning]:
    for item in provisions:
        over_s = (now - item.deadline).total_seconds()
        if item.status is ProvisionStatus.OPEN and over_s > margin_s:
            text = f"its provision is open, its deadline passed {over_s:.0f} s ago: refresh takes back what it holds"
            yield PoolWarning(kind="overdue", subject=item.run_id, text=text)


def _of_instance(instance: Instance, report: Report | None, now: datetime, margin_s: float) -> Iterator[PoolWarning]:
    subject, state = instance.instance_id, instance.state
    if state is State.TERMINATED:
        return
    over_s = (now - instance.threshold).total_seconds()
    if state is State.TERMINATING:
        if over_s > ENDING_TAKES_S:
            text = f"asked to end {over_s / 60:.0f} min ago, and not confirmed: does refresh run?"
            yield PoolWarning(kind="stuck", subject=subject, text=text)
        return
    if over_s > margin_s:
        text = f"its time as {state} was up {over_s:.0f} s ago: refresh retires it"
        yield PoolWarning(kind="expired", subject=subject, text=text)
    silent = _silence(instance, report, now)
    if silent is not None and silent > timedelta(seconds=HEARTBEAT_DEAD_AFTER_S + margin_s):
        text = f"no heartbeat for {silent.total_seconds():.0f} s: its agent or its machine is dead"
        yield PoolWarning(kind="stale-heartbeat", subject=subject, text=text)
    if report is not None and report.notice:
        yield PoolWarning(kind="spot-notice", subject=subject, text=f"spot notice: {report.notice}")


def _silence(instance: Instance, report: Report | None, now: datetime) -> timedelta | None:
    """How long its agent has said nothing. A machine that boots has not spoken yet."""
    if report is None or report.beat_at is None:
        return None if instance.state is State.CREATED else now - instance.created_at
    return now - report.beat_at
