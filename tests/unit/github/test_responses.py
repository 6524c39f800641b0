"""Parsing of GitHub's responses, and the errors for its refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest

from remuda.adapters.github.responses import (
    DEFAULT_RETRY_AFTER_S,
    MAX_RETRY_AFTER_S,
    parse_id,
    parse_runner_downloads,
    translate,
)
from remuda.domain.errors import RemudaError, Throttled, Unavailable, UserError
from remuda.http import ClientResponse
from tests.support.records import NOW

FILENAME = "actions-runner-linux-x64-2.336.0.tar.gz"
URL = f"https://github.com/actions/runner/releases/download/v2.336.0/{FILENAME}"


def downloads(url: str) -> ClientResponse:
    package = {"os": "linux", "architecture": "x64", "filename": FILENAME, "sha256_checksum": "0" * 64}
    return ClientResponse(200, {}, json.dumps([{**package, "download_url": url}]).encode())


def test_runner_package_is_downloaded_by_https() -> None:
    (package,) = parse_runner_downloads(downloads(URL)).packages
    assert package.url == URL


@pytest.mark.parametrize("url", [f"s3://bucket/{FILENAME}", URL.replace("https", "http"), f"/{FILENAME}"])
def test_github_cannot_name_a_runner_package_elsewhere(url: str) -> None:
    """Settings may name a bucket, but a bucket of GitHub's choice is read with the credentials of the machine."""
    with pytest.raises(Unavailable, match="no plain https URL"):
        parse_runner_downloads(downloads(url))


@pytest.mark.parametrize("found", [0, -1, 2**63, True, 1.0, "7", None])
def test_invalid_ids_are_rejected(found: Any) -> None:
    """0 stands for no runner."""
    with pytest.raises(Unavailable, match="GitHub's runner has no valid id"):
        parse_id({"id": found}, "runner")


@pytest.mark.parametrize("found", [1, 2**53])
def test_ids_are_positive_integers(found: int) -> None:
    assert parse_id({"id": found}, "runner") == found


@pytest.mark.parametrize(
    ("status", "kind", "field"),
    [
        (299, Unavailable, ""),
        (300, UserError, "github-scope"),
        (301, UserError, "github-scope"),
        (399, UserError, "github-scope"),
        (400, Unavailable, ""),
    ],
)
def test_redirect_is_reported_as_a_renamed_scope(status: int, kind: type[RemudaError], field: str) -> None:
    error = translate(ClientResponse(status, {}, b""), "list", NOW)
    assert type(error) is kind
    assert getattr(error, "field", "") == field


def test_an_address_that_is_not_in_the_allow_list_is_told_from_a_wrong_credential() -> None:
    """The words of GitHub in SalesforceFoundation/NPSP issue 7247, with the longest name of an organization."""
    message = (
        f"Although you appear to have the correct authorization credentials, the `{'a' * 39}` organization has an IP "
        "allow list enabled, and your IP address is not permitted to access this resource."
    )
    response = ClientResponse(403, {}, json.dumps({"message": message}).encode())
    error = translate(response, "list", NOW)
    assert (type(error), getattr(error, "field", "")) == (UserError, "github-scope")
    assert "allow list" in error.fix
    refused = translate(ClientResponse(403, {}, b'{"message": "Resource not accessible"}'), "list", NOW)
    assert getattr(refused, "field", "") == "github-token"


RESET = str(int(NOW.timestamp()) + 30)


@pytest.mark.parametrize(
    ("status", "headers", "wait_s"),
    [
        (403, {"retry-after": "7"}, 7.0),
        (429, {"retry-after": "7", "x-ratelimit-remaining": "0", "x-ratelimit-reset": RESET}, 7.0),
        (403, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": RESET}, 30.0),
        (429, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": RESET}, 30.0),
        # The reset of the primary limit says nothing about the others.
        (429, {"x-ratelimit-remaining": "4999", "x-ratelimit-reset": RESET}, DEFAULT_RETRY_AFTER_S),
        (429, {"x-ratelimit-reset": RESET}, DEFAULT_RETRY_AFTER_S),
        (429, {}, DEFAULT_RETRY_AFTER_S),
        (403, {"x-ratelimit-remaining": "0"}, DEFAULT_RETRY_AFTER_S),
        (403, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": "1"}, 0.0),
        (403, {"retry-after": "Thu, 19 Nov 2026 20:00:00 GMT"}, DEFAULT_RETRY_AFTER_S),
        (403, {"retry-after": "1e12"}, MAX_RETRY_AFTER_S),
        # No limit, but a refusal.
        (403, {"x-ratelimit-remaining": "4999", "x-ratelimit-reset": RESET}, None),
        (422, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": RESET}, None),
    ],
)
def test_time_to_wait_after_a_limit(status: int, headers: dict[str, str], wait_s: float | None) -> None:
    """GitHub's documentation: retry-after, else the reset of a primary limit that is used up, else a minute."""
    error = translate(ClientResponse(status, headers, b"{}"), "list", NOW)
    assert (error.retry_after_s if isinstance(error, Throttled) else None) == wait_s
