"""Status of runner sets: counts, sessions, why jobs wait, and the explanation of jobs."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from datetime import UTC
from io import StringIO
from typing import Any

import pytest

from remuda.cli.rendering.status import changes, explanation_lines, status_document, status_tables
from remuda.cli.terminal import PlainConsole
from remuda.controlplane.doctor import _check_runner_sets
from remuda.controlplane.read.status import Status
from remuda.domain.demand import (
    MAX_QUEUED_S,
    DemandRecord,
    DemandStatistics,
    JobRecord,
    Lease,
    QueuedJob,
    RepositoryQueue,
)
from remuda.domain.instance import State
from remuda.domain.provision import LaunchAttempt, Provision, ProvisionOutcome
from remuda.domain.reporting.demand import (
    LISTENER_SILENT_S,
    WAITING_LIMIT_S,
    DemandInput,
    DemandStatus,
    RunnerSetStatus,
    SessionState,
    WaitReason,
    demand_status,
    find_disagreement,
)
from remuda.domain.reporting.explanation import Explanation, ExplanationInput
from remuda.domain.reporting.job_explanation import explain_job, explain_jobs, explain_queued, explain_set
from remuda.domain.reporting.job_queue import (
    QUEUE_OLD_S,
    command_for_labels,
    describe_missing_labels,
    labels_by_run,
)
from remuda.domain.reporting.warnings import find_demand_warnings
from remuda.domain.runner_set import RunnerSet, parse_runner_sets
from remuda.domain.signals import Report
from remuda.domain.sweep_record import Anomaly, AnomalyKind, QueueAudit, SweepRecord, UnreadableRepository
from remuda.domain.thresholds import Lifetimes
from tests.support.records import (
    NOW,
    assignment,
    at,
    entry,
    in_set,
    instance,
    instance_id,
    pool_config,
    provision,
    set_holder,
)

HOSTILE = "\x1b[31m[bold]evil[/bold]\u202e\n<script>"
LARGE = RunnerSet(
    name="large",
    labels=("self-hosted", "remuda", "large"),
    resource_class="large",
    scope="octo",
    max=3,
)
SPOT = replace(LARGE, name="spot", labels=("self-hosted", "remuda", "spot"), resource_class="spot")
LEASE = Lease(owner="host-1", beat=7, beat_at=at(-5))


def record(assigned: int = 0, running: int = 0, **changed: Any) -> DemandRecord:
    values: dict[str, Any] = {
        "runner_set": "large",
        "scale_set_id": 5,
        "session_id": "session",
        "owner": "host-1",
        "statistics": DemandStatistics(assigned=assigned, running=running),
        "updated_at": at(-20),
    }
    return DemandRecord(**{**values, **changed})


def job(number: int = 1, *, queued: float = -60, **changed: Any) -> JobRecord:
    values: dict[str, Any] = {
        "job_id": f"job-{number}",
        "runner_set": "large",
        "run_id": "77",
        "repository": "octo/app",
        "workflow": "octo/app/.github/workflows/ci.yml@refs/heads/main",
        "display_name": f"build {number}",
        "event": "push",
        "labels": LARGE.labels,
        "queued_at": at(queued),
        "assigned_at": at(queued + 1),
        "seen_at": at(queued + 1),
    }
    return JobRecord(**{**values, **changed})


def machine(number: int, state: State = State.RUNNING, **changed: Any) -> Any:
    return in_set(state, instance_id=instance_id(number), **changed)


def listening(number: int, epoch: int = 2, **changed: Any) -> Report:
    return Report(instance_id=instance_id(number), epoch=epoch, **{"listening": True, **changed})


def demand_input(**changed: Any) -> DemandInput:
    values: dict[str, Any] = {
        "now": NOW,
        "config": pool_config(runner_sets=(LARGE,)),
        "demand": {"large": record()},
        "lease": LEASE,
        "jobs": (),
        "instances": (),
        "reports": {},
        "provisions": (),
        "sweep": SweepRecord(),
    }
    return DemandInput(**{**values, **changed})


def large(**changed: Any) -> RunnerSetStatus:
    return demand_status(demand_input(**changed)).sets[0]


def failed_launch(message: str, *, ended: float = -10, **changed: Any) -> Provision:
    launch = LaunchAttempt(count=1, launched=0, seconds=1.0, errors=(message,))
    outcome = ProvisionOutcome(ended_at=at(ended), seconds=2.0, launches=(launch,), error="no machine")
    return provision(1, runner_set="large", outcome=outcome, **changed)


def test_machines_are_counted_by_what_they_do() -> None:
    machines = [
        machine(1, State.CREATED),
        machine(2, State.CLAIMED),
        machine(3),
        machine(4),
        machine(5),
        machine(6, run_id="77"),
        machine(7, run_id="78"),
        machine(8, State.RELEASING),
        machine(9, State.IDLE),
        instance(10),
        instance(11, resource_class="other"),
        instance(12, quarantined_until=at(60)),
    ]
    reports = {
        instance_id(3): listening(3),
        instance_id(4): listening(4, listening=False),
        instance_id(5): listening(5, busy=True),
        instance_id(7): listening(7, spent_epoch=2),
    }
    status = large(instances=machines, reports=reports)
    assert (status.launching, status.hot, status.running, status.warm) == (3, 1, 2, 2)
    assert (status.machines, status.max, status.is_at_capacity) == (6, 3, True)


def test_waiting_jobs_are_githubs_count_or_the_known_jobs() -> None:
    assert large(demand={"large": record(5, 2)}).waiting == 3
    assert large(demand={"large": record(5, 2)}, jobs=[job(1)]).waiting == 3
    assert large(jobs=[job(1), job(2), job(3, started_at=at(-5)), job(4, runner_set="other")]).waiting == 2
    available = record(statistics=DemandStatistics(available=4))
    assert large(demand={"large": available}).waiting == 4


def test_a_job_that_github_does_not_count_is_forgotten_after_a_while() -> None:
    old = job(1, queued=-3_000)
    assert large(jobs=[old]).waiting == 0
    assert large(jobs=[old], demand={"large": record(1)}).oldest_wait_s == 3_000
    assert large(jobs=[job(1, queued=-90_000)], demand={"large": record(1)}).oldest_wait_s is None


@pytest.mark.parametrize(
    ("changed", "reason", "text"),
    [
        ({"demand": {}}, WaitReason.SESSION, "no listener has a session"),
        ({"demand": {"large": record(1, session_id="")}}, WaitReason.SESSION, "start remuda listen"),
        (
            {"demand": {"large": record(1, failing_since=at(-90), error="GitHub refuses the credential")}},
            WaitReason.SESSION,
            "GitHub refuses the credential",
        ),
        ({"lease": Lease(owner="", beat=9)}, WaitReason.SESSION, "the listener is silent at present"),
        (
            {"lease": replace(LEASE, beat_at=at(-LISTENER_SILENT_S - 1))},
            WaitReason.SESSION,
            "the listener (host-1) is silent since 2025",
        ),
        (
            {"instances": [machine(number, run_id=str(number)) for number in (1, 2, 3)]},
            WaitReason.AT_CAPACITY,
            "at max 3",
        ),
        (
            {"instances": [machine(number, State.CREATED) for number in (1, 2, 3)]},
            WaitReason.STARTING,
            "3 machines of the set start",
        ),
        (
            {"provisions": [failed_launch("InsufficientInstanceCapacity: no spot")]},
            WaitReason.LAUNCH_FAILED,
            "InsufficientInstanceCapacity: no spot",
        ),
        (
            {"demand": {"large": record(1, failing_since=at(-90), shortage="VcpuLimitExceeded")}},
            WaitReason.LAUNCH_FAILED,
            "no machine can be acquired: VcpuLimitExceeded",
        ),
        ({"provisions": [failed_launch("quota", ended=-2_000)]}, WaitReason.STARTING, "or launches one"),
        ({"instances": [machine(1, State.CREATED)]}, WaitReason.STARTING, "1 machine of the set starts"),
        (
            {"instances": [machine(1)], "reports": {instance_id(1): listening(1)}},
            WaitReason.STARTING,
            "1 machine of the set listens",
        ),
        (
            {
                "instances": [instance(number, resource_class="other") for number in range(2)],
                "config": pool_config(runner_sets=(LARGE,), max_instances=2),
            },
            WaitReason.AT_CAPACITY,
            "the pool has 2 of at most 2 instances",
        ),
    ],
)
def test_reason_why_jobs_wait(changed: dict[str, Any], reason: WaitReason, text: str) -> None:
    status = large(**{"jobs": [job()], "demand": {"large": record(1)}, **changed})
    assert (status.reason, text in status.detail) == (reason, True), status.detail


def test_a_successful_launch_after_a_failed_one_is_no_reason() -> None:
    good = provision(2, runner_set="large", outcome=ProvisionOutcome(ended_at=at(-5), seconds=1.0, created=1))
    assert large(jobs=[job()], provisions=[good, failed_launch("quota")]).reason is WaitReason.STARTING


def test_an_open_provision_is_no_reason() -> None:
    current = provision(2, runner_set="large")
    assert large(jobs=[job()], provisions=[current]).reason is WaitReason.STARTING
    assert "quota" in large(jobs=[job()], provisions=[current, failed_launch("quota")]).detail


def test_errors_of_a_complete_launch_are_no_reason() -> None:
    launch = LaunchAttempt(count=1, launched=1, seconds=1.0, errors=("no spot capacity",))
    outcome = ProvisionOutcome(ended_at=at(-10), seconds=2.0, launches=(launch,), error="it did not boot")
    status = large(jobs=[job()], provisions=[provision(1, runner_set="large", outcome=outcome)])
    assert "it did not boot" in status.detail
    assert "no spot capacity" not in status.detail


def test_listener_is_silent_a_minute_after_its_last_heartbeat() -> None:
    assert large(lease=replace(LEASE, beat_at=at(-LISTENER_SILENT_S))).session is SessionState.OPEN
    assert large(lease=replace(LEASE, beat_at=at(-LISTENER_SILENT_S - 1))).session is SessionState.SILENT
    # That of an earlier version does not tell.
    assert large(lease=replace(LEASE, beat_at=None)).session is SessionState.OPEN


def test_a_set_that_was_removed_from_the_configuration_is_shown_until_it_is_drained() -> None:
    found = demand_status(demand_input(demand={"large": record(), "old": record(runner_set="old")}))
    assert [(item.name, item.runner_set is None, item.max) for item in found.sets] == [
        ("large", False, 3),
        ("old", True, 0),
    ]


def test_overdue_jobs_have_the_reason_of_their_set_oldest_first() -> None:
    jobs = [job(1, queued=-400), job(2, queued=-800), job(3, queued=-WAITING_LIMIT_S + 1)]
    found = demand_status(demand_input(jobs=jobs, demand={"large": record(3)}))
    assert [(item.job_id, item.reason) for item in found.overdue] == [
        ("job-2", WaitReason.STARTING),
        ("job-1", WaitReason.STARTING),
    ]
    lost = demand_status(demand_input(jobs=[job(1, queued=-400)]))
    assert [item.reason for item in lost.overdue] == [WaitReason.DISAGREEMENT]


def test_a_job_that_started_late_is_not_overdue() -> None:
    assert demand_status(demand_input(jobs=[job(queued=-800, started_at=at(-100))])).overdue == ()


def queued(*labels: str, **changed: Any) -> QueuedJob:
    values: dict[str, Any] = {"job_id": "9", "run_id": "88", "repository": "octo/app", "name": "gpu", "labels": labels}
    return QueuedJob(**{"queued_at": at(-900), **values, **changed})


def audited(*labels: str, read: float = -200, queued_at: float = -900) -> SweepRecord:
    """What the audit stores about one job."""
    job = queued(*labels, queued_at=at(queued_at))
    return SweepRecord(
        audit=QueueAudit(queues=(RepositoryQueue(repository="octo/app", read_at=at(read), jobs=(job,)),))
    )


def unreadable() -> UnreadableRepository:
    return UnreadableRepository(repository="octo/app", reason="403", at=NOW)


def disagreement(seconds: float) -> Anomaly:
    return Anomaly(kind=AnomalyKind.DISAGREEMENT, subject="large", first_seen_at=at(seconds))


def test_job_in_githubs_queue_that_no_set_serves() -> None:
    seen = audited("self-hosted", "gpu")
    (found,) = demand_status(demand_input(sweep=seen)).overdue
    assert (found.reason, found.runner_set, found.queued_at) == (WaitReason.NO_SET, "", at(-900))
    assert found.detail == "no runner has label gpu; sets: large (self-hosted, remuda, large)"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({}, WaitReason.DISAGREEMENT),
        ({"demand": {}}, WaitReason.SESSION),
        ({"demand": {"large": record(3, 3)}}, WaitReason.AT_CAPACITY),
    ],
)
def test_job_in_githubs_queue_that_a_set_should_serve(changed: dict[str, Any], reason: WaitReason) -> None:
    seen = audited("Self-Hosted", "LARGE")
    (found,) = demand_status(demand_input(sweep=seen, **changed)).overdue
    assert (found.reason, found.runner_set) == (reason, "large")


def test_queued_job_and_unreadable_repository_are_sanitized() -> None:
    job = queued("self-hosted", HOSTILE, name=HOSTILE)
    assert job.name.isprintable()
    assert all(label.isprintable() for label in job.labels)
    found = UnreadableRepository(repository=HOSTILE, reason=HOSTILE, at=NOW)
    assert (found.repository + found.reason).isprintable()


# What GitHub does not send ------------------------------------------------------------------------------------------

FULL: dict[str, Any] = {"capacity": 3, "counted_at": at(-10), "updated_at": at(-10)}


def full(available: int, **changed: Any) -> DemandRecord:
    return record(statistics=DemandStatistics(assigned=3, running=3, available=available), **{**FULL, **changed})


def busy() -> list[Any]:
    return [machine(number, run_id=str(number)) for number in (1, 2, 3)]


def test_jobs_above_the_maximum_are_counted_and_explained() -> None:
    status = large(demand={"large": full(4)}, instances=busy())
    assert (status.waiting, status.reason, status.is_current) == (4, WaitReason.AT_CAPACITY, True)
    assert status.summary == "4 wait: at max 3"
    assert large(demand={"large": full(1)}, instances=busy()).summary == "1 waits: at max 3"
    none = large(demand={"large": full(0)}, instances=busy())
    assert (none.summary, none.reason) == (f"no job waited at {at(-10):%H:%M:%S} UTC", None)


def test_jobs_above_the_maximum_are_no_disagreement() -> None:
    demand = full(4)
    assert find_disagreement(large(demand={"large": demand}, instances=busy()), demand, []) == ""
    free = record(statistics=DemandStatistics(assigned=1, running=1, available=2), **FULL)
    assert "GitHub counts 2 waiting jobs" in find_disagreement(large(demand={"large": free}), free, [])


def test_job_that_github_has_removed_from_its_queue_by_now_is_not_shown() -> None:
    jobs = (queued(*LARGE.labels, queued_at=at(-MAX_QUEUED_S - 1)), queued(*LARGE.labels, job_id="2", name="other"))
    queue = RepositoryQueue(repository="octo/app", read_at=at(-MAX_QUEUED_S), jobs=jobs)
    found = demand_status(demand_input(demand={"large": full(0, queues=(queue,))}, instances=busy()))
    assert [item.job_id for item in found.queued] == ["2"]


def test_jobs_that_only_the_queue_of_a_run_shows_are_counted() -> None:
    """GitHub's count may be wrong."""
    jobs = tuple(queued(*LARGE.labels, job_id=str(number), name=f"test {number}") for number in range(3))
    queue = RepositoryQueue(repository="octo/app", read_at=at(-20), jobs=jobs)
    found = demand_status(demand_input(demand={"large": full(0, queues=(queue,))}, instances=busy()))
    assert (found.sets[0].summary, found.sets[0].oldest_wait_s) == ("3 wait: at max 3", 900)
    assert {(item.runner_set, item.reason) for item in found.queued} == {("large", WaitReason.AT_CAPACITY)}
    # One of them was assigned since, and an older reading counts no more.
    known = job(1, run_id="88", display_name="test 1", started_at=at(-5))
    assert demand_status(demand_input(demand={"large": full(0, queues=(queue,))}, jobs=[known])).sets[0].waiting == 2
    old = replace(queue, read_at=at(-100))
    assert large(demand={"large": full(0, queues=(old,))}, instances=busy()).waiting == 0


