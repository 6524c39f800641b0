"""Spot prices: what the market asked for machines, where the caller may know it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Protocol

from remuda.domain.reporting.prices import SpotPrice


class SpotPrices(Protocol):
    async def spot_history(
        self, instance_types: Collection[str], *, since: datetime, until: datetime
    ) -> Sequence[SpotPrice]:
        """Every change of a price in that time, and the price that held when it began, by type and zone. Types that
        are not known are left out. Raises `UserError` where the caller may not ask.
        """
        ...
