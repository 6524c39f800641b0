"""What may be chosen, for how long, and why: refused before anything is read."""

from __future__ import annotations

import pytest

from remuda.controlplane.levers import Choice
from remuda.domain.errors import UserError
from remuda.entrypoints.acting import check_choice, check_reason, run_quarantine, run_terminate
from remuda.entrypoints.durations import parse_duration
from remuda.entrypoints.output import Output
from remuda.settings import Settings

ONE = Choice(instance_ids=("i-0123456789abcdef0",))


@pytest.mark.parametrize("choice", [ONE, Choice(everything=True), Choice(resource_class="large"), Choice(ami="ami-1")])
def test_ids_or_a_filter(choice: Choice) -> None:
    assert check_choice(choice) is choice


@pytest.mark.parametrize(
    "choice",
    [
        Choice(),
        Choice(instance_ids=("i-1; rm",)),
        Choice(instance_ids=ONE.instance_ids, everything=True),
        Choice(instance_ids=ONE.instance_ids, ami="ami-1"),
    ],
)
def test_nobody_ends_a_fleet_by_leaving_a_word_out(choice: Choice) -> None:
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
