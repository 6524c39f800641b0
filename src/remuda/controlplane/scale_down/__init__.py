"""Scale-down: retire what is idle, find what is orphaned, never kill a job.

Observe (compute's lists, GitHub's lists, the records, in this order), decide in the domain, act, tell. What fails stays
where it fails: it is told by name, the others are done, and the next cycle tries again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from remuda.controlplane.context import Context, map_concurrently
from remuda.controlplane.scale_down.pool import PoolRecords
from remuda.controlplane.scale_down.removal import Deregistration, Pace, Removal, registration_of
from remuda.controlplane.scale_down.result import Outcome, ScaleDownResult, Tally
from remuda.domain.errors import RemudaError, UserError
from remuda.domain.scale_down.decisions import (
    Action,
    Decision,
    Lookup,
    ScaleDownPhase,
    ScaleDownPolicy,
    decide_active,
    decide_bypassed,
    decide_orphan,
    needs_lookup,
    within_budget,
)
from remuda.domain.scale_down.fleet import FleetMachine, Registered, Registration, match
from remuda.domain.scale_down.idle_config import quota_at
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock
from remuda.ports.compute import POOL_TAG
from remuda.ports.event_log import EventLog
from remuda.ports.fleet import TaggedFleet
from remuda.ports.github import GitHub

__all__ = ["FleetContext", "Outcome", "ScaleDownResult", "scale_down"]

#: Machines whose registrations are removed before the first of them is ended: what is cut in between is found as an
#: orphan later.
CHUNK = 50

#: A change to several machines; returns by id why some could not be changed.
Change = Callable[[Collection[str]], Awaitable[Mapping[str, str]]]


@dataclass(frozen=True, kw_only=True)
class FleetContext:
    environment: str
    fleet: TaggedFleet
    github: GitHub
    clock: Clock
    event_log: EventLog
    calls: CallCounter
    #: Opens the pool whose records rule its machines. Not called where there is no sign of a pool.
    open_pool: Callable[[], AbstractAsyncContextManager[Context]] | None = None
    #: There is a pool, even if no machine shows it.
    has_pool: bool = False


async def scale_down(context: FleetContext, policy: ScaleDownPolicy, *, dry_run: bool = False) -> ScaleDownResult:
    started = context.clock.monotonic()
    tally = Tally(context.event_log, dry_run=dry_run)
    cycle = Cycle(context, policy, tally, dry_run=dry_run)
    await cycle.run()
    return ScaleDownResult(
        environment=context.environment,
        dry_run=dry_run,
        quota=cycle.quota,
        outcomes=tally.outcomes(),
        errors=tuple(tally.errors),
        seconds=round(context.clock.monotonic() - started, 4),
        calls=context.calls.by_service(),
    )


class Cycle:
    def __init__(self, context: FleetContext, policy: ScaleDownPolicy, tally: Tally, *, dry_run: bool) -> None:
        self._context = context
        self._policy = policy
        self._tally = tally
        self._dry_run = dry_run
        self._now = context.clock.now()
        self.quota = quota_at(policy.windows, self._now)
        self._removal = Deregistration(context.github, Pace(context.clock))
        self._removals_left = policy.max_removals
        #: By scope; None where the list is not complete.
        self._runners: dict[str, Sequence[Registration] | None] = {}

    async def run(self) -> None:
        orphans, machines = await self._list_machines()
        every = {machine.instance_id: machine for machine in (*machines, *orphans)}.values()
        async with self._open_pool(every) as pool:
            await pool.open()
            await pool.read(every)
            concerned = [machine for machine in every if self._ruled(machine, pool, ScaleDownPhase.ACTIVE) is None]
            await self._list_runners(concerned)
            # Read after the lists: what was given a record meanwhile is ruled by it.
            await pool.read(concerned)
            recovered = await self._phase_1(orphans, pool)
            active = [item for item in machines if not item.is_orphan or item.instance_id in recovered]
            await self._phase_2(active, pool)
            await pool.renew(self.quota, dry_run=self._dry_run)

    # Observing --------------------------------------------------------------------------------------------------

    async def _list_machines(self) -> tuple[Sequence[FleetMachine], Sequence[FleetMachine]]:
        async def read(orphans: bool) -> Sequence[FleetMachine]:  # noqa: FBT001 - one of two lists
            return await self._context.fleet.list_machines(orphans=orphans)

        answers = await map_concurrently((True, False), read)
        failures = [answer for answer in answers if isinstance(answer, RemudaError)]
        if len(failures) == len(answers) and isinstance(failures[0], UserError):
            raise failures[0]
        found: list[Sequence[FleetMachine]] = []
        for what, answer in zip(("orphans", "machines"), answers, strict=True):
            if isinstance(answer, RemudaError):
                self._tally.error(f"{what} of {self._context.environment} could not be listed: {answer.message}")
            found.append(() if isinstance(answer, RemudaError) else answer)
        return found[0], found[1]

    @asynccontextmanager
    async def _open_pool(self, machines: Iterable[FleetMachine]) -> AsyncIterator[PoolRecords]:
        opener = self._context.open_pool
        shown = self._context.has_pool or any(POOL_TAG in machine.tags for machine in machines)
        if opener is None or not shown:
            yield PoolRecords(None, self._tally)
            return
        async with AsyncExitStack() as stack:
            pool: Context | None = None
            try:
                pool = await stack.enter_async_context(opener())
            except RemudaError as error:
                self._tally.error(f"the pool cannot be opened: {error.message}")
            yield PoolRecords(pool, self._tally)

    async def _list_runners(self, machines: Sequence[FleetMachine]) -> None:
        """One list for each owner, whatever it is for."""
        places = (_place(machine) for machine in machines)
        scopes = list(dict.fromkeys(scope for scope in places if scope is not None))

        async def read(scope: str) -> list[Registration]:
            return [registration_of(runner) for runner in await self._context.github.list_runners(scope)]

        for scope, answer in zip(scopes, await map_concurrently(scopes, read), strict=True):
            if isinstance(answer, RemudaError):
                self._tally.error(f"owner {scope}: its runners could not be listed: {answer.message}")
            self._runners[scope] = None if isinstance(answer, RemudaError) else answer

    @staticmethod
    def _ruled(machine: FleetMachine, pool: PoolRecords, phase: ScaleDownPhase) -> Decision | None:
        return decide_bypassed(machine, phase) or pool.judge(machine, phase)

    # Deciding ---------------------------------------------------------------------------------------------------

    async def _phase_1(self, orphans: Sequence[FleetMachine], pool: PoolRecords) -> set[str]:
        """Returns who turned out to be none."""
        decisions: list[Decision] = []
        open_cases: list[FleetMachine] = []
        for machine in orphans:
            ruled = self._ruled(machine, pool, ScaleDownPhase.ORPHANS)
            if ruled is None:
                open_cases.append(machine)
            else:
                decisions.append(ruled)
        for machine, lookup in zip(open_cases, await map_concurrently(open_cases, self._look_up), strict=True):
            decisions.append(self._judge_orphan(machine, lookup))
        await self._carry_out(self._budgeted(decisions))
        return {
            item.decision.instance_id
            for item in self._tally.outcomes()
            if item.decision.action is Action.UNMARK_ORPHAN and (item.done or self._dry_run)
        }

    async def _look_up(self, machine: FleetMachine) -> Lookup | None:
        if not needs_lookup(machine) or machine.scope is None or machine.runner_id is None:
            return None
        return Lookup(found=await self._removal.look(machine.scope, machine.runner_id))

    def _judge_orphan(self, machine: FleetMachine, lookup: Lookup | RemudaError | None) -> Decision:
        if isinstance(lookup, RemudaError):
            self._tally.error(f"{machine.instance_id}: runner {machine.runner_id}: {lookup.message}")
            lookup = Lookup(failed=lookup.message)
        if lookup is not None and lookup.found is not None:
            self._remember(machine, lookup.found)
        scope, registered = self._find_registrations(machine)
        return decide_orphan(machine, lookup, registered, found_in=scope)

    def _remember(self, machine: FleetMachine, found: Registration) -> None:
        """A list may lag: what the single look found is known, for phase 2 as well."""
        listed = self._runners.get(machine.scope or "")
        if listed is not None and all(item.runner_id != found.runner_id for item in listed):
            self._runners[machine.scope or ""] = [*listed, found]

    def _find_registrations(self, machine: FleetMachine) -> tuple[str | None, Sequence[Registration] | None]:
        """In its owner's list; of nobody's machine, in any."""
        likely = machine.likely_scope
        if likely is not None:
            known = self._runners.get(likely)
            return likely, None if known is None else _own(machine, known)
        everywhere = {scope: _own(machine, runners or ()) for scope, runners in self._runners.items()}
        found = {scope: own for scope, own in everywhere.items() if own}
        for scope, own in found.items():
            if any(item.busy for item in own):
                return scope, own
        if len(found) == 1:
            return next(iter(found.items()))
        # In none, it may be busy where a list could not be read. In several, no one scope could remove it.
        is_clear = not found and all(runners is not None for runners in self._runners.values())
        return None, () if is_clear else None

    async def _phase_2(self, machines: Sequence[FleetMachine], pool: PoolRecords) -> None:
        decisions: list[Decision] = []
        concerned: list[FleetMachine] = []
        for machine in machines:
            ruled = self._ruled(machine, pool, ScaleDownPhase.ACTIVE)
            if ruled is None:
                concerned.append(machine)
            elif not machine.is_orphan:
                decisions.append(ruled)
        ids = [machine.instance_id for machine in concerned]
        registered: dict[str, Registered | None] = {
            scope: None if runners is None else match(ids, runners) for scope, runners in self._runners.items()
        }
        decisions += self._budgeted(decide_active(concerned, registered, self._policy, self.quota, self._now))
        await self._carry_out(decisions)

    def _budgeted(self, decisions: Sequence[Decision]) -> list[Decision]:
        made = within_budget(decisions, self._removals_left)
        if self._removals_left is not None:
            self._removals_left -= sum(item.is_removal for item in made)
        return made

    # Acting -----------------------------------------------------------------------------------------------------

    async def _carry_out(self, decisions: Sequence[Decision]) -> None:
        planned: dict[Action, list[Decision]] = {action: [] for action in Action}
        for item in decisions:
            planned[item.action].append(item)
        for item in (*planned[Action.KEEP], *planned[Action.SKIP]):
            self._tally.add(item)
        ends = planned[Action.TERMINATE]
        for start in range(0, len(ends), CHUNK):
            planned[Action.UNMARK_ORPHAN] += await self._end(ends[start : start + CHUNK])
        await self._change(planned[Action.MARK_ORPHAN], self._context.fleet.mark_orphans, "could not be marked")
        await self._change(planned[Action.UNMARK_ORPHAN], self._context.fleet.unmark_orphans, "could not be unmarked")

    async def _end(self, decisions: Sequence[Decision]) -> list[Decision]:
        """Returns those that turned out to be busy and no orphans."""
        not_orphans: list[Decision] = []
        clear: list[Decision] = []
        for result in await map_concurrently(decisions, self._remove):
            if isinstance(result, RemudaError):
                raise result
            if result.clear:
                clear.append(result.decision)
            elif result.failed:
                self._fail(result.decision, f"not deregistered: {result.failed}")
            elif result.decision.action is Action.UNMARK_ORPHAN:
                not_orphans.append(result.decision)
            else:
                self._tally.add(result.decision)
        await self._change(clear, self._context.fleet.terminate, "could not be terminated")
        return not_orphans

    async def _remove(self, item: Decision) -> Removal:
        return await self._removal.remove(item, dry_run=self._dry_run)

    async def _change(self, decisions: Sequence[Decision], change: Change, failed: str) -> None:
        if not decisions:
            return
        failures = {} if self._dry_run else await self._ask(change, [item.instance_id for item in decisions])
        for item in decisions:
            if item.instance_id in failures:
                self._fail(item, f"{failed}: {failures[item.instance_id]}")
            else:
                self._tally.add(item, done=not self._dry_run)

    @staticmethod
    async def _ask(change: Change, instance_ids: Sequence[str]) -> Mapping[str, str]:
        try:
            return await change(instance_ids)
        except RemudaError as error:
            return dict.fromkeys(instance_ids, error.message)

    def _fail(self, item: Decision, why: str) -> None:
        self._tally.add(item, done=False)
        self._tally.error(f"{item.instance_id}: {why}")


def _place(machine: FleetMachine) -> str | None:
    """Whose list it takes to judge a machine. What is to be looked up by its id needs an owner beyond doubt."""
    return machine.likely_scope if machine.is_orphan and not machine.runner_id_tag else machine.scope


def _own(machine: FleetMachine, runners: Sequence[Registration]) -> list[Registration]:
    return [runner for runner in runners if runner.belongs_to(machine.instance_id)]
