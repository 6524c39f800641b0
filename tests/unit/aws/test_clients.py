"""Clients are opened when they are called, and addresses are looked at before."""

from __future__ import annotations

from typing import Any

import pytest

from remuda.adapters.aws.clients import AwsClients, config, passed_to_agents
from remuda.domain.errors import UserError


class Service:
    async def describe_things(self, **parameters: Any) -> dict[str, Any]:
        return parameters


async def test_a_client_is_opened_at_its_first_call(monkeypatch: pytest.MonkeyPatch):
    opened: list[str] = []

    async def client(_clients: AwsClients, name: str, title: str, settings: object) -> Service:
        opened.append(f"{name} {title}")
        return Service()

    monkeypatch.setattr(AwsClients, "client", client)
    later = AwsClients().later("things", "Things", config())
    assert opened == []
    assert await later.describe_things(Number=4) == {"Number": 4}
    assert opened == ["things Things"]


@pytest.mark.parametrize("address", ["http://127.0.0.1:4566", "https://ec2.example.com", "http://[::1]:8000"])
def test_agents_call_the_same_addresses(address: str):
    given = {"AWS_ENDPOINT_URL_EC2": address, "AWS_USE_FIPS_ENDPOINT": "true", "AWS_REGION": "eu-central-1"}
    assert passed_to_agents(given) == {"AWS_ENDPOINT_URL_EC2": address, "AWS_USE_FIPS_ENDPOINT": "true"}


@pytest.mark.parametrize(
    ("address", "says"), [("nonsense", "'nonsense': no address"), ("http://me:s3cret@host", "carries a credential")]
)
def test_an_address_that_is_none_or_tells_too_much_is_named(address: str, says: str):
    with pytest.raises(UserError) as refused:
        passed_to_agents({"AWS_ENDPOINT_URL_EC2": address})
    assert refused.value.field == "AWS_ENDPOINT_URL_EC2"
    assert says in str(refused.value)
    assert "s3cret" not in str(refused.value)
