"""What `/metrics` says: read back by Prometheus' own parser; gauges that follow the fleet, counters that never fall."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from remuda.controlplane.read.status import PoolLevel, Status
from remuda.domain.instance import HistoryEntry, State
from remuda.domain.provision import Provision, ProvisionStatus
from remuda.domain.provision_outcome import ProvisionOutcome
from remuda.domain.reporting.warnings import KINDS, PoolWarning
from remuda.domain.signals import Report
from remuda.domain.transitions import Actor, Cause, advance
from remuda.ports.calls import CallCounter
from remuda.web.metrics import BUCKETS_S, METRICS, Kind, Meters, Once
from tests.support.builders import end, in_state
from tests.support.records import NOW, at, entry, instance, instance_id, pool_config, provision

DOCS = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
NAMES = st.text(st.characters(codec="utf-8"))
Read = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def meters(**changed: Any) -> Meters:
    return Meters(**{"began": NOW, **changed})


def read(source: Meters, calls: CallCounter | None = None) -> Read:
    text, _ = source.text(calls or CallCounter())
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
        "pools": {"large": PoolLevel(idle=0, hints=0)},
        "runs": (),
    }
    return Status(**{**values, **changed})


def ended(number: int, seconds: float = 1.0, *, at_s: float = 5.0, **course: Any) -> Provision:
    told = ProvisionOutcome(ended_at=at(at_s), seconds=seconds, **course)
    return provision(number, status=ProvisionStatus.COMMITTED, course=told)


def test_the_fleet_by_state_class_and_usage_with_zeros_for_what_could_be() -> None:
    source = meters()
    fleet = [instance(1), instance(2), in_state(State.RUNNING, instance_id=instance_id(3)), in_state(State.TERMINATED)]
    source.look(status(instances=fleet, pools={"large": PoolLevel(idle=2, hints=3)}))
    found = read(source)
    labels = {"pool": "test", "resource_class": "large", "usage_class": "on-demand"}
    assert one(found, "remuda_instances", state="idle", **labels) == 2
    assert one(found, "remuda_instances", state="running", **labels) == 1
    assert one(found, "remuda_instances", state="idle", **{**labels, "usage_class": "spot"}) == 0
    assert total(found, "remuda_instances") == 3, "what has ended is no instance any more"
    assert one(found, "remuda_pool_idle", resource_class="large") == 2
    assert one(found, "remuda_pool_hints", resource_class="large") == 3
    assert one(found, "remuda_max_instances") == 100
    source.look(status())
    assert one(read(source), "remuda_instances", state="idle", **labels) == 0


def test_the_pools_level_is_what_may_be_claimed() -> None:
    source = meters()
    fleet = [
        instance(1),
        instance(2, retire="drained"),
        instance(3, quarantined_until=at(60)),
        instance(4, quarantined_until=at(-60)),
        instance(5, resource_class="of-before"),
    ]
    source.look(status(instances=fleet))
    found = read(source)
    assert one(found, "remuda_pool_idle", resource_class="large") == 2
    assert one(found, "remuda_pool_idle", resource_class="other") == 1


def test_heartbeats_open_launches_and_warnings() -> None:
    source = meters()
    ages = {instance_id(1): 4, instance_id(2): 9}
    beats = {name: Report(instance_id=name, beat=1, beat_at=at(-age)) for name, age in ages.items()}
    source.look(
        status(
            instances=[instance(1), instance(2), instance(3, state=State.CREATED)],
            reports=beats,
            runs=[provision(1, created_at=at(-30)), provision(2, created_at=at(-70)), ended(3)],
            concerns=[PoolWarning(kind="ghost", subject="x", text="x"), PoolWarning(kind="odd", subject="x", text="x")],
        )
    )
    found = read(source)
    assert one(found, "remuda_heartbeat_age_max_seconds", state="idle") == 9
    assert one(found, "remuda_instances_without_heartbeat", state="created") == 1
    assert one(found, "remuda_instances_without_heartbeat", state="idle") == 0
    assert one(found, "remuda_open_provisions") == 2
    assert one(found, "remuda_open_provision_age_max_seconds") == 70
    assert one(found, "remuda_warnings", kind="ghost") == one(found, "remuda_warnings", kind="other") == 1
    assert {dict(labels)["kind"] for name, labels in found if name == "remuda_warnings"} == {*KINDS, "other"}
    assert one(found, "remuda_look_timestamp_seconds") == NOW.timestamp()
    assert one(found, "remuda_registration_token_expiry_timestamp_seconds") == at(3_600).timestamp()


def test_a_look_that_failed_leaves_the_gauges_with_their_time() -> None:
    source = meters()
    source.look_failed()
    assert one(read(source), "remuda_look_failures_total") == 1
    source.look(status(instances=[instance(1)]))
    source.look_failed()
    found = read(source)
    assert one(found, "remuda_look_failures_total") == 2
    assert total(found, "remuda_instances") == 1


def test_without_a_configuration_nothing_is_made_up() -> None:
    source = meters()
    source.look(status(config=None, instances=[instance(1)], pools={}))
    found = read(source)
    assert one(found, "remuda_instances", resource_class="other", state="idle") == 1
    assert one(found, "remuda_pool_idle", resource_class="other") == 1
    assert not [name for name, _ in found if name == "remuda_max_instances"]


def test_provision_seconds_by_source_are_a_histogram() -> None:
    source = meters()
    runs = [ended(1, 0.5, reused=2), ended(2, 0.7, reused=1), ended(3, 80.0, created=2), ended(4, 3.0, error="no")]
    source.look(status(runs=[*runs, ended(5, 9.0, reused=1, created=1)]))
    found = read(source)
    assert one(found, "remuda_provision_seconds_bucket", source="warm", le="0.5") == 1, "a bound is in its bucket"
    assert one(found, "remuda_provision_seconds_bucket", source="warm", le="1.0") == 2
    assert one(found, "remuda_provision_seconds_count", source="warm") == 2
    assert one(found, "remuda_provision_seconds_sum", source="cold") == 80.0
    assert one(found, "remuda_provision_seconds_bucket", source="cold", le="60.0") == 0
    assert [one(found, "remuda_provisions_total", outcome=each) for each in ("warm", "cold", "mixed", "failed")] == [
        *(2, 1, 1, 1)
    ]
    assert one(found, "remuda_runners_total", source="pool") == 4
    assert one(found, "remuda_runners_total", source="created") == 3


def test_counters_count_once_and_never_fall_when_records_are_dropped() -> None:
    source = meters()
    lines = {instance_id(1): [entry("create", at=at(1)), entry("commit", at=at(2))]}
    source.look(status(runs=[ended(1), ended(2)]))
    source.add_histories(lines)
    before = read(source)
    for _ in range(2):
        source.look(status(runs=[ended(2)]))
        source.add_histories({instance_id(1): lines[instance_id(1)][1:]})
    assert read(source) == before
    source.look(status(runs=[]))
    source.add_histories({})
    after = read(source)
    kinds = {item.name: item.kind for item in METRICS}
    assert all(after[key] >= value for key, value in before.items() if kinds.get(key[0]) is Kind.COUNTER)
    assert one(after, "remuda_provisions_total", outcome="warm") == 2


def test_what_happened_before_the_process_began_does_not_count() -> None:
    """After a restart it would look like a rise of everything that is still on record."""
    source = meters()
    source.look(status(runs=[ended(1, at_s=-0.001), ended(2, at_s=0.0)]))
    source.add_histories({instance_id(1): [entry("create", at=at(-1))]})
    found = read(source)
    assert one(found, "remuda_provisions_total", outcome="warm") == 1
    assert one(found, "remuda_transitions_total", transition="create") == 0


def gone(cause: Cause, state: State = State.IDLE, **changed: Any) -> HistoryEntry:
    by = Actor.OPERATOR if cause is Cause.ORDERED else Actor.REFRESH
    record = in_state(state, threshold=at(-100))
    return advance(record, end(record, cause, owner=None, **changed), by=by, now=at(1), why="i-1 at 12:31").entry


@pytest.mark.parametrize(
    ("line", "state", "reason"),
    [
        (gone(Cause.EXPIRED), "idle", "expired"),
        (gone(Cause.FAILED, State.RUNNING), "running", "failed"),
        (gone(Cause.RETIRED, reason="spot notice: terminate at 12:31"), "idle", "spot-notice"),
        (gone(Cause.RETIRED, reason="used 50 times: 50 is the most"), "idle", "used-up"),
        (gone(Cause.RETIRED, reason="drained: an image with a flaw"), "idle", "drained"),
        (gone(Cause.RETIRED, reason="whatever i-123 says"), "idle", "retired"),
        (gone(Cause.ORDERED, reason="terminated by an operator: odd"), "idle", "ordered"),
        (replace(gone(Cause.EXPIRED), cause=""), "idle", "other"),
        (replace(gone(Cause.EXPIRED), cause="run 1234", source="hostile"), "other", "other"),
        (replace(gone(Cause.EXPIRED), cause="unrecorded", source="", transition="tombstone"), "none", "unrecorded"),
    ],
)
def test_retirements_by_reason(line: HistoryEntry, state: str, reason: str) -> None:
    source = meters()
    source.look(status())
    source.add_histories({instance_id(1): [line, line]})
    found = read(source)
    assert one(found, "remuda_retirements_total", state=state, reason=reason) == 1
    assert total(found, "remuda_retirements_total") == 1


def test_before_the_first_look_nothing_is_said_of_a_pool() -> None:
    source = meters()
    source.add_provisions([ended(1)])
    assert {dict(labels).get("pool") for _, labels in read(source)} == {None}
    source.look(status(pool="ci"))
    assert one(read(source), "remuda_provisions_total", pool="ci", outcome="warm") == 1


def test_calls_of_this_process_by_outcome() -> None:
    calls = CallCounter()
    calls.add("github", "GET runners", 3)
    calls.fail("github", "GET runners")
    found = read(meters(), calls)
    assert one(found, "remuda_api_calls_total", service="github", operation="GET runners", outcome="ok") == 2
    assert one(found, "remuda_api_calls_total", service="github", operation="GET runners", outcome="error") == 1


def test_labels_do_not_grow_with_the_fleet() -> None:
    def series(count: int) -> int:
        source = meters()
        fleet = [instance(n, run_id=str(n), resource_class=f"class-{n}") for n in range(count)]
        concerns = [PoolWarning(kind=f"kind-{n}", subject=str(n), text=str(n)) for n in range(count)]
        source.look(status(instances=fleet, concerns=concerns, runs=[ended(n, created=1) for n in range(count)]))
        lines = [entry(f"row-{n}", at=at(n), target="terminating", cause=f"cause {n}") for n in range(count)]
        source.add_histories({instance_id(n): [line] for n, line in enumerate(lines)})
        return len(read(source))

    assert series(300) == series(30)


@settings(max_examples=60, deadline=None)
@given(NAMES, NAMES, st.lists(NAMES, max_size=3))
def test_any_name_comes_back_as_it_was(pool: str, service: str, classes: list[str]) -> None:
    """Names are checked elsewhere; here nothing that they hold may become a line or a label of its own."""
    config = pool_config()
    named = tuple(replace(config.classes[0], name=name) for name in dict.fromkeys(classes))
    levels = {item.name: PoolLevel(idle=1, hints=2) for item in named}
    source = meters()
    source.look(status(pool=pool, config=replace(config, classes=named), pools=levels))
    calls = CallCounter()
    calls.add(service, "x")
    found = read(source, calls)
    assert one(found, "remuda_api_calls_total", outcome="ok", service=service) == 1
    assert one(found, "remuda_open_provisions", pool=pool) == 0
    for name in levels:
        assert one(found, "remuda_pool_hints", pool=pool, resource_class=name) == 2


def test_the_text_is_what_prometheus_and_openmetrics_ask_for() -> None:
    source = meters()
    source.look(status(instances=[instance(1)], runs=[ended(1)]))
    text, kind = source.text(CallCounter())
    assert kind.startswith("text/plain; version=")
    assert text.endswith(b"\n")
    families = parse_text(text.decode())
    typed = {family.name: (family.type, family.documentation) for family in families}
    for item in METRICS:
        name = item.name.removesuffix("_total")
        assert typed[name] == (item.kind.value, item.what)
    newer, kind = source.text(CallCounter(), accept=OPENMETRICS)
    assert kind.startswith("application/openmetrics-text")
    read_back = list(parse_openmetrics(newer.decode()))  # type: ignore[no-untyped-call]
    assert len(read_back) == len(METRICS)


def test_names_follow_prometheus_rules() -> None:
    """As promtool's linter has them."""
    for item in METRICS:
        assert item.name.startswith("remuda_")
        assert item.name.endswith("_total") is (item.kind is Kind.COUNTER)
        assert not set(item.labels) & {"instance", "job", "le", "run", "run_id", "instance_id"}
        assert item.what.endswith(".")
    assert list(BUCKETS_S) == sorted(set(BUCKETS_S))


def test_the_alerts_in_the_docs_speak_of_what_there_is() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    rules = [rule for block in blocks for group in yaml.safe_load(block).get("groups", ()) for rule in group["rules"]]
    assert len(rules) > 5
    known = {item.name: item for item in METRICS}
    for rule in rules:
        used = re.findall(r"remuda_[a-z_]+", rule["expr"])
        assert used
        for name in used:
            definition = known[name.removesuffix("_bucket")]
            assert name.endswith("_bucket") is (definition.kind is Kind.HISTOGRAM)
        labels = {label for name in used for label in known[name.removesuffix("_bucket")].labels}
        selected = set(re.findall(r'([a-z_]+)=~?"', rule["expr"])) | set(re.findall(r"\$labels\.(\w+)", str(rule)))
        assert selected <= labels, rule["alert"]


def test_events_that_were_forgotten_are_not_taken_for_new() -> None:
    once = Once(since=NOW, limit=2)
    assert [once.admits(number, at(number)) for number in (1, 2, 3)] == [True, True, True]
    assert not once.admits(1, at(1)), "forgotten, and older than what is remembered"
    assert not once.admits(3, at(3))
    assert once.admits(4, at(4))
    assert not once.admits("late", at(1) - timedelta(milliseconds=1))
