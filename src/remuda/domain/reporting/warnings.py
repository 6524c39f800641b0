"""Warnings about a pool, found in its configuration, records and reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from itertools import islice
from typing import Self

from remuda.domain.decide.next_step import has_failed
from remuda.domain.demand import AFTER_LOSS
from remuda.domain.holder import set_subject
from remuda.domain.instance import ABSORBING, Instance, State
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision, ProvisionEnding, ProvisionStatus, describe_status
from remuda.domain.reporting.demand import DemandStatus, SessionState
from remuda.domain.signals import Report
from remuda.domain.sweep_record import RunAnswer
from remuda.domain.thresholds import HEARTBEAT_DEAD_AFTER_S, Lifetimes
from remuda.domain.timestamps import after

#: Seconds that a termination may take. EC2 needs a minute or two, and sweeps on AWS run every five minutes.
MAX_TERMINATION_S = 900.0
#: Seconds after a sweep until which the next one must have run if it is not known how often sweeps run. On AWS they run
#: every five minutes.
MAX_SWEEP_PAUSE_S = 900.0
#: The same for sweeps that are repeated within seconds.
MIN_SWEEP_PAUSE_S = 60.0
#: Maximum number of warnings about waiting jobs, lost jobs, and runs.
MAX_WAITING_JOBS = 20
MAX_LOST_JOBS = 20
MAX_RUNS = 20
#: A running job has a warning if it has less time left than this, in seconds and as a share of its maximum runtime.
EXPIRY_WARNING_S = 600.0
EXPIRY_WARNING_SHARE = 0.1
#: What the author of a workflow whose runs end without a release must add.
RELEASE_JOB = "add a release job with if: always() to its workflow"
#: What to do about lost instances of a run that is not released.
REPLACE_LOST = "if a job still waits, cancel the run on GitHub and choose 'Re-run all jobs'"
#: Seconds in which the failure of a run, or the loss of a job, is a warning.
RECENT_FAILURE_S = 3_600.0


class WarningKind(StrEnum):
    """The warnings of `status` and of the dashboard, each with a description for the reference page."""

    meaning: str

    def __new__(cls, name: str, meaning: str) -> Self:
        kind = str.__new__(cls, name)
        kind._value_ = name
        kind.meaning = meaning
        return kind

    SWEEPER = (
        "sweeper",
        (
            "no sweep (`refresh`) has run for 15 minutes, or for three times its `--every`: "
            "nothing expires, and nothing is repaired"
        ),
    )
    CLOCK = "clock", "the clock of this computer is wrong; the times of `status` and `explain` are corrected by it"
    DISK = "disk", "the disk of the local backend is full, or almost"
    STOPPED_PROCESS = "stopped-process", "a background process of the local backend is not running"
    PROVISION_FAILED = (
        "provision-failed",
        "a provision failed within the last hour, and the run has not been provisioned since",
    )
    RUN_EXPIRED = "run-expired", "a run held its runners until their time was up, within the last hour"
    RUN_UNRELEASED = (
        "run-unreleased",
        (
            "a run has ended on GitHub and still holds its instances, or a sweep released it within the last hour "
            "because its workflow did not; or GitHub does not say whether it has ended"
        ),
    )
    EXPIRES_SOON = (
        "expires-soon",
        (
            "`max-runtime-min` ends a running job soon: less than 10 minutes and less than a tenth of its time are "
            "left; `refresh` logs it, too"
        ),
    )
    LOST_INSTANCE = (
        "lost-instance",
        (
            "a committed run has lost instances, or a job of a runner set has lost its instance within the last hour, "
            "with the reason"
        ),
    )
    FAILED_RUNNER = (
        "failed-runner",
        "the runner of a running instance has failed, with the reason; the next sweep terminates the instance",
    )
    EXPIRED = "expired", "an instance is past its threshold and the clock margin and not yet retired"
    STALE_HEARTBEAT = "stale-heartbeat", "an agent has sent no heartbeat for 15 s plus the clock margin"
    STUCK = "stuck", "termination was requested 15 minutes ago and is not confirmed"
    SPOT_NOTICE = "spot-notice", "EC2 will interrupt the instance"
    OVERDUE = "overdue", "a provision is open past its deadline"
    STALE_REGISTRATION = (
        "stale-registration",
        "a registration on GitHub without an assignment (needs a credential; with `--watch` once per minute)",
    )
    TOKEN = "token", "the pool's registration token expires before a provision could finish"
    UNCONFIGURED = "unconfigured", "the pool has no configuration: `refresh` has never run"
    RUNNER_VERSION = (
        "runner-version",
        (
            "GitHub will refuse the pool's version of the actions runner soon, "
            "or it has been unknown for long whether it does"
        ),
    )
    BUDGET = "budget", "most of the month's [budget](../howto/alarms-and-budget.md) is spent, or all of it"
    WAITING_JOB = (
        "waiting-job",
        (
            "a job has waited for a runner for more than five minutes, or asks for a label that the runners of its run "
            "do not have, with the reason; or the queue of a repository cannot be checked"
        ),
    )
    RUNNER_SET = (
        "runner-set",
        "a runner set has no working session, GitHub does not tell its counts, or they have been wrong for long",
    )
    UNREADABLE = "unreadable", "records could not be parsed"
    GITHUB = "github", "runners could not be listed on GitHub"


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolWarning:
    kind: WarningKind
    #: Instance id, run id, job id, `set.` and the name of a set, runner name or scope, or empty.
    subject: str
    text: str


def find_warnings(
    config: PoolConfig | None,
    instances: Sequence[Instance],
    reports: Mapping[str, Report],
    provisions: Sequence[Provision],
    *,
    lost: Mapping[str, Sequence[str]],
    ended: Mapping[str, Instance],
    sweep_due: datetime | None,
    now: datetime,
) -> list[PoolWarning]:
    """Return the warnings about the pool, then those about runs and about each instance.

    `lost` has the lost instances by provision id, and `ended` their records as far as known. `sweep_due` is the time
    until which a sweep must have run; None if none has run yet.
    """
    if config is None:
        text = "the pool has no configuration yet: run remuda refresh"
        return [PoolWarning(kind=WarningKind.UNCONFIGURED, subject="", text=text)]
    margin_s = config.lifetimes.margin_s
    found = [
        *_sweep_warnings(sweep_due or after(config.applied_at, MAX_SWEEP_PAUSE_S), now),
        *_budget_warnings(config, now),
        *_token_warnings(config, now),
        *_runner_warnings(config, now),
        *_overdue_warnings(provisions, now, margin_s),
        *_run_warnings(provisions, lost, ended, now),
    ]
    runs = {item.provision_id: item for item in provisions}
    for instance in instances:
        report = reports.get(instance.instance_id)
        found += _instance_warnings(instance, report, now, margin_s)
        runtime_s = max_runtime_s(runs.get(instance.provision_id), config.lifetimes)
        if text := describe_near_expiry(instance, report, now=now, runtime_s=runtime_s):
            found.append(PoolWarning(kind=WarningKind.EXPIRES_SOON, subject=instance.instance_id, text=text))
    return found


def sweep_pause_s(interval_s: float | None) -> float:
    """Seconds after a sweep until which the next one must have run. None: it is not known how often sweeps run."""
    return MAX_SWEEP_PAUSE_S if interval_s is None else max(MIN_SWEEP_PAUSE_S, 3 * interval_s)


def find_demand_warnings(demand: DemandStatus, *, now: datetime) -> Iterator[PoolWarning]:
    """Sets that cannot be served, then jobs that were lost, then those that wait too long."""
    for item in demand.sets:
        if item.session is not SessionState.OPEN or not item.is_current:
            yield PoolWarning(kind=WarningKind.RUNNER_SET, subject=set_subject(item.name), text=item.detail)
    for name, text in demand.disagreements.items():
        yield PoolWarning(kind=WarningKind.RUNNER_SET, subject=set_subject(name), text=text)
    for repository, reason in demand.unaudited.items():
        text = f"its waiting jobs cannot be checked: {reason}"
        yield PoolWarning(kind=WarningKind.WAITING_JOB, subject=repository, text=text)
    yield from islice(_lost_job_warnings(demand, now), MAX_LOST_JOBS)
    for job in demand.overdue[:MAX_WAITING_JOBS]:
        name = f"{job.name or job.job_id} of {job.repository}" if job.repository else job.name or job.job_id
        text = f"job {name} waits since {job.queued_at:%H:%M:%S} UTC: {job.detail}"
        yield PoolWarning(kind=WarningKind.WAITING_JOB, subject=job.job_id, text=text)


def _lost_job_warnings(demand: DemandStatus, now: datetime) -> Iterator[PoolWarning]:
    for job in demand.jobs:
        if job.lost_at is None or not job.is_lost or (now - job.lost_at).total_seconds() > RECENT_FAILURE_S:
            continue
        name = f"{job.display_name or job.job_id} of run {job.run_id}"
        outcome = f"GitHub says {job.result or 'completed'}" if job.completed_at else AFTER_LOSS
        text = f"job {name} at {job.lost_at:%H:%M:%S} UTC: {job.loss}; {outcome}"
        yield PoolWarning(kind=WarningKind.LOST_INSTANCE, subject=job.job_id, text=text)


def _sweep_warnings(due: datetime, now: datetime) -> Iterator[PoolWarning]:
    over_s = (now - due).total_seconds()
    if over_s > 0:
        text = (
            f"the sweeper does not run: a sweep was due {_duration(over_s)} ago; run remuda refresh, and find out why"
        )
        yield PoolWarning(kind=WarningKind.SWEEPER, subject="", text=text)


def _run_warnings(
    provisions: Sequence[Provision],
    lost: Mapping[str, Sequence[str]],
    ended: Mapping[str, Instance],
    now: datetime,
) -> Iterator[PoolWarning]:
    """About the newest provision of each run and class: a run that was provisioned again has recovered."""
    newest: dict[tuple[str, str], Provision] = {}
    for item in sorted(provisions, key=lambda item: item.created_at, reverse=True):
        newest.setdefault((item.holder.key, item.resource_class), item)
    found = (warning for item in newest.values() if (warning := _run_warning(item, lost, ended, now)) is not None)
    yield from islice(found, MAX_RUNS)


def _run_warning(
    run: Provision, lost: Mapping[str, Sequence[str]], ended: Mapping[str, Instance], now: datetime
) -> PoolWarning | None:
    if run.status is ProvisionStatus.COMMITTED and run.provision_id in lost:
        ids = lost[run.provision_id]
        reasons = dict.fromkeys(ended[item].retire_text for item in ids if item in ended)
        text = "; ".join(filter(None, (describe_status(run, ids), *reasons, REPLACE_LOST)))
        return PoolWarning(kind=WarningKind.LOST_INSTANCE, subject=run.subject, text=text)
    if run.released_at is None or (now - run.released_at).total_seconds() > RECENT_FAILURE_S:
        return None
    at = f"{run.released_at:%H:%M:%S} UTC"
    if run.ending is ProvisionEnding.FAILED:
        return PoolWarning(kind=WarningKind.PROVISION_FAILED, subject=run.subject, text=f"failed at {at}: {run.reason}")
    if run.ending is ProvisionEnding.EXPIRED and not run.runner_set:
        return PoolWarning(kind=WarningKind.RUN_EXPIRED, subject=run.subject, text=f"expired at {at}: {run.why}")
    if run.ending is ProvisionEnding.UNRELEASED:
        text = f"a sweep released it at {at}: {run.why}; {RELEASE_JOB}"
        return PoolWarning(kind=WarningKind.RUN_UNRELEASED, subject=run.subject, text=text)
    return None


def find_unreleased(
    config: PoolConfig, answers: Sequence[RunAnswer], provisions: Sequence[Provision], *, now: datetime
) -> Iterator[PoolWarning]:
    """Runs that have ended and still hold their instances, in the time that their release jobs have."""
    for answer in answers:
        of_run = [item for item in provisions if item.run_id == answer.run_id and not item.runner_set]
        if answer.ended_at is None or (of_run and all(item.status is ProvisionStatus.RELEASED for item in of_run)):
            continue
        left_s = (after(answer.ended_at, config.lifetimes.ended_run_grace_s) - now).total_seconds()
        when = f"in {left_s / 60:.0f} min" if left_s >= 60 else "with the next sweep"
        text = f"its run has ended and still holds its instances: refresh releases them {when}; {RELEASE_JOB}"
        yield PoolWarning(kind=WarningKind.RUN_UNRELEASED, subject=answer.run_id, text=text)


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
            text = f"its provision is open {_duration(over_s)} after its deadline: refresh releases its instances"
            yield PoolWarning(kind=WarningKind.OVERDUE, subject=item.subject, text=text)


def _instance_warnings(
    instance: Instance, report: Report | None, now: datetime, margin_s: float
) -> Iterator[PoolWarning]:
    subject, state = instance.instance_id, instance.state
    if state is State.TERMINATED:
        return
    # A job that no one has recorded yet protects a runner of a set.
    over_s = (now - instance.deadline(busy=report is not None and report.busy)).total_seconds()
    if state is State.TERMINATING:
        if over_s > MAX_TERMINATION_S:
            text = f"terminating for {_duration(over_s)} without confirmation: check that refresh runs"
            yield PoolWarning(kind=WarningKind.STUCK, subject=subject, text=text)
        return
    if over_s > margin_s:
        text = f"its threshold as {state} passed {_duration(over_s)} ago: refresh terminates it"
        yield PoolWarning(kind=WarningKind.EXPIRED, subject=subject, text=text)
    if death := describe_dead_agent(instance, report, now=now, margin_s=margin_s):
        yield PoolWarning(kind=WarningKind.STALE_HEARTBEAT, subject=subject, text=death)
    if failure := describe_failed_runner(instance, report):
        # A set replaces its instances itself.
        advice = "" if instance.runner_set else f"; {REPLACE_LOST}"
        text = f"{failure}; the next refresh terminates it{advice}"
        yield PoolWarning(kind=WarningKind.FAILED_RUNNER, subject=subject, text=text)
    if report is not None and report.notice:
        yield PoolWarning(kind=WarningKind.SPOT_NOTICE, subject=subject, text=f"spot notice: {report.notice}")


def max_runtime_s(provision: Provision | None, lifetimes: Lifetimes) -> float:
    """The maximum runtime of a committed run, which may have its own; otherwise the pool's."""
    if provision is None or provision.runner_set or provision.status is not ProvisionStatus.COMMITTED:
        return lifetimes.max_runtime_s
    committed_at = provision.outcome.ended_at if provision.outcome else None
    return (provision.deadline - committed_at).total_seconds() if committed_at else lifetimes.max_runtime_s