def test_count_that_could_not_be_repeated_is_old() -> None:
    for available, before in ((4, "4"), (0, "none")):
        status = large(demand={"large": full(available, counted_at=at(-200))}, instances=busy())
        assert not status.is_current
        assert status.summary.startswith(
            f"it is not known whether jobs wait; {before} did at {at(-200):%Y-%m-%d %H:%M:%S} UTC: "
        )
        assert "no job waits" not in explain_set(status, demand_input(), ()).next_steps


def test_open_session_proves_the_counts_of_a_set_with_room() -> None:
    idle = record(capacity=3, counted_at=at(-9_000), updated_at=at(-9_000))
    assert (large(demand={"large": idle}).summary, large(demand={"large": idle}).is_current) == ("no job waits", True)


@pytest.mark.parametrize(
    ("changed", "since"),
    [
        ({"lease": replace(LEASE, beat_at=at(-300))}, -300),
        ({"lease": Lease(owner="", beat=8, beat_at=at(-40))}, -40),
        ({"demand": {"large": record(capacity=3, failing_since=at(-70), error="403", updated_at=at(-90))}}, -70),
        ({"demand": {"large": record(capacity=3, session_id="", updated_at=at(-30))}}, -30),
    ],
)
def test_counts_of_a_silent_listener_are_those_of_its_end(changed: dict[str, Any], since: float) -> None:
    status = large(**{"demand": {"large": record(capacity=3, updated_at=at(-900))}, **changed})
    assert (status.is_current, status.known_at) == (False, at(since))
    assert status.summary.startswith("it is not known whether jobs wait; none did at ")
    found = demand_input(**{"demand": {"large": record(capacity=3, updated_at=at(-900))}, **changed})
    text = "\n".join(explain_set(status, found, ()).next_steps)
    assert "no job waits" not in text
    assert "GitHub counts" not in text
    assert re.search(r"GitHub counted at 20\S+ \S+ UTC 0 assigned and 0 running jobs", text)


