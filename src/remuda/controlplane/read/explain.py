"""Explanation of a run or an instance: reads the records, histories and reports that it needs. Reads only."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Collection, Sequence
from functools import partial

from remuda.controlplane.context import Context, read_config, skip_unreadable
from remuda.domain.errors import UserError
from remuda.domain.instance import LIVE
from remuda.domain.pool_config import PoolConfig, parse_runner_name
from remuda.domain.provision import Provision, RejectionKind
from remuda.domain.reporting.explanation import Explanation, ExplanationInput, explain_instance, explain_run
from remuda.domain.resources import check_run_id, is_instance_id

FIELD = "RUN|INSTANCE"
#: For an unknown run: recent provisions searched for similar ids, and ids named in the error.
MAX_SEARCHED = 200
MAX_SUGGESTIONS = 5


def check_subject(subject: str) -> str:
    """Validate a run id, instance id or runner name. Makes no call."""
    return subject if is_instance_id(subject) else check_run_id(subject, field=FIELD)


async def explain(context: Context, subject: str) -> Explanation:
    """Explain a run id, an instance id or the name of a runner."""
    config = await read_config(context)
    parsed = parse_runner_name(config.pool, subject)
    if parsed is not None:
        return await _explain_instance(context, config, parsed[1])
    if is_instance_id(subject):
        return await _explain_instance(context, config, subject)
    provisions = await context.store.provisions_of_run(subject)
    if not provisions:
        recent = await context.store.recent_provisions(MAX_SEARCHED)
        raise _unknown("run", subject, list(dict.fromkeys(item.run_id for item in recent)), config)
    return explain_run(subject, provisions, await _read_input(context, config, await _ids(context, provisions)))


async def _explain_instance(context: Context, config: PoolConfig, instance_id: str) -> Explanation:
    found = await _read_input(context, config, [instance_id])
    if instance_id not in found.instances:
        live = await context.store.find(LIVE)
        newest = sorted(live, key=lambda item: item.created_at, reverse=True)
        raise _unknown("instance", instance_id, [item.instance_id for item in newest], config)
    return explain_instance(found.instances[instance_id], found)


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
