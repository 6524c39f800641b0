"""Scale sets of the fake GitHub's core: assignment, messages, sessions, lapses and faults."""

from __future__ import annotations

import json
from typing import Any

import pytest

from remuda.fake_github.scale_sets import MAX_EVENTS, MAX_LAPSES
from remuda.fake_github.state import (
    FIRST_MESSAGE_ID,
    Conclusion,
    FakeGitHubSettings,
    GitHubJob,
    JobPhase,
    RegisteredRunner,
    ScaleSet,
)
from tests.unit.fake_github.test_core import REPO, GitHubWorld, raises_api_error

LABELS = ("self-hosted", "remuda", "large")


class SetWorld(GitHubWorld):
    def __init__(self, settings: FakeGitHubSettings | None = None) -> None:
        super().__init__(settings)
        self.sets = self.core.scale_sets

    def add_set(self, name: str = "large", labels: tuple[str, ...] = LABELS, *, scope: str = REPO) -> ScaleSet:
        return self.sets.create(scope=scope, name=name, group_id=1, labels=labels, disable_update=True)

    def served(self, name: str = "large", labels: tuple[str, ...] = LABELS, *, capacity: int = 10) -> ScaleSet:
        """A set with a session that announces its capacity."""
        scale_set = self.add_set(name, labels)
        self.sets.open_session(scale_set, "listener")
        self.sets.announce(scale_set, capacity)
        return scale_set

    def runner(self, scale_set: ScaleSet, name: str) -> RegisteredRunner:
        runner = self.core.registry.register_for_set(scale_set, name)
        self.core.registry.open_session(runner, version="2.336.0")
        return runner

    def start(self, runner: RegisteredRunner) -> GitHubJob:
        assert runner.job_id is not None
        return self.core.queue.acknowledge(runner, runner.job_id)

    def receive(self, scale_set: ScaleSet, last_id: int = 0) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """The events and the statistics of the next message, which is acknowledged."""
        message = self.sets.next_message(scale_set, last_id)
        assert message is not None
        self.sets.acknowledge(scale_set, message["messageId"])
        return json.loads(message["body"]), message["statistics"]

    def kinds(self, scale_set: ScaleSet) -> list[str]:
        return [event["messageType"] for event in self.receive(scale_set)[0]]

    def fault(self, kind: str, **more: Any) -> None:
        self.core.faults.add({"kind": kind, **more})


@pytest.fixture
def world() -> SetWorld:
    return SetWorld()


def test_job_is_assigned_to_a_set_whose_labels_include_its_labels(world: SetWorld) -> None:
    scale_set = world.served()
    job = world.job(("remuda", "LARGE"))
    assert job.scale_set_id == scale_set.id
    [event], statistics = world.receive(scale_set)
    assert event["messageType"] == "JobAssigned"
    assert event["jobId"] == job.message_job_id
    assert event["runnerRequestId"] == 0
    assert statistics["totalAssignedJobs"] == 1


def test_job_with_a_label_that_the_set_lacks_waits(world: SetWorld) -> None:
    world.served()
    assert not world.job((*LABELS, "gpu")).scale_set_id


def test_other_runners_take_jobs_first_and_never_assigned_ones(world: SetWorld) -> None:
    scale_set = world.served()
    ordinary = world.online("ordinary", LABELS)
    first, second = world.job(LABELS), world.job(LABELS)
    assert first.runner_id == ordinary.id
    assert not first.scale_set_id
    assert second.scale_set_id == scale_set.id
    world.core.queue.acknowledge(ordinary, first.id)
    world.finish(ordinary, first)
    assert ordinary.job_id is None


def test_runner_of_a_set_takes_no_unassigned_job(world: SetWorld) -> None:
    scale_set = world.add_set()
    runner = world.runner(scale_set, "r1")
    job = world.job(LABELS)  # no session announces a capacity
    assert runner.job_id is None
    assert not job.scale_set_id


def test_idle_runners_take_assigned_jobs_in_the_order_of_assignment(world: SetWorld) -> None:
    scale_set = world.served(capacity=3)
    jobs = []
    for _ in range(3):
        jobs.append(world.job(LABELS))
        world.advance(1)
    runners = [world.runner(scale_set, f"r{number}") for number in range(3)]
    assert [runner.job_id for runner in runners] == [job.id for job in jobs]


def test_capacity_is_the_total_of_assigned_jobs(world: SetWorld) -> None:
    scale_set = world.served(capacity=2)
    jobs = [world.job(LABELS) for _ in range(3)]
    assert [bool(job.scale_set_id) for job in jobs] == [True, True, False]
    runner = world.runner(scale_set, "r1")
    world.start(runner)
    world.finish(runner, jobs[0])
    assert jobs[2].scale_set_id == scale_set.id
    world.sets.announce(scale_set, 5)
    assert world.job(LABELS).scale_set_id == scale_set.id


