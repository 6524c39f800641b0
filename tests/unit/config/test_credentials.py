"""Credentials in settings: tokens, private keys, files and ARNs of secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from remuda.config.declaration import is_secret_arn
from remuda.config.sources import load, read_private_key
from remuda.domain.errors import UserError

PEM = "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\n"
ARN = "arn:aws:secretsmanager:eu-central-1:123456789012:secret:remuda/ci/github-AbCdEf"


def test_pem_text_is_returned_unchanged():
    assert read_private_key(PEM) == PEM
    assert read_private_key("") == ""


def test_a_pem_file_is_read(tmp_path: Path):
    file = tmp_path / "app.pem"
    file.write_text(PEM)
    assert read_private_key(str(file)) == PEM


@pytest.mark.parametrize("value", ["/nowhere/app.pem", "s3cret-that-is-no-key", "x" * 5_000, "a\0b"])
def test_an_unreadable_key_is_rejected_without_quoting_it(value: str):
    with pytest.raises(UserError) as refused:
        read_private_key(value)
    assert "neither PEM text nor the path of a readable file" in refused.value.message
    assert value not in refused.value.message


def test_a_file_that_is_not_pem_is_rejected(tmp_path: Path):
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    with pytest.raises(UserError, match="not PEM"):
        read_private_key(str(file))


def test_the_arn_of_a_secret_is_accepted():
    assert is_secret_arn(ARN)
    settings = load({}, environ={"REMUDA_GITHUB_TOKEN": ARN, "REMUDA_GITHUB_APP_KEY": ARN})
    assert settings.github_token is not None
    assert settings.github_token.text == ARN


@pytest.mark.parametrize("name", ["REMUDA_GITHUB_TOKEN", "REMUDA_GITHUB_APP_KEY"])
def test_the_arn_of_another_resource_is_rejected(name: str):
    with pytest.raises(UserError) as refused:
        load({}, environ={name: "arn:aws:s3:::bucket"})
    assert "a secret's ARN has the form" in refused.value.message
    assert refused.value.field == name