def test_set_that_github_never_counted_is_unknown() -> None:
    assert large(demand={}).summary.startswith("it is not known whether jobs wait: no listener has a session")


def test_listening_machine_with_a_dead_agent_is_not_hot() -> None:
    reports = {instance_id(1): listening(1, beat_at=at(-10)), instance_id(2): listening(2, beat_at=at(-600))}
    assert large(instances=[machine(1), machine(2)], reports=reports).hot == 1


def test_newer_reading_of_a_queue_replaces_the_older_one() -> None:
    seen = audited("self-hosted", "gpu", read=-200)
    empty = RepositoryQueue(repository="octo/app", read_at=at(-20))
    assert demand_status(demand_input(sweep=seen, demand={"large": record(queues=(empty,))})).queued == ()
    older = replace(empty, read_at=at(-210))
    found = demand_status(demand_input(sweep=seen, demand={"large": record(queues=(older,))}))
    assert [item.job_id for item in found.queued] == ["9"]
    assert found.queues_read_at == {"octo/app": at(-200)}


def test_old_reading_of_a_queue_is_shown_with_its_time() -> None:
    (new,) = demand_status(demand_input(sweep=audited("self-hosted", "gpu", read=-QUEUE_OLD_S))).queued
    (old,) = demand_status(demand_input(sweep=audited("self-hosted", "gpu", read=-QUEUE_OLD_S - 1))).queued
    time = f"{at(-QUEUE_OLD_S - 1):%Y-%m-%d %H:%M:%S} UTC"
    assert old.detail == f"{new.detail} (GitHub's queue was last read at {time})"


