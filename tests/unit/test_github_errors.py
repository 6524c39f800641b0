"""Error messages quote GitHub's response, but never the credential of the request."""

from __future__ import annotations

from base64 import b64encode
from datetime import UTC, datetime
from urllib.parse import quote

import httpx
import pytest

from remuda.adapters.github.responses import translate
from tests.support.leak_scanner import LeakScanner

TOKEN = "ghs_a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8"
NOW = datetime(2030, 1, 1, tzinfo=UTC)
ECHOES = {
    "as it is": f"bad header: Bearer {TOKEN}",
    "where it is cut": "x" * 185 + TOKEN,
    "in an address": f"https://x:{quote(TOKEN, safe='')}@github.com",
    "encoded": b64encode(TOKEN.encode()).decode(),
}


@pytest.mark.parametrize("status", [401, 403, 404, 409, 422, 429, 500])
@pytest.mark.parametrize("said", ECHOES.values(), ids=ECHOES)
def test_echoed_credential_is_redacted(said: str, status: int) -> None:
    request = httpx.Request("POST", "https://api.github.com/x", headers={"Authorization": f"Bearer {TOKEN}"})
    error = translate(httpx.Response(status, json={"message": said}, request=request), "a test", NOW)
    assert LeakScanner({"token": TOKEN}).find(f"{error} {error!r}", "the error") == []


def test_other_text_is_quoted() -> None:
    request = httpx.Request("GET", "https://api.github.com/x")
    answer = httpx.Response(422, json={"message": "labels: must be an array"}, request=request)
    assert "labels: must be an array" in translate(answer, "a test", NOW).message
