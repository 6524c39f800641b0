"""The long files come first: with one at the end, the other cores would wait for it."""

from __future__ import annotations

import pytest

LONG = (
    "test_demo_aws.py",
    "test_demo.py",
    "test_canary.py",
    "test_aws_weather.py",
    "test_aws_faults.py",
    "test_crash_points.py",
    "test_action.py",
    "test_lambda.py",
    "test_attacks.py",
    "test_ec2_agent.py",
    "test_benchmarks.py",
    "test_dashboard_page.py",
    "test_aws_backend.py",
    "test_read_side.py",
    "test_kill9.py",
    "test_doctor.py",
    "test_cli_input.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
