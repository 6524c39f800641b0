"""Arguments of drain, quarantine and terminate, which are checked before any record is read."""

from __future__ import annotations

import pytest

from remuda.cli.operator import check_reason, check_selection, run_quarantine, run_terminate
from remuda.cli.output import Output
from remuda.cli.rendering.formatting import parse_duration
from remuda.config.settings import Settings
from remuda.controlplane.operator import InstanceSelector
from remuda.domain.errors import UserError

ONE = InstanceSelector(instance_ids=("i-0123456789abcdef0",))


@pytest.mark.parametrize(
    "selector",
    [ONE, InstanceSelector(everything=True), InstanceSelector(resource_class="large"), InstanceSelector(ami="ami-1")],
)
def test_ids_or_a_filter_are_accepted(selector: InstanceSelector) -> None:
    assert check_selection(selector) is selector


@pytest.mark.parametrize(
    "selector",
    [
        InstanceSelector(),
        InstanceSelector(instance_ids=("i-1; rm",)),
        InstanceSelector(instance_ids=ONE.instance_ids, everything=True),
        InstanceSelector(instance_ids=ONE.instance_ids, ami="ami-1"),
    ],
)
def test_a_missing_or_ambiguous_selection_is_rejected(selector: InstanceSelector) -> None:
    with pytest.raises(UserError) as failure:
        check_selection(selector)
    assert (failure.value.field, bool(failure.value.fix)) == ("INSTANCE", True)


@pytest.mark.parametrize("duration", ["", "0h", "8d", "soon", "-1h", "1e9h", "99999999h"])
def test_quarantine_rejects_an_invalid_duration(duration: str) -> None:
    with pytest.raises(UserError) as failure:
        run_quarantine(
            Settings(), Output(as_json=False), instances=ONE.instance_ids, duration=duration, reason="", dry_run=False
        )
    assert failure.value.field == "--for"


@pytest.mark.parametrize("reason", ["x" * 201, "two\nlines", "\x1b[2J"])
def test_a_reason_of_several_lines_is_rejected(reason: str) -> None:
    with pytest.raises(UserError) as failure:
        run_terminate(
            Settings(),
            Output(as_json=False),
            instances=ONE.instance_ids,
            everything=False,
            reason=reason,
            dry_run=False,
            confirmed=True,
        )
    assert failure.value.field == "--reason"


def test_an_empty_reason_is_replaced() -> None:
    assert check_reason(" ") == "no reason given"


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5_400), (" 2 h", 7_200), ("7d", 604_800), ("1w", 604_800), ("h", None), ("1y", None)]
)
def test_parse_duration(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds
