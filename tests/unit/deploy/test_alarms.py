"""The alarms of the template for datapoints as they come, evaluated as CloudWatch does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from remuda.deployment.template import template

RESOURCES = template()["Resources"]
ALARMS = {name: each["Properties"] for name, each in RESOURCES.items() if each["Type"] == "AWS::CloudWatch::Alarm"}
#: Alarms on what must happen: nothing is as bad as a failure.
ON_SILENCE = ("ListenerAlarm", "RefreshAlarm")
ON_FAILURES = sorted(ALARMS.keys() - set(ON_SILENCE))
#: A period without a datapoint, one without and one with a failure.
MISSING, GOOD, BAD = None, 0.0, 1.0
#: CloudWatch also reads some older periods, about two ("evaluation range").
MORE = (0, 2)
Datapoint = float | None


def is_alarm(alarm: dict[str, Any], points: Sequence[Datapoint], more: int) -> bool:
    """Whether the alarm is in ALARM after these periods, which follow periods without datapoints.

    As in "Configuring how CloudWatch alarms treat missing data": if the evaluation range has enough real datapoints,
    the newest of them count; if not, all of them count, and the setting for missing data fills the rest.
    """
    periods = alarm["EvaluationPeriods"]
    found = [each for each in points[-periods - more :] if each is not None][-periods:]
    threshold = alarm["Threshold"]
    bad = sum(
        each < threshold if alarm["ComparisonOperator"].startswith("Less") else each >= threshold for each in found
    )
    filled = periods - len(found) if alarm["TreatMissingData"] == "breaching" else 0
    return bool(bad + filled >= alarm.get("DatapointsToAlarm", periods))


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("name", ON_FAILURES)
@pytest.mark.parametrize("pause", range(1, 5))
def test_a_failure_each_time_is_an_alarm_however_seldom_it_is_tried(name: str, pause: int, more: int) -> None:
    """Every five to twenty minutes, with nothing in between."""
    points = ([BAD] + [MISSING] * (pause - 1)) * 12
    assert is_alarm(ALARMS[name], points, more)


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("name", ON_FAILURES)
def test_every_second_failure_is_an_alarm(name: str, more: int) -> None:
    assert is_alarm(ALARMS[name], [BAD, GOOD] * 12, more)
    assert is_alarm(ALARMS[name], [BAD, MISSING, GOOD, MISSING] * 12, more)


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("name", ALARMS)
def test_three_bad_periods_are_an_alarm_and_one_is_not(name: str, more: int) -> None:
    bad, good = (GOOD, BAD) if name == "ListenerAlarm" else (BAD, GOOD)
    assert is_alarm(ALARMS[name], [good] * 20 + [bad] * 3, more)
    assert not is_alarm(ALARMS[name], [good] * 20 + [bad], more)
    assert not is_alarm(ALARMS[name], [good] * 20 + [bad] + [good] * 5 + [bad], more)


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("name", ON_FAILURES)
def test_silence_and_old_failures_are_no_alarm(name: str, more: int) -> None:
    assert not is_alarm(ALARMS[name], [], more)
    assert not is_alarm(ALARMS[name], [BAD, MISSING, MISSING], more)
    assert not is_alarm(ALARMS[name], [BAD] * 12 + [MISSING] * 12, more)
    assert not is_alarm(ALARMS[name], [BAD] * 12 + [GOOD] * 10, more)


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("name", ON_SILENCE)
def test_silence_is_an_alarm_where_something_must_happen(name: str, more: int) -> None:
    good = BAD if name == "ListenerAlarm" else GOOD
    assert is_alarm(ALARMS[name], [good] * 20 + [MISSING] * (3 + more), more)
    # The first datapoint of a new pool ends it.
    assert not is_alarm(ALARMS[name], [good], more)


def test_refused_calls_of_the_broker_are_an_alarm() -> None:
    alarm = ALARMS["ThrottlesAlarm"]
    assert (alarm["Namespace"], alarm["MetricName"]) == ("AWS/Lambda", "Throttles")
    assert alarm["Dimensions"] == [{"Name": "FunctionName", "Value": {"Ref": "BrokerFunction"}}]
