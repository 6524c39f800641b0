"""Dashboard server as a process: responses, access control and shutdown."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from remuda.adapters.system.clock import SystemClock
from remuda.domain.instance import State
from tests.support.cli import run_cli
from tests.support.dashboard import (
    LIMIT_S,
    SAMPLE_SETS,
    Dashboard,
    SampleInstance,
    SampleStore,
    environment,
    in_sets,
    live_instances,
    prepare_store,
    remuda,
    sample_fleet,
    with_store,
    write_demand,
    write_samples,
)
from tests.support.local_backend import run_local

TOKEN = "a-token-for-the-tests"


@pytest.fixture(scope="module")
def samples(store: SampleStore) -> list[SampleInstance]:
    return store.fleet(30, 400)


@pytest.fixture
def client(dashboard: Dashboard) -> Iterator[httpx.Client]:
    # Commands run between two requests: the server would close a connection that is kept open.
    no_keepalive = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=dashboard.url, timeout=LIMIT_S, limits=no_keepalive) as opened:
        yield opened


def events(response: httpx.Response) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, id and data of each event except `update`."""
    name = tag = ""
    for line in response.iter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name, tag = value, ""
        elif field == "id":
            tag = value
        elif field == "data" and name != "update":
            yield name, tag, json.loads(value)


def snapshot(client: httpx.Client, count: int = 0) -> dict[str, Any]:
    """Return the first snapshot that contains the histories of at least `count` instances."""
    while True:
        document: dict[str, Any] = client.get("/api/snapshot").raise_for_status().json()
        if sum(item["spans"] is not None for item in document["instances"].values()) >= count:
            return document


def scraped(client: httpx.Client) -> dict[tuple[str, str], float]:
    """Return the values by metric and by its transition or state label."""
    response = client.get("/metrics").raise_for_status()
    assert response.headers["content-type"].startswith("text/plain; version=")
    found: dict[tuple[str, str], float] = defaultdict(float)
    for family in parse_text(response.text):
        for sample in family.samples:
            label = sample.labels.get("transition") or sample.labels.get("state") or ""
            found[sample.name, label] += sample.value
    return found


def test_metrics_agree_with_status_and_count_transitions(
    client: httpx.Client, store: SampleStore, samples: list[SampleInstance]
) -> None:
    found = scraped(client)
    states = Counter(item["state"] for item in remuda(store.folder, "status")["instances"])
    assert {name: found["remuda_instances", name] for name in states} == states
    assert found["remuda_api_calls_total", ""] > 0
    claims = ("remuda_transitions_total", "claim")
    assert found[claims] == 0, "events before the start are not counted"
    # Other tests use the instance with the longest history.
    idle, _ = min((sample for sample in samples if sample[0].state is State.IDLE), key=lambda sample: len(sample[1]))
    assert store.advance(idle.instance_id).state is State.CLAIMED
    while not (found := scraped(client))[claims]:
        pass
    assert found[claims] == 1
    again = scraped(client)
    assert all(again[key] >= value for key, value in found.items() if key[0].endswith("_total"))


def test_snapshot_agrees_with_the_commands(
    client: httpx.Client, store: SampleStore, samples: list[SampleInstance]
) -> None:
    document = snapshot(client, len(samples))
    assert set(document["instances"]) == {record.instance_id for record, _ in samples}
    status = remuda(store.folder, "status")
    states = {item["instance_id"]: item["state"] for item in status["instances"]}
    assert {name: document["instances"][name]["state"] for name in states} == states
    record, entries = max(samples, key=lambda sample: len(sample[1]))
    shown = document["instances"][record.instance_id]
    assert len(shown["spans"]) // 3 == len([entry for entry in entries if entry.target != "terminated"])
    assert set(shown["holders"]) == {f"run {entry.subject}" for entry in entries}
    assert "credential" not in json.dumps(document)
    explanation = client.get("/api/explanation", params={"subject": record.instance_id}).json()
    assert explanation["events"] == remuda(store.folder, "explain", record.instance_id)["events"]
    for subject, code in (("i-00000000000000000", 404), ("", 404), ("<b>", 404), ("9999", 404)):
        response = client.get("/api/explanation", params={"subject": subject})
        assert (response.status_code, bool(response.json()["error"]["message"])) == (code, True)


