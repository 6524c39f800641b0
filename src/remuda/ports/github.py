"""GitHub's API for self-hosted runners.

A scope is an organisation or a repository as owner/repo. Lists lag, and the `busy` flag may be a minute old. Only
`delete_runner` tests atomically whether a runner is busy.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from remuda.domain.errors import UserError
from remuda.domain.instance import Credential
from remuda.domain.pool_config import DEFAULT_GROUP_ID
from remuda.domain.runner_release import RunnerRelease


@dataclass(frozen=True, kw_only=True, slots=True)
class GitHubRunner:
    runner_id: int
    name: str
    online: bool
    busy: bool
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class JitRunner:
    runner_id: int
    #: A credential.
    config: str = field(repr=False)


class Deletion(Enum):
    DELETED = "deleted"
    GONE = "gone"
    BUSY = "busy"


def missing_group(scope: str, name: str, known: Iterable[str]) -> UserError:
    return UserError(
        f"{scope} has no runner group {name!r}",
        field="runner-group",
        fix=f"set runner-group to one of {', '.join(sorted(known))}",
    )


class GitHub(Protocol):
    """All methods raise `UserError` for a rejected credential or permission, `Throttled` and `Unavailable`."""

    async def close(self) -> None: ...

    async def registration_token(self, scope: str) -> Credential: ...

    async def removal_token(self, scope: str) -> Credential: ...

    async def jit_config(
        self, scope: str, *, name: str, labels: Sequence[str], group_id: int = DEFAULT_GROUP_ID
    ) -> JitRunner:
        """Create a just-in-time registration. Raises `Conflict` if the name exists."""
        ...

    async def runner_group_id(self, scope: str, name: str) -> int:
        """The id of a runner group of an organisation. Raises `UserError` if there is none of this name."""
        ...

    async def runner_downloads(self, scope: str) -> RunnerRelease:
        """Return the newest release of the actions runner for Linux."""
        ...

    async def list_runners(self, scope: str) -> Sequence[GitHubRunner]:
        """Return all runners of all pages, or raise: never an incomplete list."""
        ...

    async def get_runner(self, scope: str, runner_id: int) -> GitHubRunner | None: ...

    async def delete_runner(self, scope: str, runner_id: int) -> Deletion: ...
