"""Every check at once; one that fails stops no other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from remuda.controlplane import doctor
from remuda.controlplane.doctor import Checked, examine, exit_code, pool_checks
from remuda.domain.errors import NotFound, Unavailable, UserError
from remuda.domain.instance import Credential
from remuda.domain.pool_config import PoolConfig, ScopeTokens
from remuda.domain.resources import DEFAULT_CLASSES
from remuda.domain.skew import HTTP_DATE, skew_s
from remuda.domain.thresholds import Lifetimes
from remuda.ports.doctor import Check, CheckResult, CheckStatus, clocks, ok, problem, warning
from tests.support.records import NOW


class At:
    """A clock that stands."""

    def now(self) -> Any:
        return NOW

    def monotonic(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


def check(name: str, finding: CheckResult | Exception, *needs: str) -> Check:
    async def look() -> CheckResult:
        if isinstance(finding, Exception):
            raise finding
        return finding

    return Check(name=name, look=look, needs=needs)


async def found(*checks: Check) -> dict[str, tuple[str, str, str]]:
    return {
        item.name: (item.finding.health.value, item.finding.found, item.finding.fix) for item in await examine(checks)
    }


async def test_errors_become_findings_and_the_others_go_on():
    seen = await found(
        check("fine", ok("all well")),
        check("wrong", UserError("it is wrong", fix="mend it")),
        check("gone", NotFound("no queue q")),
        check("down", Unavailable("SQS cannot be reached")),
        check("bug", ZeroDivisionError("oh")),
        check("last", ok("still here")),
    )
    assert list(seen) == ["fine", "wrong", "gone", "down", "bug", "last"]
    assert seen["wrong"] == ("problem", "it is wrong", "mend it")
    assert seen["gone"][:2] == ("problem", "no queue q")
    assert seen["down"][:2] == ("problem", "SQS cannot be reached")
    assert seen["bug"][0] == "problem"
    assert "ZeroDivisionError" in seen["bug"][1]
    assert seen["last"] == ("ok", "still here", "")
    assert all(fix for status, _, fix in seen.values() if status != "ok")


async def test_they_run_at_the_same_time():
    both = asyncio.Barrier(2)

    async def look() -> CheckResult:
        await both.wait()
        return ok("met")

    checked = await examine([Check(name=name, look=look) for name in ("a", "b")])
    assert [item.finding.found for item in checked] == ["met", "met"]


async def test_what_follows_from_a_problem_is_told_once():
    seen = await found(
        check("region", problem("none", "set one")),
        check("credentials", ok("never asked"), "region"),
        check("table", ok("never asked"), "credentials"),
        check("apart", ok("fine")),
    )
    assert seen["credentials"] == ("warning", "not checked: region comes first", "see to region")
    assert seen["table"] == ("warning", "not checked: region comes first", "see to region")
    assert seen["apart"][0] == "ok"


async def test_no_answer_from_one_does_not_keep_the_others_from_asking():
    seen = await found(check("sts", Unavailable("no answer")), check("table", ok("there"), "sts"))
    assert seen["table"][0] == "ok"


async def test_one_that_never_answers_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "LIMIT_S", 0.01)

    async def look() -> CheckResult:
        await asyncio.Event().wait()
        raise AssertionError

    (item,) = await examine([Check(name="slow", look=look)])
    assert (item.finding.health, item.finding.unreachable) == (CheckStatus.PROBLEM, True)


@pytest.mark.parametrize(
    ("findings", "code"),
    [
        ([], 0),
        ([ok("a"), warning("b", "c")], 0),
        ([ok("a"), problem("b", "c")], 2),
        ([CheckResult(health=CheckStatus.PROBLEM, found="b", fix="c", unreachable=True)], 4),
        ([CheckResult(health=CheckStatus.PROBLEM, found="b", fix="c", unreachable=True), problem("b", "c")], 2),
    ],
)
def test_exit_codes(findings: list[CheckResult], code: int):
    assert exit_code([Checked(name=str(number), finding=each) for number, each in enumerate(findings)]) == code


# The pool -----------------------------------------------------------------------------------------------------------


def config(left_s: float, scope: str = "octo/repo") -> PoolConfig:
    token = Credential(token="t", expires_at=NOW + timedelta(seconds=left_s))
    return PoolConfig(
        pool="ci",
        classes=DEFAULT_CLASSES,
        lifetimes=Lifetimes(),
        max_instances=1,
        github_url="https://github.com",
        applied_at=NOW,
        tokens=(ScopeTokens(scope=scope, registration=token, removal=token),),
    )


def reads(stored: PoolConfig | None) -> Callable[[], Awaitable[PoolConfig | None]]:
    async def get_config() -> PoolConfig | None:
        return stored

    return get_config


@pytest.mark.parametrize(
    ("stored", "name", "status", "says"),
    [
        (None, "configuration", "problem", "no configuration"),
        (config(3_000), "configuration", "ok", "pool ci"),
        (config(3_000), "configuration", "ok", ", reuse same-trust, "),
        (config(3_000), "tokens", "ok", "good for 50 min"),
        (config(300), "tokens", "warning", "run out in 5 min"),
        (config(-120), "tokens", "problem", "ran out 2 min ago"),
        (config(3_000, scope="octo/other"), "tokens", "problem", "none for octo/repo"),
    ],
)
async def test_the_pool(stored: PoolConfig | None, name: str, status: str, says: str):
    seen = await found(*pool_checks(reads(stored), At(), pool="ci", scope="Octo/Repo".lower()))
    assert seen[name][0] == status, seen
    assert says in seen[name][1]


async def test_a_store_of_another_pool():
    seen = await found(*pool_checks(reads(config(3_000)), At(), pool="other"))
    assert seen["configuration"] == ("problem", "the store belongs to pool 'ci', not to 'other'", "use --pool ci")


# Clocks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ahead_s", "health"), [(0, "ok"), (-29, "ok"), (31, "warning"), (-300, "problem")])
def test_clocks(ahead_s: float, health: str):
    theirs = (NOW - timedelta(seconds=ahead_s)).strftime(HTTP_DATE)
    finding = clocks("AWS", theirs, At())
    assert finding.health.value == health
    if health != "ok":
        assert ("ahead of" if ahead_s > 0 else "behind") in finding.found


@pytest.mark.parametrize("date", ["", "yesterday", "2026-01-01T00:00:00Z"])
def test_a_date_that_cannot_be_read_says_nothing(date: str):
    assert skew_s(date, NOW) is None
    assert clocks("AWS", date, At()).health is CheckStatus.OK
