"""Entry point of the broker in a warm process. What it does: controlplane/test_broker.py."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.aws_lambda import broker
from remuda.aws_lambda.broker import OPERATIONS, WORKFLOW_INPUTS, handler, parse_request
from remuda.domain.errors import UserError
from tests.support.emf import check_emf


class LambdaInvocation:
    aws_request_id = "r-1"

    def get_remaining_time_in_millis(self) -> int:
        return 60_000


@pytest.fixture
def new_process() -> Iterator[None]:
    """The state of a process that has not handled a request."""
    broker._warm_process.cache_clear()
    yield
    broker._warm_process().runner.close()
    broker._warm_process.cache_clear()
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("new_process")
def test_one_process_answers_many_requests(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("REMUDA_POOL", "ci")
    event = {"operation": "provision", "token": "x.y.z", "run-id": "1", "run-attempt": "1"}
    for _ in range(3):
        answer = handler(event, LambdaInvocation())
        assert answer["exit"] == "2"
        assert (
            "::error title=remuda provision::the OIDC token is not a JWT; " in base64.b64decode(answer["log"]).decode()
        )
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event.get("event") for event in events] == ["refused", None] * 3
    check_emf(events[-1])
    assert (events[-1]["Pool"], events[-1]["RefusedToken"]) == ("ci", 1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)
KEYS = ("operation", "token", "run-id", "run-attempt", "inputs", "requestContext", "body", "isBase64Encoded")
INPUTS = st.dictionaries(st.sampled_from([*WORKFLOW_INPUTS, "ami", "x"]), JSON, max_size=3)
EVENTS = JSON | st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(KEYS, JSON),
        "operation": st.sampled_from(OPERATIONS) | JSON,
        "token": st.text(min_size=1, max_size=9) | JSON,
        "inputs": INPUTS | JSON,
        "requestContext": st.just({"http": {"method": "POST"}}) | JSON,
    },
)


@given(EVENTS)
def test_any_event_is_parsed_or_refused(event: Any) -> None:
    try:
        request = parse_request(event)
    except UserError:
        return
    assert request.operation in OPERATIONS
    assert set(request.inputs) <= WORKFLOW_INPUTS
    assert request.token not in repr(request) or len(request.token) < 9


@pytest.mark.usefixtures("new_process")
def test_libraries_do_not_log_requests() -> None:
    handler({}, LambdaInvocation())
    assert not logging.getLogger("aiobotocore").isEnabledFor(logging.DEBUG)


@pytest.mark.usefixtures("new_process")
def test_invalid_settings_of_the_function_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMUDA_OIDC_ISSUER", "http://evil.example")
    answer = handler({"operation": "state", "token": "x"}, LambdaInvocation())
    assert "must be an https URL such as https://HOST/_services/token" in base64.b64decode(answer["log"]).decode()
