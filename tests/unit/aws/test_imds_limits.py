"""The metadata service may take as long as its clients wait, and no longer."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from remuda.adapters.aws.imds import RESPONSE_TIMEOUT_S, Imds
from remuda.domain.errors import Unavailable
from remuda.http import ClientResponse
from tests.support.slow_peer import SlowPeer
from tests.support.virtual_time import FixedClock, in_virtual_time


@pytest.mark.parametrize("slow", ["PUT", "GET"])
@in_virtual_time
async def test_answer_of_the_metadata_service_within_the_limit_arrives(
    slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def get(delay_s: float) -> str:
        def answer(
            method: str, _target: str, _headers: Mapping[str, str], _body: bytes
        ) -> tuple[ClientResponse, float]:
            return ClientResponse(200, {}, b"i-1"), delay_s if method == slow else 0.0

        SlowPeer(answer).install(monkeypatch)
        imds = Imds(endpoint="http://169.254.169.254", clock=FixedClock())
        try:
            return await imds.get("instance-id")
        finally:
            await imds.close()

    assert await get(RESPONSE_TIMEOUT_S * 0.9) == "i-1"
    with pytest.raises(Unavailable):
        await get(RESPONSE_TIMEOUT_S * 1.1)
