"""Explanation of a run, job, runner set or instance: reads the records that it needs. Reads only."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from remuda.controlplane.context import Context, find_by_prefix, read_config, skip_unreadable
from remuda.controlplane.read.demand import read_demand_input
from remuda.domain.errors import UserError
from remuda.domain.holder import set_of_subject
from remuda.domain.instance import LIVE
from remuda.domain.pool_config import PoolConfig, parse_runner_name
from remuda.domain.provision import Provision, RejectionKind
from remuda.domain.reporting.demand import DemandInput, DemandStatus, demand_status
from remuda.domain.reporting.explanation import Explanation, ExplanationInput, explain_instance, explain_run
from remuda.domain.reporting.job_explanation import commands_for, explain_job, explain_jobs, explain_queued, explain_set
from remuda.domain.resources import check_instance_id, check_run_id, is_instance_id, is_short_instance_id
from remuda.domain.runner_set import is_set_name

FIELD = "RUN|JOB|SET|INSTANCE"
#: For an unknown run: recent provisions searched for similar ids, and ids named in the error.
MAX_SEARCHED = 200
MAX_SUGGESTIONS = 5
#: Newest provisions that explain why jobs of sets wait.
RECENT_PROVISIONS = 50


def check_subject(subject: str) -> str:
    """Validate a run id, job id, `set.` and the name of a set, instance id or runner name. Makes no call."""
    if is_instance_id(subject) or is_set_name(set_of_subject(subject) or ""):
        return subject
    if is_short_instance_id(subject):
        return check_instance_id(subject, field=FIELD)
    return check_run_id(subject, field=FIELD)


async def explain(context: Context, subject: str, *, command: str = "") -> Explanation:
    """Explain a run id, a job id, `set.` and the name of a runner set, an instance id or the name of a runner.

    `command` is the one that changes the runner sets of the pool, for readers with a command line.
    """
    config = await read_config(context)
    context = context.with_true_time()
    parsed = parse_runner_name(config.pool, subject)
    if parsed is not None:
        return await _explain_instance(context, config, parsed[1])
    if is_instance_id(subject):
        return await _explain_instance(context, config, subject)
    if (name := set_of_subject(subject)) is not None:
        return await _explain_set(context, config, name)
    provisions = await context.store.provisions_of_run(subject)
    if not provisions:
        return await _explain_jobs(context, config, subject, command)
    explanation = explain_run(subject, provisions, await _read_input(context, config, await _ids(context, provisions)))
    queued = (await _read_demand(context, config)).status.queued
    waiting = [job for job in queued if job.run_id == subject]
    steps = [f"job {job.name or job.job_id} waits: {job.detail}" for job in waiting]
    commands = dict.fromkeys(text for job in waiting for text in commands_for(job, config, command))
    return replace(explanation, next_steps=(*steps, *commands, *explanation.next_steps))


async def _explain_instance(context: Context, config: PoolConfig, instance_id: str) -> Explanation:
    found = await _read_input(context, config, [instance_id])
    if instance_id not in found.instances:
        live = await context.store.find(LIVE)
        match = find_by_prefix(live, instance_id)
        if match is not None:
            return await _explain_instance(context, config, match.instance_id)
        newest = sorted(live, key=lambda item: item.created_at, reverse=True)
        raise _unknown("instance", instance_id, [item.instance_id for item in newest], config)
    return explain_instance(found.instances[instance_id], found)


async def _explain_jobs(context: Context, config: PoolConfig, subject: str, command: str) -> Explanation:
    """Explain a run without a provision, or a single job."""
    store = context.store
    jobs, single = await asyncio.gather(store.jobs_of_run(subject), store.get_jobs([subject]))
    jobs = jobs or list(single.values())
    found = await _read_demand(context, config)
    if not jobs:
        queued = [job for job in found.status.queued if subject in {job.run_id, job.job_id}]
        if queued:
            return explain_queued(subject, queued, config, command)
        recent = await store.recent_provisions(MAX_SEARCHED)
        known = [*(item.run_id for item in found.records.jobs), *(item.run_id for item in recent if item.run_id)]
        raise _unknown("run or job", subject, list(dict.fromkeys(known)), config)
    ids = {parsed[1] for job in jobs if (parsed := parse_runner_name(config.pool, job.runner_name)) is not None}
    records = await _read_input(context, config, ids)
    if subject in single:
        return explain_job(single[subject], records, found.records, found.status)
    return explain_jobs(subject, jobs, records, found.records, found.status)


async def _explain_set(context: Context, config: PoolConfig, name: str) -> Explanation:
    found = await _read_demand(context, config)
    status = found.status.find_set(name)
    if status is None:
        raise _unknown("set", name, [item.name for item in found.status.sets], config)
    provisions = [item for item in found.records.provisions if item.runner_set == name]
    return explain_set(status, found.records, provisions)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Demand:
    records: DemandInput
    status: DemandStatus


async def _read_demand(context: Context, config: PoolConfig) -> _Demand:
    live, provisions, sweep = await asyncio.gather(
        context.store.find(LIVE), context.store.recent_provisions(RECENT_PROVISIONS), context.store.get_sweep_record()
    )
    ids = [item.instance_id for item in live if item.runner_set]
    reports, _ = await skip_unreadable(context.store.get_reports(ids), partial(context.event_log.record, "unreadable"))
    records = await read_demand_input(context, config, live, reports, provisions, sweep=sweep)
    return _Demand(records=records, status=demand_status(records))


async def _ids(context: Context, provisions: Sequence[Provision]) -> set[str]:
    """Instances that were committed, acquired before a rollback, claimed without success, or that the index shows."""
    found = await asyncio.gather(*(context.store.find_by_provision(item.provision_id) for item in provisions))
    ids = {instance.instance_id for part in found for instance in part}
    for provision in provisions:
        ids |= set(provision.instance_ids)
        if provision.outcome is not None:
            ids |= {item.instance_id for item in provision.outcome.acquired}
            ids |= {
                item.instance_id
                for item in provision.outcome.rejections
                if item.kind is RejectionKind.REGISTRATION_FAILED
            }
    return ids


async def _read_input(context: Context, config: PoolConfig, ids: Collection[str]) -> ExplanationInput:
    store = context.store
    report_error = partial(context.event_log.record, "unreadable")
    (instances, _), histories, (reports, _) = await asyncio.gather(
        skip_unreadable(store.get_many(ids), report_error),
        store.histories(ids),
        skip_unreadable(store.get_reports(ids), report_error),
    )
    return ExplanationInput(
        now=context.clock.now(),
        lifetimes=config.lifetimes,
        instances=instances,
        histories=histories,
        reports=reports,
    )


def _unknown(kind: str, subject: str, known: Sequence[str], config: PoolConfig) -> UserError:
    similar = difflib.get_close_matches(subject, known, n=MAX_SUGGESTIONS) or known[:MAX_SUGGESTIONS]
    days = config.lifetimes.keep_records_s / 86_400
    suggestion = f"known are {', '.join(similar)}" if similar else f"the pool knows no {kind} yet"
    return UserError(
        f"{kind} {subject} is not known to pool {config.pool}",
        field=FIELD,
        fix=f"{suggestion}; records are kept for {days:g} days",
    )
