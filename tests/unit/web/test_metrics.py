"""Prometheus metrics, read back by Prometheus' own parser: gauges follow the pool, counters never decrease."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from starlette.applications import Starlette

from remuda.controlplane.read.status import PoolLevel, Status
from remuda.domain.demand import JobRecord
from remuda.domain.instance import HistoryEntry, State
from remuda.domain.provision import Provision, ProvisionOutcome, ProvisionStatus
from remuda.domain.reporting.demand import (
    DemandStatus,
    ListenerStatus,
    RunnerSetStatus,
    SessionState,
    WaitingJob,
    WaitReason,
)
from remuda.domain.reporting.warnings import PoolWarning, WarningKind
from remuda.domain.runner_release import REFUSED_AFTER
from remuda.domain.signals import Report
from remuda.domain.transitions import Actor, RetireReason, advance
from remuda.ports.calls import CallCounter
from remuda.web.metrics import BUCKETS_S, METRICS, EventDeduplicator, FleetMetrics, MetricKind, metrics_route
from simulation.memory.github import runner_release
from tests.support.records import NOW, at, end, entry, in_state, instance, instance_id, pool_config, provision

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
NAMES = st.text(st.characters(codec="utf-8"))
Read = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def fleet_metrics(**changed: Any) -> FleetMetrics:
    return FleetMetrics(**{"started_at": NOW, **changed})


def read(metrics: FleetMetrics, calls: CallCounter | None = None) -> Read:
    text, _ = metrics.text(calls or CallCounter())
    families = list(parse_text(text.decode()))
    assert len({family.name for family in families}) == len(families)
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}
    assert len(found) == len(samples), "a series came twice"
    return found


def one(found: Read, name: str, **labels: str) -> float:
    wanted = set(labels.items())
    (value,) = (value for (sample, given), value in found.items() if sample == name and wanted <= set(given))
    return value


def total(found: Read, name: str, **labels: str) -> float:
    wanted = set(labels.items())
    return sum(value for (sample, given), value in found.items() if sample == name and wanted <= set(given))


def status(**changed: Any) -> Status:
    values: dict[str, Any] = {
        "at": NOW,
        "pool": "test",
        "config": pool_config(),
        "instances": (),
        "reports": {},
        "pools": {"large": PoolLevel(idle=0, messages=0)},
        "runs": (),
    }
    return Status(**{**values, **changed})


def read_status(**changed: Any) -> Read:
    """The metrics of this status alone."""
    metrics = fleet_metrics()
    metrics.on_status(status(**changed))
    return read(metrics)


def ended(number: int, seconds: float = 1.0, *, at_s: float = 5.0, **changed: Any) -> Provision:
    outcome = ProvisionOutcome(ended_at=at(at_s), seconds=seconds, **changed)
    return provision(number, status=ProvisionStatus.COMMITTED, outcome=outcome)


def test_instances_by_state_class_and_usage_with_zeros_for_known_combinations() -> None:
    metrics = fleet_metrics()
    fleet = [instance(1), instance(2), in_state(State.RUNNING, instance_id=instance_id(3)), in_state(State.TERMINATED)]
    metrics.on_status(status(instances=fleet, pools={"large": PoolLevel(idle=2, messages=3)}))
    found = read(metrics)
    labels = {"pool": "test", "resource_class": "large", "usage_class": "on-demand"}
    assert one(found, "remuda_instances", state="idle", **labels) == 2
    assert one(found, "remuda_instances", state="running", **labels) == 1
    assert one(found, "remuda_instances", state="idle", **{**labels, "usage_class": "spot"}) == 0
    assert total(found, "remuda_instances") == 3, "terminated instances are not counted"
    assert one(found, "remuda_pool_idle", resource_class="large") == 2
    assert one(found, "remuda_pool_messages", resource_class="large") == 3
    assert one(found, "remuda_max_instances") == 100
    metrics.on_status(status())
    assert one(read(metrics), "remuda_instances", state="idle", **labels) == 0


def test_pool_idle_counts_claimable_instances() -> None:
    fleet = [
        instance(1),
        instance(2, retire_reason=RetireReason.DRAINED),
        instance(3, quarantined_until=at(60)),
        instance(4, quarantined_until=at(-60)),
        instance(5, resource_class="removed-class"),
    ]
    found = read_status(instances=fleet)
    assert one(found, "remuda_pool_idle", resource_class="large") == 2
    assert one(found, "remuda_pool_idle", resource_class="other") == 1


def test_heartbeats_open_provisions_and_warnings() -> None:
    metrics = fleet_metrics()
    ages = {instance_id(1): 4, instance_id(2): 9}
    beats = {name: Report(instance_id=name, beat=1, beat_at=at(-age)) for name, age in ages.items()}
    metrics.on_status(
        status(
            instances=[instance(1), instance(2), instance(3, state=State.CREATED)],
            reports=beats,
            runs=[provision(1, created_at=at(-30)), provision(2, created_at=at(-70)), ended(3)],
            warnings=[
                PoolWarning(kind=WarningKind.STALE_REGISTRATION, subject="x", text="x"),
                PoolWarning(kind=WarningKind.STUCK, subject="x", text="x"),
            ],
        )
    )
    found = read(metrics)
    assert one(found, "remuda_heartbeat_age_max_seconds", state="idle") == 9
    assert one(found, "remuda_instances_without_heartbeat", state="created") == 1
    assert one(found, "remuda_instances_without_heartbeat", state="idle") == 0
    assert one(found, "remuda_open_provisions") == 2
    assert one(found, "remuda_open_provision_age_max_seconds") == 70
    assert one(found, "remuda_warnings", kind="stale-registration") == one(found, "remuda_warnings", kind="stuck") == 1
    assert {dict(labels)["kind"] for name, labels in found if name == "remuda_warnings"} == set(WarningKind)
    assert one(found, "remuda_last_poll_timestamp_seconds") == NOW.timestamp()
    assert one(found, "remuda_registration_token_expiry_timestamp_seconds") == at(3_600).timestamp()


def test_deadline_of_the_runner_version() -> None:
    release = replace(runner_release("2.336.0"), latest="2.337.0", was_newest=True, outdated_since=NOW)
    for runner, expected in ((release, [(NOW + REFUSED_AFTER).timestamp()]), (None, [])):
        found = read_status(config=pool_config(runner=runner))
        values = [value for (name, _), value in found.items() if name.startswith("remuda_runner_version_deadline")]
        assert values == expected


def test_failed_poll_is_counted_and_keeps_the_gauges() -> None:
    metrics = fleet_metrics()
    metrics.on_poll_failed()
    assert one(read(metrics), "remuda_poll_failures_total") == 1
    metrics.on_status(status(instances=[instance(1)]))
    metrics.on_poll_failed()
    found = read(metrics)
    assert one(found, "remuda_poll_failures_total") == 2
    assert total(found, "remuda_instances") == 1


def test_without_configuration_unknown_gauges_are_absent() -> None:
    found = read_status(config=None, instances=[instance(1)], pools={})
    assert one(found, "remuda_instances", resource_class="other", state="idle") == 1
    assert one(found, "remuda_pool_idle", resource_class="other") == 1
    assert not [name for name, _ in found if name == "remuda_max_instances"]


def test_provision_seconds_are_a_histogram_by_source() -> None:
    metrics = fleet_metrics()
    runs = [ended(1, 0.5, reused=2), ended(2, 0.7, reused=1), ended(3, 80.0, created=2), ended(4, 3.0, error="no")]
    metrics.on_status(status(runs=[*runs, ended(5, 9.0, reused=1, created=1)]))
    found = read(metrics)
    assert one(found, "remuda_provision_seconds_bucket", source="warm", le="0.5") == 1, "upper bounds are inclusive"
    assert one(found, "remuda_provision_seconds_bucket", source="warm", le="1.0") == 2
    assert one(found, "remuda_provision_seconds_count", source="warm") == 2
    assert one(found, "remuda_provision_seconds_sum", source="cold") == 80.0
    assert one(found, "remuda_provision_seconds_bucket", source="cold", le="60.0") == 0
    assert [one(found, "remuda_provisions_total", outcome=each) for each in ("warm", "cold", "mixed", "failed")] == [
        *(2, 1, 1, 1)
    ]
    assert one(found, "remuda_runners_total", source="pool") == 4
    assert one(found, "remuda_runners_total", source="created") == 3


def test_counters_count_each_event_once_and_never_decrease() -> None:
    metrics = fleet_metrics()
    lines = {instance_id(1): [entry("create", at=at(1)), entry("commit", at=at(2))]}
    metrics.on_status(status(runs=[ended(1), ended(2)]))
    metrics.add_histories(lines)
    before = read(metrics)
    for _ in range(2):
        metrics.on_status(status(runs=[ended(2)]))
        metrics.add_histories({instance_id(1): lines[instance_id(1)][1:]})
    assert read(metrics) == before
    metrics.on_status(status(runs=[]))
    metrics.add_histories({})
    after = read(metrics)
    kinds = {item.name: item.kind for item in METRICS}
    assert all(after[key] >= value for key, value in before.items() if kinds.get(key[0]) is MetricKind.COUNTER)
    assert one(after, "remuda_provisions_total", outcome="warm") == 2


def test_events_before_the_process_started_are_not_counted() -> None:
    """After a restart they would appear as an increase of all stored events."""
    metrics = fleet_metrics()
    metrics.on_status(status(runs=[ended(1, at_s=-0.001), ended(2, at_s=0.0)]))
    metrics.add_histories({instance_id(1): [entry("create", at=at(-1))]})
    found = read(metrics)
    assert one(found, "remuda_provisions_total", outcome="warm") == 1
    assert one(found, "remuda_transitions_total", transition="create") == 0


def termination(reason: RetireReason, state: State = State.IDLE, **changed: Any) -> HistoryEntry:
    by = Actor.OPERATOR if reason is RetireReason.TERMINATED_BY_OPERATOR else Actor.REFRESH
    record = in_state(state, threshold=at(-100))
    return advance(record, end(record, reason, claim=None, **changed), by=by, now=at(1), why="i-1 at 12:31").entry


@pytest.mark.parametrize(
    ("line", "state", "reason"),
    [
        (termination(RetireReason.EXPIRED), "idle", "expired"),
        (termination(RetireReason.FAILED, State.RUNNING), "running", "failed"),
        (termination(RetireReason.SPOT_NOTICE, detail="terminate at 12:31"), "idle", "spot-notice"),
        (termination(RetireReason.USED_UP), "idle", "used-up"),
        (termination(RetireReason.DRAINED, detail="an image with a flaw"), "idle", "drained"),
        (termination(RetireReason.TERMINATED_BY_OPERATOR, detail="odd"), "idle", "terminated-by-operator"),
        (replace(termination(RetireReason.EXPIRED), retire_reason=None), "idle", "other"),
        (
            replace(termination(RetireReason.EXPIRED), retire_reason=RetireReason.UNRECORDED, source=None),
            "none",
            "unrecorded",
        ),
    ],
)
def test_retirements_by_reason(line: HistoryEntry, state: str, reason: str) -> None:
    metrics = fleet_metrics()
    metrics.on_status(status())
    metrics.add_histories({instance_id(1): [line, line]})
    found = read(metrics)
    assert one(found, "remuda_retirements_total", state=state, reason=reason) == 1
    assert total(found, "remuda_retirements_total") == 1


def test_no_pool_label_before_the_first_poll() -> None:
    metrics = fleet_metrics()
    metrics.add_provisions([ended(1)])
    assert {dict(labels).get("pool") for _, labels in read(metrics)} == {None}
    metrics.on_status(status(pool="ci"))
    assert one(read(metrics), "remuda_provisions_total", pool="ci", outcome="warm") == 1


def test_calls_of_this_process_by_outcome() -> None:
    calls = CallCounter()
    calls.add("github", "GET runners", 3)
    calls.fail("github", "GET runners")
    found = read(fleet_metrics(), calls)
    assert one(found, "remuda_api_calls_total", service="github", operation="GET runners", outcome="ok") == 2
    assert one(found, "remuda_api_calls_total", service="github", operation="GET runners", outcome="error") == 1


def test_labels_do_not_grow_with_the_fleet() -> None:
    def series(count: int) -> int:
        metrics = fleet_metrics()
        fleet = [instance(n, run_id=str(n), resource_class=f"class-{n}") for n in range(count)]
        warnings = [PoolWarning(kind=WarningKind.STUCK, subject=str(n), text=str(n)) for n in range(count)]
        metrics.on_status(status(instances=fleet, warnings=warnings, runs=[ended(n, created=1) for n in range(count)]))
        lines = [entry(f"row-{n}", at=at(n), target=State.TERMINATING) for n in range(count)]
        metrics.add_histories({instance_id(n): [line] for n, line in enumerate(lines)})
        return len(read(metrics))

    assert series(300) == series(30)


@settings(max_examples=60, deadline=None)
@given(NAMES, NAMES, st.lists(NAMES, max_size=3))
def test_label_values_survive_encoding(pool: str, service: str, classes: list[str]) -> None:
    """No character of a name may start a new line or label."""
    config = pool_config()
    named = tuple(replace(config.classes[0], name=name) for name in dict.fromkeys(classes))
    levels = {item.name: PoolLevel(idle=1, messages=2) for item in named}
    metrics = fleet_metrics()
    metrics.on_status(status(pool=pool, config=replace(config, classes=named), pools=levels))
    calls = CallCounter()
    calls.add(service, "x")
    found = read(metrics, calls)
    assert one(found, "remuda_api_calls_total", outcome="ok", service=service) == 1
    assert one(found, "remuda_open_provisions", pool=pool) == 0
    for name in levels:
        assert one(found, "remuda_pool_messages", pool=pool, resource_class=name) == 2


def test_text_in_prometheus_and_openmetrics_format() -> None:
    metrics = fleet_metrics()
    metrics.on_status(status(instances=[instance(1)], runs=[ended(1)]))
    text, kind = metrics.text(CallCounter())
    assert kind.startswith("text/plain; version=")
    assert text.endswith(b"\n")
    families = parse_text(text.decode())
    typed = {family.name: (family.type, family.documentation) for family in families}
    for item in METRICS:
        name = item.name.removesuffix("_total")
        assert typed[name] == (item.kind.value, item.help)
    newer, kind = metrics.text(CallCounter(), accept=OPENMETRICS)
    assert kind.startswith("application/openmetrics-text")
    read_back = list(parse_openmetrics(newer.decode()))  # type: ignore[no-untyped-call]
    assert len(read_back) == len(METRICS)


def test_names_follow_prometheus_rules() -> None:
    """The rules of promtool's linter."""
    for item in METRICS:
        assert item.name.startswith("remuda_")
        assert item.name.endswith("_total") is (item.kind is MetricKind.COUNTER)
        assert not set(item.labels) & {"instance", "job", "le", "run", "run_id", "instance_id"}
        assert item.help.endswith(".")
    assert list(BUCKETS_S) == sorted(set(BUCKETS_S))


