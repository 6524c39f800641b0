"""Endpoints, credentials and regions: the usual ones without botocore, all others as botocore decides."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from botocore.exceptions import NoCredentialsError, ProfileNotFound

from remuda.adapters.aws.clients import PROTOCOLS
from remuda.adapters.aws.environment import AwsEndpoint, AwsEnvironment

KEYS = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "s3cret"}


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """No AWS settings but these."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    given = {**KEYS, "AWS_REGION": "eu-central-1", "HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return given


@pytest.fixture
def no_botocore(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a session of botocore is opened."""
    monkeypatch.setattr(AwsEnvironment, "session", property(lambda _: pytest.fail("botocore is not needed")))


@pytest.mark.usefixtures("no_botocore")
@pytest.mark.parametrize("service", PROTOCOLS)
async def test_endpoints_of_the_usual_regions_equal_those_of_botocore(service: str):
    session = botocore.session.get_session()
    for region in ("us-east-1", "us-west-2", "eu-central-1", "ap-southeast-1", "il-central-1", "mx-central-1"):
        client: Any = session.create_client(service, region_name=region)
        expected = AwsEndpoint(client.meta.endpoint_url, client._request_signer.region_name)
        assert await AwsEnvironment().endpoint(service, region) == expected


@pytest.mark.parametrize(
    ("region", "changed", "url"),
    [
        ("cn-north-1", {}, "https://dynamodb.cn-north-1.amazonaws.com.cn"),
        ("us-gov-west-1", {}, "https://dynamodb.us-gov-west-1.amazonaws.com"),
        ("us-east-1", {"AWS_USE_FIPS_ENDPOINT": "true"}, "https://dynamodb-fips.us-east-1.amazonaws.com"),
        ("us-east-1", {"AWS_USE_DUALSTACK_ENDPOINT": "true"}, "https://dynamodb.us-east-1.api.aws"),
    ],
)
async def test_other_endpoints_are_those_of_botocore(
    monkeypatch: pytest.MonkeyPatch, region: str, changed: dict[str, str], url: str
):
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    assert await AwsEnvironment().endpoint("dynamodb", region) == AwsEndpoint(url, region)


@pytest.mark.usefixtures("no_botocore")
@pytest.mark.parametrize(
    ("changed", "url"),
    [
        ({"AWS_ENDPOINT_URL": "http://a:1"}, "http://a:1"),
        ({"AWS_ENDPOINT_URL": "http://a:1", "AWS_ENDPOINT_URL_SECRETS_MANAGER": "http://b:2"}, "http://b:2"),
        (
            {"AWS_ENDPOINT_URL": "http://a:1", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"},
            "https://secretsmanager.eu-central-1.amazonaws.com",
        ),
    ],
)
async def test_endpoint_variables(monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], url: str):
    for name, value in changed.items():
        monkeypatch.setenv(name, value)
    assert (await AwsEnvironment().endpoint("secretsmanager")).url == url


@pytest.mark.usefixtures("no_botocore")
async def test_credentials_in_variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "t0ken")
    found = await AwsEnvironment().credentials()
    assert (found.access_key, found.secret_key, found.token) == ("AKID", "s3cret", "t0ken")


async def test_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in (*KEYS, "AWS_REGION"):
        monkeypatch.delenv(name)
    folder = tmp_path / ".aws"
    folder.mkdir()
    (folder / "config").write_text(
        "[profile ci]\nregion = eu-west-3\nca_bundle = /etc/ca.pem\nendpoint_url = http://c:3\n"
    )
    (folder / "credentials").write_text("[ci]\naws_access_key_id = AKCI\naws_secret_access_key = s3\n")
    monkeypatch.setenv("AWS_PROFILE", "ci")
    environment = AwsEnvironment()
    assert environment.region() == "eu-west-3"
    assert environment.ca_bundle() == "/etc/ca.pem"
    assert (await environment.credentials()).access_key == "AKCI"
    assert await environment.endpoint("dynamodb") == AwsEndpoint("http://c:3", "eu-west-3")


async def test_missing_profile(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ProfileNotFound):
        await AwsEnvironment().endpoint("dynamodb")


async def test_missing_credentials(monkeypatch: pytest.MonkeyPatch):
    for name in KEYS:
        monkeypatch.delenv(name)
    with pytest.raises(NoCredentialsError):
        await AwsEnvironment().credentials()


async def test_expiring_credentials_are_renewed(monkeypatch: pytest.MonkeyPatch):
    """Each request has the credentials that botocore considers valid at that time."""
    for name in KEYS:
        monkeypatch.delenv(name)

    class Provider:
        asked = 0

        async def get_frozen_credentials(self) -> Any:
            self.asked += 1
            return botocore.credentials.ReadOnlyCredentials(f"AK{self.asked}", "s", None)

    class Session:
        provider = Provider()

        async def get_credentials(self) -> Provider:
            return self.provider

    session: Any = Session()
    environment = AwsEnvironment(session=session)
    assert [(await environment.credentials()).access_key for _ in range(2)] == ["AK1", "AK2"]
