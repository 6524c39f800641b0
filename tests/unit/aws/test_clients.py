"""Endpoint URLs for agents are validated."""

from __future__ import annotations

import pytest

from remuda.adapters.aws.clients import agent_environment_from
from remuda.domain.errors import UserError


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