def test_runner_sets_agree_in_dashboard_metrics_and_commands(tmp_path: Path) -> None:
    folder, now = tmp_path / "state", SystemClock().now()
    file = prepare_store(folder, runner_sets=SAMPLE_SETS)
    samples, jobs = in_sets(sample_fleet(12, 150, now=now, seed=2), pool="default", now=now)
    write_samples(file, samples, now=now)
    hostile = replace(jobs[-1], job_id="hostile", display_name='<b>"\\\x1b[2J', repository="a/{b}", result='x"\n')
    write_demand(file, [*jobs, hostile], now=now)
    with Dashboard(folder) as started, httpx.Client(base_url=started.url, timeout=LIMIT_S) as client:
        shown = snapshot(client)["facts"]
        metrics = client.get("/metrics").raise_for_status().text
        explained = client.get("/api/explanation", params={"subject": "hostile"}).raise_for_status().json()
    status = remuda(folder, "status")
    assert [item["name"] for item in status["runner_sets"]] == [item.name for item in SAMPLE_SETS]
    values = {
        (sample.labels["runner_set"], sample.labels["state"]): sample.value
        for family in parse_text(metrics)
        if family.name == "remuda_set_jobs"
        for sample in family.samples
    }
    for item, other in zip(status["runner_sets"], shown["sets"], strict=True):
        counts = ("waiting", "assigned", "running", "hot", "warm", "launching", "max", "at_capacity", "session")
        assert {name: item[name] for name in counts} == {name: other[name] for name in counts}
        assert item["waiting"] == values[item["name"], "waiting"] > 0
    full = status["runner_sets"][1]
    assert (full["at_capacity"], full["reason"], full["session"]) == (True, "at-capacity", "open")
    assert len(shown["jobs"]) == len(jobs) + 1
    assert "{b}" not in metrics
    waiting = next(job for job in jobs if job.started_at is None and job.runner_set == full["name"])
    assert full["detail"] in remuda(folder, "explain", waiting.job_id)["next"][0]
    assert remuda(folder, "explain", f"set.{full['name']}")["kind"] == "set"
    assert explained["title"].isprintable()
    usage = remuda(folder, "report", "--since", "1d")
    assert usage["runner_sets"]["large"]["queue_wait_seconds"]["count"] > 0
    assert sum(usage["runner_sets"]["large"]["results"].values()) == usage["runner_sets"]["large"]["jobs"]


def test_counts_of_a_silent_listener_are_shown_as_old(tmp_path: Path) -> None:
    folder, now = tmp_path / "state", SystemClock().now()
    file = prepare_store(folder, runner_sets=SAMPLE_SETS)
    ended = now - timedelta(minutes=10)
    samples, jobs = in_sets(sample_fleet(12, 150, now=ended, seed=2), pool="default", now=ended)
    write_samples(file, samples, now=now)
    write_demand(file, jobs, now=ended)
    with Dashboard(folder) as started, httpx.Client(base_url=started.url, timeout=LIMIT_S) as client:
        shown = snapshot(client)["facts"]["sets"]
        metrics = client.get("/metrics").raise_for_status().text
    time = f"{ended:%Y-%m-%d %H:%M:%S} UTC"
    for item in [*remuda(folder, "status")["runner_sets"], *shown]:
        assert item["summary"].startswith("it is not known whether jobs wait; ")
        assert f" did at {time}: the listener (listener-1) is silent since {time}" in item["summary"]
    assert {item["current"] for item in shown} == {False}
    assert "remuda_set_jobs{" not in metrics
    explained = remuda(folder, "explain", f"set.{SAMPLE_SETS[0].name}")["next"]
    assert "no job waits" not in explained
    text = run_cli(["status", "--dir", str(folder)], environment=environment(), cwd=tmp_path).stdout
    assert f"{SAMPLE_SETS[0].name}: it is not known whether jobs wait" in text


