"""Virtual time for the asynchronous tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from simulation.loop import new_loop


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> Mapping[str, Callable[[], Any]]:
    return {"virtual": new_loop}
