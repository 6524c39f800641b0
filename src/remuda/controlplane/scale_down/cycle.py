"""One scale-down cycle: list machines, then runners, then records; decide in the domain; carry out the decisions.

A failure concerns only its machine or owner: it is reported by name, and the next cycle tries again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from remuda.controlplane.context import Context, map_concurrently
from remuda.controlplane.scale_down.pool_records import PoolRecords
from remuda.controlplane.scale_down.result import ScaleDownResult, ScaleDownResultBuilder
from remuda.domain.errors import RemudaError, UserError
from remuda.domain.scale_down.decisions import (
    Action,
    Decision,
    Lookup,
    ScaleDownPhase,
    decide_active,
    decide_bypassed,
    decide_orphan,
    found_busy,
    within_budget,
)
from remuda.domain.scale_down.fleet import FleetMachine, Registration, Registrations, match_registrations
from remuda.domain.scale_down.idle_config import quota_at
from remuda.domain.scale_down.policy import ScaleDownPolicy
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock
from remuda.ports.compute import POOL_TAG, TaggedFleet
from remuda.ports.event_log import EventLog
from remuda.ports.github import Deletion, GitHub, GitHubRunner

#: Machines whose registrations are removed before the first of them is terminated. If the cycle is interrupted in
#: between, later cycles find these machines as orphans.
TERMINATION_BATCH = 50

#: A change to several machines. Returns the failures: reason by instance id.
FleetChange = Callable[[Collection[str]], Awaitable[Mapping[str, str]]]
#: GitHub's secondary rate limit is 900 points per minute; a read costs one point, a write five. The remaining 100
#: points are for lists.
POINTS_PER_MINUTE = 800
READ_POINTS, WRITE_POINTS = 1, 5
MINUTE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class FleetContext:
    environment: str
    fleet: TaggedFleet
    github: GitHub
    clock: Clock
    event_log: EventLog
    calls: CallCounter
    #: Opens the store of the pool. Called only if a machine carries a pool tag, or with `has_pool`.
    open_pool: Callable[[], AbstractAsyncContextManager[Context]] | None = None
    #: Whether there is a pool even if no machine carries its tag.
    has_pool: bool = False


async def scale_down(context: FleetContext, policy: ScaleDownPolicy, *, dry_run: bool = False) -> ScaleDownResult:
    started = context.clock.monotonic()
    result = ScaleDownResultBuilder(context.event_log, dry_run=dry_run)
    cycle = ScaleDownCycle(context, policy, result, dry_run=dry_run)
    await cycle.run()
    return ScaleDownResult(
        environment=context.environment,
        dry_run=dry_run,
        quota=cycle.quota,
        outcomes=result.outcomes(),
        errors=tuple(result.errors),
        seconds=round(context.clock.monotonic() - started, 4),
        calls=context.calls.by_service(),
    )


class ScaleDownCycle:
    def __init__(
        self, context: FleetContext, policy: ScaleDownPolicy, result: ScaleDownResultBuilder, *, dry_run: bool
    ) -> None:
        self._context = context
        self._policy = policy
        self._result = result
        self._dry_run = dry_run
        self._now = context.clock.now()
        self.quota = quota_at(policy.windows, self._now)
        self._remover = RegistrationRemover(context.github, GitHubRateLimiter(context.clock))
        self._removals_left = policy.max_removals
        #: Registrations by scope; None if the list could not be read completely.
        self._runners: dict[str, Sequence[Registration] | None] = {}

    async def run(self) -> None:
        orphans, machines = await self._list_machines()
        every = {machine.instance_id: machine for machine in (*machines, *orphans)}.values()
        async with self._open_pool(every) as pool:
            await pool.open()
            await pool.read(every)
            undecided = [
                machine for machine in every if self._decide_early(machine, pool, ScaleDownPhase.ACTIVE) is None
            ]
            await self._list_runners(undecided)
            # Read again after the lists: a machine may have got a record meanwhile.
            await pool.read(undecided)
            recovered = await self._process_orphans(orphans, pool)
            active = [item for item in machines if not item.is_orphan or item.instance_id in recovered]
            await self._process_active(active, pool)
            await pool.renew(self.quota, dry_run=self._dry_run)

    # Reading ----------------------------------------------------------------------------------------------------

    async def _list_machines(self) -> tuple[Sequence[FleetMachine], Sequence[FleetMachine]]:
        """Return orphans and all machines. A list that could not be read is reported and empty."""

        async def read(orphans: bool) -> Sequence[FleetMachine]:  # noqa: FBT001 - one of two lists
            return await self._context.fleet.list_machines(orphans=orphans)

        answers = await map_concurrently((True, False), read)
        failures = [answer for answer in answers if isinstance(answer, RemudaError)]
        if len(failures) == len(answers) and isinstance(failures[0], UserError):
            raise failures[0]
        found: list[Sequence[FleetMachine]] = []
        for kind, answer in zip(("orphans", "machines"), answers, strict=True):
            if isinstance(answer, RemudaError):
                self._result.error(f"{kind} of {self._context.environment} could not be listed: {answer.message}")
            found.append(() if isinstance(answer, RemudaError) else answer)
        return found[0], found[1]

    @asynccontextmanager
    async def _open_pool(self, machines: Iterable[FleetMachine]) -> AsyncIterator[PoolRecords]:
        opener = self._context.open_pool
        has_pool = self._context.has_pool or any(POOL_TAG in machine.tags for machine in machines)
        if opener is None or not has_pool:
            yield PoolRecords(None, self._result)
            return
        async with AsyncExitStack() as stack:
            pool: Context | None = None
            try:
                pool = await stack.enter_async_context(opener())
            except RemudaError as error:
                self._result.error(f"the pool cannot be opened: {error.message}")
            yield PoolRecords(pool, self._result)

    async def _list_runners(self, machines: Sequence[FleetMachine]) -> None:
        """List the runners of each owner once."""
        candidates = (_scope_to_list(machine) for machine in machines)
        scopes = list(dict.fromkeys(scope for scope in candidates if scope is not None))

        async def read(scope: str) -> list[Registration]:
            return [to_registration(runner) for runner in await self._context.github.list_runners(scope)]

        for scope, answer in zip(scopes, await map_concurrently(scopes, read), strict=True):
            if isinstance(answer, RemudaError):
                self._result.error(f"owner {scope}: its runners could not be listed: {answer.message}")
            self._runners[scope] = None if isinstance(answer, RemudaError) else answer

    # Decisions --------------------------------------------------------------------------------------------------

    @staticmethod
    def _decide_early(machine: FleetMachine, pool: PoolRecords, phase: ScaleDownPhase) -> Decision | None:
        """The decision for a machine that is bypassed or belongs to a pool; None if it depends on its registrations."""
        return decide_bypassed(machine, phase) or pool.decide(machine, phase)

    async def _process_orphans(self, orphans: Sequence[FleetMachine], pool: PoolRecords) -> set[str]:
        """Phase 1: verify machines that are marked as orphans. Return the ids of those that are not orphans."""
        decisions: list[Decision] = []
        undecided: list[FleetMachine] = []
        for machine in orphans:
            early = self._decide_early(machine, pool, ScaleDownPhase.ORPHANS)
            if early is None:
                undecided.append(machine)
            else:
                decisions.append(early)
        for machine, lookup in zip(undecided, await map_concurrently(undecided, self._look_up), strict=True):
            decisions.append(self._decide_orphan(machine, lookup))
        await self._carry_out(self._within_budget(decisions))
        return {
            item.decision.instance_id
            for item in self._result.outcomes()
            if item.decision.action is Action.UNMARK_ORPHAN and (item.done or self._dry_run)
        }

    async def _look_up(self, machine: FleetMachine) -> Lookup | None:
        if machine.scope is None or machine.runner_id is None:
            return None
        return Lookup(found=await self._remover.get(machine.scope, machine.runner_id))

    def _decide_orphan(self, machine: FleetMachine, lookup: Lookup | RemudaError | None) -> Decision:
        if isinstance(lookup, RemudaError):
            self._result.error(f"{machine.instance_id}: runner {machine.runner_id}: {lookup.message}")
            lookup = Lookup(failed=lookup.message)
        if lookup is not None and lookup.found is not None:
            self._add_to_list(machine, lookup.found)
        scope, registered = self._find_registrations(machine)
        return decide_orphan(machine, lookup, registered, found_in=scope)

    def _add_to_list(self, machine: FleetMachine, found: Registration) -> None:
        """GitHub's list may lag: add what the single lookup found, for phase 2 as well."""
        listed = self._runners.get(machine.scope or "")
        if listed is not None and all(item.runner_id != found.runner_id for item in listed):
            self._runners[machine.scope or ""] = [*listed, found]

    def _find_registrations(self, machine: FleetMachine) -> tuple[str | None, Sequence[Registration] | None]:
        """Return the machine's registrations and their scope. Registrations are None if they cannot be determined.

        A machine without an owner is searched for in all lists.
        """
        likely = machine.likely_scope
        if likely is not None:
            known = self._runners.get(likely)
            return likely, None if known is None else _registrations_of(machine, known)
        everywhere = {scope: _registrations_of(machine, runners or ()) for scope, runners in self._runners.items()}
        found = {scope: own for scope, own in everywhere.items() if own}
        for scope, own in found.items():
            if any(item.busy for item in own):
                return scope, own
        if len(found) == 1:
            return next(iter(found.items()))
        # If none was found, the machine may be busy in a scope whose list failed. If several were found, one scope
        # cannot remove them all.
        is_unregistered = not found and all(runners is not None for runners in self._runners.values())
        return None, () if is_unregistered else None

    async def _process_active(self, machines: Sequence[FleetMachine], pool: PoolRecords) -> None:
        """Phase 2: machines that are not orphans, or no longer."""
        decisions: list[Decision] = []
        undecided: list[FleetMachine] = []
        for machine in machines:
            early = self._decide_early(machine, pool, ScaleDownPhase.ACTIVE)
            if early is None:
                undecided.append(machine)
            elif not machine.is_orphan:
                decisions.append(early)
        ids = [machine.instance_id for machine in undecided]
        registered: dict[str, Registrations | None] = {
            scope: None if runners is None else match_registrations(ids, runners)
            for scope, runners in self._runners.items()
        }
        decisions += self._within_budget(decide_active(undecided, registered, self._policy, self.quota, self._now))
        await self._carry_out(decisions)

    def _within_budget(self, decisions: Sequence[Decision]) -> list[Decision]:
        limited = within_budget(decisions, self._removals_left)
        if self._removals_left is not None:
            self._removals_left -= sum(item.is_removal for item in limited)
        return limited

    # Actions ----------------------------------------------------------------------------------------------------

    async def _carry_out(self, decisions: Sequence[Decision]) -> None:
        by_action: dict[Action, list[Decision]] = {action: [] for action in Action}
        for item in decisions:
            by_action[item.action].append(item)
        for item in (*by_action[Action.KEEP], *by_action[Action.SKIP]):
            self._result.add(item)
        terminations = by_action[Action.TERMINATE]
        for start in range(0, len(terminations), TERMINATION_BATCH):
            batch = terminations[start : start + TERMINATION_BATCH]
            by_action[Action.UNMARK_ORPHAN] += await self._terminate(batch)
        fleet = self._context.fleet
        await self._change(by_action[Action.MARK_ORPHAN], fleet.mark_orphans, "could not be marked")
        await self._change(by_action[Action.UNMARK_ORPHAN], fleet.unmark_orphans, "could not be unmarked")

    async def _terminate(self, decisions: Sequence[Decision]) -> list[Decision]:
        """Remove the registrations, then terminate the machines. Return decisions for machines that are busy, so not
        orphans.
        """
        not_orphans: list[Decision] = []
        deregistered: list[Decision] = []
        for result in await map_concurrently(decisions, self._remove_registrations):
            if isinstance(result, RemudaError):
                raise result
            if result.deregistered:
                deregistered.append(result.decision)
            elif result.error:
                self._fail(result.decision, f"not deregistered: {result.error}")
            elif result.decision.action is Action.UNMARK_ORPHAN:
                not_orphans.append(result.decision)
            else:
                self._result.add(result.decision)
        await self._change(deregistered, self._context.fleet.terminate, "could not be terminated")
        return not_orphans

    async def _remove_registrations(self, item: Decision) -> RemovalResult:
        return await self._remover.remove(item, dry_run=self._dry_run)

    async def _change(self, decisions: Sequence[Decision], change: FleetChange, problem: str) -> None:
        if not decisions:
            return
        failures: Mapping[str, str] = {}
        if not self._dry_run:
            ids = [item.instance_id for item in decisions]
            try:
                failures = await change(ids)
            except RemudaError as error:
                failures = dict.fromkeys(ids, error.message)
        for item in decisions:
            if item.instance_id in failures:
                self._fail(item, f"{problem}: {failures[item.instance_id]}")
            else:
                self._result.add(item, done=not self._dry_run)

    def _fail(self, item: Decision, why: str) -> None:
        self._result.add(item, done=False)
        self._result.error(f"{item.instance_id}: {why}")