def test_job_that_no_set_serves_is_shown_before_it_is_overdue() -> None:
    found = demand_status(demand_input(sweep=audited("self-hosted", "gpu", read=-5, queued_at=-30)))
    assert ([item.job_id for item in found.queued], found.overdue) == (["9"], ())
    assert any("job gpu of run 88: no runner has label gpu" in line for line in shown(pool_status(found), 120))


def test_run_with_jobs_that_no_set_has_got() -> None:
    queue = RepositoryQueue(
        repository="octo/app", read_at=at(-20), jobs=(queued(*LARGE.labels, run_id="77", name="build 2"),)
    )
    running = [job(1, started_at=at(-50))]
    found = demand_input(jobs=running, demand={"large": full(1, queues=(queue,))}, instances=busy())
    explanation = explain_jobs("77", running, records(), found, demand_status(found))
    assert explanation.title == "Run 77 of octo/app: 2 jobs, 1 waiting, 1 running"
    assert explanation.next_steps == (
        "job build 2 waits: set large is at max 3",
        f"GitHub's queue was read at {at(-20):%Y-%m-%d %H:%M:%S} UTC",
    )


def test_missing_labels_are_explained() -> None:
    sets = (LARGE, SPOT)
    assert "no runner has labels gpu, a100; sets: large (" in describe_missing_labels(["gpu", "remuda", "a100"], sets)
    text = describe_missing_labels(["large", "spot"], sets)
    assert text.startswith(
        "no runner has all of the labels large, spot; sets: large (self-hosted, remuda, large), spot"
    )
    assert describe_missing_labels(["gpu"], ()) == "no runner has label gpu, and there is no runner set"


