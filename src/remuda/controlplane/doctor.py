"""Doctor: every check at once, one line each. One that fails stops no other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from remuda.domain.errors import RemudaError, Unavailable, UserError
from remuda.domain.pool_config import PoolConfig
from remuda.ports.clock import Clock
from remuda.ports.doctor import Check, CheckResult, CheckStatus, ok, problem, warning

#: How long one check may take.
LIMIT_S = 45.0
#: A refresh keeps fifty minutes of a token's hour: with less than this left, none has run for long.
TOKEN_LEFT_S = 600.0

EXIT_OK = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    name: str
    finding: CheckResult


async def examine(checks: Sequence[Check]) -> tuple[Checked, ...]:
    """All of them, in the order given. A check whose need has a problem is not made, and says so."""
    begun: dict[str, asyncio.Task[CheckResult]] = {}
    #: Checks that others must wait for, and the one that is to be seen to first.
    blocking: dict[str, str] = {}

    async def one(check: Check) -> CheckResult:
        if check.needs:
            await asyncio.wait([begun[name] for name in check.needs])
        for name in check.needs:
            if name in blocking:
                blocking[check.name] = blocking[name]
                return warning(f"not checked: {blocking[name]} comes first", f"see to {blocking[name]}")
        finding = await _looked(check)
        # Where there was only no answer, the others may have more luck.
        if finding.health is CheckStatus.PROBLEM and not finding.unreachable:
            blocking[check.name] = check.name
        return finding

    async with asyncio.TaskGroup() as group:
        for check in checks:
            begun[check.name] = group.create_task(one(check))
    return tuple(Checked(name=name, finding=task.result()) for name, task in begun.items())


async def _looked(check: Check) -> CheckResult:
    try:
        async with asyncio.timeout(LIMIT_S):
            return await check.look()
    except Unavailable as error:
        return CheckResult(
            health=CheckStatus.PROBLEM,
            found=error.message,
            fix=error.fix or "see that it can be reached",
            unreachable=True,
        )
    except RemudaError as error:
        return problem(error.message, error.fix or "see the message")
    except TimeoutError:
        return CheckResult(
            health=CheckStatus.PROBLEM,
            found=f"no answer within {LIMIT_S:g} s",
            fix="see that it can be reached",
            unreachable=True,
        )
    except Exception as error:  # noqa: BLE001 - one that fails stops no other, whatever it is
        return problem(f"a bug: {type(error).__name__}: {error}", "please report it with this line")


def exit_code(checked: Sequence[Checked]) -> int:
    """What is to be fixed goes before what did not answer."""
    problems = [item.finding for item in checked if item.finding.health is CheckStatus.PROBLEM]
    if not problems:
        return EXIT_OK
    to_fix = any(not finding.unreachable for finding in problems)
    return UserError.exit_code if to_fix else Unavailable.exit_code


# The pool -----------------------------------------------------------------------------------------------------------

GetConfig = Callable[[], Awaitable[PoolConfig | None]]
CONFIGURATION = "configuration"


def pool_checks(
    get_config: GetConfig, clock: Clock, *, pool: str = "", scope: str = "", needs: tuple[str, ...] = ()
) -> tuple[Check, ...]:
    """What the store says of the pool. Name and scope are empty where nobody asks for certain ones."""

    async def configuration() -> CheckResult:
        return _configuration(await get_config(), pool)

    async def tokens() -> CheckResult:
        config = await get_config()
        return _tokens(config, clock, scope) if config else problem("there are none", "run remuda refresh")

    return (
        Check(name=CONFIGURATION, look=configuration, needs=needs),
        Check(name="tokens", look=tokens, needs=(CONFIGURATION,)),
    )


def _configuration(config: PoolConfig | None, pool: str) -> CheckResult:
    if config is None:
        return problem("the pool has no configuration yet", "run remuda refresh")
    if pool and config.pool != pool:
        return problem(f"the store belongs to pool {config.pool!r}, not to {pool!r}", f"use --pool {config.pool}")
    names = ", ".join(each.name for each in config.classes)
    applied = f"applied {config.applied_at:%Y-%m-%d %H:%M} UTC"
    return ok(f"pool {config.pool}, {applied}, reuse {config.reuse}, classes {names}")


def _tokens(config: PoolConfig, clock: Clock, scope: str) -> CheckResult:
    wanted = [item for item in config.tokens if not scope or item.scope.lower() == scope.lower()]
    if not wanted:
        return problem(
            f"there are none for {scope or 'any scope'}", f"run remuda refresh --github-scope {scope}".strip()
        )
    now = clock.now()
    left = {
        item.scope: (min(item.registration.expires_at, item.removal.expires_at) - now).total_seconds()
        for item in wanted
    }
    name, least_s = min(left.items(), key=lambda pair: pair[1])
    fix = "run remuda refresh, and see that it runs every five minutes with a credential that may administer runners"
    if least_s <= 0:
        return problem(f"those for {name} ran out {-least_s / 60:.0f} min ago", fix)
    if least_s < TOKEN_LEFT_S:
        return warning(f"those for {name} run out in {least_s / 60:.0f} min", fix)
    return ok(f"for {', '.join(sorted(left))}, good for {least_s / 60:.0f} min")
