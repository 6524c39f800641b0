"""Heartbeat of the listener as a metric, with the counts of its pool. An alarm notices if it is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from remuda.controlplane.context import Context
from remuda.controlplane.demand.machines import KnownMachine
from remuda.controlplane.demand.sets import SetState
from remuda.domain.demand import count_waiting
from remuda.domain.errors import RemudaError
from remuda.domain.reporting.job_queue import find_unassigned
from remuda.ports.metrics import MetricWriter

HEARTBEATS = "Heartbeats"
#: Seconds between two writes. Each call and each metric costs money; the alarm is evaluated every 60 seconds.
INTERVAL_S = 50.0


async def write_heartbeats(context: Context, metrics: MetricWriter, counts: Callable[[], Mapping[str, float]]) -> None:
    """Write until cancelled. A failed write changes nothing but the metric, and is logged once."""
    problem = ""
    while True:
        try:
            await metrics.write({HEARTBEATS: 1.0, **counts()})
            problem = ""
        except RemudaError as error:
            if error.message != problem:
                context.event_log.record("metrics-failed", error.message)
            problem = error.message
        await context.clock.sleep(INTERVAL_S)


def pool_counts(context: Context, sets: Iterable[SetState], machines: Iterable[KnownMachine]) -> dict[str, float]:
    """The counts of all sets together: CloudWatch charges per metric."""
    now, true_now = context.clock.now(), context.with_true_time().clock.now()
    states = list(sets)
    queues = [queue for state in states for queue in state.record.queues]
    known = [job for state in states for job in state.jobs.values()]
    unassigned = find_unassigned(queues, [state.runner_set for state in states], known, now=true_now)
    queued = Counter(item.set_name for item in unassigned if item.counts(true_now))
    waiting = [count_waiting(state.statistics, state.waiting_jobs(now), queued=queued[state.name]) for state in states]
    current = [item for item in machines if item.report is not None and item.report.epoch == item.instance.epoch]
    return {
        "JobsWaiting": float(sum(waiting)),
        "RunnersListening": float(sum(item.report.listening for item in current if item.report is not None)),
        "RunnersBusy": float(sum(item.report.busy for item in current if item.report is not None)),
        "SetsFailing": float(sum(bool(state.session_problem or state.shortage) for state in states)),
    }