def test_job_goes_through_assigned_started_and_completed(world: SetWorld) -> None:
    scale_set = world.served()
    job = world.job(LABELS)
    runner = world.runner(scale_set, "r1")
    assert world.kinds(scale_set) == ["JobAssigned"]
    world.start(runner)
    [started], statistics = world.receive(scale_set)
    assert (started["messageType"], started["runnerName"], started["runnerId"]) == ("JobStarted", "r1", runner.id)
    assert (statistics["totalRunningJobs"], statistics["totalBusyRunners"]) == (1, 1)
    world.finish(runner, job)
    [completed], statistics = world.receive(scale_set)
    assert (completed["messageType"], completed["result"]) == ("JobCompleted", "succeeded")
    assert statistics["totalAssignedJobs"] == statistics["totalRegisteredRunners"] == 0


def test_message_stays_the_same_until_it_is_acknowledged(world: SetWorld) -> None:
    scale_set = world.served()
    world.job(LABELS)
    first = world.sets.next_message(scale_set, 0)
    assert first is not None
    assert first["messageId"] == FIRST_MESSAGE_ID
    world.job(LABELS)
    assert world.sets.next_message(scale_set, 0) == first
    following = world.sets.next_message(scale_set, first["messageId"])
    assert following is not None
    assert following["messageId"] == first["messageId"] + 1
    world.sets.acknowledge(scale_set, first["messageId"])
    assert world.sets.next_message(scale_set, 0) == following


def test_message_has_at_most_fifty_events(world: SetWorld) -> None:
    scale_set = world.served(capacity=1000)
    for _ in range(MAX_EVENTS + 7):
        world.job(LABELS)
    events, statistics = world.receive(scale_set)
    assert len(events) == MAX_EVENTS
    assert statistics["totalAssignedJobs"] == MAX_EVENTS + 7
    assert len(world.receive(scale_set)[0]) == 7


def test_assignment_that_no_runner_takes_lapses_and_returns_under_a_new_id(world: SetWorld) -> None:
    scale_set = world.served()
    job = world.job(LABELS)
    settings = world.core.state.settings
    ids = []
    for lapse in range(1, MAX_LAPSES + 1):
        ids.append(job.message_job_id)
        keep_alive(world, scale_set, settings.assignment_life_s)
        assert not job.scale_set_id
        delay_s = settings.reassignment_delay_s * lapse
        keep_alive(world, scale_set, delay_s - 1)
        assert not job.scale_set_id
        keep_alive(world, scale_set, 1)
        assert bool(job.scale_set_id) is (lapse < MAX_LAPSES)
    assert len(set(ids)) == MAX_LAPSES
    events, statistics = world.receive(scale_set)
    expected = [(kind, number) for number in ids for kind in ("JobAssigned", "JobCompleted")]
    assert [(event["messageType"], event["jobId"]) for event in events] == expected
    assert {event["result"] for event in events if "result" in event} == {"canceled"}
    assert statistics["totalAssignedJobs"] == 0


def keep_alive(world: SetWorld, scale_set: ScaleSet, seconds: float) -> None:
    session = world.sets.poll_begins(scale_set)
    world.advance(seconds)
    world.sets.poll_ends(scale_set, session)


def test_assignment_of_a_running_job_does_not_lapse(world: SetWorld) -> None:
    scale_set = world.served()
    job = world.job(LABELS)
    world.start(world.runner(scale_set, "r1"))
    job.due_at = world.clock.at + 10_000
    world.advance(world.core.state.settings.assignment_life_s + 1)
    assert (job.scale_set_id, job.lapses) == (scale_set.id, 0)


def test_cancelled_job_that_no_runner_has_is_completed(world: SetWorld) -> None:
    scale_set = world.served()
    world.core.queue.cancel(world.job(LABELS).id)
    events, statistics = world.receive(scale_set)
    assert [event["messageType"] for event in events] == ["JobAssigned", "JobCompleted"]
    assert (events[1]["result"], events[1]["runnerId"]) == ("canceled", 0)
    assert statistics["totalAssignedJobs"] == 0


# The zero-capacity trap


def test_job_queued_while_the_capacity_was_zero_is_never_assigned(world: SetWorld) -> None:
    scale_set = world.served(capacity=0)
    trapped = world.job(LABELS)
    world.sets.announce(scale_set, 10)
    world.sets.close_session(scale_set)
    world.sets.open_session(scale_set, "listener")
    world.sets.announce(scale_set, 10)
    assert not trapped.scale_set_id
    assert world.job(LABELS).scale_set_id


