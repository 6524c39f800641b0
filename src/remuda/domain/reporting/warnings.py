"""Warnings about a pool, found in its configuration, records and reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

from remuda.domain.instance import Instance, State, holder_id
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision, ProvisionStatus
from remuda.domain.reporting.demand import DemandStatus, SessionState
from remuda.domain.signals import Report
from remuda.domain.thresholds import HEARTBEAT_DEAD_AFTER_S

#: Seconds that a termination may take. EC2 needs a minute or two, and sweeps on AWS run every five minutes.
MAX_TERMINATION_S = 900.0
#: Maximum number of warnings about single jobs.
MAX_WAITING_JOBS = 20


class WarningKind(StrEnum):
    #: The threshold of an instance has passed.
    EXPIRED = "expired"
    STALE_HEARTBEAT = "stale-heartbeat"
    #: A termination is not confirmed.
    STUCK = "stuck"
    SPOT_NOTICE = "spot-notice"
    #: An open provision is past its deadline.
    OVERDUE = "overdue"
    STALE_REGISTRATION = "stale-registration"
    #: A registration token expires soon.
    TOKEN = "token"  # noqa: S105 - not a secret
    UNCONFIGURED = "unconfigured"
    #: GitHub will refuse the pool's version of the actions runner soon, or it is unknown for long whether it does.
    RUNNER_VERSION = "runner-version"
    #: Most of the month's budget is spent, or all of it.
    BUDGET = "budget"
    #: A job waits for a runner for too long.
    WAITING_JOB = "waiting-job"
    #: A runner set cannot be served, or GitHub's counts of its jobs are wrong.
    RUNNER_SET = "runner-set"
    #: A record cannot be parsed.
    UNREADABLE = "unreadable"
    #: GitHub cannot be reached.
    GITHUB = "github"


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolWarning:
    kind: WarningKind
    #: Instance id, run id, job id, holder id of a set, runner name or scope, or empty.
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
    """Return the warnings about the pool, then those about each instance."""
    if config is None:
        text = "the pool has no configuration yet: run remuda refresh"
        return [PoolWarning(kind=WarningKind.UNCONFIGURED, subject="", text=text)]
    margin_s = config.lifetimes.margin_s
    found = [
        *_budget_warnings(config, now),
        *_token_warnings(config, now),
        *_runner_warnings(config, now),
        *_overdue_warnings(provisions, now, margin_s),
    ]
    for instance in instances:
        found += _instance_warnings(instance, reports.get(instance.instance_id), now, margin_s)
    return found


def find_demand_warnings(demand: DemandStatus) -> Iterator[PoolWarning]:
    """Sets that cannot be served, then jobs that wait too long."""
    for item in demand.sets:
        if item.session is not SessionState.OPEN:
            yield PoolWarning(kind=WarningKind.RUNNER_SET, subject=holder_id(item.name), text=item.detail)
    for name, text in demand.disagreements.items():
        yield PoolWarning(kind=WarningKind.RUNNER_SET, subject=holder_id(name), text=text)
    for repository, reason in demand.unaudited.items():
        text = f"its waiting jobs cannot be checked: {reason}"
        yield PoolWarning(kind=WarningKind.WAITING_JOB, subject=repository, text=text)
    for job in demand.overdue[:MAX_WAITING_JOBS]:
        name = f"{job.name or job.job_id} of {job.repository}" if job.repository else job.name or job.job_id
        text = f"job {name} waits since {job.queued_at:%H:%M:%S} UTC: {job.detail}"
        yield PoolWarning(kind=WarningKind.WAITING_JOB, subject=job.job_id, text=text)


def _budget_warnings(config: PoolConfig, now: datetime) -> Iterator[PoolWarning]:
    if text := config.budget.warning(now):
        yield PoolWarning(kind=WarningKind.BUDGET, subject=config.pool, text=text)


def _token_warnings(config: PoolConfig, now: datetime) -> Iterator[PoolWarning]:
    for tokens in config.tokens:
        left_s = (tokens.registration.expires_at - now).total_seconds()
        if left_s < config.lifetimes.provision_timeout_s:
            expiry = "has expired" if left_s <= 0 else f"expires in {left_s:.0f} s"
            text = f"the registration token {expiry}: provisions without a credential fail until refresh renews it"
            yield PoolWarning(kind=WarningKind.TOKEN, subject=tokens.scope, text=text)


def _runner_warnings(config: PoolConfig, now: datetime) -> Iterator[PoolWarning]:
    if config.runner is not None and (found := config.runner.warning(now)):
        yield PoolWarning(kind=WarningKind.RUNNER_VERSION, subject=config.runner.version, text=str(found))


def _overdue_warnings(provisions: Sequence[Provision], now: datetime, margin_s: float) -> Iterator[PoolWarning]:
    for item in provisions:
        over_s = (now - item.deadline).total_seconds()
        if item.status is ProvisionStatus.OPEN and over_s > margin_s:
            text = f"its provision is open {over_s:.0f} s after its deadline: refresh releases its instances"
            yield PoolWarning(kind=WarningKind.OVERDUE, subject=item.run_id, text=text)


def _instance_warnings(
    instance: Instance, report: Report | None, now: datetime, margin_s: float
) -> Iterator[PoolWarning]:
    subject, state = instance.instance_id, instance.state
    if state is State.TERMINATED:
        return
    # A job that nobody has recorded yet protects a runner of a set.
    over_s = (now - instance.deadline(busy=report is not None and report.busy)).total_seconds()
    if state is State.TERMINATING:
        if over_s > MAX_TERMINATION_S:
            text = f"terminating for {over_s / 60:.0f} min without confirmation: check that refresh runs"
            yield PoolWarning(kind=WarningKind.STUCK, subject=subject, text=text)
        return
    if over_s > margin_s:
        text = f"its threshold as {state} passed {over_s:.0f} s ago: refresh terminates it"
        yield PoolWarning(kind=WarningKind.EXPIRED, subject=subject, text=text)
    silent = _time_since_heartbeat(instance, report, now)
    if silent is not None and silent > timedelta(seconds=HEARTBEAT_DEAD_AFTER_S + margin_s):
        text = f"no heartbeat for {silent.total_seconds():.0f} s: its agent or its machine is dead"
        yield PoolWarning(kind=WarningKind.STALE_HEARTBEAT, subject=subject, text=text)
    if report is not None and report.notice:
        yield PoolWarning(kind=WarningKind.SPOT_NOTICE, subject=subject, text=f"spot notice: {report.notice}")


def _time_since_heartbeat(instance: Instance, report: Report | None, now: datetime) -> timedelta | None:
    """None for a booting machine, whose agent has not started yet."""
    if report is None or report.beat_at is None:
        return None if instance.state is State.CREATED else now - instance.created_at
    return now - report.beat_at