RUN_77 = "no runner has label self-hosted; run 77 has runners with labels 77, 77/large"
PAIR_77 = "no runner has label large; run 77 has runners with labels 77, 77/large"
NONE_79 = "run 79 has no runners: they were released, or none were provisioned"


@pytest.mark.parametrize(
    ("labels", "run_id", "expected"),
    [
        (["self-hosted", "77"], "77", f"{RUN_77}: use runs-on: ${{{{ github.run_id }}}}"),
        # The runners of another run, because the job names it.
        (["self-hosted", "77"], "78", f"{RUN_77}: use runs-on: 77"),
        (["self-hosted"], "77", RUN_77),
        (["77", "gpu", "x"], "77", "no runner has labels gpu, x; run 77 has runners with labels 77, 77/large"),
        (["77/8xlarge"], "77", "no runner has label 77/8xlarge; run 77 has runners with labels 77, 77/large"),
        # As workflows named a class in earlier versions.
        (["77", "large"], "77", f"{PAIR_77}: use runs-on: ${{{{ github.run_id }}}}/large"),
        (["77", "large"], "78", f"{PAIR_77}: use runs-on: 77/large"),
        (["79", "large"], "79", f"{NONE_79}; use runs-on: ${{{{ github.run_id }}}}/large"),
        (["79", "self-hosted"], "79", f"{NONE_79}; use runs-on: ${{{{ github.run_id }}}}"),
        (["79/large"], "79", NONE_79),
        # As after "Re-run failed jobs", which does not run the provision job again.
        (["79"], "79", NONE_79),
        (["self-hosted", "79"], "80", "no runner has label 79; sets: set (self-hosted, remuda, large)"),
    ],
)
def test_missing_labels_of_a_run(labels: list[str], run_id: str, expected: str) -> None:
    sets = [
        RunnerSet(name="set", labels=("self-hosted", "remuda", "large"), resource_class="large", scope="o/r", max=1)
    ]
    assert describe_missing_labels(labels, sets, run_id=run_id, runs={"77": ("77", "77/large")}).startswith(expected)