def test_alerts_in_the_docs_use_existing_metrics_and_labels() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    rules = [rule for block in blocks for group in yaml.safe_load(block).get("groups", ()) for rule in group["rules"]]
    assert len(rules) > 5
    known = {item.name: item for item in METRICS}
    for rule in rules:
        used = re.findall(r"remuda_[a-z_]+", rule["expr"])
        assert used
        for name in used:
            definition = known[name.removesuffix("_bucket")]
            assert name.endswith("_bucket") is (definition.kind is MetricKind.HISTOGRAM)
        labels = {label for name in used for label in known[name.removesuffix("_bucket")].labels}
        selected = set(re.findall(r'([a-z_]+)=~?"', rule["expr"])) | set(re.findall(r"\$labels\.(\w+)", str(rule)))
        assert selected <= labels, rule["alert"]


def test_forgotten_events_are_not_accepted_again() -> None:
    events = EventDeduplicator(since=NOW, limit=2)
    assert [events.accept(number, at(number)) for number in (1, 2, 3)] == [True, True, True]
    assert not events.accept(1, at(1)), "forgotten, and older than the remembered events"
    assert not events.accept(3, at(3))
    assert events.accept(4, at(4))
    assert not events.accept("late", at(1) - timedelta(milliseconds=1))


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("text/plain;version=0.0.4;q=0.5,*/*;q=0.1", "text/plain; version=0.0.4; charset=utf-8"),
        ("application/openmetrics-text;version=1.0.0;q=0.8", "application/openmetrics-text; version=1.0.0"),
    ],
)
async def test_metrics_route_refreshes_and_negotiates_the_format(accept: str, content_type: str) -> None:
    calls, refreshed = CallCounter(), []

    async def refresh() -> None:
        refreshed.append(1)
        calls.add("store", "find")

    app = Starlette(routes=[metrics_route(fleet_metrics(), calls, refresh=refresh)])
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://dashboard") as client:
        response = await client.get("/metrics", headers={"accept": accept})
        assert (await client.post("/metrics")).status_code == 405
    assert response.status_code == 200
    assert response.headers["content-type"].startswith(content_type)
    assert response.headers["cache-control"] == "no-store"
    assert refreshed == [1]
    assert 'remuda_api_calls_total{operation="find",outcome="ok",service="store"} 1.0' in response.text.splitlines()
    if content_type.startswith("text/plain"):
        assert len(list(parse_text(response.text))) == len(METRICS)


