from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.domain.signals import (
    MAX_DURATION_S,
    FailureKind,
    Pulse,
    Report,
    Signal,
    Verdict,
    registration_verdict,
    removal_verdict,
)
from tests.support.records import NOW, at, report

#: The contract's order (lifecycle, section 4), lowest first.
RANKED = [
    "UD_OK",
    "UD_FAILED",
    "UD_REG_OK",
    "UD_REG_FAILED",
    "UD_REMOVE_REG_OK",
    "UD_REMOVE_REG_FAILED",
    "UD_REMOVE_REG_REMOVE_RUN_OK",
    "UD_REMOVE_REG_REMOVE_RUN_FAILED",
]


def test_signals_are_ranked_by_phase_and_failed_over_ok() -> None:
    assert [signal.value for signal in sorted(Signal, key=lambda each: each.rank)] == RANKED
    assert [Signal(name).failed for name in RANKED] == [False, True] * 4
    assert report(None).rank < min(signal.rank for signal in Signal)


@given(st.sampled_from([None, *Signal]), st.sampled_from(Signal), st.integers(0, 4), st.integers(1, 4))
def test_epoch_and_rank_of_a_report_never_fall(before: Signal | None, after: Signal, old: int, new: int) -> None:
    allowed = report(before, old).may_become(new, after)
    assert allowed == (new > old or (new == old and after.rank >= report(before).rank))


VERDICTS = {
    "UD_OK": ("pending", "pending"),
    "UD_FAILED": ("failed", "pending"),
    "UD_REG_OK": ("ok", "pending"),
    "UD_REG_FAILED": ("failed", "pending"),
    "UD_REMOVE_REG_OK": ("ok", "pending"),
    "UD_REMOVE_REG_FAILED": ("pending", "failed"),
    "UD_REMOVE_REG_REMOVE_RUN_OK": ("ok", "ok"),
    "UD_REMOVE_REG_REMOVE_RUN_FAILED": ("pending", "failed"),
}


@pytest.mark.parametrize("signal", Signal)
def test_verdicts_per_signal(signal: Signal) -> None:
    seen = report(signal, 2)
    assert (registration_verdict(seen, 2).value, removal_verdict(seen, 2).value) == VERDICTS[signal]


@pytest.mark.parametrize("signal", Signal)
@pytest.mark.parametrize("epoch", [1, 3])
def test_signal_of_another_epoch_is_pending(signal: Signal, epoch: int) -> None:
    assert registration_verdict(report(signal, epoch), 2) is Verdict.PENDING
    assert removal_verdict(report(signal, epoch), 2) is Verdict.PENDING


def test_missing_report_or_signal_is_pending() -> None:
    for nothing in (None, report(None)):
        assert registration_verdict(nothing, 2) is Verdict.PENDING
        assert removal_verdict(nothing, 2) is Verdict.PENDING


@pytest.mark.parametrize("duration_s", [0.0, 0.001, 2.5, MAX_DURATION_S, None])
def test_plausible_duration_is_kept(duration_s: float | None) -> None:
    assert Report(instance_id="i-1", duration_s=duration_s).duration_s == duration_s


@pytest.mark.parametrize("duration_s", [-0.001, MAX_DURATION_S + 1, float("inf"), float("nan")])
def test_implausible_duration_is_ignored(duration_s: float) -> None:
    assert Report(instance_id="i-1", duration_s=duration_s).duration_s is None


def test_signal_replaces_the_former_duration_and_failure() -> None:
    failed = Report(instance_id="i-1").with_signal(
        epoch=1, signal=Signal.UD_REG_FAILED, detail="401", duration_s=2.5, failure=FailureKind.CREDENTIAL_REFUSED
    )
    assert (failed.duration_s, failed.failure) == (2.5, FailureKind.CREDENTIAL_REFUSED)
    later = failed.with_signal(epoch=2, signal=Signal.UD_REG_OK, detail="")
    assert (later.duration_s, later.failure) == (None, None)


@pytest.mark.parametrize("signal", Signal)
def test_every_signal_has_a_description(signal: Signal) -> None:
    assert report(signal, detail="why").describe_signal() == f"{signal.meaning} ({signal}, epoch 2): why"


# Heartbeats -------------------------------------------------------------------------------------------------------

FRESH = Pulse(dead_after_s=15.0, stale_after_s=75.0)


def beat(number: int, stamped: float = 0.0) -> Report:
    return report(beat=number, beat_at=at(stamped))


def test_machine_without_a_heartbeat_is_not_dead() -> None:
    pulse = FRESH.observe(None, now=NOW, monotonic=0.0).observe(report(), now=NOW, monotonic=1.0)
    assert not pulse.is_dead(1_000_000.0)


def test_unchanged_heartbeat_is_dead_after_its_limit() -> None:
    pulse = FRESH.observe(beat(7), now=NOW, monotonic=100.0)
    assert not pulse.is_dead(114.999)
    assert pulse.is_dead(115.0)


def test_observing_the_same_beat_again_does_not_reset_the_limit() -> None:
    pulse = FRESH.observe(beat(7), now=NOW, monotonic=100.0).observe(beat(7), now=NOW, monotonic=110.0)
    assert pulse.is_dead(115.0)


def test_new_beat_resets_the_limit() -> None:
    pulse = FRESH.observe(beat(7), now=NOW, monotonic=100.0).observe(beat(8), now=NOW, monotonic=110.0)
    assert not pulse.is_dead(120.0)
    assert pulse.is_dead(125.0)


@pytest.mark.parametrize(("age_s", "dead"), [(75.0, False), (75.001, True), (-30.0, False), (-3_600.0, False)])
def test_old_first_beat_is_dead_despite_clock_skew(age_s: float, dead: bool) -> None:  # noqa: FBT001
    assert FRESH.observe(beat(7, -age_s), now=NOW, monotonic=0.0).is_dead(0.0) is dead


def test_changing_beat_is_alive_regardless_of_its_timestamp() -> None:
    """S13: a machine with a clock that is hours off is alive."""
    pulse = FRESH.observe(beat(7, -9_999), now=NOW, monotonic=0.0)
    assert pulse.is_dead(0.0)
    assert not pulse.observe(beat(8, -9_998), now=NOW, monotonic=5.0).is_dead(5.0)


@given(st.lists(st.tuples(st.integers(1, 3), st.floats(0, 20)), min_size=1, max_size=20))
def test_pulse_is_dead_exactly_if_its_beat_did_not_change(steps: list[tuple[int, float]]) -> None:
    pulse, time_s, number, changed = FRESH, 0.0, 0, 0.0
    for beats, pause_s in steps:
        time_s += pause_s
        number += beats - 1
        if number and number != pulse.beat:
            changed = time_s
        pulse = pulse.observe(beat(number) if number else None, now=NOW, monotonic=time_s)
        assert pulse.is_dead(time_s) == (number > 0 and time_s - changed >= 15.0)