def test_labels_of_a_run_are_those_of_its_runners() -> None:
    ours = machine(1, run_id="77", runner_set="", assignment=assignment(1))
    released, of_set = replace(ours, holder=None), replace(ours, holder=set_holder(run_id="77"))
    assert assignment(1).labels
    assert labels_by_run([ours, released, of_set]) == {"77": assignment(1).labels}


def test_a_lasting_disagreement_is_reported() -> None:
    seen = SweepRecord(anomalies=(disagreement(-WAITING_LIMIT_S - 1),))
    wrong = {"large": record(2)}
    assert demand_status(demand_input(demand=wrong)).disagreements == {}
    found = demand_status(demand_input(demand=wrong, sweep=seen))
    assert found.disagreements == {"large": "GitHub counts 2 waiting jobs, but has sent none that waits"}
    assert demand_status(demand_input(demand=wrong, sweep=seen, jobs=[job()])).disagreements == {}


def test_counts_that_agree_are_no_disagreement() -> None:
    for counted, jobs in ((0, []), (1, [job()]), (0, [job()])):
        demand = record(counted)
        assert find_disagreement(large(demand={"large": demand}, jobs=jobs), demand, jobs) == ""


def test_warnings_about_sets_and_jobs() -> None:
    audit = replace(audited("self-hosted", "gpu").audit, unreadable=(unreadable(),))
    seen = SweepRecord(audit=audit, anomalies=(disagreement(-900),))
    status = demand_status(demand_input(sweep=seen, demand={"large": record(2)}))
    warnings = list(find_demand_warnings(status, now=NOW))
    assert [(item.kind, item.subject) for item in warnings] == [
        ("runner-set", "set.large"),
        ("waiting-job", "octo/app"),
        ("waiting-job", "9"),
    ]
    assert "waits since" in warnings[-1].text
    (silent,) = find_demand_warnings(demand_status(demand_input(lease=Lease(owner="", beat=1))), now=NOW)
    assert (silent.kind, silent.subject) == ("runner-set", "set.large")
    assert list(find_demand_warnings(demand_status(demand_input()), now=NOW)) == []


def lost_job(**changed: Any) -> JobRecord:
    detail = f"{instance_id(1)} has ended: the instance is terminated"
    values = {"started_at": at(-50), "runner_name": RUNNER, "lost_at": at(-30), "lost_detail": detail}
    return job(**{**values, **changed})


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, "; GitHub fails it within about 10 minutes"),
        ({"completed_at": at(-1), "result": "failed"}, "; GitHub says failed"),
        ({"lost_at": at(-3_601)}, ""),
        # It ended just before its instance.
        ({"completed_at": at(-1), "result": "succeeded"}, ""),
    ],
    ids=["running", "failed", "long ago", "succeeded"],
)
def test_warning_about_a_lost_job(changed: dict[str, Any], text: str) -> None:
    found = lost_job(**changed)
    warnings = list(find_demand_warnings(demand_status(demand_input(jobs=[found])), now=NOW))
    assert [(item.kind, item.subject) for item in warnings] == [("lost-instance", "job-1")] * bool(text)
    for item in warnings:
        assert f"instance lost: {instance_id(1)} has ended: the instance is terminated{text}" in item.text


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"config": pool_config(), "demand": {}}, ("ok", "none are configured")),
        ({}, ("ok", "large, listener host-1; no job waits too long")),
        ({"lease": Lease(owner="", beat=1)}, ("problem", "large: the listener is silent")),
        ({"jobs": [job(1, queued=-400)], "demand": {"large": record(1)}}, ("warning", "1 job waits for more than 5")),
        ({"sweep": SweepRecord(audit=QueueAudit(unreadable=(unreadable(),)))}, ("warning", "octo/app: 403")),
    ],
)
def test_doctor_checks_the_sets(changed: dict[str, Any], expected: tuple[str, str]) -> None:
    found = _check_runner_sets(demand_status(demand_input(**changed)))
    assert (found.status.value, expected[1] in found.message) == (expected[0], True), found


# Status of the pool -------------------------------------------------------------------------------------------------


def pool_status(demand: DemandStatus, **changed: Any) -> Status:
    values: dict[str, Any] = {"at": NOW, "pool": "test", "config": pool_config(runner_sets=(LARGE,)), "demand": demand}
    return Status(**{**values, "instances": (), "reports": {}, "pools": {}, "runs": (), **changed})