# Runner sets --------------------------------------------------------------------------------------------------------


def set_status(**changed: Any) -> RunnerSetStatus:
    values: dict[str, Any] = {"name": "large", "runner_set": None, "session": SessionState.OPEN, "at": NOW, "max": 9}
    counts = dict.fromkeys(("waiting", "assigned", "running", "hot", "warm", "launching"), 0)
    return RunnerSetStatus(**{**values, **counts, **changed})


def with_demand(**changed: Any) -> Status:
    return replace(status(), demand=DemandStatus(**changed))


def job(number: int = 1, **changed: Any) -> JobRecord:
    values: dict[str, Any] = {"job_id": f"job-{number}", "runner_set": "large", "seen_at": NOW, "queued_at": NOW}
    return JobRecord(**{**values, **changed})


def test_gauges_of_runner_sets() -> None:
    metrics = fleet_metrics()
    item = set_status(
        waiting=3, assigned=5, running=2, hot=1, warm=4, launching=6, updated_at=at(-30), oldest_queued_at=at(-70)
    )
    overdue = WaitingJob(
        job_id="9", run_id="8", repository="", name="", labels=(), runner_set="", queued_at=NOW,
        reason=WaitReason.NO_SET, detail="",
    )  # fmt: skip
    listener = ListenerStatus(owner="host", beat=12)
    metrics.on_status(with_demand(sets=(item,), overdue=(overdue,), listener=listener))
    found = read(metrics)
    jobs = {state: one(found, "remuda_set_jobs", runner_set="large", state=state) for state in ("waiting", "assigned")}
    assert jobs == {"waiting": 3, "assigned": 5}
    runners = ("running", "hot", "launching", "warm")
    assert [one(found, "remuda_set_runners", runner_set="large", state=name) for name in runners] == [2, 1, 6, 4]
    assert one(found, "remuda_set_max_runners", runner_set="large") == 9
    assert one(found, "remuda_set_oldest_wait_seconds", runner_set="large") == 70
    assert one(found, "remuda_set_last_message_age_seconds", runner_set="large") == 30
    assert one(found, "remuda_set_session_up", runner_set="large") == 1
    assert (one(found, "remuda_listener_up"), one(found, "remuda_listener_beat")) == (1, 12)
    assert one(found, "remuda_jobs_waiting_too_long", reason="no-set") == 1
    assert one(found, "remuda_jobs_waiting_too_long", reason="session") == 0


