"""What may be chosen, for how long, and why: refused before anything is read."""

from __future__ import annotations

import pytest

from remuda.cli.operator import check_choice, check_reason, run_quarantine, run_terminate
from remuda.cli.output import Output
from remuda.cli.rendering.formatting import parse_duration
from remuda.config.settings import Settings
from remuda.controlplane.operator import InstanceSelector
from remuda.domain.errors import UserError

ONE = InstanceSelector(instance_ids=("i-0123456789abcdef0",))


@pytest.mark.parametrize(
    "choice",
    [ONE, InstanceSelector(everything=True), InstanceSelector(resource_class="large"), InstanceSelector(ami="ami-1")],
)
def test_ids_or_a_filter(choice: InstanceSelector) -> None:
    assert check_choice(choice) is choice


@pytest.mark.parametrize(
    "choice",
    [
        InstanceSelector(),
        InstanceSelector(instance_ids=("i-1; rm",)),
        InstanceSelector(instance_ids=ONE.instance_ids, everything=True),
        InstanceSelector(instance_ids=ONE.instance_ids, ami="ami-1"),
    ],
)
def test_nobody_ends_a_fleet_by_leaving_a_word_out(choice: InstanceSelector) -> None:
    with pytest.raises(UserError) as failure:
        check_choice(choice)
    assert (failure.value.field, bool(failure.value.fix)) == ("INSTANCE", True)


@pytest.mark.parametrize("last", ["", "0h", "8d", "soon", "-1h", "1e9h", "99999999h"])
def test_a_quarantine_has_a_limit(last: str) -> None:
    with pytest.raises(UserError) as failure:
        run_quarantine(Settings(), Output(as_json=False), ONE, last=last, reason="", dry_run=False)
    assert failure.value.field == "--for"


@pytest.mark.parametrize("reason", ["x" * 201, "two\nlines", "\x1b[2J"])
def test_a_reason_is_one_line(reason: str) -> None:
    with pytest.raises(UserError) as failure:
        run_terminate(Settings(), Output(as_json=False), ONE, reason=reason, dry_run=False, sure=True)
    assert failure.value.field == "--reason"


def test_no_reason_says_so() -> None:
    assert check_reason(" ") == "no reason was given"


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5_400), (" 2 h", 7_200), ("7d", 604_800), ("1w", 604_800), ("h", None), ("1y", None)]
)
def test_durations(text: str, seconds: float | None) -> None:
    assert parse_duration(text) == seconds