def shown(status: Status, width: int) -> list[str]:
    console = PlainConsole(file=StringIO(), width=width)
    for part in status_tables(status):
        console.print(part)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_table_of_sets_fits_the_terminal(width: int) -> None:
    found = demand_input(
        config=pool_config(runner_sets=(replace(LARGE, max=100), SPOT)),
        demand={"large": record(120, 100)},
        jobs=[job(queued=-700)],
    )
    lines = shown(pool_status(demand_status(found)), width)
    assert all(len(line) <= width for line in lines)
    (header,) = (line for line in lines if "waiting" in line and "launching" in line)
    assert header.split()[:3] == ["set", "waiting", "assigned"]
    (row,) = (line for line in lines if line.strip().startswith("large  "))
    assert row.split()[1:5] == ["20", "120", "0", "0"]
    assert ("running" in header, "12 min" in row, "open" in row) == (True, True, width == 120)
    assert any("large: 20 wait: the listener takes a machine" in line for line in lines)


def test_hostile_error_is_shown_as_text() -> None:
    found = demand_input(demand={"large": record(1, failing_since=at(-5), error=HOSTILE)}, jobs=[job()])
    text = "\n".join(shown(pool_status(demand_status(found)), 120))
    assert "[bold]evil[/bold]" in text
    assert all(letter.isprintable() or letter == "\n" for letter in text)


def test_status_document_of_a_set() -> None:
    found = demand_input(jobs=[job(queued=-400)], demand={"large": record(1)})
    document = status_document(pool_status(demand_status(found)))
    (item,) = document["runner_sets"]
    assert (item["waiting"], item["oldest_wait_seconds"], item["session"]) == (1, 400, "open")
    assert (item["last_message_age_seconds"], item["reason"], item["at_capacity"]) == (20, "starting", False)
    assert document["jobs"][0]["waited_seconds"] == 400
    assert document["waiting_too_long"][0]["reason"] == "starting"
    assert document["listener"] == {"owner": "host-1", "beat": 7, "alive": True, "silent_since": None}


def test_watch_shows_changes_of_a_set() -> None:
    before = pool_status(demand_status(demand_input()))
    after = pool_status(demand_status(demand_input(jobs=[job()], demand={"large": record(1)})))
    assert changes(before, before) == []
    assert any("set large: 1 waiting, 0 running" in line for line in changes(before, after))


# Explanations -------------------------------------------------------------------------------------------------------

RUNNER = f"remuda-test-2-{instance_id(1)}"
HISTORY = [
    entry("claim", at=at(-80), epoch=2, runner_set="large", source=State.IDLE, target=State.CLAIMED, why="1 job"),
    entry("equip", at=at(-79), epoch=2, runner_set="large", source=State.CLAIMED, target=State.RUNNING),
    entry("bind", at=at(-77), epoch=2, run_id="77", source=State.RUNNING, target=State.RUNNING),
    entry("release", at=at(-20), epoch=2, run_id="77", source=State.RUNNING, target=State.RELEASING),
    entry("pool", at=at(-18), epoch=2, source=State.RELEASING, target=State.IDLE),
    entry("claim", at=at(-10), epoch=3, runner_set="large", source=State.IDLE, target=State.CLAIMED),
]


def records(**changed: Any) -> ExplanationInput:
    values: dict[str, Any] = {
        "now": NOW,
        "lifetimes": Lifetimes(),
        "instances": {instance_id(1): machine(1, State.CLAIMED, epoch=3)},
        "histories": {instance_id(1): HISTORY},
        "reports": {},
    }
    return ExplanationInput(**{**values, **changed})


def rendered(explanation: Explanation) -> str:
    return "\n".join(line.plain for line in explanation_lines(explanation))


def test_story_of_a_finished_job() -> None:
    done = job(
        queued=-90,
        started_at=at(-77),
        completed_at=at(-21),
        result="succeeded",
        runner_name=RUNNER,
        instance_id=instance_id(1),
    )
    found = demand_input(jobs=[done])
    explanation = explain_job(done, records(), found, demand_status(found))
    assert explanation.title == "Job build 1 (job-1): succeeded"
    assert [event.what.partition(" with ")[0] for event in explanation.events] == [
        "job build 1 queued",
        "job build 1 assigned to set large",
        "claimed from the pool for set large",
        "registered for one job of its set, starts to listen",
        "job build 1 started",
        "job build 1 ended: succeeded",
        "releasing",
        "idle, clean, in the pool",
    ]
    assert "it waited for 13.00 s" in rendered(explanation)
    assert explanation.next_steps == (f"{instance_id(1)}: was reused since; it is claimed",)


def test_waiting_job_says_why() -> None:
    waiting = job(queued=-90)
    found = demand_input(jobs=[waiting], demand={"large": record(1)}, provisions=[failed_launch("VcpuLimitExceeded")])
    explanation = explain_job(waiting, records(), found, demand_status(found))
    assert explanation.title.endswith("waits for 90 s")
    assert explanation.next_steps == (
        "job build 1 (job-1) waits for 90 s: no machine can be acquired: VcpuLimitExceeded",
    )


