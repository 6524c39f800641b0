"""The github: GitHub's runners of one scope (an organisation, or a repository as owner/repo).

Its lists lag and its `busy` flag may be a minute old. The one atomic test is `delete`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from remuda.domain.instance import Credential


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
    GONE = "already gone"
    BUSY = "runs a job"


class GitHub(Protocol):
    """Errors: `UserError` for a refused credential or permission, `Throttled`, `Unavailable`."""

    async def close(self) -> None: ...

    async def registration_token(self, scope: str) -> Credential: ...

    async def removal_token(self, scope: str) -> Credential: ...

    async def jit_config(self, scope: str, *, name: str, labels: Sequence[str]) -> JitRunner:
        """`Conflict` where the name exists."""
        ...

    async def list_runners(self, scope: str) -> Sequence[GitHubRunner]:
        """All pages, and as many runners as there are, or an error: never a part."""
        ...

    async def get_runner(self, scope: str, runner_id: int) -> GitHubRunner | None: ...

    async def delete_runner(self, scope: str, runner_id: int) -> Deletion: ...
