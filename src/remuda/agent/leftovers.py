"""What jobs can leave outside of their own folders, where they have a user of their own."""

from __future__ import annotations

from collections.abc import Sequence

from remuda.agent.job_user import JobUser


class Leftovers:
    def __init__(self, *, user: JobUser) -> None:
        self._user = user

    async def prepare(self) -> None:
        return

    def remove(self) -> Sequence[str]:
        return []
