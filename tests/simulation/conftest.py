"""Order of the tests: the campaign first, because it takes longest and uses two processes."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: "short_campaign" not in item.name)
