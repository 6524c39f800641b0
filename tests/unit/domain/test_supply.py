"""Supply of a runner set: what it needs, which machines count, and that no step ends a job."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.domain.demand import DemandStatistics
from remuda.domain.instance import Actor, RetireReason, State
from remuda.domain.resources import Tier, UsageClass
from remuda.domain.runner_set import CapacityWindow, RunnerSet
from remuda.domain.signals import Report, Signal, Verdict, boot_verdict, registration_verdict
from remuda.domain.supply import (
    LATE_BINDING_S,
    LISTENS_WITHIN_S,
    RETURNS_WITHIN_S,
    MachineStep,
    SetMachine,
    SupplyPlan,
    WarmKey,
    WarmTarget,
    decide_supply,
    decide_warm,
)
from remuda.domain.thresholds import Lifetimes
from remuda.domain.transitions import Bind, End, Equip, Event, Fill, ListenOn, Release, advance
from tests.support.records import CLAIM, NOW, at, in_set, instance, instance_id, runner_request, set_holder

LIFETIMES = Lifetimes()
LARGE = RunnerSet(name="large", labels=("self-hosted", "large"), resource_class="large", scope="octo/repo", max=4)


def decide(
    *machines: SetMachine,
    assigned: int = 0,
    hot: int = 0,
    waiting_jobs: int = 0,
    ended_jobs: int = 0,
    lost_jobs: int = 0,
    running: int = 0,
    acquiring: int = 0,
    publishing: int = 0,
    draining: bool = False,
    maximum: int = 4,
) -> SupplyPlan:
    return decide_supply(
        replace(LARGE, max=maximum),
        CapacityWindow(hot=hot),
        DemandStatistics(assigned=assigned, running=running),
        machines,
        waiting_jobs=waiting_jobs,
        ended_jobs=ended_jobs,
        lost_jobs=lost_jobs,
        acquiring=acquiring,
        publishing=publishing,
        draining=draining,
        lifetimes=LIFETIMES,
        now=NOW,
    )


def machine(number: int = 1, state: State = State.RUNNING, **changed: Any) -> SetMachine:
    """A machine of the set: created and claimed ones boot, a running one listens."""
    of_record = {"run_id", "threshold", "created_at", "retire_reason", "uses"}
    record = {name: changed.pop(name) for name in list(changed) if name in of_record}
    epoch = 1 if state is State.CREATED else 2
    given = {name: changed.pop(name) for name in list(changed) if name in {"signal", "busy", "spent_epoch", "notice"}}
    signal = Signal.UD_REG_OK if state is State.RUNNING else None
    listening = state is State.RUNNING and not given.get("spent_epoch")
    report = Report(instance_id=instance_id(number), epoch=epoch, **{"signal": signal, "listening": listening, **given})
    found = in_set(state, instance_id=instance_id(number), **record)
    return SetMachine(instance=found, report=report, **changed)


def names(steps: tuple[MachineStep, ...]) -> list[str]:
    return [step.machine.instance.instance_id for step in steps]


def ids(*numbers: int) -> list[str]:
    return [instance_id(number) for number in numbers]


# Counting -----------------------------------------------------------------------------------------------------------


def test_assigned_jobs_and_hot_runners_are_wanted_up_to_the_maximum() -> None:
    assert (decide(assigned=2, hot=1).desired, decide(assigned=2, hot=1).deficit) == (3, 3)
    assert decide(assigned=9, hot=1).deficit == 4
    assert decide().deficit == 0


def test_acquisitions_in_progress_count_at_once() -> None:
    assert decide(assigned=3, acquiring=2).deficit == 1


def test_known_jobs_count_if_the_statistics_do_not_show_them() -> None:
    assert decide(assigned=0, waiting_jobs=2).deficit == 2


def test_running_jobs_count_if_the_statistics_do_not_show_them() -> None:
    plan = decide(machine(run_id="77"), machine(2), waiting_jobs=1, assigned=0)
    assert (plan.desired, plan.deficit, plan.surplus) == (2, 0, frozenset())


def test_jobs_that_ended_before_their_message_need_no_runner() -> None:
    assert decide(machine(run_id="77", spent_epoch=2), assigned=1).deficit == 1
    assert decide(machine(run_id="77", spent_epoch=2), assigned=1, ended_jobs=1).deficit == 0
    assert decide(assigned=1, waiting_jobs=1, ended_jobs=1).deficit == 1


def test_a_job_whose_start_is_known_only_from_its_machine_counts_once() -> None:
    assert decide(machine(busy=True), assigned=1, waiting_jobs=1).deficit == 0
    assert decide(machine(busy=True), machine(2), assigned=2, waiting_jobs=2).deficit == 0
    assert decide(machine(busy=True), assigned=2, waiting_jobs=2).deficit == 1


def test_a_job_that_ended_before_the_message_about_its_start_needs_no_runner() -> None:
    assert decide(machine(spent_epoch=2), assigned=1, waiting_jobs=1).deficit == 0
    assert decide(machine(spent_epoch=2), assigned=2, waiting_jobs=2).deficit == 1


@pytest.mark.parametrize("state", [State.CREATED, State.CLAIMED, State.RUNNING])
def test_coming_and_listening_machines_are_supply(state: State) -> None:
    assert decide(machine(1, state), assigned=1).deficit == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"dead": True},
        {"silent_since": at(-LISTENS_WITHIN_S)},
        {"unwanted": "its scale set was deleted"},
        {"notice": "terminate"},
        {"spent_epoch": 2, "completed": True},
        {"signal": Signal.UD_REG_FAILED},
        {"threshold": at(-1)},
        {"created_at": at(-LIFETIMES.max_age_s)},
    ],
    ids=str,
)
def test_machine_that_cannot_serve_a_job_is_replaced(changed: dict[str, Any]) -> None:
    assert decide(machine(**changed), assigned=1).deficit == 1


@pytest.mark.parametrize("state", [State.CREATED, State.CLAIMED])
@pytest.mark.parametrize("changed", [{"dead": True}, {"signal": Signal.UD_FAILED}, {"threshold": at(0)}], ids=str)
def test_machine_that_will_not_listen_is_replaced(state: State, changed: dict[str, Any]) -> None:
    assert decide(machine(1, state, **changed), assigned=1).deficit == 1


def test_starting_machine_counts_until_it_is_silent_for_too_long() -> None:
    plan = decide(machine(silent_since=at(-10)), assigned=1)
    assert plan.deficit == 0
    assert plan.recheck_at == at(LISTENS_WITHIN_S - 10)


def test_runner_whose_job_ended_on_github_does_not_serve_the_next_job() -> None:
    finishing = machine(run_id="77", completed=True)
    assert decide(finishing, assigned=1).deficit == 1
    # At the maximum, it must report its end first.
    assert decide(finishing, assigned=1, maximum=1).deficit == 0


def test_lost_machine_that_returned_does_not_exceed_the_maximum() -> None:
    busy, finishing, replacement = machine(1, run_id="77"), machine(2, run_id="77", completed=True), machine(3)
    assert decide(busy, finishing, replacement, assigned=2, maximum=3).surplus == frozenset()
    # The job of the second one still runs, whatever GitHub says.
    assert decide(busy, finishing, replacement, assigned=2, maximum=2).surplus == frozenset(ids(3))
    late = replace(replacement, surplus_since=at(-LIFETIMES.surplus_grace_s))
    assert names(decide(busy, finishing, late, assigned=2, maximum=2).withdraw) == ids(3)


def test_machine_on_its_way_back_to_the_pool_is_waited_for() -> None:
    returning = machine(1, State.RELEASING, returning_since=at(-1))
    plan = decide(returning, machine(2, run_id="77", spent_epoch=2, spent_since=at(0)), assigned=3)
    assert (plan.deficit, plan.acquire) == (3, 1)
    assert decide(assigned=1, publishing=1).acquire == 0
    assert plan.recheck_at == at(RETURNS_WITHIN_S - 1)
    late = machine(1, State.RELEASING, returning_since=at(-RETURNS_WITHIN_S))
    assert decide(late, assigned=1).acquire == 1
    assert decide(replace(returning, dead=True), assigned=1).acquire == 1


def test_machine_whose_job_has_ended_on_github_is_waited_for_until_its_reset_is_late() -> None:
    finishing = machine(run_id="77", completed=True, returning_since=at(-1))
    plan = decide(finishing, assigned=1)
    assert (plan.deficit, plan.acquire, plan.recheck_at) == (1, 0, at(RETURNS_WITHIN_S - 1))
    # Its end was known for as long when its agent reported it, and when its release began.
    late = at(-RETURNS_WITHIN_S)
    assert decide(replace(finishing, returning_since=late), assigned=1).acquire == 1
    assert decide(machine(run_id="77", spent_epoch=2, returning_since=late), assigned=1).acquire == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"retire_reason": RetireReason.DRAINED},
        {"uses": LIFETIMES.max_uses - 1},
        {"created_at": at(-LIFETIMES.max_age_s)},
        {"notice": "terminate"},
    ],
    ids=str,
)
def test_machine_that_does_not_return_to_the_pool_is_not_waited_for(changed: dict[str, Any]) -> None:
    assert decide(machine(run_id="77", completed=True, **changed), assigned=1).acquire == 1
    assert decide(machine(1, State.RELEASING, **changed), assigned=1).acquire == 1


def test_set_at_its_maximum_says_so() -> None:
    plan = decide(machine(run_id="77"), assigned=3, maximum=1)
    assert plan.is_at_capacity
    assert plan.waiting == 2
    assert not decide(machine(), assigned=1, maximum=1).is_at_capacity


# Steps --------------------------------------------------------------------------------------------------------------


def test_booted_machine_is_equipped() -> None:
    assert names(decide(machine(1, State.CREATED, signal=Signal.UD_OK), assigned=1).equip) == ids(1)
    assert not decide(machine(1, State.CREATED), assigned=1).equip


def test_claimed_machine_of_an_interrupted_acquisition_is_equipped() -> None:
    assert names(decide(machine(1, State.CLAIMED), assigned=1).equip) == ids(1)


def test_machine_that_is_handled_gets_no_step() -> None:
    assert not decide(machine(1, State.CLAIMED, handled=True), assigned=1).equip
    filling = machine(1, State.CREATED, for_pool=True, signal=Signal.UD_OK, handled=True)
    plan = decide(filling, assigned=1)
    assert (plan.deficit, plan.equip) == (1, ())


def test_booted_machine_that_no_job_needs_fills_the_pool() -> None:
    assert names(decide(machine(1, State.CREATED, signal=Signal.UD_OK)).fill) == ids(1)


def test_machine_for_the_pool_is_no_supply_but_serves_a_job_if_it_is_there_first() -> None:
    booting = machine(1, State.CREATED, for_pool=True)
    booted = machine(2, State.CREATED, for_pool=True, signal=Signal.UD_OK)
    assert decide(booting, booted).supply == 0
    assert names(decide(booting, booted).fill) == ids(2)
    plan = decide(booting, booted, assigned=2)
    assert (plan.deficit, names(plan.equip), names(plan.fill)) == (1, ids(2), [])


def test_surplus_is_withdrawn_after_the_grace() -> None:
    plan = decide(machine(1), machine(2, surplus_since=at(-LIFETIMES.surplus_grace_s)), assigned=1)
    assert plan.surplus == set(ids(2))
    assert names(plan.withdraw) == ids(2)
    plan = decide(machine(1, created_at=at(-9)), machine(2), assigned=1)
    assert (list(plan.surplus), plan.withdraw) == (ids(1), ())
    assert plan.recheck_at is not None


def test_drained_set_gives_up_idle_runners_at_once_and_keeps_jobs() -> None:
    plan = decide(machine(1), machine(2, run_id="77"), machine(3, busy=True), assigned=3, draining=True)
    assert (plan.desired, plan.deficit, names(plan.withdraw)) == (0, 0, ids(1))


def test_spent_runner_is_released_when_it_is_bound() -> None:
    assert names(decide(machine(run_id="77", spent_epoch=2)).release) == ids(1)
    waiting = decide(machine(spent_epoch=2, spent_since=at(-1)))
    assert (waiting.release, waiting.bind, waiting.recheck_at) == ((), (), at(LATE_BINDING_S - 1))
    late = decide(machine(spent_epoch=2, spent_since=at(-LATE_BINDING_S)))
    assert (names(late.bind), late.release) == (ids(1), ())


def test_job_without_message_is_bound_before_the_listening_time_ends() -> None:
    assert not decide(machine(busy=True, threshold=at(60))).bind
    assert names(decide(machine(busy=True, threshold=at(LATE_BINDING_S))).bind) == ids(1)


def test_wanted_runner_is_renewed_in_the_second_half_of_its_time() -> None:
    half = LIFETIMES.listening_time_s / 2
    assert names(decide(machine(threshold=at(half)), assigned=1).renew) == ids(1)
    assert decide(machine(threshold=at(half + 5)), assigned=1).recheck_at == at(5)
    assert not decide(machine(threshold=at(half))).renew


def test_dead_machine_with_a_job_is_left_to_its_time_limit() -> None:
    plan = decide(machine(run_id="77", dead=True), machine(2, busy=True, dead=True), assigned=2, running=2)
    assert (plan.withdraw, plan.end, plan.release, plan.deficit) == ((), (), (), 0)


def test_lost_job_that_github_still_counts_needs_no_runner() -> None:
    assert decide(assigned=1, running=1, lost_jobs=1).deficit == 0
    assert decide(machine(run_id="77"), assigned=3, running=2, lost_jobs=1).deficit == 1
    # The message about its start may be missing.
    assert decide(machine(busy=True, dead=True), assigned=1, running=1, waiting_jobs=1).deficit == 0


def test_job_is_served_although_github_has_ended_the_lost_one() -> None:
    assert decide(assigned=1, running=0, lost_jobs=1).deficit == 1
    assert decide(assigned=1, running=1, lost_jobs=1, waiting_jobs=1).deficit == 1
    # A machine without a job has none to lose.
    assert decide(machine(dead=True), assigned=1, running=1).deficit == 1


# Properties ---------------------------------------------------------------------------------------------------------

times = st.sampled_from([-90_000.0, -901.0, -61.0, -15.0, -1.0, 0.0, 1.0, 14.0, 60.0, 449.0, 900.0])
maybe_times = st.none() | times.map(at)


@st.composite
def machines(draw: st.DrawFn, number: int) -> SetMachine:
    state = draw(st.sampled_from([State.CREATED, State.CLAIMED, State.RUNNING, State.RELEASING]))
    epoch = 1 if state is State.CREATED else 2
    record: dict[str, Any] = {
        "instance_id": instance_id(number),
        "threshold": at(draw(times)),
        "created_at": at(min(0.0, draw(times))),
        "retire_reason": draw(st.sampled_from([None, None, RetireReason.DRAINED, RetireReason.NEVER_REUSED])),
    }
    if state is State.RUNNING:
        record["holder"] = set_holder(run_id=draw(st.sampled_from([None, "", "77"])))
        record["run_deadline"] = record["threshold"] + timedelta(seconds=1_800)
    reports = st.builds(
        Report,
        instance_id=st.just(instance_id(number)),
        epoch=st.sampled_from([epoch, epoch - 1]),
        signal=st.none() | st.sampled_from([Signal.UD_OK, Signal.UD_FAILED, Signal.UD_REG_OK, Signal.UD_REG_FAILED]),
        busy=st.booleans(),
        listening=st.booleans(),
        spent_epoch=st.sampled_from([0, epoch]),
        notice=st.sampled_from(["", "terminate"]),
    )
    return SetMachine(
        instance=in_set(state, **record),
        report=draw(st.none() | reports),
        dead=draw(st.booleans()),
        silent_since=draw(maybe_times),
        spent_since=draw(maybe_times),
        surplus_since=draw(maybe_times),
        completed=draw(st.booleans()),
        returning_since=draw(maybe_times),
        taken=draw(st.booleans()),
        unwanted=draw(st.sampled_from(["", "its provision was released"])),
        for_pool=draw(st.booleans()) and state is State.CREATED,
        handled=draw(st.booleans()),
    )


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[SetMachine], dict[str, Any]]:
    count = draw(st.integers(0, 5))
    given_machines = [draw(machines(number)) for number in range(1, count + 1)]
    small = st.integers(0, 6)
    return given_machines, {
        "assigned": draw(small),
        "hot": draw(st.integers(0, 2)),
        "waiting_jobs": draw(small),
        "acquiring": draw(st.integers(0, 2)),
        "publishing": draw(st.integers(0, 2)),
        "draining": draw(st.booleans()),
        "maximum": draw(st.integers(1, 6)),
    }


def may_have_job(item: SetMachine) -> bool:
    if item.instance.state is not State.RUNNING or item.is_spent:
        return False
    failed = registration_verdict(item.report, item.instance.epoch) is Verdict.FAILED
    return not failed and (item.instance.is_bound or item.is_busy)


@given(situations())
def test_supply_never_exceeds_the_maximum_by_a_deficit(situation: tuple[list[SetMachine], dict[str, Any]]) -> None:
    found, demand = situation
    plan = decide(*found, **demand)
    assert 0 <= plan.desired <= demand["maximum"]
    assert plan.deficit >= 0
    assert plan.deficit == 0 or plan.supply + plan.deficit <= demand["maximum"]


@given(situations())
def test_assigned_job_gets_a_runner_if_there_is_capacity(situation: tuple[list[SetMachine], dict[str, Any]]) -> None:
    found, demand = situation
    plan = decide(*found, **demand)
    assert 0 <= plan.acquire <= plan.deficit
    is_returning = any(item.instance.state is State.RELEASING or item.is_spent or item.completed for item in found)
    if demand["assigned"] and not demand["draining"] and plan.supply == 0:
        assert plan.deficit + len(plan.equip) >= 1
        is_awaited = (is_returning and plan.recheck_at is not None) or demand["publishing"]
        assert plan.acquire + len(plan.equip) >= 1 or is_awaited


@given(situations())
def test_no_step_takes_a_machine_from_its_job(situation: tuple[list[SetMachine], dict[str, Any]]) -> None:
    found, demand = situation
    plan = decide(*found, **demand)
    for step in (*plan.withdraw, *plan.release, *plan.end, *plan.fill, *plan.equip, *plan.renew):
        assert not may_have_job(step.machine), step


@given(situations())
def test_each_machine_has_one_step_and_surplus_is_really_surplus(
    situation: tuple[list[SetMachine], dict[str, Any]],
) -> None:
    found, demand = situation
    plan = decide(*found, **demand)
    steps = [*plan.equip, *plan.fill, *plan.renew, *plan.bind, *plan.release, *plan.withdraw, *plan.end]
    assert len(names(tuple(steps))) == len(set(names(tuple(steps))))
    assert not any(step.machine.handled for step in steps)
    assert len(plan.surplus) <= max(0, plan.supply - plan.desired)
    assert plan.recheck_at is None or plan.recheck_at > NOW
    assert not plan.surplus & {item.instance.instance_id for item in found if may_have_job(item)}


@given(situations())
def test_the_transition_table_allows_each_step(situation: tuple[list[SetMachine], dict[str, Any]]) -> None:
    found, demand = situation
    plan = decide(*found, **demand)
    limits: dict[str, Any] = {"listening_time_s": 900.0, "max_runtime_s": 1_800.0}

    def check(steps: tuple[MachineStep, ...], event_for: Any) -> None:
        for step in steps:
            event: Event = event_for(step.machine)
            advance(step.machine.instance, event, by=Actor.LISTENER, now=NOW, why=step.why)

    check(plan.equip, lambda item: Equip(claim=CLAIM, report=item.report, jit_config="c", runner_id=1, **limits))
    check(plan.fill, lambda item: Fill(claim=CLAIM, report=item.report, idle_time_s=420.0))
    check(plan.renew, lambda item: ListenOn(report=item.report, **limits))
    bind: dict[str, Any] = {"set_tier": Tier.TRUSTED, "max_runtime_s": 1_800.0, "margin_s": 60.0}
    check(plan.bind, lambda item: Bind(report=item.report, **bind))
    release = Release(release_time_s=300.0, credential=None, deregistered=True)
    check((*plan.release, *plan.withdraw), lambda _item: release)

    def end(item: SetMachine) -> End:
        verdict = boot_verdict if item.instance.state is State.CREATED else registration_verdict
        failed = verdict(item.report, item.instance.epoch) is Verdict.FAILED
        reason = RetireReason.FAILED if failed else RetireReason.RELEASED
        return End(reason=reason, report=item.report, claim=CLAIM)

    check(plan.end, end)


# Idle machines ------------------------------------------------------------------------------------------------------

KEY = WarmKey(resource_class="large", usage_class=UsageClass.ON_DEMAND, tier=Tier.TRUSTED)


def test_missing_idle_machines_are_launched_and_the_newest_are_renewed() -> None:
    idle = [
        instance(1, created_at=at(-30), threshold=at(100)),
        instance(2, created_at=at(-20), threshold=at(100)),
        instance(3, created_at=at(-10), threshold=at(400)),
        instance(4, threshold=at(-1)),
        instance(5, retire_reason=RetireReason.DRAINED),
        instance(6, usage_class=UsageClass.SPOT),
        instance(7, tier=Tier.UNTRUSTED),
    ]
    target = WarmTarget(key=KEY, request=runner_request(), wanted=2)
    plan = decide_warm([target], idle, lifetimes=LIFETIMES, now=NOW)
    assert (plan.deficits, plan.idle) == ({KEY: 0}, {KEY: 3})
    assert [(item.instance.instance_id, item.until) for item in plan.renewals] == [(instance_id(2), at(420))]
    assert plan.recheck_at == at(400 - 210)
    plan = decide_warm([replace(target, wanted=6, filling=1)], idle, lifetimes=LIFETIMES, now=NOW)
    assert plan.deficits == {KEY: 2}


def test_idle_machines_are_decided_again_when_the_first_renewal_is_due() -> None:
    idle = [instance(number, threshold=at(left)) for number, left in ((1, 400), (2, 300), (3, 350))]
    target = WarmTarget(key=KEY, request=runner_request(), wanted=3)
    plan = decide_warm([target], idle, lifetimes=LIFETIMES, now=NOW)
    assert (plan.renewals, plan.recheck_at) == ((), at(300 - LIFETIMES.idle_time_s / 2))


def test_idle_machine_is_not_kept_beyond_the_maximum_age() -> None:
    old = instance(1, created_at=at(100 - LIFETIMES.max_age_s), threshold=at(50))
    target = WarmTarget(key=KEY, request=runner_request(), wanted=1)
    (renewal,) = decide_warm([target], [old], lifetimes=LIFETIMES, now=NOW).renewals
    assert renewal.until == at(100)
    assert renewal.why == f"kept warm: 1 of 1 of class {KEY.resource_class}"


@given(
    wanted=st.integers(0, 5),
    filling=st.integers(0, 3),
    thresholds=st.lists(times, max_size=5),
)
def test_warm_deficit_is_what_is_missing(wanted: int, filling: int, thresholds: list[float]) -> None:
    idle = [instance(number, threshold=at(left)) for number, left in enumerate(thresholds, 1)]
    target = WarmTarget(key=KEY, request=runner_request(), wanted=wanted, filling=filling)
    plan = decide_warm([target], idle, lifetimes=LIFETIMES, now=NOW)
    usable = sum(left > 0 for left in thresholds)
    assert plan.deficits[KEY] == max(0, wanted - min(usable, wanted) - filling)
    assert len(plan.renewals) <= wanted
    assert all(item.until > item.instance.threshold for item in plan.renewals)


def test_runner_with_a_job_is_not_ended_for_an_earlier_failure() -> None:
    """Its agent signalled the failure, was restarted, and started the runner after all."""
    working = machine(signal=Signal.UD_REG_FAILED, busy=True)
    assert not decide(working).end
    assert decide(replace(working, report=replace(working.report, busy=False))).end  # type: ignore[type-var]


@pytest.mark.parametrize(("tier", "trust"), [(Tier.UNTRUSTED, Tier.TRUSTED), (Tier.TRUSTED, Tier.UNTRUSTED)])
def test_runner_of_another_trust_is_withdrawn_unless_it_has_a_job(tier: Tier, trust: Tier) -> None:
    listening = machine()
    other = replace(listening, instance=replace(listening.instance, tier=tier))
    busy = machine(2, busy=True)
    working = replace(busy, instance=replace(busy.instance, tier=tier))
    plan = decide_supply(
        replace(LARGE, trust=trust),
        CapacityWindow(hot=2),
        DemandStatistics(),
        [other, working],
        waiting_jobs=0,
        acquiring=0,
        lifetimes=LIFETIMES,
        now=NOW,
    )
    assert names(plan.withdraw) == ids(1)
    assert not plan.end


def test_the_end_of_the_time_of_a_job_changes_the_decision() -> None:
    """Its runner is no supply after that: another one is needed although nothing reports a change."""
    working = machine(run_id="77", busy=True, threshold=at(40))
    plan = decide(working, assigned=1, running=1, hot=1)
    assert plan.recheck_at == at(40)
    later = decide(replace(working, instance=replace(working.instance, threshold=NOW)), assigned=1, running=1, hot=1)
    assert (plan.supply, later.supply) == (1, 0)


def test_the_end_of_the_time_of_a_release_changes_the_decision() -> None:
    """The instance is terminated then, also without a sweep."""
    stuck = machine(state=State.RELEASING, threshold=at(30), returning_since=at(-60))
    assert decide(stuck).recheck_at == at(30 + LIFETIMES.margin_s)
