"""Collection order: long files first, so that no core waits for a long file at the end."""

from __future__ import annotations

import pytest

LONG_FILES = (
    "test_demo_aws.py",
    "test_demo.py",
    "test_credential_leaks.py",
    "test_aws_network_faults.py",
    "test_aws_error_messages.py",
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
    order = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