def test_zero_capacity_hides_messages(world: SetWorld) -> None:
    scale_set = world.served()
    world.job(LABELS)
    world.sets.announce(scale_set, 0)
    assert world.sets.next_message(scale_set, 0) is None


def test_trap_can_be_switched_off() -> None:
    world = SetWorld(FakeGitHubSettings(zero_capacity_trap=False))
    scale_set = world.served(capacity=0)
    job = world.job(LABELS)
    world.sets.announce(scale_set, 1)
    assert job.scale_set_id == scale_set.id


def test_job_queued_without_a_session_is_assigned_to_the_next_one(world: SetWorld) -> None:
    scale_set = world.add_set()
    job = world.job(LABELS)
    world.sets.open_session(scale_set, "listener")
    world.sets.announce(scale_set, 1)
    assert job.scale_set_id == scale_set.id


# Sessions


def test_set_has_one_session_which_ends_by_inactivity(world: SetWorld) -> None:
    scale_set = world.served()
    with raises_api_error(409) as caught:
        world.sets.open_session(scale_set, "another")
    assert caught.value.type_name == "RunnerScaleSetSessionConflictException"
    keep_alive(world, scale_set, 1000)
    assert scale_set.session_id
    world.advance(world.core.state.settings.message_session_s + 1)
    assert not scale_set.session_id
    world.sets.open_session(scale_set, "another")


def test_unacknowledged_messages_survive_the_session_unless_told_otherwise() -> None:
    for loses in (False, True):
        world = SetWorld(FakeGitHubSettings(session_loses_messages=loses))
        scale_set = world.served()
        world.job(LABELS)
        world.sets.next_message(scale_set, 0)
        world.sets.close_session(scale_set)
        world.sets.open_session(scale_set, "listener")
        world.sets.announce(scale_set, 10)
        assert world.sets.has_message(scale_set, 0) is not loses
        assert world.sets.statistics(scale_set)["totalAssignedJobs"] == 1


# Scale sets


def test_names_are_unique_within_a_runner_group(world: SetWorld) -> None:
    world.add_set("large")
    world.add_set("large", scope="acme")
    with raises_api_error(400) as caught:
        world.add_set("LARGE")
    assert caught.value.type_name == "RunnerScaleSetExistsException"


def test_update_keeps_the_labels(world: SetWorld) -> None:
    scale_set = world.add_set()
    world.sets.update(scale_set, name="other", group_id=1, disable_update=False)
    assert (scale_set.name, scale_set.labels, scale_set.disable_update) == ("other", LABELS, False)


def test_dormant_set_is_deleted(world: SetWorld) -> None:
    scale_set = world.add_set()
    runner = world.core.registry.register_for_set(scale_set, "r1")
    world.advance(world.core.state.settings.scale_set_life_s + 1)
    assert scale_set.id not in world.core.state.scale_sets
    assert runner.id not in world.core.state.runners


def test_deleted_set_returns_its_waiting_jobs(world: SetWorld) -> None:
    scale_set = world.served()
    job = world.job(LABELS)
    world.sets.delete(scale_set)
    assert not job.scale_set_id
    other = world.served("other")
    assert job.scale_set_id == other.id


def test_set_with_a_busy_runner_is_deleted_by_github_alone(world: SetWorld) -> None:
    scale_set = world.served()
    job = world.job(LABELS)
    runner = world.runner(scale_set, "r1")
    world.start(runner)
    with raises_api_error(400):
        world.sets.delete(scale_set)
    world.sets.delete(scale_set, forced=True)
    world.finish(runner, job)
    assert job.conclusion is Conclusion.SUCCESS


def test_runner_names_are_unique(world: SetWorld) -> None:
    scale_set = world.add_set()
    world.core.registry.register_for_set(scale_set, "r1")
    with raises_api_error(409) as caught:
        world.core.registry.register_for_set(scale_set, "R1")
    assert caught.value.type_name == "AgentExistsException"


def test_runner_of_a_set_is_used_up_by_one_job(world: SetWorld) -> None:
    scale_set = world.served()
    job = world.job(LABELS)
    runner = world.runner(scale_set, "r1")
    assert runner.labels == LABELS
    assert runner.ephemeral
    world.start(runner)
    with raises_api_error(422):
        world.core.registry.delete(REPO, runner.id)
    world.finish(runner, job)
    assert runner.id not in world.core.state.runners


# Jobs above the capacity