def describe_near_expiry(instance: Instance, report: Report | None, *, now: datetime, runtime_s: float) -> str:
    """Say that the maximum runtime ends a running job soon, or return an empty string."""
    has_job = report is not None and report.busy and report.epoch == instance.epoch
    if not has_job or instance.state not in {State.RUNNING, State.RELEASING}:
        return ""
    # A release is extended while a job runs, at most until the run's deadline.
    deadline = instance.deadline(busy=True)
    if instance.state is State.RELEASING and instance.run_deadline is not None:
        deadline = max(deadline, instance.run_deadline)
    left_s = (deadline - now).total_seconds()
    if not 0 < left_s <= min(EXPIRY_WARNING_S, EXPIRY_WARNING_SHARE * runtime_s):
        return ""
    return f"its job is ended in {_duration(left_s)}, at {deadline:%H:%M:%S} UTC, when its max-runtime-min is over"


def describe_failed_runner(instance: Instance, report: Report | None) -> str:
    """Say why the runner of a running instance has failed. Empty if it has not.

    The one rule for the sweep, status and explanations. Example: "its runner failed: the runner exited with the
    terminal code 1".
    """
    return f"its runner failed: {report.detail}" if report is not None and has_failed(instance, report) else ""


def describe_dead_agent(instance: Instance, report: Report | None, *, now: datetime, margin_s: float) -> str:
    """Say that the agent of a live instance is dead. Empty if it is not, or if the machine is still booting.

    The one rule for status, explanations, metrics and the dashboard. Their reader has no earlier beat to compare with,
    so the time of the last one counts, with the clock margin.
    """
    if instance.state in ABSORBING:
        return ""
    silent = _time_since_heartbeat(instance, report, now)
    if silent is None or silent <= timedelta(seconds=HEARTBEAT_DEAD_AFTER_S + margin_s):
        return ""
    return (
        f"no heartbeat for {_duration(silent.total_seconds())}: its agent or its machine is dead; to end it, run "
        f"remuda terminate {instance.instance_id}"
    )


def _duration(seconds: float) -> str:
    """In the largest unit of which there are two, because a warning may be days old."""
    for unit, unit_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _time_since_heartbeat(instance: Instance, report: Report | None, now: datetime) -> timedelta | None:
    """None for a booting machine, whose agent has not started yet."""
    if report is None or report.beat_at is None:
        return None if instance.state is State.CREATED else now - instance.created_at
    return now - report.beat_at
