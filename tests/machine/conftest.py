"""Fixtures of the tests on virtual machines, which have a real kernel and a real systemd."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.virtual_machine.machine import unsupported_reason
from tests.support.virtual_machine.stack import VirtualMachineStack, virtual_machine_stack


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[VirtualMachineStack]:
    if reason := unsupported_reason():
        pytest.skip(reason)
    with virtual_machine_stack(tmp_path) as started:
        yield started