def test_counts_that_are_old_are_absent() -> None:
    metrics = fleet_metrics()
    metrics.on_status(with_demand(sets=(set_status(waiting=3, assigned=5, hot=1, is_current=False),)))
    found = read(metrics)
    assert total(found, "remuda_set_jobs") == total(found, "remuda_set_oldest_wait_seconds") == 0
    # Machines are known by their own reports.
    assert one(found, "remuda_set_runners", runner_set="large", state="hot") == 1
    metrics.on_status(with_demand(sets=(set_status(waiting=3),)))
    assert one(read(metrics), "remuda_set_jobs", runner_set="large", state="waiting") == 3


def test_silent_listener_and_closed_session() -> None:
    metrics = fleet_metrics()
    listener = ListenerStatus(owner="host", beat=12, silent_since=at(-90))
    metrics.on_status(with_demand(sets=(set_status(session=SessionState.SILENT),), listener=listener))
    found = read(metrics)
    assert (one(found, "remuda_listener_up"), one(found, "remuda_set_session_up", runner_set="large")) == (0, 0)
    metrics.on_status(with_demand())
    assert total(read(metrics), "remuda_listener_up") == 0


def test_jobs_are_counted_once_when_they_start_and_end() -> None:
    metrics = fleet_metrics()
    sets = (set_status(),)
    metrics.on_status(with_demand(sets=sets, jobs=(job(1), job(9, started_at=at(-5)))))
    assert one(read(metrics), "remuda_job_wait_seconds_count", runner_set="large") == 0, "started before the process"
    assert one(read(metrics), "remuda_jobs_total", runner_set="large", result="failed") == 0
    for _ in range(3):
        metrics.on_status(with_demand(sets=sets, jobs=(job(1, started_at=at(4)),)))
    found = read(metrics)
    assert one(found, "remuda_job_wait_seconds_count", runner_set="large") == 1
    assert one(found, "remuda_job_wait_seconds_sum", runner_set="large") == 4
    assert one(found, "remuda_job_wait_seconds_bucket", runner_set="large", le="5.0") == 1
    done = [
        job(1, started_at=at(4), completed_at=at(9), result="Succeeded"),
        job(2, completed_at=at(9), result='a result\n{of} "another" service'),
        job(3, runner_set="unknown\nset", completed_at=at(9), result="failed"),
    ]
    for _ in range(3):
        metrics.on_status(with_demand(sets=sets, jobs=tuple(done)))
    found = read(metrics)
    assert one(found, "remuda_jobs_total", runner_set="large", result="succeeded") == 1
    assert one(found, "remuda_jobs_total", runner_set="large", result="other") == 1
    assert one(found, "remuda_jobs_total", runner_set="other", result="failed") == 1
