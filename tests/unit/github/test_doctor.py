"""Checks of GitHub, with a fixed response."""

from __future__ import annotations

import json
from typing import Any

import pytest

from remuda.adapters.github.client import GitHubClient
from remuda.adapters.github.doctor import GitHubDoctor
from remuda.domain.errors import UserError
from remuda.http import ClientResponse
from remuda.ports.calls import CallCounter
from remuda.ports.doctor import CheckResult, CheckStatus
from simulation.loop import SeededIds
from tests.support.virtual_time import FixedClock


class FixedHttp:
    """Gives the same response to all requests."""

    def __init__(self, response: ClientResponse) -> None:
        self._response = response
        self.targets: list[str] = []

    async def request(self, method: str, target: str, **_: Any) -> ClientResponse:
        assert method == "GET"
        self.targets.append(target)
        return self._response


def response(status: int = 200, **headers: str) -> ClientResponse:
    body = json.dumps({"total_count": 7, "runners": []}).encode()
    return ClientResponse(status, {name.replace("_", "-"): value for name, value in headers.items()}, body)


def limits(remaining: str, limit: str = "5000") -> ClientResponse:
    return response(x_ratelimit_remaining=remaining, x_ratelimit_limit=limit)


async def run_checks(http: FixedHttp, *names: str) -> list[CheckResult]:
    client = GitHubClient(
        api_url="http://127.0.0.1:1", clock=FixedClock(), ids=SeededIds(), calls=CallCounter(), token="t0ken"
    )
    client._http = http  # type: ignore[assignment]

    async def opened() -> GitHubClient:
        return client

    checks = {check.name: check for check in GitHubDoctor(github=opened, scope="octo", clock=FixedClock()).checks()}
    return [await checks[name].run() for name in names]


async def test_accessible_scope_is_shown_with_its_number_of_runners() -> None:
    (found,) = await run_checks(FixedHttp(response()), "github access")
    assert (found.status, found.message) == (CheckStatus.OK, "octo is accessible, 7 runners registered")


async def test_missing_scope_is_a_problem_of_the_user() -> None:
    with pytest.raises(UserError, match="octo"):
        await run_checks(FixedHttp(response(404)), "github access")


async def test_all_checks_use_one_request_for_one_runner() -> None:
    http = FixedHttp(response())
    await run_checks(http, "github access", "github rate limit", "github clock")
    assert http.targets == ["/orgs/octo/actions/runners?per_page=1"]


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        (limits("5000"), CheckStatus.OK, "5000 of 5000 calls left this hour"),
        (limits("500"), CheckStatus.OK, "500 of 5000 calls left this hour"),
        (limits("499"), CheckStatus.WARNING, "499 of 5000 calls left this hour"),
        (limits("1", "9"), CheckStatus.OK, "1 of 9 calls left this hour"),
        (limits("0"), CheckStatus.PROBLEM, "0 of 5000 calls left this hour"),
        (limits("many"), CheckStatus.OK, "no rate limit"),
        (response(), CheckStatus.OK, "no rate limit"),
    ],
)
async def test_low_rate_limit_is_reported(headers: ClientResponse, status: CheckStatus, message: str) -> None:
    (found,) = await run_checks(FixedHttp(headers), "github rate limit")
    assert (found.status, found.message) == (status, message)


@pytest.mark.parametrize(
    ("date", "status"),
    [
        ("Sat, 31 May 2025 12:00:00 GMT", CheckStatus.OK),
        ("Sat, 31 May 2025 12:01:00 GMT", CheckStatus.WARNING),
        ("Sat, 31 May 2025 13:00:00 GMT", CheckStatus.PROBLEM),
    ],
)
async def test_difference_of_the_clocks_is_reported(date: str, status: CheckStatus) -> None:
    (found,) = await run_checks(FixedHttp(response(date=date)), "github clock")
    assert found.status is status
