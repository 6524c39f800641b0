"""History of spot prices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Protocol

from remuda.domain.reporting.prices import SpotPrice


class SpotPrices(Protocol):
    """Source of spot prices."""

    async def spot_history(
        self, instance_types: Collection[str], *, since: datetime, until: datetime
    ) -> Sequence[SpotPrice]:
        """Return the price at `since` and every change until `until`, per type and zone.

        Unknown types are omitted. Raises `UserError` if the caller lacks the permission.
        """
        ...
