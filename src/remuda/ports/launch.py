"""The launch of the instance that a listener runs on."""

from __future__ import annotations

from typing import Protocol


class InstanceLaunch(Protocol):
    async def complete(self) -> bool:
        """Report that the process on this instance works. Return whether anything waited for it.

        The instance that it replaces is ended only after the report. A later report, for example of a process that was
        started again, is harmless. Raises `UserError` for a missing permission, and `Unavailable`.
        """
        ...
