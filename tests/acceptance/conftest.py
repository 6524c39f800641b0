"""Collection order and fixtures of several files.

Long files come first, so that no core waits for a long file at the end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.aws.ec2_machines import MachineStack
from tests.support.aws.stack import AwsStack, aws_stack
from tests.support.dashboard import Dashboard, SampleInstance, SampleStore
from tests.support.local_backend import LocalBackend
from tests.support.namespace_machine.machine import bake_image
from tests.support.namespace_machine.network import server_address

LONG_FILES = (
    "test_boot.py",
    "test_chaos.py",
    "test_demo.py",
    "test_demand.py",
    "test_credential_leaks.py",
    "test_crash_points.py",
    "test_aws_network_faults.py",
    "test_aws_error_messages.py",
    "test_action.py",
    "test_broker.py",
    "test_deploy.py",
    "test_new_user.py",
    "test_lambda.py",
    "test_attacks.py",
    "test_ec2_agent.py",
    "test_sandbox.py",
    "test_benchmarks.py",
    "test_dashboard_page.py",
    "test_aws_backend.py",
    "test_read_side.py",
    "test_doctor.py",
    "test_advice.py",
    "test_cli_input.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AwsStack]:
    with aws_stack(tmp_path_factory.mktemp("aws")) as started:
        yield started


@pytest.fixture
def machine_stack(tmp_path: Path) -> Iterator[MachineStack]:
    bake_image(tmp_path / "image")
    with server_address() as address, aws_stack(tmp_path, address) as started:
        yield MachineStack(started)


@pytest.fixture
async def backend(tmp_path: Path) -> AsyncIterator[LocalBackend]:
    """A local backend that is not up yet."""
    backend = LocalBackend(tmp_path / "state")
    yield backend
    await backend.down()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> SampleStore:
    return SampleStore(tmp_path_factory.mktemp("store") / "state")


@pytest.fixture(scope="module")
def dashboard(store: SampleStore, samples: list[SampleInstance]) -> Iterator[Dashboard]:
    """The dashboard of the file's own `samples`."""
    with Dashboard(store.folder) as started:
        yield started
