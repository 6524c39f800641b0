"""Status: the fleet as the records, the pool and the provisions show it. Reads only."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from remuda.controlplane.context import Context, readable
from remuda.domain.errors import NotFound, RemudaError
from remuda.domain.instance import ABSORBING, LIVE, Instance, State
from remuda.domain.pool_config import PoolConfig, parse_runner_name
from remuda.domain.provision import Provision, ProvisionStatus, machines_ended
from remuda.domain.reporting.warnings import PoolWarning, find_warnings
from remuda.domain.signals import Report
from remuda.domain.stale_registrations import ghost_reason
from remuda.ports.github import GitHubRunner

#: How many provisions a status shows; those that are open in any case.
RECENT_PROVISIONS = 50
#: No provision may stay open longer: its deadline is not further ahead.
OPEN_AT_MOST = timedelta(hours=1)
#: GitHub counts requests: who looks again and again looks for ghosts only so often.
GHOSTS_EVERY_S = 60.0
FROM_GITHUB = frozenset({"ghost", "github"})


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolLevel:
    idle: int
    #: Messages: about as many as idle instances, sometimes stale or doubled.
    hints: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """A provision that is not committed yet, and what it holds so far."""

    provision: Provision
    #: Instances by state.
    held: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    at: datetime
    pool: str
    config: PoolConfig | None
    instances: Sequence[Instance]
    reports: Mapping[str, Report]
    pools: Mapping[str, PoolLevel]
    runs: Sequence[Provision]
    #: Of committed runs whose machines have all ended, by provision: that, in words.
    ended: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[PoolWarning] = ()
    #: Records that cannot be parsed, one sentence each.
    unreadable: Sequence[str] = ()

    @property
    def openings(self) -> tuple[Opening, ...]:
        return tuple(self._opening(run) for run in self.runs if run.status is ProvisionStatus.OPEN)

    def _opening(self, run: Provision) -> Opening:
        held = Counter(item.state.value for item in self.instances if item.provision_id == run.provision_id)
        return Opening(provision=run, held=dict(held))

    def by_state(self) -> Mapping[str, int]:
        """How many live instances are in each state, in the order of a life."""
        counts = Counter(item.state for item in self.instances)
        return {state.value: counts[state] for state in State if state in LIVE and counts[state]}


async def status(context: Context, *, everything: bool = False, ghosts: bool = True) -> Status:
    """`everything` shows terminated instances too; `ghosts` asks the github, where there is a credential for it."""
    store = context.store
    config = await store.get_config()
    # Listed before the records are read: what they then disown stays disowned.
    runners, troubles = await _runners(context, config) if ghosts else ({}, [])
    states = LIVE | {State.TERMINATED} if everything else LIVE
    found, runs = await asyncio.gather(store.find(states), _runs(context))
    instances = sorted(found, key=lambda item: (item.created_at, item.instance_id))
    classes = [item.name for item in config.classes] if config else []
    unreadable: list[str] = []
    (reports, _), depths, ended = await asyncio.gather(
        readable(store.get_reports([item.instance_id for item in instances]), unreadable.append),
        asyncio.gather(*(_depth(context, name) for name in classes)),
        _ended(context, runs, instances),
    )
    idle = Counter(item.resource_class for item in instances if item.state is State.IDLE)
    unreadable += [f"the record {name} cannot be read: {why}" for name, why in store.malformed_records.items()]
    now = context.clock.now()
    return Status(
        at=now,
        pool=context.pool_name,
        config=config,
        instances=instances,
        reports=reports,
        pools={name: PoolLevel(idle=idle[name], hints=hints) for name, hints in zip(classes, depths, strict=True)},
        runs=runs,
        ended=ended,
        warnings=(
            *find_warnings(config, instances, reports, runs, now=now),
            *(await _ghosts(context, config, runners, instances) if config and runners else ()),
            *troubles,
            *(PoolWarning(kind="unreadable", subject="", text=sentence) for sentence in unreadable),
        ),
        unreadable=tuple(unreadable),
    )


def with_ghosts(fresh: Status, before: Status | None) -> Status:
    """With what GitHub said at the last look that asked it."""
    kept = [item for item in before.warnings if item.kind in FROM_GITHUB] if before else []
    return replace(fresh, warnings=(*fresh.warnings, *kept))


async def _runs(context: Context) -> Sequence[Provision]:
    """The newest, and any that are open, however many came after them. Newest first."""
    store = context.store
    newest, unsettled = await asyncio.gather(
        store.recent_provisions(RECENT_PROVISIONS),
        store.unsettled_provisions(context.clock.now() + OPEN_AT_MOST),
    )
    known = {item.provision_id for item in newest}
    older = [item for item in unsettled if item.status is ProvisionStatus.OPEN and item.provision_id not in known]
    return [*newest, *sorted(older, key=lambda item: (item.created_at, item.provision_id), reverse=True)]


async def _ended(context: Context, runs: Sequence[Provision], instances: Sequence[Instance]) -> dict[str, str]:
    """Only where no machine of a run was found alive its records are read: the search may lag behind them."""
    alive = {item.instance_id for item in instances if item.state not in ABSORBING}
    doubtful = [run for run in runs if run.status is ProvisionStatus.COMMITTED and alive.isdisjoint(run.instance_ids)]
    if not doubtful:
        return {}
    ids = {instance_id for run in doubtful for instance_id in run.instance_ids}
    records, _ = await readable(context.store.get_many(ids), _say_nothing)
    told = {run.provision_id: machines_ended(run, records) for run in doubtful}
    return {provision_id: words for provision_id, words in told.items() if words}


async def _depth(context: Context, resource_class: str) -> int:
    try:
        return await context.pool.depth(resource_class)
    except NotFound:
        return 0


async def _runners(
    context: Context, config: PoolConfig | None
) -> tuple[dict[str, Sequence[GitHubRunner]], list[PoolWarning]]:
    found: dict[str, Sequence[GitHubRunner]] = {}
    troubles: list[PoolWarning] = []
    for scope in (tokens.scope for tokens in config.tokens) if config and context.github else ():
        try:
            found[scope] = await context.github.list_runners(scope) if context.github else ()
        except RemudaError as error:
            text = f"its runners could not be listed: {error.message}"
            troubles.append(PoolWarning(kind="github", subject=scope, text=text))
    return found, troubles


async def _ghosts(
    context: Context,
    config: PoolConfig,
    runners: Mapping[str, Sequence[GitHubRunner]],
    instances: Sequence[Instance],
) -> Sequence[PoolWarning]:
    """Registrations that no assignment owns. What was searched for after the list clears most of them; the records of
    the others are read now.
    """
    now, known = context.clock.now(), {item.instance_id: item for item in instances}

    def why(name: str, record: Instance | None, since: datetime | None) -> str | None:
        return ghost_reason(
            name,
            record,
            pool=config.pool,
            unrecorded_since=since,
            now=now,
            grace_s=config.lifetimes.ghost_after_s,
        )

    ours = [
        (scope, runner.name, parsed[1])
        for scope, listed in runners.items()
        for runner in listed
        if (parsed := parse_runner_name(config.pool, runner.name)) is not None
        and (parsed[1] not in known or why(runner.name, known[parsed[1]], None) is not None)
    ]
    (records, unknown), sightings = await asyncio.gather(
        readable(context.store.get_many({instance_id for _, _, instance_id in ours}), _say_nothing),
        context.store.get_sightings(),
    )
    found = []
    for scope, name, instance_id in ours:
        if instance_id in unknown:
            continue
        reason = why(name, records.get(instance_id), sightings.get(f"ghost:{name}"))
        if reason is not None:
            text = f"a registration in {scope} that nobody owns: {reason}; refresh removes it"
            found.append(PoolWarning(kind="ghost", subject=name, text=text))
    return found


def _say_nothing(_: str) -> None:
    """The search for live records has named it already."""
