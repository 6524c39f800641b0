"""Endpoint URLs for agents are validated; clients wait for the longest answer of their service."""

from __future__ import annotations

from typing import Any

import pytest

from remuda.adapters.aws import clients as module
from remuda.adapters.aws.clients import AwsClients, agent_environment_from
from remuda.adapters.aws.ec2.calls import client_config
from remuda.adapters.aws.sqs import MAX_WAIT_S
from remuda.domain.errors import UserError
from remuda.http import HttpConnections


@pytest.mark.parametrize("url", ["http://127.0.0.1:4566", "https://ec2.example.com", "http://[::1]:8000"])
def test_agents_use_the_same_endpoints(url: str):
    given = {"AWS_ENDPOINT_URL_EC2": url, "AWS_USE_FIPS_ENDPOINT": "true", "AWS_REGION": "eu-central-1"}
    assert agent_environment_from(given) == {"AWS_ENDPOINT_URL_EC2": url, "AWS_USE_FIPS_ENDPOINT": "true"}


@pytest.mark.parametrize(
    ("url", "message"),
    [("nonsense", "is not a URL: 'nonsense'"), ("http://me:s3cret@host", "contains a credential")],
)
def test_invalid_endpoint_url_is_rejected_without_its_credential(url: str, message: str):
    with pytest.raises(UserError) as rejected:
        agent_environment_from({"AWS_ENDPOINT_URL_EC2": url})
    assert rejected.value.field == "AWS_ENDPOINT_URL_EC2"
    assert message in str(rejected.value)
    assert "s3cret" not in str(rejected.value)


#: Seconds that AWS may take to answer at most: the longest poll of SQS, all launches of an instant fleet (in practice),
#: and a batch of DynamoDB.
LONGEST_ANSWER_S = {"sqs": MAX_WAIT_S, "ec2": 30.0, "dynamodb": 5.0}


async def test_clients_wait_for_the_longest_answer_of_their_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that gives up before loses the answer: messages stay hidden, and launched instances are unknown."""
    opened: list[float] = []

    class RecordedConnections(HttpConnections):
        def __init__(self, url: str, *, timeout_s: float, **given: Any) -> None:
            super().__init__(url, timeout_s=timeout_s, **given)
            opened.append(timeout_s)

    monkeypatch.setattr(module, "HttpConnections", RecordedConnections)
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    async with AwsClients() as clients:
        await clients.sqs()
        await clients.service("ec2", "EC2", client_config())
        await clients.dynamodb()
    assert [found > longest for found, longest in zip(opened, LONGEST_ANSWER_S.values(), strict=True)] == [True] * 3
