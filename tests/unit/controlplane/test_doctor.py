"""The doctor's checks run concurrently; a failing check does not stop the others."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from remuda.adapters.local.layout import LOCAL_GITHUB, SCRIPTS, LocalDoctor
from remuda.controlplane import doctor
from remuda.controlplane.doctor import exit_code, pool_checks, run_checks
from remuda.domain.errors import NotFound, Unavailable, UserError
from remuda.domain.instance import Credential
from remuda.domain.pool_config import PoolConfig, ScopeTokens
from remuda.ports.clock import HTTP_DATE, clock_skew_s
from remuda.ports.doctor import (
    Check,
    CheckResult,
    CheckStatus,
    compare_clocks,
    ok,
    problem,
    warning,
)
from simulation.memory.github import runner_release
from tests.support.records import NOW, pool_config
from tests.support.virtual_time import FixedClock


def check(name: str, result: CheckResult | Exception, *needs: str) -> Check:
    async def run() -> CheckResult:
        if isinstance(result, Exception):
            raise result
        return result

    return Check(name=name, run=run, needs=needs)


async def results_of(*checks: Check) -> dict[str, tuple[str, str, str]]:
    results = await run_checks(checks)
    return {name: (result.status.value, result.message, result.fix) for name, result in results.items()}


async def test_errors_become_problems_and_do_not_stop_other_checks():
    results = await results_of(
        check("fine", ok("all well")),
        check("wrong", UserError("it is wrong", fix="correct it")),
        check("gone", NotFound("no queue q")),
        check("down", Unavailable("SQS cannot be reached")),
        check("bug", ZeroDivisionError("oh")),
        check("last", ok("still here")),
    )
    assert list(results) == ["fine", "wrong", "gone", "down", "bug", "last"]
    assert results["wrong"] == ("problem", "it is wrong", "correct it")
    assert results["gone"][:2] == ("problem", "no queue q")
    assert results["down"][:2] == ("problem", "SQS cannot be reached")
    assert results["bug"][0] == "problem"
    assert "ZeroDivisionError" in results["bug"][1]
    assert results["last"] == ("ok", "still here", "")
    assert all(fix for status, _, fix in results.values() if status != "ok")


async def test_checks_run_concurrently():
    both = asyncio.Barrier(2)

    async def run() -> CheckResult:
        await both.wait()
        return ok("met")

    results = await run_checks([Check(name=name, run=run) for name in ("a", "b")])
    assert [result.message for result in results.values()] == ["met", "met"]


async def test_checks_that_need_a_failed_check_are_skipped():
    results = await results_of(
        check("region", problem("none", "set one")),
        check("credentials", ok("not run"), "region"),
        check("table", ok("not run"), "credentials"),
        check("apart", ok("fine")),
    )
    assert results["credentials"] == ("warning", "not checked: region has a problem", "fix region first")
    assert results["table"] == ("warning", "not checked: region has a problem", "fix region first")
    assert results["apart"][0] == "ok"


async def test_an_unreachable_service_does_not_skip_dependent_checks():
    results = await results_of(check("sts", Unavailable("no answer")), check("table", ok("there"), "sts"))
    assert results["table"][0] == "ok"


async def test_a_check_times_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "CHECK_TIMEOUT_S", 0.01)

    async def run() -> CheckResult:
        await asyncio.Event().wait()
        raise AssertionError

    result = (await run_checks([Check(name="slow", run=run)]))["slow"]
    assert (result.status, result.unreachable) == (CheckStatus.PROBLEM, True)


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([], 0),
        ([ok("a"), warning("b", "c")], 0),
        ([ok("a"), problem("b", "c")], 2),
        ([CheckResult(status=CheckStatus.PROBLEM, message="b", fix="c", unreachable=True)], 4),
        ([CheckResult(status=CheckStatus.PROBLEM, message="b", fix="c", unreachable=True), problem("b", "c")], 2),
    ],
)
def test_exit_code_of_results(results: list[CheckResult], code: int):
    assert exit_code(results) == code


# Pool -----------------------------------------------------------------------------------------------------------


def config(left_s: float, scope: str = "octo/repo") -> PoolConfig:
    token = Credential(token="t", expires_at=NOW + timedelta(seconds=left_s))
    return pool_config(pool="ci", tokens=(ScopeTokens(scope=scope, registration=token, removal=token),))


def with_runner(latest: str, *, days: float = 0) -> PoolConfig:
    """The configuration with runner 2.336.0, outdated since so many days if there is a newer one."""
    runner = replace(
        runner_release("2.336.0"),
        latest=latest,
        checked_at=NOW,
        was_newest=True,
        outdated_since=NOW - timedelta(days=days) if latest != "2.336.0" else None,
    )
    return replace(config(3_000), runner=runner)


def reads(stored: PoolConfig | None) -> Callable[[], Awaitable[PoolConfig | None]]:
    async def get_config() -> PoolConfig | None:
        return stored

    return get_config


@pytest.mark.parametrize(
    ("stored", "name", "status", "text"),
    [
        (None, "configuration", "problem", "no configuration"),
        (config(3_000), "configuration", "ok", "pool ci"),
        (config(3_000), "configuration", "ok", ", reuse same-trust, "),
        (config(3_000), "tokens", "ok", "valid for 50 min"),
        (config(300), "tokens", "warning", "expire in 5 min"),
        (config(-120), "tokens", "problem", "expired 2 min ago"),
        (config(3_000, scope="octo/other"), "tokens", "problem", "none for octo/repo"),
        (config(3_000), "runner version", "ok", "of the image is used; its age is not checked"),
        (with_runner("2.336.0"), "runner version", "ok", "2.336.0, the newest is 2.336.0"),
        (with_runner("2.337.0", days=3), "runner version", "ok", "from 2025-06-27 on"),
        (with_runner("2.337.0", days=23), "runner version", "warning", "refuses from 2025-06-07 on runners of version"),
        (with_runner("2.337.0", days=31), "runner version", "warning", "may refuse runners of version 2.336.0"),
    ],
)
async def test_pool_checks(stored: PoolConfig | None, name: str, status: str, text: str):
    results = await results_of(*pool_checks(reads(stored), FixedClock(), pool="ci", scope="Octo/Repo".lower()))
    assert results[name][0] == status, results
    assert text in results[name][1]


async def test_store_of_another_pool_is_a_problem():
    results = await results_of(*pool_checks(reads(config(3_000)), FixedClock(), pool="other"))
    assert results["configuration"] == ("problem", "the store belongs to pool 'ci', not to 'other'", "use --pool ci")


# Clocks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ahead_s", "health"), [(0, "ok"), (-29, "ok"), (31, "warning"), (-300, "problem")])
def test_clock_skew(ahead_s: float, health: str):
    theirs = (NOW - timedelta(seconds=ahead_s)).strftime(HTTP_DATE)
    result = compare_clocks("AWS", theirs, FixedClock())
    assert result.status.value == health
    if health != "ok":
        assert ("ahead of" if ahead_s > 0 else "behind") in result.message


@pytest.mark.parametrize("date", ["", "yesterday", "2026-01-01T00:00:00Z"])
def test_invalid_date_header_is_ignored(date: str):
    assert clock_skew_s(date, NOW) is None
    assert compare_clocks("AWS", date, FixedClock()).status is CheckStatus.OK


@pytest.mark.parametrize(
    ("stopped", "with_problems", "unchecked"),
    [
        (set(), set(), set()),
        ({"the sweeper"}, {"background processes"}, set()),
        ({"the sweeper", LOCAL_GITHUB}, {"local backend"}, {"background processes", "runner software"}),
    ],
)
async def test_only_what_needs_a_stopped_process_is_not_checked(
    tmp_path: Path, stopped: set[str], with_problems: set[str], unchecked: set[str]
) -> None:
    for name in SCRIPTS:
        (tmp_path / name).touch(mode=0o755)
    background = {name: partial(operator.not_, name in stopped) for name in (LOCAL_GITHUB, "the sweeper")}
    local = LocalDoctor(root=tmp_path, runner=tmp_path, background=background)
    results = await run_checks(list(local.checks()))
    assert {name for name, item in results.items() if item.status is CheckStatus.PROBLEM} == with_problems
    assert {name for name, item in results.items() if item.message.startswith("not checked")} == unchecked
    for name in with_problems:
        assert all(process in results[name].message for process in stopped)
