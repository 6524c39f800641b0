"""`/metrics` as a scraper asks for it."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text
from starlette.applications import Starlette

from remuda.ports.calls import CallCounter
from remuda.web.metrics import METRICS, Meters
from remuda.web.metrics_route import metrics_route
from tests.support.records import NOW


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/plain;version=0.0.4;q=0.5,*/*;q=0.1", "text/plain; version=0.0.4; charset=utf-8"),
        ("application/openmetrics-text;version=1.0.0;q=0.8", "application/openmetrics-text; version=1.0.0"),
    ],
)
async def test_a_scraper_gets_what_it_asks_for_after_a_look(accept: str, kind: str) -> None:
    calls, looks = CallCounter(), []

    async def freshen() -> None:
        looks.append(1)
        calls.add("store", "find")

    app = Starlette(routes=[metrics_route(Meters(began=NOW), calls, freshen=freshen)])
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://dashboard") as client:
        answer = await client.get("/metrics", headers={"accept": accept})
        assert (await client.post("/metrics")).status_code == 405
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(kind)
    assert answer.headers["cache-control"] == "no-store"
    assert looks == [1]
    assert 'remuda_api_calls_total{operation="find",outcome="ok",service="store"} 1.0' in answer.text.splitlines()
    if kind.startswith("text/plain"):
        assert len(list(parse_text(answer.text))) == len(METRICS)
