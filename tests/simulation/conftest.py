"""The long campaign first: it has two workers of its own, and the sleep is done beside it."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "short_campaign" not in item.name)