def test_statistics_count_jobs_that_no_set_has(world: SetWorld) -> None:
    scale_set = world.served(capacity=1)
    other = world.add_set("gpu", ("self-hosted", "gpu"))
    jobs = [world.job(LABELS) for _ in range(3)]
    world.job(("self-hosted", "gpu"))
    counts = world.sets.statistics(scale_set)
    assert (counts["totalAvailableJobs"], counts["totalAssignedJobs"]) == (2, 1)
    assert world.sets.statistics(other)["totalAvailableJobs"] == 1
    assert world.kinds(scale_set) == ["JobAssigned"]
    world.sets.announce(scale_set, 2)
    assert world.sets.statistics(scale_set)["totalAvailableJobs"] == 1
    world.core.queue.cancel(jobs[2].id)
    assert world.sets.statistics(scale_set)["totalAvailableJobs"] == 0


def test_set_that_announces_no_capacity_counts_no_jobs(world: SetWorld) -> None:
    scale_set = world.served(capacity=0)
    world.job(LABELS)
    assert world.sets.statistics(scale_set)["totalAvailableJobs"] == 0


# GitHub Enterprise Server


def test_jobs_are_offered_to_all_sets_and_the_first_acquires() -> None:
    world = SetWorld(FakeGitHubSettings(jobs_must_be_acquired=True))
    one, other = world.served("one"), world.served("other")
    job = world.job(LABELS)
    assert not job.scale_set_id
    for each in (one, other):
        [event], statistics = world.receive(each)
        assert (event["messageType"], event["runnerRequestId"]) == ("JobAvailable", job.id)
        assert statistics["totalAvailableJobs"] == 1
    assert world.sets.acquire(other, [job.id, 999]) == [job.id]
    assert world.sets.acquire(one, [job.id]) == []
    assert world.kinds(other) == ["JobAssigned"]
    assert world.sets.available(one) == []


# Faults


def test_missing_message_never_comes(world: SetWorld) -> None:
    scale_set = world.served()
    world.fault("missing_message", operation="JobStarted")
    world.job(LABELS)
    world.start(world.runner(scale_set, "r1"))
    assert world.kinds(scale_set) == ["JobAssigned"]


def test_late_message_comes_later(world: SetWorld) -> None:
    scale_set = world.served()
    world.fault("late_message", operation="JobAssigned", seconds=30)
    world.job(LABELS)
    assert world.sets.next_message(scale_set, 0) is None
    keep_alive(world, scale_set, 30)
    assert world.kinds(scale_set) == ["JobAssigned"]


def test_duplicate_message_comes_again(world: SetWorld) -> None:
    scale_set = world.served()
    world.fault("duplicate_message", operation="JobAssigned", seconds=5)
    world.job(LABELS)
    first = world.receive(scale_set)[0]
    keep_alive(world, scale_set, 5)
    assert world.receive(scale_set)[0] == first
    assert not world.core.state.set_events


def test_false_completion_comes_for_a_running_job(world: SetWorld) -> None:
    scale_set = world.served()
    world.fault("false_completion")
    job = world.job(LABELS)
    world.start(world.runner(scale_set, "r1"))
    assert world.kinds(scale_set) == ["JobAssigned", "JobStarted", "JobCompleted"]
    assert job.phase is JobPhase.IN_PROGRESS
    assert world.sets.statistics(scale_set)["totalAssignedJobs"] == 1


@pytest.mark.parametrize("value", [0, 34])
def test_statistics_can_be_wrong(world: SetWorld, value: int) -> None:
    scale_set = world.served()
    world.fault("wrong_statistics", times=None, value=value)
    world.job(LABELS)
    assert world.receive(scale_set)[1]["totalAssignedJobs"] == value


# Storage


def test_state_survives_a_kill(world: SetWorld) -> None:
    scale_set = world.served()
    world.fault("late_message", operation="JobAssigned", seconds=30)
    late, running, waiting = (world.job(LABELS) for _ in range(3))
    runner = world.runner(scale_set, "r1")
    world.start(runner)
    before = world.sets.next_message(scale_set, 0)

    restored = SetWorld()
    restored.clock.at = world.clock.at
    stored = json.loads(json.dumps(world.core.state.take_changes()))
    restored.core.state.load([(kind, key, body) for kind, key, body in stored if body is not None])
    restored.core.restore()
    again = restored.core.state.scale_sets[scale_set.id]
    assert restored.sets.next_message(again, 0) == before
    assert restored.sets.statistics(again) == world.sets.statistics(scale_set)
    assert again.session_id == scale_set.session_id
    keep_alive(restored, again, 30)
    restored.sets.acknowledge(again, FIRST_MESSAGE_ID)
    [event] = restored.receive(again)[0]
    assert event["jobId"] == late.message_job_id
    assert {running.id, waiting.id} < set(restored.core.state.jobs)
