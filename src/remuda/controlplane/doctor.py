"""Doctor: runs all checks concurrently and combines their results; the checks of the pool's configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from remuda.domain.errors import RemudaError, Unavailable, UserError
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision, ProvisionEnding
from remuda.domain.reporting.demand import WAITING_LIMIT_S, DemandStatus, SessionState
from remuda.domain.reporting.warnings import RELEASE_JOB
from remuda.ports.clock import Clock
from remuda.ports.doctor import Check, CheckResult, CheckStatus, ok, problem, warning

#: Seconds that one check may take.
CHECK_TIMEOUT_S = 45.0
#: Refresh replaces a token with fewer than 3,000 of its 3,600 seconds left. With fewer than these left, no refresh has
#: run for a long time.
MIN_TOKEN_LIFE_S = 600.0

#: Newest provisions that the check of releases reads, and runs that it names.
RECENT_PROVISIONS = 50
MAX_NAMED_RUNS = 3

EXIT_OK = 0

#: Endings of the provisions of runs without a release.
_WITHOUT_RELEASE = frozenset({ProvisionEnding.UNRELEASED, ProvisionEnding.EXPIRED})

_UNREACHABLE_FIX = "check that it can be reached from here"


async def run_checks(checks: Sequence[Check]) -> Mapping[str, CheckResult]:
    """Run the checks concurrently and return their results by name, in the given order.

    A check that needs one with a problem is not run; its result says so.
    """
    tasks: dict[str, asyncio.Task[CheckResult]] = {}
    #: Failed and skipped checks, with the name of the check that has the problem.
    blocked_by: dict[str, str] = {}

    async def run(check: Check) -> CheckResult:
        if check.needs:
            await asyncio.wait([tasks[name] for name in check.needs])
        for name in check.needs:
            if name in blocked_by:
                blocked_by[check.name] = blocked_by[name]
                return warning(f"not checked: {blocked_by[name]} has a problem", f"fix {blocked_by[name]} first")
        result = await _run_check(check)
        # If there was only no answer, the dependent checks may still succeed.
        if result.status is CheckStatus.PROBLEM and not result.unreachable:
            blocked_by[check.name] = check.name
        return result

    async with asyncio.TaskGroup() as group:
        for check in checks:
            tasks[check.name] = group.create_task(run(check))
    return {name: task.result() for name, task in tasks.items()}


async def _run_check(check: Check) -> CheckResult:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            return await check.run()
    except Unavailable as error:
        return _unreachable(error.message, error.fix)
    except RemudaError as error:
        return problem(error.message, error.fix or "see the message")
    except TimeoutError:
        return _unreachable(f"no answer within {CHECK_TIMEOUT_S:g} s")
    except Exception as error:  # noqa: BLE001 - a bug in one check must not stop the others
        return problem(f"a bug: {type(error).__name__}: {error}", "please report it with this line")


def _unreachable(found: str, fix: str = "") -> CheckResult:
    return CheckResult(status=CheckStatus.PROBLEM, message=found, fix=fix or _UNREACHABLE_FIX, unreachable=True)


def exit_code(results: Iterable[CheckResult]) -> int:
    """A problem to fix takes precedence over a service that did not answer."""
    problems = [result for result in results if result.status is CheckStatus.PROBLEM]
    if not problems:
        return EXIT_OK
    to_fix = any(not result.unreachable for result in problems)
    return UserError.exit_code if to_fix else Unavailable.exit_code


# The pool's configuration -------------------------------------------------------------------------------------------

GetConfig = Callable[[], Awaitable[PoolConfig | None]]
CONFIGURATION = "configuration"


def pool_checks(
    get_config: GetConfig, clock: Clock, *, pool: str = "", scope: str = "", needs: tuple[str, ...] = ()
) -> tuple[Check, ...]:
    """Checks of the stored configuration and its tokens. An empty pool or scope matches any."""

    async def configuration() -> CheckResult:
        return _check_configuration(await get_config(), pool)

    async def tokens() -> CheckResult:
        config = await get_config()
        return _check_tokens(config, clock, scope) if config else problem("there are none", "run remuda refresh")

    async def runner_version() -> CheckResult:
        config = await get_config()
        return _check_runner(config, clock) if config else problem("it is not known", "run remuda refresh")

    return (
        Check(name=CONFIGURATION, run=configuration, needs=needs),
        Check(name="tokens", run=tokens, needs=(CONFIGURATION,)),
        Check(name="runner version", run=runner_version, needs=(CONFIGURATION,)),
    )


def runner_set_check(read_demand: Callable[[], Awaitable[DemandStatus]]) -> Check:
    """The check of the runner sets: their sessions, and jobs that wait too long."""

    async def runner_sets() -> CheckResult:
        return _check_runner_sets(await read_demand())

    return Check(name="runner sets", run=runner_sets, needs=(CONFIGURATION,))


def release_check(recent_provisions: Callable[[int], Awaitable[Sequence[Provision]]]) -> Check:
    """The check whether the newest runs were released by their workflows."""

    async def releases() -> CheckResult:
        provisions = await recent_provisions(RECENT_PROVISIONS)
        found = [item for item in provisions if item.ending in _WITHOUT_RELEASE and not item.runner_set]
        if not found:
            return ok(f"the newest {RECENT_PROVISIONS} provisions were released in time, or still may be")
        runs = list(dict.fromkeys(f"{item.run_id} of {item.repository or 'an unknown repository'}" for item in found))
        more = f" and {len(runs) - MAX_NAMED_RUNS} more" if len(runs) > MAX_NAMED_RUNS else ""
        text = f"not released by their workflow: run {', '.join(runs[:MAX_NAMED_RUNS])}{more}"
        return warning(text, RELEASE_JOB)

    return Check(name="releases", run=releases, needs=(CONFIGURATION,))


def _check_runner_sets(demand: DemandStatus) -> CheckResult:
    if not demand.sets and not demand.overdue:
        return ok("none are configured")
    closed = [item for item in demand.sets if item.session is not SessionState.OPEN]
    if closed:
        return problem(f"{closed[0].name}: {closed[0].detail}", "check that remuda listen runs, and its log")
    if demand.overdue:
        first, count = demand.overdue[0], len(demand.overdue)
        text = f"{count} job{' waits' if count == 1 else 's wait'} for more than {WAITING_LIMIT_S / 60:.0f} min"
        return warning(f"{text}; the oldest: {first.detail}", f"run remuda explain {first.job_id}")
    if doubts := [f"{name}: {text}" for name, text in {**demand.disagreements, **demand.unaudited}.items()]:
        return warning("; ".join(doubts), "see remuda explain set.NAME, and the permissions of the GitHub credential")
    if unknown := [item for item in demand.sets if not item.is_current]:
        return warning(f"{unknown[0].name}: {unknown[0].summary}", "check that GitHub answers, and the listener's log")
    names = ", ".join(item.name for item in demand.sets)
    owner = f", listener {demand.listener.owner}" if demand.listener and demand.listener.owner else ""
    return ok(f"{names}{owner}; no job waits too long")


def _check_configuration(config: PoolConfig | None, pool: str) -> CheckResult:
    if config is None:
        return problem("the pool has no configuration yet", "run remuda refresh")
    if pool and config.pool != pool:
        return problem(f"the store belongs to pool {config.pool!r}, not to {pool!r}", f"use --pool {config.pool}")
    names = ", ".join(item.name for item in config.classes)
    applied = f"applied {config.applied_at:%Y-%m-%d %H:%M} UTC"
    return ok(f"pool {config.pool}, {applied}, reuse {config.reuse}, classes {names}")


def _check_runner(config: PoolConfig, clock: Clock) -> CheckResult:
    if config.runner is None:
        return ok("the runner of the image is used; its age is not checked")
    if found := config.runner.warning(clock.now()):
        return warning(found.problem, found.fix)
    deadline = config.runner.deadline
    limit = f", GitHub refuses it from {deadline:%Y-%m-%d} on" if deadline else ""
    return ok(f"{config.runner.version}, the newest is {config.runner.latest}{limit}")


def _check_tokens(config: PoolConfig, clock: Clock, scope: str) -> CheckResult:
    tokens = [item for item in config.tokens if not scope or item.scope.lower() == scope.lower()]
    if not tokens:
        return problem(
            f"there are none for {scope or 'any scope'}", f"run remuda refresh --github-scope {scope}".strip()
        )
    now = clock.now()
    left = {
        item.scope: (min(item.registration.expires_at, item.removal.expires_at) - now).total_seconds()
        for item in tokens
    }
    name, least_s = min(left.items(), key=lambda pair: pair[1])
    fix = "run remuda refresh, and schedule it every five minutes with a credential that may administer runners"
    if least_s <= 0:
        return problem(f"the tokens for {name} expired {-least_s / 60:.0f} min ago", fix)
    if least_s < MIN_TOKEN_LIFE_S:
        return warning(f"the tokens for {name} expire in {least_s / 60:.0f} min", fix)
    return ok(f"for {', '.join(sorted(left))}, valid for {least_s / 60:.0f} min")
