"""Fixtures of the tests on virtual machines, which have a real kernel and a real systemd."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.virtual_machine.image import SUITE, build_image
from tests.support.virtual_machine.machine import accelerator, unsupported_reason
from tests.support.virtual_machine.stack import VirtualMachineStack, virtual_machine_stack

HERE = Path(__file__).parent
#: Seconds per test. Generous: the machine may be emulated on a busy computer.
LIMIT_S = 1800


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.real_kernel)
            item.add_marker(pytest.mark.timeout(LIMIT_S))


@pytest.fixture
def stack(tmp_path: Path, record_property: Callable[[str, object], None]) -> Iterator[VirtualMachineStack]:
    if reason := unsupported_reason():
        pytest.skip(reason)
    with virtual_machine_stack(tmp_path) as started:
        record_property("machine", f"qemu with {accelerator(build_image())}, Debian {SUITE}")
        yield started
