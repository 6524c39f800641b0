"""Each call to GitHub may take as long as its own limit says, and no longer: the limits reach the connection."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from remuda.adapters.github import client, scale_sets
from remuda.adapters.github.scale_sets import ScaleSetSource
from remuda.domain.errors import RemudaError, TimedOut
from remuda.http import ClientResponse
from remuda.ports.calls import CallCounter
from simulation.loop import SeededIds
from tests.support.failure_tables import Failing
from tests.support.github_connections import GitHubScript, json_answer
from tests.support.github_requests import operation_of, parsed_request
from tests.support.slow_peer import SlowPeer
from tests.support.virtual_time import FixedClock, in_virtual_time
from tests.unit.github.test_client_failures import OPERATIONS, SET_OPERATIONS, open_client

#: Requests of GitHub's API. The others of runner sets go to the Actions service.
API = {failing.operation for failing in OPERATIONS} | {"POST registration-token", "POST runner-registration"}
#: Seconds that GitHub holds a poll of an idle set (facts: scale sets), and a share of it that a proxy may add.
IDLE_POLL_S = 50.0 * 1.5


def _limit_s(operation: str) -> float:
    if operation in API:
        return client.TIMEOUT_S
    return scale_sets.POLL_TIMEOUT_S if operation == "GET message" else scale_sets.TIMEOUT_S


async def _call(failing: Failing, delay_s: float, monkeypatch: pytest.MonkeyPatch) -> RemudaError | None:
    """Make the call, whose request is refused after so many seconds."""
    refused = json_answer({"message": "Not Found"}, 404)
    script = GitHubScript({**failing.before, failing.operation: [refused]})

    def answer(method: str, target: str, headers: Mapping[str, str], body: bytes) -> tuple[ClientResponse, float]:
        request = parsed_request("", method, target, headers, body)
        return script.answer(request), delay_s if operation_of(request) == failing.operation else 0.0

    SlowPeer(answer).install(monkeypatch)
    async with open_client() as github:
        source = ScaleSetSource(github=github, clock=FixedClock(), ids=SeededIds(), calls=CallCounter())
        try:
            await failing.call(github if failing in OPERATIONS else source)
        except RemudaError as error:
            return error
        finally:
            await source.close()
    return None


@pytest.mark.parametrize("failing", [*OPERATIONS, *SET_OPERATIONS], ids=str)
@in_virtual_time
async def test_answer_within_the_limit_of_its_call_arrives(failing: Failing, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_s = _limit_s(failing.operation)
    assert not isinstance(await _call(failing, limit_s * 0.9, monkeypatch), TimedOut)
    assert isinstance(await _call(failing, limit_s * 1.1, monkeypatch), TimedOut)


def test_idle_poll_is_no_failure() -> None:
    assert scale_sets.POLL_TIMEOUT_S > IDLE_POLL_S