def _scope_to_list(machine: FleetMachine) -> str | None:
    """The scope whose runners decide about a machine. A runner id in its tags is looked up only in a certain scope."""
    return machine.likely_scope if machine.is_orphan and not machine.runner_id_tag else machine.scope


def _registrations_of(machine: FleetMachine, runners: Sequence[Registration]) -> list[Registration]:
    return [runner for runner in runners if runner.belongs_to(machine.instance_id)]


# Removal of registrations before their machines are terminated: check again that none is busy, then delete all -------


class GitHubRateLimiter:
    """Limits the points spent in any 60 seconds of the monotonic clock. Within the limit, calls do not wait."""

    def __init__(self, clock: Clock, *, points_per_minute: int = POINTS_PER_MINUTE) -> None:
        self._clock = clock
        self._left = points_per_minute
        #: Time and points of the calls within the last minute.
        self._spent: deque[tuple[float, int]] = deque()
        self._lock = asyncio.Lock()

    async def spend(self, points: int) -> None:
        async with self._lock:
            self._return_points()
            while self._left < points:
                await self._clock.sleep(self._spent[0][0] + MINUTE_S - self._clock.monotonic())
                self._return_points()
            self._left -= points
            self._spent.append((self._clock.monotonic(), points))

    def _return_points(self) -> None:
        while self._spent and self._clock.monotonic() - self._spent[0][0] >= MINUTE_S:
            self._left += self._spent.popleft()[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class RemovalResult:
    #: The given decision, or a new one if a runner is busy.
    decision: Decision
    #: Every registration is gone: the machine may be terminated.
    deregistered: bool = False
    #: Why GitHub did not answer or refused; empty if it did not.
    error: str = ""


def to_registration(runner: GitHubRunner) -> Registration:
    return Registration(runner_id=runner.runner_id, name=runner.name, online=runner.online, busy=runner.busy)


class RegistrationRemover:
    def __init__(self, github: GitHub, limiter: GitHubRateLimiter) -> None:
        self._github = github
        self._limiter = limiter

    async def get(self, scope: str, runner_id: int) -> Registration | None:
        await self._limiter.spend(READ_POINTS)
        runner = await self._github.get_runner(scope, runner_id)
        return None if runner is None else to_registration(runner)

    async def remove(self, item: Decision, *, dry_run: bool) -> RemovalResult:
        """Remove all registrations of a machine, or none if one of them is busy."""
        try:
            busy = await self._remove_unless_busy(item, dry_run=dry_run)
        except RemudaError as error:
            return RemovalResult(decision=item, error=error.message)
        if busy is not None:
            return RemovalResult(decision=found_busy(item, busy))
        return RemovalResult(decision=item, deregistered=True)

    async def _remove_unless_busy(self, item: Decision, *, dry_run: bool) -> Registration | None:
        """Return the busy registration, or None if all are gone."""
        scope, to_delete = item.scope, list(item.registrations)
        if scope is None:
            return None
        for registration in item.registrations:
            current = await self.get(scope, registration.runner_id)
            if current is not None and current.busy:
                return current
        tagged = await self.get(scope, item.tagged_runner_id) if item.tagged_runner_id is not None else None
        if tagged is not None and tagged.belongs_to(item.instance_id):
            if tagged.busy:
                return tagged
            to_delete.append(tagged)
        for registration in () if dry_run else to_delete:
            await self._limiter.spend(WRITE_POINTS)
            # Delete even if the read did not find it: only the deletion is atomic.
            if await self._github.delete_runner(scope, registration.runner_id) is Deletion.BUSY:
                return registration
        return None
