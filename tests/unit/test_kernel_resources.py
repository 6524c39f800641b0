"""The table of the kernel's resources names attacks and tests that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import attacks
from tests.support.kernel_resources import RESOURCES, Payer

TESTS = Path(__file__).parents[1]
ATTACKS = {attack.name for group in attacks.GROUPS.values() for attack in group}


@pytest.mark.parametrize("name", sorted({name for resource in RESOURCES for name in resource.shown}))
def test_what_a_row_names_exists(name: str) -> None:
    path, is_test, test = name.partition("::")
    if is_test:
        assert f"def {test}(" in (TESTS / path).read_text(encoding="utf-8")
    else:
        assert name in ATTACKS


def test_what_no_one_pays_for_is_measured_or_attacked() -> None:
    assert [resource.name for resource in RESOURCES if resource.payer is Payer.NO_ONE and not resource.shown] == []
