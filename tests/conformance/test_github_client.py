"""The GitHub client with a local GitHub: credentials, rate limits, lost responses."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from remuda.adapters.github.auth import AppAuth
from remuda.adapters.github.client import MAX_ATTEMPTS, GitHubClient
from remuda.adapters.github.responses import MAX_BODY
from remuda.adapters.system.clock import SystemIds
from remuda.domain.errors import Conflict, NotFound, Throttled, Unavailable, UserError
from remuda.fake_github import Endpoint
from remuda.ports.calls import CallCounter
from tests.conformance.conftest import Adapters
from tests.support.records import LONG_S
from tests.support.tls_server import TlsFileServer
from tests.support.virtual_time import AdjustableClock

pytestmark = pytest.mark.usefixtures("patient_client")

REPO, ORG = "acme/widgets", "acme"
APP_ID = "4711"
HOUR_S = 3600.0


def pem(key: rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


KEY = rsa.generate_private_key(public_exponent=65537, key_size=2048)
PUBLIC = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


@pytest.fixture
def admin(endpoint: Endpoint) -> Iterator[httpx.Client]:
    """Client of the admin API of the local GitHub."""
    headers = {"authorization": f"Bearer {endpoint.token}"}
    with httpx.Client(base_url=endpoint.url, headers=headers, trust_env=False, timeout=LONG_S) as client:
        app = {
            "app_id": APP_ID,
            "app_key": PUBLIC,
            "app_owners": [ORG],
            "app_permissions": None,
            "token_life_s": HOUR_S,
        }
        client.patch("/_admin/settings", json={**app, "enforce_rate_limit": False}).raise_for_status()
        client.delete("/_admin/faults").raise_for_status()
        yield client


@pytest.fixture
def clock() -> AdjustableClock:
    return AdjustableClock(longest_sleep_s=0.0)


Connect = Callable[..., GitHubClient]


@pytest.fixture
async def connect(endpoint: Endpoint, clock: AdjustableClock, calls: CallCounter) -> AsyncIterator[Connect]:
    """Return a function that opens clients, which are closed after the test."""
    made = Adapters(GitHubClient, api_url=endpoint.url, clock=clock, ids=SystemIds(), calls=calls)
    yield made.open
    await made.close()


@pytest.fixture
def github(endpoint: Endpoint, admin: httpx.Client, connect: Connect) -> GitHubClient:
    return connect(token=endpoint.token)


@pytest.fixture
def app(admin: httpx.Client, connect: Connect, clock: AdjustableClock) -> GitHubClient:
    return connect(auth=AppAuth(app_id=APP_ID, key=pem(KEY), clock=clock))


def add_fault(admin: httpx.Client, kind: str, operation: str, **more: Any) -> None:
    admin.post("/_admin/faults", json={"kind": kind, "operation": operation, **more}).raise_for_status()


def permit(admin: httpx.Client, permissions: dict[str, str]) -> None:
    """Set what installation tokens of the App may do from now on."""
    admin.patch("/_admin/settings", json={"app_permissions": permissions}).raise_for_status()


# Apps


@pytest.mark.parametrize("scope", [REPO, ORG])
async def test_app_looks_up_its_installation_and_caches_the_token(
    app: GitHubClient, calls: CallCounter, scope: str
) -> None:
    await asyncio.gather(app.registration_token(scope), app.removal_token(scope), app.list_runners(scope))
    counted = calls.by_service()["github"]
    assert counted["GET installation"] == 1
    assert counted["POST access_tokens"] == 1


ORG_RUNNERS, REPO_RUNNERS = "organization_self_hosted_runners", "administration"


@pytest.mark.parametrize(
    ("scope", "kind", "level", "use"),
    [
        (REPO, REPO_RUNNERS, "read", lambda github: github.list_runners(REPO)),
        (REPO, REPO_RUNNERS, "read", lambda github: github.runner_downloads(REPO)),
        (REPO, REPO_RUNNERS, "read", lambda github: github.get_runner(REPO, 1)),
        (REPO, REPO_RUNNERS, "write", lambda github: github.delete_runner(REPO, 1)),
        (REPO, REPO_RUNNERS, "write", lambda github: github.registration_token(REPO)),
        (REPO, REPO_RUNNERS, "write", lambda github: github.removal_token(REPO)),
        (ORG, ORG_RUNNERS, "read", lambda github: github.list_runners(ORG)),
        (ORG, ORG_RUNNERS, "read", lambda github: github.runner_group_id(ORG, "Default")),
        (ORG, ORG_RUNNERS, "write", lambda github: github.registration_token(ORG)),
        (ORG, ORG_RUNNERS, "write", lambda github: github.actions_service(ORG)),
        (REPO, "actions", "read", lambda github: github.list_runs(REPO, REPO, status="queued")),
        (REPO, "actions", "read", lambda github: github.list_jobs(REPO, REPO, 1)),
        (REPO, "actions", "read", lambda github: github.get_run(REPO, REPO, 1)),
    ],
)
async def test_app_needs_the_permission_of_each_call(
    app: GitHubClient,
    admin: httpx.Client,
    scope: str,
    kind: str,
    level: str,
    use: Callable[[GitHubClient], Awaitable[Any]],
) -> None:
    others = dict.fromkeys({ORG_RUNNERS, REPO_RUNNERS, "actions", "contents", "metadata"} - {kind}, "write")
    refused = [others, {**others, kind: "read"}] if level == "write" else [others]
    for permissions in refused:
        permit(admin, permissions)
        app._auth.invalidate(scope, await app._auth.token(scope, app._call_as_app))
        with pytest.raises(UserError, match="Resource not accessible by integration") as caught:
            await use(app)
        assert ("Actions" in (caught.value.fix or "")) is (kind == "actions"), "the advice names what is missing"
    permit(admin, {kind: level})
    app._auth.invalidate(scope, await app._auth.token(scope, app._call_as_app))
    # There is no run, but now GitHub says that.
    with suppress(NotFound):
        await use(app)


async def test_token_is_renewed_shortly_before_it_expires(
    app: GitHubClient, calls: CallCounter, clock: AdjustableClock
) -> None:
    await app.list_runners(REPO)
    clock.ahead_s = HOUR_S - 200
    await app.list_runners(REPO)
    assert calls.by_service()["github"]["POST access_tokens"] == 1
    clock.ahead_s = 0
    app._auth._installations[REPO].expires_at = clock.now() + timedelta(seconds=100)  # type: ignore[attr-defined]
    await app.list_runners(REPO)
    assert calls.by_service()["github"]["POST access_tokens"] == 2


async def test_rejected_token_is_replaced_once(app: GitHubClient, admin: httpx.Client, calls: CallCounter) -> None:
    await app.list_runners(REPO)
    add_fault(admin, "status", "list", status=401)
    await app.list_runners(REPO)
    assert calls.by_service()["github"]["POST access_tokens"] == 2
    add_fault(admin, "status", "list", status=401, times=2)
    with pytest.raises(UserError, match="401"):
        await app.list_runners(REPO)
    assert calls.by_service()["github"]["POST access_tokens"] == 3


async def test_missing_installation_is_reported(app: GitHubClient) -> None:
    with pytest.raises(UserError, match="not installed for stranger/repo") as caught:
        await app.list_runners("stranger/repo")
    assert caught.value.field == "github-scope"


@pytest.mark.parametrize("change", [{"app_id": "1"}, {"ahead_s": 2 * HOUR_S}, {"ahead_s": -2 * HOUR_S}, {"key": True}])
async def test_rejected_jwt_is_reported(
    admin: httpx.Client, connect: Connect, clock: AdjustableClock, change: dict[str, Any]
) -> None:
    clock.ahead_s = change.get("ahead_s", 0.0)
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048) if change.get("key") else KEY
    auth = AppAuth(app_id=change.get("app_id", APP_ID), key=pem(key), clock=clock)
    with pytest.raises(UserError, match="rejects the App") as caught:
        await connect(auth=auth).list_runners(REPO)
    assert caught.value.field == "github-app-key"


@pytest.mark.parametrize("key", ["", "secret-nonsense", pem(ec.generate_private_key(ec.SECP256R1()))])
def test_invalid_key_is_reported_without_its_value(clock: AdjustableClock, key: str) -> None:
    with pytest.raises(UserError) as caught:
        AppAuth(app_id=APP_ID, key=key, clock=clock)
    assert caught.value.field == "github-app-key"
    assert "secret" not in caught.value.message


def test_key_with_escaped_line_breaks_is_accepted(clock: AdjustableClock) -> None:
    auth = AppAuth(app_id=APP_ID, key=pem(KEY).replace("\n", "\\n"), clock=clock)
    assert "PRIVATE" not in repr(auth)


async def test_lost_responses_of_the_app_endpoints_are_retried(
    app: GitHubClient, admin: httpx.Client, calls: CallCounter
) -> None:
    add_fault(admin, "lost_answer", "installation")
    add_fault(admin, "lost_answer", "installation-token")
    await app.list_runners(REPO)
    assert calls.by_service()["github"]["POST access_tokens"] == 2


async def test_no_secret_is_logged(
    app: GitHubClient, admin: httpx.Client, caplog: pytest.LogCaptureFixture, endpoint: Endpoint
) -> None:
    with caplog.at_level(logging.DEBUG):
        await app.registration_token(REPO)
        add_fault(admin, "status", "list", status=403)
        with pytest.raises(UserError) as caught:
            await app.list_runners(REPO)
    seen = caplog.text + str(caught.value) + repr(app._auth.__dict__)
    for secret in ("ghs_", "Bearer", "PRIVATE KEY", "eyJ"):
        assert secret not in seen


# Static tokens


async def test_static_token_is_not_replaced(connect: Connect, calls: CallCounter) -> None:
    with pytest.raises(UserError, match="401") as caught:
        await connect(token="wrong").list_runners(REPO)
    assert caught.value.field == "github-token"
    assert calls.by_service()["github"] == {"GET runners": 1}


async def test_static_token_is_not_logged(
    github: GitHubClient, admin: httpx.Client, caplog: pytest.LogCaptureFixture, endpoint: Endpoint
) -> None:
    with caplog.at_level(logging.DEBUG):
        minted = await github.registration_token(REPO)
        add_fault(admin, "status", "list", status=403)
        with pytest.raises(UserError) as caught:
            await github.list_runners(REPO)
    seen = caplog.text + str(caught.value) + repr(github) + repr(minted)
    for secret in (endpoint.token, minted.token, "Bearer"):
        assert secret not in seen


async def test_redirect_of_a_renamed_scope_is_not_followed(github: GitHubClient, admin: httpx.Client) -> None:
    add_fault(admin, "status", "list", status=301)
    with pytest.raises(UserError, match="was probably renamed") as caught:
        await github.list_runners(REPO)
    assert caught.value.field == "github-scope"


@pytest.fixture
async def enterprise(endpoint: Endpoint) -> AsyncIterator[str]:
    """A GitHub Enterprise Server, whose API is below /api/v3."""
    paths: list[str] = []

    async def forward(request: web.Request) -> web.Response:
        paths.append(request.path)
        path = request.path_qs.removeprefix("/api/v3")
        headers = {"authorization": request.headers["authorization"]}
        async with httpx.AsyncClient(trust_env=False, timeout=LONG_S) as client:
            body = await request.read()
            answer = await client.request(request.method, endpoint.url + path, headers=headers, content=body)
        return web.Response(status=answer.status_code, body=answer.content, content_type="application/json")

    application = web.Application()
    application.router.add_route("*", "/api/v3/{path:.*}", forward)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/api/v3"
    await runner.cleanup()
    assert paths


@pytest.mark.parametrize("scope", [REPO, ORG])
@pytest.mark.parametrize("slash", ["", "/"])
async def test_enterprise_server_with_a_token_or_an_app(
    endpoint: Endpoint, app: GitHubClient, connect: Connect, enterprise: str, scope: str, slash: str
) -> None:
    for credential in ({"token": endpoint.token}, {"auth": app._auth}):
        github = connect(api_url=enterprise + slash, **credential)
        assert (await github.registration_token(scope)).token


async def test_huge_body_is_not_read_completely(connect: Connect) -> None:
    sent, attempts = 0, 0

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent, attempts
        attempts += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        with suppress(ConnectionError):
            while sent < 100 * MAX_BODY:
                writer.write(b"80000\r\n" + b" " * 0x80000 + b"\r\n")
                await writer.drain()
                sent += 0x80000
        writer.close()

    async with await asyncio.start_server(endless, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(Unavailable, match=f"longer than {MAX_BODY} bytes"):
            await connect(api_url=f"http://127.0.0.1:{port}", token="t0ken").registration_token(ORG)
    assert attempts == MAX_ATTEMPTS
    # Buffers of the operating system contain the rest.
    assert sent <= MAX_ATTEMPTS * (MAX_BODY + 10_000_000)


@pytest.mark.parametrize("token", ["t0ken\n", "t0ken\r\nX-Evil: 1", "tök€n"])
async def test_token_that_is_no_header_value_is_reported(connect: Connect, token: str) -> None:
    with pytest.raises(UserError, match="invalid character") as caught:
        await connect(token=token).list_runners(REPO)
    assert caught.value.field == "github-token"
    assert token[:3] not in caught.value.message


def subject_hash(certificate: Path) -> str:
    """The name by which OpenSSL finds a certificate in a folder."""
    command = ["openssl", "x509", "-hash", "-noout", "-in", str(certificate)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
async def test_certificates_of_the_environment(
    connect: Connect, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """The server does not answer as GitHub does, so a verified connection fails with another error than that of TLS."""
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    with TlsFileServer(tmp_path, {}) as server:
        github = connect(api_url=server.url, token="t0ken")
        with pytest.raises(Unavailable, match=r"cannot be reached .*: TlsError"):
            await github.list_runners(REPO)
        if variable == "SSL_CERT_DIR":
            (tmp_path / f"{subject_hash(server.ca)}.0").symlink_to(server.ca)
        monkeypatch.setenv(variable, str(server.ca if variable == "SSL_CERT_FILE" else tmp_path))
        github = connect(api_url=server.url, token="t0ken")
        with pytest.raises(UserError, match="not found on GitHub"):
            await github.list_runners(REPO)


async def test_invalid_address_is_reported(connect: Connect) -> None:
    with pytest.raises(UserError, match="Invalid endpoint: ftp://x") as caught:
        connect(api_url="ftp://x", token="t0ken")
    assert caught.value.field == "github-api-url"


# Rate limits


async def test_short_rate_limit_pauses_are_waited_for(
    github: GitHubClient, admin: httpx.Client, clock: AdjustableClock
) -> None:
    add_fault(admin, "rate_limit", "jitconfig", seconds=3)
    assert (await github.jit_config(REPO, name="patient", labels=["x"])).config
    assert clock.slept == [3.0]


@pytest.mark.parametrize("status", [403, 429])
@pytest.mark.parametrize(("seconds", "retry_after_s"), [(37, 37), (None, 60)], ids=["with time", "without time"])
@pytest.mark.parametrize(
    ("operation", "call"),
    [("list", GitHubClient.list_runners), ("registration-token", GitHubClient.registration_token)],
    ids=["list", "registration-token"],
)
async def test_long_rate_limit_pauses_are_raised(
    github: GitHubClient,
    admin: httpx.Client,
    clock: AdjustableClock,
    status: int,
    seconds: int | None,
    retry_after_s: int,
    operation: str,
    call: Callable[[GitHubClient, str], Awaitable[object]],
) -> None:
    add_fault(admin, "rate_limit", operation, status=status, **({} if seconds is None else {"seconds": seconds}))
    with pytest.raises(Throttled) as caught:
        await call(github, REPO)
    assert caught.value.retry_after_s == retry_after_s
    assert clock.slept == []
    await call(github, REPO)


@pytest.fixture
def used_up(endpoint: Endpoint, admin: httpx.Client) -> Iterator[tuple[str, float]]:
    """A token whose rate limit is used up, and the reset time."""
    token = str(admin.post("/_admin/tokens", json={"scopes": [ORG]}).json()["token"])
    admin.patch("/_admin/settings", json={"enforce_rate_limit": True, "rate_limit": 0}).raise_for_status()
    headers = {"authorization": f"Bearer {token}"}
    url = f"{endpoint.url}/repos/{REPO}/actions/runners"
    answer = httpx.get(url, headers=headers, trust_env=False, timeout=LONG_S)
    yield token, float(answer.headers["x-ratelimit-reset"])
    admin.patch("/_admin/settings", json={"enforce_rate_limit": False, "rate_limit": 15_000}).raise_for_status()


async def test_used_up_limit_ends_at_its_reset(
    connect: Connect, used_up: tuple[str, float], clock: AdjustableClock
) -> None:
    token, reset = used_up
    clock.ahead_s = reset - 1_000 - clock.now().timestamp()
    with pytest.raises(Throttled) as caught:
        await connect(token=token).list_runners(REPO)
    # If a new hour has begun, it is the reset of that hour.
    assert 900 < caught.value.retry_after_s % HOUR_S <= 1_000


# Just-in-time configurations


async def test_repeatedly_lost_responses_are_raised(github: GitHubClient, admin: httpx.Client) -> None:
    add_fault(admin, "lost_answer", "jitconfig", times=5)
    with pytest.raises((Unavailable, Conflict)):  # both mean that it failed
        await github.jit_config(REPO, name="remuda-gone", labels=["x"])