def test_assignment_that_lapsed() -> None:
    lapsed = job(queued=-90, completed_at=at(-30), result="canceled")
    found = demand_input(jobs=[lapsed])
    text = rendered(explain_job(lapsed, records(histories={}), found, demand_status(found)))
    assert "ended: canceled: no runner took it; GitHub queues it again under another id" in text


def test_run_with_several_jobs() -> None:
    jobs = [job(1, started_at=at(-50), runner_name=RUNNER), job(2), job(3, started_at=at(-40))]
    found = demand_input(jobs=jobs, demand={"large": record(3, 2)})
    explanation = explain_jobs("77", jobs, records(), found, demand_status(found))
    assert (explanation.kind, explanation.title) == ("run", "Run 77 of octo/app: 3 jobs, 1 waiting, 2 running")
    assert [text.partition(":")[0] for text in explanation.next_steps] == [
        "job build 2 (job-2) waits for 60 s",
        instance_id(1),
        "GitHub's queue of octo/app was not read yet",
    ]


def test_job_that_no_set_serves() -> None:
    waiting = demand_status(demand_input(sweep=audited("self-hosted", "gpu"))).queued
    for subject, title in (("9", "Job gpu of run 88: waits"), ("88", "Run 88 of octo/app: 1 waiting, none started")):
        explanation = explain_queued(subject, waiting, demand_input().config, "refresh")
        assert explanation.title == title
        why, command = explanation.next_steps
        assert why == "job gpu waits: no runner has label gpu; sets: large (self-hosted, remuda, large)"
        *words, text = shlex.split(command.removeprefix("to get a runner: "))
        assert words == ["remuda", "refresh", "--github-scope", "octo/app", "--runner-sets"]
        sets = parse_runner_sets(json.loads(text), default_scope="", zone_of=lambda _name: UTC)
        assert [item.serves(["self-hosted", "gpu"]) for item in sets] == [False, True]
        assert "queued with labels self-hosted, gpu" in rendered(explanation)


def test_labels_of_an_existing_set_are_never_changed() -> None:
    """GitHub does not change them: the set could open no session any more."""
    labels = [*(label.upper() for label in LARGE.labels), "gpu"]
    waiting = demand_status(demand_input(sweep=audited(*labels))).queued
    (why,) = explain_queued("9", waiting, demand_input().config, "refresh").next_steps
    assert why.endswith(
        "; use runs-on: [self-hosted, remuda, large]: a set with more labels would get the jobs of large"
    )
    config = replace(demand_input().config, runner_sets=(replace(LARGE, scope="octo/app"),))
    assert command_for_labels(labels, config, run_id="", scope="octo/app") == ()


@pytest.mark.parametrize("result", ["", "failed"])
def test_explanation_of_a_lost_job(result: str) -> None:
    found = lost_job(completed_at=at(-1) if result else None, result=result)
    demand = demand_input(jobs=[found])
    explanation = explain_job(found, records(), demand, demand_status(demand))
    loss = f"instance lost: {instance_id(1)} has ended: the instance is terminated"
    assert explanation.title == f"Job build 1 (job-1): {f'{result}, ' if result else ''}{loss}"
    text = rendered(explanation)
    assert "job build 1 lost its instance" in text
    assert (f"job build 1 ended: failed: {loss}" in text) == bool(result)
    assert ("GitHub fails it within about 10 minutes" in text) == (not result)
    assert explain_jobs("77", [found], records(), demand, demand_status(demand)).title.endswith("0 running, 1 lost")


def test_explanation_of_a_set() -> None:
    jobs = [job(1, started_at=at(-50), completed_at=at(-10), result="failed"), job(2)]
    found = demand_input(jobs=jobs, demand={"large": record(2, 1)}, provisions=[failed_launch("quota")])
    explanation = explain_set(demand_status(found).sets[0], found, found.provisions)
    text = rendered(explanation)
    assert explanation.title.startswith("Runner set large (labels self-hosted, remuda, large): 1 waiting, 0 running")
    assert "job build 1 ended: failed" in text
    assert "no machine was acquired: quota" in text
    assert explanation.next_steps[:2] == ("1 waits: no machine can be acquired: quota", "the oldest waits for 60 s")
    assert "session of host-1: open, last news 20 s ago" in text


def test_hostile_names_are_shown_as_text() -> None:
    hostile = JobRecord(
        job_id="job-1",
        runner_set="large",
        run_id="77",
        seen_at=NOW,
        queued_at=NOW,
        display_name=HOSTILE,
        result=HOSTILE,
    )
    found = demand_input(jobs=[hostile])
    text = rendered(explain_job(hostile, records(), found, demand_status(found)))
    assert all(letter.isprintable() or letter == "\n" for letter in text)