def test_unchanged_snapshot_is_not_sent_again(client: httpx.Client, samples: list[SampleInstance]) -> None:
    first = client.get("/api/snapshot")
    while True:
        tag = first.headers["etag"]
        again = client.get("/api/snapshot", headers={"if-none-match": tag})
        if again.status_code == 304:
            break
        first = again
    assert again.content == b""
    assert first.headers["content-encoding"] == "gzip"
    plain = client.get("/api/snapshot", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers


def test_stream_pushes_changes_and_can_be_resumed(
    client: httpx.Client, store: SampleStore, samples: list[SampleInstance]
) -> None:
    tag = snapshot(client, len(samples))["tag"]
    one, other = live_instances(samples)[:2]
    with client.stream("GET", "/api/events", params={"since": tag}) as response:
        stream = events(response)
        moved = store.advance(one.instance_id)
        while True:
            name, tag, data = next(stream)
            assert name == "change"
            if (data["changes"].get("instances") or {}).get(one.instance_id, {}).get("state") == moved.state.value:
                break
    moved = store.advance(other.instance_id)
    seen: set[str] = set()
    with client.stream("GET", "/api/events", headers={"last-event-id": tag}) as response:
        for number, (name, _, data) in enumerate(events(response)):
            assert (name, data["since"]) == ("change", int(tag.rpartition("-")[2])) or number
            seen |= set(data["changes"].get("instances") or {})
            if other.instance_id in seen:
                break
    # Only changed instances are sent. The history of the first change may be read once more.
    assert seen <= {one.instance_id, other.instance_id}
    for unknown in ("", "other-process-3", "nonsense"):
        with client.stream("GET", "/api/events", headers={"last-event-id": unknown}) as response:
            assert next(events(response))[0] == "reset"


def test_unreadable_record_does_not_hide_the_others(tmp_path: Path) -> None:
    store = SampleStore(tmp_path / "state")
    (bad_history, _), (bad_record, _), *others = store.fleet(6, 60)

    def corrupt(connection: sqlite3.Connection) -> None:
        connection.execute("UPDATE history SET doc = '{' WHERE instance_id = ?", (bad_history.instance_id,))
        connection.execute(
            "UPDATE instances SET doc = '{}', state = 'idle' WHERE instance_id = ?", (bad_record.instance_id,)
        )

    with_store(store.file, corrupt)
    with Dashboard(store.folder) as dashboard, httpx.Client(base_url=dashboard.url, timeout=LIMIT_S) as client:
        document = snapshot(client, 5)
    assert set(document["instances"]) == {bad_history.instance_id, *(record.instance_id for record, _ in others)}
    assert document["instances"][bad_history.instance_id]["state"] == bad_history.state.value
    assert [item["kind"] for item in document["facts"]["warnings"]["shown"]] == ["sweeper", "unreadable"]
    assert bad_record.instance_id in document["facts"]["warnings"]["shown"][1]["text"]


def test_only_reads_with_a_loopback_host_header_are_served(client: httpx.Client, dashboard: Dashboard) -> None:
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"
    assert "server" not in page.headers
    for path in ("/", "/api/snapshot", "/style.css", "/nothing"):
        assert client.get(path, headers={"host": f"evil.example:{dashboard.port}"}).status_code == 421
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert client.request(method, "/api/snapshot").status_code == 405
    assert client.get("/../pyproject.toml").status_code == 404
    missing = client.get("/nothing")
    assert (missing.status_code, missing.headers["content-security-policy"]) == (404, policy)
    for path in ("/api/snapshot", "/api/explanation?subject=1", "/metrics"):
        assert client.get(path, headers={"sec-fetch-site": "cross-site"}).status_code == 403
        assert client.get(path, headers={"sec-fetch-site": "same-origin"}).status_code != 403
    assert page.headers["cache-control"] == "private, no-cache"
    etag = page.headers["etag"]
    assert client.get("/", headers={"if-none-match": etag}).status_code == 304


def test_every_route_requires_the_token(store: SampleStore, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    with (
        Dashboard(store.folder, "--token-file", str(file), "--host", "0.0.0.0") as dashboard,  # noqa: S104 - with a token
        httpx.Client(base_url=f"http://127.0.0.1:{dashboard.port}", timeout=LIMIT_S) as client,
    ):
        for path in ("/api/snapshot", "/api/events", "/api/explanation?subject=1", "/app.js", "/nothing"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers={"authorization": "Bearer wrong"}).status_code == 401
        assert client.get("/").headers["location"] == "/login"
        assert client.get("/login").status_code == client.get("/style.css").status_code == 200
        assert client.get("/api/snapshot", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        for body in (b"", b"token=wrong", b"token=" + b"x" * 100_000, b"\xff\xfe"):
            response = client.post("/login", content=body)
            assert (response.headers["location"], "set-cookie" in response.headers) == ("/login?invalid=1", False)
        response = client.post("/login", data={"token": TOKEN})
        assert "HttpOnly" in response.headers["set-cookie"]
        assert "SameSite=strict" in response.headers["set-cookie"]
        assert TOKEN not in str(response.headers)
        assert client.get("/api/snapshot").status_code == 200
        # With a token, any host name is accepted.
        assert client.get("/api/snapshot", headers={"host": "ci.example"}).status_code == 200
        code, stderr = dashboard.interrupt()
    assert (code, TOKEN in stderr) == (130, False)


def test_any_host_name_is_accepted_with_a_token(store: SampleStore) -> None:
    with (
        Dashboard(store.folder, REMUDA_DASHBOARD_TOKEN=TOKEN) as dashboard,
        httpx.Client(base_url=dashboard.url, timeout=LIMIT_S, headers={"host": "ci.example"}) as client,
    ):
        assert client.get("/api/snapshot").status_code == 401
        assert client.get("/api/snapshot", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
        for scheme, secure in (("https", True), ("https, http", True), ("http", False)):
            response = client.post("/login", data={"token": TOKEN}, headers={"x-forwarded-proto": scheme})
            assert ("Secure" in response.headers["set-cookie"]) == secure


def test_shutdown_closes_open_streams(store: SampleStore) -> None:
    with Dashboard(store.folder) as dashboard, httpx.Client(base_url=dashboard.url, timeout=LIMIT_S) as client:
        with client.stream("GET", "/api/events") as response:
            stream = events(response)
            assert next(stream)[0] == "reset"
            code, stderr = dashboard.interrupt()
            # The stream ends properly.
            assert [name for name, _, _ in stream if name != "change"] == []
        assert (code, "Traceback" in stderr) == (130, False)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--host", "0.0.0.0"), "--host"),  # noqa: S104 - rejected
        (("--since", "soon"), "--since"),
        ((), "--dir"),
    ],
)
def test_invalid_options_are_rejected(tmp_path: Path, arguments: tuple[str, ...], field: str) -> None:
    done = run_local(tmp_path / "none", "dashboard", *arguments, environment=environment())
    assert done.code == 2, done.stderr
    assert done.document["error"]["field"] == field


def test_port_in_use_is_reported(store: SampleStore, dashboard: Dashboard) -> None:
    done = run_local(store.folder, "dashboard", "--port", str(dashboard.port), environment=environment())
    assert (done.code, done.document["error"]["fix"]) == (2, "use --port 0 for a free port")
