"""Explain: reads what a story needs, by run, by instance, or by the name of a runner. Reads only."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Collection, Sequence
from functools import partial

from remuda.controlplane.context import Context, read_config, readable
from remuda.domain.errors import UserError
from remuda.domain.instance import LIVE
from remuda.domain.pool_config import PoolConfig, parse_runner_name
from remuda.domain.provision import Provision
from remuda.domain.reporting.explanation import Explanation, ExplanationInput, explain_instance, explain_run
from remuda.domain.resources import check_run_id, is_instance_id

FIELD = "RUN|INSTANCE"
#: How many runs are looked through for one that was meant, and how many are named.
LOOKED_THROUGH = 200
NAMED = 5


def check_subject(subject: str) -> str:
    """Before any call is made."""
    return subject if is_instance_id(subject) else check_run_id(subject, field=FIELD)


async def explain(context: Context, subject: str) -> Explanation:
    config = await read_config(context)
    parsed = parse_runner_name(config.pool, subject)
    if parsed is not None:
        return await _of_instance(context, config, parsed[1])
    if is_instance_id(subject):
        return await _of_instance(context, config, subject)
    provisions = await context.store.provisions_of_run(subject)
    if not provisions:
        raise await _unknown_run(context, subject)
    return explain_run(subject, provisions, await _evidence(context, config, await _ids(context, provisions)))


async def _ids(context: Context, provisions: Sequence[Provision]) -> set[str]:
    """What the commits recorded, what was taken before a rollback, and what the index shows for those cut short."""
    found = await asyncio.gather(*(context.store.find_by_provision(item.provision_id) for item in provisions))
    ids = {instance.instance_id for part in found for instance in part}
    for provision in provisions:
        ids |= set(provision.instance_ids)
        if provision.course is not None:
            ids |= {item.instance_id for item in provision.course.taken}
            ids |= {item.instance_id for item in provision.course.refusals if item.kind == "failed"}
    return ids


async def _evidence(context: Context, config: PoolConfig, ids: Collection[str]) -> ExplanationInput:
    store = context.store
    tell = partial(context.event_log.record, "unreadable")
    (instances, _), histories, (reports, _) = await asyncio.gather(
        readable(store.get_many(ids), tell), store.histories(ids), readable(store.get_reports(ids), tell)
    )
    return ExplanationInput(
        now=context.clock.now(),
        lifetimes=config.lifetimes,
        instances=instances,
        histories=histories,
        reports=reports,
    )


async def _of_instance(context: Context, config: PoolConfig, instance_id: str) -> Explanation:
    evidence = await _evidence(context, config, [instance_id])
    if instance_id not in evidence.instances:
        known = await context.store.find(LIVE)
        newest = sorted(known, key=lambda item: item.created_at, reverse=True)
        raise _unknown("instance", instance_id, [item.instance_id for item in newest], config)
    return explain_instance(evidence.instances[instance_id], evidence)


async def _unknown_run(context: Context, run_id: str) -> UserError:
    config = await read_config(context)
    recent = await context.store.recent_provisions(LOOKED_THROUGH)
    return _unknown("run", run_id, list(dict.fromkeys(item.run_id for item in recent)), config)


def _unknown(what: str, subject: str, known: Sequence[str], config: PoolConfig) -> UserError:
    near = difflib.get_close_matches(subject, known, n=NAMED) or known[:NAMED]
    days = config.lifetimes.keep_records_s / 86_400
    hint = f"known are {', '.join(near)}" if near else f"the pool knows no {what} yet"
    return UserError(
        f"{what} {subject} is not known to pool {config.pool}",
        field=FIELD,
        fix=f"{hint}; records are kept for {days:g} days",
    )
