"""Wiring of GitHub: the credential from the settings, and the client that uses it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.config.declaration import is_secret_arn
from remuda.config.settings import Settings
from remuda.config.sources import read_private_key
from remuda.domain.errors import UserError
from remuda.ports.calls import CallCounter
from remuda.ports.clock import ServerDates

if TYPE_CHECKING:
    from remuda.adapters.aws.clients import AwsClients
    from remuda.adapters.github.auth import Auth
    from remuda.adapters.github.client import GitHubClient
    from remuda.controlplane.context import Context
    from remuda.ports.demand import DemandSource

PUBLIC_API = "https://api.github.com"


@dataclass(frozen=True, kw_only=True, slots=True)
class GithubCredential:
    """A token, or the id and the private key of a GitHub App."""

    text: str = field(repr=False)
    app_id: str = ""


def missing_credential() -> UserError:
    return UserError(
        "there is no GitHub credential",
        field="REMUDA_GITHUB_TOKEN",
        fix="set REMUDA_GITHUB_TOKEN, or REMUDA_GITHUB_APP_ID and REMUDA_GITHUB_APP_KEY",
    )


async def github_credential(settings: Settings, clients: AwsClients, *, required: bool) -> GithubCredential | None:
    """The credential of the settings, or None.

    A secret is read only if the credential is required: a workflow that shares its settings with `refresh` has no
    permission to read it, and uses the tokens of the pool.
    """
    is_app = settings.github_token is None and bool(settings.github_app_id)
    given = settings.github_app_key if is_app else settings.github_token
    text = given.text if given else ""
    if not text and not is_app:
        if required:
            raise missing_credential()
        return None
    if is_secret_arn(text):
        if not required:
            return None
        from remuda.adapters.aws.clients import read_secret  # noqa: PLC0415 - AWS libraries are slow to import

        key, name = ("private_key", "github-app-key") if is_app else ("token", "github-token")
        text = await read_secret(clients, text, key=key, field=name)
    elif is_app:
        text = read_private_key(text)
    return GithubCredential(text=text, app_id=settings.github_app_id if is_app else "")


def github_client(
    settings: Settings,
    credential: GithubCredential,
    clock: SystemClock,
    ids: SystemIds,
    calls: CallCounter,
    *,
    max_wait_s: float | None = None,
    dates: ServerDates | None = None,
) -> GitHubClient:
    api_url = settings.github_api_url or PUBLIC_API
    if not credential.app_id:
        return token_client(api_url, clock, ids, calls, token=credential.text, max_wait_s=max_wait_s, dates=dates)
    from remuda.adapters.github.auth import AppAuth  # noqa: PLC0415 - only an App needs cryptography

    auth = AppAuth(app_id=credential.app_id, key=credential.text, clock=clock)
    return token_client(api_url, clock, ids, calls, auth=auth, max_wait_s=max_wait_s, dates=dates)


def token_client(
    api_url: str,
    clock: SystemClock,
    ids: SystemIds,
    calls: CallCounter,
    *,
    token: str = "",
    auth: Auth | None = None,
    max_wait_s: float | None = None,
    dates: ServerDates | None = None,
) -> GitHubClient:
    """A client with a fixed token, or with `auth`, which obtains tokens."""
    from remuda.adapters.github.client import MAX_WAIT_S, GitHubClient  # noqa: PLC0415 - not every command calls GitHub

    return GitHubClient(
        api_url=api_url,
        token=token,
        auth=auth,
        clock=clock,
        ids=ids,
        calls=calls,
        max_wait_s=MAX_WAIT_S if max_wait_s is None else max_wait_s,
        dates=dates,
    )


@asynccontextmanager
async def open_demand_source(context: Context) -> AsyncIterator[DemandSource]:
    """The runner scale sets of the GitHub that the context uses, with its credential."""
    from remuda.adapters.github.client import GitHubClient  # noqa: PLC0415 - slow to import
    from remuda.adapters.github.scale_sets import ScaleSetSource  # noqa: PLC0415 - only the listener needs it

    if not isinstance(context.github, GitHubClient):
        raise missing_credential()
    source = ScaleSetSource(
        github=context.github, clock=context.clock, ids=context.ids, calls=context.calls, event_log=context.event_log
    )
    try:
        yield source
    finally:
        await source.close()
